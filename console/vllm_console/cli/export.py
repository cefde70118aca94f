"""``vllm-console export prometheus|grafana [PRESET|NAME]``: objectives for others' monitoring."""

from __future__ import annotations

import argparse
import sys

from vllm_console.alerts.prometheus import MatchError, Target, checked_match, model_match
from vllm_console.cli.common import add_json, open_fleet, print_json
from vllm_console.fleet.api import NotFoundError, UsageError
from vllm_console.fleet.model import ServerView

FORMS = ("prometheus", "grafana")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("form", choices=FORMS, metavar="|".join(FORMS), help="alerting rules (YAML), or a dashboard")
    parser.add_argument(
        "name", nargs="?", metavar="PRESET|NAME", help="whose objectives (default: ours, for every vLLM server)"
    )
    parser.add_argument(
        "--match",
        metavar="MATCHERS",
        help='PromQL label matchers of the series, e.g. job="vllm" (default: the model\'s)',
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print it."""
    target = _target(args)
    if args.form == "grafana":
        from vllm_console.alerts.grafana import dashboard

        print_json(dashboard(target))
    elif args.json:
        from vllm_console.alerts.prometheus import rules_document

        print_json(rules_document(target))
    else:
        from vllm_console.alerts.prometheus import rules_yaml

        sys.stdout.write(rules_yaml(target))
    return 0


def _target(args: argparse.Namespace) -> Target:
    """Whose objectives, and which series. A server's come before those of a preset of the same name."""
    from vllm_console.alerts.objectives import goals_of
    from vllm_console.diagnosis.conditions.rule import DEFAULT_OBJECTIVES

    try:
        match = checked_match(args.match) if args.match is not None else None
    except MatchError as error:
        raise UsageError(f"--match: {error}") from error
    if args.name is None:
        return Target(DEFAULT_OBJECTIVES, "our default", match=match or "")
    fleet = open_fleet(args)
    server = fleet.snapshot().server(args.name)
    if server is not None:
        found = model_match(served_model(server)) if match is None else match
        return Target(*goals_of(server.objectives, server.preset), server.name, found)
    preset = next((preset for preset in fleet.presets()[0] if preset.name == args.name), None)
    if preset is None:
        raise NotFoundError(f"no server and no preset is called '{args.name}'; see 'vllm-console list' and 'presets'")
    # Another model may be launched from a preset: its series are not narrowed down to the preset's own.
    return Target(*goals_of(preset.objectives, preset.name), preset.name, match or "")


def served_model(server: ServerView) -> str:
    """The name that a server's series carry: as reported, as set by flag, or its model's."""
    reported = server.sample.model_name if server.sample is not None else None
    named = str(server.flags.get("served-model-name", "")).split()
    return reported or (named[0] if named else server.model)

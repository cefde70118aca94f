"""``vllm-console export FORMAT``: what Prometheus and Grafana need to monitor vLLM, and proxies to find it."""

from __future__ import annotations

import argparse
import sys

from vllm_console.alerts.prometheus import (
    AlertTarget,
    MatchError,
    Scrape,
    checked_match,
    job_of,
    model_match,
    rules_document,
    rules_yaml,
    scrape_document,
    scrape_yaml,
)
from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.left_out import tell_left_out
from vllm_console.cli.options import add_json
from vllm_console.cli.output import complain, print_json
from vllm_console.diagnosis.live.rule import DEFAULT_OBJECTIVES, objectives_of
from vllm_console.fleet.snapshot import ServerView
from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.plan.export.proxies import ProxiedServer, ProxyForm, export_for_proxy, proxy_warning
from vllm_launchers.plan.export.quoting import ExportError
from vllm_launchers.plan.flags import served_name
from vllm_launchers.vllm.flags.changes import Changes

PROXIES = tuple(map(str, ProxyForm))
FORMS = ("prometheus", "grafana", "scrape", *PROXIES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("form", choices=FORMS, metavar="|".join(FORMS),
                        help="alerting rules (YAML), a dashboard, what Prometheus scrapes (YAML), or servers as "
                        "configuration of a proxy")  # fmt: skip
    parser.add_argument(
        "name", nargs="*", metavar="PRESET|NAME",
        help="objectives to export (default: built-in, for every vLLM server); for a proxy your servers, the "
        "preferred one first",
    )  # fmt: skip
    parser.add_argument(
        "--match",
        metavar="MATCHERS",
        help='PromQL label matchers of the series, e.g. job="vllm" (default: the model\'s)',
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the requested export."""
    if args.form in PROXIES:
        return _export_for_proxy(args)
    if len(args.name) > 1:
        raise UsageError(f"export {args.form} takes one name")
    args.name = args.name[0] if args.name else None
    target, scrape = _target(args)
    if args.form == "scrape":
        if args.json:
            print_json(scrape_document(scrape))
        else:
            sys.stdout.write(scrape_yaml(scrape))
    elif args.form == "grafana":
        from vllm_console.alerts.grafana import dashboard

        print_json(dashboard(target))
    elif args.json:
        print_json(rules_document(target))
    else:
        sys.stdout.write(rules_yaml(target, scrape))
    return 0


def _export_for_proxy(args: argparse.Namespace) -> int:
    """Print servers as a proxy configuration; stopped ones too, as they last ran."""
    if not args.name:
        raise UsageError(f"export {args.form} needs a server's name; see 'vllm-console list --ours'")
    if args.match is not None:
        raise UsageError("--match belongs to the exports for Prometheus and Grafana")
    fleet = open_fleet(args, observe=False)
    servers = [ProxiedServer(name, fleet.plan_restart(name, Changes())) for name in dict.fromkeys(args.name)]
    try:
        text = export_for_proxy(servers, ProxyForm(args.form))
    except ExportError as error:
        raise OperationError(f"export {args.form}: {error}") from error
    if warning := proxy_warning(servers, ProxyForm(args.form)):
        complain(warning)
    if args.form == ProxyForm.LLAMA_SWAP:
        # It starts the servers; other proxies only find them.
        how = "set those that they need in the environment of llama-swap, from which its servers inherit"
        tell_left_out((server.plan for server in servers), how)
    if args.json:
        names = [server.name for server in servers]
        print_json({"form": args.form, "servers": names, "warning": warning or None, "text": text})
    else:
        sys.stdout.write(text)
    return 0


def _target(args: argparse.Namespace) -> tuple[AlertTarget, Scrape]:
    """Whose objectives, which series, and what to scrape for them.

    A server takes precedence over a preset of the same name.
    """
    try:
        match = checked_match(args.match) if args.match is not None else None
    except MatchError as error:
        raise UsageError(f"--match: {error}") from error
    if args.name is None:
        return AlertTarget(DEFAULT_OBJECTIVES, "our default", match=match or ""), Scrape(job=job_of(match or ""))
    fleet = open_fleet(args)
    server = fleet.snapshot().server(args.name)
    if server is not None:
        found = model_match(served_model(server)) if match is None else match
        scrape = Scrape(_address(server), job_of(found), server.tls)
        return AlertTarget(*objectives_of(server.objectives, server.preset), server.name, found), scrape
    preset = next((preset for preset in fleet.presets()[0] if preset.name == args.name), None)
    if preset is None:
        raise NotFoundError(f"no server and no preset is called '{args.name}'; see 'vllm-console list' and 'presets'")
    # Other models may be launched from a preset, so its series are not narrowed to the preset's own model.
    target = AlertTarget(*objectives_of(preset.objectives, preset.name), preset.name, match or "")
    return target, Scrape(job=job_of(match or ""))


def _address(server: ServerView) -> str:
    """Host and port at which Prometheus on this machine reaches it."""
    return server.url.partition("://")[2].rstrip("/")


def served_model(server: ServerView) -> str:
    """The model name in a server's series: as reported, as set by a flag, or its model's name."""
    reported = server.sample.model_name if server.sample is not None else None
    return reported or served_name(server.flags, server.model)

"""``vllm-console plan PRESET``: what a launch would be, whether it can be, and why; nothing is started."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_console.cli.common import add_changes, add_json, changes_from, open_fleet, print_json
from vllm_console.cli.host_source import add_host
from vllm_console.cli.launch_words import add_request, gpus_from, pairs_from
from vllm_console.fleet.api import Fleet, FleetError, NoPlaceError
from vllm_console.fleet.model import LaunchRequest

if TYPE_CHECKING:
    from vllm_launchers.plan.model import Plan

FORMS = ("shell", "config", "systemd", "systemd-user", "compose", "kubernetes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    add_request(parser, gpus="the best free set where GPUs are known")
    parser.add_argument("--vllm-version", metavar="V", help="plan for this release, which need not be installed")
    add_host(parser)
    add_changes(parser)
    parser.add_argument("--hub", action="store_true", help="ask the Hugging Face hub for a model that is not here")
    parser.add_argument("--export", choices=FORMS, metavar="FORM", help=f"print it as {', '.join(FORMS)}")
    parser.add_argument("--name", default="", help="what an exported unit or service is called")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 1 when an error stands in its way."""
    from vllm_console.cli.plan_words import plan_document, plan_lines
    from vllm_launchers.plan.checks.check import errors

    if args.host is not None:
        args.host_file = args.host
    plan = _plan(open_fleet(args, observe=False), _request(args))
    failed = bool(errors(plan.findings))
    if args.export:
        print(_exported(plan, args.export, args.name), end="")
        if failed:
            print("vllm-console: this would not start, see it without --export", file=sys.stderr)
    elif args.json:
        print_json(plan_document(plan))
    else:
        for line in plan_lines(plan, ascii_only=args.ascii):
            print(line)
    return 1 if failed else 0


def _request(args: argparse.Namespace) -> LaunchRequest:
    return LaunchRequest(
        preset=args.preset,
        model=args.model,
        engine=args.engine,
        vllm=args.vllm,
        port=args.port,
        changes=changes_from(args),
        environment=pairs_from(args.env),
        gpus=gpus_from(args.gpus),
        place={None: "offered", "auto": "auto"}.get(args.gpus, ""),
        vllm_version=args.vllm_version,
        from_hub=args.hub,
    )


def _plan(fleet: Fleet, request: LaunchRequest) -> Plan:
    """The plan. Where no GPUs will do it is made for the best of them, and what is wrong with these stands in it."""
    from vllm_launchers.plan.findings import Finding, Level, by_weight

    try:
        return fleet.plan(request)
    except NoPlaceError as error:
        best = error.sets[0] if error.sets else None
        slice_of = best.mig.uuid if best is not None and best.mig is not None else ""
        plan = fleet.plan(replace(request, place=slice_of, gpus=best.gpus if best is not None else ()))
        said = Finding("no_gpus", Level.ERROR, str(error), surely=False)
        return replace(plan, findings=by_weight((said, *plan.findings)))


def _exported(plan: Plan, form: str, name: str) -> str:
    from vllm_launchers.plan.export import Form, export
    from vllm_launchers.plan.export.errors import ExportError

    try:
        return export(plan, Form(form), name=name)
    except ExportError as error:
        raise FleetError(f"--export {form}: {error}") from error

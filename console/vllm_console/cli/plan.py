"""``vllm-console plan PRESET``: what a launch would do and whether it can start; nothing is started."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.host_source import add_host
from vllm_console.cli.left_out import tell_left_out
from vllm_console.cli.options import (
    add_changes,
    add_json,
    add_nodes,
    add_probe,
    add_request,
    request_from,
    text_from,
)
from vllm_console.cli.output import complain, show
from vllm_console.text import plain
from vllm_launchers.errors import OperationError
from vllm_launchers.launch.errors import NoPlaceError

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_launchers.launch.request import LaunchRequest
    from vllm_launchers.plan.model import Plan

FORMS = (
    *("shell", "config", "systemd", "systemd-user", "compose", "kubernetes"),
    *("kserve", "llm-d", "production-stack"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_request(parser, gpus="the best free set where GPUs are known")
    parser.add_argument("--vllm-version", metavar="V", help="plan for this vLLM release (need not be installed)")
    add_nodes(parser)
    add_host(parser)
    add_changes(parser)
    add_probe(parser)
    parser.add_argument(
        "--ask-vllm", action="store_true", help="let the installed vLLM validate the flags, which takes about 10 s"
    )
    parser.add_argument("--hub", action="store_true", help="fetch model facts from the Hugging Face hub if not cached")
    parser.add_argument("--export", choices=FORMS, metavar="FORM", help=f"print it as {', '.join(FORMS)}")
    parser.add_argument("--name", type=text_from, help="name of the exported unit or service")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan; exit code 1 if an error blocks it.

    An export is meant for another machine or another time, so errors caused by this machine's current state (offline,
    model missing, memory in use) go to stderr and do not affect the exit code. Unless a port is given, an export uses
    vLLM's default port instead of one that is free here now.
    """
    from vllm_console.cli.plan_text import plan_document, plan_lines
    from vllm_launchers.plan.checks.check import errors, errors_anywhere

    if args.host is not None:
        args.host_file = args.host
    plan = plan_of(open_fleet(args, observe=False), _request(args), ask=args.ask_vllm)
    failed = bool(errors(plan.findings))
    if args.export:
        print(_exported(plan, args.export, args.name or ""), end="")
        if args.export == "systemd":
            _tell_closed(plan)
        tell_left_out((plan,), "add those it needs with --env")
        everywhere = errors_anywhere(plan.findings)
        failed = bool(everywhere)
        for finding in errors(plan.findings):
            if finding.code == "port_taken" and args.port is None:
                complain(f"note: port {plan.port} is in use on this machine; choose another with --port")
                continue
            where = "this would not start" if finding in everywhere else "on this machine now"
            print(f"vllm-console: {where}: {plain(finding.message)} [{finding.code}]", file=sys.stderr)
    else:
        show(args, lambda: plan_document(plan), lambda: plan_lines(plan, ascii_only=args.ascii))
    return 1 if failed else 0


def _request(args: argparse.Namespace) -> LaunchRequest:
    from vllm_launchers.launch.planner import FIRST_PORT

    request = replace(request_from(args, "offered"), vllm_version=args.vllm_version, from_hub=args.hub)
    return replace(request, port=FIRST_PORT) if args.export and args.port is None else request


def plan_of(fleet: LocalFleet, request: LaunchRequest, *, ask: bool) -> Plan:
    """The plan, with vLLM's own verdict if ``ask`` is set.

    If no GPUs are suitable, it is made for the named ones or the best set, and its findings describe the problems.
    """
    from vllm_launchers.plan.findings import Level, PlanFinding, by_weight

    planned = partial(_judged, fleet) if ask else fleet.plan
    try:
        return planned(request)
    except NoPlaceError as error:
        if not request.gpus:
            best = error.sets[0] if error.sets else None
            slice_of = best.mig.uuid if best is not None and best.mig is not None else ""
            request = replace(request, place=slice_of, gpus=best.gpus if best is not None else ())
        plan = planned(replace(request, beyond_shares=True))
        finding = PlanFinding("no_gpus", Level.ERROR, str(error), surely=False)
        return replace(plan, findings=by_weight((finding, *plan.findings)))


def _judged(fleet: LocalFleet, request: LaunchRequest) -> Plan:
    judged = fleet.judged_plan(request)
    assert judged is not None, "nothing else is asked here"
    return judged


def _tell_closed(plan: Plan) -> None:
    """Report which folders the account of a system unit cannot enter."""
    from vllm_launchers.plan.export.systemd import ACCOUNT

    paths = [path for path in (plan.engine.command[0], plan.model) if path.startswith("/")]
    closed = dict.fromkeys(folder for path in paths for folder in _closed(Path(path)))
    for folder in closed:
        complain(
            f"note: the unit runs as {ACCOUNT}, which can't enter {folder}: install vLLM and the model elsewhere, "
            "such as below /opt, or use --export systemd-user"
        )


def _closed(path: Path) -> list[Path]:
    """The first folder on the path to a file, also behind links, that only its owner or group may enter."""
    for folder in (*reversed(path.parents), *reversed(Path(os.path.realpath(path)).parents)):
        try:
            if not folder.stat().st_mode & stat.S_IXOTH:
                return [folder]
        except OSError:
            return []
    return []


def _exported(plan: Plan, form: str, name: str) -> str:
    from vllm_launchers.plan.export import Form, export
    from vllm_launchers.plan.export.quoting import ExportError

    try:
        return export(plan, Form(form), name=name)
    except ExportError as error:
        raise OperationError(f"--export {form}: {error}") from error

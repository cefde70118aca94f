"""``vllm-console start PRESET``: launch a server."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from vllm_console.cli.common import add_changes, add_json, changes_from, open_fleet, report, settled, wait_until
from vllm_console.cli.launch_words import add_request, gpus_from, pairs_from
from vllm_console.fleet.model import LaunchRequest, State
from vllm_console.text import plain

if TYPE_CHECKING:
    from vllm_launchers.plan.model import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    add_request(parser, gpus="none")
    parser.add_argument("--name", help="what the server is called (default: the preset's name)")
    parser.add_argument("--host", help="address to bind (default 127.0.0.1)")
    add_changes(parser)
    parser.add_argument("--restart", choices=["never", "on-failure"], default="never", help="restart by itself?")
    parser.add_argument("--force", action="store_true", help="start in spite of errors that may be wrong or may pass")
    parser.add_argument("--wait", action="store_true", help="return when it is ready, or has failed")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="how long --wait waits")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Launch it."""
    fleet = open_fleet(args)
    request = LaunchRequest(
        preset=args.preset,
        model=args.model,
        engine=args.engine,
        vllm=args.vllm,
        name=args.name,
        host=args.host,
        port=args.port,
        changes=changes_from(args),
        environment=pairs_from(args.env),
        restart=args.restart,
        gpus=gpus_from(args.gpus),
        place=args.gpus if args.gpus == "auto" else "",
        force=args.force,
    )
    _warn(fleet.plan(request))
    server = fleet.start(request)
    _say_what_ends_it()
    if request.place and (why := server.reasons.get("gpus")):
        print(f"GPU {plain(why)}", file=sys.stderr)
    if args.wait:
        server = wait_until(fleet, server.name, settled, quiet=args.json, timeout=args.timeout)
    return report(args, server, wanted=State.READY if args.wait else None)


def _say_what_ends_it() -> None:
    """Say where a logout would end it."""
    from vllm_launchers.machine.session_end import session_end

    if sentence := session_end():
        print(plain(f"warning: {sentence}"), file=sys.stderr)


def _warn(plan: Plan) -> None:
    """Say what will hurt it; what stands in its way is the start's own to say."""
    from vllm_console.fleet.refusing import finding_words
    from vllm_launchers.plan.findings import Level

    for finding in plan.findings:
        if finding.level is Level.WARNING:
            print(plain(f"warning: {finding_words(finding)}"), file=sys.stderr)

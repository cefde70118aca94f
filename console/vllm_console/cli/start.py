"""``vllm-console start PRESET``: launch a server."""

from __future__ import annotations

import argparse
import sys

from msgspec.structs import replace

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import (
    add_changes,
    add_json,
    add_nodes,
    add_probe,
    add_request,
    add_warm_up,
    request_from,
    text_from,
    timeout_from,
)
from vllm_console.cli.output import warn_of_plan
from vllm_console.cli.waiting import is_settled, report_server, wait_until
from vllm_console.text import plain
from vllm_launchers.errors import UsageError
from vllm_launchers.host.gpu.document import recorded_hosts
from vllm_launchers.keeper.records import State


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Launch a server from a preset. For a recorded host, name it before the command: vllm-console --host 4xa6000 "
        "start chatbot --engine simulated."
    )
    add_request(parser, gpus="vLLM chooses; on a recorded host the best free set")
    parser.add_argument("--name", type=text_from, help="server name (default: the preset's name)")
    parser.add_argument("--host", type=text_from, help="address to bind (default 127.0.0.1)")
    add_changes(parser)
    add_nodes(parser)
    parser.add_argument(
        "--restart",
        choices=["never", "on-failure"],
        default="never",
        help="restart the server if it fails (default: never)",
    )
    parser.add_argument("--force", action="store_true", help="start despite errors that are estimates or temporary")
    add_warm_up(parser)
    add_probe(parser)
    parser.add_argument("--wait", action="store_true", help="wait until it is ready or has failed")
    parser.add_argument(
        "--timeout", type=timeout_from, default=1800, metavar="DURATION", help="timeout of --wait (default 30m)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Launch the server."""
    if args.host is not None and args.host in recorded_hosts():
        raise UsageError(
            f"After 'start', --host sets the bind address. For a recorded host: vllm-console --host {args.host} start …"
        )
    fleet = open_fleet(args)
    request = replace(
        request_from(args),
        name=args.name,
        host=args.host,
        restart=args.restart,
        force=args.force,
        warm_up=args.warm_up,
    )
    server = fleet.start(request, warn_of_plan)
    _say_what_ends_it()
    if request.place and (why := server.reasons.get("gpus")):
        print(f"GPU {plain(why)}", file=sys.stderr)
    if args.wait:
        server = wait_until(fleet, server.name, is_settled, quiet=args.json, timeout=args.timeout)
    return report_server(args, server, wanted=State.READY if args.wait else None)


def _say_what_ends_it() -> None:
    """Warn if a logout would end the server."""
    from vllm_launchers.host.session_end import session_end

    if sentence := session_end():
        print(plain(f"warning: {sentence}"), file=sys.stderr)

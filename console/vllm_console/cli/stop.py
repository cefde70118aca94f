"""``vllm-console stop NAME``: stop a server and see that nothing of it is left."""

from __future__ import annotations

import argparse
import sys

from vllm_console.cli.common import add_json, open_fleet, report, wait_until
from vllm_console.cli.host_source import watched_gpus
from vllm_console.fleet.model import State
from vllm_console.fleet.releases import still_held
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("name")
    parser.add_argument("--no-wait", action="store_true", help="return at once")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="how long to wait at most")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Stop it; returns when it has stopped and its GPU memory is back, or says who holds that."""
    fleet = open_fleet(args)
    if args.no_wait:
        server = fleet.stop(args.name)
    else:
        with watched_gpus(args) as look:
            before = look() if look is not None else None
            fleet.stop(args.name)
            server = wait_until(
                fleet, args.name, lambda view: not view.state.alive, quiet=args.json, timeout=args.timeout
            )
            if look is not None and before is not None and (held := still_held(args.name, before, look)):
                print(plain(f"! {args.name}: {held}"), file=sys.stderr)
    # A server that had failed before it was stopped is as stopped as can be.
    code = report(args, server, wanted=None)
    return 0 if server.state is State.FAILED else code

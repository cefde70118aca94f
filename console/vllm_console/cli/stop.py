"""``vllm-console stop NAME``, ``remove NAME``, ``sleep NAME`` and ``wake NAME``: free a server's GPUs.

``remove`` deletes a stopped server. ``sleep`` and ``wake`` hand the GPUs over to the other server of a pair, and back.
"""

from __future__ import annotations

import argparse
import sys

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.host_source import watched_gpus
from vllm_console.cli.options import add_json, timeout_from
from vllm_console.cli.output import print_json
from vllm_console.cli.waiting import report_server, wait_until, warn_of_tuner
from vllm_console.fleet.gpus import still_held
from vllm_console.fleet.types import DRAIN_SECONDS
from vllm_console.text import plain, round_duration
from vllm_launchers.keeper.records import State


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    parser.add_argument("--no-wait", action="store_true", help="return immediately")
    parser.add_argument(
        "--timeout", type=timeout_from, default=300, metavar="DURATION", help="how long to wait (default 5m)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Stop the server. Returns when it has stopped and its GPU memory is free, or reports who still holds it."""
    fleet = open_fleet(args)
    warn_of_tuner(fleet.snapshot().server(args.name))
    if args.no_wait:
        server = fleet.stop(args.name)
    else:
        with watched_gpus(args) as sample:
            before = sample() if sample is not None else None
            fleet.stop(args.name)
            server = wait_until(
                fleet, args.name, lambda view: not view.state.alive, quiet=args.json, timeout=args.timeout
            )
            if sample is not None and before is not None and (held := still_held(args.name, before, sample)):
                print(plain(f"! {args.name}: {held}"), file=sys.stderr)
    # A server that failed before it was stopped counts as stopped.
    code = report_server(args, server, wanted=None)
    return 0 if server.state is State.FAILED else code


def add_remove_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    parser.add_argument(
        "--purge", action="store_true", help="also delete its history, and that of earlier servers with this name"
    )
    add_json(parser)


def run_remove(args: argparse.Namespace) -> int:
    """Remove the server's record and log; keep its history unless ``--purge`` is given."""
    kept = open_fleet(args).forget(args.name, purge=args.purge)
    if args.json:
        print_json({"name": args.name, "removed": True, "history_kept": kept})
    elif kept:
        print(f"{args.name}: removed; 'vllm-console replay {args.name}' shows its newest run, for 30 days")
    else:
        print(f"{args.name}: removed{', with its history' if args.purge else ''}")
    return 0


def add_sleep_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_sleep(parser)
    add_json(parser)


def add_sleep(parser: argparse.ArgumentParser, who: str = "") -> None:
    """Add the options for going to sleep: the level, and how long requests may take to finish.

    ``who`` sleeps, if that is not the server in question.
    """
    of = f"{who}: " if who else ""
    parser.add_argument(
        "--level", type=int, choices=[1, 2], default=1,
        help=f"{of}1: keep the weights in host memory; 2: discard them and reload (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--drain", type=timeout_from, default=DRAIN_SECONDS, metavar="DURATION",
        help=f"{of}how long to wait for its requests; if any remain, it keeps serving (default "
             f"{round_duration(DRAIN_SECONDS)})",
    )  # fmt: skip


def run_sleep(args: argparse.Namespace) -> int:
    """Put the server to sleep; returns once it sleeps."""
    server = open_fleet(args).sleep(args.name, level=args.level, drain_seconds=args.drain, say=say)
    return report_server(args, server, wanted=State.ASLEEP)


def say(sentence: str) -> None:
    """Print a step to stderr."""
    print(plain(sentence), file=sys.stderr, flush=True)


def add_wake_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_sleep(parser, "its partner")
    add_json(parser)


def run_wake(args: argparse.Namespace) -> int:
    """Wake the server; returns once it responds as before it slept."""
    server = open_fleet(args).wake(args.name, level=args.level, drain_seconds=args.drain, say=say)
    return report_server(args, server, wanted=State.READY)

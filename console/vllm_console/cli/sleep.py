"""``vllm-console sleep NAME`` and ``wake NAME``: free a server's GPUs for the other server of its pair, and back."""

from __future__ import annotations

import argparse
import sys

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json, seconds_from
from vllm_console.cli.waiting import report_server
from vllm_console.fleet.snapshot import State
from vllm_console.fleet.verbs import DRAIN_SECONDS
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_sleep(parser)
    add_json(parser)


def add_sleep(parser: argparse.ArgumentParser) -> None:
    """How a server goes to sleep: level, and how long its requests may take."""
    parser.add_argument(
        "--level", type=int, choices=[1, 2], default=1,
        help="1: keep the weights in host memory; 2: drop them and reload (default 1)",
    )  # fmt: skip
    parser.add_argument(
        "--drain", type=seconds_from, default=DRAIN_SECONDS, metavar="S",
        help=f"timeout for its requests to end; if some are left, it keeps serving (default {DRAIN_SECONDS:g})",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Put it to sleep; returns when it sleeps."""
    server = open_fleet(args).sleep(args.name, level=args.level, drain_seconds=args.drain, say=say)
    return report_server(args, server, wanted=State.ASLEEP)


def say(sentence: str) -> None:
    """Print a step to stderr."""
    print(plain(sentence), file=sys.stderr, flush=True)


def add_wake_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_sleep(parser)
    add_json(parser)


def run_wake(args: argparse.Namespace) -> int:
    """Wake it up; returns when it answers as before it slept."""
    server = open_fleet(args).wake(args.name, level=args.level, drain_seconds=args.drain, say=say)
    return report_server(args, server, wanted=State.READY)

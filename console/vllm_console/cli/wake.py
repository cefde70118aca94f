"""``vllm-console wake NAME``: wake a server up; the other server of its standby pair goes to sleep first."""

from __future__ import annotations

import argparse

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.sleep import add_sleep, say
from vllm_console.cli.waiting import report_server
from vllm_console.fleet.snapshot import State


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_sleep(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Wake it up; returns when it answers as before it slept."""
    server = open_fleet(args).wake(args.name, level=args.level, drain_seconds=args.drain, say=say)
    return report_server(args, server, wanted=State.READY)

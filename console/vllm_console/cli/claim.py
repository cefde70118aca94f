"""``vllm-console claim GPU --until TIME``: announce that GPUs are taken. Advisory, not a lock."""

from __future__ import annotations

import argparse
import time

from vllm_console.cli.board import show
from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("gpus", nargs="+", metavar="GPU", help="GPU indices, e.g. 2 or 0,1")
    parser.add_argument(
        "--until", required=True, metavar="TIME", help="a time (18:00) or duration (2h, 90m, 1d); at most 14 days"
    )
    parser.add_argument("--why", default="", metavar="TEXT", help="reason, shown to others")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Claim them; refused if another user has."""
    from vllm_console.fleet.board import parse_gpu_indices, until_from

    fleet = open_fleet(args, observe=False)
    show(fleet.claim(parse_gpu_indices(args.gpus), until_from(args.until, time.time()), args.why), as_json=args.json)
    return 0

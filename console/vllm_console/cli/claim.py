"""``vllm-console claim GPU --until TIME``: tell others that GPUs are taken. A word, no lock."""

from __future__ import annotations

import argparse
import time

from vllm_console.cli.board import show
from vllm_console.cli.common import add_json, open_fleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("gpus", nargs="+", metavar="GPU", help="indices, such as 2 or 0,1")
    parser.add_argument(
        "--until", required=True, metavar="TIME", help="18:00, or how long: 2h, 90m, 1d (14 days at most)"
    )
    parser.add_argument("--why", default="", metavar="TEXT", help="what for, for others to read")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Claim them; refused where somebody else has."""
    from vllm_console.fleet.board import gpus_from_words, until_from

    fleet = open_fleet(args, observe=False)
    show(fleet.claim(gpus_from_words(args.gpus), until_from(args.until, time.time()), args.why), as_json=args.json)
    return 0

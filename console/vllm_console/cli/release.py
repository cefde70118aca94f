"""``vllm-console release [GPU]``: take one's own claims back."""

from __future__ import annotations

import argparse

from vllm_console.cli.board import show
from vllm_console.cli.common import add_json, open_fleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument(
        "gpus", nargs="*", metavar="GPU", help="indices, such as 2 or 0,1 (default: all that you claim)"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Take them back."""
    from vllm_console.fleet.board import gpus_from_words

    gpus = gpus_from_words(args.gpus) if args.gpus else ()
    show(open_fleet(args, observe=False).release(gpus), as_json=args.json)
    return 0

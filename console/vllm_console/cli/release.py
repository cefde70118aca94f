"""``vllm-console release [GPU]``: release your own claims."""

from __future__ import annotations

import argparse

from vllm_console.cli.board import show
from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("gpus", nargs="*", metavar="GPU", help="GPU indices, e.g. 2 or 0,1 (default: all your claims)")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Release them."""
    from vllm_console.fleet.board import parse_gpu_indices

    gpus = parse_gpu_indices(args.gpus) if args.gpus else ()
    show(open_fleet(args, observe=False).release(gpus), as_json=args.json)
    return 0

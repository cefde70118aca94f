"""``vllm-console detach NAME``: forget an attached endpoint."""

from __future__ import annotations

import argparse

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Forget the endpoint or machine; its recorder ends, and its history is kept for replays."""
    kept = open_fleet(args, observe=False).detach(args.name)
    if args.json:
        print_json({"name": args.name, "detached": True, "history_kept": kept})
    elif kept:
        print(f"{args.name}: detached; 'vllm-console replay {args.name}' shows its newest run, for 30 days")
    else:
        print(f"{args.name}: detached")
    return 0

"""``vllm-console remove NAME``: delete a server that is down."""

from __future__ import annotations

import argparse

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    parser.add_argument(
        "--purge", action="store_true", help="delete its history, too, and that of earlier servers with this name"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Remove its record and log; keep its history unless it is to be purged."""
    kept = open_fleet(args).forget(args.name, purge=args.purge)
    if args.json:
        print_json({"name": args.name, "removed": True, "history_kept": kept})
    elif kept:
        print(f"{args.name}: removed; 'vllm-console replay {args.name}' shows its newest run, for 30 days")
    else:
        print(f"{args.name}: removed{', with its history' if args.purge else ''}")
    return 0

"""``vllm-console remove NAME``: forget a server that is down."""

from __future__ import annotations

import argparse

from vllm_console.cli.common import add_json, open_fleet, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("name")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Remove its record, log and history."""
    open_fleet(args).forget(args.name)
    if args.json:
        print_json({"name": args.name, "removed": True})
    else:
        print(f"{args.name}: removed")
    return 0

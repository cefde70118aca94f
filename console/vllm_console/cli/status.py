"""``vllm-console status NAME``: everything about one server."""

from __future__ import annotations

import argparse
import os

from vllm_console.cli.common import add_json, open_fleet, print_json, status_document
from vllm_console.cli.table import describe
from vllm_console.fleet.api import FleetError, NotFoundError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("name")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show it."""
    snapshot = open_fleet(args).snapshot(args.name)
    server = snapshot.server(args.name)
    if server is None:
        # A record that cannot be read is a server too: say what is wrong with it rather than that there is none.
        broken = next((notice for notice in snapshot.notices if f"{args.name}{os.sep}record.json" in notice), None)
        if broken:
            raise FleetError(broken)
        raise NotFoundError(f"no server is called '{args.name}'; see 'vllm-console list'")
    if args.json:
        print_json(status_document(server))
    else:
        print("\n".join(describe(server, snapshot.at)))
    return 0

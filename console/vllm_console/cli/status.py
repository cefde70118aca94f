"""``vllm-console status NAME``: everything about one server."""

from __future__ import annotations

import argparse
import os

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import print_json
from vllm_console.cli.server_table import describe, status_document
from vllm_console.fleet.verbs import FleetError, NotFoundError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show it."""
    fleet = open_fleet(args)
    snapshot = fleet.snapshot(args.name)
    server = snapshot.server(args.name)
    if server is None:
        # A server whose record cannot be read still exists: report what is wrong with the record.
        broken = next((notice for notice in snapshot.notices if f"{args.name}{os.sep}record.json" in notice), None)
        if broken:
            raise FleetError(broken)
        raise NotFoundError(f"no server is called '{args.name}'; see 'vllm-console list'")
    energy = fleet.energy(server.name) if server.ours and server.attached is None and server.gpus else None
    if args.json:
        print_json(status_document(server) | {"energy": energy.document() if energy is not None else None})
    else:
        print("\n".join(describe(server, snapshot.at, energy)))
    return 0

"""``vllm-console list``: all servers."""

from __future__ import annotations

import argparse

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import complain, print_json
from vllm_console.cli.server_table import status_document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--ours", action="store_true", help="only servers of your own")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them."""
    snapshot = open_fleet(args, observe=not args.ours, remote=not args.ours).snapshot()
    servers = [server for server in snapshot.servers if server.attached is None or not args.ours]
    for notice in snapshot.notices:
        complain(notice)
    if args.json:
        print_json([status_document(server) for server in servers])
    elif servers:
        from vllm_console.cli.server_table import table  # scripts that poll JSON don't pay for this import

        print("\n".join(table(servers, snapshot.at)))
    else:
        print("No servers. Start one with 'vllm-console start chatbot', or try 'vllm-console demo'.")
    return 0

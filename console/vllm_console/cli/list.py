"""``vllm-console list``: all servers."""

from __future__ import annotations

import argparse

from vllm_console.cli.common import add_json, complain, open_fleet, print_json, status_document


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("--ours", action="store_true", help="leave out servers that others started")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them."""
    snapshot = open_fleet(args, observe=not args.ours).snapshot()
    servers = snapshot.servers
    for notice in snapshot.notices:
        complain(notice)
    if args.json:
        print_json([status_document(server) for server in servers])
    elif servers:
        from vllm_console.cli.table import table  # scripts that ask for JSON every second don't pay for it

        print("\n".join(table(servers, snapshot.at)))
    else:
        print("No servers. Start one with 'vllm-console start chatbot', or see how it looks with 'vllm-console demo'.")
    return 0

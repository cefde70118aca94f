"""``vllm-console runs [NAME]``: what ran, with which flags, and how it served."""

from __future__ import annotations

import argparse
import time

from vllm_console.cli.common import add_json, complain, open_fleet, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("name", nargs="?", help="only the runs of this server, which may have been removed since")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them, the newest first."""
    from vllm_console.telemetry.compare_document import run_document

    found, notices = open_fleet(args, observe=False).runs(args.name)
    for notice in notices:
        complain(notice)
    if args.json:
        print_json([run_document(run) for run in found])
    elif found:
        from vllm_console.cli.run_lines import run_lines

        print("\n".join(run_lines(found, time.time())))
    else:
        print("No runs yet: every start of a server is one.")
    return 0

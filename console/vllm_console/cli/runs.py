"""``vllm-console runs [NAME]``: past runs, with their flags and performance."""

from __future__ import annotations

import argparse
import time

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import complain, print_json
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List past and present runs, with flags and figures. Each figure is the median over the run's minutes with "
        "traffic, so that one bad minute does not show; 'compare' and 'status' say over which time theirs are taken."
    )
    parser.add_argument("name", nargs="?", help="only runs of this server (also a removed one)")
    parser.add_argument(
        "--startup",
        action="store_true",
        help="a server's start-ups side by side, and what shortened them",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List them, newest first, or their start-ups side by side."""
    from vllm_console.runs.document import run_document

    found, notices = open_fleet(args, observe=False).runs(args.name)
    for notice in notices:
        complain(notice)
    if args.json:
        print_json([run_document(run, found) for run in found])
    elif args.startup:
        from shutil import get_terminal_size

        from vllm_console.runs.startup import startup_lines

        names = list(dict.fromkeys(run.server for run in found))
        for name in names:
            lines = startup_lines([run for run in found if run.server == name], get_terminal_size().columns)
            print("\n".join([plain(name), *lines, ""] if lines else [f"{plain(name)}: no start-up is known", ""]))
    elif found:
        from vllm_console.cli.runs_text import run_lines

        print("\n".join(run_lines(found, time.time())))
    else:
        print("No runs yet. Each server start records one.")
    return 0

"""``vllm-console compare BEFORE [AFTER]``: did a change help?"""

from __future__ import annotations

import argparse

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("before", help="number, NAME@RUN, or NAME (its two newest runs)")
    parser.add_argument("after", nargs="?", help="run to compare with")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Set them side by side."""
    found = open_fleet(args, observe=False).compare(args.before, args.after)
    if args.json:
        from vllm_console.runs.document import comparison_document

        print_json(comparison_document(found))
    else:
        from vllm_console.cli.runs_text import comparison_lines

        print("\n".join(comparison_lines(found)))
    return 0

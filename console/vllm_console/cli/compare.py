"""``vllm-console compare BEFORE [AFTER]``: did a change help?"""

from __future__ import annotations

import argparse

from vllm_console.cli.common import add_json, open_fleet, print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument(
        "before", help="a run's number, NAME@GENERATION or NAME; alone: its newest run and the one before"
    )
    parser.add_argument("after", nargs="?", help="the run that is measured against it")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Set them side by side."""
    found = open_fleet(args, observe=False).compare(args.before, args.after)
    if args.json:
        from vllm_console.telemetry.compare_document import comparison_document

        print_json(comparison_document(found))
    else:
        from vllm_console.cli.run_lines import comparison_lines

        print("\n".join(comparison_lines(found)))
    return 0

"""``vllm-console replay RUN``: the console on a run that has ended."""

from __future__ import annotations

import argparse

from vllm_console.cli.console import open_on
from vllm_console.cli.options import text_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", type=text_from, help="run id, NAME@RUN, or NAME (its newest run, or that of --at TIME)")


def run(args: argparse.Namespace) -> int:
    """Open the console, or save a picture of it."""
    return open_on(args, lambda fleet: fleet.replay(args.run, args.at))

"""``vllm-console runs [NAME]``: past runs, with their flags and performance."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.cli.fleet_access import open_fleet, refuse_read_only
from vllm_console.cli.options import add_json
from vllm_console.cli.output import complain, print_json
from vllm_console.text import plain
from vllm_launchers.errors import UsageError

if TYPE_CHECKING:
    from vllm_console.fleet.local import LocalFleet
    from vllm_console.runs.measurement import Measurement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List past and present runs, with flags and figures. Each figure is the median over the run's minutes with "
        "traffic, so that one bad minute does not show; 'compare' and 'status' say over which time theirs are taken."
    )
    parser.usage = (
        "vllm-console runs [NAME] [--startup] [--json]\n       vllm-console runs import FILE --run RUN [--json]"
    )
    parser.add_argument("name", nargs="?", help="only runs of this server (also a removed one)")
    parser.add_argument(
        "file", nargs="?", type=Path,
        help="after 'import': JSON result of 'vllm bench serve' or 'guidellm' to keep with a run",
    )  # fmt: skip
    parser.add_argument("--run", dest="into", metavar="RUN", help="the run: a number, NAME@RUN, or NAME (its newest)")
    parser.add_argument(
        "--startup",
        action="store_true",
        help="compare a server's start-ups, and what shortened them",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List runs, newest first, or their startups side by side; or import a result.

    ``import`` only counts if a file follows, so a server of that name can still be listed.
    """
    if args.file is not None:
        return _import(args)
    if args.into is not None:
        raise UsageError("--run belongs to 'runs import FILE'")
    from vllm_console.runs.document import run_document

    found, notices = open_fleet(args, observe=False).history.runs(args.name)
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
            print("\n".join([plain(name), *lines, ""] if lines else [f"{plain(name)}: no start-up was recorded", ""]))
    elif found:
        from vllm_console.cli.runs_text import run_lines

        print("\n".join(run_lines(found, time.time())))
    else:
        print("No runs yet. Each server start records one.")
    return 0


def _import(args: argparse.Namespace) -> int:
    """Keep another tool's result with a run.

    Raises:
        UsageError: a word other than ``import`` precedes the file, or no run is named.
        OperationError: the file is not a result, or the run does not exist.
    """
    from vllm_console.runs.imports import read_result

    if args.name != "import":
        raise UsageError(f"'runs' takes one name; 'runs import {args.file} --run NAME' imports a result")
    if args.into is None or args.startup:
        raise UsageError(f"name the run that was measured: runs import {args.file} --run NAME@RUN")
    refuse_read_only(args)
    found = read_result(args.file)
    keep(args, open_fleet(args, observe=False), args.into, found)
    return 0


def keep(args: argparse.Namespace, fleet: LocalFleet, word: str, found: Measurement) -> None:
    """Keep a measurement with a run, and print it."""
    name = fleet.history.keep_measurement(word, found)
    if args.json:
        print_json({"run": name, **found.document()})
        return
    from vllm_console.cli.runs_text import ramp_step_lines

    rates = "1 rate" if len(found.steps) == 1 else f"{len(found.steps)} rates"
    print("\n".join([f"{plain(name)}: {found.kind}, {rates}", *ramp_step_lines(found)]))

"""``vllm-console leftovers``: what ended servers left on this machine; ``--remove`` removes it."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable

from vllm_console.cli.fleet_access import open_fleet
from vllm_console.cli.options import add_json
from vllm_console.cli.output import Document, print_json
from vllm_console.fleet.leftovers import (
    Leftovers,
    Removed,
    files_by_reason,
    format_leftovers,
    format_lost,
    lost_servers,
    name_and_size,
    process_lines,
)
from vllm_console.text import plain

WIDTH = 100
"""Width of the lines of file names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--remove", action="store_true", help="end the processes and delete the files")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List or remove leftovers; exit code 1 if something that should be gone is still there."""
    fleet = open_fleet(args, observe=False)
    found = fleet.leftovers.find()
    removed = fleet.leftovers.remove(found) if args.remove else None
    if args.json:
        print_json(_document(found, removed))
    elif removed is None:
        _show(found)
    else:
        gone = format_leftovers(Leftovers(removed.processes, removed.files))
        print(f"Removed {gone}.")
    for sentence in () if args.json else (*found.spared, *(removed.problems if removed else ())):
        print(plain(f"  skipped: {sentence}"), file=sys.stderr)
    return 1 if removed is not None and removed.problems else 0


def _removing(found: Leftovers) -> str:
    """What ``--remove`` would do."""
    it = "it" if len(found.processes) + len(found.files) == 1 else "them"
    verbs = [verb for verb, some in (("ends", found.processes), ("removes", found.files)) if some]
    return f"{' and '.join(verbs)} {it}"


def _show(found: Leftovers) -> None:
    if lost := format_lost(lost_servers(found.processes)):
        print(plain(f"{lost}; --remove does that."))
    print(f"Leftovers: {format_leftovers(found)}" + ("." if found.empty else f"; --remove {_removing(found)}:"))
    for text in process_lines(found.processes):
        print(plain(f"  {text}"))
    for text, files in files_by_reason(found.files).items():
        print(plain(f"  {text}:"))
        for row in textwrap.wrap(plain(", ".join(map(name_and_size, files))), WIDTH):
            print(f"    {row}")


def _document(found: Leftovers, removed: Removed | None) -> Document:
    pids = {one.process.pid for one in removed.processes} if removed else set()
    paths = {one.path for one in removed.files} if removed else set()
    return {
        "processes": [
            {"pid": one.process.pid, "title": one.title, "server": one.folder, "why": one.why}
            | _removed(removed, pids, one.process.pid)
            for one in found.processes
        ],
        "files": [
            {"path": one.path, "bytes": one.size, "why": one.why} | _removed(removed, paths, one.path)
            for one in found.files
        ],
        "left_alone": [*found.spared, *(removed.problems if removed else ())],
    }


def _removed(removed: Removed | None, gone: Iterable[object], one: object) -> Document:
    return {} if removed is None else {"removed": one in set(gone)}

"""``vllm-console leftovers``: what servers that have ended left on this machine, and with ``--remove`` away with it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from vllm_console.cli.common import Document, add_json, open_fleet, print_json
from vllm_console.fleet.leftovers import Leftovers, Removed, file_words, process_words, words
from vllm_console.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's words."""
    parser.add_argument("--remove", action="store_true", help="end these processes and remove these files")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """List it, or remove it; exit code 1 where something that was to go is still there."""
    fleet = open_fleet(args, observe=False)
    found = fleet.leftovers()
    removed = fleet.remove_leftovers(found) if args.remove else None
    if args.json:
        print_json(_document(found, removed))
    elif removed is None:
        _show(found)
    else:
        gone = words(Leftovers(removed.processes, removed.files))
        print(f"Removed {gone}.")
    for sentence in () if args.json else (*found.spared, *(removed.problems if removed else ())):
        print(plain(f"  left alone: {sentence}"), file=sys.stderr)
    return 1 if removed is not None and removed.problems else 0


def _show(found: Leftovers) -> None:
    print(f"Servers that have ended left {words(found)}" + ("." if found.empty else "; --remove ends and removes it:"))
    for text in (*map(process_words, found.processes), *map(file_words, found.files)):
        print(plain(f"  {text}"))


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

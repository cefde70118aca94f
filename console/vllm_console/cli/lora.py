"""``vllm-console lora list|load|unload NAME``: the LoRA adapters of a running server."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from msgspec import to_builtins

from vllm_console.cli.fleet_access import open_fleet, refuse_read_only
from vllm_console.cli.options import add_json
from vllm_console.cli.output import print_json, show, table_lines
from vllm_console.fleet.adapters import limits_text, request_states
from vllm_console.text import count, plain, size
from vllm_launchers.errors import UsageError
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_console.fleet.adapters import Adapters

NAMES = {"list": "NAME", "load": "NAME ADAPTER PATH", "unload": "NAME ADAPTER"}
_COLUMNS = (("ADAPTER", 24), ("RANK", 6), ("SIZE", 10), ("REQUESTS", 20), ("PATH", 0))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "List, load or unload LoRA adapters of one of your running servers. Loading first checks the adapter's rank "
        "and memory. Loading and unloading need --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING, which lets all "
        "clients of the server do the same."
    )
    parser.add_argument("action", choices=NAMES)
    parser.add_argument("name", help="a server's name")
    parser.add_argument("adapter", nargs="?", help="the name that requests use as their model")
    parser.add_argument("path", nargs="?", help="load: the adapter's folder")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run the action and print the result."""
    words = NAMES[args.action].split()
    given = [args.name, *(word for word in (args.adapter, args.path) if word is not None)]
    if len(given) != len(words):
        raise UsageError(f"lora {args.action} takes {NAMES[args.action]}")
    if args.action == "list":
        found = open_fleet(args).adapters(args.name)
        show(args, lambda: to_builtins(found), lambda: _lines(found))
        return 0
    refuse_read_only(args)
    fleet = open_fleet(args)
    if args.action == "load":
        done = fleet.load_adapter(args.name, args.adapter, args.path)
    else:
        done = fleet.unload_adapter(args.name, args.adapter)
    if args.json:
        print_json(to_builtins(done))
        return 0
    print(plain(f"{done.server}: {done.name} is {'served' if args.action == 'load' else 'unloaded'}"))
    for note in done.notes:
        print(f"  note: {plain(note)}")
    return 0


def _lines(found: Adapters) -> list[str]:
    name = plain(found.server)
    if not found.enabled:
        return [f"{name} runs without --enable-lora: it serves no adapters."]
    change = "can be loaded" if found.updates else "can't be loaded while it runs"
    lines = [f"{name}: {counted(len(found.adapters), 'adapter')} ({limits_text(found)}); more {change}"]
    rows = [
        (plain(one.name, 23), count(one.rank), size(one.size), request_states(one), plain(one.path))
        for one in found.adapters
    ]
    return [*lines, "", *table_lines(_COLUMNS, rows)] if rows else lines

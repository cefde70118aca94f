"""Removes leftovers of ended servers: finds them, lists them for confirmation, removes them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vllm_console.fleet.leftovers import (
    Leftovers,
    Removed,
    files_by_reason,
    format_leftovers,
    name_and_size,
    process_lines,
)
from vllm_console.ui.keymap import key_of
from vllm_console.ui.theme import WARN

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8


def confirm_leftovers(console: ConsoleApp) -> None:
    """Find leftovers, confirm and remove them. The demo removes nothing: leftovers belong to other servers."""
    fleet = console.fleet
    if console.polling.demo:
        console.say("This is the demo: 'vllm-console leftovers' lists leftovers of ended servers on this machine.")
        return

    def found(left: Leftovers) -> str:
        if left.empty:
            return "No leftovers of ended servers." + (f" {left.spared[0]}" if left.spared else "")
        verb = "End and remove" if left.processes else "Remove"
        remove = partial(console.act, "Removing leftovers…", lambda: fleet.leftovers.remove(left), done)
        console.operations.verbs.ask(f"{verb} {format_leftovers(left)}?", _details(left), "remove", remove, late=True)
        return ""

    def missed(left: Leftovers) -> str:
        return "" if left.empty else f"Leftovers: {format_leftovers(left)}; {key_of('remove_leftovers')} removes them."

    def done(removed: Removed) -> str:
        if removed.problems:
            console.say(removed.problems[0], WARN)
            return ""
        return f"Removed {format_leftovers(Leftovers(removed.processes, removed.files))}."

    console.late_screens.open("Looking for leftovers…", fleet.leftovers.find, found, once="leftovers", missed=missed)


def _details(left: Leftovers) -> list[str]:
    """Processes, then files grouped by reason; at most `MOST_SHOWN` of them."""
    shown = left.processes[:MOST_SHOWN]
    rows, room = process_lines(shown), MOST_SHOWN - len(shown)
    for text, files in files_by_reason(left.files).items():
        if room <= 0:
            break
        rows += [text, *(f"  {name_and_size(file)}" for file in files[:room])]
        room -= len(files)
    hidden = len(left.processes) + len(left.files) - MOST_SHOWN
    return [*rows, *([f"and {hidden} more: vllm-console leftovers"] if hidden > 0 else [])]

"""Removes leftovers of ended servers: finds them, lists them for confirmation, removes them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from vllm_console.fleet.leftovers import Leftovers, Removed, format_leftovers, format_process, name_and_size
from vllm_console.ui.keymap import key_of
from vllm_console.ui.theme import WARN
from vllm_launchers.units import counted

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp
    from vllm_launchers.host.shared_memory import LeftFile

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
        if not console.operations.on_top:
            return f"Leftovers: {format_leftovers(left)}; {key_of('remove_leftovers')} removes them."

        verb = "End and remove" if left.processes else "Remove"
        remove = partial(console.act, "Removing leftovers…", lambda: fleet.leftovers.remove(left), done)
        console.operations.verbs.ask(f"{verb} {format_leftovers(left)}?", _details(left), "remove", remove, late=True)
        return ""

    def done(removed: Removed) -> str:
        if removed.problems:
            console.say(removed.problems[0], WARN)
            return ""
        return f"Removed {format_leftovers(Leftovers(removed.processes, removed.files))}."

    console.act("Looking for leftovers…", fleet.leftovers.find, found, once="leftovers")


def _details(left: Leftovers) -> list[str]:
    """Processes, then files grouped by reason; at most `MOST_SHOWN` of them."""
    rows = [format_process(process) for process in left.processes[:MOST_SHOWN]]
    room = MOST_SHOWN - len(rows)
    by_reason: dict[str, list[LeftFile]] = {}
    for file in left.files:
        by_reason.setdefault(file.why, []).append(file)
    for why, files in by_reason.items():
        if room <= 0:
            break
        them = "it" if len(files) == 1 else "them"
        rows.append(f"{counted(len(files), 'file')} in /dev/shm: {why}; no process has {them} open")
        rows += [f"  {name_and_size(file)}" for file in files[:room]]
        room -= len(files)
    hidden = len(left.processes) + len(left.files) - MOST_SHOWN
    return [*rows, *([f"and {hidden} more: vllm-console leftovers"] if hidden > 0 else [])]

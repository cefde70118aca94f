"""Removing what servers that have ended left: a look, a question with all of it, and away with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_console.fleet.leftovers import Leftovers, Removed, file_words, process_words, words
from vllm_console.ui.screens.dialogs import Confirm
from vllm_console.ui.theme import WARN

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp

MOST_SHOWN = 8


def remove_leftovers(console: ConsoleApp) -> None:
    """Look, ask, and remove; says what was left alone."""
    fleet = console.fleet

    def found(left: Leftovers) -> str:
        if left.empty:
            return "Servers that have ended left nothing." + (f" {left.spared[0]}" if left.spared else "")
        if not console.operations.on_top:
            return f"Ended servers left {words(left)}: X asks whether to remove that."

        def answered(yes: bool | None) -> None:
            if yes:
                console.act("Removing it …", lambda: fleet.remove_leftovers(left), done)

        console.push_screen(Confirm(f"End and remove {words(left)}?", _details(left), "remove", late=True), answered)
        return ""

    def done(removed: Removed) -> str:
        if removed.problems:
            console.say(removed.problems[0], WARN)
            return ""
        return f"Removed {words(Leftovers(removed.processes, removed.files))}."

    console.act("Looking for what servers left …", fleet.leftovers, found, once="leftovers")


def _details(left: Leftovers) -> list[str]:
    every = [*map(process_words, left.processes), *map(file_words, left.files)]
    more = [f"and {len(every) - MOST_SHOWN} more: vllm-console leftovers"] if len(every) > MOST_SHOWN else []
    return [*every[:MOST_SHOWN], *more]

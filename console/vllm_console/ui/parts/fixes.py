"""Stages fixes for findings: one key stages the best fix, repeated presses the next ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_console.diagnosis.finding import SECOND_SERVER, Fix
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.findings import edits_of, findings_of, staged_fix
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.finding import MOST_LINES, WIDE, finding_rows
from vllm_console.ui.parts.staging import Staging
from vllm_console.ui.theme import WARN

if TYPE_CHECKING:
    from vllm_console.ui.app import ConsoleApp


class FixCycle:
    """Stages the fixes of a server's top finding, one at a time."""

    def __init__(self, console: ConsoleApp, staging: Staging) -> None:
        self._console, self._staging = console, staging

    def stage_next(self, server: ServerView) -> None:
        """Stage the best fix for the top finding; repeated calls stage the next fix."""
        found = findings_of(server)
        fixes = found[0].flag_fixes if found else ()
        if not fixes:
            self._console.say(_nothing_to_stage(server), WARN, about=server.name)
            return
        at = staged_fix(server, fixes, self._staging.of(server.name))
        if at is not None and len(fixes) == 1:
            restart, drop = key_of("restart"), key_of("clear")
            self._console.say(f"This is the only fix: {restart} restarts with it, {drop} drops it.")
            return
        self.stage(server, fixes[0 if at is None else (at + 1) % len(fixes)])

    def stage(self, server: ServerView, fix: Fix) -> None:
        """Stage a fix, replacing what is staged, because only a single change can be evaluated afterwards."""
        edits = edits_of(server.flags, fix)
        if not edits:
            self._console.say(f"{server.name} already runs with that.", WARN, about=server.name)
            return
        before = self._staging.of(server.name)
        found = findings_of(server)
        replaced = bool(before) and staged_fix(server, found[0].flag_fixes if found else (), before) is None
        self._staging.put(server.name, edits)
        # Other lines show the change and, if there is room, the trade-off.
        width, height = self._console.size
        little = width < WIDE or finding_rows(height) < MOST_LINES
        tradeoff = f" Trade-off: {plain(fix.tradeoff)}" if fix.tradeoff and little else ""
        instead = " (replaces the earlier changes)" if replaced else ""
        self._console.say(f"Staged{instead}.{tradeoff} {key_of('restart')} restarts. {plain(fix.why)}")


def _nothing_to_stage(server: ServerView) -> str:
    found = findings_of(server)
    if found and found[0].fixes:
        why = plain(found[0].fixes[0].why)
        return f"{why} {key_of('new_server')} launches one." if why.startswith(SECOND_SERVER) else why
    if found and found[0].severity != "good":
        return f"No flag change is known to fix this: {found[0].title}."
    return f"No problems found on {server.name}."

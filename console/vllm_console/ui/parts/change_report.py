"""Reports the effect of changed flags: after a restart, compares with the previous run until there is a verdict."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.keymap import key_of
from vllm_console.ui.threads import in_thread
from vllm_launchers.keeper.records import State

if TYPE_CHECKING:
    from vllm_console.runs.compare import Comparison
    from vllm_console.ui.app import ConsoleApp

CHECK_SECONDS = 2.0

COMPARE_SECONDS, COMPARE_AGAIN_SECONDS = 15.0, 120.0
"""Time between comparisons: while data is insufficient, and after the verdict."""

LOOKS = 4
"""Minimum number of comparisons per window of a run, so that the missing time counts down evenly."""

SHOWN_SECONDS = 3600.0

DAY_SECONDS = 86_400.0
"""Older changes are not reported."""


class _Report(msgspec.Struct):
    """The report on a server's newest generation: when its comparison was requested and when it had a verdict (Unix
    seconds). ``done``: there is nothing to report."""

    generation: int
    found: Comparison | None = None
    requested_at: float = float("-inf")
    judged_at: float | None = None
    done: bool = False

    @property
    def every(self) -> float:
        if self.judged_at is not None:
            return COMPARE_AGAIN_SECONDS
        return min(COMPARE_SECONDS, self.found.after.seconds / LOOKS) if self.found is not None else COMPARE_SECONDS


class ChangeReport:
    """Compares the selected server's run with the previous one after a recent restart; calls ``changed`` on news."""

    def __init__(self, console: ConsoleApp, changed: Callable[[], None]) -> None:
        self._console, self._changed = console, changed
        self._by_server: dict[str, _Report] = {}

    def drop(self, name: str) -> None:
        """Drop the report of a removed server."""
        self._by_server.pop(name, None)

    def _newest(self, server: ServerView) -> _Report | None:
        """The report on its present run; None if there is only one on an earlier run, as while it starts again."""
        report = self._by_server.get(server.name)
        return report if report is not None and report.generation == server.generation else None

    def found(self, server: ServerView) -> Comparison | None:
        """The newest comparison of its present run, if there was one to report."""
        report = self._newest(server)
        return report.found if report is not None and not report.done else None

    def lines(self, server: ServerView, now: float, width: int, room: int) -> list[Strip]:
        """The report line, if there is one and room for it."""
        report = self._newest(server)
        if report is None or report.found is None or report.done or room < 1:
            return []
        if server.state is not State.READY or (report.judged_at and now - report.judged_at > SHOWN_SECONDS):
            return []
        from vllm_console.ui.panes.change import change_line

        return [change_line(report.found, min(cell_len(plain(server.name)), 20 if width >= 100 else 12), width)]

    def judged(self, server: ServerView) -> bool:
        """Whether there is a verdict on the newest change, as opposed to insufficient data."""
        report = self._newest(server)
        return report is not None and report.judged_at is not None

    def awaited(self, server: ServerView) -> str:
        """What to wait for, e.g. ``Wait about 2m20s for a verdict above``; empty if there is nothing to wait for."""
        report = self._newest(server)
        if not server.state.alive or self.judged(server) or (report is not None and report.done):
            return ""
        about = ""
        if report is not None and report.found is not None:
            from vllm_console.runs.text import missing_text

            about = f" about {missing_text(report.found.after)}" if report.found.after.missing else ""
        return f"Wait{about} for a verdict above"

    def undecided(self, server: ServerView) -> str:
        """What a restart would leave undecided: this run has too little traffic for a verdict on its change."""
        report = self._newest(server)
        if report is None or report.found is None or report.judged_at is not None:
            return ""
        if report.done or not report.found.after.missing:
            return ""
        from vllm_console.runs.text import missing_text

        missing = missing_text(report.found.after)
        return f"Run {server.generation} needs {missing} more traffic before {key_of('compare')} can compare it."

    def check(self, server: ServerView | None) -> None:
        """Compare the selected server's runs if a comparison is due."""
        snapshot = self._console.snapshot
        if server is None or snapshot is None or self._console.polling.paused:
            return
        if not server.recorded or server.state is not State.READY or server.generation < 2:
            return
        report = self._newest(server)
        if report is None:
            report = self._by_server[server.name] = _Report(server.generation)
        news = snapshot.at - server.state_since < DAY_SECONDS
        if news and not report.done and snapshot.at - report.requested_at >= report.every:
            report.requested_at = snapshot.at
            self._console.run_worker(self._compare(server.name, report), name="change", group=f"change {server.name}")

    async def _compare(self, name: str, report: _Report) -> None:
        from vllm_console.ui.panes.change import worth_reporting

        try:
            found = await in_thread(partial(self._console.fleet.history.last_change, name), "compare")
        except Exception:  # noqa: BLE001 - the thread's boundary: retried; the compare screen shows the error
            return
        if found is None or found.after.run.generation != report.generation:
            return  # the runs' record may not contain the new run yet
        if not worth_reporting(found):
            report.done = True
            return
        from vllm_console.runs.compare import ComparisonVerdict

        report.found = found
        if found.verdict is not ComparisonVerdict.TOO_LITTLE and report.judged_at is None:
            report.judged_at = report.requested_at
        self._changed()

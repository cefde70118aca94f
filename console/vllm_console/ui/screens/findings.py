"""All findings of one server: symptom, figures with their limits, cause, and every fix to choose from."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ClassVar

import msgspec
from rich.cells import cell_len
from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.screen import Screen
from textual.strip import Strip

from vllm_console.diagnosis.finding import Fix, Measure, Severity
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.findings import SIGNS, ServerFinding, change_text, findings_of, unjudged
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.finding import clock
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, DIM, STRONG
from vllm_console.ui.widgets.draw import KeyHint, Part, fit
from vllm_console.ui.widgets.reader import Reader, scroll_hint

LEAST_MEASURE = 26
"""Columns of the names of figures, at least."""

INDENT = 3


class Page(msgspec.Struct, frozen=True):
    """The lines; and per fix that can be staged, in order, its rows (first, one past last)."""

    lines: tuple[Strip, ...]
    fixes: tuple[tuple[Fix, int, int], ...]


class FindingsScreen(Screen[None]):
    """Shows the findings of one server as it was when the screen was opened.

    ``stage`` receives the chosen fix; without it (read-only, someone else's server) none can be chosen.
    """

    SCOPE = "findings"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("findings", priority=("findings_down", "findings_up"))]

    def __init__(self, server: ServerView, now: float, stage: Callable[[Fix], None] | None) -> None:
        super().__init__()
        self._server, self._now, self._stage = server, now, stage
        self._picked = 0
        pickable = any(found.flag_fixes for found in findings_of(server)) if stage is not None else False
        self._reader = Reader(
            lambda: f"Findings · {server.marked_name}",
            lambda width: self._page(width).lines,
            _picking_hints if pickable else lambda: (scroll_hint(),),
        )

    def compose(self) -> ComposeResult:
        """The findings."""
        yield self._reader

    def _page(self, width: int) -> Page:
        return findings_page(self._server, self._now, width, self._picked if self._stage is not None else None)

    def action_pick(self, by: int) -> None:
        """The next or previous fix; after the last one, scroll on."""
        fixes = self._page(self._reader.width).fixes
        at = self._picked + by
        if not fixes or not 0 <= at < len(fixes):
            self._reader.action_scroll(by)
            return
        self._picked = at
        self._reader.redraw()
        self._reader.scroll_to_rows(*fixes[at][1:])

    def on_click(self, event: events.Click) -> None:
        """Pick the fix that was clicked; a double click stages it."""
        row = self._reader.row_at(event)
        fixes = self._page(self._reader.width).fixes
        at = next((at for at, (_, first, end) in enumerate(fixes) if row is not None and first <= row < end), None)
        if at is not None:
            self._picked = at
            self._reader.redraw()
            if event.chain == 2:
                self.action_stage()

    def action_stage(self) -> None:
        """Stage the chosen fix and go back."""
        fixes = self._page(self._reader.width).fixes
        if self._stage is None or not fixes:
            return
        fix = fixes[self._picked][0]
        self.dismiss(None)
        self._stage(fix)


def _picking_hints() -> Sequence[KeyHint]:
    return (
        (f"{key_of('findings_down')} {key_of('findings_up')}", "pick"),
        (key_of("findings_stage"), "stage", "screen.stage"),
        (f"{key_of('reader_page_down')} {key_of('reader_page_up')}", "scroll"),
    )


def findings_page(server: ServerView, now: float, width: int, picked: int | None) -> Page:
    """Every finding, the worst first. ``picked`` is the fix under the cursor, None if none can be chosen."""
    lines: list[Strip] = []
    fixes: list[tuple[Fix, int, int]] = []
    for found in findings_of(server):
        lines += [*_about(found, now, width), *_figures(found.measures, width)]
        if found.fixes:
            lines += [line(), line(("   Fixes, best first:", DIM))]
        for fix in found.fixes:
            begin = len(lines)
            here = not fix.changes.empty and picked == len(fixes)
            lines += _fix(server, fix, width, here)
            if not fix.changes.empty and picked is not None:
                fixes.append((fix, begin, len(lines)))
        lines.append(line())
    if not lines:
        lines = [line(), *(line(f" {row}") for row in _wrapped(_nothing(server), width))]
    return Page(tuple(lines), tuple(fixes))


def _nothing(server: ServerView) -> str:
    if server.moment is not None:
        return "No findings are known of that moment. They can be judged afterwards for a day."
    if not server.state.alive:
        return f"No known cause for why it is down: {key_of('open_log')} shows its log."
    if early := unjudged(server):
        return f"No findings yet. {early}."
    return "No findings: no traffic yet, or too little to judge by."


def _about(found: ServerFinding, now: float, width: int) -> list[Strip]:
    sign, style = SIGNS[found.severity]
    since = f" {clock(found.since, now)}" if found.since is not None else ""
    lines = [line((f" {sign} ", style), (found.title, style if found.severity is not Severity.GOOD else STRONG),
                  since, (f"  {found.severity}", DIM))]  # fmt: skip
    for text, tone in ((found.symptom, None), (found.cause, None), (found.line, DIM)):
        lines += [line((" " * INDENT + row, tone)) for row in _wrapped(text, width)]
    return lines


def _figures(measures: Sequence[Measure], width: int) -> list[Strip]:
    lines = [line()] if measures else []
    longest = max((cell_len(plain(measure.name)) for measure in measures), default=0) + 2
    column = min(longest, max(LEAST_MEASURE, width // 2))
    for measure in measures:
        name, room = plain(measure.name), width - INDENT - column
        limit = f"  limit {plain(measure.limit)}" if measure.limit else ""
        source = f"  {plain(measure.source)}" if measure.source else ""
        value = plain(measure.value)
        if cell_len(name) <= column - 2 and cell_len(value + limit + source) <= room:
            lines.append(line(" " * INDENT, fit(name, column), (value, STRONG), limit, (source, DIM)))
            continue
        # What does not fit in a line goes on below, and is never cut.
        names = textwrap.wrap(name, column - 2, break_on_hyphens=False)
        texts: list[Part] = [(row, STRONG) for row in textwrap.wrap(value, room, break_on_hyphens=False)]
        texts += [(row, style) for text, style in ((limit, None), (source, DIM))
                  for row in textwrap.wrap(text.strip(), room, break_on_hyphens=False)]  # fmt: skip
        lines += [line(" " * INDENT, fit(one, column), text) for one, text in zip_longest(names, texts, fillvalue="")]
    return lines


def _fix(server: ServerView, fix: Fix, width: int, here: bool) -> list[Strip]:
    mark: Part = (" ▸ ", ACCENT) if here else "   "
    texts = [f"Trade-off: {fix.tradeoff}"] if fix.tradeoff else []
    if fix.changes.empty:
        first, *rest = _wrapped(fix.why, width - 2) or [""]
        lines = [line(mark, "· ", first), *(line("     " + row) for row in rest)]
    else:
        change = fit(change_text(server.flags, fix.changes), width - INDENT).rstrip()
        lines = [line(mark, (change, STRONG if here else ACCENT))]
        texts = [fix.why, *texts]
    for text in texts:
        lines += [line("     " + row) for row in _wrapped(text, width - 2)]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain(text), max(20, width - INDENT), break_on_hyphens=False) if text else []

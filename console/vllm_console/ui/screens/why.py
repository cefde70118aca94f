"""Everything about what is found of a server: symptom, figures with their limits, cause, and every remedy to pick."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.geometry import Region
from textual.strip import Strip

from vllm_console.diagnosis.model import Measure, Remedy, Severity
from vllm_console.fleet.model import ServerView
from vllm_console.text import plain
from vllm_console.ui.findings import SIGNS, Shown, change_text, findings_of
from vllm_console.ui.panes.finding import clock
from vllm_console.ui.screens.reading import ReadingScreen
from vllm_console.ui.theme import ACCENT, DIM, STRONG
from vllm_console.ui.widgets.draw import Part, fit
from vllm_console.ui.widgets.lines import line

MEASURE_WIDTH = 26
INDENT = 3


@dataclass(frozen=True, slots=True)
class Page:
    """The lines; and per remedy that can be staged, in order, which lines are its own (first, one past last)."""

    lines: tuple[Strip, ...]
    remedies: tuple[tuple[Remedy, int, int], ...]


class WhyScreen(ReadingScreen):
    """Tells about one server as it was when the screen was opened.

    ``stage`` takes the remedy that a person picks; without it (read-only, somebody else's server) none can be picked.
    """

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("j,down", "pick(1)", "Next remedy", show=False),
        Binding("k,up", "pick(-1)", "Remedy before", show=False),
        Binding("enter,f", "stage", "Stage the remedy", show=False),
    ]

    def __init__(self, server: ServerView, now: float, stage: Callable[[Remedy], None] | None) -> None:
        super().__init__()
        self._server, self._now, self._stage = server, now, stage
        self._picked = 0
        pickable = any(found.cures for found in findings_of(server)) if stage is not None else False
        scroll = (("pgdn pgup", "scroll"),)
        self.KEYS = (("esc", "back"), *((("j k", "pick"), ("enter", "stage it")) if pickable else (("j k", "scroll"),)),
                     *(scroll if pickable else ()))  # fmt: skip

    def title_text(self) -> str:
        """The title."""
        return f"Why · {plain(self._server.name)}" + (" · simulated" if self._server.simulated else "")

    def content(self, width: int) -> Sequence[Strip]:
        """The lines."""
        return self._page(width).lines

    def _page(self, width: int) -> Page:
        return why_page(self._server, self._now, width, self._picked if self._stage is not None else None)

    def on_mount(self) -> None:
        """Show everything; the keys are the screen's own, so that they pick and scroll alike."""
        self.query_one(VerticalScroll).can_focus = False
        self.draw(self.app.size.width)

    def action_pick(self, by: int) -> None:
        """The next remedy, or the one before; at the last one, scroll on."""
        width = self.app.size.width - 2
        remedies = self._page(width).remedies
        at = self._picked + by
        scroll = self.query_one(VerticalScroll)
        if not remedies or not 0 <= at < len(remedies):
            scroll.scroll_relative(y=by, animate=False)
            return
        self._picked = at
        self.draw(self.app.size.width)
        first, last = remedies[at][1:]
        scroll.scroll_to_region(Region(0, first, 1, last - first), animate=False)

    def action_stage(self) -> None:
        """Stage the remedy that is picked and go back."""
        remedies = self._page(self.app.size.width - 2).remedies
        if self._stage is None or not remedies:
            return
        remedy = remedies[self._picked][0]
        self.dismiss(None)
        self._stage(remedy)


def why_page(server: ServerView, now: float, width: int, picked: int | None) -> Page:
    """Every finding, the gravest first. ``picked`` is the remedy under the cursor, None where none can be picked."""
    lines: list[Strip] = []
    remedies: list[tuple[Remedy, int, int]] = []
    for found in findings_of(server):
        lines += [*_about(found, now, width), *_figures(found.measures, width)]
        if found.remedies:
            lines += [line(), line(("   What would mend it, the best first:", DIM))]
        for remedy in found.remedies:
            begin = len(lines)
            here = not remedy.changes.empty and picked == len(remedies)
            lines += _remedy(server, remedy, width, here)
            if not remedy.changes.empty and picked is not None:
                remedies.append((remedy, begin, len(lines)))
        lines.append(line())
    if not lines:
        lines = [line(), *(line(f" {row}") for row in _wrapped(_nothing(server), width))]
    return Page(tuple(lines), tuple(remedies))


def _nothing(server: ServerView) -> str:
    if not server.state.alive:
        return "Nothing is known of why it is down: l shows its log."
    return "Nothing is found so far: there was no traffic yet, or too little of it to judge by."


def _about(found: Shown, now: float, width: int) -> list[Strip]:
    sign, style = SIGNS[found.severity]
    since = f" {clock(found.since, now)}" if found.since is not None else ""
    lines = [line((f" {sign} ", style), (found.title, style if found.severity is not Severity.GOOD else STRONG),
                  since, (f"  {found.severity}", DIM))]  # fmt: skip
    for text, tone in ((found.symptom, None), (found.cause, None), (found.line, DIM)):
        lines += [line((" " * INDENT + row, tone)) for row in _wrapped(text, width)]
    return lines


def _figures(measures: Sequence[Measure], width: int) -> list[Strip]:
    lines = [line()] if measures else []
    for measure in measures:
        parts: list[Part] = [
            " " * INDENT,
            fit(plain(measure.name), MEASURE_WIDTH - 1),
            " ",
            (plain(measure.value), STRONG),
        ]
        if measure.limit:
            parts.append(f"  limit {plain(measure.limit)}")
        row = line(*parts)
        source = f"  {plain(measure.source)}" if measure.source else ""
        if source and row.cell_length + len(source) <= width:
            lines.append(line(*parts, (source, DIM)))
        else:
            lines.append(row)
            lines += [line((" " * (INDENT + MEASURE_WIDTH) + source.strip(), DIM))] if source else []
    return lines


def _remedy(server: ServerView, remedy: Remedy, width: int, here: bool) -> list[Strip]:
    mark: Part = (" ▸ ", ACCENT) if here else "   "
    if remedy.changes.empty:
        first, *rest = _wrapped(remedy.why, width - 2) or [""]
        lines = [line(mark, "· ", first), *(line("     " + row) for row in rest)]
        texts = [f"Price: {remedy.price}"] if remedy.price else []
    else:
        change = fit(change_text(server.flags, remedy.changes), width - INDENT).rstrip()
        lines = [line(mark, (change, STRONG if here else ACCENT))]
        texts = [remedy.why, *([f"Price: {remedy.price}"] if remedy.price else [])]
    for text in texts:
        lines += [line("     " + row) for row in _wrapped(text, width - 2)]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain(text), max(20, width - INDENT)) if text else []

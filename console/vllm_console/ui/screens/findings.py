"""All findings of one server: symptom, figures with their limits, cause, and every fix to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import ClassVar

import msgspec
from rich.cells import cell_len
from textual import events
from textual.binding import BindingType
from textual.strip import Strip

from vllm_console.diagnosis.finding import Fix, Measure, Severity
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.actions import MOVING, bindings
from vllm_console.ui.findings import SIGNS, ServerFinding, findings_of, flag_change_text, unjudged
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.base import Draw
from vllm_console.ui.panes.finding import since_text
from vllm_console.ui.panes.kv_cache import kv_cache_lines
from vllm_console.ui.panes.latency import latency_chart
from vllm_console.ui.panes.pane_bar import FINDING_PANES, KV_CACHE, LATENCY, PREEMPTIONS, THROUGHPUT
from vllm_console.ui.panes.preemptions import preemption_lines
from vllm_console.ui.panes.throughput import throughput_lines
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, CURSOR, DIM, STRONG
from vllm_console.ui.widgets.chart import ChartView
from vllm_console.ui.widgets.draw import KeyHint, Part, beside, fit, paragraph, wrapped
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader, scroll_hint
from vllm_console.ui.widgets.table import LEAST_LAST, table

LEAST_MEASURE = 26
"""Minimum width of the column of figure names."""

INDENT, BELOW = 3, 5
"""Indentation of a finding's texts, and of texts about a fix."""

TWO_COLUMNS, LIST = 110, 32
"""Minimum screen width for a list of findings next to the selected one, and the width of that list."""

CHART_ROWS = 11

WRAPPING_TABLE = 80
"""Minimum width for a table of figures whose sources may wrap."""

SIDE_BY_SIDE = 100
"""Minimum width for a fix's trade-off next to its reason; in narrow columns, they would read as one sentence."""


class FindingItem(msgspec.Struct, frozen=True):
    """A `Choice` and its rows on the page, ``end`` exclusive."""

    finding: int
    fix: Fix | None
    first: int
    end: int


Predicted = Callable[[str, Fix], Part]
"""Returns the predicted effect of a fix on the finding with this code; empty if unknown."""


Choice = tuple[int, Fix | None]
"""Something to pick: the index of a finding, with one of its fixes if it has any that can be staged."""


class FindingsPage(msgspec.Struct, frozen=True):
    """The lines of the page and its choices, in order."""

    lines: tuple[Strip, ...]
    items: tuple[FindingItem, ...]


class FindingsScreen(ReaderScreen):
    """Shows the findings of one server as it was when the screen was opened.

    ``stage`` receives the chosen fix; without it (read-only, someone else's server) no fix can be chosen. ``predicted``
    returns a fix's predicted effect, empty if unknown.
    """

    SCOPE = "findings"
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("findings"),
        *bindings(MOVING, priority=("move_down", "move_up")),
    ]

    def __init__(
        self, server: ServerView, now: float, stage: Callable[[Fix], None] | None, predicted: Predicted
    ) -> None:
        super().__init__(
            TextReader(lambda: f"Findings · {server.marked_name}", lambda width: self._page(width).lines, self._hints)
        )
        self._server, self._now, self._stage, self._predicted = server, now, stage, predicted
        self._picked: Choice = (0, None)
        """The choice itself, not its index: the choices depend on the width."""

    def _page(self, width: int) -> FindingsPage:
        stages, at = self._stage is not None, self._at(width)
        return findings_page(self._server, self._now, width, at, self._predicted, stages=stages)

    def _choices(self, width: int) -> list[Choice]:
        return choices(findings_of(self._server), width, stages=self._stage is not None)

    def _at(self, width: int) -> int:
        """Index of the picked choice; if it does not exist at this width, of the next or last one."""
        found = self._choices(width)
        if self._picked in found:
            return found.index(self._picked)
        return next((at for at, (finding, _) in enumerate(found) if finding >= self._picked[0]), max(0, len(found) - 1))

    def _hints(self) -> Sequence[KeyHint]:
        items = self._page(self._reader.width).items
        if len(items) < 2 and not (items and items[0].fix is not None):
            return (scroll_hint(),)
        stage = ((key_of("findings_stage"), "stage", "screen.stage"),) if any(item.fix for item in items) else ()
        return (
            (f"{key_of('move_down')} {key_of('move_up')}", "pick"),
            *stage,
            (f"{key_of('page_down')} {key_of('page_up')}", "scroll"),
        )

    def action_move(self, by: int) -> None:
        """Pick the next or previous fix or finding; at either end, scroll."""
        items = self._page(self._reader.width).items
        at = self._at(self._reader.width) + by
        if not items or not 0 <= at < len(items):
            self._reader.action_move(by)
            return
        self._pick(at)

    def _pick(self, at: int) -> None:
        self._picked = self._choices(self._reader.width)[at]
        self._reader.redraw()
        picked = self._page(self._reader.width).items[at]
        self._reader.scroll_to_rows(picked.first, picked.end)

    def on_click(self, event: events.Click) -> None:
        """Pick the clicked finding or fix; a double click stages it."""
        place, width = self._reader.place_of(event), self._reader.width
        if place is None:
            return
        items = self._page(width).items
        if width >= TWO_COLUMNS and place.x < LIST:
            at = next((at for at, item in enumerate(items) if item.finding == place.y - 1), None)
        else:
            at = next((at for at, item in enumerate(items) if item.first <= place.y < item.end), None)
        if at is not None:
            self._pick(at)
            if event.chain == 2:
                self.action_stage()

    def action_stage(self) -> None:
        """Stage the picked fix and go back."""
        items = self._page(self._reader.width).items
        if self._stage is None or not items or (fix := items[self._at(self._reader.width)].fix) is None:
            return
        self.close_with()
        self._stage(fix)


def findings_page(
    server: ServerView, now: float, width: int, picked: int, predicted: Predicted, *, stages: bool = False
) -> FindingsPage:
    """All findings, worst first: on a wide screen as a list next to the picked one, else one below the other.

    ``picked`` is an index into the choices. ``stages``: whether fixes can be staged.
    """
    found = findings_of(server)
    if not found:
        return FindingsPage((line(), *paragraph(_nothing(server), width - 2)), ())
    if width < TWO_COLUMNS:
        return _stacked(server, found, now, width, picked if stages else None, predicted)
    items = [FindingItem(at, fix, 0, 0) for at, fix in choices(found, width, stages=stages)]
    here = items[min(picked, len(items) - 1)].finding
    before = next(at for at, item in enumerate(items) if item.finding == here)
    room = width - LIST - 2
    evidence = _evidence(server, found[here].code, now, room)
    lines, rows = _detail(server, found[here], now, room, picked - before if stages else None, predicted, evidence)
    for at, (first, end) in enumerate(rows if stages else ()):
        items[before + at] = msgspec.structs.replace(items[before + at], first=first, end=end)
    listed = [line((" FINDINGS", DIM)), *(_listed(one, at == here, now) for at, one in enumerate(found))]
    joined = [
        beside(beside(left, LIST, line(("│", DIM))), LIST + 2, right)
        for left, right in zip_longest(listed, lines, fillvalue=line())
    ]
    return FindingsPage(tuple(joined), tuple(items))


def choices(found: Sequence[ServerFinding], width: int, *, stages: bool) -> list[Choice]:
    """The choices at this width: each fix and, if findings are listed, those without a fix."""
    chosen: list[Choice] = []
    for at, one in enumerate(found):
        fixes: list[Choice] = [(at, fix) for fix in one.flag_fixes] if stages else []
        chosen += fixes or ([(at, None)] if width >= TWO_COLUMNS else [])
    return chosen


def _stacked(
    server: ServerView,
    found: Sequence[ServerFinding],
    now: float,
    width: int,
    picked: int | None,
    predicted: Predicted,
) -> FindingsPage:
    """All findings one below the other; only fixes can be picked."""
    lines: list[Strip] = []
    items: list[FindingItem] = []
    for at, one in enumerate(found):
        here = picked - len(items) if picked is not None else None
        detail, rows = _detail(server, one, now, width, here, predicted)
        if picked is not None:
            fixes = zip(one.flag_fixes, rows, strict=True)
            items += [FindingItem(at, fix, first + len(lines), end + len(lines)) for fix, (first, end) in fixes]
        lines += [*detail, line()]
    return FindingsPage(tuple(lines), tuple(items))


def _listed(found: ServerFinding, here: bool, now: float) -> Strip:
    sign, style = SIGNS[found.severity]
    since = since_text(found.since, now).removeprefix("since ") if found.since is not None else ""
    title = fit(found.title, LIST - 5 - len(since))
    if here:
        return line((f" {sign} {title} {since} ", CURSOR))
    return line((f" {sign} ", style), title, (f" {since} ", DIM))


def _nothing(server: ServerView) -> str:
    if server.moment is not None:
        if server.no_findings:
            return f"No findings available for that moment: {server.no_findings}."
        return "No findings at that moment (GPU findings are live only)."
    if not server.state.alive:
        return f"Cause unknown: {key_of('open_log')} shows its log."
    if early := unjudged(server):
        return f"No findings yet. {early}."
    return "No findings: not enough traffic yet."


def _detail(
    server: ServerView,
    found: ServerFinding,
    now: float,
    width: int,
    picked: int | None,
    predicted: Predicted,
    evidence: Sequence[Strip] = (),
) -> tuple[list[Strip], list[tuple[int, int]]]:
    """One finding with its chart, and the rows (end exclusive) of each fix that changes flags.

    ``picked`` is the index of one of these fixes.
    """
    lines = [*_about(found, now, width), *evidence, *_figures(found.measures, width)]
    if found.fixes:
        lines += [line(), line((fit("   FIXES, best first", width).rstrip(), DIM))]
    rows: list[tuple[int, int]] = []
    for fix in found.fixes:
        begin = len(lines)
        lines += _fix(server, fix, width, not fix.changes.empty and picked == len(rows), predicted(found.code, fix))
        if not fix.changes.empty:
            rows.append((begin, len(lines)))
    return lines, rows


def _about(found: ServerFinding, now: float, width: int) -> list[Strip]:
    sign, style = SIGNS[found.severity]
    since = f" {since_text(found.since, now)}" if found.since is not None else ""
    lines = [line((f" {sign} ", style), (found.title, style if found.severity is not Severity.GOOD else STRONG),
                  since, (f"  {found.severity}", DIM))]  # fmt: skip
    if found.load is not None:
        text = f"{found.load[0].capitalize()} (pid {found.load[1]}): this may be due to its load."
        lines += paragraph(text, width, ACCENT, " " * INDENT)
    for text, tone in ((found.symptom, None), (found.cause, None), (found.line, DIM)):
        lines += paragraph(text, width, tone, " " * INDENT)
    return lines


def _evidence(server: ServerView, code: str, now: float, width: int) -> list[Strip]:
    """The chart that shows the finding, over the range of the operations screen; empty if it has none."""
    pane, view = FINDING_PANES.get(code), ChartView(cursor=server.moment)
    if server.series is None or pane not in _CHARTS:
        return []
    return [line(), *(strip.crop(0, width) for strip in _CHARTS[pane](server, code, now, width, view))]


def _latency(server: ServerView, code: str, _now: float, width: int, view: ChartView) -> Sequence[Strip]:
    return latency_chart(server, "ttft" if code == "slow_first_token" else "itl", width, CHART_ROWS, view)


def _pane(draw: Draw) -> Callable[[ServerView, str, float, int, ChartView], Sequence[Strip]]:
    return lambda server, _code, now, width, view: draw(server, now, width, CHART_ROWS, view)


_CHARTS = {
    KV_CACHE: _pane(kv_cache_lines),
    PREEMPTIONS: _pane(preemption_lines),
    LATENCY: _latency,
    THROUGHPUT: _pane(throughput_lines),
}


def _figures(measures: Sequence[Measure], width: int) -> list[Strip]:
    """Measurements, limits and their sources: a table, or wrapped lines if it would be too wide."""
    if not measures:
        return []
    cells = [(plain(one.name), plain(one.value), plain(one.limit or "–"), plain(one.source)) for one in measures]
    *fixed, sources = (max(cell_len(row[at]) for row in cells) + 2 for at in range(4))
    if INDENT + sum(fixed) + (LEAST_LAST if width >= WRAPPING_TABLE else sources) <= width:
        columns = ("MEASURED", ">VALUE", ">LIMIT", "SOURCE")
        rows = [(name, (value, STRONG), limit, (source, DIM)) for name, value, limit, source in cells]
        return [line(), *(beside(line(), INDENT - 1, strip) for strip in table(columns, rows, width - INDENT + 1))]
    lines = [line()]
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
        # Wrap what does not fit in a line; never cut it.
        names, room = wrapped(name, column - 2), max(10, room)
        parts = ((value, STRONG), (limit.strip(), None), (source.strip(), DIM))
        texts: list[Part] = [(row, style) for text, style in parts for row in wrapped(text, room)]
        lines += [line(" " * INDENT, fit(one, column), text) for one, text in zip_longest(names, texts, fillvalue="")]
    return lines


def _fix(server: ServerView, fix: Fix, width: int, here: bool, effect: Part) -> list[Strip]:
    """A fix: the change, its predicted effect, its reason and, side by side if there is room, its trade-off."""
    mark: Part = (" ▸ ", ACCENT) if here else "   "
    if fix.changes.empty:
        lines = paragraph(fix.why, width, indent=" " * BELOW, first=["   ", "· "])
        texts = [f"Trade-off: {fix.tradeoff}"] if fix.tradeoff else []
    else:
        style = STRONG + CURSOR if here else ACCENT
        lines = paragraph(flag_change_text(server.flags, fix.changes), width, style, " " * INDENT, first=[mark])
        text, tone = (effect, None) if isinstance(effect, str) else effect
        lines += paragraph(text, width, tone, " " * BELOW)
        texts = [fix.why]
        if fix.tradeoff and width >= SIDE_BY_SIDE:
            column = (width - 7) // 2
            pair = [wrapped(plain(text), column) for text in (fix.why, f"Trade-off: {fix.tradeoff}")]
            return [*lines, *(line("     ", fit(why, column + 2), (trade, DIM))
                              for why, trade in zip_longest(*pair, fillvalue=""))]  # fmt: skip
        texts += [f"Trade-off: {fix.tradeoff}"] if fix.tradeoff else []
    for text in texts:
        lines += paragraph(text, width, indent=" " * BELOW)
    return lines

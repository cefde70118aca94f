"""Pane 3: how long requests wait and take."""

from __future__ import annotations

import math
from functools import lru_cache

import msgspec
from msgspec.structs import replace
from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.quantile import Quantiles, contradicting, text_of
from vllm_console.metrics.sample import Series
from vllm_console.text import seconds
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.base import (
    age_note,
    format_waiting,
    latencies_of,
    past_load,
    title_line,
    why_empty,
    window_note,
)
from vllm_console.ui.panes.distributions import MARKS, quantile_bar
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, BAD, DIM, STRONG, WARN
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, chart_of
from vllm_console.ui.widgets.draw import Part, fit, shares, whole_clauses

LABELS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "e2e": "end-to-end",
}
CHARTS = {
    latency: (Curve(f"{latency}_p50", "p50", DIM), Curve(f"{latency}_p99", "p99", ACCENT))
    for latency in ("ttft", "itl")
}
"""The latencies to chart, in order of priority."""

SMALLEST_CHART = 5

SPREAD = 100
"""Minimum width to show each latency's quantiles on a shared axis."""

LONGEST_SPREAD = 120

TOO_FAR = 10
"""A chart whose top is more than this many times its median p50 uses a logarithmic scale."""

TABLE, LEAST_BESIDE, LEAST_BESIDE_ROWS = 52, 24, 8
"""Columns of the table with charts next to it, minimum columns of these charts, and rows that must be exceeded."""

BRIEF = ("ttft", "itl", "e2e")
"""Rows of the table in a pane that otherwise has no room for a chart: as many as fit, at least two."""


def latency_lines(server: ServerView, now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """Title, table, waiting requests, and as many small charts as fit, below or next to the table."""
    ended = " · load ended" if past_load(server) else ""
    exact = _exact(server)
    whole = ", exact" if exact and exact == _known(server) else ""
    over = window_note(server, now)
    whole_note, *shorter = [((text, DIM),) for text in (f"{over}{whole}{ended}", f"{over}{ended}", over)]
    title = title_line(3, "Latency", width, age_note(server, now) or whole_note, *shorter)
    beside = width >= TABLE + LEAST_BESIDE
    brief = not beside and 4 + SMALLEST_CHART <= height < 2 + len(LABELS) + 2 * SMALLEST_CHART
    rows = BRIEF[: max(2, height - 2 - SMALLEST_CHART)] if brief else tuple(LABELS)
    notes = _waiting(server, width) if brief else _notes(server, width)
    above = 2 + len(rows) + len(notes)
    if beside and LEAST_BESIDE_ROWS < height < above + SMALLEST_CHART:
        table = [*_table(server, rows, TABLE), *_notes(server, TABLE)]
        table += [line()] * (height - 1 - len(table))
        charts = _charts(server, width - TABLE, height - 1, view)
        joined = (Strip.join([one.adjust_cell_length(TABLE), two]) for one, two in zip(table, charts, strict=False))
        return [title, *joined][:height]
    lines = [title, *_table(server, rows, width)]
    if (hidden := len(lines) - height) > 0:
        text = f" {hidden + 1} more rows" + ("" if view.large else f": {key_of('pane_3')} enlarges")
        return [*lines[: height - 1], line((fit(text, width).rstrip(), DIM))]
    lines += notes
    enlarges = f" · {key_of('pane_3')} shows all" if brief and not view.large else ""
    return [*lines, *_charts(server, width, height - len(lines), view, enlarges)][:height]


def _table(server: ServerView, rows: tuple[str, ...], width: int) -> list[Strip]:
    columns, objectives = _Columns.of(width), latency_objectives(server)
    heads = "".join(fit(head, columns.width, ">") for head in ("mean", *columns.parts))
    heading = fit("", columns.label) + heads + fit("obj.", columns.objective, ">")
    axis = _Axis.of(server, rows, min(LONGEST_SPREAD, width - cell_len(heading) - 6)) if width >= SPREAD else None
    lines = [line((heading, DIM), (f"    {axis.heading}" if axis is not None else "", DIM))]
    return [*lines, *(_row(server, latency, objectives.get(latency), columns, axis) for latency in rows)]


def _charts(server: ServerView, width: int, room: int, view: ChartView, note: str = "") -> list[Strip]:
    """As many charts as fit, each with a heading that includes ``note``."""
    lines = list[Strip]()
    fitting = min(len(CHARTS), room // SMALLEST_CHART) or int(room >= SMALLEST_CHART - 1)
    for latency, share in zip(CHARTS, shares(room, fitting) if fitting else (), strict=False):
        lines += latency_chart(server, latency, width, share, view, note)
    return lines


def latency_chart(
    server: ServerView, latency: str, width: int, height: int, view: ChartView = PLAIN, note: str = ""
) -> list[Strip]:
    """A heading and the chart of one of `CHARTS`; ``note`` replaces the description of its points."""
    log = on_log_scale(server, latency, view)
    scale = (", log" if note else ", log scale") if log else ""
    heading = f" {LABELS[latency]} p50, p99"
    for words in (scale, note or _point_words(server.series, latency)):
        heading += words if cell_len(heading + words) <= width else ""
    chart = chart_of(
        server.series,
        CHARTS[latency],
        width,
        height - 1,
        _on_a_scale,
        objective=latency_objectives(server).get(latency),
        view=replace(view, log=log),
        markers=server.markers,
        empty=why_empty(server, _no_points(server, latency)),
    )
    return [line((fit(heading, width).rstrip(), DIM)), *chart]


def _no_points(server: ServerView, latency: str) -> str:
    """Why a latency's chart is empty: no requests, or only figures in the table but no complete point yet."""
    found = latencies_of(server.window, latency)
    if found is None or not found.count:
        return "no requests in this period"
    return f"no chart points yet; figures: {'last minute' if server.moment is None else 'the minute before'}"


def _on_a_scale(value: float | None) -> str:
    """A latency as a scale label; ends of scales are round: ``1ms``."""
    return seconds(value).replace(".0ms", "ms")


def on_log_scale(server: ServerView, latency: str, view: ChartView) -> bool:
    """Whether this latency's chart is logarithmic: as chosen, or if p50 would otherwise be at the bottom."""
    if view.log is not None:
        return view.log
    objective = latency_objectives(server).get(latency, 0.0)
    values = server.series.values if server.series is not None else {}
    return _far_apart(tuple(values.get(f"{latency}_p50", ())), tuple(values.get(f"{latency}_p99", ())), objective)


@lru_cache(maxsize=8)
def _far_apart(p50: tuple[float | None, ...], p99: tuple[float | None, ...], objective: float) -> bool:
    known = sorted(value for value in p50 if value)
    top = max((value for value in p99 if value is not None), default=0.0)
    return bool(known) and max(top, objective) > TOO_FAR * known[len(known) // 2]


def _notes(server: ServerView, width: int) -> list[Strip]:
    """What the table leaves out or mixes: waiting requests, and figures from different requests."""
    notes = _waiting(server, width)
    if (exact := _exact(server)) and exact != _known(server):
        text = f" exact: {', '.join(LABELS[latency] for latency in exact)}"
        notes.append(whole_clauses(line((text, DIM)), width))
    if server.window is not None and contradicting(server.window.latencies):
        text = " queue to e2e: finished requests only"
        notes.append(line((fit(text, width).rstrip(), DIM)))
    return notes


def _waiting(server: ServerView, width: int) -> list[Strip]:
    waiting = format_waiting(server.window)
    return [whole_clauses(line((f" {waiting}: not in TTFT", WARN)), width)] if waiting else []


def _known(server: ServerView) -> list[str]:
    return [latency for latency in LABELS if (found := latencies_of(server.window, latency)) and found.count]


def _exact(server: ServerView) -> list[str]:
    return [latency for latency in LABELS if (found := latencies_of(server.window, latency)) and found.exact]


def _point_words(series: Series | None, latency: str) -> str:
    """Whether points are exact, and whether some are only bounds: the value lies beyond the end of the bucket drawn."""
    values = series.values if series is not None else {}
    known = sum(value is not None for value in values.get(f"{latency}_p99", ()))
    exact = sum(value is not None for value in values.get(f"{latency}_exact", ()))
    words = f", {'' if exact >= known else 'partly '}exact" if exact else ""
    return words + (", partly bucket bounds" if any(values.get(f"{latency}_p99_bound", ())) else "")


def latency_objectives(server: ServerView) -> dict[str, float]:
    """The p99 objectives in seconds, by latency."""
    objectives = server.objectives
    return {"ttft": objectives.ttft_p99_seconds, "itl": objectives.itl_p99_seconds} if objectives else {}


class _Columns(msgspec.Struct, frozen=True):
    """The quantiles in the table and the widths of its columns; a narrow table has no p90."""

    parts: tuple[str, ...]
    label: int
    width: int
    objective: int

    @classmethod
    def of(cls, width: int) -> _Columns:
        column = min(10, (width - 13) // 5)
        if column >= len("<300ms") + 1:
            return cls(("p50", "p90", "p99"), 11, column, column)
        return cls(("p50", "p99"), 9, 7, 6)


class _Axis(msgspec.Struct, frozen=True):
    """A logarithmic axis of ``cells`` for quantiles; ``low`` and ``high`` are natural logarithms."""

    low: float
    high: float
    cells: int

    @classmethod
    def of(cls, server: ServerView, latencies: tuple[str, ...], cells: int) -> _Axis | None:
        """From a power of ten below all known quantiles to one above; None without any."""
        values = [value for latency in latencies for value in _values(latencies_of(server.window, latency))]
        if not values:
            return None
        low = 10.0 ** math.floor(math.log10(min(values)))
        high = 10.0 ** math.ceil(math.log10(max(values)))
        return cls(math.log(low), math.log(max(high, 10 * low)), cells)

    @property
    def heading(self) -> str:
        first, last = _on_a_scale(math.exp(self.low)), _on_a_scale(math.exp(self.high))
        legend = " ├ p50 ┼ p90 ┤ p99 "
        room = self.cells - len(first) - len(last) - len(legend)
        return f"{first} {'·' * (room // 2 - 1)}{legend}{'·' * (room - room // 2 - 1)} {last}"


def _values(found: Quantiles | None) -> list[float]:
    """The median, p90 and p99; empty if one of them is unknown or only a bound."""
    parts = (found.p50, found.p90, found.p99) if found is not None else ()
    values = [part.value for part in parts if part is not None and part.value]
    return values if len(values) == len(MARKS) else []


def _row(
    server: ServerView, latency: str, objective: float | None, columns: _Columns, axis: _Axis | None = None
) -> Strip:
    found = latencies_of(server.window, latency) or Quantiles(0.0, None)
    missed = objective is not None and found.p99 is not None and server.missed(f"{latency}_p99_seconds")
    past = DIM if past_load(server) else None
    label = LABELS[latency] if len(LABELS[latency]) < columns.label else latency
    parts: list[Part] = [fit(f" {label}", columns.label), (fit(seconds(found.mean), columns.width, ">"), past)]
    for part in columns.parts:
        style = (BAD if missed else past or STRONG) if part == "p99" else past
        parts.append((fit(text_of(getattr(found, part)), columns.width, ">"), style))
    parts.append((fit(seconds(objective) if objective is not None else "", columns.objective, ">"), DIM))
    if missed or axis is not None:
        parts.append((" !  " if missed else " " * 4, BAD))
    if axis is not None and (values := _values(found)):
        style = BAD if missed else past or ACCENT
        parts.append((quantile_bar(values, axis.low, axis.high, axis.cells), style))
    return line(*parts)

"""Pane 3: how long requests wait and take."""

from __future__ import annotations

import msgspec
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.quantile import Quantiles, contradicting, text_of
from vllm_console.metrics.sample import Series
from vllm_console.text import seconds
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.base import age_note, format_waiting, latencies_of, past_load, title_of, window_note
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, BAD, DIM, STRONG, WARN
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, chart_of
from vllm_console.ui.widgets.draw import Part, fit, rule

LABELS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "e2e": "end-to-end",
}
CHARTS = tuple(
    (latency, (Curve(f"{latency}_p50", "p50", DIM), Curve(f"{latency}_p99", "p99", ACCENT)))
    for latency in ("ttft", "itl")
)
"""The latencies that are drawn, in the order in which they get room."""

SMALLEST_CHART = 4

NARROW = 60
"""Narrower panes stand beside others: key 3 shows them large."""

TABLE, LEAST_BESIDE = 52, 24
"""Columns of the table where charts stand beside it, and the fewest that charts need there."""

BRIEF = ("ttft", "itl", "e2e")
"""The rows of such a pane that would have no room for a chart otherwise, as many as there is room for; two at least."""


def latency_lines(server: ServerView, now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """Title, table, what waits, and as many small charts as there is room for: below the table, else beside it."""
    ended = " · load ended" if past_load(server) else ""
    exact = _exact(server)
    whole = ", exact" if exact and exact == _known(server) else ""
    note = age_note(server, now) or ((f"{window_note(server, now)}{whole}{ended}", DIM),)
    title = rule(title_of(3, "Latency", server), width, note)
    most = 2 + len(LABELS) + SMALLEST_CHART
    brief = width < NARROW and most - len(LABELS) + 2 <= height < most
    rows = BRIEF[: height - 2 - SMALLEST_CHART] if brief else tuple(LABELS)
    notes = [] if brief else _notes(server, width)
    above = 2 + len(rows) + len(notes)
    if width >= TABLE + LEAST_BESIDE and 2 * SMALLEST_CHART < height < above + SMALLEST_CHART:
        table = [*_table(server, rows, TABLE), *_notes(server, TABLE)]
        table += [line()] * (height - 1 - len(table))
        charts = _charts(server, width - TABLE, height - 1, view)
        beside = [Strip.join([one.adjust_cell_length(TABLE), other]) for one, other in zip(table, charts, strict=False)]
        return [title, *beside][:height]
    lines = [title, *_table(server, rows, width)]
    if (hidden := len(lines) - height) > 0:
        text = f" {hidden + 1} more rows: {key_of('pane_3')} enlarges"
        return [*lines[: height - 1], line((fit(text, width).rstrip(), DIM))]
    lines += notes
    enlarges = f" · {key_of('pane_3')} shows all" if brief else ""
    return [*lines, *_charts(server, width, height - len(lines), view, enlarges)][:height]


def _table(server: ServerView, rows: tuple[str, ...], width: int) -> list[Strip]:
    """The heading, and a row for each of these latencies."""
    columns, objectives = _Columns.of(width), objectives_of(server)
    heads = "".join(fit(head, columns.width, ">") for head in ("mean", *columns.parts))
    heading = line((fit("", columns.label) + heads + fit("obj.", columns.objective, ">"), DIM))
    return [heading, *(_row(server, latency, objectives.get(latency), columns) for latency in rows)]


def _charts(server: ServerView, width: int, room: int, view: ChartView, note: str = "") -> list[Strip]:
    """As many charts as there is room for, each with a heading, in which ``note`` stands."""
    objectives, lines = objectives_of(server), list[Strip]()
    fitting = min(len(CHARTS), room // SMALLEST_CHART)
    for index, (latency, curves) in enumerate(CHARTS[:fitting]):
        share = room // fitting + (1 if index < room % fitting else 0)
        notes = note or (", log scale" if view.log else "")
        notes += _point_words(server.series, latency)
        lines.append(line((fit(f" {LABELS[latency]} p50, p99{notes}", width).rstrip(), DIM)))
        objective = objectives.get(latency)
        lines += chart_of(
            server.series, curves, width, share - 1, seconds, objective=objective, view=view, markers=server.markers
        )
    return lines


def _notes(server: ServerView, width: int) -> list[Strip]:
    """What the table leaves out or mixes: requests that still wait, and figures of different requests."""
    notes: list[Strip] = []
    if waiting := format_waiting(server.window):
        notes.append(line((fit(f" {waiting}: not in TTFT", width).rstrip(), WARN)))
    if (exact := _exact(server)) and exact != _known(server):
        text = f" exact: {', '.join(LABELS[latency] for latency in exact)}"
        notes.append(line((fit(text, width).rstrip(), DIM)))
    if server.window is not None and contradicting(server.window.latencies):
        text = " queue to e2e: finished requests only"
        notes.append(line((fit(text, width).rstrip(), DIM)))
    return notes


def _known(server: ServerView) -> list[str]:
    """The latencies of which something is known."""
    return [latency for latency in LABELS if (found := latencies_of(server.window, latency)) and found.count]


def _exact(server: ServerView) -> list[str]:
    """The latencies that are exact."""
    return [latency for latency in LABELS if (found := latencies_of(server.window, latency)) and found.exact]


def _point_words(series: Series | None, latency: str) -> str:
    """Whether points are exact, and that some are no values: they lie beyond the end of the bucket that is drawn."""
    values = series.values if series is not None else {}
    known = sum(value is not None for value in values.get(f"{latency}_p99", ()))
    exact = sum(value is not None for value in values.get(f"{latency}_exact", ()))
    words = f", {'' if exact >= known else 'partly '}exact" if exact else ""
    return words + (", partly bucket bounds" if any(values.get(f"{latency}_p99_bound", ())) else "")


def objectives_of(server: ServerView) -> dict[str, float]:
    """The p99 objectives, in seconds, by latency."""
    objectives = server.objectives
    return {"ttft": objectives.ttft_p99_seconds, "itl": objectives.itl_p99_seconds} if objectives else {}


class _Columns(msgspec.Struct, frozen=True):
    """Which quantiles the table shows, and how wide its columns are; a narrow one has no p90."""

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


def _row(server: ServerView, latency: str, objective: float | None, columns: _Columns) -> Strip:
    found = latencies_of(server.window, latency) or Quantiles(0.0, None)
    missed = objective is not None and found.p99 is not None and server.missed(f"{latency}_p99_seconds")
    past = DIM if past_load(server) else None
    label = LABELS[latency] if len(LABELS[latency]) < columns.label else latency
    parts: list[Part] = [fit(f" {label}", columns.label), (fit(seconds(found.mean), columns.width, ">"), past)]
    for part in columns.parts:
        style = (BAD if missed else past or STRONG) if part == "p99" else past
        parts.append((fit(text_of(getattr(found, part)), columns.width, ">"), style))
    parts.append((fit(seconds(objective) if objective is not None else "", columns.objective, ">"), DIM))
    if missed:
        parts.append((" !", BAD))
    return line(*parts)

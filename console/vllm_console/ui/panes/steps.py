"""Pane 8: the engine's steps: batch sizes, their tokens, and how long they took."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.sample import Series
from vllm_console.text import UNKNOWN, amount, clock, duration, seconds
from vllm_console.ui.panes.base import nothing_recorded, title_line
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, DIM, SECOND
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, chart_of, mean, value_at
from vllm_console.ui.widgets.draw import Part, shares, side_by_side, whole_clauses

COLUMN = 44
"""Minimum width of a chart next to another."""

SMALLEST_CHART = 4


class _Plot(msgspec.Struct, frozen=True):
    title: str
    curves: tuple[Curve, ...]
    label: Callable[[float], str]


PLOTS = (
    _Plot(
        "tokens per step",
        (Curve("decode_tokens", "decode", ACCENT, mean), Curve("prompt_tokens", "prompt", SECOND, mean)),
        amount,
    ),
    _Plot(
        "step time",
        (Curve("step_p50", "p50", DIM), Curve("step_p99", "p99", ACCENT)),
        seconds,
    ),
    _Plot(
        "requests per step",
        (Curve("running", "run", ACCENT, mean), Curve("waiting", "wait", SECOND)),
        amount,
    ),
)
"""The charts, in order of priority."""


def step_lines(server: ServerView, _now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """The title and the charts that fit, each with its current figures; or why nothing is recorded."""
    probe = server.probe
    if probe is None or probe.steps is None:
        return [title_line(8, "Steps", width), *nothing_recorded(server, width)][:height]
    series = probe.steps
    columns = min(len(PLOTS), max(1, width // COLUMN))
    room = height - 1
    fitting = min(len(PLOTS), columns * max(1, room // SMALLEST_CHART))
    rows = -(-fitting // columns)
    more = "" if fitting == len(PLOTS) else f"enlarge the {'window' if view.large else 'pane'} for more"
    latest = f"latest {duration(series.step)}" if view.cursor is None and series.values else ""
    note = " · ".join(filter(None, (_begins(series), more, latest)))
    lines = [title_line(8, "Steps", width, ((note, DIM),) if note else ())]
    for row, tall in enumerate(shares(room, rows)):
        shown = PLOTS[row * columns : min(fitting, (row + 1) * columns)]
        wide = (width - len(shown) + 1) // len(shown)
        lines += side_by_side([_chart(plot, series, server, view, wide, tall) for plot in shown], wide, tall)
    return lines[:height]


def _begins(series: Series) -> str:
    """Why the left part of the charts is empty, if so: no steps were recorded then."""
    known = [[value is not None for value in values] for values in series.values.values()]
    firsts = [len(values) - values.index(True) for values in known if any(values)]
    longest = max(map(len, known), default=0)
    if series.loading or not firsts or max(firsts) > longest - 2:
        return ""
    began = series.end - series.step * max(firsts)
    return f"no steps recorded before {clock(began, series.end)}"


def _chart(plot: _Plot, series: Series, server: ServerView, view: ChartView, width: int, height: int) -> list[Strip]:
    log = bool(view.log) and plot.label is seconds
    chart = chart_of(
        series,
        plot.curves,
        width,
        height - 1,
        plot.label,
        view=replace(view, log=log),
        markers=server.markers,
    )
    return [_heading(plot, series, view.cursor, width), *chart]


def _heading(plot: _Plot, series: Series, cursor: float | None, width: int) -> Strip:
    parts: list[Part] = [(f" {plot.title} ", DIM)]
    for curve in plot.curves:
        value = value_at(series, curve.key, cursor)
        text = UNKNOWN if value is None else plot.label(value)
        parts += [(f" {curve.name} ", curve.style), text]
    return whole_clauses(line(*parts), width)

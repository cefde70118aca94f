"""Charts on a fixed scale, drawn in braille: pure functions from numbers to text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from rich.style import Style
from textual.strip import Strip

from vllm_console.telemetry.model import Series
from vllm_console.ui.theme import BAD, DIM, OK
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.lines import line as strip_line

_LEFT, _RIGHT = (0, 0x40, 0x44, 0x46, 0x47), (0, 0x80, 0xA0, 0xB0, 0xB8)
"""Braille dots of a cell's left and right column, filled from the bottom: none to four."""

_CELLS = [[chr(0x2800 + left + right) for right in _RIGHT] for left in _LEFT]
"""A cell's character by how many dots its columns show."""

AXIS = 6
"""Cells left of a chart: a label and the axis."""


@lru_cache(maxsize=128)
def resample(
    values: tuple[float | None, ...], columns: int, first: int, how: Callable[[Sequence[float]], float] = max
) -> tuple[float | None, ...]:
    """``values`` over exactly ``columns``, the newest at the right; ``how`` joins the points of one column.

    ``first`` is the absolute number of the first point (its time by the step). Which column a point belongs to depends
    on that number alone, so that a chart moves by whole columns and its past does not flicker.
    """
    count = len(values)
    if columns <= 0 or not count:
        return (None,) * max(0, columns)
    last = first + count - 1
    newest = last * columns // count if count >= columns else -(-(last + 1) * columns // count) - 1
    result: list[float | None] = []
    for column in range(newest - columns + 1, newest + 1):
        start, end = -(-column * count // columns), -(-(column + 1) * count // columns)
        if start == end:  # fewer points than columns: the one that covers this column
            start, end = column * count // columns, column * count // columns + 1
        found = [value for value in values[max(0, start - first) : max(0, end - first)] if value is not None]
        result.append(how(found) if found else None)
    return tuple(result)


def braille_chart(
    values: tuple[float | None, ...], width: int, height: int, lo: float, hi: float, line: float | None = None
) -> tuple[str, ...]:
    """A filled chart on a fixed scale, ``height`` rows of ``width`` cells, from the top; four dots to a row.

    ``values`` are two per cell, oldest first (see `resample`). None, which is 'not reported', leaves its column blank;
    a value above ``hi`` is cut off there; any other reported one shows at least one dot. ``line`` is drawn dotted
    where the chart is blank.
    """
    span = (hi - lo) or 1.0
    heights = [
        0 if value is None else max(1, round(min(1.0, max(0.0, (value - lo) / span)) * height * 4)) for value in values
    ]
    heights += [0] * (2 * width - len(heights))
    dotted = row_of(line, height, lo, hi)
    rows = []
    for row in range(height):
        base = (height - 1 - row) * 4
        dots = [0 if level <= base else min(4, level - base) for level in heights]
        text = "".join([_CELLS[dots[at]][dots[at + 1]] for at in range(0, 2 * width, 2)])
        rows.append(text.replace(_CELLS[0][0], "┄" if row == dotted else " "))
    return tuple(rows)


def row_of(value: float | None, height: int, lo: float, hi: float) -> int | None:
    """The row (0 is the top) in which a value of the scale lies; None when it is outside, or there is none."""
    if value is None or not lo <= value <= hi or hi <= lo:
        return None
    return min(height - 1, int((hi - value) / (hi - lo) * height))


def nice_ceiling(value: float) -> float:
    """The next round number (1, 1.5, 2, 2.5, 3, 4, …) at or above ``value``, so that a scale changes seldom."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        factor * power for factor in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0) if factor * power >= value
    )


def chart_of(
    series: Series | None,
    key: str,
    width: int,
    height: int,
    label: Callable[[float], str],
    *,
    hi: float | None = None,
    goal: float | None = None,
    how: Callable[[Sequence[float]], float] = max,
    scale: float = 1.0,
    style: Style = OK,
) -> list[Strip]:
    """A series with its axis, ``height`` rows of ``width`` cells in all, the lowest one the time axis.

    Values are multiplied by ``scale``. Without ``hi`` the axis ends at the next round number above the largest value
    and the goal. What lies above the goal is drawn in another colour, and the goal's line is labelled.
    """
    columns, rows = width - AXIS, height - 1
    values = series.values.get(key, ()) if series else ()
    if columns < 4 or rows < 1:
        return []
    if series is None or not any(value is not None for value in values):
        return _empty(columns, rows)
    first = round(series.end / series.step) - len(values)
    dots = resample(values, columns * 2, first, how)
    if scale != 1.0:
        dots = tuple(None if value is None else value * scale for value in dots)
    top = hi or nice_ceiling(max([value for value in dots if value is not None] + ([goal] if goal else [])))
    drawn = _drawn(dots, columns, rows, top, goal, label, style)
    return [*drawn, _time_axis(columns, len(values) * series.step)]


@lru_cache(maxsize=64)
def _drawn(
    dots: tuple[float | None, ...],
    columns: int,
    rows: int,
    top: float,
    goal: float | None,
    label: Callable[[float], str],
    style: Style,
) -> tuple[Strip, ...]:
    goal_row = row_of(goal, rows, 0.0, top)
    strips = []
    for row, text in enumerate(braille_chart(dots, columns, rows, 0.0, top, goal)):
        over = goal_row is not None and row < goal_row
        shown = top if row == 0 else (goal if row == goal_row else None)
        mark = "" if shown is None else label(shown)
        strips.append(strip_line((fit(mark, AXIS - 1, ">") + "┤", DIM), (text, BAD if over else style)))
    return tuple(strips)


def _empty(columns: int, rows: int) -> list[Strip]:
    text = "nothing reported yet"
    strips = [strip_line((" " * (AXIS - 1) + "┤", DIM)) for _ in range(rows)]
    strips[rows // 2] = strip_line((" " * (AXIS - 1) + "┤ ", DIM), (fit(text, columns - 1), DIM))
    return [*strips, strip_line((" " * (AXIS - 1) + "┼" + "─" * columns, DIM))]


@lru_cache(maxsize=32)
def _time_axis(columns: int, seconds: float) -> Strip:
    span = f" {seconds / 60:.0f} min ago" if seconds >= 60 else f" {seconds:.0f} s ago"
    text = f"{span} ─" if columns > len(span) + 12 else ""
    return strip_line((fit("0", AXIS - 1, ">") + "┼" + text + "─" * max(0, columns - len(text) - 4) + " now", DIM))

"""Braille charts of a server over time: pure functions from a series to lines of text.

Figures that share a chart are drawn as lines; a share of a whole is drawn as an area. The part above the objective is
red, including values above it within the objective's own row. The bottom row is the time axis, with clock times and
event markers.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import or_

import msgspec
from msgspec.structs import replace
from rich.cells import cell_len
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.markers import Marker, MarkerKind
from vllm_console.metrics.sample import Series
from vllm_console.text import round_duration
from vllm_console.ui.terminal.lines import line as strip_line
from vllm_console.ui.theme import ACCENT, BAD, CURSOR, DIM, STRONG, WARN
from vllm_console.ui.widgets.draw import fit

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille cell's left and right columns, top to bottom."""

_FILLED = tuple(tuple(sum(column[3 - height :]) for height in range(4)) for column in _DOTS)
"""Bits of a cell's left and right columns when filled from the bottom to a height (0 to 3)."""

_BRAILLE = 0x2800

AXIS = 6
"""Cells left of a chart: a label and the axis."""

FULL_ROWS = 3
"""Minimum rows of a plot for half an empty row above a share of 100%."""

LABEL_ROWS = 6
"""Minimum rows of a plot for clock times on a row of their own below the axis."""

FRESH_POINTS = 3
"""How many of the last points to search for the newest figure. The very last point may still be incomplete."""

NAMES_WIDTH = 24
"""Minimum width in columns to show line names at the right end."""

NAMES = 5
"""Minimum cells for names, including a leading blank. It keeps the columns of stacked charts aligned."""

SMALLEST, LARGEST = 1e-300, 1e300
"""Values outside this range are drawn at the edge, since another machine may send any number."""

_COLUMNS = "columns"
"""Style metadata key on a chart's value axis: the number of plot cells to the right of it."""

_TICK_SECONDS = (5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800)
_DAY = 86_400

_MARKER_STYLES = {
    MarkerKind.CRASH: BAD,
    MarkerKind.START: ACCENT,
    MarkerKind.STOP: DIM,
    MarkerKind.FINDING: WARN,
    MarkerKind.FINDING_END: DIM,
    MarkerKind.LOAD: DIM,
}
_MARKER_RANK = list(_MARKER_STYLES)
"""Marker kinds, most important first: the first one is drawn where markers would overlap."""


class Curve(msgspec.Struct, frozen=True):
    """One figure of a chart: its key in the series, its name at the line's end, and how to join a column's points.

    Values are multiplied by ``scale``.
    """

    key: str
    name: str = ""
    style: Style = ACCENT
    how: Callable[[Sequence[float]], float] = max
    scale: float = 1.0


class ChartView(msgspec.Struct, frozen=True):
    """How the user views charts: latency scale, cursor moment (Unix seconds), order of requests, and enlarged pane.

    If ``log`` is None, each latency chart uses the scale that suits it.
    """

    log: bool | None = None
    cursor: float | None = None
    order: str = "slowest"
    large: bool = False


PLAIN = ChartView()


class Scale(msgspec.Struct, frozen=True):
    """The values at the bottom and the top of a plot of ``rows`` rows, each four dots high.

    A ``full`` scale ends at the largest possible value: ``hi`` lies in the middle of its row, at its tick. ``limit`` is
    an objective: values that reach it are drawn above the bottom row, so that zero never lies on its line.
    """

    lo: float
    hi: float
    rows: int
    log: bool = False
    full: bool = False
    limit: float | None = None

    def levels(self, values: Sequence[float | None]) -> list[int | None]:
        """The `level` of each value; None where the value is None."""
        if self.log or self.limit is not None:
            return [None if value is None else self.level(value) for value in values]
        lo, span, most = self.lo, (self.hi - self.lo) or 1.0, 4 * self.rows - (3 if self.full else 1)
        return [None if value is None else round(min(1.0, max(0.0, (value - lo) / span)) * most) for value in values]

    def level(self, value: float) -> int:
        """The dot in which a value lies, from 0 at the bottom. Values outside the scale are clipped to the edge."""
        if self.log:
            share = math.log(max(value, self.lo) / self.lo) / math.log(self.hi / self.lo)
        else:
            share = (value - self.lo) / ((self.hi - self.lo) or 1.0)
        level = round(min(1.0, max(0.0, share)) * (4 * self.rows - (3 if self.full else 1)))
        return max(level, 4) if self.limit is not None and value >= self.limit and self.rows > 1 else level

    def row(self, value: float | None) -> int | None:
        """The row (0 is the top) in which a value lies; None if there is no value or it is outside the scale."""
        if value is None or not self.lo <= value <= self.hi:
            return None
        return self.rows - 1 - self.level(value) // 4


def resample(
    values: tuple[float | None, ...], columns: int, first: int, how: Callable[[Sequence[float]], float] = max
) -> tuple[float | None, ...]:
    """Resample ``values`` to exactly ``columns`` columns, newest at the right; ``how`` joins the points of a column.

    ``first`` is the absolute number of the first point (its time divided by the step). It alone determines the column
    of a point, so a chart moves by whole columns and its past does not flicker.
    """
    count = len(values)
    if columns <= 0 or not count:
        return (None,) * max(0, columns)
    parts = [values[start:end] for start, end in _spans(count, columns, first)]
    return tuple([how(part) if part and None not in part else _join(part, how) for part in parts])  # type: ignore[arg-type]


@lru_cache(maxsize=16)
def _spans(count: int, columns: int, first: int) -> tuple[tuple[int, int], ...]:
    """The points of each column (first, one past the last). All curves of a series share them."""
    newest = _newest_column(count, columns, first)
    return tuple(_points_of(column, count, columns, first) for column in range(newest - columns + 1, newest + 1))


def _points_of(column: int, count: int, columns: int, first: int) -> tuple[int, int]:
    start, end = -(-column * count // columns), -(-(column + 1) * count // columns)
    if start == end:  # fewer points than columns: the one that covers this column
        start, end = column * count // columns, column * count // columns + 1
    return max(0, start - first), max(0, end - first)


def _join(values: Sequence[float | None], how: Callable[[Sequence[float]], float]) -> float | None:
    found = [value for value in values if value is not None]
    return how(found) if found else None


def _newest_column(count: int, columns: int, first: int) -> int:
    """The absolute number of the column that the last point belongs to."""
    last = first + count - 1
    return last * columns // count if count >= columns else -(-(last + 1) * columns // count) - 1


def column_of(series: Series, count: int, columns: int, at: float) -> int | None:
    """The column of a chart that contains a moment; None if outside. ``count`` is the number of points."""
    first = round(series.end / series.step) - count
    column = math.floor(at / series.step * columns / count) - (_newest_column(count, columns, first) - columns + 1)
    return column if 0 <= column < columns else None


def place_at(lines: Sequence[Strip], x: int, y: int) -> float | None:
    """The horizontal position of a cell within a chart's plot, from 0 to 1; None outside of a chart."""
    end = 0
    for text, style, _ in lines[y] if 0 <= y < len(lines) else ():
        end += cell_len(text)
        columns = style.meta.get(_COLUMNS, 0) if style is not None else 0
        if end <= x < end + columns:
            return (x - end + 0.5) / columns
    return None


@lru_cache(maxsize=64)
def _axis_style(columns: int) -> Style:
    return DIM + Style(meta={_COLUMNS: columns})


def value_at(series: Series, key: str, at: float | None) -> float | None:
    """A figure at a moment (Unix seconds), or the newest one; None if unknown."""
    column = series.values.get(key, ())
    if at is not None:
        place = math.ceil((at - series.start) / series.step) - 1
        return column[place] if 0 <= place < len(column) else None
    return next((value for value in reversed(column[-FRESH_POINTS:]) if value is not None), None)


def dot(column: int, level: int) -> int:
    """The bit of a dot in a braille cell, given its column from the left and its height from the bottom (0 to 3)."""
    return _DOTS[column][3 - level]


def mean(values: Sequence[float]) -> float:
    """The mean. (Importing `statistics` would add milliseconds to the startup of the console.)"""
    return sum(values) / len(values)


def nice_ceiling(value: float) -> float:
    """The next round number (1, 1.5, 2, 2.5, 3, 4, …) at or above ``value``, so that a scale rarely changes."""
    if value < SMALLEST:
        return 1.0
    value = min(value, LARGEST)
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        factor * power for factor in (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0) if factor * power >= value
    )


def braille(levels: Sequence[int | None], rows: int, *, area: bool) -> list[list[int]]:
    """The dots of each cell, by row from the top, for a line or the area below it; two values per cell.

    ``levels`` are the dots in which the values lie (`Scale.levels`). None means "not reported" and leaves its column
    blank; any reported value shows at least one dot.
    """
    cells = [[0] * ((len(levels) + 1) // 2) for _ in range(rows)]
    bottom = rows - 1
    before: int | None = None
    for x, level in enumerate(levels):
        if level is None:
            before = None
            continue
        cell, bits = x // 2, _DOTS[x % 2]
        if area:
            full, rest = divmod(level, 4)
            for row in range(bottom, bottom - full, -1):
                cells[row][cell] |= _FILLED[x % 2][3]
            cells[bottom - full][cell] |= _FILLED[x % 2][rest]
            continue
        low = high = level
        if before is not None and abs(level - before) > 1:
            low, high = (before + 1, level) if before < level else (level, before - 1)
        for dot in range(low, high + 1):
            cells[bottom - dot // 4][cell] |= bits[3 - dot % 4]
        before = level
    return cells


def plot_rows(height: int) -> int:
    """Rows of the plot in a chart of ``height`` rows. The time axis takes one, or two if there are enough rows."""
    return height - 1 if height - 2 < LABEL_ROWS else height - 2


def axis_above(limit: float, height: int) -> float:
    """The axis maximum that leaves a row above ``limit`` in a chart of ``height`` rows, for values that exceed it."""
    dots = 4 * plot_rows(height)
    return limit * (dots - 1) / (dots - 5) if dots >= 8 else limit


NOTHING = "nothing recorded in this period"
"""Text in place of a chart without points."""


@lru_cache(maxsize=32)
def chart_of(
    series: Series | None,
    curves: tuple[Curve, ...],
    width: int,
    height: int,
    label: Callable[[float], str],
    *,
    hi: float | None = None,
    objective: float | None = None,
    area: bool = False,
    whole: bool = False,
    view: ChartView = PLAIN,
    markers: tuple[Marker, ...] = (),
    empty: str = NOTHING,
) -> Sequence[Strip]:
    """Draw figures of a series with axes: ``height`` rows of ``width`` cells in total, the time axis at the bottom.

    Without ``hi`` the axis ends at the next round number above the largest value and the objective. ``whole`` is for
    counts. Values above the objective are drawn in another color, and the objective's line is labeled. ``empty`` says
    why there are no points, or what the chart is waiting for.

    Redrawing the same series, compared by identity, returns the same (cached) lines.
    """
    longest = max((cell_len(curve.name) for curve in curves), default=0)
    names = max(NAMES, longest + 1) if longest and width - AXIS - longest - 1 >= NAMES_WIDTH else 0
    columns = width - AXIS - names
    rows = plot_rows(height)
    if columns < 4 or rows < 1:
        return []
    count = max(map(len, series.values.values()), default=0) if series is not None else 0
    known = [_values(series, curve, count, columns) for curve in curves] if series is not None and count else []
    if series is None or not any(value is not None for values in known for value in values):
        # Not read yet, or nothing to read.
        loading = series is None or series.loading
        return empty_chart(columns, rows, height, "loading" if loading else empty)
    scale = _scale(known, rows, hi, objective, log=bool(view.log), whole=whole)
    scale = replace(scale, full=area and hi is not None and rows >= FULL_ROWS, limit=objective or None)
    cursor = _cell_of(series, count, columns, view.cursor)
    marks = _marks(series, count, columns, markers)
    plot = _plot(
        known, [curve.style for curve in curves], scale, objective, label,
        [curve.name for curve in curves] if names else [], tuple((cell, kind) for cell, _, kind in marks), cursor,
        area, whole,
    )  # fmt: skip
    lowest = label(scale.lo)
    if objective is not None and lowest == label(objective):
        lowest = ""  # the objective's line has the same label
    axis = _time_axis(series.end, series.step, count, columns, lowest, marks, cursor, view.cursor, height - rows)
    return [*plot, *axis]


def _values(series: Series, curve: Curve, count: int, columns: int) -> tuple[float | None, ...]:
    values = series.values.get(curve.key, (None,) * count)
    dots = resample(values, columns * 2, round(series.end / series.step) - count, curve.how)
    return dots if curve.scale == 1.0 else tuple(None if value is None else value * curve.scale for value in dots)


def _scale(
    known: Sequence[Sequence[float | None]], rows: int, hi: float | None, objective: float | None, *, log: bool,
    whole: bool,
) -> Scale:  # fmt: skip
    values = [value for one in known for value in one if value is not None] + ([objective] if objective else [])
    top = hi or nice_ceiling(max(values))
    if log and (positive := [value for value in values if value >= SMALLEST]):
        low = 10.0 ** math.floor(math.log10(min(positive)) + 1e-9)
        return Scale(min(low, top / 10), top, rows, log=True)
    return Scale(0.0, float(math.ceil(top)) if whole else top, rows)


def _cell_of(series: Series, count: int, columns: int, at: float | None) -> int | None:
    column = column_of(series, count, columns * 2, at) if at is not None else None
    return column // 2 if column is not None else None


Mark = tuple[int, str, MarkerKind]
"""A cell of the time axis, the label there, and what it marks."""


def _marks(series: Series, count: int, columns: int, markers: Sequence[Marker]) -> tuple[Mark, ...]:
    """The markers to draw, most important first. ``markers`` are ordered from the oldest on."""
    begin = bisect_left(markers, series.end - count * series.step, key=lambda marker: marker.at)
    end = bisect_left(markers, series.end, lo=begin, key=lambda marker: marker.at)
    found = [
        (cell, marker.label, marker.kind)
        for marker in markers[begin:end]
        if (cell := _cell_of(series, count, columns, marker.at)) is not None
    ]
    return tuple(sorted(found, key=lambda mark: (_MARKER_RANK.index(mark[2]), -mark[0])))


Cells = list[tuple[str, Style | None]]

_PLAIN, _OVER, _BELOW = range(3)
"""How a cell of a curve looks: in the curve's style, red above the objective, or dim below an area's edge."""

RowOfCurve = tuple[tuple[int, ...], Style, bytes]
"""A curve's dots in one row, its style, and how each cell looks."""


def _plot(
    known: Sequence[Sequence[float | None]],
    styles: Sequence[Style],
    scale: Scale,
    objective: float | None,
    label: Callable[[float], str],
    names: Sequence[str],
    marks: tuple[tuple[int, MarkerKind], ...],
    cursor: int | None,
    area: bool,
    whole: bool,
) -> list[Strip]:
    columns = len(known[0]) // 2
    objective_row = scale.row(objective)
    limit_row = objective_row if scale.rows > 1 else None  # a single row also contains zero
    ticks = _ticks(scale, limit_row, objective, label, whole=whole)
    named = _name_rows(known, dict(zip(names, styles, strict=False)), scale)
    levels = [scale.levels(values) for values in known]
    dots = [[tuple(row) for row in braille(one, scale.rows, area=area)] for one in levels]
    edges = [_edges(*pair, scale, objective) for pair in zip(known, levels, strict=True)]
    strips = []
    for row in range(scale.rows):
        ground = ("┄", None) if row == limit_row else ("┈", DIM) if row in ticks else (" ", None)
        curves = tuple(
            (curve[row], style, _area_looks(row, tops) if area else _line_looks(row, objective_row, tops))
            for curve, style, tops in sorted(zip(dots, styles, edges, strict=True), key=lambda one: one[1] == ACCENT)
        )  # accent color last: where curves share a cell, the main one stays visible
        strips.append(_plot_row(columns, ground, marks, curves, cursor, ticks.get(row, ""), named.get(row, ("", None))))
    return strips


@lru_cache(maxsize=256)
def _plot_row(
    columns: int,
    ground: tuple[str, Style | None],
    marks: tuple[tuple[int, MarkerKind], ...],
    curves: tuple[RowOfCurve, ...],
    cursor: int | None,
    tick: str,
    name: tuple[str, Style | None],
) -> Strip:
    """One row of a plot. Cached, since most rows stay the same between two points."""
    cells: Cells = [ground] * columns
    for cell, kind in reversed(marks):
        cells[cell] = ("┊", _MARKER_STYLES[kind])
    for dots, style, looks in curves:
        _draw(cells, dots, (style, BAD, style + DIM), looks)
    if cursor is not None:
        cells[cursor] = (cells[cursor][0], (cells[cursor][1] or Style()) + CURSOR)
    return strip_line((fit(tick, AXIS - 1, ">") + "┤", _axis_style(columns)), *_joined(cells), name)


Edges = Sequence[tuple[int, bool]]
"""For each cell, the row of its highest value and whether that is above the objective."""


def _edges(
    values: Sequence[float | None], levels: Sequence[int | None], scale: Scale, objective: float | None
) -> Edges:
    bottom, lowest = scale.rows - 1, scale.level(scale.lo)
    pairs = zip(levels[::2], levels[1::2], strict=True)
    rows = [
        bottom - (max(one, other) if one is not None and other is not None else _either(one, other, lowest)) // 4
        for one, other in pairs
    ]
    if objective is None:
        return [(row, False) for row in rows]
    over = [value is not None and value > objective for value in values]
    return list(zip(rows, map(or_, over[::2], over[1::2]), strict=True))


def _either(one: int | None, other: int | None, default: int) -> int:
    known = one if one is not None else other
    return known if known is not None else default


def _line_looks(row: int, objective_row: int | None, edges: Edges) -> bytes:
    """How the cells of a line look in one row: red above the objective, and in its own row where a value exceeds it."""
    if objective_row is None or row > objective_row:
        return bytes(len(edges))
    return bytes([_OVER if row < objective_row or over else _PLAIN for _, over in edges])


def _area_looks(row: int, edges: Edges) -> bytes:
    """How the cells of an area look in one row: dim below the upper edge, which is red above the objective."""
    return bytes([_BELOW if row > edge else _OVER if over else _PLAIN for edge, over in edges])


def _draw(cells: Cells, dots: Sequence[int], styles: tuple[Style, Style, Style], looks: bytes) -> None:
    """Draw a curve's dots over these cells. Where two curves share a cell, their dots are combined."""
    for index, bits in enumerate(dots):
        if bits:
            before = ord(cells[index][0]) - _BRAILLE
            text = chr(_BRAILLE + (bits | (before if 0 < before < 256 else 0)))
            cells[index] = (text, styles[looks[index]])


def _joined(cells: Cells) -> list[tuple[str, Style | None]]:
    joined: list[tuple[str, Style | None]] = []
    text, style = "", None
    for character, other in cells:
        if other is not style and other != style:
            joined.append((text, style))
            text, style = "", other
        text += character
    joined.append((text, style))
    return joined if joined[0][0] else joined[1:]


@lru_cache(maxsize=32)
def _ticks(
    scale: Scale, objective_row: int | None, objective: float | None, label: Callable[[float], str], *, whole: bool
) -> Mapping[int, str]:
    """The labels of the value axis, by row: the top, the objective, and round values between them."""
    ticks = {0: label(scale.hi)}
    lowest = label(scale.lo)  # it is at the time axis
    if objective_row is not None and objective is not None:
        ticks[objective_row] = label(objective)
    for value in _round_values(scale, whole=whole):
        row, text = scale.row(value), label(value)
        if row is not None and text not in (lowest, *ticks.values()) and not {row - 1, row, row + 1} & ticks.keys():
            ticks[row] = text
    return ticks


def _round_values(scale: Scale, *, whole: bool) -> list[float]:
    if scale.log:
        decades = range(math.ceil(math.log10(scale.lo) - 1e-9), math.floor(math.log10(scale.hi) + 1e-9) + 1)
        return [10.0**decade for decade in decades if 10.0**decade > scale.lo * 1.001]
    most = max(1, scale.rows // 3)
    rough = (scale.hi - scale.lo) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
    step = max(1.0, step) if whole else step
    return [scale.lo + step * number for number in range(1, most + 1) if step * number < scale.hi - scale.lo]


def _name_rows(
    known: Sequence[Sequence[float | None]], names: Mapping[str, Style], scale: Scale
) -> dict[int, tuple[str, Style | None]]:
    """The row for each line's name, in the line's style: where the line ends, or nearby; lower lines get lower rows."""
    last = {
        name: next((value for value in reversed(values) if value is not None), None)
        for name, values in zip(names, known, strict=False)
    }
    ends = sorted(((value, name) for name, value in last.items() if value is not None), reverse=True)
    rows = [scale.rows - 1 - scale.level(value) // 4 for value, _ in ends][: scale.rows]
    for at in range(1, len(rows)):
        rows[at] = max(rows[at], rows[at - 1] + 1)
    for at in range(len(rows)):
        rows[at] = min(rows[at], scale.rows - len(rows) + at)
    return {row: (f" {name}", names[name]) for row, (_, name) in zip(rows, ends, strict=False)}


def empty_chart(columns: int, rows: int, height: int, text: str) -> list[Strip]:
    """Axes without a curve, and a text that says why."""
    strips = [strip_line((" " * (AXIS - 1) + "┤", DIM)) for _ in range(rows)]
    strips[rows // 2] = strip_line((" " * (AXIS - 1) + "┤ ", DIM), (fit(text, columns - 1), DIM))
    return [*strips, strip_line((" " * (AXIS - 1) + "┼" + "─" * columns, DIM)), *[strip_line()] * (height - rows - 1)]


@lru_cache(maxsize=64)
def _time_axis(
    end: float,
    step: float,
    count: int,
    columns: int,
    lowest: str,
    marks: tuple[Mark, ...],
    cursor: int | None,
    at: float | None,
    rows: int,
) -> tuple[Strip, ...]:
    """The time axis with its ticks and markers.

    With two rows, clock times are centered below their ticks (shifted inward at the edges), to the right of the time
    that a point covers. With one row, they are in the axis, to the right of their ticks. A tick whose time does not fit
    has no label.
    """
    span = Series(end=end, step=step, values={})
    axis: Cells = [("─", DIM)] * columns
    below: Cells = axis if rows == 1 else [(" ", None)] * columns
    if cursor is not None and at is not None:
        _put(below, cursor - 4, time.strftime("%H:%M:%S", time.localtime(at)), STRONG + CURSOR, force=True)
        if below is not axis:
            axis[cursor] = ("┴", CURSOR)
    every = _put_every(below, step) if below is not axis else ""
    if rows == 1:
        _put_marks(axis, marks)
    for moment, text in tick_times(end - count * step, end, columns):
        cell = _cell_of(span, count, columns, moment)
        if cell is None:
            continue
        if below is axis:
            _ = _put(axis, cell, f"┬{text}", DIM) or _put(axis, cell, "┬", DIM)
        elif _put(below, max(0, min(cell - len(text) // 2, columns - len(text))), text, DIM):
            axis[cell] = ("┬", DIM) if axis[cell][0] == "─" else axis[cell]
    if rows > 1:
        _put_marks(axis, marks)
    first = strip_line((fit(lowest, AXIS - 1, ">") + "┼", _axis_style(columns)), *_joined(axis))
    if below is axis:
        return (first,)
    return first, strip_line((fit(every, AXIS), DIM), *_joined(below))


def _put_every(below: Cells, step: float) -> str:
    """Write how much time a point covers, starting left of the axis; returns the part left of it."""
    text = f" every {round_duration(step)}"
    return text[:AXIS] if _put(below, 0, text[AXIS:], DIM) else ""


def _put_marks(axis: Cells, marks: Sequence[Mark]) -> None:
    for cell, label, kind in marks:
        start = max(0, min(cell - cell_len(label) // 2, len(axis) - cell_len(label)))
        _put(axis, start, label, _MARKER_STYLES[kind])


def _put(cells: Cells, start: int, text: str, style: Style, *, force: bool = False) -> bool:
    """Write text into free cells of an axis; returns whether there was room."""
    if force:
        start = max(0, min(start, len(cells) - len(text)))
    inside = start >= 0 and start + len(text) <= len(cells)
    if not inside or any(cell[0] not in "─ ┬┴" for cell in cells[start : start + len(text)]):
        return False
    if style is DIM and any(cell[0] not in "─ ┬┴" for cell in cells[max(0, start - 1) : start + len(text) + 1]):
        return False
    for index, character in enumerate(text):
        cells[start + index] = (character, style)
    return True


def tick_times(start: float, end: float, columns: int) -> list[tuple[float, str]]:
    """Round moments between two others (Unix seconds) in local time, as many as fit. Midnight shows its date."""
    span = end - start
    interval = next(
        (seconds for seconds in _TICK_SECONDS if span / seconds * (11 if seconds < 60 else 8) <= columns),
        _TICK_SECONDS[-1],
    )
    offset = time.localtime(end).tm_gmtoff
    first = math.ceil((start + offset) / interval)
    found: list[tuple[float, str]] = []
    for number in range(first, math.floor((end + offset) / interval) + 1):
        local = number * interval
        then = time.gmtime(local)
        pattern = "%b %d" if local % _DAY == 0 else "%H:%M" if interval >= 60 else "%H:%M:%S"
        found.append((local - offset, time.strftime(pattern, then)))
    return found

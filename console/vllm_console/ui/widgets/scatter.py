"""A scatter plot in braille: a pure function from pairs of values to lines of text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.style import Style
from textual.strip import Strip

from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, BAD, DIM, WARN
from vllm_console.ui.widgets.chart import AXIS, Scale, dot, empty_chart, nice_ceiling
from vllm_console.ui.widgets.draw import fit

_BEYOND = 0x100
"""Flag in a cell, next to the braille dots: a point beyond the limit."""


def scatter(
    points: Sequence[tuple[float, float]],
    width: int,
    height: int,
    label_x: Callable[[float], str],
    label_y: Callable[[float], str],
    *,
    log: bool = False,
    limit: float | None = None,
    at: float | None = None,
    few: bool = False,
) -> list[Strip]:
    """The points with axes, in ``height`` rows of ``width`` cells. Axes begin at 0 unless they are ``log``.

    A dashed row marks the value ``limit``, a dotted column marks ``at``; both scales extend that far. With ``few``,
    each point takes a cell, colored by the limit.
    """
    columns, rows = width - AXIS, height - 1
    if columns < 4 or rows < 1:
        return []
    if not points:
        return empty_chart(columns, rows, height, "nothing recorded yet")
    across = _scale([x for x, _ in points] + ([at] if at is not None else []), columns, log)
    up = _scale([y for _, y in points] + ([limit] if limit is not None else []), rows, log)
    cells = [[0] * columns for _ in range(rows)]
    for x, y in points:
        place, level = min(2 * columns - 1, across.level(x) // 2), up.level(y)
        beyond = few and limit is not None and y > limit
        cells[rows - 1 - level // 4][place // 2] |= dot(place % 2, level % 4) | (_BEYOND if beyond else 0)
    ticks = {0: label_y(up.hi)}
    if rows >= 5:
        middle = math.sqrt(up.lo * up.hi) if log else (up.lo + up.hi) / 2
        ticks[up.row(middle) or rows // 2] = label_y(middle)
    lines = []
    limit_row = up.row(limit) if limit is not None else None
    marked = min(columns - 1, across.level(at) // 4) if at is not None else None
    for row, bits in enumerate(cells):
        drawn: list[tuple[str, Style | None]] = []
        for place, one in enumerate(bits):
            if one and few:
                drawn.append(("●", BAD if one & _BEYOND else ACCENT))
            elif one:
                drawn.append((chr(0x2800 + one), ACCENT))
            elif place == marked:
                drawn.append(("┊", WARN))
            else:
                drawn.append(("╌" if row == limit_row else " ", DIM))
        lines.append(line((fit(ticks.get(row, ""), AXIS - 1, ">") + "┤", DIM), *drawn).simplify())
    first, last = label_x(across.lo), label_x(across.hi)
    axis = f"{first}{'─' * max(0, columns - len(first) - len(last))}{last}"
    return [*lines, line((fit(label_y(up.lo), AXIS - 1, ">") + "┼" + fit(axis, columns), DIM))]


def _scale(values: Sequence[float], cells: int, log: bool) -> Scale:
    top = nice_ceiling(max(values))
    positive = [value for value in values if value > 0]
    if log and positive:
        return Scale(min(10.0 ** math.floor(math.log10(min(positive)) + 1e-9), top / 10), top, cells, log=True)
    return Scale(0.0, top, cells)

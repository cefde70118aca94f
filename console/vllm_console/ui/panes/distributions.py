"""Latencies of two runs on top of each other: median, p90 and p99 on a shared logarithmic axis. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from textual.strip import Strip

from vllm_console.metrics.quantile import PARTS
from vllm_console.text import seconds
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, DIM, STRONG
from vllm_console.ui.widgets.draw import fit

if TYPE_CHECKING:
    from vllm_console.runs.compare import ComparedFigure

_NAME, _SIDE, _VALUE = 12, 8, 9
LEAST_AXIS = 16
"""Minimum cells of the axis; nothing is drawn if it is shorter."""

MARKS = "├┼┤"
"""Marks of the median, p90 and p99."""


class SpreadChange(msgspec.Struct, frozen=True):
    """A latency's quantiles before and after, in seconds and as text, the median first."""

    name: str
    before: tuple[float, ...]
    after: tuple[float, ...]
    texts: tuple[tuple[str, ...], tuple[str, ...]]


def spreads(figures: Sequence[ComparedFigure]) -> list[SpreadChange]:
    """The latencies for which both runs have every quantile."""
    from vllm_console.runs.text import side_text  # the latency pane, which shares the bars, does not need this

    by_key = {figure.key: figure for figure in figures}
    found = []
    for latency in dict.fromkeys(key.partition("_")[0] for key in by_key):
        parts = [by_key.get(f"{latency}_{part}") for part, _ in PARTS]
        if whole := [one for one in parts if one is not None and one.before and one.after and not any(one.bounded)]:
            if len(whole) < len(parts):
                continue
            found.append(
                SpreadChange(
                    whole[0].name.rpartition(" ")[0],
                    tuple(one.before or 0.0 for one in whole),
                    tuple(one.after or 0.0 for one in whole),
                    (
                        tuple(side_text(one, after=False) for one in whole),
                        tuple(side_text(one, after=True) for one in whole),
                    ),
                )
            )
    return found


def distribution_lines(figures: Sequence[ComparedFigure], width: int) -> list[Strip]:
    """A heading, and two rows over an axis for each latency; empty if no latency has both sides."""
    found = spreads(figures)
    axis = width - 2 - _NAME - _SIDE - 3 * _VALUE
    if not found or axis < LEAST_AXIS:
        return []
    titles = "".join(fit(part, _VALUE, ">") for part, _ in PARTS)
    head = fit("  latency, log scale", 2 + _NAME + _SIDE)
    lines = [line((" Requests before and after", STRONG)), line((f"{head}{fit(_legend(axis), axis)}{titles}", DIM))]
    for one in found:
        low, high = _ends(one)
        for at, (when, values) in enumerate((("before", one.before), ("after", one.after))):
            drawn = quantile_bar(values, low, high, axis)
            texts = "".join(fit(text, _VALUE, ">") for text in one.texts[at])
            style = ACCENT if at else DIM
            name = fit(f"  {'' if at else one.name}", 2 + _NAME)
            lines.append(line(name, (fit(when, _SIDE), DIM), (drawn, style), (texts, None if at else DIM)))
        lines.append(line((f"{' ' * (2 + _NAME + _SIDE)}{_scale(low, high, axis)}", DIM)))
    return lines


def _legend(axis: int) -> str:
    return "├ median ┼ p90 ┤ p99" if axis >= 22 else "├ p50 ┼ p90 ┤ p99"


def _ends(one: SpreadChange) -> tuple[float, float]:
    """The ends of the axis as natural logarithms, slightly beyond the smallest and largest quantiles."""
    values = [math.log(value) for value in (*one.before, *one.after)]
    low, high = min(values), max(values)
    beyond = max(0.05, (high - low) * 0.05)
    return low - beyond, high + beyond


def _at(value: float, low: float, high: float, axis: int) -> int:
    return min(axis - 1, max(0, round((math.log(value) - low) / (high - low) * (axis - 1))))


def quantile_bar(values: Sequence[float], low: float, high: float, axis: int) -> str:
    """``├──┼─┤`` in ``axis`` cells: median, p90 and p99 in seconds. ``low`` and ``high`` are natural logarithms."""
    places = [_at(value, low, high, axis) for value in values]
    cells = ["─" if places[0] <= cell <= places[-1] else " " for cell in range(axis)]
    for place, mark in zip(places, MARKS, strict=True):
        cells[place] = mark
    return "".join(cells)


def _scale(low: float, high: float, axis: int) -> str:
    first, last = (seconds(math.exp(end)) for end in (low, high))
    return f"{first} {'·' * max(0, axis - len(first) - len(last) - 2)} {last}"

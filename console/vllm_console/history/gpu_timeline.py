"""Rows of a GPU's history as evenly spaced points for charts. Pure: time is what the rows say."""

from __future__ import annotations

import math

from vllm_console.history.gpu_history import HIGHEST, Card, GpuEntry
from vllm_console.metrics.sample import Series


class _Sum:
    """What is known of a figure in one step: its highest value, and its mean over the time that is known."""

    __slots__ = ("highest", "seconds", "total")

    def __init__(self) -> None:
        self.highest = -math.inf
        self.total = self.seconds = 0.0

    def add(self, value: float, seconds: float) -> None:
        self.highest = max(self.highest, value)
        self.total += value * seconds
        self.seconds += seconds


class GpuTimeline:
    """The last ``points`` steps of ``step`` seconds of one GPU.

    A row stands for the time since the row before it. A pause of more than ``gap`` seconds between rows stays empty.
    """

    def __init__(self, step: float, points: int) -> None:
        self.step, self.points = step, points
        self.gap = max(2.5 * step, 15.0)
        self.card: Card | None = None
        """The GPU with its limits and links, by the newest row."""
        self._steps: dict[int, dict[str, _Sum]] = {}
        self._at: float | None = None
        self._drawn: tuple[tuple[int, float | None], Series] | None = None

    def append(self, entry: GpuEntry) -> None:
        """Take in the next row. One that is not newer than the last is ignored."""
        before = self._at
        if before is not None and entry.at <= before:
            return
        last = self._index(entry.at)
        first = last
        if before is not None and entry.at - before <= self.gap:
            first = min(last, self._index(before) + 1)
        self._at, self.card = entry.at, entry.card
        for index in range(max(first, last - self.points + 1), last + 1):
            figures = self._steps.setdefault(index, {})
            for name, value in zip(entry.card.keys, entry.values, strict=True):
                if value is not None:
                    figures.setdefault(name, _Sum()).add(value, entry.seconds)
        if len(self._steps) > 2 * self.points:
            self._steps = {index: one for index, one in self._steps.items() if index > last - self.points}

    def series(self, end: float) -> Series:
        """The points up to ``end`` (Unix seconds), oldest first, `points` of them. Keys are those of `Card.keys`."""
        last = self._index(end)
        if self._drawn is not None and self._drawn[0] == (last, self._at):
            return self._drawn[1]
        steps = [self._steps.get(index, {}) for index in range(last - self.points + 1, last + 1)]
        names = self.card.keys if self.card is not None else ()
        values = {name: tuple(_value(name, one.get(name)) for one in steps) for name in names}
        found = Series(end=(last + 1) * self.step, step=self.step, values=values or {"": (None,) * self.points})
        self._drawn = ((last, self._at), found)
        return found

    def _index(self, at: float) -> int:
        """The step that a moment falls into; a step holds its end, not its beginning."""
        return math.ceil(at / self.step) - 1


def _value(name: str, found: _Sum | None) -> float | None:
    if found is None:
        return None
    return found.highest if name in HIGHEST else found.total / found.seconds

"""Charts over any range, read from a history in a thread, one slice at a time, and kept up to date.

A week is ten thousand rows. They are read once per range; after that only new rows are read, at most once per quarter
of a point's duration.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from vllm_console.history.store import HistoryEntry, HistoryError, HistoryMissingError, HistoryReader, Stretch
from vllm_console.history.time_view import ChartRange
from vllm_console.history.timeline import Timeline
from vllm_console.metrics.sample import Series

SLICE_ROWS = 400
"""Rows per read, about 30 ms."""

REST_PER_WORK = 0.5
"""Seconds of rest per second of reading, so that the screen stays responsive."""

WAIT_SECONDS = 0.15
"""How long a snapshot waits for a range being read: enough for a short range."""

KEPT = 4
"""How many ranges are cached; the least recently shown is dropped first."""

MOST_SECONDS_BETWEEN = 60.0
OUTDATED_SECONDS, BACK_SECONDS = 900.0, 60.0
"""A range not shown for the former is reread; so is one after the clock was set back by more than the latter."""


class Row(Protocol):
    """A row of a history."""

    @property
    def at(self) -> float:
        """When it was taken (Unix seconds)."""


_Row = TypeVar("_Row", bound=Row)


class Rows(Protocol[_Row]):
    """A source of rows: `vllm_console.history.store.HistoryReader`, and its GPU counterpart."""

    def first_at(self) -> float | None:
        """When the oldest row was taken."""

    def stretches(self, start: float, end: float, step: float) -> list[Stretch]:
        """The tables that have the rows of a span, for points of ``step`` seconds."""

    def read(self, part: Stretch, most: int, step: float = 0.0, /) -> list[_Row]:
        """The first rows of a stretch; rows within ``step`` seconds may be merged."""

    def close(self) -> None:
        """Close the file."""


class Points(Protocol):
    """Aggregates rows into points. A pause of more than ``gap`` seconds between rows stays empty."""

    gap: float

    def series(self, end: float) -> Series:
        """The points up to ``end`` (Unix seconds)."""


_Points = TypeVar("_Points", bound=Points)


class ChartSource(NamedTuple, Generic[_Row, _Points]):
    """Opens a history and turns rows into points; ``append`` adds a row to the object that ``points`` created."""

    rows: Callable[[], Rows[_Row]]
    points: Callable[[ChartRange], _Points]
    append: Callable[[_Points, _Row], None]


def server_source(path: Path, generation: int | None = None) -> ChartSource[HistoryEntry, Timeline]:
    """The chart source for a server's history: all of it, or the rows of one generation."""

    def append(timeline: Timeline, entry: HistoryEntry) -> None:
        if generation in (None, entry.generation):
            timeline.append(entry.sample, entry.generation)

    return ChartSource(lambda: HistoryReader(path), lambda span: Timeline(span.step, span.points), append)


class _Range(Generic[_Row, _Points]):
    """One range; ``ends`` is whether it ends at a fixed moment instead of now."""

    def __init__(self, source: ChartSource[_Row, _Points], span: ChartRange, end: float, *, ends: bool) -> None:
        self.problem = ""
        self.done = threading.Event()
        self.read_until = end
        self.points = source.points(span)
        self._append = source.append
        self._newest = end - span.seconds - span.step
        """Time of the newest row read; a row that is written late is still newer."""
        self._reader = source.rows()
        self._span = span
        self._ends = ends
        self._last_spacing = 0.0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="charts", daemon=True).start()

    def series(self, end: float) -> Series:
        """The points read so far."""
        with self._lock:
            return replace(self.points.series(end), loading=not self.done.is_set())

    def update(self, now: float) -> None:
        """Read new rows, if it is time."""
        if self.done.is_set() and now - self.read_until >= min(MOST_SECONDS_BETWEEN, self._span.step / 4):
            self._read(now)
            self.read_until = now

    def close(self) -> None:
        """Stop reading."""
        self._closed.set()
        if self.done.is_set():
            self._reader.close()

    def _run(self) -> None:
        try:
            self._read(self.read_until)
        except HistoryMissingError:
            pass
        except HistoryError as error:
            self.problem = str(error)
        finally:
            self.done.set()
            if self._ends or self._closed.is_set():
                self._reader.close()

    def _read(self, end: float) -> None:
        joined = self._span.step / 2
        for part in self._reader.stretches(self._newest, end, self._span.step):
            at, spacing = part.start, 2.5 * part.tier.step + (joined if joined >= 2 * part.tier.step else 0.0)
            while not self._closed.is_set():
                began = time.monotonic()
                rows = self._reader.read(Stretch(part.tier, at, part.end), SLICE_ROWS, joined)
                if not rows:
                    break
                self._take(rows, spacing)
                self._newest = at = rows[-1].at
                if not self.done.is_set():
                    self._closed.wait((time.monotonic() - began) * REST_PER_WORK)

    def _take(self, rows: list[_Row], spacing: float) -> None:
        """Add rows that are at most ``spacing`` seconds apart unless some are missing."""
        with self._lock:
            for row in rows:
                # The first finer row after coarser ones is as far from its predecessor as the coarser rows were.
                self.points.gap = max(15.0, spacing, self._last_spacing)
                self._last_spacing = spacing
                self._append(self.points, row)


class ChartHistory(Generic[_Row, _Points]):
    """The recently shown ranges of one history."""

    def __init__(self, source: ChartSource[_Row, _Points]) -> None:
        self._source = source
        self._ranges: dict[tuple[float, float | None], _Range[_Row, _Points]] = {}
        self._reader = source.rows()
        self._first: tuple[float, float | None] = (float("-inf"), None)

    def recorded_from(self, now: float) -> float | None:
        """When the oldest stored sample was taken; refreshed once a minute.

        Raises:
            HistoryError: the history cannot be read.
        """
        if not 0 <= now - self._first[0] < MOST_SECONDS_BETWEEN or self._first[1] is None:
            try:
                self._first = (now, self._reader.first_at())
            except HistoryMissingError:
                self._first = (now, None)
        return self._first[1]

    def series(self, span: ChartRange, now: float, end: float | None = None) -> Series:
        """The points of ``span`` up to ``end`` (Unix seconds; default: now), as far as they have been read.

        Raises:
            HistoryError: the history cannot be read.
        """
        return self._range(span, now, end).series(now if end is None else end)

    def points(self, span: ChartRange, now: float, end: float | None = None) -> _Points:
        """The aggregator of these points. Raises as `series`."""
        return self._range(span, now, end).points

    def _range(self, span: ChartRange, now: float, end: float | None) -> _Range[_Row, _Points]:
        key = (span.seconds, end)
        found = self._ranges.pop(key, None)
        # After the clock was set back, the rows read so far lie in the future.
        if found is not None and end is None and not -BACK_SECONDS <= now - found.read_until <= OUTDATED_SECONDS:
            found.close()
            found = None
        if found is None:
            found = _Range(self._source, span, now if end is None else end, ends=end is not None)
            found.done.wait(WAIT_SECONDS)
        self._ranges[key] = found
        while len(self._ranges) > KEPT:
            self._ranges.pop(next(iter(self._ranges))).close()
        if found.problem:
            self._ranges.pop(key).close()  # the next call rereads it
            raise HistoryError(found.problem)
        if end is None:
            found.update(now)
        return found

    def close(self) -> None:
        """Close open files."""
        self._reader.close()
        for one in self._ranges.values():
            one.close()
        self._ranges.clear()

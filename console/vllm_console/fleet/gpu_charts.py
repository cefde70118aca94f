"""The history of the machine's GPUs as a console sees it: read for charts, and written if no recorder does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_console.fleet.chart_history import ChartHistory, ChartSource
from vllm_console.history.gpu_history import (
    GPU_HISTORY,
    Card,
    GpuEntry,
    GpuHistoryReader,
    GpuHistoryWriter,
    GpuTimeline,
    card_of,
    last_cards,
)
from vllm_console.history.gpu_samples import GPU_SAMPLES
from vllm_console.history.store import HistoryError, HistoryMissingError
from vllm_console.history.time_view import TimeView, points_shown, range_for
from vllm_console.history.timeline import newest_points
from vllm_console.metrics.sample import Series
from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.private import open_file

WRITE_SECONDS = 0.25
"""How long a snapshot waits for a file that another process is writing."""


class GpuChart(msgspec.Struct, frozen=True):
    """The chart of one GPU over the shown range, keyed as `Card.keys`. ``problem`` is why nothing can be read."""

    card: Card
    series: Series
    problem: str = ""


def history_path(state: Path, host: Host | None) -> Path:
    """Path of this machine's GPU history, or of a recorded host's, which has its own file."""
    if host is None:
        return state / GPU_HISTORY
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", host.hostname)[:40] or "host"
    return state / GPU_HISTORY.replace(".", f".{name}.", 1)


def cards(path: Path) -> tuple[Card, ...]:
    """The GPUs in a history, as last recorded; none if nothing is recorded.

    Raises:
        OperationError: the history cannot be read.
    """
    try:
        return last_cards(path)
    except HistoryMissingError:
        return ()


class GpuCharts:
    """Reads the GPU history, for one GPU at a time.

    The recorders of this user's servers write it. If none runs, and for a recorded host, an open console does;
    ``write`` is whether this console may.
    """

    def __init__(self, state: Path, recorded: Host | None = None, *, write: bool = True) -> None:
        self._path = history_path(state, recorded)
        self._lock_path = None if recorded is not None else state / (GPU_SAMPLES + ".lock")
        self._writer = GpuHistoryWriter(self._path, WRITE_SECONDS) if write else None
        self._lock_trouble = ""
        self._charts: ChartHistory[GpuEntry, GpuTimeline] | None = None
        self._of: tuple[int, str | None] | None = None
        """The index and uuid of the GPU being read."""

    @property
    def trouble(self) -> str:
        """A sentence explaining why the history can't be written; empty if it can."""
        return self._lock_trouble or (self._writer.trouble if self._writer is not None else "")

    def record(self, host: Host | None, now: float) -> None:
        """Write the current readings (``now`` in Unix seconds) if nobody else does. Stale readings are not written."""
        if self._writer is None or host is None or host.problem or not host.gpus:
            return
        with self._turn() as ours:
            if ours:
                self._writer.append(host, now)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[bool]:
        """Whether no recorder samples this machine's GPUs. The lock is released at once, for a recorder that starts."""
        if self._lock_path is None:
            yield True
            return
        self._lock_trouble, ours = "", False
        with contextlib.ExitStack() as opened:
            try:
                descriptor = open_file(self._lock_path, os.O_RDWR)
                opened.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                ours = True
            except (BlockingIOError, FileNotFoundError):  # a recorder runs; or no server was ever started
                pass
            except OSError as error:
                self._lock_trouble = f"GPU history is lost: {self._lock_path} can't be locked: {error.strerror}"
            yield ours

    def chart(self, gpu: Gpu, now: float, time: TimeView) -> GpuChart:
        """The chart of a GPU over the requested range, as far as it has been read."""
        return self.read(card_of(gpu), now, time)

    def read(self, card: Card, now: float, time: TimeView) -> GpuChart:
        """The chart of the GPU of a card."""
        try:
            return self._chart(self._source(card), card, now, time)
        except HistoryMissingError:
            return GpuChart(card, _nothing(now, time))
        except HistoryError as error:
            return GpuChart(card, _nothing(now, time), str(error))

    def _source(self, card: Card) -> ChartHistory[GpuEntry, GpuTimeline]:
        if self._charts is None or self._of != (card.index, card.uuid):
            self.close_charts()
            self._of = (card.index, card.uuid)
            self._charts = ChartHistory(
                ChartSource(
                    lambda: GpuHistoryReader(self._path, card),
                    lambda span: GpuTimeline(span.step, span.points),
                    GpuTimeline.append,
                )
            )
        return self._charts

    def _chart(self, charts: ChartHistory[GpuEntry, GpuTimeline], card: Card, now: float, time: TimeView) -> GpuChart:
        first = charts.recorded_from(now)
        age = (time.end if time.end is not None else now) - first if first is not None else 0.0
        span = range_for(time.range, age)
        found = charts.series(span, now, time.end)
        shown = newest_points(found, points_shown(time.range, age, span.step))
        then = charts.points(span, now, time.end).card
        return GpuChart(then or card, replace(shown, recorded_from=first))

    def close_charts(self) -> None:
        """Discard the data read, while no chart shows it."""
        if self._charts is not None:
            self._charts.close()
            self._charts = None

    def close(self) -> None:
        """Close open files."""
        self.close_charts()
        if self._writer is not None:
            self._writer.close()


def _nothing(now: float, time: TimeView) -> Series:
    end = time.end if time.end is not None else now
    return Series(end=end, step=time.range.step, values={"": (None,) * time.range.points})

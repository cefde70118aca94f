"""Engine steps and first tokens as evenly spaced points for charts. Pure, except `ProbeRows`, which reads them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_console.history.exact import exact_quantiles, interval_ends, quantiles_between
from vllm_console.history.probe_records import SETTLED_SECONDS, EngineStep, FirstToken, Interval, ProbeSpans, Timed
from vllm_console.history.store import HistoryError, HistoryMissingError, Stretch, Tier
from vllm_console.metrics.quantile import Quantiles, exact_quantile
from vllm_console.metrics.sample import Series

SERIES = (
    "running",
    "waiting",
    "decode_tokens",
    "prompt_tokens",
    "step_p50",
    "step_p99",
    "ttft_p50",
    "ttft_p99",
    "itl_p50",
    "itl_p99",
)
"""Keys of `Series.values`: ``running``, ``decode_tokens`` and ``prompt_tokens`` are means over the steps of a point,
``waiting`` is the maximum. Prompt tokens are those that were computed; if vLLM does not log iteration details, they are
counted when the prompt is complete, minus the prefix cache hits of prompts that began meanwhile. ``step_p50`` and
``step_p99`` are quantiles, in seconds, of the durations of steps that ended an inter-token interval. Latencies are in
seconds, and missing where they are not exact."""

ROWS_AT_ONCE = 10
"""Records to read per row that a reader requests: records are smaller than rows of a history."""

_STEPS = Tier("steps", 0.0, 0, 0)

_Point = tuple[float | None, ...]

_NOTHING: _Point = (None,) * len(SERIES)


class ProbeRows:
    """The records in a folder, with the interface that `vllm_console.fleet.chart_history` expects of a history."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spans = ProbeSpans(folder)

    def first_at(self) -> float | None:
        """When the oldest step was recorded. Raises HistoryError."""
        try:
            return self._spans.first_at()
        except OSError as error:
            raise self._problem(error) from error

    def stretches(self, start: float, end: float, _step: float) -> list[Stretch]:
        """A single stretch: all records are in one place."""
        return [Stretch(_STEPS, start, end)]

    def read(self, part: Stretch, most: int, _joined: float = 0.0, /) -> list[Timed]:
        """The first records of a stretch, up to the newest that are surely on disk. Raises HistoryError."""
        try:
            return self._spans.after(part.start, min(part.end, time.time() - SETTLED_SECONDS), most * ROWS_AT_ONCE)
        except OSError as error:
            raise self._problem(error) from error

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _problem(self, error: OSError) -> HistoryError:
        if isinstance(error, FileNotFoundError):
            return HistoryMissingError(f"{self._folder} does not exist: nothing recorded yet.")
        return HistoryError(f"the records of {self._folder} can't be read: {error.strerror}.")


class _Sums(msgspec.Struct):
    steps: int = 0
    running: int = 0
    known_running: int = 0
    waiting: int | None = None
    decoded: int | None = None
    prompts: int | None = None
    within: list[EngineStep] = msgspec.field(default_factory=list)
    """Steps that ended an inter-token interval."""
    intervals: list[Interval] = msgspec.field(default_factory=list)
    ttfts: list[float] = msgspec.field(default_factory=list)
    complete: bool = True
    """Whether no record of this point is known to be missing."""

    def add(self, step: EngineStep) -> None:
        self.steps += 1
        if step.running is not None:
            self.running += step.running
            self.known_running += 1
        if step.waiting is not None:
            self.waiting = max(self.waiting or 0, step.waiting)
        if step.generation_tokens is not None:
            self.decoded = (self.decoded or 0) + step.generation_tokens
        if (prompts := _prompt_tokens(step)) is not None:
            self.prompts = (self.prompts or 0) + prompts
        if step.intervals > 0:
            self.within.append(step)

    def point(self) -> _Point:
        """The point's values in the order of `SERIES`."""
        took = [step.shortest_interval or 0.0 for step in self.within]
        ttft = exact_quantiles(self.ttfts) if self.complete else None
        itl = quantiles_between(*interval_ends(self.within, self.intervals)) if self.complete else None
        return (
            self.running / self.known_running if self.known_running else None,
            None if self.waiting is None else float(self.waiting),
            None if self.decoded is None else self.decoded / self.steps,
            None if self.prompts is None else max(0, self.prompts) / self.steps,
            *(exact_quantile(took, share) if took else None for share in (0.5, 0.99)),
            *_ends(ttft),
            *_ends(itl),
        )


def _ends(found: Quantiles | None) -> tuple[float | None, float | None]:
    """The median and the p99."""
    if found is None or found.p50 is None or found.p99 is None:
        return None, None
    return found.p50.guess, found.p99.guess


def _prompt_tokens(step: EngineStep) -> int | None:
    """Prompt tokens computed in a step; None if unknown, possibly negative in steps where prompts begin."""
    if step.context_tokens is not None:
        return step.context_tokens
    return None if step.prompt_tokens is None else step.prompt_tokens - (step.cache_hits or 0)


class StepTimeline:
    """The last ``points`` steps of ``step`` seconds, as in `vllm_console.history.timeline.Timeline`.

    Records arrive in order of time. A point with missing records has no latencies.
    """

    def __init__(self, step: float, points: int) -> None:
        self.step, self.points = step, points
        self.gap = math.inf
        """Not used: points without records stay empty."""
        self._open: dict[int, _Sums] = {}
        self._points: dict[int, _Point] = {}
        self._last: EngineStep | None = None

    def append(self, row: Timed) -> None:
        """Add the next record."""
        index = math.ceil(row.at / self.step) - 1
        for old in [one for one in self._open if one < index]:
            self._points[old] = self._open.pop(old).point()
        sums = self._open.setdefault(index, _Sums(complete=self._last is not None or bool(self._points)))
        if isinstance(row, FirstToken):
            sums.ttfts.append(row.seconds)
            return
        if isinstance(row, Interval):
            sums.intervals.append(row)
            return
        before, self._last = self._last, row
        if before is not None and row.dropped > before.dropped:
            self._lost(math.ceil(before.at / self.step) - 1, index)
        sums.add(row)
        if len(self._points) > 2 * self.points:
            self._points = {at: point for at, point in self._points.items() if at > index - self.points}

    def _lost(self, first: int, last: int) -> None:
        """Drop the latencies of the points between ``first`` and ``last``: records are missing there."""
        for index, point in self._points.items():
            if first <= index <= last:
                self._points[index] = (*point[:6], None, None, None, None)
        for index, sums in self._open.items():
            sums.complete = sums.complete and not first <= index <= last

    def series(self, end: float) -> Series:
        """The points up to ``end`` (Unix seconds), oldest first, `points` of them."""
        last = math.ceil(end / self.step) - 1
        known = {**self._points, **{index: sums.point() for index, sums in self._open.items()}}
        rows = [known.get(index, _NOTHING) for index in range(last - self.points + 1, last + 1)]
        values = dict(zip(SERIES, zip(*rows, strict=True), strict=True))
        return Series(end=(last + 1) * self.step, step=self.step, values=values)


def with_exact_points(series: Series, steps: Series) -> Series:
    """Replace points of a latency chart by exact ones if available; ``ttft_exact`` and ``itl_exact`` are 1 there."""
    later = round((steps.end - series.end) / series.step)
    values = dict(series.values)
    for latency in ("ttft", "itl"):
        p99 = _aligned(steps.values.get(f"{latency}_p99", ()), later, len(values.get(f"{latency}_p99", ())))
        known = [value is not None for value in p99]
        if not any(known):
            continue
        for part in ("p50", "p99"):
            key = f"{latency}_{part}"
            exact = _aligned(steps.values[key], later, len(known))
            values[key] = tuple(map(_first, exact, values[key]))
        values[f"{latency}_exact"] = tuple(1.0 if one else None for one in known)
        if bounds := values.get(f"{latency}_p99_bound"):
            values[f"{latency}_p99_bound"] = tuple(
                None if one else bound for one, bound in zip(known, bounds, strict=True)
            )
    return replace(series, values=values)


def _first(one: float | None, other: float | None) -> float | None:
    return other if one is None else one


def _aligned(column: Sequence[float | None], later: int, count: int) -> list[float | None]:
    """The ``count`` points of a column that end ``later`` points before its end; unknown ones are None."""
    end = len(column) - later
    known = column[max(0, end - count) : max(0, end)]
    after = min(count, max(0, end - len(column)))
    return [*[None] * (count - after - len(known)), *known, *[None] * after]

"""Samples as evenly spaced points for charts, and the window of the last minute.

Pure: times come from the samples. A console appends one sample a second and reads the points; only the newest point is
recomputed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from vllm_console.metrics.quantile import quantile
from vllm_console.metrics.sample import ACCEPTED, EngineSample, Histogram, Sample, Series, Window
from vllm_console.metrics.waiting import Waits
from vllm_console.metrics.window import (
    combine,
    growths,
    highest,
    highest_usage,
    is_idle,
    merge_histograms,
    window,
    without_rates,
)

SERIES = (
    "kv_cache_usage",
    "preemptions",
    "requests_running",
    "requests_waiting",
    "generation_tokens_per_second",
    "prompt_tokens_per_second",
    "requests_per_second",
    "ttft_p50",
    "itl_p50",
    "ttft_p99",
    "itl_p99",
    "ttft_p99_bound",
    "itl_p99_bound",
    "acceptance_length",
)
"""Keys of `Series.values`. Gauges are the highest ones of a step, and ``kv_cache_usage`` is that of the fullest engine;
in a `Window` it is the mean of all engines."""

IDLE_SECONDS = 30.0
"""Traffic has ended if nothing ran, waited or was counted for this long: rates are then zero."""

_CHARTED = ("ttft", "itl", ACCEPTED)

MOST_UNCHARTED = 90
"""Maximum number of samples waiting to become points; more than a window has, since a command computes no points."""
_Point = tuple[float | None, ...]


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


class _Step(msgspec.Struct):
    """One step's data: maximum gauges, summed counts, and the seconds they cover."""

    usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    generation: float | None = None
    prompt: float | None = None
    requests: float | None = None
    ttft: Histogram | None = None
    itl: Histogram | None = None
    accepted_tokens: Histogram | None = None
    seconds: float = 0.0

    def gauges(self, sample: Sample) -> None:
        """Add a sample's gauges; KV usage is the fullest engine's."""
        total = combine(sample.engines.values())
        self.usage = highest(self.usage, highest_usage(sample.engines.values()))
        self.running = highest(self.running, total.requests_running)
        self.waiting = highest(self.waiting, total.requests_waiting)

    def counts(self, grown: EngineSample, seconds: float, share: float) -> None:
        """Add a ``share`` of an interval's counts, which covers ``seconds`` of this step."""
        self.seconds += seconds
        for name, amount in (
            ("preemptions", grown.preemptions_total),
            ("generation", grown.generation_tokens_total),
            ("prompt", grown.prompt_tokens_total),
            ("requests", grown.requests_finished_total),
        ):
            if amount is not None:
                setattr(self, name, _sum(getattr(self, name), amount * share))
        for key in _CHARTED:
            histogram = grown.histograms.get(key)
            if histogram is not None and histogram.count > 0:
                known: Histogram | None = getattr(self, key)
                setattr(self, key, histogram if known is None else merge_histograms((known, histogram)))

    def point(self) -> _Point:
        """The step's values in the order of `SERIES`."""
        per_second = 1 / self.seconds if self.seconds > 0 else None

        def rate(amount: float | None) -> float | None:
            return amount * per_second if amount is not None and per_second is not None else None

        medians, quantiles = (
            [
                quantile(share, histogram.bounds, histogram.counts) if histogram is not None else None
                for histogram in (self.ttft, self.itl)
            ]
            for share in (0.5, 0.99)
        )
        return (
            self.usage,
            self.preemptions,
            self.running,
            self.waiting,
            rate(self.generation),
            rate(self.prompt),
            rate(self.requests),
            *(found.nearest if found is not None else None for found in (*medians, *quantiles)),
            *(1.0 if found is not None and found.value is None else None for found in quantiles),
            None if (accepted := self.accepted_tokens) is None else 1.0 + accepted.sum / accepted.count,
        )


class _Growth(NamedTuple):
    """A sample, its engines merged, and what was counted since ``since`` (the previous sample), if known."""

    after: Sample
    total: EngineSample
    since: float
    grown: EngineSample | None = None


class Timeline:
    """The last ``points`` steps of ``step`` seconds, and the samples of the last ``window_seconds``.

    Steps end at multiples of ``step`` (Unix seconds), so points stay in place as time advances; the newest step is
    still filling. A gap between samples of more than ``gap`` seconds (2.5 steps, at least 15 s) stays empty, and what
    was counted during it belongs to no step.
    """

    def __init__(self, step: float, points: int, *, window_seconds: float = 60.0) -> None:
        self.step = step
        self.points = points
        self._window_seconds = window_seconds
        self.gap = max(2.5 * step, 15.0)
        self._recent: deque[Sample] = deque()
        self._waits = Waits()
        self._uncharted: list[_Growth] = []
        self._busy_at = -math.inf
        self.generation: int | None = None
        """Generation of the server that the newest sample belongs to."""
        self._steps: dict[int, _Step] = {}
        self._columns: list[deque[float | None]] = [deque(maxlen=points) for _ in SERIES]
        self._last: int | None = None

    @property
    def latest(self) -> Sample | None:
        """The newest sample."""
        return self._recent[-1] if self._recent else None

    @property
    def recent(self) -> tuple[Sample, ...]:
        """The samples behind `window`, oldest first."""
        return tuple(self._recent)

    def append(self, sample: Sample, generation: int | None = None) -> None:
        """Add the next sample. One that is not newer than the last is ignored.

        A new ``generation`` begins a new window: a minute never mixes two runs of a server. If the clock was set back
        (a sample more than a minute older than the last), everything starts over.
        """
        before = self.latest
        if before is not None and sample.at <= before.at:
            if before.at - sample.at <= 60:
                return
            self.clear()
            before = None
        if before is not None and generation != self.generation:
            # Counts from before a run's first sample are not traffic: that is its warm-up request.
            self._recent.clear()
            self._waits.clear()
            self._busy_at = sample.at
            before = None
        elif before is None or not is_idle(before, sample):
            self._busy_at = sample.at
        self.generation = generation
        self._recent.append(sample)
        while len(self._recent) > 2 and self._recent[1].at <= sample.at - self._window_seconds:
            self._recent.popleft()
        growth = self._growth(before, sample)
        self._waits.append(sample, growth.total, growth.grown)
        self._uncharted.append(growth)
        if len(self._uncharted) > MOST_UNCHARTED:
            self._chart()

    def clear(self) -> None:
        """Clear everything."""
        self._recent.clear()
        self._waits.clear()
        self._uncharted.clear()
        self._busy_at = -math.inf
        self._steps.clear()
        for column in self._columns:
            column.clear()
        self._last = None

    def window(self, seconds: float | None = None) -> Window | None:
        """The last ``seconds`` (at most ``window_seconds``, the default); None without a sample.

        With fewer samples it covers only those, and never spans a manual restart; with one sample there are no rates.
        """
        if not self._recent:
            return None
        after = self._recent[-1]
        start = after.at - min(seconds if seconds is not None else self._window_seconds, self._window_seconds)
        before = self._recent[0]
        for candidate in self._recent:
            if candidate.at > start:
                break
            before = candidate
        found = replace(window(before, after), longest_wait=self._waits.longest)
        return without_rates(found) if after.at - self._busy_at >= IDLE_SECONDS else found

    def series(self, end: float | None = None) -> Series:
        """The points up to ``end`` (Unix seconds; default: the newest sample), oldest first, `points` of them."""
        self._chart()
        last = self._last
        if end is not None:
            last = self._index(end) if last is None else max(self._index(end), last)
        if last is None:
            return Series(end=end or 0.0, step=self.step, values=dict.fromkeys(SERIES, (None,) * self.points))
        missing = last - (self._last if self._last is not None else last - self.points)
        tail = (None,) * min(missing, self.points)
        values = {}
        for name, column in zip(SERIES, self._columns, strict=True):
            known = (*column, *tail)[-self.points :]
            values[name] = (None,) * (self.points - len(known)) + known
        return Series(end=(last + 1) * self.step, step=self.step, values=values)

    def _index(self, at: float) -> int:
        """The step that a moment belongs to; a step includes its end but not its beginning."""
        return math.ceil(at / self.step) - 1

    def _growth(self, before: Sample | None, after: Sample) -> _Growth:
        total = combine(after.engines.values())
        if before is None or after.at - before.at > self.gap:
            return _Growth(after, total, after.at)
        return _Growth(after, total, before.at, combine(growths(before, after, _CHARTED)))

    def _chart(self) -> None:
        """Put the samples that arrived since the last call into points."""
        for growth in self._uncharted:
            self._chart_growth(growth.since, growth.after, growth.grown)
        self._uncharted.clear()

    def _chart_growth(self, since: float, after: Sample, grown: EngineSample | None) -> None:
        """Distribute the counts between two samples over the steps by time; the gauges are the later sample's."""
        last = first = self._index(after.at)
        duration = after.at - since
        if duration > self.step:
            first = self._index(since)  # otherwise all counts go to the later sample's step
        touched = range(max(first, last - self.points + 1), last + 1)
        for index in touched:
            step = self._steps.setdefault(index, _Step())
            if grown is not None:
                begin = index * self.step
                covered = min(after.at, begin + self.step) - max(after.at - duration, begin)
                covered = duration if first == last else covered
                if covered > 0:
                    step.counts(grown, covered, covered / duration)
            if index > first or index == last:
                step.gauges(after)
        self._write(touched, last)

    def _write(self, touched: Iterable[int], last: int) -> None:
        """Update the columns: shift to the newest step, then set the changed points."""
        if self._last is None:
            self._last = last - 1
        for _ in range(min(last - self._last, self.points)):
            for column in self._columns:
                column.append(None)
        self._last = last
        length = len(self._columns[0])
        for index in touched:
            place = length - 1 - (last - index)
            if place >= 0:
                for column, value in zip(self._columns, self._steps[index].point(), strict=True):
                    column[place] = value
        for index in [index for index in self._steps if index < last - 1]:
            del self._steps[index]


def newest_points(series: Series, points: int) -> Series:
    """The newest points of a series."""
    values = {name: column[-points:] for name, column in series.values.items()}
    return replace(series, values=values)


def ended(series: Series, until: float) -> Series:
    """The points that ended by ``until`` (Unix seconds); all of them if none before it has a value."""
    open_points = round((series.end - until) / series.step)
    if open_points <= 0:
        return series
    values = {name: column[:-open_points] for name, column in series.values.items()}
    if not any(value is not None for column in values.values() for value in column):
        return series
    return replace(series, end=until, values=values)

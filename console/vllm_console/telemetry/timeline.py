"""Samples as they come, kept as evenly spaced points for charts and as the window of the last minute.

Pure: time is what the samples say. A console appends one sample a second and asks for the points; only the newest
point is worked out again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_console.telemetry.model import EngineSample, Histogram, Sample, Series, Window
from vllm_console.telemetry.window import combine, growths, highest, merge, quantile, window

SERIES = (
    "kv_cache_usage",
    "preemptions",
    "requests_running",
    "requests_waiting",
    "generation_tokens_per_second",
    "prompt_tokens_per_second",
    "requests_per_second",
    "ttft_p99",
    "itl_p99",
)
"""Keys of `Series.values`."""

_CHARTED = ("ttft", "itl")
_Point = tuple[float | None, ...]
_NOTHING: _Point = (None,) * len(SERIES)


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other


@dataclass(slots=True)
class _Step:
    """What is known of one step: gauges at their highest, counts added up, and over how many seconds."""

    usage: float | None = None
    running: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    generation: float | None = None
    prompt: float | None = None
    requests: float | None = None
    ttft: Histogram | None = None
    itl: Histogram | None = None
    seconds: float = 0.0

    def gauges(self, sample: Sample) -> None:
        """Take in a look's gauges; KV usage is the fullest engine's."""
        total = combine(sample.engines.values())
        usages = [e.kv_cache_usage for e in sample.engines.values() if e.kv_cache_usage is not None]
        self.usage = highest(self.usage, max(usages, default=None))
        self.running = highest(self.running, total.requests_running)
        self.waiting = highest(self.waiting, total.requests_waiting)

    def counts(self, grown: EngineSample, seconds: float, share: float) -> None:
        """Take in a ``share`` of what was counted in an interval, which covers ``seconds`` of this step."""
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
                setattr(self, key, histogram if known is None else merge((known, histogram)))

    def point(self) -> _Point:
        """The step's values in the order of `SERIES`."""
        per_second = 1 / self.seconds if self.seconds > 0 else None

        def rate(amount: float | None) -> float | None:
            return amount * per_second if amount is not None and per_second is not None else None

        return (
            self.usage,
            self.preemptions,
            self.running,
            self.waiting,
            rate(self.generation),
            rate(self.prompt),
            rate(self.requests),
            quantile(0.99, self.ttft.bounds, self.ttft.counts) if self.ttft is not None else None,
            quantile(0.99, self.itl.bounds, self.itl.counts) if self.itl is not None else None,
        )


class Timeline:
    """The last ``points`` steps of ``step`` seconds, and the samples of the last ``window_seconds``.

    Steps end at ``phase`` plus multiples of ``step`` (Unix seconds), so that points keep their place while time moves
    on; the newest step is still filling. A pause between samples of more than ``gap`` seconds (default: 2.5 steps,
    15 s at least) stays empty, and what was counted over it belongs to no step.
    """

    def __init__(
        self, step: float, points: int, *, phase: float = 0.0, window_seconds: float = 60.0, gap: float | None = None
    ) -> None:
        if step <= 0 or points < 1:
            raise ValueError("a timeline needs a step above 0 and at least one point")
        self.step = step
        self.points = points
        self._phase = phase
        self._window_seconds = window_seconds
        self._gap = gap if gap is not None else max(2.5 * step, 15.0)
        self._recent: deque[Sample] = deque()
        self._generation: int | None = None
        self._steps: dict[int, _Step] = {}
        self._columns: list[deque[float | None]] = [deque(maxlen=points) for _ in SERIES]
        self._last: int | None = None

    @property
    def latest(self) -> Sample | None:
        """The newest sample."""
        return self._recent[-1] if self._recent else None

    def append(self, sample: Sample, generation: int | None = None) -> None:
        """Take in the next sample. One that is not newer than the last is ignored.

        A new ``generation`` begins a new window: a minute never mixes two runs of a server. When time was set back
        (a sample more than a minute older than the last), everything begins anew.
        """
        before = self.latest
        if before is not None and sample.at <= before.at:
            if before.at - sample.at <= 60:
                return
            self.clear()
            before = None
        if before is not None and generation != self._generation:
            self._recent.clear()
        self._generation = generation
        self._recent.append(sample)
        while len(self._recent) > 2 and self._recent[1].at <= sample.at - self._window_seconds:
            self._recent.popleft()
        self._chart(before, sample)

    def clear(self) -> None:
        """Forget everything."""
        self._recent.clear()
        self._steps.clear()
        for column in self._columns:
            column.clear()
        self._last = None

    def window(self, seconds: float | None = None) -> Window | None:
        """What happened in the last ``seconds`` (at most ``window_seconds``, the default); None without a sample.

        With fewer samples it is as long as they reach, never over a restart by hand; with one there are no rates.
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
        return window(before, after)

    def series(self, end: float | None = None) -> Series:
        """The points up to ``end`` (Unix seconds; default: the newest sample), oldest first, `points` of them."""
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
        return Series(end=self._phase + (last + 1) * self.step, step=self.step, values=values)

    def _index(self, at: float) -> int:
        """The step that a moment falls into; a step holds its end, not its beginning."""
        return math.ceil((at - self._phase) / self.step) - 1

    def _chart(self, before: Sample | None, after: Sample) -> None:
        """Give each step its share, by time, of what was counted between two looks, and the gauges of the later."""
        last = first = self._index(after.at)
        duration = 0.0
        grown: EngineSample | None = None
        if before is not None and after.at - before.at <= self._gap:
            duration = after.at - before.at
            grown = combine(growths(before, after, _CHARTED))
            if duration > self.step:  # else as good as at once: the step of the later look gets it whole
                first = self._index(before.at)
        touched = range(max(first, last - self.points + 1), last + 1)
        for index in touched:
            step = self._steps.setdefault(index, _Step())
            if grown is not None:
                begin = self._phase + index * self.step
                covered = min(after.at, begin + self.step) - max(after.at - duration, begin)
                covered = duration if first == last else covered
                if covered > 0:
                    step.counts(grown, covered, covered / duration)
            if index > first or index == last:
                step.gauges(after)
        self._write(touched, last)

    def _write(self, touched: Iterable[int], last: int) -> None:
        """Bring the columns up to date: push on to the newest step, then set the points that changed."""
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

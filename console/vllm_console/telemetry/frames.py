"""A server's last half hour in steps of ten seconds, with everything it counted: what conditions are judged by. Pure.

Time is what the samples say.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_console.telemetry.model import LATENCIES, LENGTHS, EngineSample, Histogram, Sample
from vllm_console.telemetry.window import combine, growths, highest, merge

STEP_SECONDS = 10.0
FRAMES = 180
FEWEST_LOOKS = 3
"""Within a frame, for the lowest of a gauge: a coarse row of history holds the highest of its step and no other."""

_KEYS = (*LATENCIES, *LENGTHS)


@dataclass(frozen=True, slots=True)
class Frame:
    """One step. ``grown`` holds what was counted in it, over all engines, and the gauges as they were at its end.

    ``usage_max``, ``running_max`` and ``waiting_max`` are the highest gauges seen within it (KV usage of the fullest
    engine, a share from 0 to 1), ``waiting_min`` the lowest, where there were `FEWEST_LOOKS`. Requests, tokens and
    ``kv_cache_tokens`` are of all ``engines`` (data-parallel ranks) together. ``still`` are the labels of those that
    had requests running at its end, and in which nothing moved: no token, no prompt, no block taken. None is 'not
    reported'.
    """

    generation: int
    start: float
    end: float
    grown: EngineSample
    usage_max: float | None = None
    running_max: float | None = None
    waiting_max: float | None = None
    waiting_min: float | None = None
    kv_cache_tokens: int | None = None
    engines: int = 1
    still: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start

    def per_second(self, counter: str) -> float | None:
        """The rate of one of the counters of `EngineSample`."""
        amount: float | None = getattr(self.grown, counter)
        return amount / self.seconds if amount is not None and self.seconds > 0 else None

    def histogram(self, key: str) -> Histogram | None:
        """What was observed in it, or None when that is not reported."""
        return self.grown.histograms.get(key)


class Frames:
    """Makes frames of samples as they come, and keeps the last `FRAMES` of them."""

    def __init__(self, step: float = STEP_SECONDS, keep: int = FRAMES) -> None:
        self._step = step
        self._frames: deque[Frame] = deque(maxlen=keep)
        self._base: tuple[Sample, int] | None = None
        self._within: list[Sample] = []

    def append(self, sample: Sample, generation: int = 1) -> None:
        """Take in the next look; after a gap of more than three steps, or in another generation, it begins anew."""
        base = self._base
        if base is None or generation != base[1] or not 0 < sample.at - base[0].at <= 3 * self._step:
            if base is not None and base[0].at - 60 <= sample.at <= base[0].at and generation == base[1]:
                return
            self._base, self._within = (sample, generation), []
            return
        self._within.append(sample)
        # A tenth less, because looks come once a second and never exactly on time.
        if sample.at - base[0].at >= self._step - 0.1:
            self._frames.append(_frame(base[0], self._within, generation))
            self._base, self._within = (sample, generation), []

    def since(self, at: float, generation: int | None = None) -> tuple[Frame, ...]:
        """The frames that began at ``at`` (Unix seconds) or later, oldest first, of one generation or of all."""
        return tuple(
            frame
            for frame in self._frames
            if frame.start >= at and (generation is None or frame.generation == generation)
        )


def _frame(before: Sample, within: list[Sample], generation: int) -> Frame:
    after = within[-1]
    usage = running = most_waiting = least_waiting = None
    for sample in within:
        total = combine(sample.engines.values())
        usages = [one.kv_cache_usage for one in sample.engines.values() if one.kv_cache_usage is not None]
        usage = highest(usage, max(usages, default=None))
        running = highest(running, total.requests_running)
        most_waiting = highest(most_waiting, total.requests_waiting)
        if total.requests_waiting is not None:
            least_waiting = min(total.requests_waiting, least_waiting if least_waiting is not None else float("inf"))
    grown = dict(zip(after.engines, growths(before, after, _KEYS), strict=True))
    return Frame(
        generation=generation,
        start=before.at,
        end=after.at,
        grown=combine(grown.values()),
        usage_max=usage,
        running_max=running,
        waiting_max=most_waiting,
        waiting_min=least_waiting if len(within) >= FEWEST_LOOKS else None,
        kv_cache_tokens=after.kv_cache_tokens,
        engines=max(1, len(after.engines)),
        still=tuple(label for label, one in grown.items() if _stands_still(label, one, (before, *within))),
    )


def _stands_still(label: str, grown: EngineSample, looks: Sequence[Sample]) -> bool:
    """A long prefill gives no token either, but takes more of the KV cache with each step.

    That requests end is no movement: clients that give up, and the request for one token when it does, count as ended.
    """
    if grown.generation_tokens_total is None or (grown.requests_running or 0) < 1:
        return False
    if grown.generation_tokens_total or grown.prompt_tokens_total:
        return False
    engines = [look.engines.get(label) for look in looks]
    return all(one is not None and one.kv_cache_usage == grown.kv_cache_usage for one in engines)


def merged(frames: Iterable[Frame], key: str) -> Histogram | None:
    """What was observed in all of these frames together."""
    return merge(found for frame in frames if (found := frame.histogram(key)) is not None)


def total(frames: Iterable[Frame], counter: str) -> float | None:
    """What was counted in all of these frames together; None when none reports it."""
    values = [value for frame in frames if (value := getattr(frame.grown, counter)) is not None]
    return sum(values) if values else None

"""A server's last half hour in steps of ten seconds with all its counters, the input for findings. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from vllm_console.metrics.sample import (
    ACCEPTED,
    LATENCIES,
    LENGTHS,
    MAX_TOKENS_PARAM,
    EngineSample,
    Histogram,
    Responses,
    Sample,
)
from vllm_console.metrics.window import (
    FirstRequests,
    combine,
    growths,
    highest,
    highest_usage,
    merge_histograms,
    responses_between,
)

STEP_SECONDS = 10.0
FRAMES = 180
BUSY = 0.5
"""Times with fewer running requests than this fraction of the maximum are ignored: they predict little about many."""

MIN_SAMPLES = 3
"""Samples per frame required for a gauge's minimum: a coarse history row holds only its step's maximum."""

_KEYS = (*LATENCIES, *LENGTHS, MAX_TOKENS_PARAM, ACCEPTED)


class RankFrame(msgspec.Struct, frozen=True):
    """One data-parallel rank in a step: generated tokens, highest and lowest gauges. None means not reported."""

    label: str
    tokens: float | None = None
    usage_max: float | None = None
    running_max: float | None = None
    waiting_max: float | None = None
    waiting_min: float | None = None


class Frame(msgspec.Struct, frozen=True):
    """One step. ``grown`` holds what was counted in it, over all engines, and the gauges at its end.

    ``usage_max``, ``running_max`` and ``waiting_max`` are the highest gauges within it (KV usage of the fullest engine,
    a fraction from 0 to 1), ``waiting_min`` the lowest, if there were `MIN_SAMPLES`. ``held_max`` is the largest
    fraction of the KV cache held per running request at any one time. Requests, tokens and ``kv_cache_tokens`` are
    totals over all ``engines`` (data-parallel ranks). ``still`` holds the labels of engines with requests running at
    its end but no progress: no token, no prompt, no block allocated. ``prefix_caching`` and ``prefix_step`` are as in
    `Sample`. None means not reported.
    """

    generation: int
    start: float
    end: float
    grown: EngineSample
    usage_max: float | None = None
    running_max: float | None = None
    held_max: float | None = None
    waiting_max: float | None = None
    waiting_min: float | None = None
    kv_cache_tokens: int | None = None
    prefix_caching: bool | None = None
    prefix_step: int | None = None
    responses: Responses | None = None
    engines: int = 1
    ranks: tuple[RankFrame, ...] = ()
    """The ranks, if there are several."""
    still: tuple[str, ...] = ()
    compiling: bool = False
    """Whether the run's first requests were unfinished at its start: their durations are not representative."""
    unanswered: bool = False
    """Whether none of the first requests had a token by its end."""

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start

    def histogram(self, key: str) -> Histogram | None:
        """The observations of one histogram in it, or None if not reported."""
        return self.grown.histograms.get(key)


class Frames:
    """Builds frames from samples as they arrive, and keeps the last `FRAMES` of them."""

    def __init__(self, step: float = STEP_SECONDS, keep: int = FRAMES) -> None:
        self._step = step
        self._frames: deque[Frame] = deque(maxlen=keep)
        self._base: tuple[Sample, int] | None = None
        self._within: list[Sample] = []
        self._first = FirstRequests()
        self._compiling = False
        self._found: dict[tuple[float, int | None], tuple[Frame, ...]] = {}
        """The results of `since` by its arguments; empty after a new frame."""

    def append(self, sample: Sample, generation: int = 1) -> None:
        """Add the next sample; start over after a gap of more than three steps or in another generation."""
        base = self._base
        if base is None or generation != base[1]:
            self._first = FirstRequests()
        if base is None or generation != base[1] or not 0 < sample.at - base[0].at <= 3 * self._step:
            if base is not None and base[0].at - 60 <= sample.at <= base[0].at and generation == base[1]:
                return
            self._begin(sample, generation)
            return
        self._within.append(sample)
        over = self._first.add(sample)
        # A tenth of a second less, because samples arrive about once a second, never exactly on time.
        if sample.at - base[0].at >= self._step - 0.1:
            frame = _frame(base[0], self._within, generation)
            if self._compiling and self._first.compiled:
                frame = replace(frame, compiling=True, unanswered=not self._first.answered)
            self._frames.append(frame)
            self._found.clear()
            self._base, self._within, self._compiling = (sample, generation), [], not over

    def _begin(self, sample: Sample, generation: int) -> None:
        self._base, self._within, self._compiling = (sample, generation), [], not self._first.add(sample)

    def since(self, at: float, generation: int | None = None) -> tuple[Frame, ...]:
        """Frames that began at or after ``at`` (Unix seconds), oldest first, of one generation or of all.

        Until there is a new frame, the same arguments return the same object.
        """
        wanted = (at, generation)
        if wanted not in self._found:
            self._found[wanted] = tuple(
                frame
                for frame in self._frames
                if frame.start >= at and (generation is None or frame.generation == generation)
            )
        return self._found[wanted]


def _frame(before: Sample, within: list[Sample], generation: int) -> Frame:
    after = within[-1]
    usage = running = most_waiting = least_waiting = None
    times = []
    for sample in within:
        total = combine(sample.engines.values())
        fullest = highest_usage(sample.engines.values())
        usage = highest(usage, fullest)
        running = highest(running, total.requests_running)
        if fullest is not None and total.requests_running:
            times.append((fullest, total.requests_running))
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
        held_max=_held(times, max(1, len(after.engines))),
        waiting_max=most_waiting,
        waiting_min=least_waiting if len(within) >= MIN_SAMPLES else None,
        kv_cache_tokens=after.kv_cache_tokens,
        prefix_caching=after.prefix_caching,
        prefix_step=after.prefix_step,
        responses=responses_between(before, after),
        engines=max(1, len(after.engines)),
        ranks=_ranks(within, grown) if len(after.engines) > 1 and len(within) >= MIN_SAMPLES else (),
        still=tuple(label for label, one in grown.items() if _stands_still(label, one, (before, *within))),
    )


def _held(times: Sequence[tuple[float, float]], engines: int) -> float | None:
    """The largest fraction of an engine's KV cache per running request, from pairs of usage and running requests.

    Only times with at least `BUSY` of the maximum running requests count. The highest usage and the most running
    requests do not coincide: a burst begins with many short sequences and ends with the few that had room to grow.
    """
    least = BUSY * max((running for _, running in times), default=0.0)
    return max((usage * engines / running for usage, running in times if running >= least), default=None)


def _ranks(within: Sequence[Sample], grown: Mapping[str, EngineSample]) -> tuple[RankFrame, ...]:
    found = []
    for label, counted in grown.items():
        seen = [engine for sample in within if (engine := sample.engines.get(label)) is not None]
        gauges = {
            name: [value for one in seen if (value := getattr(one, name)) is not None]
            for name in ("kv_cache_usage", "requests_running", "requests_waiting")
        }
        waiting, idle = gauges["requests_waiting"], None
        if not waiting and counted.generation_tokens_total == 0 and counted.prompt_tokens_total == 0:
            idle = 0.0  # before a rank's first request, vLLM 0.32 reports only its counters, no gauges
        found.append(
            RankFrame(
                label,
                counted.generation_tokens_total,
                max(gauges["kv_cache_usage"], default=None),
                max(gauges["requests_running"], default=idle),
                max(waiting, default=idle),
                min(waiting, default=idle),
            )
        )
    return tuple(found)


def _stands_still(label: str, grown: EngineSample, samples: Sequence[Sample]) -> bool:
    """Whether an engine made no progress. A long prefill yields no token either, but allocates KV cache in each step.

    A finished request is not progress: aborted requests count, and so does the one-token test request.
    """
    if grown.generation_tokens_total is None or (grown.requests_running or 0) < 1:
        return False
    if grown.generation_tokens_total or grown.prompt_tokens_total:
        return False
    engines = [sample.engines.get(label) for sample in samples]
    return all(one is not None and one.kv_cache_usage == grown.kv_cache_usage for one in engines)


def merged(frames: Iterable[Frame], key: str) -> Histogram | None:
    """The merged observations of these frames."""
    return merge_histograms(found for frame in frames if (found := frame.histogram(key)) is not None)


def total(frames: Iterable[Frame], counter: str) -> float | None:
    """The sum of a counter over these frames; None if none reports it."""
    values = [value for frame in frames if (value := getattr(frame.grown, counter)) is not None]
    return sum(values) if values else None

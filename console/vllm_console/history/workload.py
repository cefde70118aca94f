"""A server's observed traffic, as a workload to derive flags from. Pure: no clock, no files, no network.

Lengths are exact if a probe recorded all requests. Otherwise they come from vLLM's histograms of prompt and output
lengths, so they are known to a bucket; within it the quantile is estimated as for latencies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
from msgspec.structs import replace

from vllm_console.history.exact import recorded_lengths
from vllm_console.history.frames import BUSY, STEP_SECONDS, Frame, Frames
from vllm_console.history.probe_records import FinishedRequest
from vllm_console.metrics.quantile import exact_quantile, interpolated
from vllm_console.metrics.sample import LENGTHS, MAX_TOKENS_PARAM, EngineSample, Histogram, Sample
from vllm_console.metrics.window import combine, growths, known_max_tokens, longest_request, merge_histograms
from vllm_console.text import duration, percent
from vllm_launchers.plan.choices.choice import SeenRoom
from vllm_launchers.presets.model import MAX_TOKENS, Workload

HELD = 3
"""Consecutive frames (half a minute) in which that many must run, followed by as many without preemption."""

LARGER = 1.02
"""A KV cache more than this factor larger than the present one does not show how many requests run well now."""


def seen_room(frames: Sequence[Frame], objective: float) -> SeenRoom | None:
    """The capacity of one engine's KV cache, from these frames (oldest first, of one or more generations).

    A request holds usage times the cache's tokens, divided by the number of running requests. ``objective`` is the
    maximum fraction of the cache that should be used. None if no frame has both figures.
    """
    cache = _tokens(frames[-1]) if frames else None
    known = [at for at, one in enumerate(frames) if _comparable(one, frames[-1]) and _running(one) >= 1]
    if not known:
        return None
    busy = BUSY * max(_running(frames[at]) for at in known)
    held = sorted(_held(frames[at], cache) for at in known if _running(frames[at]) >= busy)
    each = held[math.ceil(_Q * len(held)) - 1]
    return SeenRoom(objective, each, _ran(frames, objective), cache) if each > 0 else None


def _ran(frames: Sequence[Frame], objective: float) -> int:
    """Most requests that ran through `HELD` consecutive frames within the objective, without preemption then or soon
    after.

    Excludes runs with requests so short that as many of the longer ones preempted later would exceed the objective.
    """
    most, last = 0.0, frames[-1]
    longest, cache = 0.0, _tokens(last)
    preempted = [bool(one.grown.preemptions_total) for one in frames]
    well = [_well(one, objective, last) for one in frames]
    running = [_running(one) for one in frames]
    generations = [one.generation for one in frames]
    for at in range(len(frames) - HELD, -1, -1):
        row, soon = slice(at, at + HELD), slice(at, at + 2 * HELD)
        if (generations[at], True) in zip(generations[soon], preempted[soon], strict=True):
            longest = max([longest, *(_held(one, cache) for one in frames[row] if _preempted(one, last))])
        elif all(well[row]) and generations[row].count(generations[at]) == HELD:
            ran = min(running[row])
            most = max(most, ran if ran * longest <= objective else 0.0)
    return int(most)


def _preempted(frame: Frame, last: Frame) -> bool:
    return bool(frame.grown.preemptions_total) and _comparable(frame, last) and _running(frame) >= 1


def _well(frame: Frame, objective: float, last: Frame) -> bool:
    cache, now = _tokens(frame), _tokens(last)
    alike = _comparable(frame, last) and (cache is None or now is None or cache <= LARGER * now)
    return alike and (frame.usage_max or 0.0) <= objective and frame.grown.preemptions_total is not None


def _comparable(frame: Frame, last: Frame) -> bool:
    """Whether its fraction of the cache can be expressed in terms of the present cache."""
    known = _tokens(frame) is not None and _tokens(last) is not None
    return frame.held_max is not None and not frame.compiling and (known or frame.generation == last.generation)


def _held(frame: Frame, cache: int | None) -> float:
    """The fraction of the present cache that a request held in this frame."""
    tokens, held = _tokens(frame), frame.held_max or 0.0
    return held * tokens / cache if tokens is not None and cache else held


def _tokens(frame: Frame) -> int | None:
    return frame.kv_cache_tokens // frame.engines if frame.kv_cache_tokens is not None else None


def _running(frame: Frame) -> float:
    return (frame.running_max or 0.0) / frame.engines


SEEN_SECONDS = 3600.0
"""How much history to use: an hour of traffic."""

MOST_FRAMES = int(SEEN_SECONDS / STEP_SECONDS)

LAST_HOUR, PRESENT_RUN = "the last hour", "the current run"
"""Names of the time span that traffic is from."""

FEWEST = 50
"""Minimum number of requests: with fewer, a 95th percentile rests on one or two of them."""

PLENTY = 500
"""Number of requests from which a 95th percentile rests on dozens."""

MOST_CONCURRENCY = 100_000
_Q = 0.95


class StoredSample(Protocol):
    """A stored sample of a server, as returned by the history (`HistoryEntry`)."""

    @property
    def generation(self) -> int:
        """The generation of the server that it belongs to."""

    @property
    def sample(self) -> Sample:
        """The sample itself."""


class SeenWorkload(msgspec.Struct, frozen=True):
    """A server's observed traffic.

    ``workload`` is None if there is too little data, and ``sentence`` then gives the reason; otherwise ``sentence``
    summarizes it and its certainty. ``minutes`` is the observed time. Fields that were not measured keep their previous
    value.
    """

    workload: Workload | None
    requests: int
    minutes: float
    sentence: str
    room: SeenRoom | None = None
    """Observed capacity of its KV cache; None if not requested or unknown."""
    longest: float = math.inf
    """No request had more tokens, prompt plus answer, or is known to have asked for more with ``max_tokens``; infinite
    if that is unknown."""


def seen_workload(
    samples: Iterable[StoredSample],
    previous: Workload,
    *,
    longest: int | None = None,
    objective: float | None = None,
    span: str = LAST_HOUR,
    recorded: Sequence[FinishedRequest] = (),
) -> SeenWorkload:
    """The workload of the traffic between the first sample and the last (oldest first), across restarts.

    ``previous`` fills in what was not measured (prefix reuse while prefix caching is off). ``longest`` is the server's
    ``max-model-len``, which gives vLLM's last, open bucket an end. ``objective`` is the maximum fraction of the KV
    cache that should be used; with it, the cache's capacity is computed too. ``span`` names the time span of the
    samples. ``recorded`` are the requests recorded by a probe in that time, in order of their end.
    """
    traffic, frames = _Traffic(), Frames(keep=MOST_FRAMES)
    for stored in samples:
        traffic.add(stored)
        frames.append(stored.sample, stored.generation)
    minutes = traffic.seconds / 60
    prompts, answers = (merge_histograms(traffic.histograms[key]) for key in LENGTHS)
    if not traffic.samples:
        return SeenWorkload(None, 0, 0.0, "Nothing has been recorded for this server yet.")
    if prompts is None or answers is None:
        return SeenWorkload(None, 0, minutes, "This server does not report prompt and output lengths.")
    requests = int(min(prompts.count, answers.count))
    if requests < FEWEST:
        return SeenWorkload(None, requests, minutes, _too_few(requests, minutes, span))
    known = traffic.recorded(recorded)
    found = _seen(traffic, _lengths(prompts, answers, longest, known), previous, longest, requests, minutes, span)
    max_tokens = merge_histograms(traffic.histograms[MAX_TOKENS_PARAM])
    asked, _ = known_max_tokens(max_tokens, prompts, longest)
    found = replace(found, longest=_longest(prompts, answers, asked, longest, known))
    return replace(found, room=seen_room(frames.since(0.0), objective)) if objective is not None else found


class _Traffic:
    """Counts between samples, and the number of requests in flight."""

    def __init__(self) -> None:
        self.histograms: dict[str, list[Histogram]] = defaultdict(list)
        self.hits = self.queries = 0.0
        self.in_flight: list[float] = []
        self.seconds = 0.0
        self.samples = 0
        self._since: float | None = None
        self._before: StoredSample | None = None

    def add(self, stored: StoredSample) -> None:
        """Add the next sample."""
        before, self._before = self._before, stored
        self.samples += 1
        total = combine(stored.sample.engines.values())
        flying = [n for n in (total.requests_running, total.requests_waiting) if n is not None]
        if flying:
            self.in_flight.append(sum(flying))
        if before is None:
            self._since = stored.sample.at
            return
        self.seconds += max(0.0, stored.sample.at - before.sample.at)
        # A new generation started from zero, whatever its counters show now.
        since = before.sample if before.generation == stored.generation else Sample(before.sample.at, {})
        for grown in growths(since, stored.sample, (*LENGTHS, MAX_TOKENS_PARAM)):
            self._count(grown)

    def _count(self, grown: EngineSample) -> None:
        self.hits += grown.prefix_cache_hits_total or 0.0
        self.queries += grown.prefix_cache_queries_total or 0.0
        for key, histogram in grown.histograms.items():
            if histogram.count > 0 or key not in self.histograms:
                self.histograms[key].append(histogram)

    def recorded(self, requests: Sequence[FinishedRequest]) -> Mapping[str, Sequence[int]]:
        """Lengths from these records, for each kind where the records cover every counted request."""
        if self._since is None or self._before is None:
            return {}
        counted = {key: sum(one.count for one in self.histograms[key]) for key in LENGTHS}
        return recorded_lengths(requests, self._since, self._before.sample.at, counted)

    @property
    def concurrency(self) -> int | None:
        """The 95th percentile of requests in flight while there were any."""
        busy = sorted(number for number in self.in_flight if number > 0)
        return math.ceil(busy[math.ceil(_Q * len(busy)) - 1]) if busy else None


def _seen(
    traffic: _Traffic,
    lengths: tuple[_Length, _Length],
    previous: Workload,
    longest: int | None,
    requests: int,
    minutes: float,
    span: str,
) -> SeenWorkload:
    given, made = (min(length.tokens, MAX_TOKENS) for length in lengths)
    if longest is not None and given + made > longest > made:
        given = longest - made  # no request was longer than both together
    reuse = min(1.0, traffic.hits / traffic.queries) if traffic.queries > 0 else None
    flying = traffic.concurrency
    workload = Workload(
        input_tokens_p95=given,
        output_tokens_p95=made,
        prefix_reuse=round(reuse, 3) if reuse is not None else previous.prefix_reuse,
        concurrency=min(flying, MOST_CONCURRENCY) if flying is not None else previous.concurrency,
    )
    parts = [
        f"p95 prompt {lengths[0].words(given)}",
        f"p95 output {lengths[1].words(made)}{_buckets(*lengths)}",
        f"{percent(reuse)} of prompt tokens reused" if reuse is not None else "prefix reuse not measured",
        f"{flying:,} in flight (p95)" if flying is not None else "concurrency not measured",
    ]
    rough = "" if requests >= PLENTY else "; rough estimate from few requests"
    sentence = f"{requests:,} requests ended in {_recorded(minutes, span)}: {', '.join(parts)}{rough}."
    return SeenWorkload(workload, requests, minutes, sentence)


def _lengths(
    prompts: Histogram, answers: Histogram, longest: int | None, recorded: Mapping[str, Sequence[int]]
) -> tuple[_Length, _Length]:
    one, other = (
        _Length.exactly(recorded[key]) if key in recorded else _Length.of(histogram, longest)
        for key, histogram in zip(LENGTHS, (prompts, answers), strict=True)
    )
    return one, other


def _longest(
    prompts: Histogram,
    answers: Histogram,
    max_tokens: float,
    limit: int | None,
    recorded: Mapping[str, Sequence[int]],
) -> float:
    """The longest request if all are recorded, else an upper bound; vLLM accepts none above ``limit``.

    ``max_tokens`` is the longest answer that a request is known to allow, which no record shows.
    """
    longest = longest_request(prompts, answers, max_tokens)
    if all(key in recorded for key in LENGTHS):
        given, made = (recorded[key] for key in LENGTHS)
        longest = max(max(given) + max_tokens, max(map(sum, zip(given, made, strict=True))))
    return min(longest, limit if limit is not None else math.inf)


def _buckets(*lengths: _Length) -> str:
    if all(length.exact for length in lengths):
        return ", exact"
    return f" (histogram buckets {', '.join(length.bucket for length in lengths)})"


class _Length(msgspec.Struct, frozen=True):
    """A 95th percentile and its bucket. ``open`` means that the bucket has no known upper end."""

    tokens: int
    low: int
    high: int | None
    exact: bool = False

    @property
    def open(self) -> bool:
        return self.high is None

    @classmethod
    def of(cls, histogram: Histogram, longest: int | None) -> _Length:
        bounds, counts = histogram.bounds, histogram.counts
        if longest is not None and (len(bounds) < 2 or longest > bounds[-2]):
            bounds, counts = (*bounds[:-1], float(longest), math.inf), (*counts, counts[-1])
        found = interpolated(_Q, bounds, counts, histogram.sum)
        if found is None:
            return cls(1, 0, None)
        return cls(max(1, math.ceil(found.guess)), int(found.low), None if found.high is None else int(found.high))

    @classmethod
    def exactly(cls, lengths: Sequence[int]) -> _Length:
        found = max(1, math.ceil(exact_quantile(lengths, _Q)))
        return cls(found, found, found, exact=True)

    def words(self, tokens: int) -> str:
        """Describe the length; ``tokens`` is the estimate limited to what a request can have."""
        return f"{self.tokens:,} tokens" if self.exact else f"{'over ' if self.open else '~'}{tokens:,} tokens"

    @property
    def bucket(self) -> str:
        return f"above {self.low:,}" if self.high is None else f"{self.low:,} to {self.high:,}"


def _too_few(requests: int, minutes: float, span: str) -> str:
    ended = {0: "No request ended", 1: "1 request ended"}.get(requests, f"{requests:,} requests ended")
    return f"{ended} in {_recorded(minutes, span)}: needs at least {FEWEST}."


def _recorded(minutes: float, span: str) -> str:
    return f"{span} ({duration(minutes * 60)} of it recorded)"

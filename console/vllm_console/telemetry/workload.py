"""The traffic that a server has seen, as a workload that flags can follow. Pure: no clock, no files, no network.

Lengths come from vLLM's histograms of prompts and answers, so they are known to a bucket; between its bounds the
quantile is estimated as for latencies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from vllm_console.telemetry.model import LENGTHS, EngineSample, Histogram, Sample
from vllm_console.telemetry.window import combine, growths, merge, quantile
from vllm_launchers.presets.model import MAX_TOKENS, Workload

WINDOW_SECONDS = 3600.0
"""How much history is worth asking for: an hour of traffic."""

FEWEST = 50
"""Requests below which a 95th percentile would rest on one or two of them."""

PLENTY = 500
"""Requests from which on a 95th percentile rests on dozens."""

MOST_CONCURRENCY = 100_000
_Q = 0.95


class Look(Protocol):
    """A stored look at a server, as the history gives it (`Entry`)."""

    @property
    def generation(self) -> int:
        """Which start of the server it belongs to."""

    @property
    def sample(self) -> Sample:
        """What was seen."""


@dataclass(frozen=True, slots=True)
class SeenWorkload:
    """What was seen of a server's traffic.

    ``workload`` is None where there is too little to go by, and ``sentence`` then says why; else ``sentence`` says what
    was seen and how sure it is. ``at_least`` names fields that may be larger than told, ``kept`` those that were not
    measured and are as before. ``minutes`` is how long was looked at.
    """

    workload: Workload | None
    requests: int
    minutes: float
    sentence: str
    at_least: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()


def seen_workload(looks: Iterable[Look], previous: Workload, *, longest: int | None = None) -> SeenWorkload:
    """The workload of the traffic between the first look and the last (oldest first), over restarts.

    ``previous`` fills in what was not measured (the reuse of prefixes while prefix caching is off). ``longest`` is the
    server's ``max-model-len``: vLLM's last bucket is open, and with it that bucket's end is known.
    """
    traffic = _Traffic()
    for look in looks:
        traffic.add(look)
    minutes = traffic.seconds / 60
    lengths = {key: merge(traffic.histograms[key]) for key in LENGTHS}
    prompts, answers = lengths["prompt_tokens"], lengths["generation_tokens"]
    if not traffic.looks:
        return SeenWorkload(None, 0, 0.0, "Nothing was recorded of this server yet.")
    if prompts is None or answers is None:
        return SeenWorkload(None, 0, minutes, "This server does not report how long its prompts and answers are.")
    requests = int(min(prompts.count, answers.count))
    if requests < FEWEST:
        return SeenWorkload(None, requests, minutes, _too_few(requests, minutes))
    return _seen(traffic, prompts, answers, previous, longest, requests, minutes)


class _Traffic:
    """What was counted from look to look, and how many requests were in flight."""

    def __init__(self) -> None:
        self.histograms: dict[str, list[Histogram]] = defaultdict(list)
        self.hits = self.queries = 0.0
        self.in_flight: list[float] = []
        self.seconds = 0.0
        self.looks = 0
        self._before: Look | None = None

    def add(self, look: Look) -> None:
        """Take in the next look."""
        before, self._before = self._before, look
        self.looks += 1
        total = combine(look.sample.engines.values())
        flying = [n for n in (total.requests_running, total.requests_waiting) if n is not None]
        if flying:
            self.in_flight.append(sum(flying))
        if before is None:
            return
        self.seconds += max(0.0, look.sample.at - before.sample.at)
        # A new generation began at zero, whatever its counters have reached since.
        since = before.sample if before.generation == look.generation else Sample(before.sample.at, {})
        for grown in growths(since, look.sample, LENGTHS):
            self._count(grown)

    def _count(self, grown: EngineSample) -> None:
        self.hits += grown.prefix_cache_hits_total or 0.0
        self.queries += grown.prefix_cache_queries_total or 0.0
        for key, histogram in grown.histograms.items():
            if histogram.count > 0 or key not in self.histograms:
                self.histograms[key].append(histogram)

    @property
    def concurrency(self) -> int | None:
        """The 95th percentile of requests in flight while there were any."""
        busy = sorted(number for number in self.in_flight if number > 0)
        return math.ceil(busy[math.ceil(_Q * len(busy)) - 1]) if busy else None


def _seen(
    traffic: _Traffic,
    prompts: Histogram,
    answers: Histogram,
    previous: Workload,
    longest: int | None,
    requests: int,
    minutes: float,
) -> SeenWorkload:
    told = _Length.of(prompts, longest), _Length.of(answers, longest)
    given, made = (min(length.tokens, MAX_TOKENS) for length in told)
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
    names = ("input_tokens_p95", "output_tokens_p95")
    at_least = tuple(name for name, length in zip(names, told, strict=True) if length.open)
    kept = (*(("prefix_reuse",) if reuse is None else ()), *(("concurrency",) if flying is None else ()))
    parts = [
        f"prompts {told[0].words(given)} and answers {told[1].words(made)} at p95",
        f"{reuse:.0%} of prompt tokens reused" if reuse is not None else "reuse of prompts not measured",
        f"{flying:,} in flight" if flying is not None else "requests in flight not measured",
    ]
    rough = "" if requests >= PLENTY else "; few enough to be rough"
    sentence = f"{requests:,} requests in {_minutes(minutes)}: {', '.join(parts)}{rough}."
    return SeenWorkload(workload, requests, minutes, sentence, at_least, kept)


@dataclass(frozen=True, slots=True)
class _Length:
    """A 95th percentile and the bucket it lies in. ``open`` is whether that bucket has no known end."""

    tokens: int
    low: int
    high: int | None

    @property
    def open(self) -> bool:
        return self.high is None

    @classmethod
    def of(cls, histogram: Histogram, longest: int | None) -> _Length:
        bounds, counts = histogram.bounds, histogram.counts
        if longest is not None and (len(bounds) < 2 or longest > bounds[-2]):
            bounds, counts = (*bounds[:-1], float(longest), math.inf), (*counts, counts[-1])
        rank = _Q * counts[-1]
        index = next(index for index, count in enumerate(counts) if count >= rank)
        value = quantile(_Q, bounds, counts)
        tokens = max(1, math.ceil(value)) if value is not None else 1
        low = int(bounds[index - 1]) if index else 0
        return cls(tokens, low, None if math.isinf(bounds[index]) else int(bounds[index]))

    def words(self, tokens: int) -> str:
        if self.high is None:
            return f"of at least {tokens:,} tokens"
        return f"of {tokens:,} tokens ({self.low:,} to {self.high:,})"


def _too_few(requests: int, minutes: float) -> str:
    ended = {0: "No request ended", 1: "1 request ended"}.get(requests, f"{requests:,} requests ended")
    return f"{ended} in {_minutes(minutes)}: at least {FEWEST} are needed to go by."


def _minutes(minutes: float) -> str:
    if minutes < 1.5:
        return f"{minutes * 60:.0f} seconds"
    return f"{minutes:.0f} minutes"

"""A run's windows, each summarized in about thirty figures, so that runs can be compared. Pure.

Times come from the samples. Sums of histograms are exact; quantiles are known to within one of vLLM's buckets, whose
ends are stored with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from vllm_console.history import energy
from vllm_console.metrics.quantile import PARTS, Quantile, Quantiles, agreeing, exact_quantile, interpolated
from vllm_console.metrics.sample import LENGTHS, EngineSample, Histogram, Sample
from vllm_console.metrics.window import (
    FirstRequests,
    combine,
    growths,
    highest_usage,
    per_second,
    preemptions_per_request,
    quantiles,
    share,
)

WINDOW_SECONDS = 60.0

RUN_LATENCIES = ("ttft", "itl", "e2e")
_LENGTHS = tuple(zip(LENGTHS, ("prompt_length", "answer_length"), strict=True))
FIGURES = (
    "requests",
    "requests_per_second",
    "in_flight",
    "running",
    "waiting",
    "prompt_length_mean",
    "prompt_length_p95",
    "answer_length_mean",
    "answer_length_p95",
    "prompt_tokens_per_second",
    "generation_tokens_per_second",
    "preemptions_per_minute",
    "preemption_share",
    "kv_cache_usage",
    "kv_cache_usage_max",
    "hit_rate",
    *(f"{key}_{part}" for key in RUN_LATENCIES for part in ("mean", "p50", "p90", "p99")),
    *(f"{key}_{part}_{end}" for key in RUN_LATENCIES for part, _ in PARTS for end in ("above", "below", "exact")),
    "prompt_length_p95_above",
    "answer_length_p95_above",
    "prompt_length_p95_exact",
    "answer_length_p95_exact",
    *energy.FIGURES,
)
"""A window's figures. ``requests`` is how many ended; ``requests_per_second`` how many arrived (ended, plus the
increase in flight). ``in_flight``, ``running``, ``waiting`` and ``kv_cache_usage`` (of the fullest engine, from 0 to 1)
are means over the samples. ``preemption_share`` is preemptions per request that ended, or that ran at the window's end
if those are more. Lengths are in tokens (a p95 above vLLM's last bound is only ``prompt_length_p95_above``), latencies
in seconds. ``ttft_p99_above`` and ``ttft_p99_below`` are the ends of the bucket of the TTFT's 99th percentile; in a
bucket with only one end there is no ``ttft_p99``. ``ttft_p99_exact`` is the exact value, if a probe recorded every
request. Likewise for the other latencies and lengths. Joules are those of the server's GPUs, if these report energy and
serve nobody else."""


class RunWindow(msgspec.Struct, frozen=True):
    """One window: when it began (Unix seconds), its length, and its `FIGURES`, without unreported ones."""

    at: float
    seconds: float
    figures: Mapping[str, float]
    counted: Mapping[str, float] = msgspec.field(default_factory=dict)
    """The number of observations of each latency and length; not stored."""

    @property
    def end(self) -> float:
        """When it ended."""
        return self.at + self.seconds

    def quantile(self, key: str) -> Quantile | None:
        """A quantile of a latency (``ttft_p99``) with its bucket; None if nothing was measured."""
        return quantile_in(self.figures, key)


def quantile_in(figures: Mapping[str, float], key: str) -> Quantile | None:
    """A quantile among `FIGURES`, or among medians of them, with its bucket.

    Windows recorded by a version that stored no buckets have only values.
    """
    value, low, high = figures.get(key), figures.get(f"{key}_above"), figures.get(f"{key}_below")
    if value is not None and high is None:
        return Quantile(value, value, value)
    if low is None and high is None:
        return None
    guess = value if value is not None else high if high is not None else low
    return Quantile(guess or 0.0, low or 0.0, high)


def kept(key: str, found: Quantile | None) -> dict[str, float | None]:
    """A quantile in stored form."""
    if found is None:
        return {}
    return {key: found.value, f"{key}_above": found.above, f"{key}_below": found.below}


class Windows:
    """Builds windows from samples as they arrive. Windows without requests are left out."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._seconds = seconds
        self._base: Sample | None = None
        self._within: list[_ServerGauges] = []
        self._first = FirstRequests()

    def append(self, sample: Sample) -> RunWindow | None:
        """Add the next sample; return the window that ends with it, if one does.

        After a gap, or if the clock was set back, it starts over. The run's first requests are excluded because they
        trigger kernel compilation.
        """
        base = self._base
        first = not self._first.over
        self._first.add(sample)
        if base is None or (first and self._first.compiled) or not 0 < sample.at - base.at <= 1.5 * self._seconds:
            self._base, self._within = sample, []
            return None
        self._within.append(_ServerGauges.of(sample))
        # Samples never arrive exactly on time.
        if sample.at - base.at < self._seconds - min(0.5, self._seconds / 10):
            return None
        found = _window(base, sample, self._within)
        self._base, self._within = sample, []
        return found


class _ServerGauges(msgspec.Struct, frozen=True):
    """The gauges of one sample, over all engines."""

    running: float | None
    waiting: float | None
    usage: float | None

    @classmethod
    def of(cls, sample: Sample) -> _ServerGauges:
        engines = sample.engines.values()
        total = combine(engines)
        return cls(total.requests_running, total.requests_waiting, highest_usage(engines))

    @property
    def in_flight(self) -> float | None:
        """Requests running or waiting."""
        return None if self.running is None else self.running + (self.waiting or 0.0)


def _window(before: Sample, after: Sample, gauges: list[_ServerGauges]) -> RunWindow | None:
    grown = combine(growths(before, after, (*RUN_LATENCIES, *LENGTHS)))
    seconds = after.at - before.at
    ended = grown.requests_finished_total
    flying = _mean([one.in_flight for one in gauges])
    if not (ended or flying or grown.generation_tokens_total or grown.prompt_tokens_total):
        return None
    came = _came(ended, _ServerGauges.of(before).in_flight, gauges[-1].in_flight)
    usages = [one.usage for one in gauges]
    figures: dict[str, float | None] = {
        "requests": ended,
        "requests_per_second": per_second(came, seconds),
        "in_flight": flying,
        "running": _mean([one.running for one in gauges]),
        "waiting": _mean([one.waiting for one in gauges]),
        "prompt_tokens_per_second": per_second(grown.prompt_tokens_total, seconds),
        "generation_tokens_per_second": per_second(grown.generation_tokens_total, seconds),
        "preemptions_per_minute": per_second(grown.preemptions_total, seconds / 60),
        "preemption_share": preemptions_per_request(grown.preemptions_total, ended, gauges[-1].running),
        "kv_cache_usage": _mean(usages),
        "kv_cache_usage_max": max((usage for usage in usages if usage is not None), default=None),
        "hit_rate": share(grown.prefix_cache_hits_total, grown.prefix_cache_queries_total),
        **_distributions(grown),
    }
    known = {name: value for name, value in figures.items() if value is not None}
    counted = {key: histogram.count for key, histogram in grown.histograms.items()}
    return RunWindow(before.at, seconds, known, counted)


def with_exact(found: RunWindow, latencies: Mapping[str, Quantiles], lengths: Mapping[str, Sequence[int]]) -> RunWindow:
    """The window with the exact quantiles of its latencies, and of lengths (tokens) that are all known."""
    exact = {
        f"{key}_{name}_exact": one.guess
        for key, latency in latencies.items()
        for name, _ in PARTS
        if (one := getattr(latency, name)) is not None
    }
    exact |= {f"{name}_p95_exact": exact_quantile(lengths[key], 0.95) for key, name in _LENGTHS if key in lengths}
    return with_figures(found, exact)


def with_figures(found: RunWindow, more: Mapping[str, float]) -> RunWindow:
    """The window with more figures."""
    return msgspec.structs.replace(found, figures={**found.figures, **more})


def by_exact(windows: Sequence[RunWindow], keys: Collection[str]) -> list[RunWindow]:
    """The windows with exact values, where known, in place of the estimates of these quantiles."""
    return [
        msgspec.structs.replace(
            window,
            figures={
                **window.figures,
                **{
                    name: window.figures[f"{key}_exact"]
                    for key in keys
                    if f"{key}_exact" in window.figures
                    for name in (key, f"{key}_above", f"{key}_below")
                },
            },
        )
        for window in windows
    ]


def adjoin(one: RunWindow, other: RunWindow) -> bool:
    """Whether there was no pause between two consecutive windows; a window without requests is not recorded."""
    return other.at - one.end <= one.seconds / 2


def filled(windows: Sequence[RunWindow]) -> Sequence[RunWindow]:
    """The windows with traffic before and after them; all if there is none.

    In the others, traffic may have begun or ended, so that a rate would depend on when it did.
    """
    inner = [
        window
        for before, window, after in zip(windows, windows[1:], windows[2:], strict=False)
        if adjoin(before, window) and adjoin(window, after)
    ]
    return inner or windows


def exact_keys(windows: Sequence[RunWindow], keys: Collection[str]) -> frozenset[str]:
    """The quantiles that are exact in each window that has them, and in at least one."""
    return frozenset(
        key
        for key in keys
        if all(f"{key}_exact" in window.figures for window in windows if window.quantile(key) is not None)
        and any(f"{key}_exact" in window.figures for window in windows)
    )


def _distributions(grown: EngineSample) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for key, name in _LENGTHS:
        if (histogram := _filled(grown, key)) is not None:
            found[f"{name}_mean"] = histogram.sum / histogram.count
            p95 = interpolated(0.95, histogram.bounds, histogram.counts, histogram.sum)
            if p95 is not None:
                found[f"{name}_p95" if p95.high is not None else f"{name}_p95_above"] = p95.guess
    seen = {key: quantiles(histogram) for key in RUN_LATENCIES if (histogram := _filled(grown, key)) is not None}
    for key, latency in agreeing(seen).items():
        found[f"{key}_mean"] = latency.mean
        for name, _ in PARTS:
            found |= kept(f"{key}_{name}", getattr(latency, name))
    return found


def _filled(grown: EngineSample, key: str) -> Histogram | None:
    histogram = grown.histograms.get(key)
    return histogram if histogram is not None and histogram.count > 0 else None


def _came(ended: float | None, before: float | None, after: float | None) -> float | None:
    """Requests that arrived: those that ended, plus the increase in flight."""
    if ended is None:
        return None
    return ended if before is None or after is None else max(0.0, ended + after - before)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

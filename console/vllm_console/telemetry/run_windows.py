"""A run's minutes: each one summed up in some thirty figures, so that runs can be set beside each other. Pure.

Time is what the samples say. Sums of histograms are exact; quantiles are known to a bucket of vLLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_console.telemetry.model import LENGTHS, EngineSample, Histogram, Sample
from vllm_console.telemetry.window import combine, growths, quantile

WINDOW_SECONDS = 60.0

_LATENCIES = ("ttft", "itl", "e2e")
_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))

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
    *(f"{latency}_{part}" for latency in _LATENCIES for part in ("mean", "p50", "p90", "p99")),
)
"""What a window tells. ``requests`` is how many ended; ``requests_per_second`` how many came (ended, and in flight at
its end but not at its beginning); ``in_flight``, ``running``, ``waiting`` and ``kv_cache_usage`` (the fullest engine's,
a share from 0 to 1) are means over the looks; ``preemption_share`` is preemptions per request ended; lengths are in
tokens; latencies in seconds."""


@dataclass(frozen=True, slots=True)
class RunWindow:
    """One window: when it began (Unix seconds), its length, and its `FIGURES`, without those that were not reported."""

    at: float
    seconds: float
    figures: Mapping[str, float]

    @property
    def end(self) -> float:
        """When it ended."""
        return self.at + self.seconds


class Windows:
    """Makes windows of samples as they come. Windows in which nothing was asked and nothing answered are left out."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._seconds = seconds
        self._base: Sample | None = None
        self._within: list[_Look] = []

    def append(self, sample: Sample) -> RunWindow | None:
        """Take in the next look; the window that ends with it, if one does.

        After a gap, or when the clock was set back, it begins anew.
        """
        base = self._base
        if base is None or not 0 < sample.at - base.at <= 1.5 * self._seconds:
            self._base, self._within = sample, []
            return None
        self._within.append(_Look.of(sample))
        # Looks never come exactly on time.
        if sample.at - base.at < self._seconds - min(0.5, self._seconds / 10):
            return None
        found = _window(base, sample, self._within)
        self._base, self._within = sample, []
        return found


@dataclass(frozen=True, slots=True)
class _Look:
    """The gauges of one look, over all engines."""

    running: float | None
    waiting: float | None
    usage: float | None

    @classmethod
    def of(cls, sample: Sample) -> _Look:
        engines = sample.engines.values()
        usages = [engine.kv_cache_usage for engine in engines if engine.kv_cache_usage is not None]
        total = combine(engines)
        return cls(total.requests_running, total.requests_waiting, max(usages, default=None))

    @property
    def in_flight(self) -> float | None:
        """Requests that are being served or wait."""
        return None if self.running is None else self.running + (self.waiting or 0.0)


def _window(before: Sample, after: Sample, looks: list[_Look]) -> RunWindow | None:
    grown = combine(growths(before, after, (*_LATENCIES, *LENGTHS)))
    seconds = after.at - before.at
    ended = grown.requests_finished_total
    flying = _mean([look.in_flight for look in looks])
    if not (ended or flying or grown.generation_tokens_total or grown.prompt_tokens_total):
        return None
    came = _came(ended, _Look.of(before).in_flight, looks[-1].in_flight)
    usages = [look.usage for look in looks]
    figures: dict[str, float | None] = {
        "requests": ended,
        "requests_per_second": _rate(came, seconds),
        "in_flight": flying,
        "running": _mean([look.running for look in looks]),
        "waiting": _mean([look.waiting for look in looks]),
        "prompt_tokens_per_second": _rate(grown.prompt_tokens_total, seconds),
        "generation_tokens_per_second": _rate(grown.generation_tokens_total, seconds),
        "preemptions_per_minute": _rate(grown.preemptions_total, seconds / 60),
        "preemption_share": grown.preemptions_total / ended if grown.preemptions_total is not None and ended else None,
        "kv_cache_usage": _mean(usages),
        "kv_cache_usage_max": max((usage for usage in usages if usage is not None), default=None),
        "hit_rate": _share(grown.prefix_cache_hits_total, grown.prefix_cache_queries_total),
        **_distributions(grown),
    }
    return RunWindow(before.at, seconds, {name: value for name, value in figures.items() if value is not None})


def _distributions(grown: EngineSample) -> dict[str, float | None]:
    """Means and quantiles of lengths and latencies."""
    found: dict[str, float | None] = {}
    for key, name in zip(LENGTHS, ("prompt_length", "answer_length"), strict=True):
        if (histogram := _filled(grown, key)) is not None:
            found[f"{name}_mean"] = histogram.sum / histogram.count
            found[f"{name}_p95"] = quantile(0.95, histogram.bounds, histogram.counts)
    for key in _LATENCIES:
        if (histogram := _filled(grown, key)) is not None:
            found[f"{key}_mean"] = histogram.sum / histogram.count
            for name, q in _QUANTILES:
                found[f"{key}_{name}"] = quantile(q, histogram.bounds, histogram.counts)
    return found


def _filled(grown: EngineSample, key: str) -> Histogram | None:
    histogram = grown.histograms.get(key)
    return histogram if histogram is not None and histogram.count > 0 else None


def _came(ended: float | None, before: float | None, after: float | None) -> float | None:
    """Requests that came: those that ended, and what more of them is in flight than was before."""
    if ended is None:
        return None
    return ended if before is None or after is None else max(0.0, ended + after - before)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _rate(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount is not None and seconds > 0 else None


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None

"""What happened between two looks at a server: rates, shares and quantiles, over restarts and several engines.

Pure: no clock, no files, no network. Counters only ever grow while an engine lives, so one that fell says that the
engine began anew, and everything it counts now happened since.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_console.telemetry.model import (
    COUNTERS,
    GAUGES,
    LATENCIES,
    EngineSample,
    Histogram,
    Quantiles,
    Sample,
    Window,
)


def quantile(q: float, bounds: tuple[float, ...], counts: tuple[float, ...]) -> float | None:
    """Estimate a quantile from cumulative bucket counts as PromQL's ``histogram_quantile`` does.

    Linear within a bucket; the first bucket begins at 0; in the +Inf bucket the answer is the last finite bound.
    None when there is no observation, or nothing but the +Inf bucket.
    """
    if len(bounds) < 2 or not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    index = next((i for i, count in enumerate(counts) if count >= rank), len(counts) - 1)
    if index == len(bounds) - 1:
        return bounds[-2]
    upper = bounds[index]
    if index == 0:
        lower, below = 0.0, 0.0
        if upper <= 0:
            return upper
    else:
        lower, below = bounds[index - 1], counts[index - 1]
    inside = counts[index] - below
    return lower + (upper - lower) * (rank - below) / inside if inside > 0 else upper


def quantiles(histogram: Histogram) -> Quantiles:
    """Count, mean and p50, p90, p99 of a histogram, in its own unit."""
    count = histogram.count
    if count <= 0:
        return Quantiles(count=0.0, mean=None, p50=None, p90=None, p99=None)
    p50, p90, p99 = (quantile(q, histogram.bounds, histogram.counts) for q in (0.5, 0.9, 0.99))
    return Quantiles(count=count, mean=histogram.sum / count, p50=p50, p90=p90, p99=p99)


def merge(histograms: Iterable[Histogram]) -> Histogram | None:
    """Add histograms; None for none. Where bounds differ, the ones they share are kept: there counts are exact."""
    merged: Histogram | None = None
    for histogram in histograms:
        if merged is None:
            merged = histogram
            continue
        if merged.bounds != histogram.bounds:
            shared = set(merged.bounds) & set(histogram.bounds)
            merged, histogram = _only(merged, shared), _only(histogram, shared)
        counts = tuple(map(operator.add, merged.counts, histogram.counts))
        merged = Histogram(merged.bounds, counts, merged.sum + histogram.sum)
    return merged


def _only(histogram: Histogram, bounds: set[float]) -> Histogram:
    kept = [pair for pair in zip(histogram.bounds, histogram.counts, strict=True) if pair[0] in bounds]
    return Histogram(tuple(bound for bound, _ in kept), tuple(count for _, count in kept), histogram.sum)


def restarted(before: EngineSample, after: EngineSample) -> bool:
    """Whether the engine began anew between two looks: some counter or histogram fell."""
    for name in COUNTERS:
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None and new < old:
            return True
    for key, histogram in after.histograms.items():
        old_histogram = before.histograms.get(key)
        if old_histogram is not None and histogram.count < old_histogram.count:
            return True
    return False


def growth(before: EngineSample | None, after: EngineSample, keys: Iterable[str] = LATENCIES) -> EngineSample:
    """What an engine counted between two looks, with the gauges of the later one; histograms only of ``keys``.

    An engine that was not there before, or that began anew, counted everything it shows now.
    """
    before_counters = None if before is None or restarted(before, after) else before
    fields: dict[str, Any] = {name: getattr(after, name) for name in GAUGES}
    for name in COUNTERS:
        value = getattr(after, name)
        if value is not None and before_counters is not None:
            value -= getattr(before_counters, name) or 0.0
        fields[name] = value
    histograms: dict[str, Histogram] = {}
    for key in keys:
        histogram = after.histograms.get(key)
        if histogram is not None:
            old = before_counters.histograms.get(key) if before_counters is not None else None
            histograms[key] = _histogram_growth(old, histogram)
    return EngineSample(**fields, histograms=histograms)


def _histogram_growth(before: Histogram | None, after: Histogram) -> Histogram:
    if before is None or before.bounds != after.bounds:
        return after
    if before is after:
        return Histogram(after.bounds, (0.0,) * len(after.counts), 0.0)
    counts = tuple(map(operator.sub, after.counts, before.counts))
    return Histogram(after.bounds, counts, after.sum - before.sum)


def combine(engines: Iterable[EngineSample]) -> EngineSample:
    """Several engines as one: counters, running and waiting added, histograms merged, KV usage averaged.

    What no engine reports stays None; an engine that does not report a field is left out of it.
    """
    parts = list(engines)
    if len(parts) == 1:
        return parts[0]
    fields: dict[str, Any] = {}
    for name in (*GAUGES, *COUNTERS):
        values = [value for part in parts if (value := getattr(part, name)) is not None]
        if values:
            total = math.fsum(values)
            fields[name] = total / len(values) if name == "kv_cache_usage" else total
    keys = dict.fromkeys(key for part in parts for key in part.histograms)
    merged = {key: merge(part.histograms[key] for part in parts if key in part.histograms) for key in keys}
    histograms = {key: histogram for key, histogram in merged.items() if histogram is not None}
    return EngineSample(**fields, histograms=histograms)


def growths(before: Sample, after: Sample, keys: Iterable[str] = LATENCIES) -> list[EngineSample]:
    """`growth` of every engine that is in the later sample; one that is gone counts no more."""
    keys = tuple(keys)
    return [growth(before.engines.get(label), engine, keys) for label, engine in after.engines.items()]


def window(before: Sample, after: Sample) -> Window:
    """What happened from one look to the next. Rates are None when no time passed between them."""
    seconds = after.at - before.at
    parts = growths(before, after)
    total = combine(parts)
    usages = [part.kv_cache_usage for part in parts if part.kv_cache_usage is not None]
    finished, preempted = total.requests_finished_total, total.preemptions_total
    preemptions_per_second = _rate(preempted, seconds)
    return Window(
        start=min(before.at, after.at),
        end=after.at,
        requests_running=total.requests_running,
        requests_waiting=total.requests_waiting,
        kv_cache_usage=total.kv_cache_usage,
        kv_cache_usage_max=max(usages, default=None),
        kv_cache_tokens=after.kv_cache_tokens,
        preemptions_per_minute=None if preemptions_per_second is None else preemptions_per_second * 60,
        preemption_share=_share(preempted, finished),
        prefix_hit_rate=_share(total.prefix_cache_hits_total, total.prefix_cache_queries_total),
        prompt_tokens_per_second=_rate(total.prompt_tokens_total, seconds),
        generation_tokens_per_second=_rate(total.generation_tokens_total, seconds),
        requests_per_second=_rate(finished, seconds),
        latencies={key: quantiles(histogram) for key, histogram in total.histograms.items() if key in LATENCIES},
    )


def highest(one: float | None, other: float | None) -> float | None:
    """The greater of two figures; one that was not reported does not count."""
    return other if one is None else one if other is None else max(one, other)


def _rate(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount is not None and seconds > 0 else None


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def in_order(engines: Mapping[str, EngineSample]) -> dict[str, EngineSample]:
    """Engines by label, in the order of their numbers (``"2"`` before ``"10"``)."""
    return dict(sorted(engines.items(), key=lambda item: (len(item[0]), item[0])))

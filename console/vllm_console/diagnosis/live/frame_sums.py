"""Running sums over the last frames up to each frame, for a minute's rates, shares and quantiles. Pure."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from vllm_console.history.frames import Frame
from vllm_console.metrics.quantile import Quantile, quantile
from vllm_console.metrics.sample import Histogram

MINUTE = 6
"""Frames of ten seconds in a minute."""

SUSTAINED_STEPS = 3
"""KV cache usage counts if it holds for this many steps of ten seconds (frames), so that a peak does not count."""

SLOW_SHARE = 0.01
"""A p99 is above its objective if more than this fraction of the observations is."""

SURE = 2.0
"""Standard deviations above that fraction from which it is not chance: one in forty."""

FEWEST_SLOW = 3


def totals(frames: Sequence[Frame], counter: str, count: int = MINUTE) -> list[float | None]:
    """Per frame, the count over the ``count`` frames up to it; None if that frame does not report it."""
    sums = [0.0]
    reported = []
    for frame in frames:
        value: float | None = getattr(frame.grown, counter)
        reported.append(value is not None)
        sums.append(sums[-1] + (value or 0.0))
    return [sums[at + 1] - sums[max(0, at + 1 - count)] if known else None for at, known in enumerate(reported)]


def sustained_usage(frames: Sequence[Frame], at: int) -> float | None:
    """The highest KV cache usage (a fraction) reached in three consecutive frames within the minute up to ``at``.

    Peaks do not count; `check` uses the same measure. None if usage is not reported.
    """
    known = [one.usage_max for one in frames[max(0, at + 1 - MINUTE) : at + 1] if one.usage_max is not None]
    rows = [known[begin : begin + SUSTAINED_STEPS] for begin in range(max(1, len(known) - SUSTAINED_STEPS + 1))]
    return max(map(min, rows)) if known else None


def observed(frames: Sequence[Frame], key: str, count: int = MINUTE) -> list[Histogram | None]:
    """Per frame, the histogram over the ``count`` frames up to it; None if that frame does not report it."""
    bounds: tuple[float, ...] = next((found.bounds for one in frames if (found := one.histogram(key))), ())
    so_far = Histogram(bounds, (0.0,) * len(bounds), 0.0)
    sums = [so_far]
    minutes: list[Histogram | None] = []
    for at, frame in enumerate(frames):
        new = frame.grown.histograms.get(key)
        if new is None or new.bounds != bounds:
            sums.append(so_far)
            minutes.append(None)
            continue
        if new.count:
            so_far = Histogram(bounds, tuple(map(operator.add, so_far.counts, new.counts)), so_far.sum + new.sum)
        sums.append(so_far)
        before = sums[max(0, at + 1 - count)]
        if before.count:
            counts = tuple(map(operator.sub, so_far.counts, before.counts))
            minutes.append(Histogram(bounds, counts, so_far.sum - before.sum))
        else:
            minutes.append(so_far)
    return minutes


def p99(histogram: Histogram | None) -> Quantile | None:
    """The 99th percentile with its bucket, or None without observations."""
    return quantile(0.99, histogram.bounds, histogram.counts) if histogram is not None else None


def p50(histogram: Histogram | None) -> Quantile | None:
    """The median with its bucket, or None without observations."""
    return quantile(0.5, histogram.bounds, histogram.counts) if histogram is not None else None


def mean(histogram: Histogram | None) -> float | None:
    """The exact mean, or None without observations."""
    return histogram.sum / histogram.count if histogram is not None and histogram.count > 0 else None


def count_above(histogram: Histogram, limit: float) -> float:
    """Number of observations above ``limit``, interpolated linearly within its bucket.

    In the first and in the open bucket this is unknown: all of their observations count as below.
    """
    below, lower = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if bound >= limit:
            if math.isinf(bound):
                break
            if not lower:
                return histogram.count - count
            inside = (limit - lower) / (bound - lower) if bound > lower else 1.0
            return histogram.count - (below + (count - below) * inside)
        below, lower = count, bound
    return 0.0


def surely_slow(histogram: Histogram, objective: float) -> bool:
    """Whether enough observations are above ``objective`` that its p99 is too, and not by chance."""
    return enough_slow(count_above(histogram, objective), histogram.count)


def enough_slow(slow: float, count: float) -> bool:
    """Whether ``slow`` of ``count`` observations are more than 1%, and not by chance."""
    expected = SLOW_SHARE * count
    return slow > max(FEWEST_SLOW - 1, expected + SURE * math.sqrt(expected))

"""Sums over the last frames up to each frame: what rates, shares and quantiles of a minute are worked out from. Pure.

By running totals, so that half an hour costs about as much as a minute.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from vllm_console.telemetry.frames import Frame
from vllm_console.telemetry.model import Histogram
from vllm_console.telemetry.window import quantile

MINUTE = 6
"""Frames of ten seconds in a minute."""

HELD = 3
"""Frames in a row over which usage is a state and no peak."""

SLOW_SHARE = 0.01
"""A p99 is above its goal when more than this share of the observations is."""

SURE = 2.0
"""Standard deviations above that share from which on it is no chance: one in forty."""

FEWEST_SLOW = 3


def totals(frames: Sequence[Frame], counter: str, count: int = MINUTE) -> list[float | None]:
    """Per frame what was counted in the ``count`` frames up to it; None where that frame does not report it."""
    sums = [0.0]
    reported = []
    for frame in frames:
        value: float | None = getattr(frame.grown, counter)
        reported.append(value is not None)
        sums.append(sums[-1] + (value or 0.0))
    return [sums[at + 1] - sums[max(0, at + 1 - count)] if known else None for at, known in enumerate(reported)]


def held(frames: Sequence[Frame], at: int, count: int = MINUTE) -> float | None:
    """The highest KV cache usage (a share) that three frames in a row reached within the ``count`` up to ``at``.

    A peak is no state: it is what `check` goes by, too. None where usage is not reported.
    """
    known = [one.usage_max for one in frames[max(0, at + 1 - count) : at + 1] if one.usage_max is not None]
    rows = [known[begin : begin + HELD] for begin in range(max(1, len(known) - HELD + 1))]
    return max(map(min, rows)) if known else None


def observed(frames: Sequence[Frame], key: str, count: int = MINUTE) -> list[Histogram | None]:
    """Per frame what was observed in the ``count`` frames up to it; None where that frame does not report it."""
    bounds: tuple[float, ...] = next((found.bounds for one in frames if (found := one.histogram(key))), ())
    sums = [Histogram(bounds, (0.0,) * len(bounds), 0.0)]
    minutes: list[Histogram | None] = []
    for at, frame in enumerate(frames):
        new = frame.histogram(key)
        if new is None or new.bounds != bounds:
            sums.append(sums[-1])
            minutes.append(None)
            continue
        sums.append(_plus(sums[-1], new))
        minutes.append(_minus(sums[at + 1], sums[max(0, at + 1 - count)]))
    return minutes


def _plus(one: Histogram, other: Histogram) -> Histogram:
    if not other.count:
        return one
    return Histogram(one.bounds, tuple(map(operator.add, one.counts, other.counts)), one.sum + other.sum)


def _minus(one: Histogram, other: Histogram) -> Histogram:
    if not other.count:
        return one
    return Histogram(one.bounds, tuple(map(operator.sub, one.counts, other.counts)), one.sum - other.sum)


def p99(histogram: Histogram | None) -> float | None:
    """The 99th percentile, or None without observations."""
    return quantile(0.99, histogram.bounds, histogram.counts) if histogram is not None else None


def p50(histogram: Histogram | None) -> float | None:
    """The median, or None without observations."""
    return quantile(0.5, histogram.bounds, histogram.counts) if histogram is not None else None


def mean(histogram: Histogram | None) -> float | None:
    """The mean, which is exact, or None without observations."""
    return histogram.sum / histogram.count if histogram is not None and histogram.count > 0 else None


def count_above(histogram: Histogram, limit: float) -> float:
    """How many observations are above ``limit``, linear within the bucket that it lies in."""
    below, lower = 0.0, 0.0
    for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
        if bound >= limit:
            if math.isinf(bound):
                break  # somewhere above the last bound, or below: taken to be below
            inside = (limit - lower) / (bound - lower) if bound > lower else 1.0
            return histogram.count - (below + (count - below) * inside)
        below, lower = count, bound
    return 0.0


def surely_slow(histogram: Histogram, goal: float) -> bool:
    """Whether so many observations are above ``goal`` that its p99 is too, and not by the chance of a few."""
    expected = SLOW_SHARE * histogram.count
    return count_above(histogram, goal) > max(FEWEST_SLOW - 1, expected + SURE * math.sqrt(expected))

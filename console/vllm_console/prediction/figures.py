"""The figures that are predicted, measured and compared. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from vllm_console.metrics.quantile import PARTS, Weighted, weighted_quantiles

FEWEST_FOR = {"p50": 10, "p90": 50, "p99": 500}
"""A quantile from fewer values than these would be decided by one or two of them."""
LATENCIES = ("ttft_seconds", "itl_seconds", "e2e_seconds")
RATES = ("tokens_per_second", "requests_waiting", "preemptions_per_minute", "kv_cache_usage")


class Spread(msgspec.Struct, frozen=True):
    """A latency's quantiles and mean, in seconds; None where there were too few values."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, values: Sequence[Weighted], *, telling: int | None = None) -> Spread:
        """The spread of weighted values, of which only so many are ``telling``: the others repeat them."""
        total = sum([count for _, count in values])
        if not total:
            return cls()
        enough = total if telling is None else telling
        known = [(name, q) for name, q in PARTS if enough >= FEWEST_FOR[name]]
        found = weighted_quantiles(values, [q for _, q in known])
        return cls(**dict(zip((name for name, _ in known), found, strict=True)), mean=weighted_mean(values))


class Figures(msgspec.Struct, frozen=True):
    """How a server did over some minutes. Latencies in seconds; usage from 0 to 1; None is unknown."""

    ttft_seconds: Spread = Spread()
    itl_seconds: Spread = Spread()
    e2e_seconds: Spread = Spread()
    tokens_per_second: float | None = None
    requests_waiting: float | None = None
    preemptions_per_minute: float | None = None
    kv_cache_usage: float | None = None


class Known(msgspec.Struct, frozen=True):
    """What is known of a latency's spread: points of the share of all values that are no longer than so many seconds,
    and the mean, which counts ``weight`` times as much as a point; None without any value.
    """

    points: tuple[tuple[float, float], ...] = ()
    mean: float | None = None
    weight: int = 1

    @classmethod
    def of(cls, values: Sequence[Weighted]) -> Known:
        """Some quantiles of weighted values. The medians count most: a prediction is refused where they are missed."""
        if not values:
            return cls()
        shares = (0.1, 0.25, 0.5, 0.5, 0.5, 0.75, 0.9)
        return cls(tuple(zip(shares, weighted_quantiles(values, shares), strict=True)), weighted_mean(values))


def weighted_mean(values: Sequence[Weighted]) -> float:
    """The mean. Raises ZeroDivisionError if empty."""
    return sum([value * count for value, count in values]) / sum([count for _, count in values])

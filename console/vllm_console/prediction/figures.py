"""The figures that are predicted, measured and compared. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeVar

import msgspec

from vllm_console.metrics.quantile import PARTS, Weighted, weighted_quantiles

FEWEST_FOR = {"p50": 10, "p90": 50, "p99": 500}
"""Minimum number of values for a quantile; with fewer, one or two of them would decide it."""
PREDICTED_LATENCIES = ("ttft_seconds", "itl_seconds", "e2e_seconds")
RATES = ("tokens_per_second", "requests_waiting", "preemptions_per_minute", "kv_cache_usage")
_Kind = TypeVar("_Kind")


class Spread(msgspec.Struct, frozen=True):
    """A latency's quantiles and mean, in seconds; None if there were too few values."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, values: Sequence[Weighted], *, independent: int | None = None) -> Spread:
        """The spread of weighted values, of which only ``independent`` are independent: the others repeat them."""
        total = sum([count for _, count in values])
        if not total:
            return cls()
        enough = total if independent is None else independent
        known = [(name, q) for name, q in PARTS if enough >= FEWEST_FOR[name]]
        found = weighted_quantiles(values, [q for _, q in known])
        return cls(**dict(zip((name for name, _ in known), found, strict=True)), mean=weighted_mean(values))


class Figures(msgspec.Struct, frozen=True):
    """A server's performance over some minutes. Latencies in seconds; usage from 0 to 1; None is unknown."""

    ttft_seconds: Spread = Spread()
    itl_seconds: Spread = Spread()
    e2e_seconds: Spread = Spread()
    tokens_per_second: float | None = None
    requests_waiting: float | None = None
    preemptions_per_minute: float | None = None
    kv_cache_usage: float | None = None


def mapped(kind: Callable[..., _Kind], spread: type, function: Callable[..., object], *found: Figures) -> _Kind:
    """A ``kind`` with latencies of type ``spread``; each figure is the ``function`` of that figure in all ``found``."""

    def of(name: str) -> object:
        return function(*map(attrgetter(name), found))

    latencies = (spread(*(of(f"{name}.{part}") for part in Spread.__struct_fields__)) for name in PREDICTED_LATENCIES)
    return kind(*latencies, *map(of, RATES))


class Known(msgspec.Struct, frozen=True):
    """The known distribution of a latency: points (share of values, upper bound in seconds), and the mean.

    The mean counts ``weight`` times as much as a point; None without any value.
    """

    points: tuple[tuple[float, float], ...] = ()
    mean: float | None = None
    weight: int = 1

    @classmethod
    def of(cls, values: Sequence[Weighted]) -> Known:
        """Quantiles of weighted values. Medians weigh most, because a prediction is refused if they are missed."""
        if not values:
            return cls()
        shares = (0.1, 0.25, 0.5, 0.5, 0.5, 0.75, 0.9)
        return cls(tuple(zip(shares, weighted_quantiles(values, shares), strict=True)), weighted_mean(values))


def weighted_mean(values: Sequence[Weighted]) -> float:
    """The mean. Raises ZeroDivisionError if empty."""
    return sum([value * count for value, count in values]) / sum([count for _, count in values])

"""Quantiles as far as a histogram determines them: a bucket, and a value only if that bucket has two known ends.

vLLM's histograms of queue, prefill, decode and end-to-end times begin with a bucket from 0 to 0.3 s. A value
interpolated in it would be invented, so such a quantile is just "below 0.3 s". Pure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import msgspec

from vllm_console.text import UNKNOWN, seconds

WIDE = 1.5
"""If a bucket's end exceeds this multiple of its beginning, an interpolated value is only approximate."""

PARTS = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
"""The quantiles reported for each latency."""

NO_LONGER_THAN = (("queue", "ttft"), ("prefill", "ttft"), ("ttft", "e2e"), ("decode", "e2e"))
"""For one request, the first of each pair takes at most as long as the second."""


class Quantile(msgspec.Struct, frozen=True):
    """A quantile and its bucket, in seconds: above ``low``, and at most ``high`` (None: the bucket is open, +Inf).

    ``guess`` is linear within the bucket, like PromQL's ``histogram_quantile``. In the first bucket and in the open one
    it is meaningless: use `value`.
    """

    guess: float
    low: float
    high: float | None

    @property
    def value(self) -> float | None:
        """The interpolated value; None if only one end of the bucket is known."""
        return self.guess if self.high is not None and (self.low > 0 or self.low == self.high) else None

    @property
    def below(self) -> float | None:
        """The bucket's end: the quantile is not above it. None if the bucket is open."""
        return self.high

    @property
    def above(self) -> float | None:
        """The bucket's beginning: the quantile is above it. None in the first bucket."""
        return self.low if self.low > 0 else None

    @property
    def nearest(self) -> float:
        """The value, or else the one known end; for charts and sorting."""
        if self.value is not None:
            return self.value
        return self.low if self.high is None else self.high

    @property
    def wide(self) -> bool:
        """Whether the value is approximate because its bucket is wide."""
        return self.value is not None and self.high is not None and self.high > WIDE * self.low

    @property
    def text(self) -> str:
        """``24ms``; ``~180ms`` in a wide bucket; ``<300ms`` in the first and ``>2560s`` in the open one."""
        if self.value is not None:
            return f"{'~' if self.wide else ''}{seconds(self.value)}"
        return f">{seconds(self.low)}" if self.high is None else f"<{seconds(self.high)}"

    def within(self, limit: float) -> bool | None:
        """Whether the quantile is at most ``limit`` (seconds); None if unknown.

        The bucket decides if the limit lies outside it, otherwise the interpolated value, if there is one.
        """
        if self.high is not None and self.high <= limit:
            return True
        if self.low >= limit:
            return False
        return None if self.value is None else self.value <= limit

    def factor_of(self, other: Quantile) -> str:
        """This divided by ``other`` as far as the buckets determine it: ``3.1×``, ``over 3×``; empty if unknown."""
        if self.value is not None and other.value is not None:
            return f"{self.value / other.value:.1f}×"
        if self.low > 0 and other.high is not None and self.low > other.high:
            return f"over {self.nearest / other.high:.1f}×"
        return ""


Weighted = tuple[float, int]
"""A value and its number of occurrences."""


def weighted_quantiles(values: Iterable[Weighted], shares: Sequence[float]) -> list[float]:
    """For each share, the smallest value that at least this share does not exceed. Raises IndexError if empty."""
    ordered = sorted(values, key=itemgetter(0))
    reached = list(accumulate(map(itemgetter(1), ordered)))
    return [ordered[min(bisect_left(reached, share * reached[-1]), len(ordered) - 1)][0] for share in shares]


def each_once(values: Iterable[float]) -> list[Weighted]:
    """Give each value a weight of one."""
    return [(value, 1) for value in values]


def quantiles_of(values: Iterable[float], shares: Sequence[float]) -> list[float]:
    """`weighted_quantiles` of values with weight one. Raises IndexError if there are none."""
    ordered = sorted(values)
    reached = range(1, len(ordered) + 1)
    return [ordered[min(bisect_left(reached, share * len(ordered)), len(ordered) - 1)] for share in shares]


def exact_quantile(values: Sequence[float], q: float) -> float:
    """A quantile of ``values``, as in `weighted_quantiles`. Raises ValueError if there are none."""
    if not values:
        raise ValueError("no values")
    return quantiles_of(values, [q])[0]


def quantile(q: float, bounds: tuple[float, ...], counts: tuple[float, ...]) -> Quantile | None:
    """A quantile from cumulative bucket counts; None without observations, or without a finite bucket."""
    found = _bucket(q, bounds, counts)
    if found is None:
        return None
    index, guess = found
    low = bounds[index - 1] if index else min(0.0, bounds[0])
    return Quantile(guess, low, bounds[index] if index < len(bounds) - 1 else None)


def middle(found: Sequence[Quantile]) -> Quantile | None:
    """The median of a quantile over several windows. A histogram's first bucket sorts below its other buckets.

    For an even number of windows it is the mean of the middle two, or the one of them that has no value.
    """
    if not found:
        return None
    ordered = sorted(found, key=lambda one: one.nearest)
    one, other = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    if one is other or one.value is None or one.high is None:
        return one
    if other.value is None or other.high is None:
        return other
    return Quantile((one.guess + other.guess) / 2, (one.low + other.low) / 2, (one.high + other.high) / 2)


def interpolated(q: float, bounds: tuple[float, ...], counts: tuple[float, ...], total: float) -> Quantile | None:
    """A quantile from cumulative bucket counts, estimated like PromQL's ``histogram_quantile``. For lengths in tokens.

    Linear within a bucket, but limited to what ``total``, the sum of all observations, allows: observations above the
    quantile are at least as large, those below it at most, and all others lie within their buckets. The first bucket
    begins at 0. In the +Inf bucket ``high`` is None, and the quantile is above the last finite bound. None without
    observations, or with only the +Inf bucket.
    """
    found = quantile(q, bounds, counts)
    if found is None or found.high is None:
        return found
    largest = counts[-1] - max(1, math.ceil(q * counts[-1])) + 1
    least, before = 0.0, 0.0
    for lower, count in zip((min(0.0, bounds[0]), *bounds), counts, strict=False):
        least += lower * max(0.0, min(count, counts[-1] - largest) - before)
        before = count
    guess = min(found.guess, (total - least) / largest)
    return msgspec.structs.replace(
        found, guess=max(found.low, guess, _at_least(found.high, largest, bounds, counts, total))
    )


def _at_least(
    high: float, largest: int | float, bounds: tuple[float, ...], counts: tuple[float, ...], total: float
) -> float:
    """The smallest value allowed by the sum of all observations for a quantile whose bucket ends at ``high``.

    ``largest`` is the number of observations at least as large. 0 if some are beyond the last finite bound, since these
    can have any size, or if the sum exceeds what the buckets allow.
    """
    if counts[-1] > counts[-2]:
        return 0.0
    index = bounds.index(high)
    lower = counts[index - 1] if index else 0.0
    no_larger = counts[-1] - largest + 1 - lower
    most, before = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        most += bound * (count - before) if count > before else 0.0
        before = count
    return (total - most) / no_larger + high if total <= most else 0.0


def _bucket(q: float, bounds: tuple[float, ...], counts: tuple[float, ...]) -> tuple[int, float] | None:
    """The bucket index of a quantile, and the value interpolated in it."""
    if len(bounds) < 2 or not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    index = min(bisect_left(counts, rank), len(counts) - 1)
    if index == len(bounds) - 1:
        return index, bounds[-2]
    upper = bounds[index]
    lower, below = (bounds[index - 1], counts[index - 1]) if index else (min(0.0, upper), 0.0)
    inside = counts[index] - below
    return index, lower + (upper - lower) * (rank - below) / inside if inside > 0 else upper


class Quantiles(msgspec.Struct, frozen=True):
    """A latency over a window: number of observations, their exact mean in seconds, and quantiles with their buckets.

    ``exact`` means that the quantiles are of the values themselves, without buckets.
    """

    count: float
    mean: float | None
    p50: Quantile | None = None
    p90: Quantile | None = None
    p99: Quantile | None = None
    exact: bool = False


def agreeing(latencies: Mapping[str, Quantiles]) -> dict[str, Quantiles]:
    """Make interpolated values consistent: queue ≤ TTFT ≤ end-to-end, and so on.

    Each is interpolated separately, so with overlapping buckets a part of a request can seem longer than the whole.
    Values are then moved within their own buckets, which allow any value. If the buckets themselves contradict each
    other, nothing is changed: they are of different requests (`contradicting`).
    """
    found = dict(latencies)
    for part, whole in 2 * NO_LONGER_THAN:  # twice, since a value moved for one pair may be part of another
        if part in found and whole in found:
            found[part], found[whole] = _agreeing(found[part], found[whole])
    return {name: _ordered(one) for name, one in found.items()}


def _ordered(found: Quantiles) -> Quantiles:
    """Restore p50 ≤ p90 ≤ p99, each of which was moved separately. Parts stay below wholes: both are treated alike."""
    moved: dict[str, Any] = {}
    least = float("-inf")
    for name, _ in PARTS:
        one = getattr(found, name)
        if one is not None and one.value is not None:
            if one.value < least:
                moved[name] = msgspec.structs.replace(one, guess=least)
            least = max(least, one.value)
    return msgspec.structs.replace(found, **moved) if moved else found


def _agreeing(part: Quantiles, whole: Quantiles) -> tuple[Quantiles, Quantiles]:
    parts: dict[str, Any] = {}
    wholes: dict[str, Any] = {}
    for name, _ in PARTS:
        one, other = getattr(part, name), getattr(whole, name)
        if one is None or other is None or one.value is None or other.value is None or one.value <= other.value:
            continue
        meeting = min(one.value, other.high)
        if meeting >= one.low:
            parts[name] = msgspec.structs.replace(one, guess=meeting)
            wholes[name] = msgspec.structs.replace(other, guess=meeting)
    if not parts:
        return part, whole
    return msgspec.structs.replace(part, **parts), msgspec.structs.replace(whole, **wholes)


def contradicting(latencies: Mapping[str, Quantiles]) -> bool:
    """Whether a part of a request seems to take longer than the whole, by exact means or by whole buckets.

    TTFT counts requests at their first token, the others when requests end, so while a queue grows or shrinks they are
    of different requests.
    """
    return any(
        _exceeds(latencies[part], latencies[whole])
        for part, whole in NO_LONGER_THAN
        if part in latencies and whole in latencies
    )


def _exceeds(part: Quantiles, whole: Quantiles) -> bool:
    if part.mean is not None and whole.mean is not None and part.mean > whole.mean:
        return True
    pairs = ((getattr(part, name), getattr(whole, name)) for name, _ in PARTS)
    return any(one and other and other.high is not None and one.low >= other.high for one, other in pairs)


def p99_of(found: Quantiles | None) -> str:
    """The p99 for a table, or a dash."""
    return text_of(found.p99) if found is not None else UNKNOWN


def p99_in(latency: Mapping[str, float | None]) -> str:
    """The p99 of a latency in a JSON document; ``>60s`` if only a bound is known because requests are unfinished."""
    above = latency.get("p99_above")
    return seconds(latency.get("p99")) if above is None else f">{seconds(above)}"


def text_of(found: Quantile | None) -> str:
    """The formatted quantile, or a dash."""
    return found.text if found is not None else UNKNOWN

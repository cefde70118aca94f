"""Exact quantiles of latencies and lengths, from the records of a probe. Pure, except `read_records`.

Records are compared with vLLM's own counts over the same time: quantiles are exact only if no record is missing. vLLM
reports the intervals between tokens per step: the probe records their number, the shortest and the longest. Mostly all
are equal, since requests of a batch get their tokens together; if they differ, each is recorded. Where one is not, a
quantile is exact only if intervals between the two ends cannot move it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from vllm_console.history.probe_records import EngineStep, FinishedRequest, FirstToken, Interval, ProbeReader
from vllm_console.metrics.quantile import PARTS, Quantile, Quantiles, Weighted, quantiles_of, weighted_quantiles
from vllm_console.metrics.sample import LATENCIES, LENGTHS

BOUNDARY_SECONDS = 0.5
"""How long after a sample's time its figures may have been counted, since the server may answer late."""

SAME = 1.001
"""Two bounds of a quantile whose ratio is at most this count as the same value."""

_SHARES = tuple(share for _, share in PARTS)

_AT = attrgetter("at")
_FINISHED_AT = attrgetter("finished_at")
_TIMES = itemgetter(1)
_NUMBER_OF_INTERVALS = itemgetter(EngineStep._fields.index("intervals"))
_INTERVALS_OF = itemgetter(
    *map(EngineStep._fields.index, ("at", "engine", "shortest_interval", "longest_interval", "intervals"))
)
"""Fields read from thousands of steps each second; much faster than access by name."""

_OF_REQUESTS = ("queue", "prefill", "decode", "e2e")
_LENGTHS_OF = dict(zip(LENGTHS, (attrgetter("prompt_tokens"), attrgetter("output_tokens")), strict=True))


class ProbeRecords(msgspec.Struct, frozen=True):
    """What a probe recorded, each kind in order of time. ``writers`` is the number of processes that wrote it."""

    steps: Sequence[EngineStep] = ()
    intervals: Sequence[Interval] = ()
    first_tokens: Sequence[FirstToken] = ()
    requests: Sequence[FinishedRequest] = ()
    writers: int = 1


def read_records(folder: Path, start: float, end: float) -> ProbeRecords:
    """Read the records that `exact_latencies` needs for a span of time (Unix seconds). Raises OSError."""
    reader = ProbeReader(folder, start - 2 * BOUNDARY_SECONDS, end + 2 * BOUNDARY_SECONDS)
    return ProbeRecords(*reader.added(), reader.writers(start, end))


def exact_value(value: float) -> Quantile:
    """A quantile that is known exactly."""
    return Quantile(value, value, value)


def exact_quantiles(values: Sequence[float]) -> Quantiles | None:
    """Count, mean and exact quantiles of values; None without values."""
    count = len(values)
    if not count:
        return None
    p50, p90, p99 = map(exact_value, quantiles_of(values, _SHARES))
    return Quantiles(float(count), math.fsum(values) / count, p50, p90, p99, exact=True)


def quantiles_between(low: Sequence[Weighted], high: Sequence[Weighted]) -> Quantiles | None:
    """Quantiles of values of which some are only known to lie between two ends; None unless they are exact
    nevertheless.

    ``low`` has each value's lower end, ``high`` its upper one. The mean is None if it is not known.
    """
    count = sum(map(_TIMES, low))
    if not count:
        return None
    found: list[Quantile] = []
    ranked = weighted_quantiles(low, _SHARES)
    for one, other in zip(ranked, ranked if high is low else weighted_quantiles(high, _SHARES), strict=True):
        if other > one * SAME:
            return None
        found.append(exact_value(other))
    total = math.fsum([value * times for value, times in low])
    most = total if high is low else math.fsum([value * times for value, times in high])
    p50, p90, p99 = found
    return Quantiles(float(count), total / count if most <= total * SAME else None, p50, p90, p99, exact=True)


def interval_ends(steps: Iterable[EngineStep], intervals: Iterable[Interval]) -> tuple[list[Weighted], list[Weighted]]:
    """Lower and upper bounds of steps' inter-token intervals (seconds); ``intervals`` are those of uneven steps."""
    differing: dict[tuple[float, int], list[Weighted]] = {}
    for one in intervals:
        differing.setdefault((one.at, one.engine), []).append((one.seconds, one.times))
    known: list[Weighted] = []
    low: list[Weighted] = []
    high: list[Weighted] = []
    for at, engine, shortest, longest, count in map(_INTERVALS_OF, steps):
        if shortest is None or longest is None or count < 1:
            continue
        if shortest == longest:
            known.append((shortest, count))
            continue
        recorded = differing.get((at, engine), [])
        if sum(times for _, times in recorded) == count:
            known += recorded
            continue
        low += [(shortest, count - 1), (longest, 1)]
        high += [(shortest, 1), (longest, count - 1)]
    return (known + low, known + high) if low else (known, known)


def exact_latencies(
    records: ProbeRecords, start: float, end: float, counted: Mapping[str, float]
) -> dict[str, Quantiles]:
    """The latencies of a span of time (Unix seconds, its start excluded) that the records determine exactly.

    ``counted`` is the number of observations of each that vLLM counted in the span, keyed as `LATENCIES`; a latency
    with fewer or more records is left out. ``records`` must extend beyond both ends by `BOUNDARY_SECONDS`.
    """
    if records.writers != 1 or _lost(records, start, end):
        return {}
    keys = {key for key in LATENCIES if counted.get(key, 0.0) > 0}
    found: dict[str, Quantiles | None] = {}
    if "ttft" in keys:
        first = _Span(records.first_tokens, _AT, start, end)
        if first.holds(counted["ttft"], len):
            found["ttft"] = exact_quantiles([one.seconds for one in first.inside])
    if "itl" in keys:
        steps = _Span(records.steps, _AT, start, end)
        if steps.holds(counted["itl"], _intervals):
            found["itl"] = quantiles_between(*interval_ends(steps.inside, records.intervals))
    ended = _Span(records.requests, _FINISHED_AT, start, end)
    for key in keys.intersection(_OF_REQUESTS):
        if ended.holds(counted[key], len):
            values = map(attrgetter(f"{key}_seconds"), ended.inside)
            found[key] = exact_quantiles([value for value in values if value is not None])
    return {key: one for key in LATENCIES if (one := found.get(key)) is not None}


def recorded_lengths(
    requests: Sequence[FinishedRequest], start: float, end: float, counted: Mapping[str, float]
) -> dict[str, Sequence[int]]:
    """Lengths (tokens) of the requests that ended in a span of time, keyed as `LENGTHS`, if every one is recorded.

    ``counted`` is the number that vLLM counted in the span. ``requests`` must extend beyond both ends by
    `BOUNDARY_SECONDS`.
    """
    ended = _Span(requests, _FINISHED_AT, start, end)
    found: dict[str, Sequence[int]] = {}
    for key, length in _LENGTHS_OF.items():
        known = [tokens for tokens in map(length, ended.inside) if tokens is not None]
        if known and len(known) == len(ended.inside) and ended.holds(counted.get(key, 0.0), len):
            found[key] = known
    return found


_Row = TypeVar("_Row")


class _Span(Generic[_Row]):
    """Records of a span of time, and those within `BOUNDARY_SECONDS` after its two ends."""

    def __init__(self, rows: Sequence[_Row], at: Callable[[_Row], float], start: float, end: float) -> None:
        moments = (start, start + BOUNDARY_SECONDS, end, end + BOUNDARY_SECONDS)
        first, second, third, fourth = (bisect_right(rows, moment, key=at) for moment in moments)
        self.inside = rows[first:third]
        self._early, self._late = rows[first : min(second, third)], rows[third:fourth]

    def holds(self, counted: float, number: Callable[[Sequence[_Row]], int]) -> bool:
        """Whether the number of records matches ``counted``, allowing for records near the ends of the span."""
        total = number(self.inside)
        return total - number(self._early) <= counted <= total + number(self._late)


def _intervals(steps: Sequence[EngineStep]) -> int:
    return sum(map(_NUMBER_OF_INTERVALS, steps))


def _lost(records: ProbeRecords, start: float, end: float) -> bool:
    first = bisect_left(records.steps, start - BOUNDARY_SECONDS, key=_AT)
    last = bisect_right(records.steps, end + BOUNDARY_SECONDS, key=_AT) - 1
    return last > first and records.steps[first].dropped != records.steps[last].dropped

"""The capacity of an engine: the highest rate that meets the objectives, from replays at other rates. Pure.

The same requests come in the same order at every rate and with all limits, so that two engines differ only in how they
handle them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.step_cost import NO_NOISE, StepCost, StepNoise
from vllm_launchers.engine_model.traffic_replay import Arrival, EngineLimits, Replayed, replay_traffic
from vllm_launchers.presets.model import ATTAINED, Objectives

SETTLED = 0.2
"""The first share of the requests fills the engine and is not evaluated."""

ANSWERS = 5.0
"""Minimum duration of traffic, as a multiple of an answer's duration; shorter traffic is repeated. Otherwise dense
traffic would end before it fills the engine.
"""

_PRECISE = 1.01
_WIDENED = 1.5
_MOST_WIDENED = 24
_MOST_QUEUE_GROWTH = 0.5


class ReplayedEngine(msgspec.Struct, frozen=True):
    """An engine to replay: its limits and its step cost."""

    limits: EngineLimits
    cost: StepCost
    noise: StepNoise = NO_NOISE


class RateOutcome(msgspec.Struct, frozen=True):
    """How traffic at one rate was served: mean TTFT in seconds, and whether the objectives hold.

    ``running`` is the largest batch, ``prefill`` the maximum number of prompt tokens in a step.
    """

    ttft: float
    holds: bool
    running: int
    prefill: int


def held_rate(
    traffic: Sequence[Arrival], engine: ReplayedEngine, objectives: Objectives, near: float, *, at_least: bool = False
) -> float | None:
    """The highest rate (requests per second) at which the objectives hold; the search begins at ``near``.

    ``traffic`` has one request per second. None if they hold at no rate, or at every rate; with ``at_least``, also if
    they do not hold at ``near``.
    """
    low = high = None
    rate = near
    for _ in range(_MOST_WIDENED):
        if replay_at(traffic, engine, objectives, rate).holds:
            low, rate = rate, rate * _WIDENED
        elif at_least and low is None:
            return None
        else:
            high, rate = rate, rate / _WIDENED
        if low is not None and high is not None:
            break
    if low is None or high is None:
        return None
    while high / low > _PRECISE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if replay_at(traffic, engine, objectives, middle).holds else (low, middle)
    return low


def replay_at(traffic: Sequence[Arrival], engine: ReplayedEngine, objectives: Objectives, rate: float) -> RateOutcome:
    """Replay the traffic at ``rate`` requests per second."""
    arrivals = _traffic_at_rate(traffic, engine, rate)
    first = int(SETTLED * len(arrivals))
    since, until = arrivals[first].at, arrivals[-1].at
    found = replay_traffic(arrivals, engine.limits, engine.cost, engine.noise, since=since, until=until)
    judged = [one for one in found.requests[first:] if one is not None]
    complete = len(judged) == len(arrivals) - first
    ttfts = [one.ttft_seconds for one in judged]
    in_time = sum(value <= objectives.ttft_p99_seconds for value in ttfts)
    holds = (
        complete
        and in_time >= ATTAINED * len(ttfts)
        and _itl_holds(found, objectives)
        and found.preemptions <= objectives.preemption_rate * len(judged)
        and found.kv_usage <= objectives.kv_cache_usage * (until - since)
        and not _queue_grows(ttfts, objectives)
    )
    mean = sum(ttfts) / len(ttfts) if ttfts else 0.0
    return RateOutcome(mean, holds, max(found.batches, default=0), found.prefill_tokens)


def _traffic_at_rate(traffic: Sequence[Arrival], engine: ReplayedEngine, rate: float) -> list[Arrival]:
    """The traffic (one request per second) scaled to ``rate``, and repeated if it would be too short."""
    answer = fmean(one.output_tokens for one in traffic) * engine.cost.seconds(1, 1, 0.0, 0.0)
    times = max(1, math.ceil(ANSWERS * answer * rate / len(traffic)))
    return [replace(one, at=(one.at + place * len(traffic)) / rate) for place in range(times) for one in traffic]


def _itl_holds(found: Replayed, objectives: Objectives) -> bool:
    gaps = sum(count for _, count in found.intervals)
    slow = sum(count for seconds, count in found.intervals if seconds > objectives.itl_p99_seconds)
    return slow <= (1 - ATTAINED) * gaps


def _queue_grows(ttfts: Sequence[float], objectives: Objectives) -> bool:
    """Whether requests wait longer and longer, for cases where the TTFT objective is too loose to show it."""
    third = len(ttfts) // 3
    if not third:
        return False
    first, last = (sum(part) / third for part in (ttfts[:third], ttfts[-third:]))
    return last - first > _MOST_QUEUE_GROWTH * objectives.ttft_p99_seconds


def saturated_tokens(traffic: Sequence[Arrival], engine: ReplayedEngine, in_flight: int) -> float:
    """Tokens generated per second while ``in_flight`` requests are always in flight."""
    limits = engine.limits
    running = min(limits.scheduler.max_num_seqs, in_flight)
    limited = replace(limits, scheduler=replace(limits.scheduler, max_num_seqs=running))
    together = [replace(one, at=0.0) for one in traffic]
    whole = replay_traffic(together, limited, engine.cost, engine.noise)
    # The end, when fewer and fewer requests run, is excluded.
    ends = sorted(one.e2e_seconds for one in whole.requests if one is not None)
    until = ends[max(0, len(ends) - running)] if len(ends) > running else ends[-1]
    part = replay_traffic(together, limited, engine.cost, engine.noise, until=until)
    return part.tokens / until

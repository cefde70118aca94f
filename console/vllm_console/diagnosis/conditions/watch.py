"""All conditions of a server at one moment, the gravest first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vllm_console.diagnosis.conditions.cache import (
    ContextUnused,
    KvCachePressure,
    Preempting,
    PrefixCacheIdle,
    PrefixCacheMissed,
)
from vllm_console.diagnosis.conditions.engine import EngineHung, StarvedByClients, engine_dead
from vllm_console.diagnosis.conditions.gpus import GpuThrottled, PcieNarrow, TensorParallelStalls
from vllm_console.diagnosis.conditions.healthy import Healthy
from vllm_console.diagnosis.conditions.latency import PrefillContention, SlowFirstToken, SlowTokens
from vllm_console.diagnosis.conditions.queue import (
    NotAdmitted,
    OversubscribedCompute,
    OversubscribedMemory,
    OversubscribedSequences,
)
from vllm_console.diagnosis.conditions.rule import Rule, Situation, holds_since
from vllm_console.diagnosis.conditions.tenants import GpuClaimed, GpuMemoryBelowReserve, GpuMemoryContended
from vllm_console.diagnosis.model import Condition, Severity

RULES: tuple[Rule, ...] = (
    EngineHung(),
    Preempting(),
    OversubscribedMemory(),
    OversubscribedSequences(),
    OversubscribedCompute(),
    NotAdmitted(),
    KvCachePressure(),
    PrefillContention(),
    TensorParallelStalls(),
    SlowTokens(),
    SlowFirstToken(),
    GpuThrottled(),
    GpuMemoryBelowReserve(),
    GpuMemoryContended(),
    GpuClaimed(),
    PcieNarrow(),
    PrefixCacheMissed(),
    PrefixCacheIdle(),
    ContextUnused(),
    StarvedByClients(),
)
"""All conditions that are looked for."""

_HELD_UP = ("preempting", "oversubscribed_memory", "oversubscribed_sequences", "oversubscribed_compute", "not_admitted")
EXPLAINED_BY: Mapping[str, tuple[str, ...]] = {
    "kv_cache_pressure": ("preempting", "oversubscribed_memory"),
    "slow_tokens": (*_HELD_UP, "kv_cache_pressure", "prefill_contention", "tensor_parallel_stalls", "gpu_throttled"),
    "slow_first_token": (*_HELD_UP, "kv_cache_pressure", "tensor_parallel_stalls", "gpu_throttled"),
    "starved_by_clients": ("not_admitted",),
    "oversubscribed_memory": ("not_admitted",),
    "oversubscribed_sequences": ("not_admitted",),
    "oversubscribed_compute": ("not_admitted",),
}
"""Conditions that go without saying when one of these holds: each is named once, by its cause."""

LAST = ("slow_tokens", "slow_first_token", PrefixCacheIdle.code)
"""Conditions that come after others as grave: a goal missed for no other reason, and what may be left as it is."""

SETTLING_SECONDS = 20.0
"""After a server became ready nothing is judged for this long: first requests warm it up."""

CURE_SETTLES_SECONDS = 60.0
"""So long after it began a condition's cure may still change; then it stands: what is read is what is staged."""

CURE_ANEW_SECONDS = 600.0
"""At the clock's multiples of this it is worked out anew: traffic changes."""

MOST_STALE_SECONDS = 30.0
"""When the newest frame is older, nothing is known of now."""


def conditions(situation: Situation, rules: Sequence[Rule] = RULES) -> tuple[Condition, ...]:
    """Every condition that holds now, the gravest first and among equals the oldest.

    Where nothing worse than a note is found and requests are served well, `Healthy` says so.
    """
    if (dead := engine_dead(situation)) is not None:
        return (dead,)
    frames = [frame for frame in situation.frames if frame.start >= situation.ready_at + SETTLING_SECONDS]
    if not frames or situation.now - frames[-1].end > MOST_STALE_SECONDS:
        return ()
    judged = replace(situation, frames=tuple(frames))
    held = [(rule, since) for rule in rules if (since := holds_since(rule.verdicts(judged), frames)) is not None]
    if any(rule.code == EngineHung.code for rule, _ in held):
        held = [(rule, since) for rule, since in held if rule.code == EngineHung.code]  # the rest is of before
    codes = {rule.code for rule, _ in held}
    found = [
        _described(rule, judged, since)
        for rule, since in held
        if not codes.intersection(EXPLAINED_BY.get(rule.code, ()))
    ]
    if all(condition.severity is Severity.NOTE for condition in found):
        well = Healthy()
        if (since := holds_since(well.verdicts(judged), frames)) is not None:
            found.append(well.describe(judged, since))
    order = list(Severity)
    return tuple(sorted(found, key=lambda one: (order.index(one.severity), one.code in LAST, one.since)))


def _described(rule: Rule, situation: Situation, since: float) -> Condition:
    """The condition with its figures as of now, and cause and remedies as they were worked out last."""
    now = rule.describe(situation, since)
    settled = max(since + CURE_SETTLES_SECONDS, situation.now // CURE_ANEW_SECONDS * CURE_ANEW_SECONDS)
    frames = tuple(frame for frame in situation.frames if frame.end <= settled)
    if len(frames) in (0, len(situation.frames)):
        return now
    moments = tuple(moment for moment in situation.moments if moment.at <= settled) or situation.moments
    then = rule.describe(replace(situation, frames=frames, moments=moments), since)
    return replace(now, cause=then.cause, remedies=then.remedies)

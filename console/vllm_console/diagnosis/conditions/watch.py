"""All conditions of a server at one moment, the gravest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_console.diagnosis.conditions.cache import (
    ContextUnused,
    KvCachePressure,
    Preempting,
    PrefixCacheIdle,
    PrefixCacheMissed,
)
from vllm_console.diagnosis.conditions.latency import PrefillContention, itl_p99
from vllm_console.diagnosis.conditions.queue import NotAdmitted, OversubscribedMemory, OversubscribedSequences
from vllm_console.diagnosis.conditions.rule import Rule, Situation, holds_since
from vllm_console.diagnosis.model import Condition, Measure, Severity
from vllm_console.format import percent, seconds

RULES: tuple[Rule, ...] = (
    Preempting(),
    OversubscribedMemory(),
    OversubscribedSequences(),
    NotAdmitted(),
    KvCachePressure(),
    PrefillContention(),
    PrefixCacheMissed(),
    PrefixCacheIdle(),
    ContextUnused(),
)
"""All conditions that are looked for."""

SETTLING_SECONDS = 20.0
"""After a server became ready nothing is judged for this long: first requests warm it up."""

MOST_STALE_SECONDS = 30.0
"""When the newest frame is older, nothing is known of now."""


def conditions(situation: Situation, rules: Sequence[Rule] = RULES) -> tuple[Condition, ...]:
    """Every condition that holds now, the gravest first and among equals the oldest.

    Where nothing worse than a note is found and requests are served, `healthy` says so.
    """
    frames = [frame for frame in situation.frames if frame.start >= situation.ready_at + SETTLING_SECONDS]
    if not frames or situation.now - frames[-1].end > MOST_STALE_SECONDS:
        return ()
    judged = replace(situation, frames=tuple(frames))
    found = []
    for rule in rules:
        since = holds_since(rule.verdicts(judged), frames)
        if since is not None:
            found.append(rule.describe(judged, since))
    if all(condition.severity is Severity.NOTE for condition in found) and (well := _healthy(judged)) is not None:
        found.append(well)
    order = list(Severity)
    return tuple(sorted(found, key=lambda condition: (order.index(condition.severity), condition.since)))


def _healthy(situation: Situation) -> Condition | None:
    """All is well, said plainly; None while nothing is served."""
    frame = situation.frames[-1]
    if not frame.grown.generation_tokens_total:
        return None
    goals, source = situation.goals, situation.goals_source
    measures = [Measure("KV cache usage", percent(frame.usage_max), percent(goals.kv_cache_usage), source)]
    if (latency := itl_p99(frame)) is not None:
        measures.append(Measure("ITL p99", seconds(latency), seconds(goals.itl_p99_seconds), source))
    since = situation.frames[0].start
    return Condition(
        "healthy", Severity.GOOD, since, "Healthy.", "Nothing is found that would hold it up.", tuple(measures)
    )

"""All conditions of a server at one moment, the gravest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_console.diagnosis.conditions.rule import Rule, Situation, holds_since
from vllm_console.diagnosis.model import Condition, Severity

SETTLING_SECONDS = 20.0
"""After a server became ready nothing is judged for this long: first requests warm it up."""

MOST_STALE_SECONDS = 30.0
"""When the newest frame is older, nothing is known of now."""


def conditions(situation: Situation, rules: Sequence[Rule]) -> tuple[Condition, ...]:
    """Every condition that holds now, the gravest first and among equals the oldest."""
    frames = [frame for frame in situation.frames if frame.start >= situation.ready_at + SETTLING_SECONDS]
    if not frames or situation.now - frames[-1].end > MOST_STALE_SECONDS:
        return ()
    judged = replace(situation, frames=tuple(frames))
    found = []
    for rule in rules:
        since = holds_since(rule.verdicts(judged), frames)
        if since is not None:
            found.append(rule.describe(judged, since))
    order = list(Severity)
    return tuple(sorted(found, key=lambda condition: (order.index(condition.severity), condition.since)))

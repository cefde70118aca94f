"""What a plan says of itself before it runs: what stands in the way, what will hurt, what could be better.

Codes are stable: scripts and presets may name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from vllm_launchers.plan.model import Changes


class Level(StrEnum):
    """How much a finding weighs: vLLM would end on an error; a warning hurts; advice could be better."""

    ERROR = "error"
    WARNING = "warning"
    ADVICE = "advice"


@dataclass(frozen=True, slots=True)
class Finding:
    """``message`` is one sentence: what, where, and what to do. ``fix`` is the change of flags that mends it, if any.

    ``surely`` is False for an error that rests on an estimate or on a state that may pass, so that ``--force`` may go
    over it; never for what vLLM itself would end on.
    """

    code: str
    level: Level
    message: str
    fix: Changes | None = None
    surely: bool = True


def by_weight(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then advice; otherwise in the order they came; nothing twice."""
    order = list(Level)
    once: list[Finding] = []
    for finding in findings:  # a change of flags holds a mapping and cannot be hashed
        if finding not in once:
            once.append(finding)
    return tuple(sorted(once, key=lambda finding: order.index(finding.level)))

"""A plan's findings before it runs: what blocks it, what will hurt, what could be better.

Codes are stable: scripts and presets may name them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from vllm_launchers.errors import UsageError
from vllm_launchers.vllm.flags.changes import Changes


class Level(StrEnum):
    """A finding's severity: vLLM would end on an error; a warning hurts; advice could be better."""

    ERROR = "error"
    WARNING = "warning"
    ADVICE = "advice"


class PlanFinding(msgspec.Struct, frozen=True):
    """``message`` is one sentence: what, where, and what to do. ``fix`` is the flag change that fixes it, if any.

    ``surely`` is False for an error that rests on an estimate or on a state that may pass, so ``--force`` may override
    it; never for what vLLM itself would end on.
    """

    code: str
    level: Level
    message: str
    fix: Changes | None = None
    surely: bool = True


def by_weight(findings: Iterable[PlanFinding]) -> tuple[PlanFinding, ...]:
    """Errors first, then warnings, then advice; otherwise in the given order; without duplicates."""
    order = list(Level)
    once: list[PlanFinding] = []
    for finding in findings:  # a change of flags contains a mapping and cannot be hashed
        if finding not in once:
            once.append(finding)
    return tuple(sorted(once, key=lambda finding: order.index(finding.level)))


# -- errors of a plan -------------------------------------------------------------------------------------------------


class PlanError(UsageError):
    """An invalid launch request; the message is one clear sentence."""


class FlagError(PlanError):
    """A flag that cannot be set this way."""

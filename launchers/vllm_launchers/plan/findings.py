"""Findings of a plan before launch: errors, warnings, and advice.

Codes are stable: scripts and presets may refer to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from vllm_launchers.errors import UsageError
from vllm_launchers.vllm.flags.changes import Changes


class Level(StrEnum):
    """A finding's severity: error (vLLM would exit), warning (a disadvantage), advice (a possible improvement)."""

    ERROR = "error"
    WARNING = "warning"
    ADVICE = "advice"


class PlanFinding(msgspec.Struct, frozen=True):
    """``message`` is one sentence: what, where, and what to do. ``fix`` is the flag change that fixes it, if any.

    ``surely`` is False for an error that is based on an estimate or may be temporary, so that ``--force`` may override
    it. It is True for errors that vLLM would certainly exit with. ``refused``: the flag that an error is about if vLLM
    refuses it, as it is set, whatever the other flags are; empty for other findings.
    """

    code: str
    level: Level
    message: str
    fix: Changes | None = None
    surely: bool = True
    refused: str = ""


def by_weight(findings: Iterable[PlanFinding]) -> tuple[PlanFinding, ...]:
    """Sort errors before warnings before advice, otherwise in the given order, and drop duplicates."""
    order = list(Level)
    once: list[PlanFinding] = []
    for finding in findings:  # not a set: a fix contains a mapping and is not hashable
        if finding not in once:
            once.append(finding)
    return tuple(sorted(once, key=lambda finding: order.index(finding.level)))


# -- errors of a plan -------------------------------------------------------------------------------------------------


class PlanError(UsageError):
    """An invalid launch request; the message is one clear sentence."""


class FlagError(PlanError):
    """A flag that cannot be set this way."""

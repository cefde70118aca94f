"""What a plan is made of and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_launchers.machine.model import Engine, EngineKind
from vllm_launchers.presets.model import FlagValue

if TYPE_CHECKING:
    from vllm_launchers.plan.budget.model import MemoryBudget
    from vllm_launchers.plan.choices.model import Choice
    from vllm_launchers.plan.findings import Finding
    from vllm_launchers.plan.placement import Placement

__all__ = ["Changes", "Engine", "EngineKind", "FlagValue", "Flags", "Plan", "same_value"]

Flags = Mapping[str, FlagValue]
"""Flags without leading dashes, words joined by ``-``: ``{"max-num-seqs": 256}``."""


def same_value(one: FlagValue | None, other: FlagValue | None) -> bool:
    """Whether two values are one to vLLM: ``1`` is not ``True``."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


@dataclass(frozen=True, slots=True)
class Changes:
    """A difference of flags: what a person staged, or gave as ``--set``/``--unset``."""

    set: Flags = field(default_factory=dict)
    unset: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is changed."""
        return not self.set and not self.unset


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, resolved: everything the keeper needs and everything a person is shown before it runs.

    ``flags`` are the effective ones (without model, host and port, which stand in their own fields);
    ``reasons`` gives, per flag, why it is set. ``secrets`` are *names* of environment variables only.
    """

    preset: str
    model: str
    engine: Engine
    host: str
    port: int
    argv: tuple[str, ...]
    flags: Flags
    reasons: Mapping[str, str]
    environment: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    placement: str = ""
    """Why it gets these GPUs, in one line."""
    sets: tuple[Placement, ...] = ()
    """The sets of GPUs that there are to choose from, the best first; none where GPUs are not known."""
    choices: tuple[Choice, ...] = ()
    """Every flag that is set, with reason, price and source."""
    memory: MemoryBudget | None = None
    """What it will hold; None where too little is known of model or GPU."""
    estimated: MemoryBudget | None = None
    """What was estimated before an earlier start's report corrected it, or took its place."""
    findings: tuple[Finding, ...] = ()
    """What stands in its way, will hurt it or could be better, the worst first."""

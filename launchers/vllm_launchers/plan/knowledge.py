"""What a plan may know besides what a person asked for; gathered by the fleet, so that planning itself stays pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_launchers.machine.flags.model import FlagTable
from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.model import Surroundings
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.model import EngineReport

__all__ = ["Knowledge", "Learned", "Surroundings"]


@dataclass(frozen=True, slots=True)
class Learned:
    """What an earlier start of this model on this kind of GPU reported, and what had been predicted for it then."""

    report: EngineReport
    predicted_weights_gib: float | None = None
    predicted_overhead_gib: float | None = None
    predicted_kv_gib: float | None = None


@dataclass(frozen=True, slots=True)
class Knowledge:
    """All that is known of one launch's surroundings. ``host`` is None where GPUs are not looked at."""

    facts: ModelFacts | None = None
    flags: FlagTable | None = None
    host: Host | None = None
    shares: tuple[Share, ...] = ()
    surroundings: Surroundings = field(default_factory=Surroundings)
    learned: Learned | None = None
    model_problem: str = ""
    """Why there is no such model, in one sentence; empty where there may be one."""

"""The inputs of choices for a launch whose memory is estimated for one GPU of the machine's kind."""

from __future__ import annotations

from typing import Any

from vllm_launchers.host.gpu.host import Host
from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.choices.choice import ChoiceInputs
from vllm_launchers.plan.choices.pool import pool_of
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import ModelFacts


def choice_inputs(
    workload: Workload,
    facts: ModelFacts | None,
    host: Host | None,
    release: tuple[int, int, int] | None,
    build: str | None,
    **other: Any,
) -> ChoiceInputs:
    pool = pool_of(host, other.get("gpus", ()), other.get("shares", ()))

    def budget(flags: Flags, /) -> MemoryBudget | None:
        if facts is None or pool is None or pool.memory_gib is None or build == "cpu":
            return None
        gpu = GpuShape(pool.name, pool.memory_gib)
        return estimate(facts, flags, [gpu], release=release, workload=workload, build=build)

    return ChoiceInputs(workload, other.pop("budget", budget), facts, host, release, build, **other)

"""Fixes that a given vLLM accepts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_console.diagnosis.finding import Fix
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import parse_release


def accepted(
    fixes: Sequence[Fix],
    flags: Flags,
    version: str | None,
    facts: ModelFacts | None = None,
    gpu: GpuShape | None = None,
    *,
    on_cpu: bool = False,
) -> tuple[Fix, ...]:
    """The fixes that do not make vLLM reject any flags that it accepts now.

    Without a version flags are not checked; without ``facts``, what the model allows is not. The limits that vLLM
    derives if no flag sets them are known for a GPU, or with ``on_cpu``.
    """
    if all(fix.changes.empty for fix in fixes):
        return tuple(fixes)
    from vllm_launchers.plan.proposals import Target, newly_refused
    from vllm_launchers.vllm.flags.releases import release_table

    target = Target(release_table(version), facts, gpu, on_cpu, parse_release(version or ""))
    return tuple(fix for fix in fixes if fix.changes.empty or not newly_refused(target, flags, fix.changes))

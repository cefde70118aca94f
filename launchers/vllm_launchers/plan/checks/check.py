"""All checks of a launch, before it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from vllm_launchers.plan.checks.asked import simulated
from vllm_launchers.plan.checks.engine import engine_findings
from vllm_launchers.plan.checks.flags import flag_findings
from vllm_launchers.plan.checks.machine import machine_findings
from vllm_launchers.plan.checks.memory import memory_findings
from vllm_launchers.plan.checks.model import model_findings
from vllm_launchers.plan.checks.network import network_findings
from vllm_launchers.plan.checks.parallel import parallel_findings
from vllm_launchers.plan.checks.precision import precision_findings
from vllm_launchers.plan.checks.values import value_findings
from vllm_launchers.plan.choices.situation import BudgetFor
from vllm_launchers.plan.findings import Finding, Level, by_weight
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Workload

GPU_ONLY = frozenset(
    {"memory_held", "weights_do_not_fit", "kv_too_small", "gpu_lost", "gpu_in_mig_mode", "gpus_too_few",
     "fp8_unsupported", "bf16_unsupported", "disk_for_download"}
)  # fmt: skip
"""What ends a real start and not a simulated one, which touches no GPU and fetches nothing."""


def check(
    plan: Plan, knowledge: Knowledge, workload: Workload | None = None, budget: BudgetFor | None = None
) -> tuple[Finding, ...]:
    """What stands in a plan's way, will hurt it or could be better, the worst first.

    The plan's own findings are among them. ``workload`` says how long requests are; ``budget`` what the same launch
    would hold with other flags, for ways out that fit.
    """
    found = [*plan.findings, *_all(plan, knowledge, workload, budget)]
    if simulated(plan):
        found = [replace(one, level=Level.WARNING) if _harmless(one) else one for one in found]
    return by_weight(found)


def _all(plan: Plan, knowledge: Knowledge, workload: Workload | None, budget: BudgetFor | None) -> Iterator[Finding]:
    yield from engine_findings(plan)
    yield from flag_findings(plan.flags, plan.environment, knowledge.flags, plan.engine.release)
    yield from value_findings(plan, knowledge)
    yield from model_findings(plan, knowledge)
    yield from parallel_findings(plan, knowledge)
    yield from precision_findings(plan, knowledge)
    yield from memory_findings(plan, knowledge, workload, budget)
    yield from network_findings(plan, knowledge)
    yield from machine_findings(plan, knowledge)


def _harmless(finding: Finding) -> bool:
    return finding.level is Level.ERROR and finding.code in GPU_ONLY


def errors(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Those that stand in a launch's way."""
    return tuple(finding for finding in findings if finding.level is Level.ERROR)

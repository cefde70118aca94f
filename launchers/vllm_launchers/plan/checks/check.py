"""All checks of a launch, before it runs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from vllm_launchers.plan.checks.environment import engine_findings, machine_findings, network_findings
from vllm_launchers.plan.checks.flags import (
    EngineFacts,
    flag_findings,
    refused_by_all,
    value_findings,
    variable_value_findings,
)
from vllm_launchers.plan.checks.hardware import block_findings, hardware_findings, precision_findings
from vllm_launchers.plan.checks.memory import memory_findings
from vllm_launchers.plan.checks.model import adapter_findings, model_findings
from vllm_launchers.plan.checks.model_conditions import model_condition_findings
from vllm_launchers.plan.checks.model_runner import model_runner_findings
from vllm_launchers.plan.checks.other_tools import other_tools
from vllm_launchers.plan.checks.parallel import node_findings, parallel_findings
from vllm_launchers.plan.checks.ray import ray_findings
from vllm_launchers.plan.checks.request import simulated, target_of, variables
from vllm_launchers.plan.checks.sleep import sleep_findings
from vllm_launchers.plan.checks.speculation import speculation_findings
from vllm_launchers.plan.checks.workload import workload_findings
from vllm_launchers.plan.choices.choice import BudgetFor
from vllm_launchers.plan.findings import Level, PlanFinding, by_weight
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.proposals import Target, acceptable
from vllm_launchers.presets.model import Objectives, Workload

GPU_ONLY = frozenset(
    {"memory_held", "gpu_lost", "gpu_in_mig_mode", "gpus_too_few", "gpu_unsupported", "quantization_unsupported",
     "fp8_unsupported", "bf16_unsupported", "disk_for_download", "states_too_few"}
)  # fmt: skip
"""Errors of a real start that do not affect a simulated one, which uses no GPU, keeps no states and downloads nothing.
It does compute memory, so weights or a KV cache that do not fit are errors for it too."""


THIS_MACHINE = frozenset(
    {"engine_missing", "model_missing", "model_incomplete", "model_gated", "disk_for_download", "port_taken", "no_gpus",
     "memory_held", "gpu_lost", "gpu_in_mig_mode", "variable_inherited", "ray_missing", "ray_not_here",
     "ray_unreachable", "file_missing", "package_missing"}
)  # fmt: skip
"""Errors of this machine's current state; another one may have the model, the network, the port and the memory."""


def check_plan(
    plan: Plan,
    inputs: PlanInputs,
    workload: Workload,
    budget: BudgetFor,
    objectives: Objectives,
) -> tuple[PlanFinding, ...]:
    """Return what blocks a plan, will hurt it or could be better, worst first.

    Includes the plan's own findings. ``workload`` gives the request lengths. ``budget`` returns the memory of this
    launch with other flags, to find fixes that fit. ``objectives`` are the latency objectives of its requests.
    """
    target = target_of(plan, inputs)
    found = [_with_accepted_fix(one, target, plan) for one in (*plan.findings, *_all(plan, inputs, workload, budget))]
    found += other_tools(plan, inputs, workload, budget, objectives)
    if simulated(plan):
        found = [_only_warned_of(one) if _harmless(one) else one for one in found]
    return by_weight(found)


def _all(plan: Plan, inputs: PlanInputs, workload: Workload, budget: BudgetFor) -> Iterator[PlanFinding]:
    yield from engine_findings(plan)
    engine = _engine_facts(plan, inputs)
    by_table = flag_findings(plan.flags, plan.environment, engine)
    if not simulated(plan):
        by_table += variable_value_findings(variables(plan, inputs), plan.environment, engine, plan.engine.build)
    by_table += [*block_findings(plan, inputs), *hardware_findings(plan, inputs)]
    yield from _by_assumed_flags(by_table, plan, engine) if inputs.flags.assumed else by_table
    yield from value_findings(plan, inputs, budget)
    yield from model_findings(plan, inputs)
    yield from model_condition_findings(plan, inputs)
    yield from speculation_findings(plan, inputs)
    yield from model_runner_findings(plan, inputs)
    yield from parallel_findings(plan, inputs, budget)
    yield from node_findings(plan, inputs, budget)
    yield from ray_findings(plan, inputs)
    yield from precision_findings(plan, inputs)
    yield from memory_findings(plan, inputs, workload, budget)
    yield from workload_findings(plan, inputs, workload, budget)
    yield from sleep_findings(plan, inputs)
    yield from adapter_findings(plan, inputs)
    yield from network_findings(plan, inputs)
    yield from machine_findings(plan, inputs)


def refused_flags(plan: Plan, inputs: PlanInputs) -> frozenset[str]:
    """The flags that vLLM refuses as they are set, whatever the others are; for unknown flags, the assumed release."""
    found = flag_findings(plan.flags, {}, _engine_facts(plan, inputs))
    found += value_findings(plan, inputs, lambda _: None)
    found += [*block_findings(plan, inputs), *model_findings(plan, inputs)]
    return frozenset(finding.refused for finding in found if finding.refused)


def _engine_facts(plan: Plan, inputs: PlanInputs) -> EngineFacts:
    facts = inputs.facts
    return EngineFacts(
        inputs.flags,
        plan.engine.release,
        plan.engine.plugins,
        multimodal=facts is not None and facts.multimodal,
        own_draft=facts.own_draft if facts is not None and facts.certain else None,
    )


def _by_assumed_flags(found: Sequence[PlanFinding], plan: Plan, engine: EngineFacts) -> Iterator[PlanFinding]:
    """Findings by another vLLM's flags, without changes that this vLLM may not accept.

    An error remains one only if every recorded release refuses the flag, too.
    """
    by_all = refused_by_all(plan.flags, filter(None, (finding.refused for finding in found)), engine)
    if plan.engine.release is not None:
        doubt = f"vLLM {plan.engine.public_version} may differ"
    else:
        doubt = "the version of this vLLM is unknown" if plan.engine.path else "another release may differ"
    for finding in found:
        if finding.refused in by_all:
            message = f"{finding.message} (true of every known release)"
            yield replace(finding, message=message, fix=None, surely=False)
        else:
            level = Level.WARNING if finding.level is Level.ERROR else finding.level
            yield replace(finding, level=level, message=f"{finding.message} ({doubt})", fix=None)


def _with_accepted_fix(finding: PlanFinding, target: Target, plan: Plan) -> PlanFinding:
    if finding.fix is None:
        return finding
    fix = acceptable(target, plan.flags, finding.fix)
    return finding if fix is finding.fix else replace(finding, fix=fix)


def _harmless(finding: PlanFinding) -> bool:
    return finding.level is Level.ERROR and finding.code in GPU_ONLY


def _only_warned_of(finding: PlanFinding) -> PlanFinding:
    return replace(finding, level=Level.WARNING, message=f"{finding.message}; the simulated engine starts anyway")


def errors_anywhere(findings: tuple[PlanFinding, ...]) -> tuple[PlanFinding, ...]:
    """Errors that block the launch on any machine with these GPUs."""
    return tuple(finding for finding in errors(findings) if finding.code not in THIS_MACHINE)


def errors(findings: tuple[PlanFinding, ...]) -> tuple[PlanFinding, ...]:
    """The errors that block a launch."""
    return tuple(finding for finding in findings if finding.level is Level.ERROR)

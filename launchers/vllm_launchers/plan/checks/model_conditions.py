"""Flags that vLLM refuses together for the model. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_launchers.plan.checks.request import variables
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.model_conditions import broken_model_conditions
from vllm_launchers.vllm.flags.changes import Changes


def model_condition_findings(plan: Plan, inputs: PlanInputs) -> Iterator[PlanFinding]:
    """Each broken condition, with the flags to unset."""
    facts, release = inputs.facts, plan.engine.release
    if facts is None:
        return
    for broken in broken_model_conditions(facts, plan.flags, release, variables(plan, inputs)):
        text = f"vLLM will not start: {broken.sentence}"
        sure = broken.surely and release is not None and facts.certain
        fix = Changes(unset=broken.flags) if broken.flags else None
        if broken.missing:
            fix = Changes(set={broken.missing: True})
        yield PlanFinding("flag_value", Level.ERROR, text, fix, surely=sure)

"""Whether a model fits according to the plan, or unknown if facts are missing."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.model import MemoryFit, fit_of


def test_memory_fit_follows_the_plan(fakes):
    plan = fakes.FakeFleet().plan(fakes.LaunchRequest("chatbot"))
    assert fit_of(plan) == MemoryFit(True, "", plan.memory.kv_tokens, plan.gpus)
    assert fit_of(replace(plan, memory=None)) == MemoryFit(None)
    partly = PlanFinding("model_incomplete", Level.WARNING, "One file is missing.")
    assert fit_of(replace(plan, findings=(partly,))).incomplete == "One file is missing."
    small = replace(plan.memory, kv_gib=-3.0)
    error = PlanFinding("memory", Level.ERROR, "3 GiB are missing.", surely=False)
    warning = PlanFinding("other", Level.WARNING, "slow")
    assert fit_of(replace(plan, memory=small, findings=(error, warning))) == MemoryFit(False, "3 GiB are missing.")
    assert fit_of(replace(plan, memory=None, findings=(warning, error))) == MemoryFit(None, "3 GiB are missing.")

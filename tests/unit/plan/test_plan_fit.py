"""Whether a model fits, in short: the plan's own judgement, and no guess where it knows too little."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.model import Fit, fit_of


def test_it_is_what_the_plan_says(fakes):
    plan = fakes.FakeFleet().plan(fakes.LaunchRequest("chatbot"))
    assert fit_of(plan) == Fit(True, "", plan.memory.kv_tokens)
    assert fit_of(replace(plan, memory=None)) == Fit(None)
    small = replace(plan.memory, kv_gib=-3.0)
    error = Finding("memory", Level.ERROR, "3 GiB are missing.", surely=False)
    warning = Finding("other", Level.WARNING, "slow")
    assert fit_of(replace(plan, memory=small, findings=(error, warning))) == Fit(False, "3 GiB are missing.")
    assert fit_of(replace(plan, memory=None, findings=(warning, error))) == Fit(None, "3 GiB are missing.")

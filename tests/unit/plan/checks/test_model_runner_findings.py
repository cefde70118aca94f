"""Features that vLLM has only in its newer model runner, which the CPU build does not use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.checks.model_runner import model_runner_findings
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.modelfacts.facts import ModelFacts

DENSE = ModelFacts("org/dense", source="folder", architecture="LlamaForCausalLM")
EXPERTS = replace(DENSE, architecture="Qwen3MoeForCausalLM", experts=128)
MLA = replace(DENSE, architecture="DeepseekV3ForCausalLM", kv_lora_rank=512, experts=256)
PREFILL = {"prefill-context-parallel-size": 2}
ROUTED = {"enable-return-routed-experts": True}
KEY = {"aux-output-config.enable_return_routed_experts": True}
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"

Find = Callable[..., list[PlanFinding]]


@pytest.fixture
def found(plan: Callable[..., Plan]) -> Find:
    def found(flags: dict[str, Any], facts: ModelFacts | None = EXPERTS, **more: Any) -> list[PlanFinding]:
        made = plan(set=flags, **{"version": "0.32.0", "build": "cuda", **more})
        return list(model_runner_findings(made, PlanInputs(facts)))

    return found


@pytest.mark.parametrize("flags", [PREFILL, ROUTED, KEY])
def test_cpu_build_refuses_what_needs_the_newer_runner(found: Find, flags: dict[str, Any]) -> None:
    (one,) = found(flags, MLA, build="cpu")
    assert (one.code, one.level, one.fix) == ("flag_value", Level.ERROR, Changes(unset=tuple(flags)))
    assert found(flags, MLA) == []


@pytest.mark.parametrize("flags", [PREFILL, ROUTED])
def test_variable_chooses_the_runner(found: Find, flags: dict[str, Any]) -> None:
    assert found(flags, MLA, build="cpu", environment={RUNNER: "1"}) == []
    (one,) = found(flags, MLA, environment={RUNNER: "0"})
    assert f"{RUNNER}=0" in one.message


def test_prefill_context_parallelism_needs_latent_attention(found: Find) -> None:
    (one,) = found(PREFILL, DENSE)
    assert "latent attention" in one.message
    assert found({"prefill-context-parallel-size": 1}, DENSE) == []


def test_routed_experts_need_experts(found: Find) -> None:
    (one,) = found(ROUTED, DENSE)
    assert "org/dense has no experts" in one.message
    (of_table,) = found(ROUTED, replace(DENSE, source="table"))
    assert (one.surely, of_table.surely) == (True, False)


@pytest.mark.parametrize(
    "more",
    [{"enable-prefix-caching": False}, {"pipeline-parallel-size": 2}, {"decode-context-parallel-size": 2}],
)
def test_routed_experts_exclude_other_features(found: Find, more: dict[str, Any]) -> None:
    (one,) = found({**ROUTED, **more})
    assert next(iter(more)) in one.message


def test_releases_that_were_not_examined_and_other_builds_are_not_judged(found: Find) -> None:
    for case in ({"version": "0.31.0"}, {"version": None}, {"build": "rocm"}, {"build": "simulated"}):
        assert found({**PREFILL, **ROUTED}, DENSE, **case) == []

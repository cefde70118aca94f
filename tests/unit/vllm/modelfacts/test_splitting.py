"""Over how many GPUs vLLM can split quantized layers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization, expert_split_problem, split_problem

DENSE = ModelFacts("org/dense", heads=64, kv_heads=8, intermediate_size=29_568)
"""The shape of Qwen2.5-72B: 231 groups of 128 columns."""
EXPERTS = ModelFacts("org/experts", heads=32, kv_heads=4, experts=128, expert_intermediate_size=768)


def stored(facts: ModelFacts, method: str, group: int | None) -> ModelFacts:
    return replace(facts, quantization=Quantization(method, 4, group))


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_groups_of_rows_stay_together(method: str) -> None:
    facts = stored(DENSE, method, 128)
    assert split_problem(facts, 1) == ""
    assert split_problem(facts, 2) == "its quantization groups of 128 do not divide 29568 / 2 columns"
    assert split_problem(stored(DENSE, method, 32), 4) == ""


@pytest.mark.parametrize("method", ["compressed-tensors", "modelopt_fp4"])
@pytest.mark.parametrize("group", [-1, None])
def test_columns_with_one_scale_can_be_split_anywhere(method: str, group: int | None) -> None:
    assert split_problem(stored(DENSE, method, group), 4) == ""


def test_groups_of_experts() -> None:
    """vLLM halves those of AWQ and GPTQ down to 32, and no others."""
    problem = expert_split_problem(stored(EXPERTS, "compressed-tensors", 128), 4)
    assert problem == "its quantization groups of 128 do not divide experts of 768 / 4 columns"
    assert expert_split_problem(stored(EXPERTS, "compressed-tensors", 64), 4) == ""
    for method in ("awq", "gptq"):
        assert expert_split_problem(stored(EXPERTS, method, 128), 8) == ""
        problem = expert_split_problem(stored(EXPERTS, method, 128), 16)
        assert problem == "its quantization groups of 32 do not divide experts of 768 / 16 columns"

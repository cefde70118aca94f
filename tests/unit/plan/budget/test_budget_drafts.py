"""Draft models take memory: their weights, and layers of the KV cache."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.memory_flags import draft_model, draft_tensor
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.modelfacts.known import known_facts

GPU = GpuShape("NVIDIA L40S", 45.0)
DRAFT = "Qwen/Qwen3-0.6B"


def known(name: str) -> ModelFacts:
    facts = known_facts(name)
    assert facts is not None
    return facts


def speculative(**config: object) -> Flags:
    return {"speculative-config": json.dumps({"num_speculative_tokens": 3, **config}), "max-model-len": 8192}


def budget(flags: Flags, draft: ModelFacts | None, count: int = 1) -> MemoryBudget:
    found = estimate(known("Qwen/Qwen3-8B"), flags, [GPU] * count, release=(0, 33, 0), draft=draft)
    assert found is not None
    return found


def test_weights_of_a_known_draft_model_are_counted() -> None:
    flags = speculative(model=DRAFT)
    without, draft = budget(flags, None), budget(flags, known(DRAFT))
    size = 2 * (known(DRAFT).parameters or 0) / 2**30
    assert draft.weights_gib - without.weights_gib == pytest.approx(size)
    assert any("not counted" in text for text in without.assumed)
    assert not any("not counted" in text for text in draft.assumed)


def test_draft_kv_cache_is_counted_in_layers_of_the_model() -> None:
    """Both have 8 KV heads of 128, so the draft adds 28 layers to the model's 36."""
    flags = speculative(model=DRAFT)
    plain = budget({"max-model-len": 8192}, None)
    draft = budget(flags, known(DRAFT))
    assert plain.kv_bytes_per_token is not None
    assert draft.kv_bytes_per_token == plain.kv_bytes_per_token * (36 + 28) / 36


@pytest.mark.parametrize(
    "flags", [{"spec-model": DRAFT, "spec-tokens": 3}, {"spec-method": "draft_model", "spec-model": DRAFT}]
)
def test_flags_of_their_own_count_like_the_configuration(flags: Flags) -> None:
    """With ``--spec-model`` alone, the draft's KV cache was once not counted."""
    length: Flags = {"max-model-len": 8192}
    assert (
        budget({**flags, **length}, known(DRAFT)).kv_bytes_per_token
        == budget(speculative(model=DRAFT), known(DRAFT)).kv_bytes_per_token
    )
    by_name = budget({"spec-model": "ngram", "spec-tokens": 3, **length}, None)
    assert by_name.kv_bytes_per_token == budget(length, None).kv_bytes_per_token
    assert not any("draft model" in text for text in by_name.assumed)


def test_draft_is_split_like_the_model_unless_set() -> None:
    flags = {**speculative(model=DRAFT), "tensor-parallel-size": 2}
    whole = {**speculative(model=DRAFT, draft_tensor_parallel_size=1), "tensor-parallel-size": 2}
    assert draft_tensor(flags, 2) == 2
    assert draft_tensor(whole, 2) == 1
    size = 2 * (known(DRAFT).parameters or 0) / 2**30
    apart = budget(whole, known(DRAFT), 2).weights_gib - budget(flags, known(DRAFT), 2).weights_gib
    assert apart == pytest.approx(size / 2)


@pytest.mark.parametrize("config", [{"model": DRAFT}, {"method": "mtp"}])
def test_draft_weights_are_on_the_last_stage_only(config: dict[str, object]) -> None:
    stages: Flags = {"pipeline-parallel-size": 2}
    draft = known(DRAFT) if "model" in config else None
    plain, with_draft = budget(stages, None, 2), budget({**speculative(**config), **stages}, draft, 2)
    own = 2 * (known(DRAFT).parameters or 0) / 2**30 if draft is not None else 0.0
    more = [two.weights_gib - one.weights_gib for one, two in zip(plain.per_gpu, with_draft.per_gpu, strict=True)]
    assert more == pytest.approx([0.0, own])


def test_weights_with_unknown_layers_are_spread_over_the_stages() -> None:
    unknown = replace(known("Qwen/Qwen3-8B"), layers=())
    found = estimate(unknown, {"pipeline-parallel-size": 2}, [GPU] * 2, release=(0, 33, 0))
    whole = estimate(unknown, {}, [GPU], release=(0, 33, 0))
    assert found is not None
    assert whole is not None
    assert sum(gpu.weights_gib for gpu in found.per_gpu) == pytest.approx(whole.weights_gib)


def test_head_with_files_takes_their_size() -> None:
    head = replace(known(DRAFT), weight_bytes=850 * 2**20, layers=known(DRAFT).layers[:1])
    flags = speculative(model="org/eagle3-head", method="eagle3")
    assert budget(flags, head).weights_gib - budget(flags, None).weights_gib == pytest.approx(850 / 1024)


def test_assumed_draft_size_is_reported() -> None:
    bare = ModelFacts("org/draft-1B", source="table", parameters=10**9)
    assert budget(speculative(model="org/draft-1B"), bare).weights_gib > 16
    unknown = ModelFacts("org/draft", source="table")
    found = budget(speculative(model="org/draft"), unknown)
    assert any("draft model" in text for text in found.assumed)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ""),
        (speculative(method="ngram"), ""),
        (speculative(model="ngram"), ""),
        (speculative(method="mtp"), ""),
        (speculative(method="qwen3_next_mtp", model="org/model"), ""),
        (speculative(model=DRAFT), DRAFT),
        (speculative(model="org/head", method="eagle3"), "org/head"),
        ({"speculative-config.model": DRAFT}, DRAFT),
        ({"spec-model": DRAFT}, DRAFT),
        ({"speculative-config": "{broken"}, ""),
    ],
)
def test_flags_that_name_a_draft_model(flags: Flags, expected: str) -> None:
    assert draft_model(flags) == expected


def test_draft_model_in_an_ignored_object_is_not_counted() -> None:
    flags = {**speculative(model=DRAFT), "speculative-config.num_speculative_tokens": 2}
    assert draft_model(flags) == ""
    assert draft_model({**flags, "speculative-config.model": "own"}) == "own"

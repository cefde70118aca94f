"""vLLM accepts an offered change; otherwise it is offered without the flags that contradict it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.proposals import Target, acceptable, newly_refused
from vllm_launchers.plan.tensor_sizes import tensor_problem, tensor_sizes
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.flags.releases import release_table
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization
from vllm_launchers.vllm.release_defaults import Release

TABLE = release_table("0.33.0")
DENSE = ModelFacts(
    model="made/dense", layers=(LayerKind.FULL,) * 32, heads=32, kv_heads=8, hidden_size=4096,
    intermediate_size=14336, max_context=131_072,
)  # fmt: skip
BLOCKS = replace(
    DENSE, heads=32, kv_heads=4, experts=128, experts_per_token=8, expert_intermediate_size=768,
    quantization=Quantization("fp8", 8, block=(128, 128)),
)  # fmt: skip
"""Like Qwen3-30B-A3B-FP8: its experts can be split over 2 and 3 GPUs, its heads over 2 and 4."""


@pytest.mark.parametrize(
    ("flags", "changes", "offered"),
    [
        ({}, Changes(set={"max-model-len": 3584}), Changes(set={"max-model-len": 3584})),
        (
            {"long-prefill-token-threshold": 4096},
            Changes(set={"max-model-len": 3584}),
            Changes(set={"max-model-len": 3584}, unset=("long-prefill-token-threshold",)),
        ),
        (
            {"max-num-active-seqs": 300, "max-num-seqs": 400},
            Changes(set={"max-num-seqs": 2}),
            Changes(set={"max-num-seqs": 2}, unset=("max-num-active-seqs",)),
        ),
        (
            {"enable-expert-parallel": True, "enable-eplb": True, "tensor-parallel-size": 2,
             "eplb-config.num_redundant_experts": 1},
            Changes(unset=("enable-expert-parallel",)),
            Changes(unset=("enable-expert-parallel", "enable-eplb", "eplb-config.num_redundant_experts")),
        ),
        ({"enable-chunked-prefill": False, "max-num-batched-tokens": 512}, Changes(set={"max-model-len": 8192}), None),
        ({"max-num-seqs": 256}, Changes(set={"max-num-batched-tokens": 128}), None),
        (
            {"decode-context-parallel-size": 4, "tensor-parallel-size": 4},
            Changes(set={"tensor-parallel-size": 2}),
            None,
        ),
        ({}, Changes(set={"tensor-parallel-size": 3}), None),
        ({}, Changes(set={"attention-backend": "PALLAS"}), None),
        ({}, Changes(set={"pooler-config": "x"}), None),
        ({}, Changes(set={"structured-outputs-config": '{"disable_any_whitespace": true}'}), None),
        ({"num-redundant-experts": 1}, Changes(set={"eplb-config": '{"num_redundant_experts": 1}'}), None),
        ({"no-such-flag": 1}, Changes(set={"max-num-seqs": 8}), Changes(set={"max-num-seqs": 8})),
    ],
)  # fmt: skip
def test_refused_changes_are_completed_or_not_offered(flags: Flags, changes: Changes, offered: Changes | None) -> None:
    assert acceptable(Target(TABLE, DENSE), flags, changes) == offered
    assert (newly_refused(Target(TABLE, DENSE), flags, changes) == ()) is (changes == offered)


def test_step_is_not_made_too_small_for_whole_videos() -> None:
    smaller = Changes(set={"max-num-batched-tokens": 2048})
    seeing = replace(DENSE, model_type="gemma4", multimodal=True)
    assert acceptable(Target(TABLE, seeing), {}, smaller) is None
    assert acceptable(Target(TABLE, seeing), {"language-model-only": True}, smaller) == smaller


@pytest.mark.parametrize(("release", "offered"), [((0, 16, 0), False), ((0, 33, 0), True)])
def test_whole_experts_are_not_proposed_with_adapters_that_prevent_them(release: Release, offered: bool) -> None:
    whole = Changes(set={"enable-expert-parallel": True})
    flags: Flags = {"tensor-parallel-size": 4, "enable-lora": True}
    target = Target(None, BLOCKS, release=release)
    assert acceptable(target, flags, whole) == (whole if offered else None)
    assert acceptable(target, {"tensor-parallel-size": 4}, whole) == whole


def test_prefix_caching_is_proposed_without_flags_that_prevent_it() -> None:
    hybrid = replace(DENSE, model_type="qwen3_next", layers=(LayerKind.LINEAR, LayerKind.FULL) * 16)
    on = Changes(set={"enable-prefix-caching": True})
    whole: Flags = {"enable-chunked-prefill": False}
    assert acceptable(Target(None, hybrid, release=(0, 16, 0)), whole, on) == replace(on, unset=tuple(whole))
    assert acceptable(Target(None, DENSE, release=(0, 16, 0)), whole, on) == on


@pytest.mark.parametrize(
    ("facts", "now", "tokens", "offered"),
    [
        (replace(DENSE, multimodal=True), 16384, 256, False),
        (replace(DENSE, multimodal=True), None, 256, False),
        (replace(DENSE, multimodal=True), 256, 16384, True),
        (replace(DENSE, multimodal=True, model_type="gemma4"), 16384, 4096, True),
        (DENSE, 16384, 256, True),
    ],
)
def test_step_is_not_made_smaller_for_whole_images_of_unknown_size(
    facts: ModelFacts, now: int | None, tokens: int, offered: bool
) -> None:
    flags: Flags = {"disable-chunked-mm-input": True, **({} if now is None else {"max-num-batched-tokens": now})}
    changes = Changes(set={"max-num-batched-tokens": tokens})
    assert acceptable(Target(TABLE, facts), flags, changes) == (changes if offered else None)
    assert acceptable(Target(TABLE, facts), flags, Changes(set={"max-model-len": 4096})) is not None


@pytest.mark.parametrize(("gpu", "offered"), [(None, True), (GpuShape("NVIDIA L40S", 45.0), False)])
def test_derived_step_must_hold_the_sequences(gpu: GpuShape | None, offered: bool) -> None:
    more = Changes(set={"max-num-seqs": 4000})
    assert (newly_refused(Target(TABLE, DENSE, gpu), {}, more) == ()) is offered
    assert newly_refused(Target(TABLE, DENSE, gpu), {"max-num-batched-tokens": 8192}, more) == ()


def test_nothing_is_judged_without_a_table_and_a_model() -> None:
    assert newly_refused(Target(), {}, Changes(set={"max-num-seqs": "x", "tensor-parallel-size": 3})) == ()


@pytest.mark.parametrize(
    ("facts", "flags", "sizes"),
    [
        (DENSE, {}, [1, 2, 4, 8]),
        (DENSE, {"decode-context-parallel-size": 4}, [4, 8]),
        (BLOCKS, {}, [1, 2]),
        (BLOCKS, {"enable-expert-parallel": True}, [1, 2, 4, 8]),
        (BLOCKS, {"data-parallel-size": 2}, [1]),
        (None, {}, [1, 2, 4, 8]),
        (None, {"decode-context-parallel-size": 2}, [2, 4, 8]),
    ],
)
def test_sizes_divide_heads_experts_and_set_flags(facts: ModelFacts | None, flags: Flags, sizes: list[int]) -> None:
    assert tensor_sizes(facts, flags, 9) == sizes
    assert not any(tensor_problem(facts, {**flags, "tensor-parallel-size": size}) for size in sizes)


@pytest.mark.parametrize("flags", [{}, {"enable-chunked-prefill": True}])
def test_steps_of_an_encoder_hold_a_whole_prompt(flags: Flags) -> None:
    target = Target(TABLE, replace(DENSE, architecture="BertModel", max_context=8192), release=(0, 33, 0))
    assert acceptable(target, flags, Changes(set={"max-num-batched-tokens": 4096})) is None
    shorter = Changes(set={"max-num-batched-tokens": 4096, "max-model-len": 4096})
    assert acceptable(target, flags, shorter) == shorter

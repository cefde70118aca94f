"""Memory of an encoder: its peak at startup, and the embeddings kept during it."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.estimate import activations, encoder_bytes, patch_bytes
from vllm_launchers.plan.budget.memory_flags import EffectiveFlags, effective_flags, least_step, max_tokens_per_mm_item
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.encoder import encoder_of
from vllm_launchers.vllm.modelfacts.facts import Encoder, ModelFacts
from vllm_launchers.vllm.modelfacts.known import known_facts

GPU = GpuShape("NVIDIA L40S", 45.0)
GIB = 2**30
NEW = (0, 33, 0)


def seeing(model_type: str = "qwen2_5_vl") -> ModelFacts:
    facts = known_facts("Qwen/Qwen2.5-7B-Instruct")
    assert facts is not None
    return replace(facts, model_type=model_type, multimodal=True, encoder=encoder_of({}, model_type))


def settings_of(facts: ModelFacts, flags: Flags, release: tuple[int, int, int] = NEW) -> EffectiveFlags:
    return effective_flags(facts, {"max-model-len": 16384, **flags}, release, {}, GPU, [])


def measured(facts: ModelFacts, flags: Flags) -> tuple[float, float]:
    return encoder_bytes(facts, settings_of(facts, flags), facts.hidden_size or 0)


def test_item_larger_than_a_step_is_run_whole() -> None:
    """The budget is the largest item's tokens if a step has fewer (``compute_mm_encoder_budget``)."""
    facts = seeing()
    assert measured(facts, {"max-num-batched-tokens": 2048}) == measured(facts, {"max-num-batched-tokens": 16384})
    peak, kept = measured(facts, {"max-num-batched-tokens": 2048})
    assert kept == 16384 * 3584 * 2
    assert 1.5 < peak / GIB < 3


def test_small_items_fill_a_step() -> None:
    facts = seeing("gemma3")
    few, many = measured(facts, {"max-num-batched-tokens": 2048}), measured(facts, {"max-num-batched-tokens": 8192})
    assert many[0] == pytest.approx(4 * few[0])
    assert many[1] == 32 * 256 * 3584 * 2


@pytest.mark.parametrize(
    ("length", "release", "pictures"),
    [
        (4096, NEW, 1),
        (16384, NEW, 1),
        (32768, NEW, 2),
        (128_000, NEW, 7),
        (1_000_000, NEW, 7),
        (1_000_000, (0, 10, 2), 8),
    ],
)
def test_longest_video_is_the_largest_item(length: int, release: tuple[int, int, int], pictures: int) -> None:
    facts = seeing("qwen2_vl")
    one = encoder_bytes(facts, settings_of(facts, {}), 3584)
    settings = settings_of(facts, {"max-model-len": length}, release)
    assert encoder_bytes(facts, settings, 3584) == (pictures * one[0], pictures * one[1])


@pytest.mark.parametrize("limit", ['{"video": 0}', '{"image": 2, "video": {"count": 0}}'])
def test_without_videos_one_image_is_the_largest_item(limit: str) -> None:
    facts = seeing("qwen2_vl")
    one = measured(facts, {})
    assert measured(facts, {"max-model-len": 128_000, "limit-mm-per-prompt": limit}) == one
    assert measured(facts, {"max-model-len": 128_000, "limit-mm-per-prompt": '{"video": 1}'})[0] == 7 * one[0]


def test_items_are_limited_by_the_requests() -> None:
    facts = seeing("gemma3")
    alone = measured(facts, {"max-num-batched-tokens": 8192, "max-num-seqs": 1, "max-model-len": 600})
    assert alone[1] == 2 * 256 * 3584 * 2


def test_fewer_pixels_take_less() -> None:
    facts = seeing()
    for limits in (
        {"max_pixels": 1_003_520},
        {"size": {"longest_edge": 1_003_520}},
        {"images_kwargs": {"max_pixels": 1_003_520}},
    ):
        flags: Flags = {
            "mm-processor-kwargs": json.dumps(limits),
            "max-num-batched-tokens": 1280,
            "max-model-len": 2048,
        }
        limited = measured(facts, flags)
        assert limited[1] == 1280 * 3584 * 2
        assert limited[0] < measured(facts, {})[0] / 10


@pytest.mark.parametrize(
    "flags",
    [{"skip-mm-profiling": True}, {"language-model-only": True}, {"limit-mm-per-prompt": '{"image": 0, "video": 0}'}],
)
def test_disabled_encoder_takes_nothing(flags: Flags) -> None:
    assert measured(seeing(), flags) == (0.0, 0.0)


def test_one_remaining_modality_is_profiled() -> None:
    assert measured(seeing(), {"limit-mm-per-prompt": '{"image": 0}'})[0] > 0
    assert measured(seeing("gemma3"), {"limit-mm-per-prompt": '{"image": 0}'})[0] == 0


def test_text_model_has_no_encoder() -> None:
    assert measured(replace(seeing(), multimodal=False, encoder=None), {}) == (0.0, 0.0)
    peak, kept = measured(replace(seeing(), encoder=None), {})
    assert 0 < peak < GIB
    assert kept == 0


def test_tensor_parallelism_splits_the_encoder_except_its_residual() -> None:
    facts = seeing()
    whole, half = measured(facts, {})[0], measured(facts, {"tensor-parallel-size": 2})[0]
    assert whole / 2 < half < whole
    data = measured(facts, {"tensor-parallel-size": 2, "mm-encoder-tp-mode": "data"})[0]
    assert data == whole  # one large picture cannot be split


def test_data_parallel_encoders_share_items() -> None:
    facts = seeing("gemma3")
    flags: Flags = {"max-num-batched-tokens": 8192}
    data = measured(facts, {**flags, "tensor-parallel-size": 4, "mm-encoder-tp-mode": "data"})[0]
    assert data == pytest.approx(measured(facts, flags)[0] / 4)


def test_embeddings_are_kept_while_the_language_model_runs() -> None:
    """With long steps, the language model has the peak, and the embeddings are added to it."""
    facts = seeing("gemma3")
    settings = settings_of(facts, {"max-num-batched-tokens": 16384, "max-num-seqs": 1})
    text = replace(facts, multimodal=False, encoder=None)
    kept = encoder_bytes(facts, settings, 3584)[1]
    language = activations(text, settings, [], sorts=False)
    peak = encoder_bytes(facts, settings, 3584)[0]
    assert activations(facts, settings, [], sorts=False) == max(language + kept, peak)
    assert kept > 0


def test_peak_memory_of_an_encoder_layer() -> None:
    narrow = Encoder(1024, 4096, False, False, 588, 1.0, 576)
    assert patch_bytes(narrow, 1) == 2 * 588 + 4 * 1024 + 4 * 4096  # the network
    assert patch_bytes(replace(narrow, rotary=True), 1) == 2 * 588 + 26 * 1024  # attention
    assert patch_bytes(replace(narrow, gated=True), 1) == 2 * 588 + 4 * 1024 + 6 * 4096
    assert patch_bytes(narrow, 4) < patch_bytes(narrow, 1) / 2


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({}, 2496),
        ({"limit-mm-per-prompt": '{"image": 0}'}, 2496),
        ({"limit-mm-per-prompt": '{"video": 0}'}, 750),
        ({"limit-mm-per-prompt": '{"video": {"count": 0}, "audio": 0}'}, 280),
        ({"limit-mm-per-prompt": '{"video": 0, "audio": 0, "image": 0}'}, 0),
        ({"language-model-only": True}, 0),
    ],
)
def test_step_holds_the_largest_unchunked_item(flags: Flags, tokens: int) -> None:
    assert max_tokens_per_mm_item(seeing("gemma4"), flags) == tokens
    assert max_tokens_per_mm_item(seeing(), flags) == 0
    assert max_tokens_per_mm_item(replace(seeing("gemma4"), multimodal=False), flags) == 0
    assert max_tokens_per_mm_item(None, flags) == 0


@pytest.mark.parametrize(
    ("flags", "release", "tokens"),
    [
        ({}, NEW, 300),
        ({"enable-chunked-prefill": False}, NEW, 4096),
        ({"enable-chunked-prefill": False}, (0, 11, 0), 300),
        ({"enable-chunked-prefill": False, "runner": "pooling"}, (0, 11, 0), 4096),
    ],
)
def test_smallest_step_holds_sequences_items_blocks_and_whole_prompts(
    flags: Flags, release: tuple[int, int, int], tokens: int
) -> None:
    assert least_step(flags, release, sequences=300, context=4096, mm_item=280, state_block=64) == tokens
    assert least_step(flags, release) == 1
    assert least_step(flags, release, mm_item=5000) == least_step(flags, release, state_block=5000) == 5000

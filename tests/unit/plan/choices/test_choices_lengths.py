"""Context, number of sequences, tokens per step, prefix caching and chunked prefill follow from the traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Host
from vllm_launchers.plan.budget.budget import MemoryBudget
from vllm_launchers.plan.choices.choice import Choice, SeenRoom, Source
from vllm_launchers.plan.choices.lengths import rounded_up
from vllm_launchers.plan.model_conditions import broken_by_cached_states
from vllm_launchers.presets.model import FlagSetting, Workload
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts
from vllm_launchers.vllm.release_defaults import Release

Chosen = Callable[..., dict[str, Choice]]


def work(given: int = 3072, made: int = 768, reuse: float = 0.5, flying: int = 64) -> Workload:
    return Workload(input_tokens_p95=given, output_tokens_p95=made, prefix_reuse=reuse, concurrency=flying)


def holds(requests: float) -> Callable[..., MemoryBudget]:
    def budget(flags: Any, /) -> MemoryBudget:
        return MemoryBudget(10.0, 2.0, 0.5, 20.0, 1e5, 200_000, 4096, requests / 2, concurrency_p95=requests)

    return budget


@pytest.mark.parametrize(
    ("tokens", "length"),
    [(1, 256), (300, 512), (3840, 4096), (3584, 3584), (13_312, 14_336), (124_928, 131_072), (10**6, 2**20)],
)
def test_lengths_are_rounded_up(tokens: int, length: int) -> None:
    assert rounded_up(tokens) == length


def test_context_comes_from_the_traffic_not_the_architecture(chosen: Chosen) -> None:
    found = chosen("8b", "h100")["max-model-len"]
    assert (found.value, found.source) == (4096, Source.WORKLOAD)
    assert "3,072 prompt + 768 answer" in found.reason
    assert "131,072" in found.reason
    assert "rejected" in found.tradeoff


def test_context_is_limited_by_the_model(chosen: Chosen) -> None:
    found = chosen("8b", "h100", work(200_000, 2000))["max-model-len"]
    assert (found.value, found.source) == (131_072, Source.MODEL)
    assert "another model" in found.tradeoff


def test_context_of_an_unknown_model_is_that_of_the_traffic(chosen: Chosen) -> None:
    assert chosen(None, None)["max-model-len"].value == 4096
    unknown = ModelFacts(model="made/unknown")
    assert chosen(None, "h100", facts=unknown)["max-model-len"].value == 4096


@pytest.mark.parametrize(("flying", "sequences"), [(1, 2), (4, 8), (9, 24), (16, 32), (64, 128), (5000, 1024)])
def test_sequences_have_headroom(chosen: Chosen, flying: int, sequences: int) -> None:
    found = chosen(None, None, work(flying=flying))["max-num-seqs"]
    assert (found.value, found.source) == (sequences, Source.WORKLOAD)


@pytest.mark.parametrize(
    ("held", "sequences", "tradeoff"),
    [(500.0, 128, ""), (90.7, 88, "Bursts queue"), (37.0, 32, "About 32 of 64 queue"), (9.9, 9, "55 of 64")],
)
def test_sequences_fit_the_cache(chosen: Chosen, held: float, sequences: int, tradeoff: str) -> None:
    found = chosen("8b", "h100", budget=holds(held))["max-num-seqs"]
    assert found.value == sequences
    assert tradeoff in found.tradeoff
    assert (found.source is Source.MACHINE) == bool(tradeoff)


@pytest.mark.parametrize(
    ("ran", "each", "sequences", "reason"),
    [
        (49, 0.0155, 49, "49 fit in 85% of the KV cache"),
        (49, 0.014, 56, "so 56 fit"),
        (0, 0.05, 16, "so 16 fit"),
        (200, 0.004, 208, "so 208 fit"),
    ],
)
def test_sequences_of_a_server_with_history_follow_observations(
    chosen: Chosen, ran: int, each: float, sequences: int, reason: str
) -> None:
    seen = SeenRoom(0.85, each, ran, 40_000)
    found = chosen("8b", "h100", budget=holds(13.0), seen=seen)["max-num-seqs"]
    assert found.value == sequences
    assert reason in found.reason
    assert "observed" in found.reason
    assert "p95 length" not in found.reason


def test_sequences_are_per_copy(chosen: Chosen) -> None:
    two = chosen("8b", "2xh100", set={"data-parallel-size": 2}, budget=holds(500.0))
    assert two["max-num-seqs"].value == 64
    assert "2 replicas" in two["max-num-seqs"].reason


def test_sequences_are_limited_by_a_set_step(chosen: Chosen) -> None:
    assert chosen("8b", "h100", set={"max-num-batched-tokens": 100})["max-num-seqs"].value == 100


@pytest.mark.parametrize(
    ("host", "workload", "tokens"),
    [
        ("a6000", work(), 2048),
        ("h100", work(), 8192),
        ("a6000", work(100_000, 2000, 0.0, 2), 8192),
        ("a6000", work(4000, 50, 0.0, 200), 2**14),
        ("h100", work(100, 50, 0.0, 1), 512),
    ],
)
def test_steps_keep_up_with_the_prompts(chosen: Chosen, host: str, workload: Workload, tokens: int) -> None:
    # 200 streams that each bring 80 prompt tokens per output token need 16,200 tokens per step.
    found = chosen("4b", host, workload, budget=holds(500.0))
    assert found["max-num-batched-tokens"].value == tokens


def test_reused_prompts_need_no_tokens_in_a_step(chosen: Chosen) -> None:
    unique, reused = (work(4000, 50, reuse, 200) for reuse in (0.0, 0.9))
    steps = [
        chosen("4b", "a6000", one, budget=holds(500.0))["max-num-batched-tokens"].value for one in (unique, reused)
    ]
    assert steps == [16_384, 4096]


def test_a100_takes_small_steps_like_vllm(chosen: Chosen, hosts: dict[str, Callable[[], Host]]) -> None:
    h100 = hosts["h100"]()
    a100 = replace(h100, gpus=(replace(h100.gpus[0], name="NVIDIA A100-SXM4-80GB", compute_capability="8.0"),))
    steps = [chosen("8b", host)["max-num-batched-tokens"].value for host in (h100, a100)]
    assert steps == [8192, 2048]


def test_requests_never_exceed_the_context(chosen: Chosen) -> None:
    # The traffic's p95 is three times the model's limit, so requests of the model's full length count.
    found = chosen("8b-awq", "a6000", work(122_880, 2048, 0.05, 2))
    assert found["max-model-len"].value == 131_072
    short = replace_context(chosen, 32_768)
    assert short["max-model-len"].value == 32_768
    assert short["max-num-seqs"].value == 4
    stretched = replace_context(chosen, 32_768, release=(0, 29, 0), stretched_context=65_536)
    assert stretched["max-model-len"].value == 65_536


def replace_context(chosen: Chosen, context: int, *, release: Release = (0, 33, 0), **other: Any) -> dict[str, Choice]:
    facts = ModelFacts(
        model="made/short", layers=(LayerKind.FULL,) * 32, heads=32, kv_heads=8, head_dim=128, dtype="bfloat16",
        hidden_size=4096, vocabulary=128_256, intermediate_size=14_336, weight_bytes=16 * 10**9, max_context=context,
        **other,
    )  # fmt: skip
    return chosen(None, "a6000", work(122_880, 2048, 0.05, 2), facts=facts, release=release)


def test_sequences_are_reconsidered_with_all_flags_set(chosen: Chosen) -> None:
    def budget(flags: Any, /) -> MemoryBudget:
        held = 60.0 if "max-num-batched-tokens" in flags else 500.0
        return MemoryBudget(10.0, 2.0, 0.5, 20.0, 1e5, 200_000, 4096, held / 2, concurrency_p95=held)

    assert chosen("8b", "h100", budget=budget)["max-num-seqs"].value == 56


def test_step_has_a_token_for_every_sequence(chosen: Chosen) -> None:
    assert chosen("8b", "a6000", set={"max-num-seqs": 9000})["max-num-batched-tokens"].value == 9000


def test_unchunked_prompt_must_fit_a_step(chosen: Chosen) -> None:
    found = chosen("8b", "a6000", set={"enable-chunked-prefill": False})["max-num-batched-tokens"]
    assert found.value == 4096
    assert "whole prompt" in found.reason


@pytest.mark.parametrize("over_preset", [False, True])
def test_step_holds_any_prompt_of_an_encoder(chosen: Chosen, models: dict[str, ModelFacts], over_preset: bool) -> None:
    encoder = replace(models["4b"], architecture="XLMRobertaModel", max_context=8194)
    preset = {"max-num-batched-tokens": FlagSetting(1024, "r"), "enable-chunked-prefill": FlagSetting(True, "r")}
    found = chosen(None, "h100", work(2000, 1), facts=encoder, preset=preset, over_preset=over_preset)
    assert found["enable-chunked-prefill"].value is None
    assert int(str(found["max-num-batched-tokens"].value)) >= int(str(found["max-model-len"].value))


def test_image_must_fit_a_step(chosen: Chosen) -> None:
    facts = replace(ModelFacts(model="made/eyes"), multimodal=True, max_context=32_768)
    assert chosen(None, "a6000", facts=facts)["max-num-batched-tokens"].value == 8192


def test_step_holds_an_unchunked_video(chosen: Chosen, models: dict[str, ModelFacts]) -> None:
    seeing = replace(models["8b"], model_type="gemma4", multimodal=True)
    few = work(300, 50, 0.0, 1)
    assert chosen(None, "h100", few, facts=seeing, budget=holds(500.0))["max-num-batched-tokens"].value == 2496
    kept = {"max-num-batched-tokens": FlagSetting(value=2048, why="small")}
    found = chosen(None, "a6000", few, facts=seeing, preset=kept, over_preset=True, budget=holds(500.0))
    assert found["max-num-batched-tokens"].value == 2496


@pytest.mark.parametrize(
    "flags", [{"spec-method": "ngram", "spec-tokens": 3}, {"speculative-config.method": "ngram"}], ids=["short", "key"]
)
def test_speculative_decoding_takes_large_steps_in_every_form(chosen: Chosen, flags: dict[str, Any]) -> None:
    assert chosen("8b", "a6000", set=flags)["max-num-batched-tokens"].value == 8192


def test_sequences_have_room_for_their_drafts(chosen: Chosen) -> None:
    drafts: Flags = {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 5}'}
    flags: Flags = {**drafts, "max-num-batched-tokens": 192}
    found = chosen("8b", "h100", work(flying=64), set=flags)["max-num-seqs"]
    assert found.value == 32
    assert "with their drafts" in found.reason
    many = chosen("8b", "h100", work(flying=64), set={**drafts, "max-num-seqs": 2048})["max-num-batched-tokens"]
    assert many.value == 2048 * 6


@pytest.mark.parametrize(("reuse", "value"), [(0.9, True), (0.36, True), (0.35, None), (0.2, None), (0.05, False)])
def test_prefix_caching_follows_the_reuse(chosen: Chosen, reuse: float, value: bool | None) -> None:
    found = chosen("8b", "h100", work(reuse=reuse))["enable-prefix-caching"]
    assert found.value is value
    assert f"{reuse:.0%}" in found.reason


@pytest.mark.parametrize(
    ("release", "reuse", "value", "words"),
    [
        ((0, 14, 1), 0.9, None, "this release of vLLM can't"),
        ((0, 25, 1), 0.9, True, "computed once"),
        ((0, 25, 1), 0.2, None, "vLLM's default (off for linear-attention layers) stays"),
        ((0, 27, 0), 0.2, None, "default (off for linear-attention layers)"),
        ((0, 28, 0), 0.2, None, "vLLM's default (on) stays"),
    ],
)
def test_linear_layer_prefix_caching_follows_the_release(
    chosen: Chosen, models: dict[str, ModelFacts], release: Any, reuse: float, value: bool | None, words: str
) -> None:
    linear = replace(models["8b"], layers=(LayerKind.LINEAR, LayerKind.FULL) * 16)
    found = chosen(None, "h100", work(reuse=reuse), facts=linear, release=release)["enable-prefix-caching"]
    assert found.value is value
    assert words in found.reason


DRAFTS: Flags = {"speculative-config": '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}'}
WHOLE_PROMPTS: Flags = {"enable-chunked-prefill": False, "max-num-batched-tokens": 8192}


@pytest.mark.parametrize(
    ("release", "flags", "value"),
    [
        ((0, 16, 0), {}, True),
        ((0, 16, 0), DRAFTS, None),
        ((0, 17, 0), DRAFTS, True),
        ((0, 25, 0), {"disable-chunked-mm-input": True}, None),
        ((0, 25, 0), WHOLE_PROMPTS, None),
        ((0, 33, 0), WHOLE_PROMPTS, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("by_preset", [True, False])
def test_linear_layer_prefixes_are_not_cached_with_flags_that_prevent_it(
    chosen: Chosen, models: dict[str, ModelFacts], release: Release, flags: Flags, value: bool | None, by_preset: bool
) -> None:
    linear = replace(models["8b"], layers=(LayerKind.LINEAR, LayerKind.FULL) * 16, model_type="qwen3_next")
    preset = {"enable-prefix-caching": FlagSetting(value=True, why="shared")} if by_preset else {}
    found = chosen(None, "h100", work(reuse=0.9), facts=linear, release=release, set=flags, preset=preset)
    assert found["enable-prefix-caching"].value is value
    assert value or "can't cache prefixes of linear-attention layers with the other flags" in (
        found["enable-prefix-caching"].reason
    )
    chosen_flags = {name: choice.value for name, choice in found.items() if choice.value is not None}
    assert not list(broken_by_cached_states(linear, chosen_flags, release))


def test_linear_layer_prefixes_of_unique_prompts_are_never_cached(
    chosen: Chosen, models: dict[str, ModelFacts]
) -> None:
    linear = replace(models["8b"], layers=(LayerKind.LINEAR, LayerKind.FULL) * 16, model_type="qwen3_next")
    found = chosen(None, "h100", work(reuse=0.0), facts=linear, set=WHOLE_PROMPTS)["enable-prefix-caching"]
    assert (found.value, found.source) == (False, Source.WORKLOAD)


def test_sequences_of_a_preset_are_no_more_than_there_are_states(chosen: Chosen, models: dict[str, ModelFacts]) -> None:
    linear = replace(models["8b"], layers=(LayerKind.LINEAR, LayerKind.FULL) * 16, state_bytes=32 * 2**20)
    preset = {"max-num-seqs": FlagSetting(value=512, why="throughput")}
    found = chosen(None, "a6000", facts=linear, preset=preset)["max-num-seqs"]
    assert found.source is Source.MACHINE
    assert isinstance(found.value, int)
    assert found.value < 64
    assert "each takes one for its Mamba or linear-attention state" in found.reason
    asked = chosen(None, "a6000", facts=linear, preset=preset, set={"max-num-seqs": 256})["max-num-seqs"]
    assert (asked.value, asked.source) == (256, Source.YOU)
    older = chosen(None, "a6000", facts=linear, preset=preset, release=(0, 19, 0))["max-num-seqs"]
    assert (older.value, older.source) == (512, Source.PRESET)


@pytest.mark.parametrize(("ran", "value", "words"), [(0, 40, "about 44"), (48, 48, "48")])
def test_sequences_are_no_more_than_there_are_states(chosen: Chosen, ran: int, value: int, words: str) -> None:
    def budget(flags: Any, /) -> MemoryBudget:
        return replace(holds(1000)(flags), most_sequences=44)

    seen = SeenRoom(objective=0.85, each=0.001, ran=ran)
    found = chosen("8b", "h100", budget=budget, seen=seen)["max-num-seqs"]
    assert found.value == value
    assert words in found.reason


def test_prefixes_of_models_without_attention_are_not_cached_by_default(
    chosen: Chosen, models: dict[str, ModelFacts]
) -> None:
    for layers in ((LayerKind.LINEAR,) * 32, (LayerKind.LINEAR, LayerKind.NONE) * 16):
        mamba = replace(models["8b"], layers=layers, model_type="mamba2")
        assert "(off for linear" in chosen(None, "h100", work(reuse=0.2), facts=mamba)["enable-prefix-caching"].reason


@pytest.mark.parametrize(
    ("given", "flying", "value"), [(3072, 64, True), (400, 64, True), (3072, 1, True), (400, 1, None)]
)
def test_prefill_is_chunked_except_for_short_prompts_on_an_idle_gpu(
    chosen: Chosen, given: int, flying: int, value: bool | None
) -> None:
    assert chosen("8b", "h100", work(given, flying=flying))["enable-chunked-prefill"].value is value


def test_measured_traffic_overrides_the_preset(chosen: Chosen) -> None:
    preset = {
        "max-model-len": FlagSetting(value=32_768, why="long"),
        "enable-prefix-caching": FlagSetting(value=False, why="unique"),
        "gpu-memory-utilization": FlagSetting(value=0.9, why="room"),
    }
    seen = chosen("8b", "h100", preset=preset, over_preset=True)
    assert (seen["max-model-len"].value, seen["max-model-len"].source) == (4096, Source.WORKLOAD)
    assert seen["enable-prefix-caching"].value is True
    assert seen["gpu-memory-utilization"] == Choice("gpu-memory-utilization", 0.9, "room", Source.PRESET)
    kept = chosen("8b", "h100", work(reuse=0.2), preset=preset, over_preset=True)["enable-prefix-caching"]
    assert (kept.value, kept.source) == (False, Source.PRESET)


def test_too_small_step_is_the_reason_for_fewer_sequences(chosen: Chosen) -> None:
    reason = chosen("8b", "h100", set={"max-num-batched-tokens": 100})["max-num-seqs"].reason
    assert "as many sequences as tokens per step: 100" in reason
    assert "headroom" not in reason

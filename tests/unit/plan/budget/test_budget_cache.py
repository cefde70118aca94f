"""Bytes, blocks and concurrency of the KV cache, compared with manual calculations according to vLLM's rules."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from fakes.reported_cache import cache_tokens
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.memory_flags import cache_dtype
from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization
from vllm_launchers.vllm.release_defaults import Release

FULL, SLIDING, CHUNKED, LINEAR = LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.LINEAR
GPU = GpuShape("NVIDIA RTX A6000", usable_gib=47.4)
GIB = 2**30


def dense(layers: int | tuple[LayerKind, ...] = 32, kv_heads: int = 8, **more: object) -> ModelFacts:
    known = ModelFacts(
        model="someone/model-8B",
        layers=(FULL,) * layers if isinstance(layers, int) else layers,
        hidden_size=4096,
        intermediate_size=14336,
        heads=32,
        kv_heads=kv_heads,
        head_dim=128,
        vocabulary=128256,
        max_context=131072,
        dtype="bfloat16",
        weight_bytes=16 * 10**9,
    )
    return replace(known, **more)  # type: ignore[arg-type]


LATENT = dense(61, 1, kv_lora_rank=512, qk_rope_head_dim=64, model_type="deepseek_v3", head_dim=576)


WITH_SCALES = dense(32, quantization=Quantization("modelopt", 8), kv_cache_quantization="fp8")


def token_bytes(facts: ModelFacts, **flags: FlagValue) -> float | None:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    budget = estimate(facts, named, [replace(GPU, usable_gib=2000.0)])
    assert budget is not None
    return budget.kv_bytes_per_token


@pytest.mark.parametrize(
    ("facts", "flags", "expected"),
    [
        (dense(32), {}, 131072),
        (dense(80), {}, 327680),
        (dense(80), {"tensor_parallel_size": 8}, 40960),
        (dense(80), {"tensor_parallel_size": 16}, 40960),
        (dense(32), {"kv_cache_dtype": "fp8"}, 65536),
        (dense(32), {"kv_cache_dtype": "fp8_e5m2", "tensor_parallel_size": 2}, 32768),
        (WITH_SCALES, {}, 65536),
        (WITH_SCALES, {"kv_cache_dtype": "bfloat16"}, 131072),
        (WITH_SCALES, {"kv_cache_dtype": "auto"}, 65536),
        (dense(32), {"dtype": "float32"}, 262144),
        (dense(32, dtype="float32"), {}, 131072),
        (dense(32, head_dim=None), {}, 131072),
        (dense(32, head_dim=192, v_head_dim=128), {}, 32 * 8 * (192 + 128) * 2),
        (dense(80), {"pipeline_parallel_size": 4}, 81920),
        (dense(31), {"pipeline_parallel_size": 2}, 16 * 4096),
        (LATENT, {}, 70272),
        (LATENT, {"tensor_parallel_size": 8}, 70272),
        (LATENT, {"kv_cache_dtype": "fp8"}, 61 * 576),
        (LATENT, {"kv_cache_dtype": "fp8_ds_mla"}, 61 * 656),
        (replace(LATENT, model_type="deepseek_v32"), {"kv_cache_dtype": "fp8"}, 61 * (656 + 132)),
        (dense(48, 4, experts=128, experts_per_token=8), {}, 98304),
        (dense(32), {"speculative_config": '{"method": "mtp", "num_speculative_tokens": 2}'}, 33 * 4096),
        (dense(32), {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}, 131072),
    ],
)
def test_bytes_per_token(facts: ModelFacts, flags: dict[str, FlagValue], expected: int) -> None:
    assert token_bytes(facts, **flags) == expected


@pytest.mark.parametrize(
    ("method", "release", "asked", "expected"),
    [
        ("modelopt", (0, 13, 0), "auto", "auto"),
        ("modelopt_fp4", (0, 14, 0), "auto", "fp8"),
        ("modelopt", (0, 14, 0), "bfloat16", "bfloat16"),
        ("modelopt", None, "auto", "fp8"),
        ("compressed-tensors", (0, 14, 1), "auto", "auto"),
        ("compressed-tensors", (0, 16, 0), "auto", "fp8"),
        ("compressed-tensors", (0, 21, 0), "bfloat16", "fp8"),
        ("compressed-tensors", (0, 22, 0), "bfloat16", "bfloat16"),
        ("quark", (0, 33, 0), "auto", "auto"),
    ],
)
def test_cache_in_the_format_of_the_scales(method: str, release: Release | None, asked: str, expected: str) -> None:
    """Releases before these ignore that a checkpoint has scales for an FP8 cache."""
    facts = replace(WITH_SCALES, quantization=Quantization(method, 8))
    assert cache_dtype(facts, {"kv-cache-dtype": asked}, release) == expected


@pytest.mark.parametrize(("method", "expected"), [("modelopt", "fp8"), ("compressed-tensors", "auto")])
def test_latent_attention_reads_no_scheme_of_compressed_tensors(method: str, expected: str) -> None:
    facts = replace(LATENT, quantization=Quantization(method, 8), kv_cache_quantization="fp8")
    assert cache_dtype(facts, {}, (0, 33, 0)) == expected


def given_cache(
    facts: ModelFacts, gib: float, release: tuple[int, int, int] = (0, 25, 0), **flags: FlagValue
) -> tuple[int, float]:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    found = cache_tokens(facts, named, gib, GPU, release=release)
    assert found is not None
    tokens, concurrency = found
    assert concurrency is not None
    return tokens, concurrency


def test_plain_concurrency_counts_whole_blocks() -> None:
    # 1 GiB / (16 × 131,072) = 512 blocks; 100 tokens take 7 of them.
    tokens, concurrency = given_cache(dense(), 1.0, max_model_len=100)
    assert concurrency == pytest.approx(512 / 7)
    assert tokens == int(512 / 7 * 100)


def test_tokens_were_blocks_times_block_size_before_0_21() -> None:
    assert given_cache(dense(), 1.0, (0, 20, 0), max_model_len=100)[0] == 512 * 16
    assert given_cache(dense(), 1.0, (0, 20, 0), max_model_len=100, block_size=64)[0] == 128 * 64


WINDOWED = dense(layers=(SLIDING, SLIDING, SLIDING, FULL) * 8, kv_heads=32, window=4096)


def connector(*names: str) -> str:
    """The configuration of a KV connector, or of several together."""
    parts: list[dict[str, object]] = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}}
    return json.dumps(parts[0] if len(parts) == 1 else several)


@pytest.mark.parametrize(
    ("release", "flags", "separate"),
    [
        ((0, 33, 0), {}, True),
        ((0, 33, 0), {"disable_hybrid_kv_cache_manager": True}, False),
        ((0, 10, 2), {"kv_transfer_config": connector("NixlConnector")}, False),
        ((0, 21, 0), {"kv_transfer_config": connector("NixlConnector")}, False),
        ((0, 22, 0), {"kv_transfer_config": connector("NixlConnector")}, True),
        ((0, 33, 0), {"kv_transfer_config": connector("LMCacheConnectorV1")}, False),
        ((0, 33, 0), {"kv_transfer_config.kv_connector": "LMCacheConnectorV1"}, False),
        ((0, 33, 0), {"kv_transfer_config": connector("OwnConnector")}, True),
        ((0, 33, 0), {"kv_transfer_config": connector("NixlConnector", "LMCacheConnectorV1")}, False),
        ((0, 33, 0), {"kv_transfer_config": connector("NixlConnector", "OffloadingConnector")}, True),
        ((0, 12, 0), {"kv_transfer_config": connector("X"), "disable_hybrid_kv_cache_manager": False}, False),
        ((0, 13, 0), {"kv_transfer_config": connector("X"), "disable_hybrid_kv_cache_manager": False}, True),
        ((0, 19, 0), {"kv_events_config": '{"enable_kv_cache_events": true}'}, False),
        ((0, 20, 0), {"kv_events_config": '{"enable_kv_cache_events": true}'}, True),
    ],
)
def test_windows_are_kept_only_with_the_hybrid_cache_manager(
    release: tuple[int, int, int], flags: dict[str, FlagValue], separate: bool
) -> None:
    default, found, full = (
        given_cache(facts, 20.0, release, max_model_len=65536, **more)[1]
        for facts, more in ((WINDOWED, {}), (WINDOWED, flags), (dense(kv_heads=32), {}))
    )
    assert default > 1.5 * full
    assert found == (default if separate else full)


@pytest.mark.parametrize(
    ("release", "variable", "flags", "separate"),
    [
        ((0, 13, 0), {}, {}, False),
        ((0, 13, 0), {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "1"}, {}, True),
        ((0, 14, 0), {}, {}, True),
        ((0, 33, 0), {"VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE": "0"}, {}, False),
        ((0, 33, 0), {}, {"speculative-config": '{"method": "eagle", "num_speculative_tokens": 2}'}, False),
    ],
)
def test_chunks_are_kept_only_with_the_hybrid_cache_manager(
    release: tuple[int, int, int], variable: dict[str, str], flags: dict[str, FlagValue], separate: bool
) -> None:
    facts = dense((CHUNKED, CHUNKED, CHUNKED, FULL) * 8, window=8192)
    given = {"kv-cache-memory-bytes": 20 * GIB, "max-model-len": 131072, "max-num-batched-tokens": 2048, **flags}
    one, full = (
        estimate(known, given, [GPU], release=release, environment=variable)
        for known in (facts, replace(facts, layers=(FULL,) * 32))
    )
    assert one is not None
    assert full is not None
    assert full.max_concurrency is not None
    assert one.max_concurrency is not None
    assert (
        one.max_concurrency > 1.5 * full.max_concurrency
        if separate
        else (one.max_concurrency == pytest.approx(full.max_concurrency))
    )


def test_sliding_layers_hold_their_window_and_a_step() -> None:
    # Groups of 8 layers: 1 full, 3 sliding. A block has 8 × 16 × 16,384 bytes.
    blocks = int(28.02 * GIB) // (8 * 16 * 16384)
    tokens, concurrency = given_cache(WINDOWED, 28.02, (0, 11, 2), max_model_len=32768, max_num_batched_tokens=8192)
    sliding = -(-(4095 + 8192) // 16) + 1
    assert concurrency == pytest.approx(blocks / (2048 + 3 * sliding))
    assert tokens == blocks // 4 * 16


def test_window_longer_than_the_context_limits_nothing() -> None:
    _, concurrency = given_cache(WINDOWED, 28.02, (0, 11, 2), max_model_len=1024, max_num_batched_tokens=8192)
    blocks = int(28.02 * GIB) // (8 * 16 * 16384)
    assert concurrency == pytest.approx(blocks / (64 + 3 * 65))


@pytest.mark.parametrize(
    ("release", "flags"),
    [
        ((0, 11, 2), {"disable_hybrid_kv_cache_manager": True}),
        ((0, 8, 5), {}),
    ],
)
def test_windows_do_not_count_with_a_unified_cache(release: tuple[int, int, int], flags: dict[str, FlagValue]) -> None:
    _, concurrency = given_cache(WINDOWED, 28.02, release, max_model_len=32768, max_num_batched_tokens=8192, **flags)
    assert concurrency == pytest.approx(int(28.02 * GIB) // (32 * 16 * 16384) / 2048)


def test_newer_releases_keep_blocks_for_two_steps_in_flight() -> None:
    settings: dict[str, FlagValue] = {"max_model_len": 32768, "max_num_batched_tokens": 2048}
    _, one = given_cache(WINDOWED, 28.02, (0, 25, 0), **settings)
    _, two = given_cache(WINDOWED, 28.02, (0, 32, 0), **settings)
    _, synchronous = given_cache(WINDOWED, 28.02, (0, 32, 0), async_scheduling=False, **settings)
    assert two < one
    assert synchronous == one


def test_disable_sliding_window_limits_the_context_to_the_window() -> None:
    budget = estimate(WINDOWED, {"disable-sliding-window": True}, [GPU])
    assert budget is not None
    assert budget.max_model_len == 4096


def test_layers_are_padded_to_whole_groups() -> None:
    # 10 full and 25 sliding layers: groups of 10; the third sliding group is half empty but costs as much.
    uneven = dense(layers=(FULL,) * 10 + (SLIDING,) * 25, window=1024)
    _, concurrency = given_cache(uneven, 10.0, max_model_len=16384, max_num_batched_tokens=2048)
    blocks = int(10 * GIB) // (10 * 16 * 4096)
    assert concurrency == pytest.approx(blocks / (1024 + 3 * (-(-(1023 + 2048) // 16) + 1)))


@pytest.mark.parametrize(
    ("full", "release", "together"),
    [
        (13, (0, 25, 0), True),
        (17, (0, 18, 0), True),
        (18, (0, 18, 0), False),
        (14, (0, 12, 0), True),
        (15, (0, 17, 0), False),
        (13, (0, 11, 2), False),
    ],
)
def test_nearly_equal_kinds_share_the_longer_group(full: int, release: Release, together: bool) -> None:
    # 12 sliding and 13 full layers: two groups of 13, not two of 12 and a third.
    alike = dense(layers=(FULL,) * full + (SLIDING,) * 12, window=128)
    _, concurrency = given_cache(alike, 10.0, release, max_model_len=16384, max_num_batched_tokens=2048)
    blocks = int(10 * GIB) // ((full if together else 12) * 16 * 4096)
    attending = 1024 if together else 2048
    assert concurrency == pytest.approx(blocks / (attending + -(-(127 + 2048) // 16) + 1))


def test_full_layers_with_their_own_heads_get_longer_blocks() -> None:
    # Sliding: 8 heads of 256, 8,192 bytes; full: 2 of 512, 4,096 bytes, so their blocks hold 32 tokens.
    other = dense(layers=((SLIDING,) * 5 + (FULL,)) * 5, window=1024, head_dim=256, full_kv_heads=2, full_head_dim=512)
    _, concurrency = given_cache(other, 83.89, max_model_len=262144, max_num_batched_tokens=2496)
    blocks = int(83.89 * GIB) // (5 * 16 * 8192)
    assert concurrency == pytest.approx(blocks / (8192 + 5 * (-(-(1023 + 2496) // 16) + 1)))


def test_layers_of_two_sizes_in_one_table_take_their_own_size() -> None:
    # Sliding layers of 8 × 256 and full ones of 2 × 512, all for every token.
    other = dense(layers=((SLIDING,) * 5 + (FULL,)) * 5, window=1024, head_dim=256, full_kv_heads=2, full_head_dim=512)
    facts = replace(other, weight_bytes=10**9)
    flags: dict[str, FlagValue] = {"disable_hybrid_kv_cache_manager": True}
    assert token_bytes(facts, **flags) == 25 * 8192 + 5 * 4096
    _, concurrency = given_cache(facts, 10.0, max_model_len=16384, **flags)
    assert concurrency == pytest.approx(int(10 * GIB) // (16 * (25 * 8192 + 5 * 4096)) / 1024)


def test_model_with_only_windows_is_one_group() -> None:
    short = dense(layers=(SLIDING,) * 32, window=4096)
    _, concurrency = given_cache(short, 10.0, max_model_len=32768, max_num_batched_tokens=2048)
    assert concurrency == pytest.approx(int(10 * GIB) // (32 * 16 * 4096) / (-(-(4095 + 2048) // 16) + 1))


def test_chunked_layers_hold_a_chunk_and_a_step() -> None:
    llama = dense(layers=(CHUNKED, CHUNKED, CHUNKED, FULL) * 4, window=8192)
    _, concurrency = given_cache(llama, 10.0, max_model_len=131072, max_num_batched_tokens=2048)
    blocks = int(10 * GIB) // (4 * 16 * 4096)
    assert concurrency == pytest.approx(blocks / (8192 + 3 * ((8192 + 2048) // 16)))


STATES = dense(
    layers=(LINEAR, LINEAR, LINEAR, FULL) * 8,
    kv_heads=4,
    head_dim=256,
    state_bytes=32 * 128 * 128 * 4 + 8192 * 3 * 2,
    state_bytes_per_draft_token=8192 * 2,
)


def test_states_make_blocks_long_and_take_one_each() -> None:
    # 2,146,304 bytes of state at 4,096 per token: 528 tokens (a multiple of 16).
    blocks = int(15.85 * GIB) // (8 * 528 * 4096)
    tokens, concurrency = given_cache(STATES, 15.85, (0, 18, 0), max_model_len=8192)
    assert concurrency == pytest.approx(blocks / (16 + 3))
    assert tokens == blocks // 4 * 528


def test_states_are_split_by_tensor_parallelism() -> None:
    blocks = int(15.36 * GIB) // (8 * 528 * 1024)
    _, concurrency = given_cache(STATES, 15.36, (0, 19, 0), max_model_len=32768, tensor_parallel_size=4)
    assert concurrency == pytest.approx(blocks / (63 + 3))


def test_prefix_cache_keeps_a_second_state() -> None:
    blocks = int(10 * GIB) // (8 * 528 * 4096)
    _, without = given_cache(STATES, 10.0, (0, 27, 0), max_model_len=8192)
    _, asked = given_cache(STATES, 10.0, (0, 18, 0), max_model_len=8192, enable_prefix_caching=True)
    _, by_default = given_cache(STATES, 10.0, (0, 28, 0), max_model_len=8192)
    assert without == pytest.approx(blocks / (16 + 3))
    assert asked == by_default == pytest.approx(blocks / (16 + 6))


def test_second_state_is_kept_by_default_only_where_prefixes_are_cached() -> None:
    mamba = replace(STATES, layers=(LINEAR,) * 32, model_type="mamba2")
    without_attention = replace(mamba, layers=(LINEAR, LayerKind.NONE) * 16)
    for facts, flags in ((mamba, {}), (without_attention, {}), (STATES, {"runner": "pooling"})):
        default, off, on = (
            given_cache(facts, 10.0, (0, 33, 0), max_model_len=8192, **flags, **more)[1]
            for more in ({}, {"enable_prefix_caching": False}, {"enable_prefix_caching": True})
        )
        assert default == off > on


@pytest.mark.parametrize(
    ("model_type", "release", "states"),
    [("nemotron_h", (0, 13, 0), 16), ("nemotron_h", (0, 27, 0), 16), ("nemotron_h", (0, 28, 0), 2),
     ("qwen3_next", (0, 24, 0), 2)],
)  # fmt: skip
def test_some_models_kept_a_state_for_each_block(model_type: str, release: tuple[int, int, int], states: int) -> None:
    blocks = int(10 * GIB) // (8 * 528 * 4096)
    hybrid = replace(STATES, model_type=model_type)
    _, asked = given_cache(hybrid, 10.0, release, max_model_len=8192, enable_prefix_caching=True)
    assert asked == pytest.approx(blocks / (16 + 3 * states))


def test_speculative_tokens_take_states_too() -> None:
    config = '{"method": "mtp", "num_speculative_tokens": 3}'
    state = 32 * 128 * 128 * 4 + 8192 * 3 * 2 + 3 * 8192 * 2
    block = -(-state // (16 * 4096)) * 16
    blocks = int(10 * GIB) // (9 * block * 4096)  # the draft's layer counts as a ninth full one
    _, concurrency = given_cache(STATES, 10.0, (0, 25, 0), max_model_len=8192, speculative_config=config)
    assert concurrency == pytest.approx(blocks / (-(-8192 // block) + 3 * (1 + 3)))


@pytest.mark.parametrize(
    ("release", "flags", "limited"),
    [
        ((0, 20, 0), {}, True),
        ((0, 33, 0), {}, True),
        ((0, 33, 0), {"optimization-level": 3}, True),
        ((0, 33, 0), {"compilation-config": '{"cudagraph_mode": "FULL_DECODE_ONLY"}'}, True),
        ((0, 33, 0), {"compilation-config.cudagraph_mode": "PIECEWISE"}, False),
        ((0, 33, 0), {"compilation-config": '{"mode": 2}'}, False),
        ((0, 33, 0), {"optimization-level": 1}, False),
        ((0, 33, 0), {"enforce-eager": True}, False),
        ((0, 33, 0), {"runner": "pooling"}, False),
        ((0, 19, 0), {}, False),
    ],
)
def test_each_sequence_needs_a_block_for_its_state(
    release: tuple[int, int, int], flags: dict[str, FlagValue], limited: bool
) -> None:
    given = {"kv-cache-memory-bytes": 10 * GIB, "max-model-len": 8192, **flags}
    budget = estimate(STATES, given, [GPU], release=release)
    assert budget is not None
    assert budget.most_sequences == (10 * GIB // (8 * 528 * 4096) if limited else None)
    overridden = estimate(STATES, {**given, "num-gpu-blocks-override": 100}, [GPU], release=release)
    assert overridden is not None
    assert overridden.most_sequences == (100 if limited else None)
    plain = estimate(dense(), given, [GPU], release=release)
    assert plain is not None
    assert plain.most_sequences is None


def test_decode_context_parallelism_splits_the_tokens() -> None:
    _, one = given_cache(dense(), 10.0, max_model_len=32768)
    _, two = given_cache(dense(), 10.0, max_model_len=32768, decode_context_parallel_size=2)
    assert two == pytest.approx(2 * one)


def test_unknown_layers_are_named_without_invented_values() -> None:
    budget = estimate(dense(layers=()), {}, [GPU])
    assert budget is not None
    assert (budget.kv_tokens, budget.max_concurrency, budget.kv_bytes_per_token) == (None, None, None)
    assert budget.kv_gib > 0
    assert any("layers are unknown" in sentence for sentence in budget.assumed)


def test_unknown_heads_are_named() -> None:
    budget = estimate(dense(kv_heads=None, heads=None, head_dim=None), {}, [GPU])  # type: ignore[arg-type]
    assert budget is not None
    assert budget.kv_tokens is None
    assert any("KV heads" in sentence for sentence in budget.assumed)


def test_unknown_state_is_assumed_and_reported() -> None:
    budget = estimate(replace(STATES, state_bytes=None), {}, [GPU])
    assert budget is not None
    assert budget.kv_tokens
    assert any("states is unknown" in sentence for sentence in budget.assumed)

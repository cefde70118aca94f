"""Invariants of every budget, for any model, flags and GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts, Quantization

GIB = 2**30

releases = st.sampled_from(
    [(0, 8, 5), (0, 9, 2), (0, 10, 2), (0, 15, 1), (0, 19, 0), (0, 21, 0), (0, 25, 1), (0, 33, 0)]
)
patterns = st.sampled_from(
    [
        (LayerKind.FULL,),
        (LayerKind.SLIDING, LayerKind.FULL),
        (LayerKind.SLIDING,) * 5 + (LayerKind.FULL,),
        (LayerKind.LINEAR,) * 3 + (LayerKind.FULL,),
        (LayerKind.CHUNKED,) * 3 + (LayerKind.FULL,),
        (LayerKind.SLIDING,),
        (LayerKind.LINEAR, LayerKind.NONE, LayerKind.FULL, LayerKind.NONE),
    ]
)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    latent = draw(st.booleans())
    return ModelFacts(
        model="made/up-7B",
        layers=draw(patterns) * draw(st.integers(1, 16)),
        hidden_size=draw(st.sampled_from([1024, 4096, 8192])),
        intermediate_size=draw(st.sampled_from([None, 4096, 14336])),
        heads=32,
        kv_heads=draw(st.sampled_from([1, 2, 4, 8, 32])),
        head_dim=draw(st.sampled_from([64, 128, 256])),
        kv_lora_rank=512 if latent else None,
        qk_rope_head_dim=64 if latent else None,
        window=draw(st.sampled_from([None, 128, 1024, 4096])),
        experts=draw(st.sampled_from([None, 8, 128])),
        experts_per_token=2,
        vocabulary=draw(st.sampled_from([None, 32000, 151936])),
        max_context=draw(st.sampled_from([2048, 32768, 262144])),
        dtype="bfloat16",
        weight_bytes=draw(st.integers(10**8, 60 * 10**9)),
        state_bytes=draw(st.sampled_from([None, 2**16, 2**21])),
        multimodal=draw(st.booleans()),
    )


gpus = st.builds(
    GpuShape,
    st.sampled_from(["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090", "Tesla T4", "NVIDIA GB10", ""]),
    st.floats(8, 192),
    st.none() | st.floats(0, 200),
)
flag_sets = st.fixed_dictionaries(
    {},
    optional={
        "tensor-parallel-size": st.sampled_from([1, 2, 4, 8]),
        "pipeline-parallel-size": st.sampled_from([1, 2, 3]),
        "data-parallel-size": st.sampled_from([1, 2]),
        "gpu-memory-utilization": st.floats(0.1, 1.0),
        "max-model-len": st.sampled_from([1, 100, 4096, 131072, "auto"]),
        "max-num-seqs": st.integers(1, 2048),
        "max-num-batched-tokens": st.integers(1, 32768),
        "kv-cache-dtype": st.sampled_from(["auto", "fp8", "bfloat16", "int8_per_token_head", "nvfp4"]),
        "enable-prefix-caching": st.booleans(),
        "enable-chunked-prefill": st.booleans(),
        "enforce-eager": st.booleans(),
        "disable-hybrid-kv-cache-manager": st.booleans(),
        "cpu-offload-gb": st.integers(0, 100),
        "num-gpu-blocks-override": st.integers(1, 10**6),
        "speculative-config": st.just('{"method": "mtp", "num_speculative_tokens": 2}'),
        "quantization": st.sampled_from(["fp8", "bitsandbytes", "awq"]),
    },
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def budget_of(facts: ModelFacts, flags: dict[str, Any], gpu: GpuShape, release: tuple[int, int, int]) -> MemoryBudget:
    budget = estimate(facts, flags, [gpu], release=release)
    assert budget is not None
    return budget


@quick
@given(models(), flag_sets, gpus, releases, st.integers(1, 200_000), st.integers(0, 200_000))
def test_longer_context_never_raises_concurrency(
    facts: ModelFacts, flags: dict[str, Any], gpu: GpuShape, release: tuple[int, int, int], length: int, more: int
) -> None:
    short = budget_of(facts, {**flags, "max-model-len": length}, gpu, release)
    long = budget_of(facts, {**flags, "max-model-len": length + more}, gpu, release)
    assert (short.max_concurrency is None) == (long.max_concurrency is None)
    if short.max_concurrency is not None and long.max_concurrency is not None:
        assert long.max_concurrency <= short.max_concurrency


@quick
@given(models(), flag_sets, gpus, releases, st.floats(0.01, 1), st.floats(0.01, 1))
def test_more_utilization_never_shrinks_the_cache(
    facts: ModelFacts, flags: dict[str, Any], gpu: GpuShape, release: tuple[int, int, int], one: float, other: float
) -> None:
    little, much = (
        budget_of(facts, {**flags, "gpu-memory-utilization": share}, gpu, release) for share in sorted((one, other))
    )
    assert much.kv_gib >= little.kv_gib
    if much.fits == little.fits:  # otherwise one is vLLM's figure, the other the longest request that fits
        assert (much.kv_tokens or 0) >= (little.kv_tokens or 0)


@quick
@given(models(), flag_sets, gpus, releases, st.sampled_from([(1, 2), (2, 4), (1, 8)]))
def test_more_tensor_parallelism_never_takes_more_of_a_gpu(
    facts: ModelFacts, flags: dict[str, Any], gpu: GpuShape, release: tuple[int, int, int], sizes: tuple[int, int]
) -> None:
    plain = replace(facts, layers=(LayerKind.FULL,) * len(facts.layers))
    flags = {**flags, "pipeline-parallel-size": 1}  # with several stages, another one may be decisive
    few, many = (budget_of(plain, {**flags, "tensor-parallel-size": size}, gpu, release) for size in sizes)
    assert few.kv_bytes_per_token is not None
    assert many.kv_bytes_per_token is not None
    assert many.kv_bytes_per_token <= few.kv_bytes_per_token
    assert many.weights_gib <= few.weights_gib


@quick
@given(models(), flag_sets, gpus, releases)
def test_parts_of_each_gpu_add_up(
    facts: ModelFacts, flags: dict[str, Any], gpu: GpuShape, release: tuple[int, int, int]
) -> None:
    budget = budget_of(facts, flags, gpu, release)
    assert budget.per_gpu
    for one in budget.per_gpu:
        parts = (one.weights_gib, one.overhead_gib, one.graphs_gib, one.kv_gib, one.others_gib)
        assert all(part >= 0 for part in parts)
        assert sum(parts) + one.free_gib == pytest.approx(one.total_gib)
    assert max(one.kv_gib for one in budget.per_gpu) >= budget.kv_gib or budget.kv_gib < 0
    assert any(one.weights_gib == budget.weights_gib for one in budget.per_gpu)


@quick
@given(models(), gpus, releases, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_weights_of_all_gpus_sum_to_the_models(
    facts: ModelFacts, gpu: GpuShape, release: tuple[int, int, int], tensor: int, pipeline: int
) -> None:
    flags = {"tensor-parallel-size": tensor, "pipeline-parallel-size": pipeline}
    budget = budget_of(facts, flags, gpu, release)
    assert len(budget.per_gpu) == tensor * pipeline
    if pipeline <= len(facts.layers):
        assert sum(one.weights_gib for one in budget.per_gpu) * GIB == pytest.approx(facts.weight_bytes)


@quick
@given(models(), flag_sets, gpus, releases, st.sets(st.sampled_from(ModelFacts.__struct_fields__)))
def test_missing_facts_are_named_and_not_fatal(
    facts: ModelFacts, flags: dict[str, Any], gpu: GpuShape, release: tuple[int, int, int], gone: set[str]
) -> None:
    empty = ModelFacts(model="made/up-7B")
    known = replace(facts, **{name: getattr(empty, name) for name in gone - {"model"}})
    budget = estimate(known, flags, [gpu], release=release)
    assert budget is not None  # the name contains the number of parameters
    assert all(math.isfinite(value) for value in (budget.weights_gib, budget.overhead_gib, budget.kv_gib))
    if budget.kv_tokens is None:
        assert any("tokens that fit" in sentence for sentence in budget.assumed)
    assert all(len(sentence) < 140 and sentence == sentence.strip() for sentence in budget.assumed)


NAMES = """
    tensor-parallel-size block-size max-model-len gpu-memory-utilization cpu-offload-gb speculative-config
    speculative-config.method compilation-config optimization-level kv-cache-dtype dtype quantization runner
    limit-mm-per-prompt kv-cache-memory-bytes decode-context-parallel-size mamba-cache-mode spec-tokens
    max-cudagraph-capture-size
"""
values = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)


@quick
@given(
    models(),
    st.dictionaries(
        st.sampled_from(NAMES.split()),
        values | st.sampled_from(['{"method": 3}', '{"cudagraph_capture_sizes": {}}', '{"level": "x"}', "{}", "fp8"]),
    ),
    st.builds(Quantization, st.sampled_from(["awq", "fp8", "odd"]), st.none() | st.integers(1, 16)),
)
def test_any_flag_value_is_handled(facts: ModelFacts, flags: dict[str, Any], stored: Quantization) -> None:
    for known in (facts, replace(facts, quantization=stored, weight_bytes=None)):
        estimate(known, flags, [GpuShape("NVIDIA L40S")])
        estimate(known, flags, [], build="cpu", environment={"VLLM_CPU_KVCACHE_SPACE": "much"})

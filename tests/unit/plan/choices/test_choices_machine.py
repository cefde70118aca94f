"""How a model is placed on GPUs, and in which number formats, with reason and trade-off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Host, Link
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.host.gpu.topology import bandwidth, islands_of
from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.choices.choice import Choice, Source
from vllm_launchers.plan.choices.layout import all_layouts
from vllm_launchers.plan.choices.pool import Layout, pool_of
from vllm_launchers.presets.model import FlagSetting, Workload
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization, expert_split_problem
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.release_defaults import Release

Chosen = Callable[..., dict[str, Choice]]
Models = dict[str, ModelFacts]
Hosts = dict[str, Callable[[], Host]]

CHAT = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)
FEW = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=4)
BATCH = Workload(input_tokens_p95=3072, output_tokens_p95=512, prefix_reuse=0.4, concurrency=256)
SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


def laid(found: dict[str, Choice]) -> tuple[Any, ...]:
    """TP, PP, DP; 1 if unset."""
    values = [found[name].value if name in found else None for name in SIZES]
    return tuple(1 if value is None else value for value in values)


@pytest.mark.parametrize(
    ("model", "host", "workload", "sizes"),
    [
        ("8b", "8xh100", CHAT, (1, 1, 1)),
        ("8b-awq", "2xa6000", FEW, (1, 1, 1)),
        ("70b", "8xh100", FEW, (2, 1, 1)),  # 131 GiB need two of 80 GiB
        ("70b", "8xh100", CHAT, (4, 1, 1)),  # two leave too little for 64 conversations
        ("32b", "2xa6000", FEW, (2, 1, 1)),
        ("32b", "2xl40s", FEW, (2, 1, 1)),
        ("32b", "2xa6000-apart", FEW, (1, 2, 1)),  # no fast link: pipeline stages
        ("70b", "8xl40s", FEW, (2, 2, 1)),  # pairs on a PCIe switch: both
        ("8b", "2xa6000", BATCH, (1, 1, 1)),  # fits one; others want the second
        ("odd-heads", "2xa6000", FEW, (1, 2, 1)),  # 2 does not divide 25 heads
        ("30b-a3b", "2xa6000", FEW, (2, 1, 1)),
        ("32b", "h100", FEW, (1, 1, 1)),
    ],
)
def test_layouts(chosen: Chosen, model: str, host: str, workload: Workload, sizes: tuple[int, ...]) -> None:
    found = chosen(model, host, workload)
    assert laid(found) == sizes
    for name in SIZES:
        if name in found:
            assert found[name].source is Source.MACHINE
            assert found[name].reason.endswith(".")
            assert bool(found[name].tradeoff) == (found[name].value is not None)


def test_reasons_name_missing_memory_and_the_links(chosen: Chosen) -> None:
    near = chosen("70b", "8xh100", FEW)["tensor-parallel-size"]
    assert "80 GiB" in near.reason
    assert "NVLink" in near.reason
    assert "32 of 64 heads" in near.reason
    slow = chosen("32b", "2xl40s", FEW)["tensor-parallel-size"]
    assert "PCIe" in slow.tradeoff
    apart = chosen("32b", "2xa6000-apart", FEW)["pipeline-parallel-size"]
    assert "No two" in apart.reason
    odd = chosen("odd-heads", "2xa6000", FEW)["pipeline-parallel-size"]
    assert "25 heads" in odd.reason
    assert "single stream" in odd.tradeoff
    copies = chosen("8b", "2xa6000-apart", CHAT, gpus=(0, 1))["data-parallel-size"]
    assert copies.value == 2
    assert "a replica needs one GPU" in copies.reason
    assert "Each replica holds all weights" in copies.tradeoff


def test_blocks_of_quantized_weights_stay_whole(chosen: Chosen, models: Models) -> None:
    blocks = models["70b-fp8-blocks"]
    assert laid(chosen(None, "2xa6000", FEW, facts=blocks)) == (2, 1, 1)
    uneven = replace(blocks, intermediate_size=128 * 201)
    assert laid(chosen(None, "2xa6000", FEW, facts=uneven)) == (1, 2, 1)


def test_experts_stay_whole_if_their_parts_would_be_thin(chosen: Chosen) -> None:
    wide = chosen("30b-a3b", "2xa6000", FEW)["enable-expert-parallel"]
    assert (wide.value, wide.source) == (None, Source.MODEL)
    assert "384 of 768 columns of every expert" in wide.reason
    thin = chosen("30b-a3b", "8xh100", FEW, set={"tensor-parallel-size": 4})["enable-expert-parallel"]
    assert (thin.value, thin.source) == (True, Source.MODEL)
    assert "128 experts are spread whole over 4 GPUs, 32 on each" in thin.reason
    assert "192 columns" in thin.reason
    assert thin.tradeoff
    copied = chosen("30b-a3b", "8xh100", FEW, set={"data-parallel-size": 2})["enable-expert-parallel"]
    assert copied.value is True
    assert "enable-expert-parallel" not in chosen("30b-a3b", "h100", FEW)
    assert "enable-expert-parallel" not in chosen("32b", "2xa6000", FEW)
    assert chosen("8b", "2xa6000", set={"tensor-parallel-size": 2}).keys().isdisjoint({"enable-expert-parallel"})


@pytest.mark.parametrize(
    ("sizes", "release", "more", "whole"),
    [
        ({"tensor-parallel-size": 4}, (0, 11, 0), {}, True),
        ({"tensor-parallel-size": 4}, (0, 11, 1), {}, None),
        ({"tensor-parallel-size": 4}, (0, 20, 0), {}, None),
        ({"tensor-parallel-size": 4}, (0, 21, 0), {}, True),
        ({"tensor-parallel-size": 4}, (0, 33, 0), {}, True),
        ({"tensor-parallel-size": 4}, (0, 33, 0), {"fully-sharded-loras": True}, None),
        ({"tensor-parallel-size": 4}, (0, 33, 0), {"all2all-backend": "deepep_low_latency"}, None),
        ({"tensor-parallel-size": 4}, (0, 33, 0), {"all2all-backend": "naive"}, True),
        ({"tensor-parallel-size": 2, "data-parallel-size": 2}, (0, 33, 0), {}, None),
        ({"data-parallel-size": 2}, (0, 33, 0), {}, True),
        ({"data-parallel-size": 2}, (0, 16, 0), {}, None),
    ],
)  # fmt: skip
def test_experts_are_not_kept_whole_where_adapters_prevent_it(
    chosen: Chosen, sizes: Flags, release: Release, more: Flags, whole: bool | None
) -> None:
    flags: Flags = {**sizes, **more, "enable-lora": True}
    found = chosen("30b-a3b", "8xh100", FEW, set=flags, release=release)["enable-expert-parallel"]
    assert found.value is whole
    assert ("--enable-lora" in found.reason) is (whole is None)


def test_experts_are_kept_whole_with_adapters_of_models_that_are_not_sequence_parallel(chosen: Chosen) -> None:
    flags: Flags = {"tensor-parallel-size": 2, "data-parallel-size": 2, "enable-lora": True}
    for model, whole in (("mistralai/Mixtral-8x7B-Instruct-v0.1", True), ("Qwen/Qwen3-30B-A3B", None)):
        found = chosen(None, "8xh100", FEW, set=flags, facts=known_facts(model))["enable-expert-parallel"]
        assert found.value is whole


def test_layouts_do_not_count_on_whole_experts_that_adapters_prevent(models: Models) -> None:
    facts = replace(models["30b-a3b"], intermediate_size=768, quantization=Quantization("fp8", 8, block=(128, 128)))
    with_adapters: Flags = {"enable-lora": True}
    assert Layout(tensor=4) in set(all_layouts(facts, 4, {}, (0, 16, 0)))
    assert Layout(tensor=4) not in set(all_layouts(facts, 4, with_adapters, (0, 16, 0)))
    assert Layout(tensor=4) in set(all_layouts(facts, 4, with_adapters, (0, 33, 0)))


def joined(count: int, gib: float, able: str, name: str, kind: str) -> Host:
    """Idle GPUs with links of one kind between all pairs, at that kind's speed with these GPUs."""
    gpus = tuple(
        Gpu(i, f"GPU-{i}", name, gib, gib, (), compute_capability=able, pcie_generation_max=4, pcie_width=16)
        for i in range(count)
    )
    links = [Link(a, b, kind, bandwidth(kind, gpus[a], gpus[b])) for a in range(count) for b in range(a + 1, count)]
    return Host(gpus=gpus, links=tuple(links), islands=islands_of(range(count), links))


def test_mixture_is_split_over_all_gpus_behind_one_switch(chosen: Chosen) -> None:
    facts = known_facts("mistralai/Mixtral-8x7B-Instruct-v0.1")
    found = chosen(None, joined(4, 45.0, "8.9", "NVIDIA L40S", "PIX"), CHAT, facts=facts)
    assert laid(found) == (4, 1, 1)
    assert "fits on one GPU" not in " ".join(choice.reason for choice in found.values())
    assert found["enable-expert-parallel"].value is None  # 3,584 columns of an expert are enough for a GPU


def test_eight_experts_do_not_divide_over_three_gpus() -> None:
    facts = known_facts("mistralai/Mixtral-8x7B-Instruct-v0.1")
    assert facts is not None
    assert Layout(data=3) not in set(all_layouts(facts, 4, {}, None))
    spread = {"data-parallel-size": 3, "enable-expert-parallel": True}
    budget = estimate(facts, spread, [GpuShape("NVIDIA L40S", 45.0)], release=(0, 33, 0))
    assert budget is not None
    assert budget.weights_gib == pytest.approx(34.5, abs=0.3)  # three of eight experts, not 2.67
    assert "can't be cut evenly over 3" in expert_split_problem(facts, 3)
    assert expert_split_problem(facts, 4) == ""


def test_mixture_too_large_for_copies_mentions_none(chosen: Chosen) -> None:
    facts = known_facts("deepseek-ai/DeepSeek-R1")
    found = chosen(None, joined(8, 140.4, "9.0", "NVIDIA H200", "NV18"), CHAT, facts=facts)
    assert laid(found) == (8, 1, 1)
    assert not any("copies" in choice.reason for choice in found.values())


@pytest.mark.parametrize(
    ("model", "host", "held"),
    [
        ("casperhansen/llama-3.3-70b-instruct-awq", joined(2, 48.0, "8.6", "NVIDIA RTX A6000", "SYS"), 40),
        ("Qwen/Qwen2.5-32B-Instruct-AWQ", joined(2, 24.0, "8.6", "NVIDIA GeForce RTX 3090", "PHB"), 24),
    ],
)
def test_barely_fitting_weights_are_staged_without_fast_links(
    chosen: Chosen, model: str, host: Host, held: int
) -> None:
    found = chosen(None, host, CHAT, facts=known_facts(model), gpus=(0, 1))
    assert laid(found) == (1, 2, 1)
    reason = found["pipeline-parallel-size"].reason
    assert f"tokens/s with {held} requests" in reason
    assert "; DP 2" in reason  # and the throughput of replicas


def test_a_tenth_of_the_throughput_is_traded_for_a_faster_stream(chosen: Chosen) -> None:
    pair = joined(2, 79.6, "9.0", "NVIDIA H100 80GB HBM3", "NV18")
    assert laid(chosen("8b", pair, FEW, gpus=(0, 1))) == (2, 1, 1)
    apart = joined(2, 24.0, "8.6", "NVIDIA GeForce RTX 3090", "PHB")
    assert laid(chosen("8b-awq", apart, CHAT, gpus=(0, 1))) == (1, 1, 2)


def test_copies_of_a_mixture_share_experts_and_stay_close(chosen: Chosen, hosts: Hosts) -> None:
    pool = pool_of(hosts["2xa6000-apart"]())
    assert pool is not None
    assert pool.holds(Layout(data=2))
    assert not pool.holds(Layout(data=2), together=True)


def test_only_free_gpus_count(hosts: Hosts) -> None:
    # GPU 0 of the pair (0, 1) is in use: three are free, two of them connected.
    pool = pool_of(hosts["4xa6000"]())
    assert pool is not None
    assert pool.groups == ((1,), (2, 3))
    assert pool.capability == 8.6
    assert pool.holds(Layout(2))
    assert not pool.holds(Layout(2, 2))
    assert pool.holds(Layout(1, 3))


def test_all_gpus_given_by_the_user_are_used(chosen: Chosen) -> None:
    assert laid(chosen("8b", "8xh100", FEW, gpus=(4, 5))) == (2, 1, 1)
    assert laid(chosen("70b", "8xh100", FEW, gpus=(4, 5, 6, 7))) == (4, 1, 1)
    assert laid(chosen("32b", "8xh100", CHAT, gpus=(3,))) == (1, 1, 1)
    cut = chosen("32b", "8xh100", FEW, gpus=(4, 5))["tensor-parallel-size"]
    assert cut.reason.startswith("All of its 2 GPUs are used: 2 GPUs, connected by NVLink")


def test_share_limits_the_gpu(chosen: Chosen) -> None:
    assert laid(chosen("32b", "2xh100", FEW)) == (1, 1, 1)
    halves = [GpuShare(0, gib=48.0), GpuShare(1, gib=48.0)]
    assert laid(chosen("32b", "2xh100", FEW, shares=halves)) == (2, 1, 1)


def test_set_size_determines_the_layout(chosen: Chosen) -> None:
    found = chosen("70b", "8xh100", FEW, set={"tensor-parallel-size": 8})
    assert found["tensor-parallel-size"].source is Source.YOU
    assert laid(found) == (8, 1, 1)
    assert laid(chosen("8b", "2xa6000", BATCH, unset=("data-parallel-size",))) == (1, 1, 1)


def test_model_that_fits_nowhere_gets_all_gpus_and_a_report(chosen: Chosen, models: Models) -> None:
    huge = replace(models["70b"], weight_bytes=10**12)
    found = chosen(None, "2xa6000", FEW, facts=huge)
    assert laid(found) == (2, 1, 1)
    assert "Even 2 free GPUs have no room" in found["tensor-parallel-size"].reason
    assert found["max-num-seqs"].value == 8  # not limited by a nonexistent cache


@pytest.mark.parametrize(
    ("model", "host", "workload", "reason"),
    [
        ("8b", "h100", CHAT, "FP8 is not needed"),
        ("8b", "h100", BATCH, "your choice"),
        ("8b", "l40s", BATCH, "your choice"),
        ("8b", "a6000", BATCH, "vLLM can refuse an FP8 cache on this GPU"),
        ("4b", "2xt4", BATCH, "vLLM can refuse an FP8 cache on this GPU"),
    ],
)
def test_fp8_cache_is_never_chosen(chosen: Chosen, model: str, host: str, workload: Workload, reason: str) -> None:
    found = chosen(model, host, workload)["kv-cache-dtype"]
    assert found.value is None
    assert reason in found.reason


PRESET = {"kv-cache-dtype": FlagSetting(value="fp8", why="the preset's own")}


@pytest.mark.parametrize(
    ("host", "more", "value", "source"),
    [
        ("a6000", {}, None, Source.MACHINE),
        ("2xt4", {}, None, Source.MACHINE),
        ("a6000", {"set": {"attention-backend": "FLASHINFER"}}, "fp8", Source.PRESET),
        ("a6000", {"set": {"attention-backend": "TRITON_ATTN"}}, None, Source.MACHINE),
        ("a6000", {"environment": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}, "release": (0, 13, 0)}, "fp8", "preset"),
        ("a6000", {"environment": {"VLLM_ATTENTION_BACKEND": "FLASHINFER"}}, None, Source.MACHINE),  # ignored now
        ("l40s", {}, "fp8", Source.PRESET),
        ("h100", {}, "fp8", Source.PRESET),
        (None, {}, "fp8", Source.PRESET),
        ("a6000", {"set": {"kv-cache-dtype": "fp8_e4m3"}}, "fp8_e4m3", Source.YOU),  # and the plan warns
    ],
)
def test_presets_fp8_cache_is_kept_where_supported(
    chosen: Chosen, host: str | None, more: dict[str, Any], value: str | None, source: str
) -> None:
    found = chosen("8b", host, CHAT, preset=PRESET, **more)["kv-cache-dtype"]
    assert (found.value, found.source) == (value, source)


def test_mla_supports_an_fp8_cache_since_ada(chosen: Chosen, models: Models) -> None:
    latent = replace(models["30b-a3b"], kv_lora_rank=512, qk_rope_head_dim=64, kv_heads=32, weight_bytes=20 * 10**9)
    for host, release, value in (
        ("a6000", (0, 33, 0), None),
        ("l40s", (0, 17, 1), None),
        ("l40s", (0, 33, 0), "fp8"),
        ("h100", (0, 11, 0), "fp8"),
    ):
        found = chosen(None, host, CHAT, facts=latent, preset=PRESET, release=release)
        assert found["kv-cache-dtype"].value == value


def test_presets_fp8_cache_is_dropped_if_a_latent_cache_is_split_over_gpus(chosen: Chosen, models: Models) -> None:
    latent = replace(models["30b-a3b"], kv_lora_rank=512, qk_rope_head_dim=64, kv_heads=32, weight_bytes=20 * 10**9)
    split: Flags = {"tensor-parallel-size": 8, "decode-context-parallel-size": 8}
    for release, value in (((0, 24, 0), None), ((0, 25, 0), "fp8")):
        found = chosen(None, "8xh100", CHAT, facts=latent, preset=PRESET, release=release, set=split)["kv-cache-dtype"]
        assert found.value == value
        assert ("--decode-context-parallel-size" in found.reason) is (value is None)
        assert "H100" not in found.reason


def replace_workload(workload: Workload, **changes: Any) -> Workload:
    values = {name: getattr(workload, name) for name in workload.__struct_fields__}
    return Workload(**(values | changes))


def test_weights_are_not_converted_to_fp8_for_float32(chosen: Chosen) -> None:
    assert chosen("14b", "4090", FEW)["quantization"].value == "fp8_per_tensor"
    assert chosen("14b", "4090", FEW, set={"dtype": "float32"})["quantization"].value is None


def test_quantized_checkpoint_gets_no_flag(chosen: Chosen) -> None:
    found = chosen("8b-awq", "4090", FEW)["quantization"]
    assert (found.value, found.source) == (None, Source.MODEL)
    assert "AWQ, 4-bit" in found.reason
    plain = chosen("4b", "4090", FEW)["quantization"]
    assert plain.value is None
    assert "not quantized" in plain.reason


@pytest.mark.parametrize(
    ("host", "release", "value"),
    [
        ("4090", (0, 33, 0), "fp8_per_tensor"),
        ("4090", (0, 30, 0), "fp8"),
        ("4090", None, "fp8"),
        ("4090", (0, 14, 1), None),  # it would load all 16-bit weights first
        ("a6000", (0, 33, 0), None),  # fits
    ],
)
def test_fp8_weights_are_used_only_if_nothing_else_fits(
    chosen: Chosen, host: str, release: tuple[int, int, int] | None, value: str | None
) -> None:
    found = chosen("14b", host, FEW, release=release)["quantization"]
    assert found.value == value
    assert bool(found.tradeoff) == bool(value)


def test_quantized_checkpoint_is_never_converted_to_fp8(chosen: Chosen) -> None:
    def budget(flags: Any, /) -> MemoryBudget:
        room = 5.0 if flags.get("quantization") == "fp8_per_tensor" else -5.0
        return MemoryBudget(10.0, 2.0, 0.5, room, 1e5, 1000, 4096, max(0.0, room), max(0.0, room))

    assert chosen("8b", "4090", FEW, budget=budget)["quantization"].value == "fp8_per_tensor"
    assert chosen("8b-awq", "4090", FEW, budget=budget)["quantization"].value is None


def test_old_gpus_never_get_fp8_weights(chosen: Chosen) -> None:
    assert chosen("32b", "a6000", FEW)["quantization"].value is None
    assert chosen("32b", "2xl40s", FEW)["quantization"].value is None  # two hold the 16-bit weights


@pytest.mark.parametrize(
    ("model", "host", "release", "named"),
    [
        ("70b", "4090", (0, 33, 0), False),
        ("14b", "4090", (0, 14, 1), True),  # it can't be converted while loading, but in FP8 it would fit
        ("8b", "h100", (0, 33, 0), True),
        ("8b", "a6000", (0, 33, 0), False),  # no FP8 units
    ],
)
def test_an_fp8_checkpoint_is_named_only_if_it_would_fit(
    chosen: Chosen, model: str, host: str, release: tuple[int, int, int], named: bool
) -> None:
    found = chosen(model, host, FEW, release=release)["quantization"]
    assert found.value is None
    assert ("An FP8 checkpoint of it would be faster here." in found.reason) is named


def test_cpu_build_gets_no_gpu_choices(chosen: Chosen) -> None:
    found = chosen("70b", "8xh100", CHAT, build="cpu")
    assert set(found) == {
        *("max-model-len", "max-num-seqs", "max-num-batched-tokens"),
        *("enable-prefix-caching", "enable-chunked-prefill"),
    }


def test_without_gpus_or_facts_nothing_depends_on_the_machine(chosen: Chosen) -> None:
    for found in (chosen("70b", None), chosen("70b", Host(problem="no driver")), chosen(None, "8xh100")):
        assert laid(found) == (1, 1, 1)
        assert "kv-cache-dtype" not in found
        assert found["max-num-seqs"].value == 128


def test_gpu_slice_counts_with_its_own_size(hosts: Hosts) -> None:
    pool = pool_of(hosts["mig"]())
    assert pool is not None
    assert pool.size == 1
    assert pool.memory_gib is not None
    assert pool.memory_gib < 30


def test_different_and_lost_gpus_are_excluded() -> None:
    big = [Gpu(i, f"B{i}", "NVIDIA RTX A6000", 48.0, 48.0, (), compute_capability="8.6") for i in (0, 1)]
    small = Gpu(2, "S", "NVIDIA GeForce RTX 3090", 24.0, 24.0, (), compute_capability="8.6")
    lost = replace(big[0], index=3, lost="fell off the bus")
    pool = pool_of(Host(gpus=(*big, small, lost), islands=((0,), (1,), (2,), (3,))))
    assert pool is not None
    assert pool.memory_gib == 48.0
    assert pool.size == 2


def test_given_budget_decides(chosen: Chosen) -> None:
    asked: list[dict[str, Any]] = []

    def budget(flags: Any, /) -> MemoryBudget:
        asked.append(dict(flags))
        room = 5.0 * flags.get("tensor-parallel-size", 1) - 9.0
        return MemoryBudget(10.0, 2.0, 0.5, room, 1e5, 1000, 4096, max(0.0, room) * 50, max(0.0, room) * 60)

    found = chosen("8b", "8xh100", FEW, budget=budget)
    assert laid(found) == (2, 1, 1)
    assert all("max-model-len" in flags for flags in asked)

"""How a model is laid on GPUs, and in which number formats, with reason and price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vllm_launchers.machine.gpu.host import Gpu, Host
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.model import MemoryBudget
from vllm_launchers.plan.choices.model import Choice, Source
from vllm_launchers.plan.choices.pool import Layout, pool_of
from vllm_launchers.presets.model import Workload

Chosen = Callable[..., dict[str, Choice]]
Models = dict[str, ModelFacts]
Hosts = dict[str, Callable[[], Host]]

CHAT = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)
FEW = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=4)
BATCH = Workload(input_tokens_p95=3072, output_tokens_p95=512, prefix_reuse=0.4, concurrency=256)
SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")


def laid(found: dict[str, Choice]) -> tuple[Any, ...]:
    """TP, PP, DP; 1 where nothing is set."""
    values = [found[name].value if name in found else None for name in SIZES]
    return tuple(1 if value is None else value for value in values)


@pytest.mark.parametrize(
    ("model", "host", "workload", "sizes"),
    [
        ("8b", "8xh100", CHAT, (1, 1, 1)),
        ("8b-awq", "2xa6000", FEW, (1, 1, 1)),
        ("70b", "8xh100", FEW, (2, 1, 1)),  # 131 GiB need two of 80 GiB
        ("70b", "8xh100", CHAT, (4, 1, 1)),  # and two leave too little for 64 conversations
        ("32b", "2xa6000", FEW, (2, 1, 1)),
        ("32b", "2xl40s", FEW, (2, 1, 1)),
        ("32b", "2xa6000-apart", FEW, (1, 2, 1)),  # nothing near: stages
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
            assert bool(found[name].price) == (found[name].value is not None)


def test_reasons_say_what_does_not_fit_and_by_what_gpus_are_joined(chosen: Chosen) -> None:
    near = chosen("70b", "8xh100", FEW)["tensor-parallel-size"]
    assert "80 GiB" in near.reason
    assert "NVLink" in near.reason
    assert "32 of 64 heads" in near.reason
    slow = chosen("32b", "2xl40s", FEW)["tensor-parallel-size"]
    assert "PCIe" in slow.price
    apart = chosen("32b", "2xa6000-apart", FEW)["pipeline-parallel-size"]
    assert "No two" in apart.reason
    odd = chosen("odd-heads", "2xa6000", FEW)["pipeline-parallel-size"]
    assert "25 heads" in odd.reason
    assert "single stream" in odd.price
    copies = chosen("8b", "2xa6000", BATCH, gpus=(0, 1))["data-parallel-size"]
    assert copies.value == 2
    assert "a copy needs one GPU" in copies.reason
    assert "Each copy holds all weights" in copies.price


def test_blocks_of_quantized_weights_stay_whole(chosen: Chosen, models: Models) -> None:
    blocks = models["70b-fp8-blocks"]
    assert laid(chosen(None, "2xa6000", FEW, facts=blocks)) == (2, 1, 1)
    uneven = replace(blocks, intermediate_size=128 * 201)
    assert laid(chosen(None, "2xa6000", FEW, facts=uneven)) == (1, 2, 1)


def test_experts_are_spread_whole(chosen: Chosen, models: Models) -> None:
    found = chosen("30b-a3b", "2xa6000", FEW)["enable-expert-parallel"]
    assert (found.value, found.source) == (True, Source.MODEL)
    assert "128 experts" in found.reason
    assert found.price
    assert "enable-expert-parallel" not in chosen("30b-a3b", "h100", FEW)
    assert "enable-expert-parallel" not in chosen("32b", "2xa6000", FEW)
    assert chosen("8b", "2xa6000", set={"tensor-parallel-size": 2}).keys().isdisjoint({"enable-expert-parallel"})
    set_by_hand = chosen("30b-a3b", "8xh100", FEW, set={"tensor-parallel-size": 2})
    assert set_by_hand["enable-expert-parallel"].value is True


def test_copies_of_a_mixture_share_experts_and_stay_near(chosen: Chosen, hosts: Hosts) -> None:
    pool = pool_of(hosts["2xa6000-apart"]())
    assert pool is not None
    assert pool.holds(Layout(data=2))
    assert not pool.holds(Layout(data=2), together=True)


def test_only_free_gpus_are_counted_on(hosts: Hosts) -> None:
    # GPU 0 of the pair (0, 1) is at work: three are free, two of them joined.
    pool = pool_of(hosts["4xa6000"]())
    assert pool is not None
    assert pool.groups == ((1,), (2, 3))
    assert pool.capability == 8.6
    assert pool.holds(Layout(2))
    assert not pool.holds(Layout(2, 2))
    assert pool.holds(Layout(1, 3))


def test_gpus_that_a_person_gave_are_all_used(chosen: Chosen) -> None:
    assert laid(chosen("8b", "8xh100", FEW, gpus=(4, 5))) == (1, 1, 2)
    assert laid(chosen("70b", "8xh100", FEW, gpus=(4, 5, 6, 7))) == (4, 1, 1)
    assert laid(chosen("32b", "8xh100", CHAT, gpus=(3,))) == (1, 1, 1)
    copies = chosen("8b", "8xh100", FEW, gpus=(4, 5))["data-parallel-size"]
    assert copies.reason.startswith("You gave it 2 GPUs and a copy needs one GPU")
    cut = chosen("32b", "8xh100", FEW, gpus=(4, 5))["tensor-parallel-size"]
    assert cut.reason.startswith("You gave it 2 GPUs: 2 GPUs, joined by NVLink")


def test_a_share_counts_as_the_gpu(chosen: Chosen) -> None:
    assert laid(chosen("32b", "2xh100", FEW)) == (1, 1, 1)
    halves = [Share(0, gib=48.0), Share(1, gib=48.0)]
    assert laid(chosen("32b", "2xh100", FEW, shares=halves)) == (2, 1, 1)


def test_a_size_that_is_set_settles_the_layout(chosen: Chosen) -> None:
    found = chosen("70b", "8xh100", FEW, set={"tensor-parallel-size": 8})
    assert found["tensor-parallel-size"].source is Source.YOU
    assert laid(found) == (8, 1, 1)
    assert laid(chosen("8b", "2xa6000", BATCH, unset=("data-parallel-size",))) == (1, 1, 1)


def test_what_fits_nowhere_gets_the_most_there_is_and_says_so(chosen: Chosen, models: Models) -> None:
    huge = replace(models["70b"], weight_bytes=10**12)
    found = chosen(None, "2xa6000", FEW, facts=huge)
    assert laid(found) == (2, 1, 1)
    assert "Even 2 free GPUs have no room" in found["tensor-parallel-size"].reason
    assert found["max-num-seqs"].value == 8  # not bounded by a cache that there is not


@pytest.mark.parametrize(
    ("model", "host", "workload", "value"),
    [
        ("8b", "h100", CHAT, None),  # room enough
        ("8b", "h100", BATCH, "fp8"),
        ("8b", "l40s", BATCH, "fp8"),
        ("8b", "a6000", BATCH, "fp8"),
        ("4b", "2xt4", CHAT, None),  # Turing cannot
    ],
)
def test_fp8_cache_by_need_and_generation(
    chosen: Chosen, model: str, host: str, workload: Workload, value: str | None
) -> None:
    found = chosen(model, host, workload)
    assert (found["kv-cache-dtype"].value if "kv-cache-dtype" in found else None) == value
    if value:
        assert ("converts" in found["kv-cache-dtype"].price) == (host != "h100")


def test_gpus_that_convert_an_fp8_cache_give_another_gpu_first(chosen: Chosen) -> None:
    old, new = chosen("8b", "2xa6000", BATCH, gpus=(0, 1)), chosen("8b", "2xh100", BATCH)
    assert laid(old) == (1, 1, 2)
    assert (laid(new), new["kv-cache-dtype"].value) == ((1, 1, 1), "fp8")


def test_scales_in_the_checkpoint_make_fp8_nearly_free(chosen: Chosen, models: Models) -> None:
    def budget(flags: Any, /) -> MemoryBudget:
        held = 100.0 if flags.get("kv-cache-dtype") == "fp8" else 10.0
        return MemoryBudget(10.0, 2.0, 0.5, 20.0, 1e5, 1000, 4096, held, held)

    for scales, price in ((None, "A little quality."), ("fp8", "scales")):
        facts = replace(models["8b"], kv_cache_quantization=scales)
        found = chosen(None, "h100", CHAT, facts=facts, budget=budget)["kv-cache-dtype"]
        assert found.value == "fp8"
        assert price in found.price


def test_mla_has_an_fp8_cache_from_hopper_on(chosen: Chosen, models: Models) -> None:
    latent = replace(models["30b-a3b"], kv_lora_rank=512, qk_rope_head_dim=64, kv_heads=32, weight_bytes=20 * 10**9)
    crowd = replace_workload(BATCH, concurrency=4000)
    assert "kv-cache-dtype" not in chosen(None, "a6000", crowd, facts=latent)
    assert chosen(None, "h100", crowd, facts=latent)["kv-cache-dtype"].value == "fp8"


def replace_workload(workload: Workload, **changes: Any) -> Workload:
    values = {name: getattr(workload, name) for name in workload.__struct_fields__}
    return Workload(**(values | changes))


def test_a_quantized_checkpoint_gets_no_flag(chosen: Chosen) -> None:
    found = chosen("8b-awq", "4090", FEW)["quantization"]
    assert (found.value, found.source) == (None, Source.MODEL)
    assert "AWQ, 4-bit" in found.reason
    plain = chosen("4b", "4090", FEW)["quantization"]
    assert plain.value is None
    assert "not quantized" in plain.reason


@pytest.mark.parametrize(
    ("host", "release", "value"),
    [
        ("4090", (0, 33, 0), "fp8"),
        ("4090", None, "fp8"),
        ("4090", (0, 14, 1), None),  # it would load all 16-bit weights first
        ("a6000", (0, 33, 0), None),  # fits
    ],
)
def test_fp8_weights_are_made_only_where_nothing_else_fits(
    chosen: Chosen, host: str, release: tuple[int, int, int] | None, value: str | None
) -> None:
    found = chosen("14b", host, FEW, release=release)["quantization"]
    assert found.value == value
    assert bool(found.price) == bool(value)


def test_a_quantized_checkpoint_is_never_made_fp8(chosen: Chosen) -> None:
    def budget(flags: Any, /) -> MemoryBudget:
        room = 5.0 if flags.get("quantization") == "fp8" else -5.0
        return MemoryBudget(10.0, 2.0, 0.5, room, 1e5, 1000, 4096, max(0.0, room), max(0.0, room))

    assert chosen("8b", "4090", FEW, budget=budget)["quantization"].value == "fp8"
    assert chosen("8b-awq", "4090", FEW, budget=budget)["quantization"].value is None


def test_old_gpus_never_get_fp8_weights(chosen: Chosen) -> None:
    assert chosen("32b", "a6000", FEW)["quantization"].value is None
    assert chosen("32b", "2xl40s", FEW)["quantization"].value is None  # two hold the 16-bit weights


def test_a_cpu_build_gets_no_gpu_choices(chosen: Chosen) -> None:
    found = chosen("70b", "8xh100", CHAT, build="cpu")
    assert set(found) == {
        *("max-model-len", "max-num-seqs", "max-num-batched-tokens"),
        *("enable-prefix-caching", "enable-chunked-prefill"),
    }


def test_without_gpus_or_facts_the_machine_decides_nothing(chosen: Chosen) -> None:
    for found in (chosen("70b", None), chosen("70b", Host(problem="no driver")), chosen(None, "8xh100")):
        assert laid(found) == (1, 1, 1)
        assert "kv-cache-dtype" not in found
        assert found["max-num-seqs"].value == 128


def test_a_slice_of_a_gpu_counts_as_it_is(hosts: Hosts) -> None:
    pool = pool_of(hosts["mig"]())
    assert pool is not None
    assert pool.size == 1
    assert pool.memory_gib is not None
    assert pool.memory_gib < 30


def test_unlike_and_lost_gpus_are_left_out() -> None:
    big = [Gpu(i, f"B{i}", "NVIDIA RTX A6000", 48.0, 48.0, (), compute_capability="8.6") for i in (0, 1)]
    small = Gpu(2, "S", "NVIDIA GeForce RTX 3090", 24.0, 24.0, (), compute_capability="8.6")
    lost = replace(big[0], index=3, lost="fell off the bus")
    pool = pool_of(Host(gpus=(*big, small, lost), islands=((0,), (1,), (2,), (3,))))
    assert pool is not None
    assert pool.memory_gib == 48.0
    assert pool.size == 2


def test_a_budget_that_is_given_decides(chosen: Chosen) -> None:
    asked: list[dict[str, Any]] = []

    def budget(flags: Any, /) -> MemoryBudget:
        asked.append(dict(flags))
        room = 5.0 * flags.get("tensor-parallel-size", 1) - 9.0
        return MemoryBudget(10.0, 2.0, 0.5, room, 1e5, 1000, 4096, max(0.0, room) * 50, max(0.0, room) * 60)

    found = chosen("8b", "8xh100", FEW, budget=budget)
    assert laid(found) == (2, 1, 1)
    assert all("max-model-len" in flags for flags in asked)

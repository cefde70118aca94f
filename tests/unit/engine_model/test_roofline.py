from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import (
    MODELS,
    PCIE_LANE_GBS,
    Interconnect,
    UnknownGpuError,
    find_gpu,
    find_model,
    over_nvlink,
    over_pcie_slot,
    usual_for,
)
from vllm_launchers.engine_model.roofline import Roofline, Work
from vllm_launchers.simulated.settings import resolve_model

LLAMA, MIXTRAL, A3B = (
    resolve_model(name) for name in ("meta-llama/Llama-3.1-70B", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-30B-A3B")
)


@dataclass(frozen=True)
class _Share:
    count: int
    context: int


@dataclass(frozen=True)
class _Batch:
    shares: tuple[_Share, ...]


def roofline(**fields: object) -> Roofline:
    return replace(Roofline(find_gpu("A100 80GB"), LLAMA), **fields)  # type: ignore[arg-type]


def decoding(sequences: int, context: int) -> Work:
    """One token for each request."""
    return Work.of(_Batch((_Share(1, context),) * sequences))


DECODE = Work.of(_Batch(tuple(_Share(1, 1000) for _ in range(16))))


def test_one_stage_takes_as_long_as_the_whole_step() -> None:
    one = roofline()
    assert one.interval(DECODE) == one.latency(DECODE)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_stage_takes_its_share_of_the_layers(stages: int) -> None:
    one, split = roofline(), roofline(pipeline_parallel=stages)
    part = split.interval(DECODE)
    assert one.latency(DECODE) / stages < part < 1.25 * one.latency(DECODE) / stages + 0.002
    assert one.latency(DECODE) < split.latency(DECODE) <= stages * part


def test_slowest_stage_has_the_extra_layers() -> None:
    uneven, even = (
        Roofline(find_gpu("A100 80GB"), replace(LLAMA, layers=layers, kv_bytes_16=1e5), pipeline_parallel=3)
        for layers in (79, 78)
    )
    # 27 of 79 layers compared with 26 of 78: the same weights, of which slightly more than a third.
    assert uneven.interval(DECODE) > even.interval(DECODE)


def test_all_reduces_stay_within_a_stage() -> None:
    slow = Interconnect(1e9, 1e-4)
    tensor = roofline(tensor_parallel=2, tensor_link=slow, stage_link=over_nvlink(300e9))
    both = replace(tensor, pipeline_parallel=4)
    waits = 2 * LLAMA.layers * slow.delay
    assert tensor.latency(DECODE) > waits
    assert both.interval(DECODE) > waits / 4
    assert both.interval(DECODE) < tensor.latency(DECODE) / 3
    alone = roofline(pipeline_parallel=4, stage_link=over_nvlink(300e9))
    assert replace(alone, tensor_link=slow).interval(DECODE) == alone.interval(DECODE)


def test_indivisible_heads_are_read_whole_on_each_gpu() -> None:
    long = decoding(64, 30_000)
    few = replace(LLAMA, kv_heads=2)
    two, eight = (Roofline(find_gpu("H200"), few, tensor_parallel=n, tensor_link=over_nvlink(1e15)) for n in (2, 8))
    keys = 64 * 30_001 * few.kv_bytes_per_token(2, 8) / (4.8e12 * 0.78)
    assert eight.latency(long) > keys
    assert two.latency(long) < 4 * eight.latency(long)


def test_mixture_reads_the_experts_that_its_tokens_use() -> None:
    one = Roofline(find_gpu("H200"), MIXTRAL)
    # A token reads 2 of 8 experts; many tokens read all of them.
    alone, many = one.latency(decoding(1, 10)), one.latency(decoding(64, 10))
    assert 2 < many / alone < 4


def test_whole_experts_are_uneven_but_cost_at_most_all_of_a_gpus() -> None:
    gpu = find_gpu("L40S")
    cut, whole = (
        Roofline(gpu, A3B, tensor_parallel=4, expert_parallel=expert, tensor_link=over_pcie_slot(31e9))
        for expert in (0, 1)
    )
    for sequences in (1, 8, 64):
        assert cut.latency(decoding(sequences, 500)) <= whole.latency(decoding(sequences, 500))
    crowd = decoding(4096, 1)
    assert whole.latency(crowd) == pytest.approx(cut.latency(crowd))


def test_ranks_that_share_experts_read_less_and_wait() -> None:
    alone = Roofline(find_gpu("H200"), MIXTRAL)
    shared = replace(alone, data_parallel=4, expert_parallel=True)
    assert shared.latency(decoding(64, 10)) < alone.latency(decoding(64, 10))
    dense = Roofline(find_gpu("H200"), LLAMA)
    assert replace(dense, data_parallel=4).latency(decoding(64, 10)) == dense.latency(decoding(64, 10))


def test_every_gpu_is_in_one_table() -> None:
    assert len({model.name for model in MODELS}) == len(MODELS)
    for model in MODELS:
        capability = tuple(map(int, model.compute_capability.split(".")))
        assert (model.fp8_flops is None) == (capability < (8, 9) or model.bf16_flops is None)
        assert 0.95 < model.usable_gib / model.memory_gib < 1
    assert find_model("rtx 3090") is find_gpu("NVIDIA GeForce RTX 3090")
    assert find_gpu("RTX 3090").usable_gib == pytest.approx(23.6, abs=0.1)
    assert find_gpu("A100 80GB").nvlink == 300e9


@pytest.mark.parametrize("name", ["GTX 970", "RTX PRO 4000 Blackwell"])
def test_gpu_of_unknown_speed_has_no_step_times(name: str) -> None:
    with pytest.raises(UnknownGpuError):
        find_gpu(name)


def test_usual_interconnect_of_a_gpu_model() -> None:
    assert usual_for(find_gpu("A100 80GB")).bandwidth == 300e9
    four, three = usual_for(find_gpu("L40S")).bandwidth, usual_for(find_gpu("Tesla T4")).bandwidth
    assert four == pytest.approx(24e9, rel=0.01)
    assert three == pytest.approx(12e9, rel=0.01)
    assert {gpu.pcie_generation for gpu in MODELS} <= PCIE_LANE_GBS.keys()

"""The expected speed of a launch."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import over_nvlink, over_pcie_slot
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.memory_flags import batch_sizes
from vllm_launchers.plan.budget.weights import offloaded_bytes, offloads
from vllm_launchers.plan.pace import Timing, geometry_of, timing_of
from vllm_launchers.presets.model import Workload
from vllm_launchers.simulated.settings import resolve_model
from vllm_launchers.units import GIB
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.known import known_facts

CHAT = Workload(input_tokens_p95=3072, output_tokens_p95=768, prefix_reuse=0.5, concurrency=64)
LONG = Workload(input_tokens_p95=120_000, output_tokens_p95=1000, prefix_reuse=0.0, concurrency=64)


def timed(model: str, gpu: str, gib: float, flags: Flags | None = None, **links: object) -> Timing:
    facts = known_facts(model)
    assert facts is not None
    chosen = {"max-model-len": 4096, "max-num-batched-tokens": 4096, **(flags or {})}
    memory = estimate(facts, chosen, [GpuShape(gpu, gib)], release=(0, 33, 0), workload=CHAT)
    assert memory is not None
    timing = timing_of(facts, chosen, memory, gpu, (0, 33, 0), **links)  # type: ignore[arg-type]
    assert timing is not None
    return timing


def test_plan_and_simulated_engine_use_the_same_timing() -> None:
    facts = known_facts("Qwen/Qwen3-8B-AWQ")
    assert facts is not None
    memory = estimate(facts, {}, [GpuShape("NVIDIA RTX A6000", 48.0)], release=(0, 33, 0))
    assert memory is not None
    plan, simulated = geometry_of(facts, {}, memory), resolve_model("Qwen/Qwen3-8B-AWQ")
    assert plan is not None
    assert plan.parameters == pytest.approx(simulated.parameters, rel=0.01)
    assert plan.active == pytest.approx(simulated.active, rel=0.01)
    assert plan.weight_bytes == pytest.approx(simulated.weight_bytes, rel=0.03)
    assert plan.kv_bytes_per_token(2) == simulated.kv_bytes_per_token(2)
    assert plan.kv_bytes_per_token(1) == simulated.kv_bytes_per_token(1)


def test_parameters_of_a_quantized_checkpoint_are_counted_where_its_config_tells() -> None:
    facts = known_facts("TheBloke/Mixtral-8x7B-Instruct-v0.1-AWQ")
    assert facts is not None
    held = replace(facts, parameters=None, weight_bytes=24_650_000_000, source="cache")  # as read from its files
    memory = estimate(held, {}, [GpuShape("NVIDIA RTX A6000", 48.0)], release=(0, 33, 0))
    assert memory is not None
    geometry = geometry_of(held, {}, memory)
    assert geometry is not None
    assert geometry.parameters == pytest.approx(46.7e9, rel=0.01)
    assert geometry.active == pytest.approx(12.9e9, rel=0.1)


def test_mixture_reads_few_of_its_weights_for_one_request() -> None:
    mixture, dense = (timed(m, "NVIDIA H200", 140.4) for m in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen2.5-32B-Instruct"))
    assert mixture.pace(1, CHAT).tpot_seconds < dense.pace(1, CHAT).tpot_seconds / 3
    assert mixture.roofline.model.active == pytest.approx(3.3e9, rel=0.1)


def test_copies_share_requests_and_stages_overlap() -> None:
    one = timed("Qwen/Qwen2.5-7B-Instruct", "NVIDIA L40S", 45.0)
    two = replace(one, copies=2)
    assert two.pace(64, CHAT).tokens_per_second == pytest.approx(2 * one.pace(32, CHAT).tokens_per_second)
    assert two.pace(1, CHAT) == one.pace(1, CHAT)
    staged = replace(one, roofline=replace(one.roofline, pipeline_parallel=2))
    assert staged.pace(512, CHAT).tokens_per_second > 1.2 * one.pace(512, CHAT).tokens_per_second
    assert staged.pace(1, CHAT).tokens_per_second <= one.pace(1, CHAT).tokens_per_second


def test_prompts_larger_than_a_step_take_several_steps() -> None:
    small = timed("Qwen/Qwen2.5-7B-Instruct", "NVIDIA L40S", 45.0)
    # 64 requests gain a token each while 7,680 prompt tokens arrive, of which a step takes 4,096.
    assert small.pace(64, LONG).tpot_seconds > 1.5 * small.pace(16, LONG).tpot_seconds


def test_links_of_the_machine_are_used() -> None:
    tensor = {"tensor-parallel-size": 2}
    fast = timed("Qwen/Qwen2.5-32B-Instruct", "NVIDIA RTX A6000", 48.0, tensor, tensor_link=over_nvlink(56e9))
    slow = timed("Qwen/Qwen2.5-32B-Instruct", "NVIDIA RTX A6000", 48.0, tensor, tensor_link=over_pcie_slot(8e9))
    assert slow.pace(64, CHAT).tpot_seconds > 1.2 * fast.pace(64, CHAT).tpot_seconds


def test_paces_end_where_memory_does() -> None:
    timing = timed("Qwen/Qwen2.5-7B-Instruct", "NVIDIA L40S", 45.0)
    paces = timing.paces(CHAT, 5.7)
    assert paces.one is not None
    assert paces.some is None
    assert paces.full is not None
    assert paces.full.concurrency == 5
    none = timing.paces(CHAT, 0.5)
    assert (none.one, none.some, none.full) == (None, None, None)
    assert timing.paces(CHAT, None).full == timing.pace(64, CHAT)


def test_unknown_gpu_or_model_has_no_pace() -> None:
    facts = known_facts("Qwen/Qwen3-8B-AWQ")
    assert facts is not None
    memory = estimate(facts, {}, [GpuShape("NVIDIA RTX A6000", 48.0)], release=(0, 33, 0))
    assert memory is not None
    assert timing_of(facts, {}, memory, "something new") is None
    assert timing_of(facts, {}, memory, "") is None
    assert timing_of(replace(facts, heads=None), {}, memory, "NVIDIA RTX A6000") is None
    assert timing_of(facts, {}, memory, "NVIDIA RTX A6000") is not None


@pytest.mark.parametrize("flags", [{"cpu-offload-gb": 2.5}, {"offload-group-size": 8}])
def test_weights_in_main_memory_have_no_pace(flags: Flags) -> None:
    facts = known_facts("Qwen/Qwen3-8B-AWQ")
    assert facts is not None
    memory = estimate(facts, flags, [GpuShape("NVIDIA RTX A6000", 48.0)], release=(0, 33, 0))
    assert memory is not None
    assert timing_of(facts, flags, memory, "NVIDIA RTX A6000") is None
    assert timing_of(facts, dict.fromkeys(flags, 0), memory, "NVIDIA RTX A6000") is not None


def test_flag_for_main_memory_that_vllm_ignores_does_not_count() -> None:
    both: Flags = {"cpu-offload-gb": 2.5, "offload-group-size": 8}
    assert offloaded_bytes(both) == 0.0
    assert offloads(both)
    assert offloaded_bytes({**both, "offload-backend": "uva"}) == 2.5 * GIB
    assert not offloads({"offload-backend": "uva", "offload-group-size": 8})
    assert not offloads({"offload-backend": "prefetch", "cpu-offload-gb": 2.5})


@pytest.mark.parametrize(
    ("model", "gpu", "gib", "release", "flags", "tokens"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "NVIDIA L40S", 45.0, (0, 33, 0), {}, 2048),
        ("Qwen/Qwen2.5-7B-Instruct", "NVIDIA H200", 140.4, (0, 33, 0), {}, 8192),
        ("Qwen/Qwen2.5-7B-Instruct", "NVIDIA B200", 179.1, (0, 33, 0), {}, 16384),
        ("Qwen/Qwen2.5-7B-Instruct", "NVIDIA B200", 179.1, (0, 27, 1), {}, 8192),
        ("Qwen/Qwen2.5-7B-Instruct", "NVIDIA L40S", 45.0, (0, 33, 0), {"performance-mode": "throughput"}, 4096),
        ("Qwen/Qwen2.5-7B-Instruct", "NVIDIA L40S", 45.0, (0, 33, 0), {"enable-chunked-prefill": False}, 16384),
        ("Qwen/Qwen2.5-7B-Instruct", "NVIDIA L40S", 45.0, (0, 33, 0), {"max-num-batched-tokens": "1K"}, 1024),
    ],
)
def test_step_is_the_one_that_memory_was_computed_for(
    model: str, gpu: str, gib: float, release: tuple[int, int, int], flags: Flags, tokens: int
) -> None:
    facts = known_facts(model)
    assert facts is not None
    shape = GpuShape(gpu, gib)
    chosen: Flags = {"max-model-len": 16384, **flags}
    memory = estimate(facts, chosen, [shape], release=release, workload=CHAT)
    assert memory is not None
    timing = timing_of(facts, chosen, memory, gpu, release)
    assert timing is not None
    assert timing.step_tokens == tokens == batch_sizes(facts, chosen, release, shape)[1]


def test_step_holds_a_whole_unchunked_item() -> None:
    facts = known_facts("Qwen/Qwen2.5-7B-Instruct")
    assert facts is not None
    seeing = replace(facts, model_type="gemma4", multimodal=True)
    memory = estimate(seeing, {}, [GpuShape("NVIDIA L40S", 45.0)], release=(0, 33, 0))
    assert memory is not None
    timing = timing_of(seeing, {}, memory, "NVIDIA L40S", (0, 33, 0))
    assert timing is not None
    assert timing.step_tokens == 2496


def test_decode_without_prompts_is_faster_but_slower_than_one_alone() -> None:
    paces = timed("Qwen/Qwen2.5-7B-Instruct", "NVIDIA H200", 140.4).paces(replace(LONG, concurrency=8), None)
    assert paces.full is not None
    assert paces.decoding is not None
    without = timed("Qwen/Qwen2.5-7B-Instruct", "NVIDIA H200", 140.4).pace(8, replace(LONG, prefix_reuse=1.0))
    assert paces.decoding == without
    assert paces.decoding.tpot_seconds < paces.full.tpot_seconds / 2

"""Weights, overhead and KV cache of complete launches."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.plan.budget.budget import EngineReport, GpuShape, MemoryBudget
from vllm_launchers.plan.budget.estimate import estimate
from vllm_launchers.plan.budget.memory_flags import MEMORY_FLAGS, captured_batches
from vllm_launchers.plan.inputs import EarlierReport
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import FlagValue
from vllm_launchers.vllm.flags.flag_table import ValueKind
from vllm_launchers.vllm.flags.releases import assumed_table
from vllm_launchers.vllm.modelfacts.facts import UNKNOWN_FORMAT, Encoder, LayerKind, ModelFacts, Quantization
from vllm_launchers.vllm.modelfacts.known import known_facts
from vllm_launchers.vllm.modelfacts.read import from_name
from vllm_launchers.vllm.release_defaults import Release

GIB = 2**30
SMALL = GpuShape("NVIDIA GeForce RTX 3090", usable_gib=23.6)
LARGE = GpuShape("NVIDIA H100 80GB HBM3", usable_gib=79.2)
LLAMA = ModelFacts(
    model="someone/llama-8B",
    layers=(LayerKind.FULL,) * 32,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    max_context=8192,
    dtype="bfloat16",
    weight_bytes=16_060_522_496,
)


def plan(
    facts: ModelFacts = LLAMA,
    gpu: GpuShape | Gpu | list[GpuShape] | list[Gpu] = SMALL,
    release: tuple[int, int, int] | None = (0, 33, 0),
    workload: Workload | None = None,
    learned: EarlierReport | None = None,
    environment: dict[str, str] | None = None,
    **flags: FlagValue,
) -> MemoryBudget:
    named = {name.replace("_", "-"): value for name, value in flags.items()}
    gpus = gpu if isinstance(gpu, list) else [gpu]
    budget = estimate(facts, named, gpus, release=release, workload=workload, learned=learned, environment=environment)
    assert budget is not None
    return budget


class Read(dict[str, FlagValue]):
    """Flags that remember which of them were read."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def test_flags_that_a_budget_reads_are_known() -> None:
    flags = Read()
    assert estimate(LLAMA, flags, [LARGE], release=(0, 33, 0), draft=LLAMA) is not None
    specs = assumed_table().flags
    assert not [name for name in flags.names - MEMORY_FLAGS if specs[name].kind is not ValueKind.BOOL]


def test_weights_are_the_files_bytes() -> None:
    assert plan().weights_gib == pytest.approx(16_060_522_496 / GIB)


@pytest.mark.parametrize(
    ("model_type", "dtype", "gpu", "release", "times"),
    [
        ("gemma3", "bfloat16", "Tesla T4", (0, 33, 0), 2),  # FP32, as FP16 is refused and BF16 not supported
        ("gemma3", "bfloat16", "NVIDIA A10", (0, 33, 0), 1),
        ("gemma3", "float16", "NVIDIA A10", (0, 33, 0), 1),
        ("llama", "bfloat16", "Tesla T4", (0, 33, 0), 1),
        ("plamo2", "bfloat16", "Tesla T4", (0, 26, 0), 2),
        ("plamo2", "bfloat16", "Tesla T4", (0, 27, 0), 1),
    ],
)  # fmt: skip
def test_weights_take_twice_the_memory_where_vllm_falls_back_to_fp32(
    model_type: str, dtype: str, gpu: str, release: Release, times: int
) -> None:
    facts = replace(LLAMA, model_type=model_type, dtype=dtype)
    weights = plan(facts, GpuShape(gpu, 80.0), release).weights_gib
    assert weights == pytest.approx(times * plan().weights_gib)


def test_sum_matches_vllm() -> None:
    budget = plan(max_num_seqs=64)
    inside = budget.overhead_gib - 0.45  # the CUDA context exists before vLLM starts to count
    assert budget.kv_gib == pytest.approx(23.6 * 0.92 - budget.weights_gib - inside - budget.graphs_gib)


def test_graphs_come_out_of_the_share_since_0_20() -> None:
    share = {"gpu_memory_utilization": 0.9}
    before, since = plan(release=(0, 19, 1), **share), plan(release=(0, 20, 0), **share)
    assert before.kv_gib - since.kv_gib == pytest.approx(since.graphs_gib)
    kept = plan(release=(0, 20, 0), **share, environment={"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"})
    assert kept.kv_gib == before.kv_gib


@pytest.mark.parametrize(("release", "share"), [((0, 19, 1), 0.9), ((0, 20, 0), 0.92), ((0, 33, 0), 0.92)])
def test_default_share(release: tuple[int, int, int], share: float) -> None:
    assert plan(release=release).kv_gib == plan(release=release, gpu_memory_utilization=share).kv_gib


def test_unknown_release_is_treated_as_the_newest_and_reported() -> None:
    budget = plan(release=None)
    assert budget.kv_gib == plan(release=(0, 33, 0)).kv_gib
    assert any("version is unknown" in sentence for sentence in budget.assumed)


@pytest.mark.parametrize(
    ("gpu", "seqs", "batched"),
    [
        (LARGE, 1024, 8192),
        (SMALL, 256, 2048),
        (GpuShape("NVIDIA A100-SXM4-80GB", usable_gib=79.2), 256, 2048),
        (GpuShape("NVIDIA GB10", usable_gib=121.6), 256, 2048),
        (GpuShape("NVIDIA B200", usable_gib=178.0), 1024, 16384),
    ],
)
def test_default_batches_depend_on_the_gpu_size(gpu: GpuShape, seqs: int, batched: int) -> None:
    same = plan(gpu=gpu, max_num_seqs=seqs, max_num_batched_tokens=batched)
    assert plan(gpu=gpu).overhead_gib == same.overhead_gib


def test_sampler_takes_memory_per_sequence_and_vocabulary() -> None:
    few, many = plan(max_num_seqs=512, release=(0, 15, 0)), plan(max_num_seqs=1024, release=(0, 15, 0))
    assert many.overhead_gib - few.overhead_gib == pytest.approx(512 * 128256 * 40 / GIB)


def test_old_gpus_sort_in_every_release() -> None:
    turing, ampere = (GpuShape(name, usable_gib=14.6) for name in ("Tesla T4", "NVIDIA RTX A4000"))
    assert plan(gpu=turing).overhead_gib > plan(gpu=ampere).overhead_gib
    assert plan(gpu=turing, release=(0, 15, 0)).overhead_gib == plan(gpu=ampere, release=(0, 15, 0)).overhead_gib


def test_embedding_models_do_not_sample() -> None:
    assert plan(runner="pooling").overhead_gib < plan().overhead_gib


@pytest.mark.parametrize(
    "flags",
    [
        {"enforce_eager": True},
        {"compilation_config": '{"cudagraph_mode": "NONE"}'},
        {"compilation_config.cudagraph_mode": "none"},
        {"optimization_level": 0},
        {"max_cudagraph_capture_size": 0},
    ],
)
def test_no_graph_memory_without_captures(flags: dict[str, FlagValue]) -> None:
    assert plan(**flags).graphs_gib == 0
    assert plan(**flags).kv_gib > plan().kv_gib


def test_fewer_batch_sizes_need_fewer_graphs() -> None:
    assert 0 < plan(max_num_seqs=2).graphs_gib < plan(max_num_seqs=32).graphs_gib < plan().graphs_gib
    sizes = '{"cudagraph_capture_sizes": [1, 2, 4]}'
    assert plan(compilation_config=sizes).graphs_gib == plan(max_num_seqs=2).graphs_gib


@pytest.mark.parametrize(
    ("flags", "largest"),
    [
        ({}, 512),
        ({"max-cudagraph-capture-size": 300}, 288),
        ({"cudagraph-capture-sizes": 8}, 8),
        ({"cudagraph-capture-sizes": "[1, 2, 24]"}, 24),
        ({"compilation-config": '{"cudagraph_capture_sizes": [1, 256]}'}, 256),
        ({"enforce-eager": True}, 0),
    ],
)
def test_largest_captured_batch(flags: dict[str, FlagValue], largest: int) -> None:
    assert max(captured_batches(flags, 256, 8192, LARGE, (0, 33, 0)), default=0) == largest
    assert max(captured_batches({}, 8, 8192, LARGE, (0, 33, 0))) == 16, "twice as many tokens as sequences"


@pytest.mark.parametrize(
    ("name", "release", "seqs", "largest"),
    [
        ("NVIDIA B200", (0, 33, 0), 1024, 1024),
        ("NVIDIA B300", (0, 28, 0), 1024, 1024),
        ("NVIDIA B200", (0, 33, 0), 320, 640),
        ("NVIDIA B200", (0, 24, 0), 1024, 512),
        ("NVIDIA H100 80GB HBM3", (0, 33, 0), 1024, 512),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (0, 33, 0), 1024, 512),
    ],
)
def test_larger_batches_are_captured_on_capability_10(
    name: str, release: tuple[int, int, int], seqs: int, largest: int
) -> None:
    shape = GpuShape(name, usable_gib=90.0)
    assert max(captured_batches({}, seqs, 8192, shape, release)) == largest
    more = plan(gpu=shape, release=release, max_num_seqs=seqs).graphs_gib / plan(max_num_seqs=256).graphs_gib
    assert (more > 1.1) == (largest > 512)


@pytest.mark.parametrize(
    ("release", "flags", "seqs", "batched", "drafts", "added"),
    [
        ((0, 31, 0), {}, 100, 8192, 0, {100}),
        ((0, 30, 0), {}, 100, 8192, 0, set()),
        ((0, 24, 0), {}, 256, 300, 0, {300}),
        ((0, 20, 0), {}, 256, 300, 0, set()),
        ((0, 30, 0), {}, 6, 8192, 2, {3, 6, 12, 18}),
        ((0, 28, 0), {}, 6, 8192, 2, set()),
        ((0, 33, 0), {"max-cudagraph-capture-size": 16}, 6, 8192, 2, set()),
        ((0, 20, 0), {"performance-mode": "interactivity"}, 4, 8192, 0, {3, 5, 6, 7}),
        ((0, 16, 0), {"performance-mode": "interactivity"}, 4, 8192, 0, set()),
    ],
)
def test_captured_batches_besides_the_usual(
    release: tuple[int, int, int], flags: dict[str, FlagValue], seqs: int, batched: int, drafts: int, added: set[int]
) -> None:
    found = captured_batches(flags, seqs, batched, LARGE, release, drafts)
    assert {size for size in found if size not in {1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)}} == added
    assert max(found) <= batched


def test_no_batch_beyond_a_step_is_captured() -> None:
    sizes: dict[str, FlagValue] = {"cudagraph-capture-sizes": "[8, 64]"}
    assert captured_batches(sizes, 32, 32, LARGE, (0, 33, 0)) == [8]
    assert max(captured_batches({}, 32, 40, LARGE, (0, 16, 0))) == 40


def test_tensor_parallelism_splits_weights() -> None:
    budget = plan(tensor_parallel_size=4)
    assert budget.weights_gib == pytest.approx(16_060_522_496 / 4 / GIB)
    assert len(budget.per_gpu) == 4
    assert {gpu.index for gpu in budget.per_gpu} == {None}


def test_pipeline_stages_split_layers_like_vllm() -> None:
    # 32 layers over 3 stages: vLLM gives the remaining layers to the stages before the last.
    uneven = plan(pipeline_parallel_size=3)
    first, second, last = (gpu.weights_gib for gpu in uneven.per_gpu)
    embedding = 128256 * 4096 * 2 / GIB
    layer = (LLAMA.weight_bytes / GIB - 2 * embedding) / 32  # type: ignore[operator]
    assert first == pytest.approx(11 * layer + embedding)
    assert second == pytest.approx(11 * layer)
    assert last == pytest.approx(10 * layer + embedding)
    chosen = plan(pipeline_parallel_size=3, environment={"VLLM_PP_LAYER_PARTITION": "8,16,8"})
    assert chosen.per_gpu[1].weights_gib == pytest.approx(16 * layer)
    for odd in ("8,16", f"8,16,{'9' * 5000}", "8,١٦,8"):
        assert plan(pipeline_parallel_size=3, environment={"VLLM_PP_LAYER_PARTITION": odd}) == uneven
    assert sum(gpu.weights_gib for gpu in uneven.per_gpu) == pytest.approx(LLAMA.weight_bytes / GIB)  # type: ignore[operator]


def test_tied_embeddings_are_stored_once_and_loaded_on_both_ends() -> None:
    tied, embedding = replace(LLAMA, tied=True), 128256 * 4096 * 2
    body = 16_060_522_496 - embedding
    first, middle, last = (gpu.weights_gib for gpu in plan(tied, pipeline_parallel_size=3).per_gpu)
    assert first == pytest.approx((body * 11 / 32 + embedding) / GIB)
    assert middle == pytest.approx(body * 11 / 32 / GIB)
    assert last == pytest.approx((body * 10 / 32 + embedding) / GIB)
    assert plan(tied, quantization="fp8").weights_gib == pytest.approx((body / 2 + embedding) / GIB)


def test_fullest_stage_decides() -> None:
    budget = plan(pipeline_parallel_size=3)
    assert budget.kv_bytes_per_token in (11 * 4096, 10 * 4096)
    tokens = [gpu.kv_gib * GIB for gpu in budget.per_gpu]
    assert budget.kv_tokens is not None
    for room, layers in zip(tokens, (11, 11, 10), strict=True):
        assert budget.kv_tokens * layers * 4096 <= room * 1.001


MIXTURE = replace(
    LLAMA,
    experts=64,
    experts_per_token=8,
    expert_intermediate_size=1024,
    weight_bytes=60 * 10**9,
)


def test_experts_are_spread_over_all_ranks_and_the_rest_is_copied() -> None:
    experts = 3 * 1024 * 4096 * 64 * 32 * 2
    budget = plan(MIXTURE, LARGE, data_parallel_size=4, enable_expert_parallel=True)
    assert budget.weights_gib == pytest.approx((experts / 4 + 60 * 10**9 - experts) / GIB)
    assert len(budget.per_gpu) == 4
    copies = '{"num_redundant_experts": 8}'
    more = plan(MIXTURE, LARGE, data_parallel_size=4, enable_expert_parallel=True, eplb_config=copies)
    assert more.weights_gib - budget.weights_gib == pytest.approx(experts * 2 / 64 / GIB)
    assert plan(data_parallel_size=2).weights_gib == plan().weights_gib


@pytest.mark.parametrize(
    ("gpu", "flags", "grown"),
    [
        ("NVIDIA L40S", {}, 3072 / 2880 * 2944 / 2880),
        ("NVIDIA RTX A6000", {"tensor_parallel_size": 4}, 3072 / 2880 * 768 / 720),
        ("NVIDIA L40S", {"tensor_parallel_size": 4, "enable_expert_parallel": True}, 3072 / 2880 * 2944 / 2880),
        ("NVIDIA H100 80GB HBM3", {"tensor_parallel_size": 4}, 1.0),
    ],
)
def test_marlin_pads_experts_in_mxfp4(gpu: str, flags: dict[str, FlagValue], grown: float) -> None:
    facts = known_facts("openai/gpt-oss-20b")
    assert facts is not None
    shape, ranks = GpuShape(gpu, 80.0), int(str(flags.get("tensor_parallel_size", 1)))
    experts = 3 * 2880 * 2880 * 32 * 24 * 4.25 / 8
    expected = (13_761_264_768 - experts + experts * grown) / ranks / GIB
    assert plan(facts, shape, **flags).weights_gib == pytest.approx(expected)


def test_cpu_offload_frees_the_gpu() -> None:
    assert plan(cpu_offload_gb=4).kv_gib == pytest.approx(plan().kv_gib + 4)
    assert plan(cpu_offload_gb=400).weights_gib == 0


def test_fixed_cache_size_is_used_unchanged() -> None:
    assert plan(kv_cache_memory_bytes=2 * GIB).kv_gib == 2
    assert plan(kv_cache_memory_bytes="2G").kv_gib == 2
    assert plan(kv_cache_memory_bytes=2 * GIB, gpu_memory_utilization=0.5).kv_gib == 2


def test_block_override_sets_the_cache() -> None:
    budget = plan(num_gpu_blocks_override=100, max_model_len=1024)
    assert budget.kv_tokens == 1600
    assert plan(num_gpu_blocks_override=100).kv_tokens == 1584, "the longest request, without vLLM's own block"
    assert budget.kv_gib == pytest.approx(100 * 16 * 131072 / GIB)


@pytest.mark.parametrize(("blocks", "fits"), [(1000, True), (10**6, False)])
def test_block_override_must_fit_the_gpu(blocks: int, fits: bool) -> None:
    assert plan(num_gpu_blocks_override=blocks).fits is fits


def test_auto_takes_the_longest_context_that_fits() -> None:
    facts = replace(LLAMA, max_context=1_000_000)
    budget = plan(facts, max_model_len="auto")
    assert budget.max_model_len is not None
    assert budget.max_model_len < 1_000_000
    assert budget.max_concurrency is not None
    assert 1 <= budget.max_concurrency < 1.01
    assert plan(max_model_len="auto").max_model_len == 8192


def test_lengths_may_have_units() -> None:
    assert plan(max_model_len="4K").max_model_len == 4096
    assert plan(max_model_len="4k").max_model_len == 4000


def test_workloads_are_counted_at_their_own_length() -> None:
    work = Workload(input_tokens_p95=1500, output_tokens_p95=548, prefix_reuse=0.0, concurrency=8)
    budget = plan(workload=work, max_model_len=8192)
    assert budget.max_concurrency is not None
    assert budget.concurrency_p95 == pytest.approx(budget.max_concurrency * 4)


def test_missing_memory_is_reported() -> None:
    budget = plan(replace(LLAMA, weight_bytes=30 * 10**9))
    assert not budget.fits
    assert budget.kv_gib < -5
    assert budget.kv_tokens == 0
    assert budget.max_concurrency == 0
    assert budget.per_gpu[0].kv_gib == 0
    assert budget.per_gpu[0].free_gib < 0


@pytest.mark.parametrize(
    ("flags", "factor"),
    [({"quantization": "fp8"}, 0.5), ({"quantization": "bitsandbytes"}, 4.5 / 16), ({"dtype": "float32"}, 2.0)],
)
def test_weights_quantized_while_loading(flags: dict[str, FlagValue], factor: float) -> None:
    embeddings = 2 * 128256 * 4096 * 2
    body = 16_060_522_496 - embeddings
    grown = 2.0 if "dtype" in flags else 1.0
    assert plan(**flags).weights_gib == pytest.approx((body * factor + embeddings * grown) / GIB)


def test_quantized_checkpoint_is_not_quantized_again() -> None:
    facts = replace(LLAMA, weight_bytes=9 * 10**9, quantization=Quantization("fp8", 8))
    assert plan(facts, quantization="fp8").weights_gib == pytest.approx(9 * 10**9 / GIB)


def test_float32_checkpoints_are_loaded_in_half_precision() -> None:
    facts = replace(LLAMA, weight_bytes=32 * 10**9, dtype="float32")
    assert plan(facts).weights_gib == pytest.approx(16 * 10**9 / GIB)


@pytest.mark.parametrize(
    ("model", "quantization", "low", "high"),
    [
        ("org/model-8B-Instruct", None, 14.5, 15.5),
        ("org/model-500M", None, 0.9, 1.0),
        ("org/mixture-8x7B", None, 84, 90),
        ("org/model-8B-AWQ", Quantization("awq", 4, 128), 4.5, 6.0),
        ("org/model-8B-FP8", Quantization("fp8"), 8.0, 8.6),
        ("org/model-8B-NVFP4", Quantization("compressed-tensors"), 4.5, 6.0),
    ],
)
def test_parameters_from_the_name(model: str, quantization: Quantization | None, low: float, high: float) -> None:
    facts = replace(LLAMA, model=model, quantization=quantization, weight_bytes=None)
    assert low < plan(facts, LARGE).weights_gib < high


def test_stated_parameters_precede_the_name() -> None:
    budget = plan(replace(LLAMA, weight_bytes=None, parameters=3 * 10**9))
    assert budget.weights_gib == pytest.approx(6 * 10**9 / GIB)
    assert not budget.assumed


def test_no_estimate_without_known_weights_or_gpu() -> None:
    assert estimate(replace(LLAMA, model="org/mystery", weight_bytes=None), {}, [SMALL]) is None
    assert estimate(LLAMA, {}, []) is None
    assert estimate(LLAMA, {}, [GpuShape("some new card")]) is None


def test_gpu_known_by_name_needs_no_size() -> None:
    assert plan(gpu=GpuShape("NVIDIA GeForce RTX 3090")).per_gpu[0].total_gib == pytest.approx(23.6, abs=0.1)


def test_memory_of_others_on_the_gpus_is_counted() -> None:
    gpus = [
        Gpu(index=2, name="NVIDIA GeForce RTX 3090", memory_gib=24.0, free_gib=23.3),
        Gpu(index=5, name="NVIDIA GeForce RTX 3090", memory_gib=24.0, free_gib=13.0),
    ]
    one, two = plan(gpu=gpus, tensor_parallel_size=2).per_gpu
    assert (one.index, two.index) == (2, 5)
    assert one.others_gib < 0.4
    assert two.others_gib == pytest.approx(two.total_gib - 13.0)
    assert two.free_gib < one.free_gib


def test_smaller_gpu_decides() -> None:
    both = plan(gpu=[LARGE, SMALL], tensor_parallel_size=2)
    assert both.kv_gib < plan(gpu=[LARGE, LARGE], tensor_parallel_size=2).kv_gib
    assert both.per_gpu[0].kv_gib == pytest.approx(both.per_gpu[1].kv_gib, abs=0.01)


def test_vision_models_include_their_encoder() -> None:
    pictures = replace(
        LLAMA, model_type="qwen2_5_vl", multimodal=True, encoder=Encoder(1280, 3420, True, True, 1176, 4.0, 16384)
    )
    text_only = plan(max_num_seqs=16)
    assert plan(pictures, max_num_seqs=16).overhead_gib > text_only.overhead_gib + 1
    for flags in ({"skip_mm_profiling": True}, {"limit_mm_per_prompt": '{"image": 0, "video": 0}'}):
        assert plan(pictures, max_num_seqs=16, **flags).overhead_gib == text_only.overhead_gib


def test_cpu_build_uses_its_given_cache_size() -> None:
    budget = estimate(LLAMA, {}, [], build="cpu", environment={"VLLM_CPU_KVCACHE_SPACE": "8"})
    assert budget is not None
    assert budget.kv_gib == 8
    assert budget.per_gpu == ()
    assert budget.kv_tokens == 8 * GIB // 131072
    assert budget.assumed == ("the defaults of vLLM 0.33, since your version is unknown",)
    assert estimate(LLAMA, {}, [], build="cpu", release=(0, 32, 0)) is None, "a share of memory, less vLLM's own"


@pytest.mark.parametrize(
    "flags",
    [
        {"gpu_memory_utilization": "much"},
        {"gpu_memory_utilization": 7},
        {"tensor_parallel_size": "two"},
        {"tensor_parallel_size": 0},
        {"max_model_len": "long"},
        {"max_num_seqs": True},
        {"speculative_config": "{broken"},
        {"speculative_config": "[1]"},
        {"compilation_config": '{"cudagraph_capture_sizes": "all"}'},
        {"cpu_offload_gb": "nan"},
        {"cpu_offload_gb": -5},
        {"block_size": "16.5"},
    ],
)
def test_invalid_values_count_as_unset(flags: dict[str, FlagValue]) -> None:
    assert plan(**flags).kv_gib == pytest.approx(plan().kv_gib)


def test_reported_start_corrects_the_next_estimate() -> None:
    before = plan(max_num_seqs=64)
    report = EngineReport(weights_gib=15.4, kv_gib=before.kv_gib - 1.5)
    learned = EarlierReport(report, before.weights_gib, before.kv_gib)
    after = plan(learned=learned, max_num_seqs=64)
    assert after.source == "estimate, corrected"
    assert after.weights_gib == pytest.approx(15.4)
    assert after.kv_gib == pytest.approx(before.kv_gib - 1.5)
    smaller = plan(learned=learned, max_num_seqs=64, gpu_memory_utilization=0.8)
    assert smaller.kv_gib == pytest.approx(before.kv_gib - 1.5 - 0.12 * 23.6)


def test_report_without_values_corrects_nothing() -> None:
    before = plan()
    after = plan(learned=EarlierReport(EngineReport(), before.weights_gib, before.kv_gib))
    assert after.kv_gib == before.kv_gib


def test_estimate_is_fast_enough_for_every_keystroke() -> None:
    facts = replace(LLAMA, layers=(LayerKind.SLIDING,) * 80 + (LayerKind.FULL,) * 16, window=1024)
    begun = time.process_time()
    for _ in range(20):
        plan(facts, LARGE, tensor_parallel_size=8, max_model_len="auto")
    assert (time.process_time() - begun) / 20 < 0.05  # measured: about a fiftieth of that


def test_adapters_are_reserved_in_full() -> None:
    few, many = plan(enable_lora=True), plan(enable_lora=True, max_loras=8, max_lora_rank=64)
    # Rank 16: 32 layers, 16 bits, widths of the inputs and outputs of seven matrices.
    widths = (5 * 4096 + 4096 + 14336) + (4096 + 2 * 1024 + 2 * 4096 + 2 * 14336)
    assert few.overhead_gib - plan().overhead_gib == pytest.approx(16 * 32 * 2 * widths / GIB)
    assert many.overhead_gib - plan().overhead_gib == pytest.approx(8 * 4 * 16 * 32 * 2 * widths / GIB)


A3B = ModelFacts(
    model="someone/moe-30B-A3B", architecture="Qwen3MoeForCausalLM", layers=(LayerKind.FULL,) * 48, hidden_size=2048,
    intermediate_size=6144, heads=32, kv_heads=4, head_dim=128, experts=128, experts_per_token=8,
    expert_intermediate_size=768, vocabulary=151936, max_context=8192, dtype="bfloat16", weight_bytes=61_100_000_000,
)  # fmt: skip
"""Like Qwen3-30B-A3B."""


def adapters(facts: ModelFacts, release: tuple[int, int, int] = (0, 33, 0), **flags: FlagValue) -> float:
    """GiB of adapters of rank 64 on one GPU."""
    given = {"max_lora_rank": 64, "gpu_memory_utilization": 0.95, **flags}
    one, other = (plan(facts, LARGE, release, **given, **more) for more in ({"enable_lora": True}, {}))
    return one.overhead_gib - other.overhead_gib


def test_adapters_of_all_experts_are_reserved() -> None:
    # Of attention: q and o have 2048 and 4096 values, k and v 2048 and 512.
    attention = 48 * 2 * 64 * (2 * (2048 + 4096) + 2 * (2048 + 512)) / GIB
    experts = 48 * 128 * 2 * 64 * 3 * (2048 + 768) / GIB
    assert experts == pytest.approx(24.75 / 4)
    assert adapters(A3B) == pytest.approx(attention + experts)
    assert adapters(A3B, max_loras=4) == pytest.approx(4 * (attention + experts))
    assert adapters(A3B, (0, 11, 1)) == pytest.approx(attention + experts)
    assert adapters(A3B, (0, 11, 0)) == pytest.approx(attention)
    assert adapters(A3B, lora_target_modules='["q_proj", "v_proj"]') == pytest.approx(attention)
    assert adapters(A3B, lora_target_modules="experts") == pytest.approx(attention + experts)
    assert adapters(replace(A3B, expert_layers=24)) == pytest.approx(attention + experts / 2)
    latent = 48 * 128 * 2 * 64 * 3 * (512 + 768) / GIB
    assert adapters(replace(A3B, expert_hidden_size=512)) == pytest.approx(attention + latent)


def test_adapters_of_experts_are_split_like_the_experts() -> None:
    attention = 48 * 2 * 64 * (3 * 2048 + 4096 + (2048 + 4096 + 2 * 512) / 4) / GIB
    split = 48 * 128 * 2 * 64 * 3 * (2048 + 768 / 4) / GIB
    whole = 48 * 32 * 2 * 64 * 3 * (2048 + 768) / GIB
    assert adapters(A3B, tensor_parallel_size=4) == pytest.approx(attention + split)
    assert adapters(A3B, tensor_parallel_size=4, enable_expert_parallel=True) == pytest.approx(attention + whole)
    sharded = 48 * 2 * 64 * (3 * 2048 + 4096 + 2048 + 4096 + 2 * 512 + 128 * 3 * (2048 + 768)) / 4 / GIB
    assert adapters(A3B, tensor_parallel_size=4, fully_sharded_loras=True) == pytest.approx(sharded)


@pytest.mark.parametrize(
    ("known", "release", "flags", "wide", "narrow"),
    [
        ({}, (0, 33, 0), {}, 3, 128 * 3 * 768),
        ({}, (0, 33, 0), {"tensor_parallel_size": 4}, 3, 128 * 3 * 768 / 4),
        ({}, (0, 33, 0), {"tensor_parallel_size": 4, "enable_expert_parallel": True}, 3, 32 * 3 * 768),
        ({}, (0, 33, 0), {"tensor_parallel_size": 4, "fully_sharded_loras": True}, 3 / 4, 128 * 3 * 768 / 4),
        ({"model_type": "nemotron_h"}, (0, 33, 0), {}, 2, 128 * 2 * 768),
        ({"architecture": "GptOssForCausalLM"}, (0, 32, 0), {}, 3, 128 * 3 * 768),
        ({"architecture": "GptOssForCausalLM"}, (0, 31, 0), {}, 128 * 2, 128 * 3 * 768),
        ({"architecture": "GptOssForCausalLM"}, (0, 31, 0), {"enable_mixed_moe_lora_format": True}, 3, 128 * 3 * 768),
    ],
)
def test_experts_may_share_the_wide_matrices_of_adapters(
    known: dict[str, str], release: tuple[int, int, int], flags: dict[str, FlagValue], wide: float, narrow: float
) -> None:
    facts, given = replace(A3B, **known), {"enable_moe_shared_loras": True, **flags}
    without = adapters(facts, release, lora_target_modules="q_proj", **given)
    values = wide * 2048 + narrow
    assert adapters(facts, release, **given) - without == pytest.approx(48 * 2 * 64 * values / GIB)


@pytest.mark.parametrize(
    ("known", "release", "flags", "values"),
    [
        ({"architecture": "GptOssForCausalLM"}, (0, 33, 0), {}, 2 * 2048 + 3 * 768),
        ({"architecture": "GptOssForCausalLM"}, (0, 33, 0), {"enable_mixed_moe_lora_format": True}, 3 * (2048 + 768)),
        ({"architecture": "GptOssForCausalLM"}, (0, 11, 2), {}, 3 * (2048 + 768)),
        ({"model_type": "nemotron_h"}, (0, 33, 0), {}, 2 * (2048 + 768)),
        ({"model_type": "nemotron_h"}, (0, 14, 0), {}, 3 * (2048 + 768)),
    ],
)
def test_adapters_of_experts_follow_their_projections(
    known: dict[str, str], release: tuple[int, int, int], flags: dict[str, FlagValue], values: int
) -> None:
    facts = replace(A3B, **known)
    without = adapters(facts, release, lora_target_modules="q_proj", **flags)
    assert adapters(facts, release, **flags) - without == pytest.approx(48 * 128 * 2 * 64 * values / GIB)
    if "model_type" in known:
        alone = replace(facts, layers=(LayerKind.FULL, LayerKind.NONE) * 24)
        half = adapters(alone, release, **flags) - adapters(alone, release, lora_target_modules="q_proj", **flags)
        assert half == pytest.approx(24 * 128 * 2 * 64 * values / GIB)


def test_latent_attention_unpacks_long_contexts() -> None:
    latent = replace(LLAMA, kv_lora_rank=512, qk_rope_head_dim=64, heads=128, v_head_dim=128)
    common: dict[str, FlagValue] = {"max_num_seqs": 1, "max_num_batched_tokens": 512}
    short, long = (plan(latent, LARGE, max_model_len=length, **common) for length in (1024, 8192))
    assert long.overhead_gib - short.overhead_gib == pytest.approx((65536 - 8192) * 128 * 256 * 2 / GIB)


def test_unknown_cache_facts_are_reported() -> None:
    budget = plan(replace(LLAMA, missing=("longest context", "how its compressed attention keeps the KV cache")))
    assert budget.assumed == ("unknown and not counted: how its compressed attention keeps the KV cache",)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("eagle3", "weights are not counted; its KV cache is, with 1 layer(s)"),
        ("draft_model", "weights are not counted; its KV cache neither"),
        ("mtp", ""),
        ("ngram", ""),
    ],
)
def test_unknown_draft_facts_are_reported(method: str, expected: str) -> None:
    assumed = plan(speculative_config=f'{{"method": "{method}", "num_speculative_tokens": 2}}').assumed
    assert bool(assumed) == bool(expected)
    assert all(expected in sentence for sentence in assumed)


def test_tokens_per_gib_follow_the_engines_report() -> None:
    """62,700 tokens were once shown for a staged change next to a measured 54,500."""
    before = plan(max_num_seqs=64)
    assert before.kv_tokens is not None
    report = EngineReport(kv_gib=before.kv_gib, kv_tokens=round(before.kv_tokens * 0.87))
    learned = EarlierReport(report, before.weights_gib, before.kv_gib, before.kv_tokens)
    staged = plan(learned=learned, max_num_seqs=48)
    plain = plan(max_num_seqs=48)
    assert staged.kv_tokens == pytest.approx((plain.kv_tokens or 0) * 0.87, rel=0.02)
    assert staged.max_concurrency == pytest.approx((plain.max_concurrency or 0) * 0.87, rel=0.02)
    blocks = plan(learned=learned, num_gpu_blocks_override=100)
    assert blocks.kv_tokens == plan(num_gpu_blocks_override=100).kv_tokens, "their number is given"


@pytest.mark.parametrize(
    ("name", "gib", "words"),
    [
        ("org/Foo-8B-4bit", (3.7, 4.3), "taken from the name: 4"),
        ("org/Foo-8B-8bit", (7.2, 7.8), "taken from the name: 8 bits per weight"),
        ("org/Foo-8B", (14.7, 15.1), "16 bits assumed"),
        ("org/Qwen3-8B-4bit", (3.7, 7.0), "taken from the name"),
    ],
)
def test_assumed_precision_is_stated(name: str, gib: tuple[float, float], words: str) -> None:
    found = plan(from_name(name), LARGE)
    assert gib[0] < found.weights_gib < gib[1]
    assert any(words in one for one in found.assumed)


def test_known_precision_is_not_called_assumed() -> None:
    for facts in (LLAMA, replace(LLAMA, quantization=Quantization(UNKNOWN_FORMAT, 4)), from_name("Qwen/Qwen3-8B")):
        assert not [one for one in plan(facts, LARGE).assumed if "precision" in one or "16 bits" in one]


def test_unknown_number_of_kv_heads_leaves_the_cache_unknown() -> None:
    found = plan(replace(LLAMA, kv_heads=None))
    assert (found.kv_tokens, found.max_concurrency) == (None, None)


def test_encoder_has_no_kv_cache() -> None:
    found = plan(replace(LLAMA, architecture="XLMRobertaForSequenceClassification"))
    assert (found.kv_gib, found.kv_tokens, found.max_concurrency, found.kv_bytes_per_token) == (0, None, None, None)
    assert found.fits
    whole = plan(max_num_batched_tokens=LLAMA.max_context or 0)  # a step holds any prompt
    assert found.per_gpu[0].free_gib == pytest.approx(whole.per_gpu[0].free_gib + whole.kv_gib)
    assert not plan(replace(LLAMA, architecture="BertModel", weight_bytes=40 * GIB)).fits
    assert any("no KV cache" in one for one in found.assumed)

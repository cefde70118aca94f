"""Fixes offered after a failure contain the values in the log, and never what the server already has."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_console.diagnosis.accepted import accepted
from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.failure.diagnose import NOTHING_SEEN, diagnose
from vllm_console.diagnosis.failure.failure_line import FailureLine
from vllm_console.diagnosis.failure.fixes import environment, settings
from vllm_console.diagnosis.finding import Cause, Diagnosis, Fix, change_text, diagnosis_document, diagnosis_lines
from vllm_console.diagnosis.live.fixes import fp8_cache_fix, share_prefixes
from vllm_console.diagnosis.live.rule import Evidence
from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.vllm.flags.changes import Changes, Flags, FlagValue
from vllm_launchers.vllm.flags.releases import release_table
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, Quantization
from vllm_launchers.vllm.release_defaults import Release

SHORT = (
    "ValueError: To serve at least one request with the model's max seq len (32768), (4.50 GiB KV cache is needed, "
    "which is larger than the available KV cache memory (2.25 GiB)."
)


def of(end: str, flags: Flags | None = None, *before: str) -> Diagnosis:
    return diagnose([*before, "Traceback (most recent call last):", '  File "a.py", line 1, in f', end], 1, flags)


def first(end: str, flags: Flags | None = None, *before: str) -> Changes:
    return of(end, flags, *before).fixes[0].changes


def test_fitting_context_is_vllms_own_estimate() -> None:
    message = f"{SHORT} Based on the available memory, the estimated maximum model length is 16410. Try …"
    assert first(message) == Changes({"max-model-len": 16400})


def test_without_an_estimate_the_context_scales_with_memory() -> None:
    assert first(SHORT) == Changes({"max-model-len": 16384})


def test_older_message_states_the_cache_tokens() -> None:
    text = "ValueError: The model's max seq len (40960) is larger than the maximum number of tokens that can be stored in KV cache (35008). Try"  # noqa: E501
    found = of(text)
    assert found.cause is Cause.KV_CACHE_TOO_SMALL
    assert found.fixes[0].changes == Changes({"max-model-len": 35008})


def test_block_override_is_removed() -> None:
    changes = [fix.changes for fix in of(SHORT, {"num-gpu-blocks-override": 40}).fixes]
    assert changes == [Changes({"max-model-len": 16384}), Changes(unset=("num-gpu-blocks-override",))]


def test_active_settings_are_not_offered_again() -> None:
    flags: Flags = {"kv-cache-dtype": "fp8", "gpu-memory-utilization": 0.95}
    names = {name for fix in of(SHORT, flags).fixes for name in fix.changes.set}
    assert names == {"max-model-len"}


@pytest.mark.parametrize(
    ("free", "total", "fitting"),
    [(13.58, 15.99, 0.84), (31.44, 47.38, 0.65), (79.0, 79.2, 0.99), (0.68, 31.35, None), (7.0, 24.0, None)],
)
def test_utilization_is_lowered_to_free_memory(free: float, total: float, fitting: float | None) -> None:
    text = (
        f"ValueError: Free memory on device cuda:0 ({free}/{total} GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 22 GiB). Decrease it."
    )
    found = of(text)
    assert found.cause is Cause.FREE_MEMORY_BELOW_UTILIZATION
    if fitting is None:
        assert all(fix.changes.empty for fix in found.fixes)
    else:
        assert found.fixes[0].changes == Changes({"gpu-memory-utilization": fitting})
        assert fitting * total < free


@given(st.floats(0.1, 200), st.floats(1, 200))
def test_offered_utilization_always_fits(free: float, total: float) -> None:
    text = f"ValueError: Free memory on device ({free:.2f}/{total:.2f} GiB) on startup is less than desired GPU memory utilization (0.9, 1 GiB)"  # noqa: E501
    for fix in of(text).fixes:
        value = fix.changes.set.get("gpu-memory-utilization")
        if value is not None:
            assert float(value) * float(f"{total:.2f}") < float(f"{free:.2f}")


def test_flags_are_read_from_the_log_if_not_given() -> None:
    args = "(APIServer pid=3) INFO 11-20 10:00:00 [u.py:1] non-default args: {'model': 'm', 'gpu_memory_utilization': 0.8, 'served_model_name': ['a'], 'x': <obj>}"  # noqa: E501
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    args += "\nINFO 11-20 10:00:00 [k.py:1] GPU KV cache size: 5,000 tokens"
    assert first(text, None, *args.split("\n")) == Changes({"gpu-memory-utilization": 0.75})
    assert first(text, {"gpu-memory-utilization": 0.5}, *args.split("\n")) == Changes({"gpu-memory-utilization": 0.45})


def test_default_utilization_is_that_of_the_release() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    old = "INFO 11-20 10:00:00 [api_server.py:1] vLLM API server version 0.11.2"
    taken = "INFO 11-20 10:00:00 [k.py:1] GPU KV cache size: 5,000 tokens"
    assert first(text, None, old, taken) == Changes({"gpu-memory-utilization": 0.85})
    assert first(text, None, taken) == Changes({"gpu-memory-utilization": 0.87})


def test_utilization_is_lowered_by_the_missing_memory() -> None:
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of "
        "24.00 GiB of which 512.00 MiB is free. Process 1 has 23 GiB memory in use."
    )
    taken = "INFO 11-20 10:00:00 [k.py:1] GPU KV cache size: 5,000 tokens"
    assert first(text, {"gpu-memory-utilization": 0.9}, taken) == Changes({"gpu-memory-utilization": 0.78})


def test_before_kv_cache_allocation_smaller_steps_help() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    tokens = "INFO 11-20 10:00:00 [s.py:1] Chunked prefill is enabled with max_num_batched_tokens=8192."
    found = of(text, {"max-num-seqs": 64}, tokens)
    assert found.fixes[0].changes == Changes({"max-num-batched-tokens": 4096})
    assert found.fixes[1].changes == Changes({"max-num-seqs": 32})
    assert all("gpu-memory-utilization" not in fix.changes.set for fix in found.fixes)


def out_of_memory(asked: str = "2.00", unused: str = "17.50", own: str = "78.50") -> str:
    """PyTorch's message on a GPU of 79.1 GiB, where this process alone uses ``own`` GiB."""
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total capacity of "
        f"79.10 GiB of which 612.00 MiB is free. Including non-PyTorch memory, this process has {own} GiB memory in "
        f"use. Of the allocated memory 60.10 GiB is allocated by PyTorch, and {unused} GiB is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def reasons(text: str, flags: Flags | None = None) -> str:
    return " ".join(fix.why for fix in of(text, flags).fixes)


def test_expandable_segments_help_if_enough_is_reserved_but_unused() -> None:
    segments = "--env PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert segments in of(out_of_memory()).fixes[0].why
    assert "sleep mode" in of(out_of_memory()).fixes[0].tradeoff, "its flags are unknown"
    assert of(out_of_memory(), {"max-num-seqs": 64}).fixes[0].tradeoff == ""
    assert segments not in reasons(out_of_memory(unused="1.20"))
    refused: tuple[Flags, ...] = (
        {"enable-sleep-mode": True},
        {"kv-transfer-config": "{}"},
        {"kv-transfer-config.kv_connector": "NixlConnector"},
        {"kv-offloading-size": 8},
        {"tensor-parallel-size": 2},
    )
    for refusing in refused:
        assert segments not in reasons(out_of_memory(), refusing), refusing


def test_lower_utilization_is_offered_in_words_if_the_process_itself_fills_the_gpu() -> None:
    assert "Lower --gpu-memory-utilization" in reasons(out_of_memory())
    assert "Lower --gpu-memory-utilization" not in reasons(out_of_memory(), {"kv-cache-memory-bytes": 1 << 30})


def test_no_free_memory_is_enough_for_more_than_the_whole_gpu() -> None:
    for own in ("78.50", "30.00"):  # with 30, others hold most of the rest
        assert "another GPU" not in reasons(out_of_memory("96.00", own=own))
        assert "more free memory" not in reasons(out_of_memory("96.00", own=own))
        found = of(out_of_memory("96.00", own=own))
        assert "gpu-memory-utilization" not in str([(fix.changes.set, fix.why) for fix in found.fixes])
        names = [name for fix in found.fixes for name in fix.changes.set]
        assert names == ["max-num-batched-tokens", "max-num-seqs", "tensor-parallel-size"]
    assert "more free memory" in reasons(out_of_memory(own="30.00"))


def test_unknown_flags_are_renamed_or_removed() -> None:
    found = diagnose(["vllm: error: unrecognized arguments: --swap-space 4 --no-such-flag --max-num-seq=16"], 2)
    gone = ("swap-space", "no-such-flag", "max-num-seq")
    changes = [fix.changes for fix in found.fixes]
    assert changes == [Changes({"kv-offloading-size": 4, "max-num-seqs": 16}, gone), Changes(unset=gone)]
    assert "--kv-offloading-size" in found.fixes[0].why
    assert "--swap-space, --no-such-flag, --max-num-seq" in found.fixes[1].why


def test_unknown_flags_without_a_similar_name_are_removed() -> None:
    found = diagnose(["vllm: error: unrecognized arguments: --no-such-flag --x=1"], 2)
    assert [fix.changes for fix in found.fixes] == [Changes(unset=("no-such-flag", "x"))]


def test_new_name_is_offered_only_to_releases_that_know_it() -> None:
    lines = ["INFO 11-20 10:00:00 [a.py:1] vLLM API server version 0.9.2"]
    found = diagnose([*lines, "vllm: error: unrecognized arguments: --kv-offloading-sizes 4"], 2)
    assert found.fixes[0].changes == Changes(unset=("kv-offloading-sizes",))


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (
            "ValueError: max_num_batched_tokens (512) must be greater than or equal to max_num_seqs (1024).",
            Changes({"max-num-batched-tokens": 1024}),
        ),
        (
            "ValueError: GPU memory utilization must be less than 1.0. Got 90.0.",
            Changes({"gpu-memory-utilization": 0.9}),
        ),
        (
            "ValueError: GPU memory utilization must be less than 1.0. Got 1.5.",
            Changes(unset=("gpu-memory-utilization",)),
        ),
        (
            "ValueError: User-specified max_model_len (9999) is greater than the derived max_model_len "
            "(max_position_embeddings=4096.0 or model_max_length=None in model's config.json).",
            Changes({"max-model-len": 4096}),
        ),
        (
            "KeyError: 'invalid tool call parser: hermes2 (chose from { granite,hermes,mistral })'",
            Changes({"tool-call-parser": "hermes"}),
        ),
        ("ValueError: Unknown quantization method: foo.", Changes(unset=("quantization",))),
        (
            "AssertionError: In Mamba cache align mode, block_size (2096) must be <= max_num_batched_tokens (2048).",
            Changes({"max-num-batched-tokens": 2096}),
        ),
        (
            "ValueError: Chunked MM input disabled but max_tokens_per_mm_item (6404) is larger than "
            "max_num_batched_tokens (2048). Please increase max_num_batched_tokens.",
            Changes({"max-num-batched-tokens": 6404}),
        ),
        (
            "ValueError: max_num_seqs (1024) exceeds available Mamba cache blocks (331). Each decode sequence requires "
            "one Mamba cache block, so CUDA graph capture cannot proceed.",
            Changes({"max-num-seqs": 331}),
        ),
        (
            "ValueError: long_prefill_token_threshold (512) cannot be greater than the max_model_len (256).",
            Changes({"long-prefill-token-threshold": 256}),
        ),
        (
            "ValueError: tp_size=2 must be divisible by dcp_size=4.",
            Changes({"decode-context-parallel-size": 2}),
        ),
        (
            "ValueError: data_parallel_size_local (2) must be <= data_parallel_size (1)",
            Changes({"data-parallel-size-local": 1}),
        ),
        (
            "ValueError: The `fp8` quantization method no longer supports online quantization.",
            Changes({"quantization": "fp8_per_tensor"}),
        ),
        ("ValueError: LoRA rank 64 is greater than max_lora_rank 16.", Changes({"max-lora-rank": 64})),
        ("ValueError: LoRA rank 33 is greater than max_lora_rank 16.", Changes({"max-lora-rank": 64})),
        (
            "ValueError: Call to add_lora method failed: LoRA is not enabled. Use --enable-lora to enable LoRA.",
            Changes({"enable-lora": True}),
        ),
        ("ValueError: LoRA rank 1024 is greater than max_lora_rank 512.", Changes()),
        (
            "Value error, Number of experts in the model must be greater than 0 when expert parallelism is enabled. "
            "[type=value_error, input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=…]",
            Changes(unset=("enable-expert-parallel",)),
        ),
        (
            "NotImplementedError: Pipeline parallelism is not supported for this model. Supported models implement the "
            "`SupportsPP` interface.",
            Changes(unset=("pipeline-parallel-size",)),
        ),
        (
            "Value error, num_speculative_tokens was provided but without speculative model. [type=value_error, "
            "input_value=ArgsKwargs((), {'num_spec...very_timeout_sec=120))}), input_type=ArgsKwargs]",
            Changes(),
        ),
    ],
)
def test_refused_value_becomes_an_accepted_one(text: str, changes: Changes) -> None:
    found = of(text)
    assert found.cause is Cause.INVALID_FLAG_VALUE
    assert found.fixes[0].changes == changes


@pytest.mark.parametrize(
    ("model", "dtype"), [("google/gemma-3-4b-it", "float32"), ("Qwen/Qwen3-8B", "half"), ("org/m", "half")]
)
def test_gpu_without_bfloat16_gets_a_dtype_that_the_model_allows(model: str, dtype: str) -> None:
    text = "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."
    assert first(text, None, model_of(model)) == Changes({"dtype": dtype})


GEMMA_AWQ = "gaunernst/gemma-3-27b-it-int4-awq"


@pytest.mark.parametrize("model", [GEMMA_AWQ, "RedHatAI/gemma-3-27b-it-quantized.w4a16"])
def test_quantized_model_without_a_dtype_for_the_gpu_needs_another_gpu(model: str) -> None:
    """Its kernels have no FP32, the model no FP16 and the GPU no BF16."""
    text = "ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0."
    (fix,) = of(text, {}, model_of(model)).fixes
    assert fix.changes.empty
    assert "or an unquantized checkpoint" in fix.why


@pytest.mark.parametrize(
    ("model", "gpu", "listed", "offered"),
    [
        ("org/m-AWQ", "NVIDIA A10", "torch.float16, torch.bfloat16", ["float16", "bfloat16"]),
        ("org/m-AWQ", "Tesla T4", "torch.float16, torch.bfloat16", ["float16"]),
        ("org/m-NVFP4", "NVIDIA A10", "torch.bfloat16, torch.float16, torch.float8_e4m3fn", ["bfloat16", "float16"]),
        ("org/m-GGUF", "NVIDIA A10", "torch.float16, torch.float32", ["float16", "float32"]),
        (GEMMA_AWQ, "NVIDIA A100", "torch.float16, torch.bfloat16", ["bfloat16"]),
        (GEMMA_AWQ, "Tesla T4", "torch.float16, torch.bfloat16", []),
    ],
)
def test_dtypes_named_by_vllm_are_offered(model: str, gpu: str, listed: str, offered: list[str]) -> None:
    text = f"ValueError: torch.float32 is not supported for quantization method x. Supported dtypes: [{listed}]"
    fixes = diagnose([begun("None", model), text], 1, {}, gpu).fixes
    assert [fix.changes for fix in fixes if not fix.changes.empty] == [Changes({"dtype": one}) for one in offered]
    assert len(fixes) == max(1, len(offered))


def test_cache_format_named_by_vllm_is_offered() -> None:
    text = "ValueError: FP8 KV cache is not supported by the Triton attention backend on X (compute capability 8.6); native FP8 (fp8e4nv) requires SM89+. Re-run with --kv-cache-dtype bfloat16."  # noqa: E501
    assert first(text) == Changes({"kv-cache-dtype": "bfloat16"})


def test_nearest_choice_is_offered_before_removing_the_flag() -> None:
    text = "vllm serve: error: argument --dtype/-d: invalid choice: 'bfloat' (choose from 'auto', 'bfloat16', 'half')"
    changes = [fix.changes for fix in diagnose([text], 2).fixes]
    assert changes == [Changes({"dtype": "bfloat16"}), Changes(unset=("dtype",))]


def test_context_above_the_models_is_lowered_to_it() -> None:
    text = (
        "  Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
        "(max_position_embeddings=4096 or model_max_length=None in model's config.json). [type=value_error]"
    )
    log = ["pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig", text]
    assert diagnose(log, 1).fixes[0].changes == Changes({"max-model-len": 4096})


def test_tensor_parallel_size_is_lowered_to_a_divisor_of_the_heads() -> None:
    text = "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8)."
    changes = [fix.changes for fix in of(text).fixes]
    assert changes == [
        Changes({"tensor-parallel-size": 4}),
        Changes({"tensor-parallel-size": 4, "pipeline-parallel-size": 2}),
    ]


@pytest.mark.parametrize(
    ("method", "model", "able", "left_out"),
    [
        ("awq", "org/m", 70, False),
        ("awq", "Qwen/Qwen2.5-7B-Instruct-AWQ", 70, False),
        ("fp8", "org/m", 70, True),
        ("fp8", "Qwen/Qwen3-8B-FP8", 70, False),
        ("fp8", "deepseek-ai/DeepSeek-V3", 70, False),
        ("awq_marlin", "org/m-AWQ", 75, True),
        ("awq_marlin", "org/m-AWQ", 70, False),
        ("gptq_marlin", "org/m-GPTQ", 70, True),
    ],
)
def test_quantization_is_removed_only_if_files_do_not_require_it(
    method: str, model: str, able: int, left_out: bool
) -> None:
    text = (
        f"ValueError: The quantization method {method} is not supported for the current GPU. "
        f"Minimum capability: 80. Current capability: {able}."
    )
    (fix,) = of(text, {"quantization": method}, model_of(model)).fixes
    assert fix.changes == (Changes(unset=("quantization",)) if left_out else Changes())
    assert left_out or fix.why.startswith("Use a GPTQ or unquantized checkpoint")


def test_quantized_files_keep_their_quantization() -> None:
    text = "ValueError: The quantization method fp8 is not supported for the current GPU."
    (fix,) = of(text, {"quantization": "fp8"}, begun("fp8")).fixes
    assert fix.changes == Changes()


@pytest.mark.parametrize(
    "asked",
    [
        "(40.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other "
        "processes.",
        "(8.1/14.37 GiB). Reduce CPU memory used by other processes.",
    ],
)
def test_cache_that_exceeds_main_memory_gets_another_size(asked: str) -> None:
    text = (
        "ValueError: Available memory on node 0 (9.7/15.61 GiB) on kv cache allocation is less than requested memory "
        f"for kv {asked}"
    )
    found = of(text)
    assert found.cause is Cause.FREE_MEMORY_BELOW_UTILIZATION
    (fix,) = found.fixes
    assert fix.changes.empty
    assert "--env VLLM_CPU_KVCACHE_SPACE=4" in fix.why


@pytest.mark.parametrize("free", ["4.1", "9.7"])
def test_cpu_build_without_free_memory_gets_a_cache_size(free: str) -> None:
    text = (
        f"ValueError: Available memory on node 0 ({free}/15.61 GiB) on startup is less than desired CPU memory "
        "utilization (0.92, 14.37 GiB)."
    )
    fixes = of(text).fixes
    assert "--env VLLM_CPU_KVCACHE_SPACE=4" in fixes[0].why
    assert not any("GPU" in fix.why for fix in fixes)
    lower = [fix.changes for fix in fixes[1:]]
    assert lower == ([Changes({"gpu-memory-utilization": 0.61})] if free == "9.7" else [])


@pytest.mark.parametrize(("size", "fitting"), [(8, 4), (1, None)])
def test_tensor_parallelism_keeps_whole_blocks(size: int, fitting: int | None) -> None:
    text = "ValueError: The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128."  # noqa: E501
    fixes = of(text, {"tensor-parallel-size": size}).fixes
    assert fixes[0].changes == (Changes({"tensor-parallel-size": fitting}) if fitting else Changes())
    assert fixes[1].changes == Changes({"enable-expert-parallel": True})


@pytest.mark.parametrize(("version", "offered"), [("0.16.0", False), ("0.33.0", True)])
def test_expert_parallelism_is_not_offered_with_adapters_that_prevent_it(version: str, offered: bool) -> None:
    text = "ValueError: The output_size of gate's and up's weight = 192 is not divisible by weight quantization block_n = 128."  # noqa: E501
    began = f"INFO 11-20 10:00:00 [api_server.py:1] vLLM API server version {version}"
    fixes = of(text, {"tensor-parallel-size": 8, "enable-lora": True}, began).fixes
    assert (Changes({"enable-expert-parallel": True}) in [fix.changes for fix in fixes]) is offered


def model_of(name: str) -> str:
    return f"INFO 11-20 10:00:00 [utils.py:1] non-default args: {{'model': '{name}', 'tensor_parallel_size': 8}}"


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ("Qwen/Qwen2.5-14B-Instruct-AWQ", False), ("org/m", False), ("Qwen/Qwen3-32B-FP8", False),
        ("Qwen/Qwen3-30B-A3B-AWQ", True), ("acme/Own-40B-A4.5B-GPTQ", True), ("acme/Phi-MoE-AWQ", True),
    ],
)  # fmt: skip
def test_expert_parallelism_is_offered_only_with_experts(model: str, experts: bool) -> None:
    text = (
        "ValueError: Weight output_size_per_partition = 37 is not divisible by  min_thread_n = 64. Consider reducing "
        "tensor_parallel_size or running with --quantization gptq."
    )
    changes = [fix.changes for fix in of(text, None, model_of(model)).fixes]
    assert changes == [Changes(), *[Changes({"enable-expert-parallel": True})] * experts]


def test_indivisible_blocks_need_another_checkpoint() -> None:
    text = "ValueError: Weight output_size_per_partition = 48 is not divisible by  min_thread_n = 64."
    (unknown,) = of(text).fixes
    assert unknown.why.endswith("divide --tensor-parallel-size by 4.")
    (fix,) = of(text, {"tensor-parallel-size": 2}).fixes
    assert fix.why.endswith("use a checkpoint with smaller blocks, or an unquantized one.")
    assert of(text, {"tensor-parallel-size": 8}).fixes[0].changes == Changes({"tensor-parallel-size": 2})


OUT = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.57 GiB "
    "of which 1.20 GiB is free. "
)
OTHER = "Process 4711 has 18.00 GiB memory in use. "
OWN = "Including non-PyTorch memory, this process has 4.30 GiB memory in use. "
LOADING = '  File "vllm/model_executor/model_loader/loader.py", line 1, in load_model'
CAPTURING = '  File "vllm/worker/gpu_model_runner.py", line 1, in capture_model'


@pytest.mark.parametrize("place", ["", LOADING, CAPTURING])
def test_memory_held_by_another_process_is_reported_first(place: str) -> None:
    found = diagnose(["Traceback (most recent call last):", *filter(None, [place]), OUT + OTHER + OWN], 1)
    assert found.fixes[0].changes == Changes()
    assert found.fixes[0].why.startswith("Another process (4711) holds 18.0 of the GPU's 23.6 GiB: choose a GPU")
    assert len(found.fixes) > 1


def test_process_that_may_be_the_servers_own_is_not_called_another() -> None:
    """In a container it does not know its own pid outside, and lists itself like other processes."""
    assert of(OUT + OTHER).fixes[0].why.startswith("Process 4711 holds 18.0 of the GPU's 23.6 GiB: unless it is this")
    whole = OWN.replace("4.30", "22.10")
    for alone in (
        "Process 1 has 22.10 GiB memory in use. ",
        "Process 7 has 300.00 MiB memory in use. " + whole,
        whole,
        "",
    ):
        assert not any("rocess" in fix.why for fix in of(OUT + alone).fixes), alone


@pytest.mark.parametrize("listed", ["", "Process 7 has 300.00 MiB memory in use. "])
def test_memory_that_is_neither_free_nor_its_own_is_held_by_others(listed: str) -> None:
    """PyTorch lists no process of another container."""
    assert of(OUT + listed + OWN).fixes[0].why.startswith("Other processes hold 18.1 of the GPU's 23.6 GiB: choose")


UNLISTED = "Including non-PyTorch memory, this process has 14.30 GiB memory in use. "


def lower(lines: list[str], flags: Flags | None = None) -> list[Fix]:
    return [fix for fix in diagnose(lines, 1, flags).fixes if "gpu-memory-utilization" in fix.changes.set]


def test_utilization_is_lowered_to_what_others_leave() -> None:
    (fix,) = lower([OUT + UNLISTED])
    assert fix.changes == Changes({"gpu-memory-utilization": 0.6})
    assert fix.why == (
        "Others leave 15.5 of 23.6 GiB; 0.6 asks for 14.1 GiB. It helps only if the KV cache was already allocated."
    )
    (fix,) = lower(["Traceback (most recent call last):", CAPTURING, OUT + UNLISTED])
    assert fix.why == "Others leave 15.5 of 23.6 GiB; 0.6 asks for 14.1 GiB."


def test_utilization_stays_where_lowering_it_frees_nothing() -> None:
    assert not lower([OUT + UNLISTED], {"gpu-memory-utilization": 0.6})
    assert not lower([OUT + UNLISTED], {"kv-cache-memory-bytes": "4G"})
    assert not lower([OUT + OWN])  # others leave less than what vLLM can use
    assert not lower(["Traceback (most recent call last):", LOADING, OUT + UNLISTED])
    profiling = '  File "vllm/worker/gpu_worker.py", line 1, in profile_run'
    assert not lower(["Traceback (most recent call last):", profiling, OUT + UNLISTED])


def test_insufficient_fixes_say_they_are_not_enough_alone() -> None:
    text = SHORT.replace("4.50 GiB", "16.00 GiB").replace("2.25", "5.61")
    reasons = {name: fix.why for fix in of(text).fixes for name in fix.changes.set}
    assert reasons["kv-cache-dtype"].endswith(": not enough alone for 32,768.")
    assert reasons["gpu-memory-utilization"].endswith(": not enough alone for 32,768.")
    enough = {name: fix.why for fix in of(SHORT).fixes for name in fix.changes.set}
    assert enough["kv-cache-dtype"].endswith(": enough for 32,768.")
    assert "not enough" not in enough["gpu-memory-utilization"]
    estimated = f"{SHORT[:90]}, the estimated maximum model length is 10000."
    estimated_run = diagnose(["INFO 11-20 10:00:00 [c.py:1] Using max model len 32768", f"ValueError: {estimated}"], 1)
    assert any(
        "not enough alone for 32,768" in fix.why for fix in estimated_run.fixes if "kv-cache-dtype" in fix.changes.set
    )
    stored = "max seq len ({}) is larger than the maximum number of tokens that can be stored in KV cache (39648)."
    for length, enough in ((131072, False), (65536, True)):
        reasons = {
            name: fix.why
            for fix in of(f"ValueError: The model's {stored.format(length)}").fixes
            for name in fix.changes.set
        }
        assert reasons["kv-cache-dtype"].endswith("16-bit one." if enough else f": not enough alone for {length:,}.")


def test_killed_process_is_reported_as_killed() -> None:
    found = diagnose(["INFO all is well"], -9)
    assert found.cause is Cause.KILLED
    assert found.line is None


def test_log_without_a_failure_has_no_diagnosis() -> None:
    found = diagnose(["INFO 11-20 10:00:00 [x.py:1] Application startup complete."], None)
    assert (found.cause, found.confidence, found.explanation) == (Cause.OTHER, 0.0, NOTHING_SEEN)
    assert diagnosis_lines(found) == ["No failure found in this log."]


def test_startup_out_of_memory_may_be_a_model_that_is_too_large() -> None:
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert Cause.WEIGHTS_DO_NOT_FIT in of(text).also
    assert Cause.WEIGHTS_DO_NOT_FIT not in of(text, None, "INFO:     Application startup complete.").also


@given(st.lists(st.text(), max_size=30), st.sampled_from([None, 0, 1, 2, -9, -15]))
def test_any_text_gets_a_json_answer(lines: list[str], code: int | None) -> None:
    found = diagnose(lines, code)
    json.dumps(diagnosis_document(found))
    assert diagnosis_lines(found)


def test_changes_read_as_typed_flags() -> None:
    changes = Changes({"max-num-seqs": 128, "enable-prefix-caching": False}, ("swap-space",))
    assert change_text(changes) == "--max-num-seqs 128 --no-enable-prefix-caching, without --swap-space"


def test_fixes_use_only_flags_of_the_logs_release() -> None:
    oom = [
        "Traceback (most recent call last):",
        '  File "/v/gpu_worker.py", line 1, in load_model',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    for version in ("0.9.2", "0.20.2", "0.33.0"):
        start = [f"INFO 11-20 10:00:01 [utils.py:1] vLLM API server version {version}"]
        table = release_table(version).flags
        found = diagnose([*start, *oom], 1)
        assert found.cause is Cause.WEIGHTS_DO_NOT_FIT
        assert {name for fix in found.fixes for name in fix.changes.set} <= set(table)
    block = "ValueError: The input_size of down's weight = 320 is not divisible by weight quantization block_k = 128."
    old, new = (
        of(block, {"tensor-parallel-size": 8}, f"INFO 11-20 10:00:01 [utils.py:1] vLLM API server version {version}")
        for version in ("0.8.5", "0.33.0")
    )
    assert any("enable-expert-parallel" in fix.changes.set for fix in new.fixes)
    assert all(name in release_table("0.8.5").flags for fix in old.fixes for name in fix.changes.set)


TOO_LARGE = (
    "Traceback (most recent call last):",
    '  File "/v/gpu_worker.py", line 1, in load_model',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
)


def called(model: str) -> str:
    return f"(APIServer pid=3) INFO 11-20 10:00:00 [u.py:1] non-default args: {{'model_tag': '{model}', 'x': <obj>}}"


def begun(method: str, model: str = "org/m") -> str:
    return (
        "(EngineCore pid=7) INFO 11-20 10:00:02 [core.py:93] Initializing a V1 LLM engine (v0.16.0) with config: "
        f"model='{model}', speculative_config=None, dtype=torch.bfloat16, quantization={method}, "
        "quantization_config=None, enforce_eager=True"
    )


@pytest.mark.parametrize(
    ("start", "flags", "offered"),
    [
        ([], None, True),
        ([called("org/m-7B")], None, True),
        ([begun("None")], None, True),
        ([begun("awq_marlin")], None, False),
        ([begun("compressed-tensors")], {}, False),
        ([called("org/m"), begun("gptq_marlin")], None, False),
        ([begun("fp8"), called("org/m"), begun("None")], None, True),
        ([begun("fp8"), called("org/m")], None, True),
        ([called("org/m-7B-AWQ")], None, False),
        ([called("/models/m-7B-GPTQ-Int4/")], None, False),
        ([begun("None", "org/m-7B-FP8")], {}, False),
        ([begun("None", "org/m-quantized.w4a16")], None, False),
        ([begun("None")], {"quantization": "bitsandbytes"}, False),
    ],
)
def test_quantized_weights_are_not_quantized_again(start: list[str], flags: Flags | None, offered: bool) -> None:
    found = diagnose([*start, *TOO_LARGE], 1, flags)
    assert found.cause is Cause.WEIGHTS_DO_NOT_FIT
    assert (Changes({"quantization": "fp8"}) in [fix.changes for fix in found.fixes]) == offered
    assert any("AWQ" in fix.why for fix in found.fixes) == offered
    assert any("Use a smaller model" in fix.why for fix in found.fixes)


@pytest.mark.parametrize(
    ("version", "gpu", "offered"),
    [("0.13.0", "Tesla T4", False), ("0.13.0", "NVIDIA L40S", False), ("0.16.0", "Tesla T4", True),
     ("0.16.0", "Tesla V100-SXM2-16GB", False)],
)  # fmt: skip
def test_fp8_weights_help_only_if_they_are_converted_while_loading(version: str, gpu: str, offered: bool) -> None:
    start = f"INFO 11-20 10:00:01 [utils.py:1] vLLM API server version {version}"
    found = diagnose([start, begun("None"), *TOO_LARGE], 1, {}, gpu)
    assert (Changes({"quantization": "fp8"}) in [fix.changes for fix in found.fixes]) is offered


@pytest.mark.parametrize(("gpu", "offered"), [("Tesla T4", False), ("NVIDIA L40S", True)])
def test_fp8_weights_are_not_offered_to_models_that_run_in_fp32(gpu: str, offered: bool) -> None:
    found = diagnose([begun("None", "google/gemma-3-4b-it"), *TOO_LARGE], 1, {}, gpu)
    assert any("quantization" in fix.changes.set for fix in found.fixes) is offered


@pytest.mark.parametrize(
    ("capability", "gpu", "flags", "offered"),
    [
        ((8, 0), "NVIDIA A100-SXM4-80GB", {}, False),
        ((8, 6), "NVIDIA RTX A6000", {}, False),
        ((8, 6), "NVIDIA GeForce RTX 3090", {"attention-backend": "TRITON_ATTN"}, False),
        ((8, 6), "NVIDIA GeForce RTX 3090", {"attention-backend": "FLASHINFER"}, True),
        ((8, 9), "NVIDIA L40S", {}, True),
        ((8, 9), "NVIDIA L40S", {"attention-backend": "FLASH_ATTN"}, False),
        ((9, 0), "NVIDIA H200", {}, True),
        ((12, 0), "NVIDIA GeForce RTX 5090", {}, True),
    ],
)
def test_fp8_cache_is_offered_alike_after_failure_and_while_serving(
    capability: tuple[int, int], gpu: str, flags: Flags, offered: bool
) -> None:
    failed = diagnose(["Traceback (most recent call last):", '  File "a.py", line 1, in f', SHORT], 1, flags, gpu)
    assert any("kv-cache-dtype" in one.changes.set for one in failed.fixes) == offered
    serving = fp8_cache_fix(Evidence(0.0, 0.0, (), flags=flags, compute_capability=capability))
    assert (serving is not None) == offered
    assert serving is None or "differ" in serving.tradeoff


def test_fp8_cache_is_not_offered_to_checkpoints_with_their_own() -> None:
    known = Evidence(0.0, 0.0, (), compute_capability=(9, 0), own_fp8_cache=True)
    assert fp8_cache_fix(known) is None
    assert fp8_cache_fix(replace(known, flags={"kv-cache-dtype": "bfloat16"})) is not None


def test_fp8_cache_is_not_offered_for_a_latent_cache_that_is_split_over_gpus() -> None:
    flags: Flags = {"tensor-parallel-size": 8, "decode-context-parallel-size": 8}
    known = Evidence(0.0, 0.0, (), flags=flags, release=(0, 24, 0), compute_capability=(9, 0), mla=True)
    assert fp8_cache_fix(known) is None
    assert fp8_cache_fix(replace(known, release=(0, 25, 0))) is not None
    assert fp8_cache_fix(replace(known, flags={})) is not None


def test_prefix_caching_needs_chunked_prefill_with_linear_layers() -> None:
    flags: Flags = {"enable-prefix-caching": False}
    known = Evidence(0.0, 0.0, (), flags=flags, release=(0, 32, 0), linear_layers=True, earlier_reuse=0.5)
    assert share_prefixes(known) is not None
    assert share_prefixes(replace(known, flags={**flags, "enable-chunked-prefill": False})) is None


@pytest.mark.parametrize(
    ("more", "release", "offered"),
    [
        ({"spec-method": "qwen3_next_mtp", "spec-tokens": 2}, (0, 16, 0), False),
        ({"spec-method": "qwen3_next_mtp", "spec-tokens": 2}, (0, 17, 0), True),
        ({"disable-chunked-mm-input": True}, (0, 33, 0), False),
        ({"long-prefill-token-threshold": 512}, (0, 26, 0), False),
        ({"long-prefill-token-threshold": 512}, (0, 27, 0), True),
    ],
)
def test_prefix_caching_of_linear_layers_is_not_offered_with_flags_that_prevent_it(
    more: Flags, release: Release, offered: bool
) -> None:
    flags: Flags = {"enable-prefix-caching": False, **more}
    known = Evidence(0.0, 0.0, (), flags=flags, release=release, linear_layers=True, earlier_reuse=0.5)
    assert (share_prefixes(known) is not None) is offered
    assert share_prefixes(replace(known, linear_layers=False)) is not None


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ({"max-model-len": 8192, "long-prefill-token-threshold": 4096}, Changes({"max-model-len": 2048})),
        ({"tensor-parallel-size": 4, "decode-context-parallel-size": 4}, Changes({"tensor-parallel-size": 2})),
        ({}, Changes({"prefix-match-unit": 16})),
        ({"dtype": "float32"}, Changes({"quantization": "fp8"})),
        (
            {"spec-model": "org/draft", "spec-tokens": 3, "speculative-config.max_model_len": 16384},
            Changes({"max-model-len": 8192}),
        ),
        ({"max-num-batched-tokens": 512}, Changes({"max-num-seqs": 1024})),
        ({"spec-method": "ngram", "spec-tokens": 4}, Changes(unset=("spec-method",))),
    ],
)
def test_fix_that_vllm_would_refuse_is_dropped(flags: Flags, changes: Changes) -> None:
    fix, advice = Fix(changes, "why"), Fix(Changes(), "ask someone")
    assert accepted((fix, advice), flags, "0.25.1") == (advice,)
    assert accepted((fix, advice), flags, None) == (fix, advice)


@pytest.mark.parametrize(("version", "offered"), [("0.11.0", True), ("0.12.0", False), ("0.24.0", False)])
def test_steps_hold_the_drafts_of_the_sequences_that_a_gpu_gets_by_default(version: str, offered: bool) -> None:
    flags: Flags = {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 5}', "enable-lora": True}
    fix = Fix(Changes({"max-num-batched-tokens": 1024}), "why")
    l40s = GpuShape("NVIDIA L40S", 45.0)
    assert accepted((fix,), flags, version, None, l40s) == ((fix,) if offered else ())
    assert accepted((fix,), flags, version) == (fix,)


INVALID = "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, "


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("ValueError: Currently, async scheduling is only supported with EAGLE/MTP kind of speculative decoding",
         "async-scheduling", True),
        ("ValueError: Currently, speculative decoding is not supported with async scheduling.",
         "async-scheduling", True),
        ("ValueError: Async scheduling is not yet compatible with pipeline_parallel_size > 1.",
         "async-scheduling", True),
        (f"{INVALID}Currently, async scheduling is not compatible with prefix caching for Mamba models. [type=value",
         "async-scheduling", True),
        (f"{INVALID}Async scheduling is not supported by the V1 model runner with suffix-based speculative decoding.",
         "async-scheduling", True),
        ("AssertionError: Chunked prefill is required for mamba cache mode 'align'.", "enable-chunked-prefill", False),
    ],
)  # fmt: skip
def test_flag_that_contradicts_others_is_left_to_vllm(text: str, name: str, value: bool) -> None:
    assert [fix.changes for fix in of(text, {name: value}).fixes] == [Changes(unset=(name,))]
    assert of(text).fixes == ()


def test_fix_may_keep_flags_that_are_already_refused() -> None:
    fix = Fix(Changes({"max-num-seqs": 64}), "why")
    assert accepted((fix,), {"max-num-seqs": 4096, "max-num-batched-tokens": 2048, "no-such-flag": 1}, "0.33.0") == (
        fix,
    )


def test_fix_that_the_model_does_not_allow_is_dropped() -> None:
    blocks = Quantization("fp8", 8, block=(128, 128))
    facts = ModelFacts("made/moe", heads=32, kv_heads=4, experts=128, expert_intermediate_size=768, quantization=blocks)
    two, four = (Fix(Changes({"tensor-parallel-size": size}), "why") for size in (2, 4))
    assert accepted((two, four), {}, "0.33.0", facts) == (two,)
    assert accepted((two, four), {}, None, facts) == (two,)
    assert accepted((two, four), {}, "0.33.0") == (two, four)


def test_smaller_steps_are_not_offered_if_whole_images_must_fit() -> None:
    where = '  File "vllm/v1/worker/gpu_model_runner.py", line 1, in profile_run'
    for flags, offered in (({}, True), ({"disable-chunked-mm-input": True}, False)):
        fixes = of(OUT, {"max-num-batched-tokens": 8192, **flags}, where).fixes
        assert any("max-num-batched-tokens" in fix.changes.set for fix in fixes) is offered


def test_smaller_steps_still_hold_all_drafts() -> None:
    flags: Flags = {"max-num-seqs": 256, "max-num-batched-tokens": 2048, "spec-method": "eagle3", "spec-tokens": 5}
    out = of(OUT, flags, '  File "vllm/v1/worker/gpu_model_runner.py", line 1, in profile_run')
    assert Changes({"max-num-batched-tokens": 1536}) in [fix.changes for fix in out.fixes]


def test_smaller_steps_still_hold_all_sequences() -> None:
    flags: Flags = {"max-num-seqs": 1536, "max-num-batched-tokens": 2048}
    assert Changes({"max-num-batched-tokens": 1536}) in [
        fix.changes
        for fix in of(OUT, flags, '  File "vllm/v1/worker/gpu_model_runner.py", line 1, in profile_run').fixes
    ]


def test_smaller_steps_still_hold_a_whole_video() -> None:
    forced = "WARNING 11-20 10:00:00 [cuda.py:230] Forcing --disable_chunked_mm_input for models with multimodal-"
    frame = '  File "vllm/v1/worker/gpu_model_runner.py", line 1, in profile_run'
    flags: Flags = {"max-num-batched-tokens": 4096}
    for line, tokens in ((forced, 2496), ("", 2048)):
        assert Changes({"max-num-batched-tokens": tokens}) in [
            fix.changes for fix in of(OUT, flags, line + "bidirectional attention.", frame).fixes
        ]


def test_pipeline_stages_are_kept_with_less_tensor_parallelism() -> None:
    text = "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8)."
    changes = [fix.changes for fix in of(text, {"tensor-parallel-size": 8, "pipeline-parallel-size": 2}).fixes]
    assert changes[1] == Changes({"tensor-parallel-size": 4, "pipeline-parallel-size": 4})


def test_fp8_cache_on_an_unknown_gpu_names_its_requirement() -> None:
    failed = next(one for one in of(SHORT).fixes if "kv-cache-dtype" in one.changes.set)
    assert "compute capability 8.9" in failed.tradeoff


@pytest.mark.parametrize("odd", ["007", "'\\x'", "'\\N{no}'"])
def test_non_python_arguments_are_skipped(odd: str) -> None:
    args = (
        f"INFO 11-20 10:00:00 [u.py:1] non-default args: {{'seed': {odd}, 'gpu_memory_utilization': 0.8, 'x': <obj>}}"
    )
    taken = "INFO 11-20 10:00:00 [k.py:1] GPU KV cache size: 5,000 tokens"
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert first(text, None, args, taken) == Changes({"gpu-memory-utilization": 0.75})


LONG = "9" * 400
"""Too large for a float, and for counting."""


@pytest.mark.parametrize(
    "end",
    [
        SHORT.replace("32768", LONG),
        SHORT.replace("4.50", LONG),
        SHORT.replace("4.50", "4.5.0"),
        SHORT.replace("2.25", "."),
        f"{SHORT} Based on it, the estimated maximum model length is {LONG}.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of "
        "0.00 GiB of which 512.00 MiB is free.",
        f"ValueError: Free memory on device cuda:0 (1.2.3/{LONG} GiB) on startup is less than desired GPU memory "
        "utilization (0.92, 22 GiB).",
        f"ValueError: Total number of attention heads ({LONG}) must be divisible by tensor parallel size ({LONG[1:]}).",
        "ValueError: Total number of attention heads (32) must be divisible by tensor parallel size (0).",
        "ValueError: The output_size of gate's weight = 192 is not divisible by weight quantization block_n = 0.",
    ],
    ids=lambda end: end[:60],
)
def test_impossible_numbers_do_no_harm(end: str) -> None:
    for number in (LONG, "0.8"):
        args = f"INFO 11-20 10:00:00 [u.py:1] non-default args: {{'gpu_memory_utilization': {number}, 'x': <obj>}}"
        found = of(end, None, args, "INFO 11-20 10:00:00 [k.py:1] GPU KV cache size: 5,000 tokens")
        assert found.cause is not Cause.OTHER
        assert all(LONG[:20] not in change_text(fix.changes) for fix in found.fixes)


def test_no_value_is_invented_that_the_log_does_not_state() -> None:
    found = diagnose(
        [
            "Traceback (most recent call last):",
            '  File "/v/w.py", line 1, in load_model',
            "RuntimeError: CUDA out of memory",
        ]
    )
    assert all("cpu-offload-gb" not in fix.changes.set for fix in found.fixes)
    assert any("--cpu-offload-gb" in fix.why for fix in found.fixes)


@pytest.mark.parametrize(
    ("warning", "offered"),
    [
        ("(compute capability 8.6)", False),
        ("Your NVIDIA T4 GPU has compute capability 7.5.", False),
        ("Current capability: 80.", False),
        ("Using default MoE config, E=8,N=3584,device_name=NVIDIA_A100-SXM4-80GB.json", False),
        ("Your GPU does not have native support for FP8 computation but FP8 quantization is being used.", False),
        ("GPU 0: NVIDIA GeForce RTX 3090", False),
        ("GPU 0: NVIDIA L40S", True),
        ("Using default MoE config, E=8,N=3584,device_name=NVIDIA_H200.json", True),
    ],
)
def test_log_tells_whether_the_gpu_supports_an_fp8_cache(warning: str, offered: bool) -> None:
    found = of(SHORT, None, f"WARNING 11-20 10:00:00 [a.py:1] {warning}")
    assert any("kv-cache-dtype" in one.changes.set for one in found.fixes) == offered


@pytest.mark.parametrize(("version", "method"), [("0.16.0", "fp8"), ("0.30.0", "fp8"), ("0.31.0", "fp8_per_tensor")])
def test_fp8_weights_use_the_releases_method_name(version: str, method: str) -> None:
    start = f"INFO 11-20 10:00:01 [utils.py:1] vLLM API server version {version}"
    found = diagnose([start, begun("None"), *TOO_LARGE], 1)
    assert Changes({"quantization": method}) in [fix.changes for fix in found.fixes]


def test_variable_is_named_only_to_a_release_that_reads_it() -> None:
    late = "TimeoutError: Timed out waiting for engines to sendinitial message on input socket."
    for version, named in (("0.10.2", False), ("0.14.1", True), ("0.33.0", True)):
        start = f"INFO 11-20 10:00:01 [utils.py:1] vLLM API server version {version}"
        why = " ".join(fix.why for fix in of(late, None, start).fixes)
        assert ("VLLM_ENGINE_READY_TIMEOUT_S" in why) == named
    assert "vLLM 0.14.1 and later" in " ".join(fix.why for fix in of(late).fixes)


def test_longer_rank_timeout_is_offered_where_the_flag_exists() -> None:
    missing = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined."
    wait = Changes({"distributed-timeout-seconds": 1800})
    for version, known in (("0.13.0", False), ("0.33.0", True)):
        start = f"INFO 11-20 10:00:01 [utils.py:1] vLLM API server version {version}"
        assert (wait in [fix.changes for fix in of(missing, None, start).fixes]) == known
    assert wait not in [fix.changes for fix in of(missing).fixes]


def test_refused_backend_is_left_to_vllm() -> None:
    text = "ValueError: Selected backend AttentionBackendEnum.FLASH_ATTN is not valid for this configuration. Reason: ['compute capability not supported']"  # noqa: E501
    found = of(text, {"attention-backend": "FLASH_ATTN"})
    assert found.cause is Cause.UNSUPPORTED_BY_GPU
    assert found.fixes[0].changes == Changes(unset=("attention-backend",))


def test_quantization_missing_from_the_files_is_removed() -> None:
    found = of("ValueError: Cannot find the config file for awq", {"quantization": "awq"})
    assert found.fixes[0].changes == Changes(unset=("quantization",))


def test_enough_gpus_for_the_checkpoint_are_offered() -> None:
    size = "(EngineCore pid=7) INFO 11-20 10:00:02 [w.py:1] Filesystem type for checkpoints: EXT4. Checkpoint size: 131.42 GiB. Available RAM: 200.0 GiB."  # noqa: E501
    full = TOO_LARGE[-1] + " GPU 0 has a total capacity of 23.58 GiB of which 352.00 MiB is free."
    found = diagnose([begun("None"), size, *TOO_LARGE[:-1], full], 1)
    assert found.fixes[0].changes == Changes({"tensor-parallel-size": 8})
    assert "16.4 of the weights' 131.4 GiB" in found.fixes[0].why
    assert all("quantization" not in fix.changes.set for fix in found.fixes)


def _case(version: str | None, text: str = "") -> Case:
    return Case(FailureLine(1, text, Cause.OTHER, None), version=version)


@pytest.mark.parametrize(
    ("version", "named"),
    [
        ("0.9.2", ["--swap-space", "--cpu-offload-gb"]),
        ("0.17.1", ["--swap-space", "--cpu-offload-gb", "--kv-offloading-size"]),
        ("0.32.0", ["--cpu-offload-gb", "--kv-offloading-size"]),
        (None, ["--cpu-offload-gb", "--kv-offloading-size"]),
        ("0.6.0", []),
    ],
)
def test_only_flags_of_the_release_are_named(version: str | None, named: list[str]) -> None:
    advice = " ".join(one.why for one in environment.main_memory(_case(version)))
    names = ("--swap-space", "--cpu-offload-gb", "--kv-offloading-size")
    assert [name for name in names if name in advice] == named


@pytest.mark.parametrize(
    ("version", "flag", "variable"),
    [("0.11.0", False, True), ("0.13.0", True, True), ("0.32.0", True, False), (None, True, True)],
)
def test_backend_is_removed_in_the_releases_form(version: str | None, flag: bool, variable: bool) -> None:
    (advice,) = (one.why for one in settings.backend_fixes(_case(version, "Selected backend X is not valid")))
    assert ("--attention-backend" in advice, "VLLM_ATTENTION_BACKEND" in advice) == (flag, variable)


def test_remapped_row_is_not_a_gpu_fault() -> None:
    advice = environment.kernel_crash(_case(None))[0].why
    assert "64" in advice
    assert "63" not in advice


MISSING = (
    "Value error, num_speculative_tokens must be provided with speculative model unless the draft model config "
    "contains an n_predict parameter. [type=value_error, input_value=ArgsKwargs((), {'method':...}), input_type=…]"
)
STEPS = "ValueError: num_speculative_tokens:5 must be divisible by n_predict=2"


@pytest.mark.parametrize(
    ("text", "flags", "changes"),
    [
        (
            MISSING,
            {"speculative-config": '{"method": "ngram"}'},
            {"speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'},
        ),
        (MISSING, {"speculative-config.method": "ngram"}, {"speculative-config.num_speculative_tokens": 3}),
        (MISSING, {"spec-method": "ngram"}, {"spec-tokens": 3}),
        (MISSING, {}, {}),
        (
            STEPS,
            {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 5}'},
            {"speculative-config": '{"method": "mtp", "num_speculative_tokens": 4}'},
        ),
    ],
)
def test_speculative_decoding_gets_an_accepted_token_count(
    text: str, flags: dict[str, FlagValue], changes: dict[str, FlagValue]
) -> None:
    found = diagnose([text], 1, flags=flags)
    first, *rest = found.fixes
    assert (found.cause, dict(first.changes.set)) == (Cause.INVALID_FLAG_VALUE, changes)
    assert [one.changes.unset for one in rest] == ([tuple(flags)] if flags else [])


def test_key_of_speculative_config_is_not_treated_as_a_flag() -> None:
    lines = [
        "non-default args: {'seed': 1, 'speculative_config': {'method': 'ngram', 'num_speculative_tokens': 0}}",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig",
        "num_speculative_tokens",
        "  Input should be greater than 0 [type=greater_than, input_value=0, input_type=int]",
    ]
    found = diagnose(lines, 1)
    assert dict(found.fixes[0].changes.set) == {
        "speculative-config": '{"method": "ngram", "num_speculative_tokens": 3}'
    }
    assert found.fixes[1].changes == Changes(unset=("speculative-config",))


def test_setting_only_listed_by_pydantic_is_not_blamed() -> None:
    lines = [
        "non-default args: {'model': 'm', 'enable_eplb': True}",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
        "  Value error, enable_eplb needs something else. [type=value_error, "
        "input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=ArgsKwargs]",
    ]
    assert [one.changes for one in diagnose(lines, 1).fixes] == [Changes(unset=("enable-eplb",))]


def test_checkpoint_format_is_not_a_flag_to_remove() -> None:
    lines = [
        "non-default args: {'model': 'org/nf4'}",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, Unknown quantization method: bitsandbytes. Must be one of ['awq', 'fp8']. [type=value_error]",
    ]
    (fix,) = diagnose(lines, 1).fixes
    assert (fix.changes, "another checkpoint" in fix.why) == (Changes(), True)
    assert "vllm-bnb-plugin" in fix.why
    assert diagnose(lines, 1, flags={"quantization": "bitsandbytes"}).fixes[0].changes == Changes(
        unset=("quantization",)
    )

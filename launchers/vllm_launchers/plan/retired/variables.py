"""Environment variables that guides still name and vLLM reads no more, and one that does not mean what it seems to."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_launchers.plan.retired import carry
from vllm_launchers.plan.retired.model import NEVER, Release, RetiredVariable

_UNUSED = "leave it out"


def _flag(since: Release, name: str, flag: str) -> RetiredVariable:
    return RetiredVariable(name, since, f"it is --{flag} now", carry.variable_to_flag(flag))


def _key(since: Release, name: str, flag: str, key: str, *, switch: bool = True) -> RetiredVariable:
    moved = carry.variable_to_json(flag, key, switch=switch)
    return RetiredVariable(name, since, f"it is the key {key} of --{flag} now", moved)


def _gone(since: Release, name: str, instead: str = _UNUSED) -> RetiredVariable:
    return RetiredVariable(name, since, instead)


_TABLE: tuple[RetiredVariable, ...] = (
    RetiredVariable("VLLM_ATTENTION_BACKEND", (0, 15, 0), "it is --attention-backend now", carry.attention_backend),
    _gone((0, 11, 1), "VLLM_USE_V1", "leave it out: there is only V1"),
    _gone(NEVER, "VLLM_LOG_LEVEL", "it is called VLLM_LOGGING_LEVEL"),
    _key((0, 15, 0), "VLLM_FLASH_ATTN_VERSION", "attention-config", "flash_attn_version", switch=False),
    _key((0, 15, 0), "VLLM_USE_TRTLLM_ATTENTION", "attention-config", "use_trtllm_attention"),
    _key((0, 15, 0), "VLLM_FLASHINFER_DISABLE_Q_QUANTIZATION", "attention-config",
         "disable_flashinfer_q_quantization"),
    _key((0, 15, 0), "VLLM_FLASH_ATTN_MAX_NUM_SPLITS_FOR_CUDA_GRAPH", "attention-config",
         "flash_attn_max_num_splits_for_cuda_graph", switch=False),
    _gone((0, 15, 0), "VLLM_V1_USE_PREFILL_DECODE_ATTENTION", "choose a kernel with --attention-backend"),
    _gone((0, 11, 1), "VLLM_USE_TRITON_FLASH_ATTN", "choose a kernel with --attention-backend"),
    _gone((0, 11, 1), "VLLM_USE_AITER_UNIFIED_ATTENTION", "choose a kernel with --attention-backend"),
    _flag((0, 16, 0), "VLLM_ALL2ALL_BACKEND", "all2all-backend"),
    RetiredVariable(
        "VLLM_TORCH_PROFILER_DIR", (0, 16, 0), "it is the key torch_profiler_dir of --profiler-config now",
        carry.variable_to_json("profiler-config", "torch_profiler_dir", besides={"profiler": "torch"}),
    ),
    _flag((0, 13, 0), "VLLM_MM_INPUT_CACHE_GIB", "mm-processor-cache-gb"),
    _flag((0, 30, 0), "VLLM_MM_HASHER_ALGORITHM", "mm-hasher-algorithm"),
    _flag((0, 30, 0), "VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "prefix-cache-retention-interval"),
    RetiredVariable(
        "VLLM_DISABLE_NCCL_FOR_DP_SYNCHRONIZATION", (0, 11, 1), "it is --disable-nccl-for-dp-synchronization now",
        carry.variable_to_switch("disable-nccl-for-dp-synchronization"),
    ),
    *(
        _gone((0, 24, 0), name, "choose the kernels with --moe-backend")
        for name in ("VLLM_USE_FLASHINFER_MOE_FP4", "VLLM_USE_FLASHINFER_MOE_FP8", "VLLM_USE_FLASHINFER_MOE_FP16",
                     "VLLM_FLASHINFER_MOE_BACKEND", "VLLM_MXFP4_USE_MARLIN", "VLLM_USE_FLASHINFER_MOE_MXFP4_BF16",
                     "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8", "VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS")
    ),
    *(
        _gone((0, 24, 0), name, "choose the kernels with --linear-backend")
        for name in ("VLLM_NVFP4_GEMM_BACKEND", "VLLM_USE_FBGEMM", "VLLM_USE_NVFP4_CT_EMULATIONS")
    ),
    _gone((0, 11, 1), "VLLM_USE_RAY_SPMD_WORKER"),
    _gone((0, 11, 1), "VLLM_USE_RAY_COMPILED_DAG"),
    _gone((0, 23, 0), "VLLM_RPC_TIMEOUT"),
    _gone((0, 32, 0), "VLLM_ENGINE_ITERATION_TIMEOUT_S"),
    _gone((0, 18, 0), "VLLM_SLEEP_WHEN_IDLE"),
)  # fmt: skip

RETIRED_VARIABLES: Mapping[str, RetiredVariable] = {variable.name: variable for variable in _TABLE}
"""By name. Other variables that went are in the table of releases, without a way out."""

MISREAD_VARIABLES: Mapping[str, str] = {
    "VLLM_PORT": "it is not the port of the API (that is --port) but the first of those that vLLM uses inside",
}
"""Variables that are read, but mean something else than their names make people think."""

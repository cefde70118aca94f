"""Why vLLM servers fail: the names of causes, and what a rule that names one is. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a server failed. `OTHER` where none of the names is surely right."""

    WEIGHTS_DO_NOT_FIT = "weights_do_not_fit"
    KV_CACHE_TOO_SMALL = "kv_cache_too_small_for_max_model_len"
    FREE_MEMORY_BELOW_UTILIZATION = "free_memory_below_utilization"
    OOM_RUNTIME = "cuda_oom_runtime"
    OOM_GRAPH_CAPTURE = "cuda_oom_graph_capture"
    PORT_IN_USE = "port_in_use"
    MODEL_NOT_FOUND = "model_not_found"
    GATED = "gated_or_no_hf_token"
    UNKNOWN_FLAG = "unknown_flag"
    INVALID_FLAG_VALUE = "invalid_flag_value"
    TP_NOT_DIVISOR = "tp_not_divisor_of_heads"
    UNSUPPORTED_BY_GPU = "unsupported_quantization_or_dtype_for_gpu"
    NCCL = "nccl_failure"
    ENGINE_DIED = "engine_core_died"
    TRUST_REMOTE_CODE = "trust_remote_code_needed"
    TOKENIZER = "tokenizer_or_chat_template"
    DRIVER = "driver_or_cuda_mismatch"
    DISK_FULL = "disk_full"
    INTERRUPTED = "interrupted"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Rule:
    """A line that matches ``pattern`` shows ``cause``; ``explanation`` is one sentence for people, or empty.

    ``confidence`` is from 0 to 1: how surely the words alone mean this cause. ``also`` are causes that read alike.
    """

    pattern: re.Pattern[str]
    cause: Cause
    explanation: str
    confidence: float = 0.95
    also: tuple[Cause, ...] = ()

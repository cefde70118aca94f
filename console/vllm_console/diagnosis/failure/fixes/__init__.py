"""What to change after a failure, derived from the figures in the log, best fix first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_console.diagnosis.accepted import accepted
from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.failure.fixes import environment, memory, settings
from vllm_console.diagnosis.failure.fixes.advice import ADVICE
from vllm_console.diagnosis.failure.rules import Topic
from vllm_console.diagnosis.finding import Cause, Fix
from vllm_launchers.plan.attention import is_fp8

_FIXES: Mapping[Cause | Topic, Callable[[Case], tuple[Fix, ...]]] = {
    Cause.KV_CACHE_TOO_SMALL: memory.kv_cache_too_small,
    Cause.FREE_MEMORY_BELOW_UTILIZATION: memory.free_memory_below_utilization,
    Cause.WEIGHTS_DO_NOT_FIT: memory.weights_do_not_fit,
    Cause.OOM_RUNTIME: memory.oom_at_run_time,
    Cause.OOM_GRAPH_CAPTURE: memory.oom_at_graph_capture,
    Cause.UNKNOWN_FLAG: settings.unknown_flag,
    Cause.INVALID_FLAG_VALUE: settings.invalid_value,
    Cause.TP_NOT_DIVISOR: settings.tp_not_divisor,
    Cause.UNSUPPORTED_BY_GPU: settings.unsupported_by_gpu,
    Cause.TOKENIZER: settings.tokenizer,
    Cause.PORT_IN_USE: environment.port_in_use,
    Cause.MODEL_NOT_FOUND: environment.model_not_found,
    Cause.NCCL: environment.nccl,
    Cause.ENGINE_DIED: environment.engine_died,
    Cause.DISK_FULL: environment.disk_full,
    Topic.LIBRARY_SYMBOL: environment.library_symbol,
    Topic.RENDEZVOUS: environment.rendezvous,
    Topic.NODE_ADDRESS: environment.node_address,
    Topic.MASTER_PORT: environment.master_port,
    Topic.NOT_READY_IN_TIME: environment.not_ready_in_time,
    Topic.KERNEL_CRASH: environment.kernel_crash,
    Topic.MAIN_MEMORY: environment.main_memory,
    Topic.UNQUANTIZED_WEIGHTS: settings.unquantized_weights,
    Topic.MODEL_FILE: environment.model_file,
    Topic.LISTEN_PORT: settings.listen_port,
    Topic.RAY_MISSING: environment.ray_missing,
    Topic.ATTENTION_BACKEND: settings.backend_fixes,
    Topic.BLOCK_SIZE: settings.block_size,
    Topic.CONFLICT: settings.conflicting_flags,
    Topic.QUANTIZATION_CONFIG: settings.quantization_config,
}

_OUT_OF_MEMORY = frozenset({Cause.WEIGHTS_DO_NOT_FIT, Cause.OOM_RUNTIME, Cause.OOM_GRAPH_CAPTURE})
"""Causes where memory held by other processes may be what was missing."""


def fixes_for(case: Case) -> tuple[Fix, ...]:
    """The fixes for this failure, best first; none for an unnamed one."""
    others = memory.freed_by_others(case) if case.failure.cause in _OUT_OF_MEMORY else ()
    offered = [one for one in _fixes(case) if _gpu_takes(one, case)]
    return (*others, *accepted(offered, case.flags, case.version, case.facts, case.shape))


def _fixes(case: Case) -> tuple[Fix, ...]:
    for kind in (case.failure.topic, case.failure.cause):
        if kind in ADVICE:
            return ADVICE[kind]
        if kind in _FIXES:
            return _FIXES[kind](case)
    return ()


def _gpu_takes(fix: Fix, case: Case) -> bool:
    """Whether the GPU is not known to reject what a fix sets: an FP8 KV cache needs a kernel for it."""
    return not is_fp8(fix.changes.set.get("kv-cache-dtype")) or case.fp8_cache.works is not False

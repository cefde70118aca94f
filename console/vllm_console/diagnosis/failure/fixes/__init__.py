"""What to change after a failure, derived from the figures in the log, best fix first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_console.diagnosis.accepted import accepted
from vllm_console.diagnosis.failure.case import Case
from vllm_console.diagnosis.failure.fixes import environment, memory, settings
from vllm_console.diagnosis.failure.rules import Topic
from vllm_console.diagnosis.finding import Cause, Fix
from vllm_launchers.plan.attention import is_fp8

_FIXES: Mapping[Cause, Callable[[Case], tuple[Fix, ...]]] = {
    Cause.KV_CACHE_TOO_SMALL: memory.kv_cache_too_small,
    Cause.FREE_MEMORY_BELOW_UTILIZATION: memory.free_memory_below_utilization,
    Cause.WEIGHTS_DO_NOT_FIT: memory.weights_do_not_fit,
    Cause.OOM_RUNTIME: memory.oom_at_run_time,
    Cause.OOM_GRAPH_CAPTURE: memory.oom_at_graph_capture,
    Cause.UNKNOWN_FLAG: settings.unknown_flag,
    Cause.INVALID_FLAG_VALUE: settings.invalid_value,
    Cause.TP_NOT_DIVISOR: settings.tp_not_divisor,
    Cause.UNSUPPORTED_BY_GPU: settings.unsupported_by_gpu,
    Cause.TRUST_REMOTE_CODE: settings.trust_remote_code,
    Cause.TOKENIZER: settings.tokenizer,
    Cause.PORT_IN_USE: environment.port_in_use,
    Cause.MODEL_NOT_FOUND: environment.model_not_found,
    Cause.GATED: environment.gated,
    Cause.NCCL: environment.nccl,
    Cause.ENGINE_DIED: environment.engine_died,
    Cause.NODES_DIFFER: environment.nodes_differ,
    Cause.DRIVER: environment.driver,
    Cause.DISK_FULL: environment.disk_full,
    Cause.INTERRUPTED: environment.interrupted,
}

_OUT_OF_MEMORY = frozenset({Cause.WEIGHTS_DO_NOT_FIT, Cause.OOM_RUNTIME, Cause.OOM_GRAPH_CAPTURE})
"""Causes where memory held by other processes may be what was missing."""

_BY_TOPIC: Mapping[Topic, Callable[[Case], tuple[Fix, ...]]] = {
    Topic.LIBRARY_SYMBOL: environment.library_symbol,
    Topic.RENDEZVOUS: environment.rendezvous,
    Topic.NODE_MISSING: environment.node_missing,
    Topic.NODE_ADDRESS: environment.node_address,
    Topic.MASTER_PORT: environment.master_port,
    Topic.NOT_READY_IN_TIME: environment.not_ready_in_time,
    Topic.PEER_GONE: environment.peer_gone,
    Topic.PEER_UNREACHABLE: environment.peer_unreachable,
    Topic.KERNEL_CRASH: environment.kernel_crash,
    Topic.MAIN_MEMORY: environment.main_memory,
    Topic.RAY_MISSING: environment.ray_missing,
    Topic.RAY_CLUSTER: environment.ray_cluster,
    Topic.RAY_GPUS: environment.ray_gpus,
    Topic.RAYLET_GONE: environment.raylet_gone,
    Topic.ATTENTION_BACKEND: settings.backend_fixes,
    Topic.BLOCK_SIZE: settings.block_size,
    Topic.CONFLICT: settings.conflicting_flags,
    Topic.QUANTIZATION_CONFIG: settings.quantization_config,
    Topic.NO_CHAT_TEMPLATE: settings.no_chat_template,
    Topic.NO_TOOL_PARSER: settings.no_tool_parser,
}
"""For causes that cover failures with different fixes."""


def fixes_for(case: Case) -> tuple[Fix, ...]:
    """The fixes for this failure, best first; none for an unnamed one."""
    find = _BY_TOPIC.get(case.failure.topic) or _FIXES.get(case.failure.cause)
    if find is None:
        return ()
    others = memory.freed_by_others(case) if case.failure.cause in _OUT_OF_MEMORY else ()
    offered = [one for one in find(case) if _gpu_takes(one, case)]
    return (*others, *accepted(offered, case.flags, case.version))


def _gpu_takes(fix: Fix, case: Case) -> bool:
    """Whether the GPU is not known to reject what a fix sets: an FP8 KV cache needs a kernel for it."""
    return not is_fp8(fix.changes.set.get("kv-cache-dtype")) or case.fp8_cache.works is not False

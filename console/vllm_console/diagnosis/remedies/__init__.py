"""What to change after a failure, worked out from the figures in the log: the best first. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_console.diagnosis.case import Case
from vllm_console.diagnosis.causes import Cause
from vllm_console.diagnosis.model import Remedy
from vllm_console.diagnosis.remedies import memory, settings, surroundings

__all__ = ["remedies_for"]

_REMEDIES: Mapping[Cause, Callable[[Case], tuple[Remedy, ...]]] = {
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
    Cause.PORT_IN_USE: surroundings.port_in_use,
    Cause.MODEL_NOT_FOUND: surroundings.model_not_found,
    Cause.GATED: surroundings.gated,
    Cause.NCCL: surroundings.nccl,
    Cause.ENGINE_DIED: surroundings.engine_died,
    Cause.DRIVER: surroundings.driver,
    Cause.DISK_FULL: surroundings.disk_full,
    Cause.INTERRUPTED: surroundings.interrupted,
}


def remedies_for(case: Case) -> tuple[Remedy, ...]:
    """What would mend this failure, the best first; none for what has no name."""
    find = _REMEDIES.get(case.failure.cause)
    return tuple(one for one in find(case) if _is_known(one, case)) if find is not None else ()


def _is_known(remedy: Remedy, case: Case) -> bool:
    """Whether the vLLM that wrote the log takes the flags; so it counts where the log does not say which one it was."""
    if not remedy.changes.set or case.version is None:
        return True
    from vllm_launchers.machine.flags.releases import UnknownReleaseError, release_table

    try:
        known = release_table(case.version).flags
    except UnknownReleaseError:
        return True
    return all(name.partition(".")[0] in known for name in remedy.changes.set)

"""What a plan asks for, read from its flags, and the GPUs it would run on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from vllm_launchers.machine.gpu.host import Gpu, Host, MigInstance
from vllm_launchers.plan.budget.settings import decimal
from vllm_launchers.plan.flags import token_count
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import EngineKind, Flags, Plan

VISIBLE = "CUDA_VISIBLE_DEVICES"
UTILIZATION = "gpu-memory-utilization"
LENGTH = "max-model-len"
TENSOR, PIPELINE, DATA = "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"
KV_DTYPE = "kv-cache-dtype"
UTILIZATION_UP_SINCE = (0, 20, 0)
FAR = ("nnodes", "node-rank", "data-parallel-address", "data-parallel-size-local", "data-parallel-hybrid-lb",
       "data-parallel-external-lb")  # fmt: skip
"""Flags of a server whose ranks are not all on this machine."""


def size_of(flags: Flags, name: str) -> int:
    """One of the parallel sizes, 1 where it is not set or no size."""
    value = flags.get(name, 1)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1


def ranks(flags: Flags) -> int:
    """How many GPUs a server works on: tensor × pipeline × data parallel."""
    return math.prod(size_of(flags, name) for name in (TENSOR, PIPELINE, DATA))


def spread(flags: Flags) -> bool:
    """Whether some of its ranks may run on other machines."""
    return any(name in flags for name in FAR) or flags.get("distributed-executor-backend") == "ray"


def utilization(plan: Plan) -> float:
    """The share of each GPU that vLLM will take: the flag, else the release's default."""
    value = decimal(plan.flags.get(UTILIZATION))
    if value is not None:
        return value
    release = plan.engine.release
    return 0.9 if release is not None and release < UTILIZATION_UP_SINCE else 0.92


def length(plan: Plan, knowledge: Knowledge) -> int | None:
    """The context in tokens: the flag's, else the model's own."""
    if (asked := token_count(plan.flags.get(LENGTH))) is not None:
        return asked
    return knowledge.facts.max_context if knowledge.facts is not None else None


def uses_gpus(plan: Plan) -> bool:
    """Whether it computes on GPUs at all."""
    return plan.engine.build != "cpu"


def simulated(plan: Plan) -> bool:
    """Whether it only plays a server."""
    return plan.engine.kind is EngineKind.SIMULATED


def gpus_of(plan: Plan, knowledge: Knowledge) -> tuple[Gpu, ...]:
    """The GPUs that it would run on; a MIG slice stands as a GPU of its size. Empty where they are not known.

    Where none were chosen vLLM takes the first ones that it sees. What ``CUDA_VISIBLE_DEVICES`` names and nobody knows
    here, as ``-1`` or nothing at all, leaves them unknown.
    """
    host = knowledge.host
    if host is None or not uses_gpus(plan):
        return ()
    devices = variables(plan, knowledge).get(VISIBLE)
    known = {gpu.index: gpu for gpu in host.gpus}
    if plan.gpus and not (devices or "").startswith("MIG-"):
        return tuple(known[index] for index in plan.gpus if index in known)
    if devices is None:
        return tuple(known[index] for index in sorted(known))[: ranks(plan.flags)]
    found = [_device(host, word.strip()) for word in devices.split(",")]
    return tuple(gpu for gpu in found if gpu is not None) if None not in found else ()


def _device(host: Host, word: str) -> Gpu | None:
    """What one word of ``CUDA_VISIBLE_DEVICES`` names: an index, or a UUID or the only beginning of one."""
    if word.startswith("GPU-"):
        found = [gpu for gpu in host.gpus if (gpu.uuid or "").startswith(word)]
    elif word.startswith("MIG-"):
        found = [_slice(gpu, part) for gpu in host.gpus for part in gpu.mig if part.uuid.startswith(word)]
    else:
        found = [gpu for gpu in host.gpus if str(gpu.index) == word]
    return found[0] if len(found) == 1 else None


def _slice(gpu: Gpu, part: MigInstance) -> Gpu:
    held = tuple(h for h in gpu.holders if h.instance is not None and h.instance == part.gpu_instance)
    used = (part.memory_gib or 0.0) - (part.free_gib or 0.0)
    return replace(gpu, memory_gib=part.memory_gib, free_gib=part.free_gib, used_gib=used, used_by=held)


def capability(gpus: tuple[Gpu, ...]) -> float | None:
    """The lowest compute capability among GPUs, as 8.6 for 8.6; None where one is not known."""
    found = []
    for gpu in gpus:
        try:
            found.append(float(gpu.compute_capability or ""))
        except ValueError:
            return None
    return min(found, default=None)


def names(gpus: tuple[Gpu, ...]) -> str:
    """Their models, each once: ``NVIDIA L40S``."""
    return " and ".join(dict.fromkeys(gpu.name or f"GPU {gpu.index}" for gpu in gpus))


def on(variables: Mapping[str, str], name: str) -> bool:
    """Whether a switch among environment variables is on."""
    return variables.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def variables(plan: Plan, knowledge: Knowledge) -> Mapping[str, str]:
    """The environment that the server will have, without secrets."""
    return {**knowledge.surroundings.environment, **plan.environment}

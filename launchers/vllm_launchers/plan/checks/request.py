"""What a plan's flags request, and the GPUs that it would run on. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.host.gpu.sharing import slice_gpu
from vllm_launchers.plan.attention import Fp8Cache, fp8_cache_support
from vllm_launchers.plan.budget.budget import HIGHEST_UTILIZATION, cuda_gib, shapes
from vllm_launchers.plan.budget.memory_flags import accepted_utilization
from vllm_launchers.plan.choices.choice import BudgetFor
from vllm_launchers.plan.flags import (
    BACKEND,
    BLOCKS,
    BYTES,
    DATA,
    PIPELINE,
    SEQUENCES,
    TENSOR,
    UTILIZATION,
    VISIBLE,
    token_count,
)
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.proposals import Target
from vllm_launchers.plan.tensor_sizes import tensor_problem
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags, whole_number

MULTI_NODE_FLAGS = ("nnodes", "node-rank", "data-parallel-address", "data-parallel-size-local",
                    "data-parallel-hybrid-lb", "data-parallel-external-lb")  # fmt: skip
"""Flags of a server that has ranks on other machines."""


def ranks(flags: Flags) -> int:
    """Number of GPUs that a server uses: tensor × pipeline × data parallel."""
    return math.prod(whole_number(flags, name) for name in (TENSOR, PIPELINE, DATA))


def local_ranks(flags: Flags) -> int:
    """Number of GPUs that it uses on one machine; vLLM gives each of ``nnodes`` the same number."""
    return max(1, ranks(flags) // whole_number(flags, "nnodes"))


def spread(flags: Flags) -> bool:
    """Whether some of its ranks may run on other machines."""
    return any(name in flags for name in MULTI_NODE_FLAGS) or flags.get(BACKEND) == "ray"


def on_ray(engine: Engine, flags: Flags) -> bool:
    """Whether Ray runs its workers, on GPUs that Ray chooses."""
    return engine.kind is EngineKind.VLLM and flags.get(BACKEND) == "ray"


def utilization(plan: Plan) -> float:
    """The share of each GPU that vLLM will take: the flag, if vLLM accepts it, else the release's default."""
    return accepted_utilization(plan.flags, plan.engine.release)


def default_sequences(plan: Plan, inputs: PlanInputs) -> int | None:
    """Number of sequences that vLLM would run at once by default; None if unknown."""
    found = target_of(plan, inputs).derived({name: plan.flags[name] for name in plan.flags if name != SEQUENCES})
    return whole_number(found, SEQUENCES, 0) or None


def fewer_sequences(plan: Plan, inputs: PlanInputs) -> Changes | None:
    """Reduce the sequences to vLLM's own default, if more were requested."""
    asked, own = token_count(plan.flags.get(SEQUENCES)), default_sequences(plan, inputs)
    return Changes(set={SEQUENCES: own}) if asked is not None and own is not None and own < asked else None


def uses_gpus(plan: Plan) -> bool:
    """Whether it runs on GPUs."""
    return plan.engine.build != "cpu"


def most_gpus(plan: Plan, inputs: PlanInputs) -> int | None:
    """Maximum number of GPUs with the current selection; None if as many as needed are chosen automatically."""
    if plan.gpus_chosen:
        return None
    devices = variables(plan, inputs).get(VISIBLE)
    return len(plan.gpus) or (None if devices is None else len(devices.split(",")))


def way_without_flags(plan: Plan, inputs: PlanInputs, budget: BudgetFor, flags: Flags | None = None) -> str:
    """How to make room if no flag does, as the end of a sentence. ``flags`` are the plan's unless given."""
    flags = plan.flags if flags is None else flags
    other = "use a quantized or smaller model"
    machine = inputs.machine
    alone = machine is not None and not spread(flags)
    count = len(machine.gpus) if machine is not None else 0
    if on_slice(plan) or (alone and (count == 1 or not uses_gpus(plan))):
        return other
    if alone and not _fits_on_more(plan, replace(inputs, host=machine), budget, flags):
        here = "both GPUs" if count == 2 else f"all {count} GPUs"
        return f"even {here} of this machine are too few, so use several such machines, or a quantized or smaller model"
    if alone and inputs.limited_from is not None and not _fits_on_more(plan, inputs, budget, flags):
        return f"make more GPUs visible in {VISIBLE}, or {other}"
    verb = "use" if most_gpus(plan, inputs) is None else "name"
    what = "other or more" if machine is not None and _mixed(machine) else "more"
    return f"{verb} {what} GPUs, or {other}"


def most_room(plan: Plan, gpus: Sequence[Gpu]) -> float | None:
    """GiB that vLLM may take of all these GPUs together; None if the size of one is unknown."""
    sizes = [cuda_gib(gpu) for gpu in gpus]
    share = max(utilization(plan), HIGHEST_UTILIZATION)
    return None if None in sizes else share * sum(size or 0.0 for size in sizes)


def _mixed(host: Host) -> bool:
    return len({gpu.name for gpu in host.gpus}) > 1


def _fits_on_more(plan: Plan, inputs: PlanInputs, budget: BudgetFor, flags: Flags) -> bool:
    """Whether it fits on more of the machine's GPUs than it uses, also those in use now; True if unknown."""
    assert inputs.host is not None, "its GPUs are known"
    most = len([gpu for gpu in inputs.host.gpus if not gpu.mig_mode and not gpu.lost])
    used = whole_number(flags, TENSOR) * whole_number(flags, PIPELINE)
    if known := len(gpus_of(plan, inputs)):
        used = min(used, known)
    if _mixed(inputs.host) and used < most:
        # The budget is that of the model of its own GPUs, so only weights can be compared.
        room = most_room(plan, [gpu for gpu in inputs.host.gpus if not gpu.mig_mode and not gpu.lost])
        return plan.memory is None or room is None or plan.memory.weights_gib * ranks(plan.flags) <= room
    base = {name: value for name, value in flags.items() if name not in (TENSOR, PIPELINE, DATA)}
    shares = sorted({utilization(plan), max(utilization(plan), HIGHEST_UTILIZATION)})
    for tensor in range(1, most + 1):
        for pipeline in range(used // tensor + 1, most // tensor + 1):
            sizes = {**base, TENSOR: tensor, PIPELINE: pipeline}
            if tensor_problem(inputs.facts, sizes):
                break
            for share in shares:
                found = budget({**sizes, UTILIZATION: share})
                if found is None or found.fits:
                    return True
    return False


def on_slice(plan: Plan) -> bool:
    """Whether it runs on a MIG slice, of which a process sees only one."""
    return plan.environment.get(VISIBLE, "").startswith("MIG-")


def fixed_size(plan: Plan) -> tuple[str, ...]:
    """Flags that fix the size of the KV cache; empty if memory determines it."""
    return tuple(name for name in (BLOCKS, BYTES) if name in plan.flags)


def without_fixed_size(plan: Plan) -> Flags | None:
    """The flags without those that fix the size of the KV cache; None if memory determines it anyway."""
    fixed = fixed_size(plan)
    return {name: value for name, value in plan.flags.items() if name not in fixed} if fixed else None


def simulated(plan: Plan) -> bool:
    """Whether the engine is the simulated one."""
    return plan.engine.kind is EngineKind.SIMULATED


def gpus_of(plan: Plan, inputs: PlanInputs) -> tuple[Gpu, ...]:
    """The GPUs that it would run on; a MIG slice counts as a GPU of its size. Empty if unknown.

    If none were chosen, vLLM takes the first visible ones.
    """
    host = inputs.host
    if host is None or not uses_gpus(plan):
        return ()
    if inputs.ray is not None and len([node for node in inputs.ray.nodes if node.gpus]) > 1:
        return ()  # Ray may choose those of other nodes
    devices = variables(plan, inputs).get(VISIBLE)
    if plan.gpus and not (devices or "").startswith("MIG-"):
        known = {gpu.index: gpu for gpu in host.gpus}
        return tuple(known[index] for index in plan.gpus if index in known)
    visible = visible_gpus(host, devices)
    return visible if devices is not None else visible[: local_ranks(plan.flags)]


def visible_gpus(host: Host, devices: str | None) -> tuple[Gpu, ...]:
    """The GPUs in ``CUDA_VISIBLE_DEVICES``, in its order, all if it is not set.

    Like CUDA, it stops at the first entry that is not a GPU, such as ``-1`` or an empty one.
    """
    if devices is None:
        return tuple(sorted(host.gpus, key=lambda gpu: gpu.index))
    found: list[Gpu] = []
    for word in devices.split(","):
        if (gpu := _device(host, word.strip())) is None:
            break
        found.append(gpu)
    return tuple(found)


def _device(host: Host, word: str) -> Gpu | None:
    """The GPU of one entry of ``CUDA_VISIBLE_DEVICES``: an index, or a UUID or a unique prefix of one."""
    if word.startswith("GPU-"):
        found = [gpu for gpu in host.gpus if (gpu.uuid or "").startswith(word)]
    elif word.startswith("MIG-"):
        found = [slice_gpu(gpu, part) for gpu in host.gpus for part in gpu.mig if part.uuid.startswith(word)]
    else:
        found = [gpu for gpu in host.gpus if str(gpu.index) == word]
    return found[0] if len(found) == 1 else None


def target_of(plan: Plan, inputs: PlanInputs) -> Target:
    """What changes to its flags are checked against."""
    gpu = next(iter(shapes(gpus_of(plan, inputs), 1)), None)
    return Target(inputs.flags, inputs.facts, gpu, not uses_gpus(plan), plan.engine.release)


def capability(gpus: tuple[Gpu, ...]) -> float | None:
    """The lowest compute capability among GPUs (8.6), or None if one is unknown."""
    found = [gpu.capability for gpu in gpus]
    return min((one for one in found if one is not None), default=None) if None not in found else None


def fp8_cache_of(plan: Plan, inputs: PlanInputs) -> Fp8Cache:
    """Whether this vLLM can keep its KV cache in FP8 on these GPUs."""
    able = capability(gpus_of(plan, inputs))
    mla = inputs.facts is not None and inputs.facts.mla
    return fp8_cache_support(plan.flags, variables(plan, inputs), plan.engine.release, able, mla=mla)


def names(gpus: tuple[Gpu, ...]) -> str:
    """The names of GPU models, each once: ``NVIDIA L40S``."""
    return " and ".join(dict.fromkeys(gpu.name or f"GPU {gpu.index}" for gpu in gpus))


def on(variables: Mapping[str, str], name: str) -> bool:
    """Whether a boolean environment variable is on."""
    return variables.get(name, "").strip().lower() in ("1", "true", "yes", "on")


def variables(plan: Plan, inputs: PlanInputs) -> Mapping[str, str]:
    """The server's environment, without secrets."""
    return {**inputs.environment.variables, **plan.environment}

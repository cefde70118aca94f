"""The memory budget of a launch. GiB are 2**30 bytes; None means unknown, never zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import find_model, is_unified, usable_gib
from vllm_launchers.host.gpu.host import Gpu

HIGHEST_UTILIZATION = 0.95
"""The largest ``gpu-memory-utilization`` that is proposed, or accepted without a warning. In addition to weights, KV
cache and the activations of a full step, vLLM allocates memory that it has not measured: buffers for communication and
kernels, and fragments."""


class GpuBudget(msgspec.Struct, frozen=True):
    """Memory of one GPU once the server runs, in GiB.

    ``overhead_gib`` is CUDA context, NCCL and peak activations; ``graphs_gib`` is CUDA graphs. ``others_gib`` is held
    by other processes now. ``index`` is None if no GPU was chosen and a typical one stands for all.
    """

    index: int | None
    total_gib: float
    weights_gib: float
    overhead_gib: float
    graphs_gib: float
    kv_gib: float
    others_gib: float = 0.0

    @property
    def free_gib(self) -> float:
        """Memory left; negative if it does not fit."""
        taken = self.weights_gib + self.overhead_gib + self.graphs_gib + self.kv_gib + self.others_gib
        return self.total_gib - taken


class MemoryBudget(msgspec.Struct, frozen=True):
    """Figures of the GPU with the least room for the KV cache, which decides; per GPU, as in vLLM's own log.

    A negative ``kv_gib`` is missing memory. ``max_concurrency`` is the number of requests of full ``max_model_len``
    that fit at once, and ``kv_tokens`` the cache's size, both as logged by vLLM; if not one request of that length
    fits, ``kv_tokens`` is the longest one that does. ``concurrency_p95`` is the same for the workload's 95th
    percentile. ``source`` is ``estimate``, ``estimate, corrected`` (by the report of an earlier start of this model on
    this GPU) or ``engine`` (its report). ``assumed`` has one short sentence for each missing fact and the assumption
    made instead.
    """

    weights_gib: float
    overhead_gib: float
    graphs_gib: float
    kv_gib: float
    kv_bytes_per_token: float | None
    """Per GPU. For models with windowed layers, the average over a request of ``max_model_len``."""
    kv_tokens: int | None
    max_model_len: int | None
    max_concurrency: float | None
    concurrency_p95: float | None = None
    per_gpu: tuple[GpuBudget, ...] = ()
    cached: bool = True
    """Whether vLLM keeps a KV cache for the model. If not, ``kv_gib`` is 0, or missing memory."""
    fixed: bool = False
    """Whether the KV cache's size was set, in bytes or blocks, so that no share of the GPU limits it."""
    most_sequences: int | None = None
    """The largest ``max-num-seqs`` with which vLLM starts: the number of blocks, if each sequence needs one for the
    state of its linear layers. None if blocks do not limit it."""
    source: str = "estimate"
    assumed: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one request of full length fits, and everything fits on an otherwise empty GPU."""
        if self.fixed and any(gpu.free_gib + gpu.others_gib < 0 for gpu in self.per_gpu):
            return False
        return not self.lacks_memory and (self.max_concurrency is None or self.max_concurrency >= 1)

    @property
    def lacks_memory(self) -> bool:
        """Whether weights and overhead leave nothing for a KV cache, if the model needs one."""
        return self.kv_gib < 0 or (self.cached and self.kv_gib == 0)

    @property
    def taken_gib(self) -> float:
        """Total memory that it takes on a GPU."""
        return self.weights_gib + self.overhead_gib + self.graphs_gib + self.kv_gib

    @property
    def served_p95(self) -> float | None:
        """``concurrency_p95``, or None if requests of that length exceed ``max_model_len`` and are refused."""
        if self.concurrency_p95 is None or self.max_concurrency is None:
            return self.concurrency_p95
        return self.concurrency_p95 if self.concurrency_p95 >= self.max_concurrency else None


CONTEXT_GIB = 0.45
"""CUDA context and loaded kernels. They exist before vLLM measures, so they are not in its share (except in 0.8)."""
NEIGHBORS_GIB = 4.0
"""NCCL's buffers and CUDA's own memory together stay below this; other processes took anything beyond."""

_OVER_NCCL = ("allgather_reducescatter", "naive")
"""Values of ``all2all-backend`` with which experts exchange tokens over NCCL; the first is the default."""


class EngineReport(msgspec.Struct, frozen=True):
    """The memory report of a real start, per GPU, as in its log; None means not reported."""

    weights_gib: float | None = None
    kv_gib: float | None = None
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    graphs_gib: float | None = None
    max_model_len: int | None = None
    kv_pin_bytes: int | None = None
    """The ``kv-cache-memory-bytes`` that vLLM suggested to stay within ``gpu-memory-utilization``."""
    non_torch_gib: float | None = None
    """Growth of the GPU's memory outside PyTorch during the start, whoever allocated it."""

    def disturbed(self, gpu: str, flags: Mapping[str, object], environment: Mapping[str, str]) -> bool:
        """Whether other processes took GPU memory meanwhile. vLLM counts it as its own, so its cache is too small.

        Unknown, and thus false, with unified memory, where vLLM counts all that the machine's processes allocate,
        including its own; and for expert parallelism over kernels other than NCCL's, which have gigabytes of buffers
        outside PyTorch.
        """
        kernels = str(flags.get("all2all-backend", environment.get("VLLM_ALL2ALL_BACKEND", _OVER_NCCL[0])))
        return (self.non_torch_gib or 0.0) > NEIGHBORS_GIB and not is_unified(gpu) and kernels in _OVER_NCCL


# -- GPUs as a memory budget sees them --------------------------------------------------------------------------------


class GpuShape(msgspec.Struct, frozen=True):
    """A GPU, or a typical one to plan for. Sizes in GiB.

    ``memory_gib`` is as reported by NVML, ``usable_gib`` by CUDA (derived if None). ``free_gib`` is free now; ``index``
    is None if no GPU was chosen.
    """

    name: str = ""
    memory_gib: float | None = None
    free_gib: float | None = None
    index: int | None = None
    usable_gib: float | None = None
    compute_capability: str | None = None

    @property
    def total_gib(self) -> float | None:
        """Memory that CUDA programs see, of which ``gpu-memory-utilization`` is a share. None if unknown."""
        if self.usable_gib is not None:
            return self.usable_gib
        memory = self.memory_gib
        if memory is None:
            known = find_model(self.name)
            memory = known.memory_gib if known is not None else None
        if memory is None or self.unified:
            return memory
        return usable_gib(memory)

    @property
    def unified(self) -> bool:
        """Whether it shares its memory with the CPU; NVML then reports no size."""
        return is_unified(self.name)

    @property
    def major_capability(self) -> int | None:
        """The major number of its compute capability; None if unknown."""
        known = find_model(self.name) if self.compute_capability is None else None
        capability = self.compute_capability or (known.compute_capability if known is not None else "")
        major = capability.partition(".")[0]
        return int(major) if major.isdecimal() else None

    @property
    def before_ampere(self) -> bool:
        """Whether it is known to be older than Ampere."""
        return self.major_capability is not None and self.major_capability < 8

    @property
    def others_gib(self) -> float:
        """Memory that others hold now; 0 if unknown."""
        total = self.total_gib
        return max(0.0, total - self.free_gib) if total is not None and self.free_gib is not None else 0.0


def shapes(gpus: Sequence[Gpu | GpuShape], count: int) -> list[GpuShape]:
    """The GPUs of a launch: the given ones in order; if there are too few, the last stands for the rest."""
    given = [gpu if isinstance(gpu, GpuShape) else _shape(gpu) for gpu in gpus][:count]
    if not given:
        return []
    return given + [replace(given[-1], index=None, free_gib=None)] * (count - len(given))


def cuda_gib(gpu: Gpu) -> float | None:
    """GPU memory that CUDA programs see, of which ``gpu-memory-utilization`` is a share. None if unknown."""
    return _shape(gpu).total_gib if gpu.memory_gib is not None else None


def needed_gib(gpu: Gpu, share: float) -> float | None:
    """Memory that must be free on a GPU for vLLM to start with this ``gpu-memory-utilization``; None if unknown."""
    total = cuda_gib(gpu)
    return share * total + CONTEXT_GIB if total is not None else None


def share_within(gpu: Gpu, free: float | None) -> float | None:
    """The ``gpu-memory-utilization`` for which ``free`` GiB suffice (see `needed_gib`); None if unknown."""
    total = cuda_gib(gpu)
    return max(0.0, free - CONTEXT_GIB) / total if total and free is not None else None


def _shape(gpu: Gpu) -> GpuShape:
    return GpuShape(gpu.name or "", gpu.memory_gib, gpu.free_gib, gpu.index, compute_capability=gpu.compute_capability)

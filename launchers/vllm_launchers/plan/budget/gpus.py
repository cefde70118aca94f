"""GPUs as a memory budget sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_launchers.machine.gpu.catalogue import find_model
from vllm_launchers.machine.gpu.host import Gpu

_RESERVE_GIB, _RESERVE_SHARE = 0.35, 0.003
"""What the driver keeps for itself and page tables: CUDA's total is smaller by it than NVML's, on cards seen so far."""
_UNIFIED = ("gb10", "dgx spark", "jetson", "thor", "orin")


@dataclass(frozen=True, slots=True)
class GpuShape:
    """A GPU, or one of a kind that is planned for. GiB.

    ``memory_gib`` is as NVML reports it, ``usable_gib`` as CUDA does (worked out where it is None). ``free_gib`` is
    free now; ``index`` is None where no GPU was chosen.
    """

    name: str = ""
    memory_gib: float | None = None
    free_gib: float | None = None
    index: int | None = None
    usable_gib: float | None = None
    compute_capability: str | None = None

    @property
    def total_gib(self) -> float | None:
        """What CUDA programs see: the figure that ``gpu-memory-utilization`` is a share of. None where unknown."""
        if self.usable_gib is not None:
            return self.usable_gib
        memory = self.memory_gib
        if memory is None:
            known = find_model(self.name)
            memory = known.memory_gib if known is not None else None
        if memory is None or self.unified:
            return memory
        return max(0.0, memory - _RESERVE_GIB - _RESERVE_SHARE * memory)

    @property
    def unified(self) -> bool:
        """Whether it shares its memory with the CPU; NVML then reports no size of it, and vLLM sees none."""
        return any(word in self.name.lower() for word in _UNIFIED)

    @property
    def before_ampere(self) -> bool:
        """Whether it is known to be of a generation before Ampere."""
        known = find_model(self.name) if self.compute_capability is None else None
        capability = self.compute_capability or (known.compute_capability if known is not None else "")
        return capability.partition(".")[0] in ("5", "6", "7")

    @property
    def others_gib(self) -> float:
        """What others hold now; 0 where it is not known."""
        total = self.total_gib
        return max(0.0, total - self.free_gib) if total is not None and self.free_gib is not None else 0.0


def shapes(gpus: Sequence[Gpu | GpuShape], count: int) -> list[GpuShape]:
    """As many GPUs as a launch takes: the given ones in their order; of too few, the last stands for the rest."""
    given = [gpu if isinstance(gpu, GpuShape) else _shape(gpu) for gpu in gpus][:count]
    if not given:
        return []
    return given + [replace(given[-1], index=None, free_gib=None)] * (count - len(given))


def _shape(gpu: Gpu) -> GpuShape:
    return GpuShape(gpu.name or "", gpu.memory_gib, gpu.free_gib, gpu.index, compute_capability=gpu.compute_capability)

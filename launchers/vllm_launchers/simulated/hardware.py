"""GPUs that the simulated engine can pretend to have: memory, bandwidth and arithmetic from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1024**3

DEFAULT_GPU = "RTX A6000"


class UnknownGpuError(ValueError):
    """The named GPU is not in the table."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU model.

    ``memory_gib`` is what CUDA reports as total; ``bandwidth`` is in bytes/s; ``bf16_flops`` and ``fp8_flops`` are
    dense FLOP/s of the tensor cores (``fp8_flops`` is None where the chip has no FP8 units); ``link`` is bytes/s
    between two GPUs in one direction, over NVLink where the model has it, else PCIe.
    """

    name: str
    memory_gib: float
    bandwidth: float
    bf16_flops: float
    fp8_flops: float | None
    link: float
    nvlink: bool = False

    @property
    def fp8_native(self) -> bool:
        """Whether FP8 arithmetic runs on the tensor cores; else vLLM unpacks FP8 to BF16 first."""
        return self.fp8_flops is not None

    @property
    def memory_bytes(self) -> int:
        """Total memory in bytes."""
        return int(self.memory_gib * GIB)

    @property
    def large_defaults(self) -> bool:
        """Whether vLLM takes its larger scheduler defaults: 70 GiB or more, and not an A100."""
        return self.memory_gib >= 70 and "A100" not in self.name


def _gpu(
    name: str, gib: float, gbps: float, bf16: float, fp8: float | None, link_gbps: float, nvlink: bool = False
) -> Gpu:
    return Gpu(name, gib, gbps * 1e9, bf16 * 1e12, None if fp8 is None else fp8 * 1e12, link_gbps * 1e9, nvlink)


GPUS: tuple[Gpu, ...] = (
    _gpu("Tesla T4", 14.6, 320, 65, None, 12),
    _gpu("L4", 22.0, 300, 121, 242, 24),
    _gpu("A10", 22.1, 600, 125, None, 24),
    _gpu("A30", 23.5, 933, 165, None, 100, nvlink=True),
    _gpu("RTX 3090", 23.6, 936, 71, None, 56, nvlink=True),
    _gpu("RTX 4090", 23.6, 1008, 165, 330, 24),
    _gpu("RTX 5090", 31.4, 1792, 209, 419, 48),
    _gpu("RTX A5000", 23.7, 768, 111, None, 56, nvlink=True),
    _gpu("RTX A6000", 47.4, 768, 155, None, 56, nvlink=True),
    _gpu("RTX 6000 Ada", 47.4, 960, 364, 728, 24),
    _gpu("RTX PRO 6000", 95.0, 1792, 503, 1007, 48),
    _gpu("L40S", 44.4, 864, 362, 733, 24),
    _gpu("A100 40GB", 39.4, 1555, 312, None, 300, nvlink=True),
    _gpu("A100 80GB", 79.2, 2039, 312, None, 300, nvlink=True),
    _gpu("H100 80GB", 79.2, 3350, 989, 1979, 450, nvlink=True),
    _gpu("H200", 139.8, 4800, 989, 1979, 450, nvlink=True),
    _gpu("B200", 178.4, 8000, 2250, 4500, 900, nvlink=True),
)


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name, case and a leading ``NVIDIA`` aside.

    Raises :class:`UnknownGpuError`, which lists the names there are.
    """
    wanted = " ".join(name.lower().replace("nvidia", "").split())
    for gpu in GPUS:
        if gpu.name.lower() == wanted:
            return gpu
    names = ", ".join(gpu.name for gpu in GPUS)
    raise UnknownGpuError(f"SIMULATED_GPU names no known GPU: {name!r}. Choose one of: {names}")

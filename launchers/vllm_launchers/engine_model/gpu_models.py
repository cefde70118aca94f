"""GPU models with their data sheet figures: the only such table, used for planning, timing and simulation. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from vllm_launchers.units import GIB

DEFAULT_GPU = "RTX A6000"
"""The default GPU of a simulated server."""

_RESERVE_GIB, _RESERVE_SHARE = 0.35, 0.003
"""Memory used by the driver and page tables: by this much CUDA's total is smaller than NVML's, on GPUs seen so far."""


_GB10 = ("gb10", "dgx spark")
_UNIFIED = (*_GB10, "jetson", "thor", "orin")

SMALL_BATCHES = 256, 2048
LARGE_BATCHES, LARGE_FROM_GIB = (1024, 8192), 70
LARGEST_BATCHES, LARGEST_FROM_GIB, LARGEST_SINCE = (1024, 16384), 160, (0, 28, 0)
"""vLLM's defaults of ``max-num-seqs`` and ``max-num-batched-tokens``, the GPU memory from which they apply, and the
first release with them. From ``EngineArgs.get_batch_defaults`` in ``vllm/engine/arg_utils.py``."""

_UNIFIED_SINCE = (0, 33, 0)
"""First release seen to know the size of memory shared with the CPU (``CudaPlatform.get_device_total_memory``)."""


class UnknownGpuError(ValueError):
    """The named GPU is not in the table, or its speed is unknown."""


def usable_gib(memory_gib: float) -> float:
    """Total memory reported by CUDA, in GiB, if NVML reports ``memory_gib``."""
    return max(0.0, memory_gib - _RESERVE_GIB - _RESERVE_SHARE * memory_gib)


def is_unified(name: str) -> bool:
    """Whether a GPU of that name shares memory with the CPU: NVML then reports no size."""
    return any(word in name.lower() for word in _UNIFIED)


def batch_defaults(name: str, memory_gib: float | None, release: tuple[int, int, int]) -> tuple[int, int]:
    """A release's defaults of ``max-num-seqs`` and ``max-num-batched-tokens`` for a GPU of that name and memory (GiB).

    An A100 and a GB10 never get the large ones, and neither does a GPU of unknown memory. Before 0.33, vLLM knew no
    size of memory shared with the CPU.
    """
    small = _GB10 if release >= _UNIFIED_SINCE else _UNIFIED
    size = 0.0 if any(word in name.lower() for word in small) else memory_gib or 0.0
    if size >= LARGEST_FROM_GIB and release >= LARGEST_SINCE:
        return LARGEST_BATCHES
    return LARGE_BATCHES if size >= LARGE_FROM_GIB and "a100" not in name.lower() else SMALL_BATCHES


class GpuModel(msgspec.Struct, frozen=True):
    """A GPU model.

    ``memory_gib`` is what NVML reports, a little less than the nominal size. ``bandwidth`` is that of its memory, in
    bytes/s. ``bf16_flops`` and ``fp8_flops`` are dense FLOP/s of the tensor cores: ``bf16_flops`` is for FP16 if the
    chip has no BF16 units, ``fp8_flops`` is None without FP8 units, and both are None if the data sheet does not state
    them. ``nvlink`` is bytes/s in one direction over all NVLinks of one GPU, 0 for a model without NVLink.
    """

    name: str
    memory_gib: float
    architecture: str
    compute_capability: str
    pcie_generation: int
    bandwidth: float
    bf16_flops: float | None
    fp8_flops: float | None
    nvlink: float

    @property
    def usable_gib(self) -> float:
        """Total memory reported by CUDA, in GiB: ``gpu-memory-utilization`` is a fraction of this."""
        return usable_gib(self.memory_gib)

    @property
    def memory_bytes(self) -> int:
        """Total memory reported by CUDA, in bytes."""
        return int(self.usable_gib * GIB)


_ROWS: tuple[tuple[str, float, str, str, int, float, float | None, float | None, float], ...] = (
    # name, GiB, architecture, compute capability, PCIe generation, memory GB/s, BF16 and FP8 TFLOP/s, NVLink GB/s
    ("NVIDIA B200", 179.1, "Blackwell", "10.0", 5, 8000, 2250, 4500, 900),
    ("NVIDIA H200", 140.4, "Hopper", "9.0", 5, 4800, 989, 1979, 450),
    ("NVIDIA H100 80GB HBM3", 79.6, "Hopper", "9.0", 5, 3350, 989, 1979, 450),
    ("NVIDIA H100 PCIe", 79.6, "Hopper", "9.0", 5, 2039, 756, 1513, 300),
    ("NVIDIA H100 NVL", 93.6, "Hopper", "9.0", 5, 3938, 835, 1671, 300),
    ("NVIDIA A100-SXM4-80GB", 80.0, "Ampere", "8.0", 4, 2039, 312, None, 300),
    ("NVIDIA A100 80GB PCIe", 80.0, "Ampere", "8.0", 4, 1935, 312, None, 300),
    ("NVIDIA A100-SXM4-40GB", 40.0, "Ampere", "8.0", 4, 1555, 312, None, 300),
    ("NVIDIA A40", 45.0, "Ampere", "8.6", 4, 696, 150, None, 56.25),
    ("NVIDIA A30", 24.0, "Ampere", "8.0", 4, 933, 165, None, 100),
    ("NVIDIA A10", 22.5, "Ampere", "8.6", 4, 600, 125, None, 0),
    ("NVIDIA RTX A6000", 48.0, "Ampere", "8.6", 4, 768, 155, None, 56.25),
    ("NVIDIA RTX A5000", 24.0, "Ampere", "8.6", 4, 768, 111, None, 56.25),
    ("NVIDIA RTX 6000 Ada Generation", 48.0, "Ada", "8.9", 4, 960, 364, 728, 0),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 95.6, "Blackwell", "12.0", 5, 1792, 503, 1007, 0),
    ("NVIDIA L40S", 45.0, "Ada", "8.9", 4, 864, 362, 733, 0),
    ("NVIDIA L40", 45.0, "Ada", "8.9", 4, 864, 181, 362, 0),
    ("NVIDIA L4", 22.5, "Ada", "8.9", 4, 300, 121, 242, 0),
    ("NVIDIA GeForce RTX 5090", 31.8, "Blackwell", "12.0", 5, 1792, 209, 419, 0),
    ("NVIDIA GeForce RTX 4090", 24.0, "Ada", "8.9", 4, 1008, 165, 330, 0),
    ("NVIDIA GeForce RTX 3090", 24.0, "Ampere", "8.6", 4, 936, 71, None, 56.25),
    ("NVIDIA GeForce RTX 3090 Ti", 24.0, "Ampere", "8.6", 4, 1008, 80, None, 56.25),
    ("Quadro RTX 8000", 45.0, "Turing", "7.5", 3, 672, 130, None, 50),
    ("Tesla V100-SXM2-32GB", 32.0, "Volta", "7.0", 3, 900, 125, None, 150),
    ("Tesla V100-SXM2-16GB", 16.0, "Volta", "7.0", 3, 900, 125, None, 150),
    ("Tesla T4", 15.0, "Turing", "7.5", 3, 320, 65, None, 0),
    ("Tesla P100-SXM2-16GB", 16.0, "Pascal", "6.0", 3, 732, 21, None, 80),
    ("NVIDIA B300", 268.6, "Blackwell", "10.3", 6, 8000, 2250, 4500, 900),
    ("NVIDIA GB200", 184.3, "Blackwell", "10.0", 5, 8000, 2500, 5000, 900),
    ("NVIDIA GB10", 121.6, "Blackwell", "12.1", 5, 273, 125, 250, 0),
    ("NVIDIA GH200 480GB", 95.6, "Hopper", "9.0", 5, 4000, 989, 1979, 450),
    ("NVIDIA H20", 95.6, "Hopper", "9.0", 5, 4000, 148, 296, 450),
    ("NVIDIA A100-PCIE-40GB", 40.0, "Ampere", "8.0", 4, 1555, 312, None, 300),
    ("NVIDIA L20", 45.0, "Ada", "8.9", 4, 864, 119.5, 239, 0),
    ("NVIDIA A10G", 22.5, "Ampere", "8.6", 4, 600, 70, None, 0),
    ("NVIDIA A16", 15.0, "Ampere", "8.6", 4, 200, 18, None, 0),
    ("NVIDIA A2", 15.0, "Ampere", "8.6", 4, 200, 18, None, 0),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.6, "Blackwell", "12.0", 5, 1597, 503, 1007, 0),
    ("NVIDIA RTX PRO 5000 Blackwell", 47.8, "Blackwell", "12.0", 5, 1344, 258, 516, 0),
    ("NVIDIA RTX PRO 4000 Blackwell", 23.9, "Blackwell", "12.0", 5, 672, None, None, 0),
    ("NVIDIA RTX 5000 Ada Generation", 32.0, "Ada", "8.9", 4, 576, 261, 522, 0),
    ("NVIDIA RTX 4000 Ada Generation", 20.0, "Ada", "8.9", 4, 360, 107, 214, 0),
    ("NVIDIA RTX A4000", 16.0, "Ampere", "8.6", 4, 448, 77, None, 0),
    ("NVIDIA GeForce RTX 5080", 15.9, "Blackwell", "12.0", 5, 960, 113, 225, 0),
    ("NVIDIA GeForce RTX 5070 Ti", 15.9, "Blackwell", "12.0", 5, 896, 88, 176, 0),
    ("NVIDIA GeForce RTX 5070", 11.9, "Blackwell", "12.0", 5, 672, 62, 123, 0),
    ("NVIDIA GeForce RTX 5060 Ti 16GB", 15.9, "Blackwell", "12.0", 5, 448, 47, 95, 0),
    ("NVIDIA GeForce RTX 4080", 16.0, "Ada", "8.9", 4, 717, 97, 195, 0),
    ("NVIDIA GeForce RTX 4080 SUPER", 16.0, "Ada", "8.9", 4, 736, 104, 209, 0),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 16.0, "Ada", "8.9", 4, 672, 88, 176, 0),
    ("NVIDIA GeForce RTX 4070", 12.0, "Ada", "8.9", 4, 504, 58, 117, 0),
    ("NVIDIA GeForce RTX 4060 Ti 16GB", 16.0, "Ada", "8.9", 4, 288, 44, 88, 0),
    ("NVIDIA GeForce RTX 4060", 8.0, "Ada", "8.9", 4, 272, 30, 60, 0),
    ("NVIDIA GeForce RTX 3080", 10.0, "Ampere", "8.6", 4, 760, 60, None, 0),
    ("NVIDIA GeForce RTX 3060", 12.0, "Ampere", "8.6", 4, 360, 25, None, 0),
    ("NVIDIA GeForce RTX 2080 Ti", 11.0, "Turing", "7.5", 3, 616, 54, None, 50),
)


MODELS: tuple[GpuModel, ...] = tuple(
    GpuModel(name, gib, architecture, able, pcie, gbs * 1e9, bf16 and bf16 * 1e12, fp8 and fp8 * 1e12, nvlink_gbs * 1e9)
    for name, gib, architecture, able, pcie, gbs, bf16, fp8, nvlink_gbs in _ROWS
)


@lru_cache(256)
def find_model(name: str) -> GpuModel | None:
    """The model that a name refers to: the full name (``NVIDIA L40S``) or a common form (``l40s``, ``H100``, ``rtx
    3090``).

    Every word of ``name`` must be one of the model's; of several models, the one with the fewest other words is chosen,
    and the first of the list among equals.
    """
    words = _words(name)
    if not words:
        return None
    fitting = [model for model in MODELS if words <= _words(model.name)]
    return min(fitting, key=lambda model: len(_words(model.name)), default=None)


def find_gpu(name: str) -> GpuModel:
    """The model that a name refers to, if its steps can be timed. Raises `UnknownGpuError`, which lists valid names."""
    found = find_model(name)
    if found is None or found.bf16_flops is None:
        names = ", ".join(model.name for model in MODELS if model.bf16_flops is not None)
        raise UnknownGpuError(f"SIMULATED_GPU names no known GPU: {name!r}. Choose one of: {names}")
    return found


def near_names(name: str) -> list[str]:
    """Names of similar models, for a hint."""
    names = [model.name for model in MODELS]
    words = _words(name)
    shared = [known for known in names if words & (_words(known) - {"nvidia", "rtx", "geforce"})]
    if shared:
        return shared[:3]
    import difflib  # only for an unknown name

    return difflib.get_close_matches(name, names, 3, 0.4)


def _words(name: str) -> frozenset[str]:
    text = re.sub(r"\b(\d+) gb\b", r"\1gb", name.lower())
    return frozenset(re.findall(r"[a-z0-9]+", text))


# -- interconnects of GPUs, for the step-time model -------------------------------------------------------------------


PCIE_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane in one direction, after line coding (8b/10b, 128b/130b, FLIT)."""

PCIE_EFFICIENCY = 0.76
"""Fraction of a PCIe slot's rate that NCCL reaches between two GPUs behind one root."""
BY_CPU_EFFICIENCY = 0.4
"""The same if copies go through host memory: across sockets, or where peer access is not possible."""
NVLINK_DELAY, PCIE_DELAY, BY_CPU_DELAY = 8e-6, 22e-6, 35e-6
"""Seconds per small all-reduce."""


class Interconnect(msgspec.Struct, frozen=True):
    """A link between GPUs: effective ``bandwidth`` in bytes/s in one direction, ``delay`` in seconds per exchange."""

    bandwidth: float
    delay: float


def over_nvlink(bandwidth: float) -> Interconnect:
    """NVLink with ``bandwidth`` bytes/s in one direction, over all links that join one GPU to the others."""
    return Interconnect(bandwidth, NVLINK_DELAY)


def over_pcie_slot(bandwidth: float, *, by_cpu: bool = False) -> Interconnect:
    """A PCIe slot with ``bandwidth`` bytes/s in one direction. With ``by_cpu`` copies go through host memory."""
    efficiency, delay = (BY_CPU_EFFICIENCY, BY_CPU_DELAY) if by_cpu else (PCIE_EFFICIENCY, PCIE_DELAY)
    return Interconnect(bandwidth * efficiency, delay)


def usual_for(gpu: GpuModel) -> Interconnect:
    """A GPU model's typical link, for an unknown machine: NVLink if the model has it, otherwise 16 PCIe lanes."""
    if gpu.nvlink:
        return over_nvlink(gpu.nvlink)
    return over_pcie_slot(PCIE_LANE_GBS[gpu.pcie_generation] * 16e9)

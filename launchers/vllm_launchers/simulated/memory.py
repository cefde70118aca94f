"""A GPU's memory layout and number of KV cache blocks: vLLM's own formula, with estimated terms.

available = total × utilization − weights/(TP·PP) − non-torch − peak activation − CUDA graphs.
"""

from __future__ import annotations

import math
from enum import Enum

import msgspec
from msgspec.structs import replace

from vllm_launchers.simulated.settings import EngineSettings
from vllm_launchers.units import GIB

CUDA_CONTEXT = int(0.45 * GIB)
"""Bytes that the driver takes before vLLM starts; they do not count as free memory."""


class MemoryStage(Enum):
    """The stage at which vLLM runs out of memory."""

    LOADING = "loading the weights"
    CACHE = "making the KV cache"


class MemoryBudgetError(Exception):
    """The model does not fit. ``kind`` is the class of vLLM's exception, raised at ``stage``."""

    def __init__(self, kind: str, message: str, stage: MemoryStage = MemoryStage.CACHE) -> None:
        super().__init__(message)
        self.kind = kind
        self.stage = stage


class MemoryPlan(msgspec.Struct, frozen=True):
    """Bytes on each GPU, and the resulting block pool."""

    requested: int
    weights: int
    graphs: int
    available: int
    block_bytes: int
    blocks: int
    block_size: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        """Number of tokens that fit in the KV cache."""
        return self.blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """Number of requests of full context length that fit at once."""
        return self.blocks / math.ceil(self.max_model_len / self.block_size)


def plan_memory(settings: EngineSettings) -> MemoryPlan:
    """Compute the block pool. Raises `MemoryBudgetError` with vLLM's message if something does not fit."""
    gpu, model = settings.gpu, settings.model
    split = settings.tensor_parallel * settings.pipeline_parallel
    requested = int(gpu.memory_bytes * settings.utilization)
    weights = int(model.weight_bytes / split)
    if weights + CUDA_CONTEXT > gpu.memory_bytes:
        raise _out_of_memory(settings, weights)
    graphs = 0 if settings.eager else _graphs(settings)
    available = settings.kv_cache_bytes
    if available is None:
        non_torch = non_torch_bytes(settings.tensor_parallel)
        available = requested - weights - non_torch - _activation(settings) - graphs
    per_token = model.kv_bytes_per_token(
        settings.kv_element_bytes, settings.tensor_parallel, settings.pipeline_parallel
    )
    block_bytes = int(per_token * settings.limits.block_size)
    if available <= 0:
        raise MemoryBudgetError("ValueError", _NO_MEMORY)
    plan = MemoryPlan(
        requested=requested,
        weights=weights,
        graphs=graphs,
        available=available,
        block_bytes=block_bytes,
        blocks=settings.blocks_override or available // block_bytes,
        block_size=settings.limits.block_size,
        max_model_len=settings.limits.max_model_len,
    )
    if settings.fit_length:
        return replace(plan, max_model_len=max(1, min(plan.max_model_len, (plan.blocks - 1) * plan.block_size)))
    _check_length(plan)
    return plan


def non_torch_bytes(tensor_parallel: int) -> int:
    """Bytes that CUDA libraries take on each GPU, including NCCL with several ranks."""
    return int((0.12 if tensor_parallel == 1 else 0.6) * GIB)


def bytes_asleep(tensor_parallel: int) -> int:
    """Bytes that a sleeping server still holds on each GPU: the driver's context and the libraries."""
    return CUDA_CONTEXT + non_torch_bytes(tensor_parallel)


_NO_MEMORY = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
    "(this flag also controls CPU memory reservation on the CPU backend, despite its name). "
    "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)


def _activation(settings: EngineSettings) -> int:
    """Peak bytes of a full batch: the widest layer's activations and the sampler's float32 logits."""
    model, limits = settings.model, settings.limits
    per_token = 2 * (2 * model.intermediate / settings.tensor_parallel + 4 * model.hidden)
    sampler = limits.max_num_seqs * model.vocabulary * 4 * 2
    return int(limits.max_num_batched_tokens * per_token + sampler)


def _graphs(settings: EngineSettings) -> int:
    """Bytes of the captured CUDA graphs, which grow with depth and the largest captured batch."""
    captured = min(512, 2 * settings.limits.max_num_seqs)
    return int((0.08 + 0.4 * captured / 512 * settings.model.layers / 36) * GIB)


def _out_of_memory(settings: EngineSettings, weights: int) -> MemoryBudgetError:
    """PyTorch's message: layers are created one by one until the next one's largest matrix does not fit."""
    gpu, model = settings.gpu, settings.model
    wanted = max(2, round(weights * 0.35 / model.layers / 2**20 / 2) * 2)
    free = max(1, wanted * 3 // 5)
    in_use = (gpu.memory_bytes - CUDA_CONTEXT) / GIB - free / 1024
    torch_own = in_use - 0.3
    return MemoryBudgetError(
        "torch.OutOfMemoryError",
        f"CUDA out of memory. Tried to allocate {wanted}.00 MiB. GPU 0 has a total capacity of "
        f"{gpu.memory_bytes / GIB:.2f} GiB of which {free}.00 MiB is free. Including non-PyTorch memory, this process "
        f"has {in_use:.2f} GiB memory in use. Of the allocated memory {torch_own:.2f} GiB is allocated by PyTorch, and "
        "48.10 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.",
        MemoryStage.LOADING,
    )


def _check_length(plan: MemoryPlan) -> None:
    needed_blocks = math.ceil(plan.max_model_len / plan.block_size)
    usable = plan.blocks - 1  # one is the null block
    if needed_blocks <= usable:
        return
    estimate = max(0, usable * plan.block_size)
    hint = f"Based on the available memory, the estimated maximum model length is {estimate}. " if estimate else ""
    have = min(plan.available, plan.blocks * plan.block_bytes)
    raise MemoryBudgetError(
        "ValueError",
        f"To serve at least one request with the model's max seq len ({plan.max_model_len}), "
        f"({format_gib(needed_blocks * plan.block_bytes)} GiB KV cache is needed, which is larger than the available "
        f"KV cache memory ({format_gib(have)} GiB). {hint}Try increasing `gpu_memory_utilization` (which also controls "
        "CPU memory on the CPU backend) or decreasing `max_model_len` when initializing the engine. See "
        "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
    )


def format_gib(count: float) -> str:
    """Bytes as vLLM prints them: GiB rounded to two decimals, without trailing zeros after the first."""
    return str(round(count / GIB, 2))

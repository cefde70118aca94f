"""What goes where in a GPU's memory, and how many KV cache blocks are left: vLLM's own sum, with estimated parts.

available = total × utilization − weights/(TP·PP) − non-torch − peak activation − CUDA graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vllm_launchers.simulated.hardware import GIB
from vllm_launchers.simulated.settings import Settings

CUDA_CONTEXT = int(0.45 * GIB)
"""Bytes that the driver takes before vLLM starts; they are missing from the free memory."""


class MemoryBudgetError(Exception):
    """The model does not fit. ``kind`` is the class of the exception that vLLM raises."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each GPU, and the block pool that comes of them."""

    total: int
    requested: int
    weights: int
    non_torch: int
    activation: int
    graphs: int
    available: int
    block_bytes: int
    blocks: int
    block_size: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.blocks * self.block_size

    @property
    def concurrency(self) -> float:
        """How many requests of the full context length fit at once."""
        return self.blocks / math.ceil(self.max_model_len / self.block_size)


def plan_memory(settings: Settings) -> MemoryPlan:
    """Work out the block pool. Raises :class:`MemoryBudgetError` with vLLM's words when something does not fit."""
    gpu, model = settings.gpu, settings.model
    split = settings.tensor_parallel * settings.pipeline_parallel
    requested = int(gpu.memory_bytes * settings.utilization)
    weights = int(model.weight_bytes / split)
    if weights + CUDA_CONTEXT > gpu.memory_bytes:
        raise _out_of_memory(settings, weights)
    non_torch = int((0.12 if settings.tensor_parallel == 1 else 0.6) * GIB)
    activation = _activation(settings)
    graphs = 0 if settings.eager else _graphs(settings)
    available = settings.kv_cache_bytes
    if available is None:
        available = requested - weights - non_torch - activation - graphs
    per_token = model.kv_bytes_per_token(
        settings.kv_element_bytes, settings.tensor_parallel, settings.pipeline_parallel
    )
    block_bytes = int(per_token * settings.limits.block_size)
    if available <= 0:
        raise MemoryBudgetError("ValueError", _NO_MEMORY)
    plan = MemoryPlan(
        total=gpu.memory_bytes,
        requested=requested,
        weights=weights,
        non_torch=non_torch,
        activation=activation,
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


_NO_MEMORY = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
    "(this flag also controls CPU memory reservation on the CPU backend, despite its name). "
    "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details."
)


def _activation(settings: Settings) -> int:
    """Peak bytes of a full batch: the widest layer's activations, and the sampler's logits in float32."""
    model, limits = settings.model, settings.limits
    per_token = 2 * (2 * model.intermediate / settings.tensor_parallel + 4 * model.hidden)
    sampler = limits.max_num_seqs * model.vocabulary * 4 * 2
    return int(limits.max_num_batched_tokens * per_token + sampler)


def _graphs(settings: Settings) -> int:
    """Bytes of the captured CUDA graphs: they grow with depth and with the largest batch captured."""
    captured = min(512, 2 * settings.limits.max_num_seqs)
    return int((0.08 + 0.4 * captured / 512 * settings.model.layers / 36) * GIB)


def _out_of_memory(settings: Settings, weights: int) -> MemoryBudgetError:
    gpu = settings.gpu
    layer = max(2, weights // (settings.model.layers * 2**20))
    return MemoryBudgetError(
        "torch.OutOfMemoryError",
        f"CUDA out of memory. Tried to allocate {layer}.00 MiB. GPU 0 has a total capacity of {gpu.memory_gib:.2f} GiB "
        f"of which {max(1, layer - 1)}.00 MiB is free. Including non-PyTorch memory, this process has "
        f"{gpu.memory_gib - 0.02:.2f} GiB memory in use. (The weights of {settings.model.name} take "
        f"{weights / GIB:.2f} GiB on each GPU.)",
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
        f"({gib(needed_blocks * plan.block_bytes)} GiB KV cache is needed, which is larger than the available KV cache "
        f"memory ({gib(have)} GiB). {hint}Try increasing `gpu_memory_utilization` (which also controls CPU memory on "
        "the CPU backend) or decreasing `max_model_len` when initializing the engine. See "
        "https://docs.vllm.ai/en/latest/configuration/conserving_memory/ for more details.",
    )


def gib(count: float) -> str:
    """Bytes as vLLM prints them: GiB with two decimals, trailing zeros cut to one."""
    return str(round(count / GIB, 2))

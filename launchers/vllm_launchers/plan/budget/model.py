"""What the memory of a launch comes to. GiB are 2**30 bytes; None is 'not known', never zero."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """One GPU's memory once the server runs, in GiB.

    ``overhead_gib`` is CUDA context, NCCL and peak activations; ``graphs_gib`` CUDA graphs. ``others_gib`` is what
    other processes hold now. ``index`` is None where no GPU was chosen and one of a kind stands for all.
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
        """What would be left; below zero when it does not fit."""
        taken = self.weights_gib + self.overhead_gib + self.graphs_gib + self.kv_gib + self.others_gib
        return self.total_gib - taken


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Figures of the GPU with the least room for the KV cache, since it decides; per GPU, as vLLM's own log has them.

    ``kv_gib`` below zero is what is missing. ``max_concurrency`` is requests of the full ``max_model_len`` that fit at
    once, as vLLM prints it; ``concurrency_p95`` those of the workload's 95th percentile. ``source`` is ``estimate``,
    ``estimate, corrected`` (by what an earlier start of this model on this GPU reported) or ``engine`` (its report).
    ``assumed`` names each fact that was missing and what was taken in its place, one short sentence each.
    """

    weights_gib: float
    overhead_gib: float
    graphs_gib: float
    kv_gib: float
    kv_bytes_per_token: float | None
    """Per GPU; for models with layers that hold a bounded window, per token at ``max_model_len``."""
    kv_tokens: int | None
    max_model_len: int | None
    max_concurrency: float | None
    concurrency_p95: float | None = None
    per_gpu: tuple[GpuBudget, ...] = ()
    source: str = "estimate"
    assumed: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one request of the full length finds room."""
        return self.kv_gib > 0 and (self.max_concurrency is None or self.max_concurrency >= 1)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What a real start reported of its memory, per GPU, as its log has it; None is 'not said'."""

    weights_gib: float | None = None
    kv_gib: float | None = None
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    graphs_gib: float | None = None
    max_model_len: int | None = None

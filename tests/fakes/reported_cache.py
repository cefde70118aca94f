"""Estimated KV cache blocks and tokens for the cache memory reported at startup."""

from __future__ import annotations

from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.cache import layout
from vllm_launchers.plan.budget.memory_flags import effective_flags
from vllm_launchers.plan.budget.weights import pipeline_stages
from vllm_launchers.units import GIB
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import Release


def cache_tokens(
    facts: ModelFacts, flags: Flags, kv_gib: float, gpu: GpuShape, *, release: Release | None = None
) -> tuple[int, float | None] | None:
    """Tokens and concurrency of a KV cache of a known size per GPU; None if unknown."""
    assumed: list[str] = []
    settings = effective_flags(facts, flags, release, {}, gpu, assumed)
    cache = layout(facts, settings, assumed)
    if cache is None:
        return None
    stages = pipeline_stages(len(facts.layers), settings, {})
    stages[-1] = range(stages[-1].start, stages[-1].stop + settings.draft_layers)
    blocks = min(int(kv_gib * GIB // size) for stage in stages if (size := cache.block_bytes(stage)))
    length = settings.max_model_len
    return cache.tokens(blocks, length), blocks / cache.request_blocks(length) if length else None

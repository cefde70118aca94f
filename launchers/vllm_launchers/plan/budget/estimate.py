"""Memory of a launch before it runs: vLLM's own sum, from model, flags and GPUs.

KV cache = total × utilization − weights − (what vLLM holds besides, and peak activations) − CUDA graphs (from 0.21).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_launchers.machine.gpu.host import Gpu
from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.cache import CacheLayout, layout
from vllm_launchers.plan.budget.gpus import GpuShape, shapes
from vllm_launchers.plan.budget.model import GpuBudget, MemoryBudget
from vllm_launchers.plan.budget.overhead import Overhead, overhead
from vllm_launchers.plan.budget.settings import Release, Settings, decimal, read_settings, whole
from vllm_launchers.plan.budget.weights import GIB, Weights, offloaded_bytes, pipeline_stages, weights_of
from vllm_launchers.plan.knowledge import Learned
from vllm_launchers.plan.model import Flags
from vllm_launchers.presets.model import Workload

CPU_CACHE_GIB = 4
"""What the CPU build takes for the KV cache when nothing is said."""
_MOST_GPUS = 4096


@dataclass(frozen=True, slots=True)
class _Rank:
    """One GPU with the layers it gets; GiB. ``cache`` is what is left for the KV cache."""

    gpu: GpuShape
    stage: range
    total: float
    weights: float
    overhead: Overhead
    cache: float


def estimate(
    facts: ModelFacts,
    flags: Flags,
    gpus: Sequence[Gpu | GpuShape],
    *,
    release: Release | None = None,
    workload: Workload | None = None,
    learned: Learned | None = None,
    build: str | None = "cuda",
    environment: Mapping[str, str] | None = None,
) -> MemoryBudget | None:
    """Work out the memory of a launch; None where the size of weights or GPUs is not known at all.

    ``gpus`` are those it gets, in the order of its ranks; one of a kind may stand for all. ``build`` is the
    installation's (``cuda``, ``rocm``, ``cpu``), None where it is not known. Wrong flag values count as not set.
    ``learned`` corrects weights and overhead by what an earlier start reported.
    """
    environment = environment or {}
    assumed: list[str] = []
    on_cpu = build == "cpu"
    first = shapes(gpus, 1)[:1]
    if not on_cpu and (not first or first[0].total_gib is None):
        return None
    settings = read_settings(facts, flags, release, environment, None if on_cpu else first[0], assumed)
    weights = weights_of(facts, flags, settings, assumed)
    if weights is None or settings.tensor * settings.pipeline * settings.data > _MOST_GPUS:
        return None
    cache = layout(facts, settings, assumed)
    stages = pipeline_stages(max(len(facts.layers), settings.pipeline), settings, environment)
    stages[-1] = range(stages[-1].start, stages[-1].stop + settings.draft_layers)
    if on_cpu:
        ranks = [_cpu_rank(weights, settings, stages[0], flags, environment, assumed)]
    else:
        chosen = shapes(gpus, settings.gpus_per_engine * settings.data)
        kinds = {gpu.name: gpu for gpu in chosen}
        extra = {name: overhead(facts, settings, gpu, assumed) for name, gpu in kinds.items()}
        ranks = _ranks(flags, settings, weights, stages, chosen, extra)
        if learned is not None and ranks:
            ranks = _corrected(ranks, learned, flags, settings)
    if not ranks:
        return None
    budget = _budget(ranks, cache, settings, flags, workload, on_cpu)
    source = "estimate, corrected" if learned is not None and not on_cpu else "estimate"
    return replace(budget, source=source, assumed=tuple(dict.fromkeys(assumed)))


def _ranks(
    flags: Flags,
    settings: Settings,
    weights: Weights,
    stages: Sequence[range],
    gpus: Sequence[GpuShape],
    extra: Mapping[str, Overhead],
) -> list[_Rank]:
    """Each GPU's share; ranks of one stage are neighbours. None at all where a GPU's size is not known."""
    ranks: list[_Rank] = []
    offloaded = offloaded_bytes(flags)
    for at, gpu in enumerate(gpus):
        if (total := gpu.total_gib) is None:
            return []
        stage = stages[at // settings.tensor % settings.pipeline]
        taken = max(0.0, weights.on_gpu(settings, stage) - offloaded) / GIB
        rank = _Rank(gpu, stage, total, taken, extra[gpu.name], 0.0)
        ranks.append(replace(rank, cache=_cache_gib(rank, flags, settings)))
    return ranks


def _cache_gib(rank: _Rank, flags: Flags, settings: Settings) -> float:
    """What is left of the share for the KV cache; less than nothing is what is missing."""
    if (fixed := whole(flags, "kv-cache-memory-bytes", 0)) and settings.release >= (0, 10, 2):
        return fixed / GIB
    taken = rank.weights + rank.overhead.inside + (rank.overhead.graphs if settings.graphs_in_share else 0.0)
    # 0.8 took all memory in use for its own.
    others = rank.gpu.others_gib if settings.release < (0, 9, 0) else 0.0
    return rank.total * settings.utilization - taken - others


def _corrected(ranks: Sequence[_Rank], learned: Learned, flags: Flags, settings: Settings) -> list[_Rank]:
    """Weights by the ratio of reported to predicted, overhead by what then still parts the two KV caches."""
    report, corrected = learned.report, []
    for rank in ranks:
        weights, extra = rank.weights, rank.overhead
        grown = 0.0
        if report.weights_gib is not None and learned.predicted_weights_gib:
            weights *= report.weights_gib / learned.predicted_weights_gib
            grown = report.weights_gib - learned.predicted_weights_gib
        if report.graphs_gib is not None and report.graphs_gib >= 0 and not settings.graphs_in_share:
            extra = replace(extra, graphs=report.graphs_gib if extra.graphs else 0.0)
        if report.kv_gib is not None and learned.predicted_kv_gib is not None:
            extra = replace(extra, inside=extra.inside + learned.predicted_kv_gib - report.kv_gib - grown)
        better = replace(rank, weights=weights, overhead=extra)
        corrected.append(replace(better, cache=_cache_gib(better, flags, settings)))
    return corrected


def _cpu_rank(
    weights: Weights,
    settings: Settings,
    stage: range,
    flags: Flags,
    environment: Mapping[str, str],
    assumed: list[str],
) -> _Rank:
    """The CPU build: its KV cache is as large as it is told."""
    said = decimal(environment.get("VLLM_CPU_KVCACHE_SPACE"))
    if said is not None and said > 0:
        cache = said
    elif fixed := whole(flags, "kv-cache-memory-bytes", 0):
        cache = fixed / GIB
    else:
        cache = float(CPU_CACHE_GIB)
        assumed.append(f"VLLM_CPU_KVCACHE_SPACE is not set: {CPU_CACHE_GIB} GiB of KV cache are taken")
    taken = weights.on_gpu(settings, stage) / GIB
    return _Rank(GpuShape(), stage, taken + cache, taken, Overhead(0.0, 0.0, 0.0), cache)


def _budget(
    ranks: Sequence[_Rank],
    cache: CacheLayout | None,
    settings: Settings,
    flags: Flags,
    workload: Workload | None,
    on_cpu: bool,
) -> MemoryBudget:
    """Put the ranks together: the one with the fewest blocks decides."""
    least = min(ranks, key=lambda rank: rank.cache if cache is None else _blocks(rank, cache))
    override = whole(flags, "num-gpu-blocks-override", 0)
    blocks = None if cache is None else override or max(0, _blocks(least, cache))
    pools = [_pool_gib(rank, least, cache, blocks, bool(override)) for rank in ranks]
    length = settings.max_model_len
    if cache is not None and blocks is not None and settings.fit_length and length is not None:
        length = _longest(cache, blocks, length)
    per_gpu = [
        GpuBudget(
            index=rank.gpu.index,
            total_gib=rank.total,
            weights_gib=rank.weights,
            overhead_gib=max(0.0, rank.overhead.total),
            graphs_gib=rank.overhead.graphs,
            kv_gib=max(0.0, pool),
            others_gib=rank.gpu.others_gib,
        )
        for rank, pool in zip(ranks, pools, strict=True)
    ]
    tokens = p95 = concurrency = per_token = None
    if cache is not None and blocks is not None:
        per_token = cache.token_bytes(least.stage, length)
        tokens = cache.tokens(blocks, length)
        concurrency = blocks / cache.request_blocks(length) if length else None
        if workload is not None:
            p95 = blocks / cache.request_blocks(workload.input_tokens_p95 + workload.output_tokens_p95)
    return MemoryBudget(
        weights_gib=least.weights,
        overhead_gib=max(0.0, least.overhead.total),
        graphs_gib=least.overhead.graphs,
        kv_gib=pools[ranks.index(least)],
        kv_bytes_per_token=per_token,
        kv_tokens=tokens,
        max_model_len=length,
        max_concurrency=concurrency,
        concurrency_p95=p95,
        per_gpu=() if on_cpu else tuple(per_gpu),
    )


def _blocks(rank: _Rank, cache: CacheLayout) -> int:
    """Blocks that find room on a GPU; one without layers of its own never runs out."""
    size = cache.block_bytes(rank.stage)
    return int(rank.cache * GIB // size) if size else 2**62


def _pool_gib(rank: _Rank, least: _Rank, cache: CacheLayout | None, blocks: int | None, overridden: bool) -> float:
    """The KV cache of a GPU: what is left where it decides, else as many blocks as there are."""
    decides = (rank.cache, rank.stage) == (least.cache, least.stage)
    if cache is None or blocks is None or (not overridden and (decides or rank.cache <= 0)):
        return rank.cache
    size = cache.block_bytes(rank.stage) * blocks / GIB
    return size if overridden else min(rank.cache, size)


def _longest(cache: CacheLayout, blocks: int, limit: int) -> int:
    """The longest request, up to the limit, that fits into so many blocks; at least one token."""
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        if cache.request_blocks(middle) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low


def cache_tokens(
    facts: ModelFacts,
    flags: Flags,
    kv_gib: float,
    gpu: GpuShape,
    *,
    release: Release | None = None,
) -> tuple[int, float | None] | None:
    """Tokens and concurrency of a KV cache of a known size per GPU, as a start has reported it; None if not known."""
    assumed: list[str] = []
    settings = read_settings(facts, flags, release, {}, gpu, assumed)
    cache = layout(facts, settings, assumed)
    if cache is None:
        return None
    stages = pipeline_stages(len(facts.layers), settings, {})
    stages[-1] = range(stages[-1].start, stages[-1].stop + settings.draft_layers)
    blocks = min(int(kv_gib * GIB // size) for stage in stages if (size := cache.block_bytes(stage)))
    length = settings.max_model_len
    return cache.tokens(blocks, length), blocks / cache.request_blocks(length) if length else None

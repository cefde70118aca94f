"""Estimates the memory of a launch from model, flags and GPUs, by vLLM's own formula.

KV cache = total × utilization − weights − (vLLM's other memory and peak activations) − CUDA graphs (from 0.20).

Overhead is derived from the shapes of the tensors that vLLM's profile run holds at its peak. The few figures not based
on shapes (CUDA context, one CUDA graph, NCCL buffers) were reported at startup by releases 0.9 to 0.25.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.plan.budget.budget import CONTEXT_GIB, GpuBudget, GpuShape, MemoryBudget, shapes
from vllm_launchers.plan.budget.cache import CacheLayout, layout
from vllm_launchers.plan.budget.memory_flags import (
    EffectiveFlags,
    decimal,
    draft_tensor,
    effective_flags,
    is_encoder,
    whole,
)
from vllm_launchers.plan.budget.weights import LoadedWeights, offloaded_bytes, pipeline_stages, weights_of
from vllm_launchers.plan.flags import BLOCKS, BYTES
from vllm_launchers.plan.inputs import EarlierReport
from vllm_launchers.presets.model import Workload
from vllm_launchers.units import GIB
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.modelfacts.encoder import with_pixels
from vllm_launchers.vllm.modelfacts.facts import Encoder, LayerKind, ModelFacts
from vllm_launchers.vllm.release_defaults import Release

_WORKSPACES_GIB = 0.1
_NCCL_GIB = 0.1
"""For each rank of the tensor-parallel group. Counted against vLLM's share before 0.11."""
_HOST_PROCESS_GIB = 2.0
"""The server's own processes, which count if GPU and CPU share memory."""
_GRAPH_GIB = 0.3 / 1024
"""One layer's CUDA graph for one batch size."""
_FIRST_GRAPH_GIB = 0.05
_MOST_UNPACKED = 65536
_SORTED_BYTES = 40
"""Per sequence and vocabulary entry: logits in 16 and 32 bits, sorted values with 64-bit indices, and a second copy of
these in the sort's buffers."""
_SAMPLED_BYTES = 18
"""The same without sorting: logits in 16 and 32 bits, probabilities, noise, and a mask."""
_FEWER_FRAMES = (0, 11, 0)
_UNKNOWN_ENCODER = 0.2 * GIB


class Overhead(msgspec.Struct, frozen=True):
    """Overhead on one GPU in GiB. ``inside`` counts against vLLM's share, ``outside`` does not."""

    inside: float
    outside: float
    graphs: float

    @property
    def total(self) -> float:
        """Everything except the graphs."""
        return self.inside + self.outside


def overhead(facts: ModelFacts, settings: EffectiveFlags, gpu: GpuShape, assumed: list[str]) -> Overhead:
    """Estimate the overhead on one GPU."""
    inside, outside = _WORKSPACES_GIB, CONTEXT_GIB
    if settings.tensor > 1:
        if settings.release < (0, 11, 0):
            inside += _NCCL_GIB * settings.tensor
        else:
            outside += _NCCL_GIB * settings.tensor
    if settings.release < (0, 9, 0):
        inside, outside = inside + outside, 0.0
    if gpu.unified:
        inside += _HOST_PROCESS_GIB
    sorts = settings.release < (0, 17, 0) or gpu.before_ampere
    inside += (activations(facts, settings, assumed, sorts=sorts) + adapters(facts, settings)) / GIB
    return Overhead(inside, outside, graphs_gib(facts, settings))


def activations(facts: ModelFacts, settings: EffectiveFlags, assumed: list[str], *, sorts: bool) -> float:
    """Peak bytes of a profile run: the largest of the model's forward pass, the sampler and the encoder.

    They run one after the other, and PyTorch reuses freed memory; only the encoder's embeddings are kept until the end.
    ``sorts``: the sampler sorts the logits, as it did up to 0.16 and still does where Triton's kernels cannot run.
    """
    hidden = facts.hidden_size
    if hidden is None:
        hidden = 4096
        assumed.append("hidden size unknown: 4,096 assumed for the activations")
    forward = settings.max_batched * token_activations(facts, settings, hidden) + _unpacked_context(facts, settings)
    sampler = 0.0
    if not settings.pooling:
        words = facts.vocabulary
        if words is None:
            words = 128_000
            assumed.append("vocabulary size unknown: 128,000 assumed for the sampler's memory")
        sampler = float(settings.max_num_seqs) * words * (_SORTED_BYTES if sorts else _SAMPLED_BYTES)
    peak, kept = encoder_bytes(facts, settings, hidden)
    return max(max(forward, sampler) + kept, peak)


def token_activations(facts: ModelFacts, settings: EffectiveFlags, hidden: int) -> float:
    """Bytes per token at the widest point of a layer: both halves of the gate, their product, and the residuals.

    With experts, each token has one row per selected expert.
    """
    size = 4 if settings.dtype == "float32" else 2
    wide = facts.intermediate_size or 4 * hidden
    rows = 3 * wide / settings.tensor
    if facts.experts and facts.experts_per_token:
        own = (facts.expert_intermediate_size or wide) / settings.tensor
        rows = facts.experts_per_token * (max(2 * own, hidden) + own)
    return size * (rows + 4 * hidden)


def _unpacked_context(facts: ModelFacts, settings: EffectiveFlags) -> float:
    """Bytes of MLA's decompressed keys and values for a chunk of context in prefill: up to 65,536 tokens at once."""
    if facts.kv_lora_rank is None or not facts.heads:
        return 0.0
    wanted = max(8 * (settings.max_model_len or _MOST_UNPACKED), 4 * settings.max_num_seqs * settings.block_size)
    head = facts.v_head_dim or 128
    return min(wanted, _MOST_UNPACKED) * max(1, facts.heads // settings.tensor) * 2 * head * 2.0


def adapters(facts: ModelFacts, settings: EffectiveFlags) -> float:
    """Bytes of LoRA adapters, which vLLM preallocates in full: two low-rank matrices per linear layer and expert.

    The first is replicated on each GPU, unless it is sharded; the second is split like the layer.
    """
    hidden, wide = facts.hidden_size or 0, facts.intermediate_size or 4 * (facts.hidden_size or 0)
    own = (facts.heads or 0) * (facts.head_dim or 0)
    shared = (facts.kv_heads or 0) * (facts.head_dim or 0)
    inputs = 3 * hidden + own
    outputs = own + 2 * shared + hidden
    if not facts.experts:
        inputs += 2 * hidden + wide
        outputs += 2 * wide + hidden
    each = inputs / (settings.tensor if settings.sharded_adapters else 1) + outputs / settings.tensor
    values = len(facts.layers) * each + _expert_adapters(facts, settings)
    return settings.lora_ranks * 2.0 * values / settings.pipeline


_UNGATED = frozenset({"nemotron_h"})
"""Types of models whose experts have no gate projection."""
_UNGATED_SINCE = (0, 16, 0)
"""First release seen to need no adapter for it."""
_GATE_WITH_UP = frozenset(
    {"GptOssForCausalLM", "InternS1ProForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration",
     "Qwen3VLMoeForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}
)  # fmt: skip
"""Models with one adapter for gate and up projection together (``is_3d_moe_weight``)."""
_GATE_WITH_UP_SINCE = (0, 12, 0)
_APART_IF_SHARED_SINCE = (0, 32, 0)
"""First release in which ``enable-moe-shared-loras`` applies to these models; they then have two."""


def _expert_adapters(facts: ModelFacts, settings: EffectiveFlags) -> float:
    """Values of the adapters of all experts on one GPU, for a rank of 1 (``FusedMoEWithLoRA``).

    With expert parallelism a GPU has those of its own experts, else a part of each. Sharding splits only the matrices
    that are as long as the model is wide; experts may share these.
    """
    width = facts.expert_intermediate_size or facts.intermediate_size
    if not facts.experts or not settings.expert_adapters or width is None:
        return 0.0
    ranks = settings.tensor * settings.data
    count, narrow = float(facts.experts), width / ranks
    if settings.expert_parallel:
        count, narrow = float(math.ceil((facts.experts + settings.redundant_experts) / ranks)), float(width)
    ungated = facts.model_type in _UNGATED and settings.release >= _UNGATED_SINCE
    apart = settings.mixed_adapters or (settings.shared_adapters and settings.release >= _APART_IF_SHARED_SINCE)
    together = facts.architecture in _GATE_WITH_UP and settings.release >= _GATE_WITH_UP_SINCE and not apart
    first = 1 if ungated or together else 2
    hidden = facts.expert_hidden_size or facts.hidden_size or 0
    wide = (
        (first + 1)
        * hidden
        / (settings.tensor if settings.sharded_adapters else 1)
        * (1 if settings.shared_adapters and not together else count)
    )
    return (wide + (2 if ungated else 3) * narrow * count) * _expert_layers(facts)


def _expert_layers(facts: ModelFacts) -> int:
    """Number of layers with experts, which may be layers of their own."""
    alone = facts.layers.count(LayerKind.NONE) if facts.model_type in _UNGATED else 0
    return alone or facts.expert_layers or len(facts.layers)


def graphs_gib(facts: ModelFacts, settings: EffectiveFlags) -> float:
    """Memory of all CUDA graphs: one for each layer and batch size, with a shared pool."""
    if settings.capture_sizes == 0:
        return 0.0
    layers = len(facts.layers) or 32
    return _FIRST_GRAPH_GIB + _GRAPH_GIB * settings.capture_sizes * layers / settings.pipeline


def encoder_bytes(facts: ModelFacts, settings: EffectiveFlags, hidden: int) -> tuple[float, float]:
    """Peak bytes of a vision or audio encoder in a profile run, and bytes of the embeddings that are kept.

    vLLM runs as many of the largest items as fit in its budget, which is the tokens of one step, or of one item if
    larger (``compute_mm_encoder_budget``), but no more than ``max-num-seqs`` requests can contain.
    """
    encoder = facts.encoder
    if not settings.encoder or (encoder is None and not facts.multimodal):
        return 0.0, 0.0
    if encoder is None:
        return _UNKNOWN_ENCODER / settings.encoder_split, 0.0
    encoder = with_pixels(encoder, settings.max_pixels)
    item = encoder.item_tokens * _pictures(encoder, settings)
    each = max(1, (settings.max_model_len or item) // item)
    items = max(1, min(max(settings.max_batched, item) // item, settings.max_num_seqs * each))
    size = 4 if settings.dtype == "float32" else 2
    tokens = items * item
    here = -(-items // settings.tensor) * item if settings.encoder_split < settings.tensor else tokens
    peak = here * encoder.patches_per_token * patch_bytes(encoder, settings.encoder_split) * size / 2
    return peak, float(tokens * hidden * encoder.levels * size)


def _pictures(encoder: Encoder, settings: EffectiveFlags) -> int:
    """Number of largest images in the largest item: one, or a video that fills the context (Qwen2-VL).

    Two frames make one image. vLLM takes at most 16 frames, and 14 since 0.11 (``_MAX_FRAMES_PER_VIDEO``).
    """
    if not (encoder.videos and settings.videos):
        return 1
    most = 7 if settings.release >= _FEWER_FRAMES else 8
    return max(1, min((settings.max_model_len or 0) // encoder.item_tokens, most))


def patch_bytes(encoder: Encoder, split: int) -> float:
    """Peak bytes per patch in a layer of an encoder in 16 bits, including the patch itself.

    Attention holds the residual, and queries, keys and values both fused and as separate copies; with rotary embeddings
    also one of them rotated in 32 bits (``apply_rotary_pos_emb_vision``). The MLP holds the residual, the norm, and its
    activation's input and output. Heads and MLP are split over ``split`` GPUs.
    """
    width = encoder.width
    attention = 2 * width + (24 * width if encoder.rotary else 14 * width) / split
    network = 4 * width + 2 * (3 if encoder.gated else 2) * encoder.inner / split
    return 2 * encoder.patch_values + max(attention, network)


NULL_BLOCKS = 1
"""Blocks that vLLM never gives to a request. It counts them in the size that it logs."""

_MOST_GPUS = 4096


class _Rank(msgspec.Struct, frozen=True):
    """One GPU with its layers, in GiB. ``cache`` is the memory left for the KV cache."""

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
    learned: EarlierReport | None = None,
    build: str | None = "cuda",
    environment: Mapping[str, str] | None = None,
    draft: ModelFacts | None = None,
) -> MemoryBudget | None:
    """Estimate the memory of a launch; None if the size of weights or GPUs is completely unknown.

    ``gpus`` are the assigned ones in rank order; a typical one may stand for all. ``build`` is the installation's
    (``cuda``, ``rocm``, ``cpu``), None if unknown. Invalid flag values count as not set. ``draft`` is the model or head
    for speculative decoding, if any. ``learned`` is the report of an earlier start; it corrects weights, overhead and
    tokens per GiB.
    """
    environment = environment or {}
    assumed: list[str] = []
    on_cpu = build == "cpu"
    first = shapes(gpus, 1)[:1]
    if not on_cpu and (not first or first[0].total_gib is None):
        return None
    settings = effective_flags(facts, flags, release, environment, None if on_cpu else first[0], assumed, draft)
    weights = weights_of(facts, flags, settings, assumed)
    if weights is None or settings.tensor * settings.pipeline * settings.data > _MOST_GPUS:
        return None
    if draft is not None:
        weights = replace(weights, draft=_draft_bytes(draft, flags, settings, assumed))
    cached = not is_encoder(facts)
    cache = layout(facts, settings, assumed) if cached else None
    stages = pipeline_stages(max(len(facts.layers), settings.pipeline), settings, environment)
    stages[-1] = range(stages[-1].start, stages[-1].stop + settings.draft_layers)
    if on_cpu:
        ranks = _cpu_ranks(weights, settings, stages[0], flags, environment, learned)
    else:
        chosen = shapes(gpus, settings.gpus_per_engine * settings.data)
        kinds = {gpu.name: gpu for gpu in chosen}
        extra = {name: overhead(facts, settings, gpu, assumed) for name, gpu in kinds.items()}
        ranks = _ranks(flags, settings, weights, stages, chosen, extra)
        if learned is not None and ranks:
            ranks = _corrected(ranks, learned, flags, settings)
    if not ranks:
        return None
    if not cached:
        assumed.append("an encoder, for which vLLM keeps no KV cache")
        ranks = [replace(rank, cache=min(0.0, rank.cache)) for rank in ranks]
    budget = replace(_budget(ranks, cache, settings, flags, workload, on_cpu), cached=cached)
    if learned is not None and not whole(flags, BLOCKS, 0):
        budget = _with_tokens(budget, learned.tokens_per_gib)
    source = "estimate, corrected" if learned is not None else "estimate"
    return replace(budget, source=source, assumed=tuple(dict.fromkeys(assumed)))


def _draft_bytes(draft: ModelFacts, flags: Flags, settings: EffectiveFlags, assumed: list[str]) -> float:
    """Bytes of the draft model's weights on each GPU; 0 if its size is unknown, which is then noted."""
    own: list[str] = []
    weights = weights_of(draft, {}, settings, own)
    assumed += [f"of the draft model: {text}" for text in own]
    return 0.0 if weights is None else weights.total / draft_tensor(flags, settings.tensor)


def loaded_weights(facts: ModelFacts, flags: Flags, release: Release | None = None) -> LoadedWeights | None:
    """All weights of one model copy in GPU memory; None if neither their size nor number is known."""
    settings = effective_flags(facts, flags, release, {}, GpuShape(), [])
    return weights_of(facts, flags, settings, [])


def _ranks(
    flags: Flags,
    settings: EffectiveFlags,
    weights: LoadedWeights,
    stages: Sequence[range],
    gpus: Sequence[GpuShape],
    extra: Mapping[str, Overhead],
) -> list[_Rank]:
    """Memory of each rank; ranks of one pipeline stage are adjacent. Empty if a GPU's size is unknown."""
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


def _cache_gib(rank: _Rank, flags: Flags, settings: EffectiveFlags) -> float:
    """GiB of the share left for the KV cache; negative if memory is missing."""
    if fixed := _fixed_bytes(flags, settings):
        return fixed / GIB
    taken = rank.weights + rank.overhead.inside + (rank.overhead.graphs if settings.graphs_in_share else 0.0)
    # vLLM 0.8 counted all memory in use as its own.
    others = rank.gpu.others_gib if settings.release < (0, 9, 0) else 0.0
    return rank.total * settings.utilization - taken - others


def _fixed_bytes(flags: Flags, settings: EffectiveFlags) -> int:
    """The KV cache size set in bytes; 0 if not set."""
    return whole(flags, BYTES, 0) if settings.release >= (0, 10, 2) else 0


def _corrected(ranks: Sequence[_Rank], learned: EarlierReport, flags: Flags, settings: EffectiveFlags) -> list[_Rank]:
    """Scale weights by reported over predicted size; put the remaining difference of KV cache into overhead."""
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


def _with_tokens(budget: MemoryBudget, ratio: float | None) -> MemoryBudget:
    """The budget with ``ratio`` times the tokens per GiB of KV cache; None leaves it unchanged."""
    if ratio is None:
        return budget
    per_token, tokens, sequences = budget.kv_bytes_per_token, budget.kv_tokens, budget.most_sequences
    most, p95 = budget.max_concurrency, budget.concurrency_p95
    return replace(
        budget,
        kv_bytes_per_token=per_token and per_token / ratio,
        kv_tokens=tokens if tokens is None else round(tokens * ratio),
        max_concurrency=most and most * ratio,
        concurrency_p95=p95 and p95 * ratio,
        most_sequences=sequences if sequences is None else round(sequences * ratio),
    )


def _cpu_ranks(
    weights: LoadedWeights,
    settings: EffectiveFlags,
    stage: range,
    flags: Flags,
    environment: Mapping[str, str],
    learned: EarlierReport | None,
) -> list[_Rank]:
    """The only rank of the CPU build; empty if the size of its KV cache is not configured.

    Then the size is a share of the memory of a NUMA node, less the size of vLLM's process (``CPUWorker``).
    """
    space = decimal(environment.get("VLLM_CPU_KVCACHE_SPACE"))
    if space is not None and space > 0:
        cache = space
    elif fixed := whole(flags, BYTES, 0):
        cache = fixed / GIB
    elif learned is not None and learned.report.kv_gib is not None:
        cache = learned.report.kv_gib
    else:
        return []
    taken = weights.on_gpu(settings, stage) / GIB
    return [_Rank(GpuShape(), stage, taken + cache, taken, Overhead(0.0, 0.0, 0.0), cache)]


def _budget(
    ranks: Sequence[_Rank],
    cache: CacheLayout | None,
    settings: EffectiveFlags,
    flags: Flags,
    workload: Workload | None,
    on_cpu: bool,
) -> MemoryBudget:
    """Combine the ranks: the one that lacks the most memory decides, else the one with the fewest blocks."""
    least = min(ranks, key=lambda rank: (min(0.0, rank.cache), rank.cache if cache is None else _blocks(rank, cache)))
    override = whole(flags, BLOCKS, 0)
    blocks = None if cache is None else override or max(0, _blocks(least, cache))
    pools = [_pool_gib(rank, least, cache, blocks, bool(override)) for rank in ranks]
    length = settings.max_model_len
    if cache is not None and blocks is not None and settings.fit_length and length is not None:
        length = max(1, _longest(cache, blocks - NULL_BLOCKS, length))
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
        if length:
            needed, usable = cache.request_blocks(length), max(0, blocks - NULL_BLOCKS)
            concurrency = (blocks if needed <= usable else usable) / needed
            if needed > usable:  # vLLM does not start, and reports the longest request that would fit
                tokens = _longest(cache, usable, length)
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
        fixed=not on_cpu and bool(override or _fixed_bytes(flags, settings)),
        most_sequences=blocks if _need_states(cache, settings) else None,
    )


_STATES_CHECKED_SINCE: Release = (0, 20, 0)
"""First release that refuses to start with more sequences than blocks for their states."""


def _need_states(cache: CacheLayout | None, settings: EffectiveFlags) -> bool:
    """Whether each sequence needs a block for its state (``resolve_cudagraph_mode_and_sizes``)."""
    if cache is None or not settings.whole_graphs or settings.release < _STATES_CHECKED_SINCE:
        return False
    return any(group.kind is LayerKind.LINEAR for group in cache.groups)


def _blocks(rank: _Rank, cache: CacheLayout) -> int:
    """Blocks that fit on a GPU; one without layers of its own never runs out."""
    size = cache.block_bytes(rank.stage)
    return int(rank.cache * GIB // size) if size else 2**62


def _pool_gib(rank: _Rank, least: _Rank, cache: CacheLayout | None, blocks: int | None, overridden: bool) -> float:
    """GiB of KV cache on a GPU: all that is left on the deciding one; on others, only as many blocks as that has."""
    decides = (rank.cache, rank.stage) == (least.cache, least.stage)
    if cache is None or blocks is None or (not overridden and (decides or rank.cache <= 0)):
        return rank.cache
    size = cache.block_bytes(rank.stage) * blocks / GIB
    return size if overridden else min(rank.cache, size)


def _longest(cache: CacheLayout, blocks: int, limit: int) -> int:
    """The longest request, up to the limit, that fits in this many blocks; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if cache.request_blocks(middle) <= blocks:
            low = middle
        else:
            high = middle - 1
    return low

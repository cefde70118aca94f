"""Expected speed of a launch: time per token and tokens per second for several numbers of requests. Pure.

Uses the roofline model of `vllm_launchers.engine_model`. Requests have the workload's p95 lengths; each step includes
the share of new prompts that arrives while outputs are generated.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.gpu_models import GpuModel, Interconnect, find_model
from vllm_launchers.engine_model.roofline import Geometry, Roofline, Work
from vllm_launchers.plan.attention import is_fp8
from vllm_launchers.plan.budget.budget import GpuShape, MemoryBudget
from vllm_launchers.plan.budget.estimate import loaded_weights
from vllm_launchers.plan.budget.memory_flags import batch_sizes, cache_dtype
from vllm_launchers.plan.budget.weights import bits_per_weight, offloads, parameters
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Flags, whole_number
from vllm_launchers.vllm.modelfacts.facts import ModelFacts
from vllm_launchers.vllm.release_defaults import Release

PIPELINE_FILL = 0.85
"""Share of the time that a pipeline stage computes under load: batches differ, so stages wait for each other."""

PART = 0.8
"""Less than this share of a GPU's memory means that it is a slice (MIG)."""

SOME = 8
"""The middle number of requests in `Paces`."""


class Pace(msgspec.Struct, frozen=True):
    """``tokens_per_second`` counts generated tokens of all requests together."""

    concurrency: int
    tpot_seconds: float
    tokens_per_second: float


class Paces(msgspec.Struct, frozen=True):
    """Speed with one request, with `SOME`, and with the maximum: the workload's concurrency, or as many as fit.

    None if that many do not fit. ``decoding`` is ``full`` for an engine that only decodes, if another one prefills.
    """

    one: Pace | None
    some: Pace | None
    full: Pace | None
    decoding: Pace | None = None

    @property
    def throughput(self) -> float:
        """Tokens per second with the maximum number of requests; 0 if unknown."""
        return self.full.tokens_per_second if self.full is not None else 0.0


class Timing(msgspec.Struct, frozen=True):
    """A launch as input of the roofline. ``step_tokens`` is ``max-num-batched-tokens``, ``copies`` the replicas."""

    roofline: Roofline
    copies: int
    step_tokens: int

    def pace(self, concurrency: int, workload: Workload) -> Pace:
        """The speed with this many requests in flight, evenly distributed over the replicas."""
        each = max(1, math.ceil(concurrency / self.copies))
        stages = self.roofline.pipeline_parallel
        batch = math.ceil(each / stages)
        prompt, answer = workload.input_tokens_p95, workload.output_tokens_p95
        work = Work.steady(batch, prompt, answer, workload.prefix_reuse, self.step_tokens)
        # Prompt tokens beyond a step's limit take further steps, which delay the next output token.
        steps, share = max(1.0, work.tokens / self.step_tokens), min(1.0, self.step_tokens / work.tokens)
        work = Work(math.ceil(work.tokens * share), work.sequences, work.reads, work.pairs * share)
        tpot = steps * self.roofline.latency(work)
        under_way = min(stages, each)
        if under_way > 1:
            tpot = max(tpot, steps * under_way * self.roofline.interval(work) / PIPELINE_FILL)
        return Pace(concurrency, tpot, concurrency / tpot)

    def paces(self, workload: Workload, held: float | None) -> Paces:
        """Speeds with 1, `SOME`, and the maximum number of requests; ``held``: how many fit (None: unknown)."""
        most = workload.concurrency if held is None else min(workload.concurrency, int(held))
        rooms = math.inf if held is None else held
        return Paces(
            one=self.pace(1, workload) if rooms >= 1 else None,
            some=self.pace(SOME, workload) if rooms >= SOME else None,
            full=self.pace(most, workload) if most >= 1 else None,
            decoding=self.pace(most, replace(workload, prefix_reuse=1.0)) if most >= 1 else None,
        )


def timing_of(
    facts: ModelFacts,
    flags: Flags,
    memory: MemoryBudget,
    gpu_name: str,
    release: tuple[int, int, int] | None = None,
    *,
    tensor_link: Interconnect | None = None,
    stage_link: Interconnect | None = None,
) -> Timing | None:
    """The timing model of a launch; None if too little is known about model or GPU, or weights are in main memory.

    ``memory`` is its memory budget. For links that are None, the typical ones of this GPU model are assumed.
    """
    gpu = find_model(gpu_name) if gpu_name else None
    tensor, pipeline, data = (whole_number(flags, f"{kind}-parallel-size") for kind in ("tensor", "pipeline", "data"))
    geometry = geometry_of(facts, flags, memory, release)
    if gpu is None or gpu.bf16_flops is None or geometry is None or _is_part(gpu, memory) or offloads(flags):
        return None
    roofline = Roofline(
        gpu=gpu,
        model=geometry,
        kv_element_bytes=_cache_element(facts, flags, release),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        eager=flags.get("enforce-eager") is True,
        data_parallel=data if geometry.experts else 1,
        expert_parallel=flags.get("enable-expert-parallel") is True,
        tensor_link=tensor_link,
        stage_link=stage_link,
    )
    # The number of tokens per step that the memory budget was computed for.
    shape = GpuShape(gpu_name, gpu.memory_gib, usable_gib=max((one.total_gib for one in memory.per_gpu), default=None))
    _, step = batch_sizes(facts, flags, release, shape)
    return Timing(roofline, data, step)


def _cache_element(facts: ModelFacts, flags: Flags, release: Release | None) -> int:
    """Bytes of one number in the KV cache."""
    return 1 if is_fp8(cache_dtype(facts, flags, release)) else 2


def _is_part(gpu: GpuModel, memory: MemoryBudget) -> bool:
    """Whether it is a MIG slice, which also has only a part of the GPU's speed."""
    sizes = [one.total_gib for one in memory.per_gpu]
    return bool(sizes) and max(sizes) < PART * gpu.usable_gib


def geometry_of(
    facts: ModelFacts, flags: Flags, memory: MemoryBudget, release: tuple[int, int, int] | None = None
) -> Geometry | None:
    """The model as input of the roofline; None if its shape is unknown."""
    weights = loaded_weights(facts, flags, release)
    layers, heads, hidden = len(facts.layers), facts.heads, facts.hidden_size
    if weights is None or not layers or not heads or not hidden or memory.kv_bytes_per_token is None:
        return None
    count = float(parameters(facts) or weights.total * 8 / bits_per_weight(facts, flags))
    experts, picked = facts.experts or 0, facts.experts_per_token or 0
    share = weights.experts if experts > 1 and picked else 0.0
    method = facts.quantization.method if facts.quantization is not None else flags.get("quantization")
    element = _cache_element(facts, flags, release)
    return Geometry(
        name=facts.model,
        architecture=facts.architecture or "",
        layers=layers,
        heads=heads,
        kv_heads=facts.kv_heads or heads,
        head_dim=facts.head_dim or hidden // heads,
        hidden=hidden,
        intermediate=facts.intermediate_size or 4 * hidden,
        vocabulary=facts.vocabulary or 0,
        max_len=facts.max_context or 0,
        parameters=count,
        active=count * (1 - share) + count * share * (picked / experts if experts else 0.0),
        weight_bytes=weights.total,
        quantization=str(method) if method else None,
        experts=experts if share else 0,
        experts_per_token=picked,
        expert_share=share,
        # The budget's figure is for one pipeline stage.
        kv_bytes_16=memory.kv_bytes_per_token * whole_number(flags, "pipeline-parallel-size") * 2 / element,
    )

"""The duration of one iteration on given GPUs: a roofline over arithmetic and memory bandwidth. Pure.

A pipeline stage of L of the model's N layers takes

    L/N · max(FLOPs / FLOP/s, bytes / bandwidth) per GPU + the all-reduces of L layers + launches + the hop to the next

where bytes are the weights, read once, and the keys and values of every sequence's context. Tensor parallelism divides
weights, arithmetic and (down to one head) keys and values; its all-reduces stay within a stage.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.engine_model.gpu_models import GpuModel, Interconnect, usual_for

if TYPE_CHECKING:
    from vllm_launchers.engine_model.scheduler import Batch


class Geometry(msgspec.Struct, frozen=True):
    """A decoder's shape. ``parameters`` counts all weights, ``active`` those that one token uses.

    ``quantization`` is the checkpoint's method (``awq``, ``fp8``, …) or None; ``weight_bytes`` is the size of all
    weights in memory on one GPU; ``note`` gives the source of the figures if that is not obvious. ``experts`` is the
    number per layer and ``experts_per_token`` the number used per token; ``expert_share`` is the experts' fraction of
    ``weight_bytes``, 0 to 1.
    """

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_len: int
    parameters: float
    active: float
    weight_bytes: float
    quantization: str | None = None
    note: str = ""
    experts: int = 0
    experts_per_token: int = 0
    expert_share: float = 0.0
    kv_bytes_16: float | None = None
    """16-bit KV bytes per token on one GPU, over all heads and layers, if not heads × width (MLA, sliding windows)."""

    def kv_bytes_per_token(self, element_bytes: int, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> float:
        """Bytes of keys and values per token on one GPU: 2 · max(1, kv_heads // TP) · head_dim · bytes · layers/PP."""
        if self.kv_bytes_16 is not None:
            return self.kv_bytes_16 * element_bytes / 2 / pipeline_parallel
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * heads * self.head_dim * element_bytes * math.ceil(self.layers / pipeline_parallel)


COMPUTE_EFFICIENCY = 0.6
"""Fraction of the data sheet's FLOP/s that large matrix products reach."""
BANDWIDTH_EFFICIENCY = 0.78
"""Fraction of the data sheet's bandwidth that decode kernels reach."""
STEP_OVERHEAD = 0.0005
"""Seconds of scheduling, sampling and Python per iteration not hidden by asynchronous scheduling (H100, H200)."""
SEQUENCE_OVERHEAD = 0.000012
"""Additional seconds per sequence in the batch: sampling and detokenization."""
EAGER_LAYER_OVERHEAD = 0.00009
"""Seconds of kernel launches per layer and iteration that CUDA graphs save."""
GRAPH_LAYER_OVERHEAD = 0.000012
"""Seconds per layer and iteration that remain with CUDA graphs."""
PIECEWISE_LAYER_OVERHEAD = 0.000045
"""The same with prompts in the batch, whose attention is outside the graphs (measured on an H100 and an H200)."""
MAX_GRAPH_BATCH = 512
"""By default vLLM captures graphs up to this many tokens; larger batches launch kernels one by one."""
HOP_DELAY = 0.0001
"""Seconds until a stage's activations start to arrive at the next: a send, a receive, and their Python overhead."""

_EIGHT_BITS = ("fp8", "fp8_per_tensor", "compressed-tensors", "modelopt", "fbgemm_fp8")
_UNPACKED = ("awq", "awq_marlin", "gptq", "gptq_marlin")


class Work(msgspec.Struct, frozen=True):
    """An iteration in four numbers.

    ``tokens`` are computed for ``sequences`` requests; ``reads`` is the number of tokens whose keys and values are
    read, and ``pairs`` the number of query-key pairs.
    """

    tokens: int
    sequences: int
    reads: float
    pairs: float

    @classmethod
    def of(cls, batch: Batch) -> Work:
        """The figures of a batch."""
        tokens, reads, pairs = 0, 0, 0.0
        for share in batch.shares:
            count, context = share.count, share.context
            tokens += count
            reads += context + count
            pairs += count * (context + (count + 1) / 2)
        return cls(tokens, len(batch.shares), reads, pairs)

    @classmethod
    def steady(cls, sequences: int, prompt: int, answer: int, reuse: float, step_tokens: int) -> Work:
        """One steady-state step: the next token of each request, and a share of the new prompts.

        ``prompt`` and ``answer`` are a request's tokens, ``reuse`` is the cached fraction of a prompt, and
        ``step_tokens`` the maximum tokens per step. While n requests gain one token each, n · prompt · (1 - reuse) /
        answer prompt tokens arrive.
        """
        prompts = sequences * prompt * (1 - reuse) / max(1, answer)
        chunk = max(1, min(prompt, step_tokens))
        decoding = sequences * (prompt + answer / 2)
        return cls(
            tokens=sequences + math.ceil(prompts),
            sequences=sequences,
            reads=decoding + prompts / chunk * prompt / 2,
            pairs=decoding + prompts * prompt / 2,
        )


class Roofline(msgspec.Struct, frozen=True):
    """Timing of one engine (a data-parallel rank). ``kv_element_bytes`` is 2, or 1 with an FP8 KV cache.

    ``tensor_link`` joins the GPUs of a stage and ``stage_link`` one stage to the next; None means what is typical for
    GPUs of this model. ``data_parallel`` matters only for a mixture of experts, whose ranks share the experts and
    exchange tokens at each layer. ``expert_parallel`` keeps experts whole: all GPUs wait for the one with the most
    requested experts.
    """

    gpu: GpuModel
    model: Geometry
    kv_element_bytes: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    eager: bool = False
    data_parallel: int = 1
    expert_parallel: bool = False
    tensor_link: Interconnect | None = None
    stage_link: Interconnect | None = None

    def latency(self, work: Work) -> float:
        """Seconds that an iteration takes through all stages, from its start until its tokens are ready."""
        if not work.tokens:
            return STEP_OVERHEAD
        return self._part(work, 1.0) + (self.pipeline_parallel - 1) * self._hop(work.tokens)

    def interval(self, work: Work) -> float:
        """Seconds that the slowest pipeline stage is busy with an iteration; :meth:`latency` if there is one stage."""
        if not work.tokens:
            return STEP_OVERHEAD
        stages, layers = self.pipeline_parallel, self.model.layers
        share = math.ceil(layers / stages) / layers if stages > 1 else 1.0
        return self._part(work, share) + (self._hop(work.tokens) if stages > 1 else 0.0)

    def _part(self, work: Work, share: float) -> float:
        """Seconds for ``share`` of the layers, plus the fixed costs of an iteration."""
        busy = max(self._compute(work), self._memory(work)) + self._communication(work.tokens)
        return share * (busy + self._launches(work)) + STEP_OVERHEAD + SEQUENCE_OVERHEAD * work.sequences

    def _launches(self, work: Work) -> float:
        """Seconds of kernel launches, over all layers."""
        if self.eager or work.tokens > MAX_GRAPH_BATCH:
            return EAGER_LAYER_OVERHEAD * self.model.layers
        decoding = work.tokens <= work.sequences
        return (GRAPH_LAYER_OVERHEAD if decoding else PIECEWISE_LAYER_OVERHEAD) * self.model.layers

    def _compute(self, work: Work) -> float:
        """Seconds of arithmetic on one GPU, over all layers."""
        model, flops = self.model, self.gpu.bf16_flops
        if flops is None:
            return 0.0
        embeddings = model.vocabulary * model.hidden
        linear = 2 * (model.active - embeddings) * work.tokens + 2 * embeddings * work.sequences
        attention = 4 * model.layers * model.heads * model.head_dim * work.pairs
        eight_bits = model.quantization in _EIGHT_BITS and model.weight_bytes > 0.8 * model.parameters
        peak = (self.gpu.fp8_flops if eight_bits else None) or flops
        penalty = 1.0 if self.kv_element_bytes == 2 or self.gpu.fp8_flops else 1.2  # FP8 keys unpacked to BF16 first
        rate = COMPUTE_EFFICIENCY
        unpacking = 0.85 if model.quantization in _UNPACKED else 1.0  # 4-bit weights unpacked on the way
        seconds = linear / (peak * rate * unpacking) + attention * penalty / (flops * rate)
        return seconds / self.tensor_parallel

    def _memory(self, work: Work) -> float:
        """Seconds for one GPU to read its weights and the keys and values, over all layers."""
        model = self.model
        weights = model.weight_bytes * (1 - model.expert_share) / self.tensor_parallel
        experts = model.weight_bytes * model.expert_share * self._experts_read(work.tokens)
        keys = work.reads * model.kv_bytes_per_token(self.kv_element_bytes, self.tensor_parallel)
        return (weights + experts + keys) / (self.gpu.bandwidth * BANDWIDTH_EFFICIENCY)

    def _experts_read(self, tokens: int) -> float:
        """The fraction of all experts' weights that the busiest GPU reads for ``tokens`` tokens of each rank.

        A token picks ``experts_per_token`` of ``experts``; picks are assumed to be independent and uniform. Split
        experts are read in equal parts; of whole ones, the busiest of n GPUs holds about sqrt(2 m ln n) more than the
        mean m.
        """
        model, ranks = self.model, self.tensor_parallel * self.data_parallel
        if not model.experts or not model.expert_share:
            return 0.0
        together = tokens * self.data_parallel
        touched = model.experts * (1 - (1 - min(1.0, model.experts_per_token / model.experts)) ** together)
        mean = touched / ranks
        if self.expert_parallel and ranks > 1:
            most = math.ceil(model.experts / ranks)
            mean = max(min(mean + math.sqrt(2 * mean * math.log(ranks)), most, touched), mean)
        return mean / model.experts

    def _communication(self, tokens: int) -> float:
        """Seconds of exchanges within a stage, over all layers: two all-reduces each, or tokens sent to experts."""
        model, ranks = self.model, self.data_parallel if self.model.experts else 1
        link = self.tensor_link or usual_for(self.gpu)
        activations = tokens * model.hidden * 2
        seconds = 0.0
        if self.tensor_parallel > 1:
            world = self.tensor_parallel
            moved = 2 * (world - 1) / world * activations / link.bandwidth
            seconds += 2 * model.layers * (moved + link.delay)
        if ranks > 1:
            moved = 2 * (ranks - 1) * activations / link.bandwidth  # all-gathered, then reduced again
            seconds += model.layers * (moved + 2 * link.delay)
        return seconds

    def _hop(self, tokens: int) -> float:
        """Seconds until a stage's activations have reached the next one."""
        link = self.stage_link or self.tensor_link or usual_for(self.gpu)
        return tokens * self.model.hidden * 2 / link.bandwidth + HOP_DELAY

"""How long one iteration takes on a named GPU: a roofline over its arithmetic and its memory bandwidth.

seconds = max(FLOPs / FLOP/s, bytes / bandwidth) / TP + all-reduce + overhead, where bytes are the weights read once
and the keys and values of every sequence's context. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_launchers.simulated.hardware import Gpu
from vllm_launchers.simulated.models import Geometry
from vllm_launchers.simulated.scheduler import Batch

COMPUTE_EFFICIENCY = 0.55
"""Share of the data sheet's FLOP/s that large matrix products reach."""
BANDWIDTH_EFFICIENCY = 0.78
"""Share of the data sheet's bandwidth that decode kernels reach."""
STEP_OVERHEAD = 0.0012
"""Seconds of scheduling, sampling and Python per iteration."""
SEQUENCE_OVERHEAD = 0.000012
"""Seconds more per sequence in the batch: sampling and detokenization."""
EAGER_LAYER_OVERHEAD = 0.00009
"""Seconds of kernel launches per layer and iteration that CUDA graphs save."""
GRAPH_LAYER_OVERHEAD = 0.000012
MAX_GRAPH_BATCH = 512
"""vLLM captures graphs up to this many tokens by default; larger batches launch kernels one by one."""
REDUCE_LATENCY = {True: 0.000008, False: 0.000022}
"""Seconds to start one all-reduce, over NVLink or not."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """One engine's timing. ``kv_element_bytes`` is 2, or 1 with an FP8 KV cache."""

    gpu: Gpu
    model: Geometry
    kv_element_bytes: int = 2
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    eager: bool = False

    def seconds(self, batch: Batch) -> float:
        """Seconds that ``batch`` takes, from its start to its tokens being ready."""
        tokens = batch.token_count
        if not tokens:
            return STEP_OVERHEAD
        reads = sum(share.context + share.count for share in batch.shares)
        pairs = sum(share.count * (share.context + (share.count + 1) / 2) for share in batch.shares)
        compute = self._compute(tokens, pairs, len(batch.shares))
        memory = self._memory(tokens, reads)
        return (
            max(compute, memory) / self.tensor_parallel
            + self._communication(tokens)
            + self._overhead(tokens, len(batch.shares))
        )

    def _compute(self, tokens: int, pairs: float, sequences: int) -> float:
        model = self.model
        embeddings = model.vocabulary * model.hidden
        linear = 2 * (model.active - embeddings) * tokens + 2 * embeddings * sequences
        attention = 4 * model.layers * model.heads * model.head_dim * pairs
        eight_bits = model.quantization in ("fp8", "compressed-tensors") and model.weight_bytes > 0.8 * model.parameters
        peak = (self.gpu.fp8_flops if eight_bits else None) or self.gpu.bf16_flops
        penalty = 1.0 if self.kv_element_bytes == 2 or self.gpu.fp8_native else 1.2  # FP8 keys unpacked first
        rate = COMPUTE_EFFICIENCY
        unpacking = 0.85 if model.quantization in ("awq", "gptq") else 1.0  # 4-bit weights unpacked on the way
        return linear / (peak * rate * unpacking) + attention * penalty / (self.gpu.bf16_flops * rate)

    def _memory(self, tokens: int, reads: float) -> float:
        model = self.model
        # Of a mixture of experts, each further token touches more of the experts.
        share = min(1.0, model.active / model.parameters * max(1, tokens))
        moved = model.weight_bytes * share + reads * model.kv_bytes_per_token(self.kv_element_bytes)
        return moved / (self.gpu.bandwidth * BANDWIDTH_EFFICIENCY)

    def _communication(self, tokens: int) -> float:
        model = self.model
        activations = tokens * model.hidden * 2
        hops = (self.pipeline_parallel - 1) * (activations / self.gpu.link + 0.0001)
        if self.tensor_parallel == 1:
            return hops
        world = self.tensor_parallel
        moved = 2 * (world - 1) / world * activations / self.gpu.link
        return hops + 2 * model.layers * (moved + REDUCE_LATENCY[self.gpu.nvlink])

    def _overhead(self, tokens: int, sequences: int) -> float:
        graphs = not self.eager and tokens <= MAX_GRAPH_BATCH
        per_layer = GRAPH_LAYER_OVERHEAD if graphs else EAGER_LAYER_OVERHEAD
        return STEP_OVERHEAD + SEQUENCE_OVERHEAD * sequences + per_layer * self.model.layers

"""What vLLM takes beside weights and KV cache: peak activations, NCCL, the CUDA context and CUDA graphs.

Worked out from the shapes of the tensors that vLLM's profile run holds at its peak; the few figures that are no shapes
(bytes of the context, of a graph, of NCCL's buffers) are what start-ups of releases 0.9 to 0.25 reported.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_launchers.machine.modelfacts.model import ModelFacts
from vllm_launchers.plan.budget.gpus import GpuShape
from vllm_launchers.plan.budget.settings import Settings

GIB = 2**30

CONTEXT_GIB = 0.45
"""CUDA context and loaded kernels: there before vLLM measures, so not in its share (but in 0.8)."""
_WORKSPACES_GIB = 0.1
_NCCL_GIB = 0.1
"""Per rank of the tensor-parallel group, before 0.11 counted against vLLM's share."""
_HOST_PROCESS_GIB = 2.0
"""A server's own processes, where GPU and CPU share their memory."""
_GRAPH_GIB = 0.3 / 1024
"""One layer's graph for one batch size."""
_FIRST_GRAPH_GIB = 0.05
_MOST_UNPACKED = 65536
_SORTED_BYTES = 40
"""Per sequence and word of the vocabulary: logits in 16 and 32 bits, sorted values with 64-bit indices, and the sort's
own buffers, which hold them again."""
_SAMPLED_BYTES = 18
"""The same where the sampler does not sort: logits in 16 and 32 bits, probabilities, noise, and a mask."""
_ENCODER_TOKENS = 16384
_ENCODER_PATCH_BYTES = 4 * 8 * 4096
"""Per token of an image: four patches, each with the widest layer's activations."""
_LARGE_ENCODERS = frozenset(
    {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen2_5_omni", "qwen3_omni_moe"}
    | {"glm4v", "glm4v_moe", "keye", "keye_vl_1_5"}
)
"""Families that take pictures of any size."""
_SMALL_ENCODER = 0.1
"""Of what these take."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """GiB on one GPU. ``inside`` comes out of the share vLLM may take, ``outside`` is held besides."""

    inside: float
    outside: float
    graphs: float

    @property
    def total(self) -> float:
        """All but the graphs."""
        return self.inside + self.outside


def overhead(facts: ModelFacts, settings: Settings, gpu: GpuShape, assumed: list[str]) -> Overhead:
    """Estimate it for one GPU."""
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


def activations(facts: ModelFacts, settings: Settings, assumed: list[str], *, sorts: bool) -> float:
    """Peak bytes of a profile run: of the model's forward pass, the sampler and the encoder the largest counts.

    They run one after the other, and PyTorch gives what one frees to the next. ``sorts``: whether the sampler sorts
    the logits, as it did up to 0.16 and does where Triton's kernels do not run.
    """
    hidden = facts.hidden_size
    if hidden is None:
        hidden = 4096
        assumed.append("the model's hidden size is not known: 4,096 is taken for the activations")
    forward = settings.max_batched * token_activations(facts, settings, hidden) + _unpacked_context(facts, settings)
    sampler = 0.0
    if not settings.pooling:
        words = facts.vocabulary
        if words is None:
            words = 128_000
            assumed.append("the vocabulary's size is not known: 128,000 is taken for the sampler's memory")
        sampler = float(settings.max_num_seqs) * words * (_SORTED_BYTES if sorts else _SAMPLED_BYTES)
    return max(forward, sampler, _encoder(facts, settings))


def token_activations(facts: ModelFacts, settings: Settings, hidden: int) -> float:
    """Bytes per token of the widest moment of a layer: both halves of the gate, their product, and the residuals.

    Of experts, each token holds as many rows as experts are chosen for it.
    """
    size = 4 if settings.dtype == "float32" else 2
    wide = facts.intermediate_size or 4 * hidden
    rows = 3 * wide / settings.tensor
    if facts.experts and facts.experts_per_token:
        own = (facts.expert_intermediate_size or wide) / settings.tensor
        rows = facts.experts_per_token * (max(2 * own, hidden) + own)
    return size * (rows + 4 * hidden)


def _unpacked_context(facts: ModelFacts, settings: Settings) -> float:
    """MLA: keys and values of a piece of context, unpacked for its prefill; up to 65,536 tokens at once."""
    if facts.kv_lora_rank is None or not facts.heads:
        return 0.0
    wanted = max(8 * (settings.max_model_len or _MOST_UNPACKED), 4 * settings.max_num_seqs * settings.block_size)
    head = facts.v_head_dim or 128
    return min(wanted, _MOST_UNPACKED) * max(1, facts.heads // settings.tensor) * 2 * head * 2.0


def adapters(facts: ModelFacts, settings: Settings) -> float:
    """Bytes of LoRA adapters, which vLLM sets aside in full: two thin matrices beside each linear layer.

    The first of the two is whole on each GPU, the second split like the layer.
    """
    hidden, wide = facts.hidden_size or 0, facts.intermediate_size or 4 * (facts.hidden_size or 0)
    own = (facts.heads or 0) * (facts.head_dim or 0)
    shared = (facts.kv_heads or 0) * (facts.head_dim or 0)
    inputs = 5 * hidden + own + wide
    outputs = own + 2 * shared + 2 * hidden + 2 * wide
    return settings.lora_ranks * len(facts.layers) * 2.0 * (inputs + outputs / settings.tensor) / settings.pipeline


def graphs_gib(facts: ModelFacts, settings: Settings) -> float:
    """Memory of all CUDA graphs: one for each layer and batch size, with a pool that they share."""
    if settings.capture_sizes == 0:
        return 0.0
    layers = len(facts.layers) or 32
    return _FIRST_GRAPH_GIB + _GRAPH_GIB * settings.capture_sizes * layers / settings.pipeline


def _encoder(facts: ModelFacts, settings: Settings) -> float:
    """Peak bytes of a vision or audio encoder at its largest input."""
    large = facts.model_type in _LARGE_ENCODERS
    if not settings.encoder or not (large or facts.multimodal):
        return 0.0
    return _ENCODER_TOKENS * _ENCODER_PATCH_BYTES * (1.0 if large else _SMALL_ENCODER) / settings.tensor

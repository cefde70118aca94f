"""vLLM's memory besides weights and KV cache: peak activations, NCCL, the CUDA context and CUDA graphs.

Derived from the shapes of the tensors that vLLM's profile run holds at its peak; the few figures not based on shapes
(bytes of the context, of a graph, of NCCL's buffers) were reported by starts of releases 0.9 to 0.25.
"""

from __future__ import annotations

import msgspec

from vllm_launchers.plan.budget.budget import GpuShape
from vllm_launchers.plan.budget.memory_flags import EffectiveFlags
from vllm_launchers.units import GIB
from vllm_launchers.vllm.modelfacts.encoder import with_pixels
from vllm_launchers.vllm.modelfacts.facts import Encoder, ModelFacts

CONTEXT_GIB = 0.45
"""CUDA context and loaded kernels: present before vLLM measures, so not in its share (except in 0.8)."""
_WORKSPACES_GIB = 0.1
_NCCL_GIB = 0.1
"""Per rank of the tensor-parallel group; before 0.11 counted against vLLM's share."""
_HOST_PROCESS_GIB = 2.0
"""A server's own processes, if GPU and CPU share their memory."""
_GRAPH_GIB = 0.3 / 1024
"""One layer's graph for one batch size."""
_FIRST_GRAPH_GIB = 0.05
_MOST_UNPACKED = 65536
_SORTED_BYTES = 40
"""Per sequence and vocabulary entry: logits in 16 and 32 bits, sorted values with 64-bit indices, and the sort's own
buffers, which hold them again."""
_SAMPLED_BYTES = 18
"""The same if the sampler does not sort: logits in 16 and 32 bits, probabilities, noise, and a mask."""
_FEWER_FRAMES = (0, 11, 0)
_UNKNOWN_ENCODER = 0.2 * GIB
"""Assumed for an encoder of unknown size."""


class Overhead(msgspec.Struct, frozen=True):
    """GiB on one GPU. ``inside`` counts against vLLM's share, ``outside`` is held in addition."""

    inside: float
    outside: float
    graphs: float

    @property
    def total(self) -> float:
        """Everything except the graphs."""
        return self.inside + self.outside


def overhead(facts: ModelFacts, settings: EffectiveFlags, gpu: GpuShape, assumed: list[str]) -> Overhead:
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


def activations(facts: ModelFacts, settings: EffectiveFlags, assumed: list[str], *, sorts: bool) -> float:
    """Peak bytes of a profile run: the largest of the model's forward pass, the sampler and the encoder.

    They run one after the other, and PyTorch reuses what each frees; the encoder's embeddings are kept until the end.
    ``sorts``: whether the sampler sorts the logits, as it did up to 0.16 and does if Triton's kernels do not run.
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
    """MLA: keys and values of a chunk of context, unpacked for its prefill; up to 65,536 tokens at once."""
    if facts.kv_lora_rank is None or not facts.heads:
        return 0.0
    wanted = max(8 * (settings.max_model_len or _MOST_UNPACKED), 4 * settings.max_num_seqs * settings.block_size)
    head = facts.v_head_dim or 128
    return min(wanted, _MOST_UNPACKED) * max(1, facts.heads // settings.tensor) * 2 * head * 2.0


def adapters(facts: ModelFacts, settings: EffectiveFlags) -> float:
    """Bytes of LoRA adapters, which vLLM preallocates in full: two thin matrices beside each linear layer.

    The first of the two is replicated on each GPU, the second split like the layer.
    """
    hidden, wide = facts.hidden_size or 0, facts.intermediate_size or 4 * (facts.hidden_size or 0)
    own = (facts.heads or 0) * (facts.head_dim or 0)
    shared = (facts.kv_heads or 0) * (facts.head_dim or 0)
    inputs = 5 * hidden + own + wide
    outputs = own + 2 * shared + 2 * hidden + 2 * wide
    return settings.lora_ranks * len(facts.layers) * 2.0 * (inputs + outputs / settings.tensor) / settings.pipeline


def graphs_gib(facts: ModelFacts, settings: EffectiveFlags) -> float:
    """Memory of all CUDA graphs: one for each layer and batch size, with a shared pool."""
    if settings.capture_sizes == 0:
        return 0.0
    layers = len(facts.layers) or 32
    return _FIRST_GRAPH_GIB + _GRAPH_GIB * settings.capture_sizes * layers / settings.pipeline


def encoder_bytes(facts: ModelFacts, settings: EffectiveFlags, hidden: int) -> tuple[float, float]:
    """Bytes of a vision or audio encoder at its peak, and of the embeddings that are kept of it, in a profile run.

    vLLM runs as many of the largest items as its budget allows: the tokens of one step, or of one item if that is more
    (``compute_mm_encoder_budget``), and at most as many as ``max-num-seqs`` requests can contain.
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
    """How many of the largest images the largest item has: one, or a video as long as the context (Qwen2-VL).

    Two frames make one image; vLLM takes at most 16 frames, and 14 since 0.11 (``_MAX_FRAMES_PER_VIDEO``).
    """
    if not (encoder.films and settings.films):
        return 1
    most = 7 if settings.release >= _FEWER_FRAMES else 8
    return max(1, min((settings.max_model_len or 0) // encoder.item_tokens, most))


def patch_bytes(encoder: Encoder, split: int) -> float:
    """Bytes per patch of the widest moment of an encoder's layer in 16 bits, with the patch itself.

    Attention holds the residual, queries, keys and values together and copied apart, and with rotary embeddings one of
    them turned in 32 bits (``apply_rotary_pos_emb_vision``); the network the residual and norm, and what goes in and
    comes out of its activation. What belongs to heads and network is cut over ``split`` GPUs.
    """
    width = encoder.width
    attention = 2 * width + (24 * width if encoder.rotary else 14 * width) / split
    network = 4 * width + 2 * (3 if encoder.gated else 2) * encoder.inner / split
    return 2 * encoder.patch_values + max(attention, network)

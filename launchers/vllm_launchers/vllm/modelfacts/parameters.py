"""Counts a model's parameters from its config, for a model whose weights are not here. Pure.

Counts embedding, output, and per layer attention, feed-forward network or experts, and norms, like the classes in
``transformers``; for a vision tower its layers and the projection after them. Values missing from the config are not
guessed: the result is then None.
"""

from __future__ import annotations

from vllm_launchers.vllm.modelfacts.facts import LayerKind, ModelFacts
from vllm_launchers.vllm.modelfacts.values import Config, mapping, number, whole_numbers

_TWO_MATRICES = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2", "RefinedWebModel"}
)
"""Types whose feed-forward network has no gate."""
_TIED = frozenset(
    {"bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"}
    | {"gemma4", "gemma4_text", "gpt2", "gpt_bigcode", "mpt", "opt", "starcoder2"}
)
"""Types whose output layer is the embedding unless the config says otherwise."""
_GATED_DELTA = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
_BIASED = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "olmo2", "olmo3"})
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_VISION = ("vision_config", "vision_encoder", "vision_tower", "vit_config", "visual")


def count_parameters(config: Config, part: Config, merged: Config, facts: ModelFacts) -> int | None:
    """Parameters of a model. ``part`` is its text part as written, ``merged`` with the defaults of its class."""
    kind = facts.model_type or ""
    written = number(part, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", *_EXPERT_WIDTH)
    if not (facts.hidden_size and facts.layers and facts.vocabulary and written):
        return None
    tied = part.get("tie_word_embeddings", config.get("tie_word_embeddings", _text_type(kind) in _TIED)) is not False
    total = facts.vocabulary * facts.hidden_size * (1 if tied else 2) + facts.hidden_size
    for at, layer in enumerate(facts.layers):
        mixer = _mixer(facts, layer, merged, kind)
        network = _network(facts, at, merged, kind)
        if mixer is None or network is None:
            return None
        total += mixer + network + (4 if kind in _FOUR_NORMS else 2) * facts.hidden_size
    return total + sum(_tower(mapping(config, name), facts.hidden_size) for name in _VISION)


def _text_type(kind: str) -> str:
    return kind.removesuffix("_text")


def _mixer(facts: ModelFacts, layer: LayerKind, config: Config, kind: str) -> int | None:
    """Parameters of a layer's attention, or its replacement; None if unknown."""
    hidden = facts.hidden_size or 0
    if layer is LayerKind.NONE:
        return 0
    if layer is LayerKind.LINEAR:
        return _delta_net(config, hidden) if kind in _GATED_DELTA else None
    if facts.kv_lora_rank is not None:
        return _latent(facts, config, hidden)
    full = layer is LayerKind.FULL and LayerKind.SLIDING in facts.layers
    kv_heads = (facts.full_kv_heads if full else None) or facts.kv_heads
    size = (facts.full_head_dim if full else None) or facts.head_dim
    if not facts.heads or not kv_heads or not size:
        return None
    queries = 2 * facts.heads if kind in _GATED_DELTA else facts.heads  # with a gate for the output
    found = hidden * size * (queries + facts.heads + 2 * kv_heads)
    if kind in _BIASED:
        found += size * (facts.heads + 2 * kv_heads)
    return found + (2 * size if kind.startswith(("qwen3", "gemma3", "gemma4")) else 0)


def _latent(facts: ModelFacts, config: Config, hidden: int) -> int | None:
    """Multi-head latent attention (DeepSeek)."""
    rank, rope, nope = facts.kv_lora_rank or 0, facts.qk_rope_head_dim or 0, number(config, "qk_nope_head_dim")
    value, heads = facts.v_head_dim, facts.heads
    if not nope or not value or not heads:
        return None
    low = number(config, "q_lora_rank")
    queries = hidden * low + low * heads * (nope + rope) if low else hidden * heads * (nope + rope)
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _delta_net(config: Config, hidden: int) -> int | None:
    """Gated delta net (Qwen3-Next and later)."""
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    key, value = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    if not keys or not values or not key or not value:
        return None
    wide, out = 2 * keys * key, values * value
    kernel = number(config, "linear_conv_kernel_dim") or 4
    return hidden * (wide + 2 * out + 2 * values) + (wide + out) * kernel + out * hidden


def _network(facts: ModelFacts, at: int, config: Config, kind: str) -> int | None:
    """Parameters of a layer's feed-forward network, or of its experts with their router."""
    hidden, wide = facts.hidden_size or 0, facts.intermediate_size
    if not facts.experts or not _has_experts(at, config):
        return (2 if kind in _TWO_MATRICES else 3) * hidden * wide if wide else None
    own = number(config, *_EXPERT_WIDTH) or (wide if "num_local_experts" in config or kind == "mixtral" else None)
    if not own:
        return None
    shared = number(config, "shared_expert_intermediate_size") or own * (
        number(config, "n_shared_experts", "moe_num_shared_experts") or 0
    )
    return hidden * (3 * own * facts.experts + 3 * shared + facts.experts)


def _has_experts(at: int, config: Config) -> bool:
    if at < (number(config, "first_k_dense_replace") or 0) or at in whole_numbers(config, "mlp_only_layers"):
        return False
    every = number(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    return (at + 1) % every == 0


def _tower(config: Config, hidden: int) -> int:
    """Parameters of a vision tower and of the projection to the language model."""
    wide = number(config, "embed_dim") or number(config, "hidden_size", "width")
    if mapping(config, "vision_config"):
        return 0
    depth = number(config, "depth", "num_hidden_layers", "layers")
    if not wide or not depth:
        return 0
    ratio = config.get("mlp_ratio")
    default = int(wide * ratio) if isinstance(ratio, int | float) and 0 < ratio < 100 else 4 * wide
    inner = number(config, "intermediate_size") or default
    gates = 3 if config.get("hidden_act") == "silu" else 2
    merged = wide * (number(config, "spatial_merge_size") or 1) ** 2
    patch = (number(config, "patch_size") or 14) ** 2 * 3 * (number(config, "temporal_patch_size") or 1)
    return depth * (4 * wide * wide + gates * wide * inner) + merged * (merged + hidden) + patch * wide

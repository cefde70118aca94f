"""A model's config, as its publisher wrote it, read as vLLM reads it. Pure: the text comes from elsewhere."""

from __future__ import annotations

from dataclasses import replace

from vllm_launchers.machine.modelfacts.context import max_context
from vllm_launchers.machine.modelfacts.defaults import with_defaults
from vllm_launchers.machine.modelfacts.layers import MOST_LAYERS, layer_kinds, window
from vllm_launchers.machine.modelfacts.model import LayerKind, ModelFacts
from vllm_launchers.machine.modelfacts.quantization import kv_cache_quantization, quantization
from vllm_launchers.machine.modelfacts.state import state_bytes
from vllm_launchers.machine.modelfacts.values import Config, mapping, number, text, texts, whole_numbers

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_OTHER_PARTS = (
    *("vision_config", "vision_encoder", "vision_tower", "mm_vision_tower", "vit_config", "visual", "img_processor"),
    *("audio_config", "audio_processor"),
)
_MLA = frozenset(
    {"axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots3_note", "deepseek_mtp"}
    | {"k3_dspark", "glm5_next", "glm5_next_text", "glm_moe_dsa", "glm4_moe_lite", "kimi_k2", "kimi_linear"}
    | {"longcat_flash", "pangu_ultra_moe", "bailing_hybrid", "hy_v4"}
)
"""Types for which vLLM uses multi-head latent attention; others may have its fields and do not."""

_REMOTE = frozenset(
    {"Keye", "KeyeVL", "MiniMaxText01", "NVLM_D", "NemotronH_Nano_VL_V2", "aquila", "arctic", "baichuan", "bailing_moe"}
    | {"exaone", "h2ovl_chat", "hunyuan", "internlm", "internlm2", "internlm3", "internvl_chat", "jais", "kimi_audio"}
    | {"minicpm", "minicpmo", "minicpmv", "minimax_text_01", "molmo", "nemotron-nas", "orion", "phi3_v", "phi3small"}
    | {"phi4flash", "phi4mm", "plamo", "plamo2", "qwen", "skywork", "skywork_chat", "telechat", "telechat2", "xverse"}
)
"""Types whose config class neither transformers nor vLLM has: they come with their code or not at all."""

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "moe_intermediate_size")


def facts_from_config(model: str, config: Config, quant_config: Config | None = None) -> ModelFacts:
    """Read a ``config.json``; ``quant_config`` is the ``hf_quant_config.json`` beside it, for where that is silent.

    Never raises: what is not there or has the wrong type is None, and ``missing`` names what a plan would want.
    """
    part = _text_part(config)
    root_type = text(config, "model_type") or ""
    model_type = text(part, "model_type") or root_type
    merged = with_defaults(part, model_type)
    dtype = _dtype(config, part)
    facts = ModelFacts(
        model=model,
        architecture=next(iter(texts(config, "architectures")), None),
        model_type=root_type or model_type or None,
        hidden_size=number(merged, *_HIDDEN),
        intermediate_size=number(merged, *_INTERMEDIATE),
        vocabulary=number(merged, "vocab_size", "padded_vocab_size"),
        max_context=max_context(merged, model_type),
        dtype=dtype,
        multimodal=part is not config or any(config.get(name) for name in _OTHER_PARTS),
        needs_remote_code=_needs_remote_code(config, root_type),
    )
    facts = _with_heads(facts, merged, model_type)
    facts = _with_layers(facts, merged, model_type)
    facts = _with_experts(facts, merged)
    settings = _quantization_settings(config, part) or quant_config or {}
    facts = replace(facts, quantization=quantization(settings), kv_cache_quantization=kv_cache_quantization(settings))
    return replace(facts, missing=_missing(facts, model_type, merged))


def _text_part(config: Config) -> Config:
    """The part that describes the language model, where a config has several."""
    part = config
    for _ in range(3):  # Qwen Omni: thinker_config → text_config
        inner = mapping(part, *_TEXT_PARTS)
        if not inner:
            break
        part = inner
    if part is not config and not text(part, "model_type") and number(config, "num_hidden_layers"):
        return config
    return part


def _dtype(config: Config, part: Config) -> str | None:
    for source in (config, part, mapping(config, "vision_config")):
        if name := text(source, "dtype", "torch_dtype"):
            return name.removeprefix("torch.")
    return None


def _with_heads(facts: ModelFacts, config: Config, model_type: str) -> ModelFacts:
    heads = number(config, *_HEADS)
    attention = mapping(config, "attn_config")
    kv_heads = number(config, *_KV_HEADS) or number(attention, "kv_n_heads")
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        kv_heads = 1
    head_dim = number(config, "head_dim", "hidden_size_per_head", "attention_head_dim")
    if head_dim is None and heads and facts.hidden_size:
        head_dim = facts.hidden_size // heads or None
    facts = replace(
        facts,
        heads=heads,
        kv_heads=kv_heads or _heads_of_blocks(config, heads) or heads,
        head_dim=head_dim,
        v_head_dim=number(config, "v_head_dim"),
    )
    rank = number(config, "kv_lora_rank")
    if model_type in _MLA and rank and "compress_ratios" not in config:
        rope = number(config, "qk_rope_head_dim")
        size = rank + (rope or 0)
        return replace(facts, kv_lora_rank=rank, qk_rope_head_dim=rope, kv_heads=1, head_dim=size)
    return _with_full_heads(facts, config, model_type)


def _with_full_heads(facts: ModelFacts, config: Config, model_type: str) -> ModelFacts:
    """Models whose full-attention layers have other heads than their sliding ones: Gemma 4, MiMo V2."""
    if sliding := number(config, "swa_num_key_value_heads"):
        size = number(config, "swa_head_dim") or facts.head_dim
        return replace(
            facts, kv_heads=sliding, head_dim=size, full_kv_heads=facts.kv_heads, full_head_dim=facts.head_dim
        )
    if not model_type.startswith("gemma4"):
        return facts
    heads = number(config, "num_global_key_value_heads") if config.get("attention_k_eq_v", True) is not False else None
    return replace(facts, full_kv_heads=heads or facts.kv_heads, full_head_dim=number(config, "global_head_dim"))


def _heads_of_blocks(config: Config, heads: int | None) -> int | None:
    """Nemotron's searched models say for each block how many heads share keys and values."""
    blocks = config.get("block_configs")
    if not isinstance(blocks, list) or not heads:
        return None
    for block in blocks:
        shared = number(mapping(block, "attention"), "n_heads_in_group") if isinstance(block, dict) else None
        if shared:
            return heads // shared or None
    return None


def _with_layers(facts: ModelFacts, config: Config, model_type: str) -> ModelFacts:
    count = number(config, *_LAYERS)
    if model_type == "longcat_flash" and (layers := number(config, "num_layers")):
        count = 2 * layers  # each has attention twice
    kinds = layer_kinds(config, model_type, count) or ()
    chunk = number(config, "attention_chunk_size") if LayerKind.CHUNKED in kinds else None
    state = state_bytes(config, model_type, facts.dtype) if LayerKind.LINEAR in kinds else None
    if kinds and set(kinds) <= {LayerKind.LINEAR}:  # its heads are those of the state
        facts = replace(facts, heads=None, kv_heads=None, head_dim=None)
    return replace(
        facts,
        layers=kinds,
        window=window(config, model_type) if LayerKind.SLIDING in kinds else chunk,
        state_bytes=state[0] if state else None,
        state_bytes_per_draft_token=state[1] if state else None,
    )


def _with_experts(facts: ModelFacts, config: Config) -> ModelFacts:
    inner = mapping(config, "ffn_config")  # DBRX
    experts = number(config, *_EXPERTS) or next(iter(whole_numbers(config, *_EXPERTS)), None)
    used = number(config, *_EXPERTS_USED) or max(whole_numbers(config, *_EXPERTS_USED), default=None)
    experts = experts or number(inner, "moe_num_experts")
    if not experts or experts == 1:
        return facts
    return replace(
        facts,
        experts=experts,
        experts_per_token=used or number(inner, "moe_top_k"),
        expert_intermediate_size=number(config, "moe_intermediate_size") or facts.intermediate_size,
    )


def _quantization_settings(config: Config, part: Config) -> Config:
    names = ("quantization_config", "compression_config")
    return mapping(config, *names) or mapping(part, *names)


def _needs_remote_code(config: Config, model_type: str) -> bool:
    """Whether it surely cannot be loaded without ``--trust-remote-code``."""
    return bool(text(mapping(config, "auto_map"), "AutoConfig")) and model_type in _REMOTE


def _missing(facts: ModelFacts, model_type: str, config: Config) -> tuple[str, ...]:
    wanted = {
        "architecture": facts.architecture or facts.model_type,
        "number and kind of layers": facts.layers or None,
        "hidden size": facts.hidden_size,
        "attention heads": facts.heads or (set(facts.layers) == {LayerKind.LINEAR}) or None,
        "longest context": facts.max_context,
        "number format": facts.dtype,
    }
    missing = [name for name, value in wanted.items() if value is None]
    count = number(config, *_LAYERS)
    if count and count > MOST_LAYERS:
        missing.append(f"number of layers (the config says {count})")
    if LayerKind.LINEAR in facts.layers and facts.state_bytes is None:
        missing.append("size of the linear layers' state")
    if "compress_ratios" in config:
        missing.append("how its compressed attention keeps the KV cache")
    elif number(config, "index_head_dim") and model_type in _MLA:
        missing.append("the sparse attention's index in the KV cache")
    return tuple(missing)

"""Reads a model's published config as vLLM does. Pure: the text is passed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec.structs import replace

from vllm_launchers.vllm.modelfacts.defaults import with_defaults
from vllm_launchers.vllm.modelfacts.encoder import AUDIO_PARTS, VISION_PARTS, encoder_of, inner_width
from vllm_launchers.vllm.modelfacts.facts import BYTES, UNKNOWN_FORMAT, LayerKind, ModelFacts, Quantization
from vllm_launchers.vllm.modelfacts.values import Config, factor, mapping, number, objects, text, texts, whole_numbers

State = tuple[int, int]
"""Bytes per layer and request without speculation, and bytes that each speculative token adds."""


def state_bytes(config: Config, model_type: str, dtype: str | None) -> State | None:
    """Return the size of one linear layer's state before any split over GPUs; None if not in the config.

    ``config`` is the text part with its defaults. The short convolution keeps ``kernel - 1`` rows in the model's dtype.
    The recurrent state has the dtype given by the config, or float32 for Nemotron-H and Kimi Linear.
    """
    element = BYTES.get(dtype or "bfloat16", 2)
    named = text(config, "mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    fallback = 4 if model_type in ("nemotron_h", "nemotron_h_puzzle") else element
    recurrent = BYTES.get(named or "", fallback)
    return (
        _delta_net(config, element, recurrent)
        or _kimi(config, element)
        or _mamba2(config, element, recurrent)
        or _mamba1(config, element, recurrent)
        or _other(config, model_type, element)
    )


def _delta_net(config: Config, element: int, recurrent: int) -> State | None:
    """Gated delta nets: Qwen3-Next, Qwen3.5."""
    keys, values = number(config, "linear_num_key_heads"), number(config, "linear_num_value_heads")
    key_dim, value_dim = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    kernel = number(config, "linear_conv_kernel_dim")
    if not (keys and values and key_dim and value_dim and kernel):
        return None
    row = (2 * keys * key_dim + values * value_dim) * element
    return (kernel - 1) * row + values * value_dim * key_dim * recurrent, row


def _kimi(config: Config, element: int) -> State | None:
    """Kimi delta attention, whose recurrent state is float32."""
    linear = mapping(config, "linear_attn_config")
    heads, size, kernel = (number(linear, name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    if not (heads and size and kernel):
        return None
    row = 3 * heads * size * element
    return (kernel - 1) * row + heads * size * size * 4, row


def _mamba2(config: Config, element: int, recurrent: int) -> State | None:
    heads = number(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    size = number(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    groups = number(config, "n_groups", "mamba_n_groups", "mamba_ngroups")
    states = number(config, "ssm_state_size", "mamba_d_state", "state_size")
    kernel = number(config, "conv_kernel", "mamba_d_conv")
    if not (heads and size and groups and states and kernel):
        return None
    row = (heads * size + 2 * groups * states) * element
    return (kernel - 1) * row + heads * size * states * recurrent, row


def _mamba1(config: Config, element: int, recurrent: int) -> State | None:
    states = number(config, "mamba_d_state", "state_size")
    kernel = number(config, "mamba_d_conv", "conv_kernel")
    hidden, expand = number(config, "hidden_size"), number(config, "mamba_expand", "expand")
    inner = hidden * expand if hidden and expand else number(config, "intermediate_size")
    if not (states and kernel and inner):
        return None
    return (kernel - 1) * inner * element + inner * states * recurrent, 0


def _other(config: Config, model_type: str, element: int) -> State | None:
    """LFM2's short convolutions, and MiniMax's linear attention."""
    if kernel := number(config, "conv_L_cache"):
        dim = number(config, "conv_dim", "hidden_size")
        return ((kernel - 1) * dim * element, 0) if dim else None
    heads, hidden = number(config, "num_attention_heads"), number(config, "hidden_size")
    if heads and hidden and model_type.startswith(("minimax", "bailing")):
        size = number(config, "head_dim") or hidden // heads
        return heads * size * size * element, 0
    return None


_TEXT_PARTS = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_OTHER_PARTS = (*VISION_PARTS, "img_processor", *AUDIO_PARTS)
_MLA = frozenset(
    {"axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots3_note", "deepseek_mtp"}
    | {"k3_dspark", "glm5_next", "glm5_next_text", "glm_moe_dsa", "glm4_moe_lite", "kimi_k2", "kimi_linear"}
    | {"longcat_flash", "pangu_ultra_moe", "bailing_hybrid", "hy_v4"}
)
"""Types for which vLLM uses multi-head latent attention. Others may have its config fields without using it."""

_REMOTE = frozenset(
    {"Keye", "KeyeVL", "MiniMaxText01", "NVLM_D", "NemotronH_Nano_VL_V2", "aquila", "arctic", "baichuan", "bailing_moe"}
    | {"exaone", "h2ovl_chat", "hunyuan", "internlm", "internlm2", "internlm3", "internvl_chat", "jais", "kimi_audio"}
    | {"minicpm", "minicpmo", "minicpmv", "minimax_text_01", "molmo", "nemotron-nas", "orion", "phi3_v", "phi3small"}
    | {"phi4flash", "phi4mm", "plamo", "plamo2", "qwen", "skywork", "skywork_chat", "telechat", "telechat2", "xverse"}
)
"""Types whose config class neither transformers nor vLLM has: they need remote code."""

_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
_EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_INTERMEDIATE = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "moe_intermediate_size")


def facts_from_config(model: str, config: Config, quant_config: Config | None = None) -> ModelFacts:
    """Read a ``config.json``; ``quant_config`` is the ``hf_quant_config.json`` beside it, as a fallback.

    Never raises: missing or invalid values are None, and ``missing`` names what a plan would need.
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
        tied=_tied(config, part, model_type),
        max_context=max_context(merged, model_type),
        stretched_context=max_context(merged, model_type, stretch_yarn=True),
        positions=_positions(merged),
        dtype=dtype,
        multimodal=part is not config or any(config.get(name) for name in _OTHER_PARTS),
        encoder=encoder_of(config, root_type or model_type),
        needs_remote_code=_needs_remote_code(config, root_type),
        own_draft=config.get("speculators_config") is not None,
    )
    facts = _with_heads(facts, merged, model_type)
    facts = _with_layers(facts, merged, model_type)
    facts = _with_experts(facts, merged)
    facts = replace(facts, counted=count_parameters(config, part, merged, replace(facts, model_type=model_type)))
    settings = _quantization_settings(config, part) or quant_config or {}
    facts = replace(facts, quantization=quantization(settings), kv_cache_quantization=kv_cache_quantization(settings))
    return replace(facts, missing=_missing(facts, model_type, merged))


def _text_part(config: Config) -> Config:
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
        kv_heads=kv_heads or _heads_of_blocks(config, heads) or (None if _states_kv_heads(config) else heads),
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
    """For models whose full-attention layers have other heads than the sliding ones: Gemma 4, MiMo V2."""
    if sliding := number(config, "swa_num_key_value_heads"):
        size = number(config, "swa_head_dim") or facts.head_dim
        return replace(
            facts, kv_heads=sliding, head_dim=size, full_kv_heads=facts.kv_heads, full_head_dim=facts.head_dim
        )
    if not model_type.startswith("gemma4"):
        return facts
    heads = number(config, "num_global_key_value_heads") if config.get("attention_k_eq_v", True) is not False else None
    return replace(facts, full_kv_heads=heads or facts.kv_heads, full_head_dim=number(config, "global_head_dim"))


def _states_kv_heads(config: Config) -> bool:
    """Whether the config has a number of KV heads, readable or not; without one, vLLM takes the attention heads."""
    return any(config.get(name) is not None for name in _KV_HEADS)


def _heads_of_blocks(config: Config, heads: int | None) -> int | None:
    """KV heads of Nemotron NAS models, whose blocks specify how many heads share keys and values."""
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
        window=sliding_window(config, model_type) if LayerKind.SLIDING in kinds else chunk,
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
        expert_hidden_size=number(config, "moe_latent_size"),
        expert_layers=sum(_has_experts(at, config) for at in range(len(facts.layers))) or None,
    )


def _quantization_settings(config: Config, part: Config) -> Config:
    names = ("quantization_config", "compression_config")
    return mapping(config, *names) or mapping(part, *names) or mapping(config, "quantization")  # the last is MLX's


def _needs_remote_code(config: Config, model_type: str) -> bool:
    """Whether it certainly cannot be loaded without ``--trust-remote-code``."""
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
    if facts.heads and facts.kv_heads is None:
        missing.append("number of KV heads (the config has none that can be read)")
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


# -- maximum request length by the model's config, derived as vLLM derives it -----------------------------------------


LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
"""Entries that limit a request's length; vLLM takes the smallest, or ``model_max_length``."""
_ALREADY_LONG = frozenset({"su", "longrope", "llama3", "deepseek_llama_scaling"})
"""Rotary scaling types whose factor is already included in the config's length."""


def max_context(config: Config, model_type: str, *, stretch_yarn: bool = False) -> int | None:
    """Tokens of prompt plus output, or None if the config does not specify it.

    The smallest of the known entries, times the rotary embedding's factor if vLLM applies it. With YaRN, the config's
    length is used unchanged since 0.30; ``stretch_yarn`` gives the original length times the factor, as before.
    """
    lengths = [length for name in LENGTHS if (length := number(config, name))]
    derived = number(config, "model_max_length") or (min(lengths) if lengths else None)
    if derived is None or "gemma3" in model_type:
        return derived
    stretched = derived
    for rope in _ropes(config):
        kind, times = text(rope, "rope_type", "type") or "", factor(rope, "factor")
        if times is None or kind in _ALREADY_LONG:
            continue
        if "yarn" in kind:
            original = number(rope, "original_max_position_embeddings")
            if stretch_yarn and kind == "yarn" and original:
                stretched = int(original * times)
        else:
            stretched = int(derived * times)
    return stretched


def _positions(config: Config) -> int | None:
    """``max_position_embeddings`` if it alone determines the longest context, else None."""
    positions = number(config, "max_position_embeddings")
    others = any(number(config, name) for name in LENGTHS if name != "max_position_embeddings")
    scaled = any(
        factor(rope, "factor") is not None and text(rope, "rope_type", "type") not in _ALREADY_LONG
        for rope in _ropes(config)
    )
    return None if others or scaled else positions


def _ropes(config: Config) -> Iterator[Config]:
    """Settings of the rotary embedding: one for all layers, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = mapping(config, name)
        nested = list(objects(settings))
        yield from nested or ([settings] if settings else [])


# -- how each layer of a model stores earlier tokens ------------------------------------------------------------------


MOST_LAYERS = 2000

_FULL, _SLIDING, _CHUNKED, _LINEAR, _NONE = (
    LayerKind.FULL,
    LayerKind.SLIDING,
    LayerKind.CHUNKED,
    LayerKind.LINEAR,
    LayerKind.NONE,
)
Kinds = tuple[LayerKind, ...]

_NAMED: dict[str, Kinds] = {
    **dict.fromkeys(("full_attention", "attention", "full", "global", "global_attention"), (_FULL,)),
    **dict.fromkeys(("sliding_attention", "sliding", "local", "local_attention", "sliding_window"), (_SLIDING,)),
    "chunked_attention": (_CHUNKED,),
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv", "linear", "recurrent"), (_LINEAR,)),
    **dict.fromkeys(("mlp", "moe", "none", "no_op"), (_NONE,)),
    "hybrid": (_LINEAR, _FULL),
}
"""A layer that has both a state and attention counts twice."""

_NEMOTRON_H = {"M": _LINEAR, "*": _FULL, "-": _NONE, "E": _NONE}
_ALL_LINEAR = frozenset({"mamba", "mamba2", "falcon_mamba"})
_WINDOW_ON_REQUEST = frozenset(
    {"qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"}
    | {"smollm3", "qwen3_vl", "qwen3_vl_text"}
)
"""Types whose config has a window that is only used with ``use_sliding_window``."""


def layer_kinds(config: Config, model_type: str, count: int | None) -> Kinds | None:
    """Return one entry per layer that uses cache memory, in order; None if the config does not specify it.

    ``config`` is the text part with its defaults, ``count`` its number of layers.
    """
    kinds = _stated(config, model_type, count)
    if kinds is None:
        if count is None or count > MOST_LAYERS:
            return None
        kinds = _derived(config, model_type, count)
    if sliding_window(config, model_type) is None:
        kinds = tuple(_FULL if kind is _SLIDING else kind for kind in kinds)
    if number(config, "attention_chunk_size") is None:
        kinds = tuple(_FULL if kind is _CHUNKED else kind for kind in kinds)
    shared = min(number(config, "num_kv_shared_layers") or 0, max(len(kinds) - 1, 0))
    return (*kinds[: len(kinds) - shared], *(_NONE for _ in range(shared)))


def sliding_window(config: Config, model_type: str) -> int | None:
    """Tokens in a sliding layer's window, or None if the model has no such layers."""
    wanted = config.get("use_sliding_window", model_type not in _WINDOW_ON_REQUEST)
    if wanted is False:
        return None
    size = number(config, "sliding_window", "sliding_window_size")
    if size is None:
        sizes = [entry for entry in _entries(config.get("sliding_window")) if type(entry) is int and entry > 0]
        size = sizes[0] if sizes else None
    # Cohere's layers see the token itself in addition to the window.
    return size + 1 if size is not None and model_type == "cohere2" else size


def _entries(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else ()


def _stated(config: Config, model_type: str, count: int | None) -> Kinds | None:
    """Kinds listed layer by layer in the config."""
    names = texts(config, "layers_block_type", "layer_types")
    if names and model_type == "zamba2":
        return _flat((_LINEAR, _FULL) if name == "hybrid" else (_LINEAR,) for name in names[:MOST_LAYERS])
    if names and all(name in _NAMED for name in names):
        names = names[: min(count or MOST_LAYERS, MOST_LAYERS)]  # layers of a draft head are at the end
        if count is None or len(names) == count:
            return _flat(_NAMED[name] for name in names)
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= set(_NEMOTRON_H):
        return tuple(_NEMOTRON_H[letter] for letter in pattern[:MOST_LAYERS])
    windows = config.get("sliding_window")
    if isinstance(windows, list) and windows and count is not None and count <= MOST_LAYERS:
        return tuple(_FULL if windows[index % len(windows)] is None else _SLIDING for index in range(count))
    for name, kinds in (("attn_type_list", (_LINEAR, _FULL)), ("hybrid_layer_pattern", (_FULL, _SLIDING))):
        values = whole_numbers(config, name)
        if values and set(values) <= {0, 1}:
            return tuple(kinds[value] for value in values[: min(count or MOST_LAYERS, MOST_LAYERS)])
    blocks = list(objects(config.get("block_configs")))
    if blocks and all(isinstance(block.get("attention"), dict) for block in blocks):
        kept = [mapping(block, "attention") for block in blocks[:MOST_LAYERS]]
        return tuple(_NONE if one.get("no_op") or one.get("replace_with_linear") else _FULL for one in kept)
    return None


def _flat(groups: Iterable[Kinds]) -> Kinds:
    return tuple(kind for group in groups for kind in group)


def _derived(config: Config, model_type: str, count: int) -> Kinds:
    """Layer kinds that follow from the model's type."""
    layers = range(count)
    if model_type in _ALL_LINEAR:
        return (_LINEAR,) * count
    if model_type == "falcon_h1":
        return (_LINEAR, _FULL) * count
    if model_type == "zamba2":
        attending = set(whole_numbers(config, "hybrid_layer_ids"))
        return _flat((_LINEAR, _FULL) if index in attending else (_LINEAR,) for index in layers)
    if attending := _attending(config, model_type, count):
        return tuple(_FULL if index in attending else _LINEAR for index in layers)
    if model_type in ("llama4", "llama4_text"):
        return _chunked(config, count)
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if isinstance(pattern, str) and pattern:
        marks = [_SLIDING if mark == "L" else _FULL for mark in pattern]
        kinds = [marks[index % len(marks)] for index in layers]
        return (*kinds[:-1], _FULL)
    if isinstance(pattern, int) and 0 < pattern <= MOST_LAYERS:
        kinds = [_SLIDING if (index + 1) % pattern else _FULL for index in layers]
        return (*kinds[:-1], _FULL) if model_type.startswith("gemma4") else tuple(kinds)
    first = number(config, "max_window_layers") if config.get("use_sliding_window") is True else None
    if sliding_window(config, model_type) is not None:
        return tuple(_SLIDING if index >= (first or 0) else _FULL for index in layers)
    return (_FULL,) * count


def _attending(config: Config, model_type: str, count: int) -> set[int]:
    """Indices of the attention layers in a model whose other layers have a state; empty for other models."""
    linear = mapping(config, "linear_attn_config")
    if linear:
        return {index - 1 for index in whole_numbers(linear, "full_attn_layers")}
    if model_type == "jamba":
        period, offset = number(config, "attn_layer_period"), config.get("attn_layer_offset")
        if period and isinstance(offset, int):
            return {index for index in range(count) if index % period == offset}
    interval = number(config, "full_attention_interval")
    if interval and factor(config, "linear_num_value_heads"):
        return {index for index in range(count) if (index + 1) % interval == 0}
    return set(whole_numbers(config, "attn_layer_indices", "full_attn_idxs"))


def _chunked(config: Config, count: int) -> Kinds:
    """Llama 4: layers without rotary embedding (0 in the list) attend to everything, the others to their chunk."""
    rope = whole_numbers(config, "no_rope_layers")
    if len(rope) == count:
        return tuple(_CHUNKED if used else _FULL for used in rope)
    interval = number(config, "no_rope_layer_interval") or 4
    return tuple(_CHUNKED if (index + 1) % interval else _FULL for index in range(count))


# -- how a checkpoint's weights are stored ----------------------------------------------------------------------------


_BITS = {
    "awq": 4,
    "fp8": 8,
    "fbgemm_fp8": 8,
    "ptpc_fp8": 8,
    "mxfp8": 8,
    "modelopt": 8,
    "modelopt_fp4": 4,
    "mxfp4": 4,
    "gpt_oss_mxfp4": 4,
    "experts_int8": 8,
}
"""Methods with a fixed number of bits; for ``gptq`` and ``bitsandbytes`` the config specifies it."""

_GROUPS = {"mxfp4": 32, "modelopt_fp4": 16, "mxfp8": 32, "gpt_oss_mxfp4": 32}
_MODELOPT = {"FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt", "FP8_PB_WO": "modelopt"} | {
    "NVFP4": "modelopt_fp4",
    "W4A16_NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    "MIXED_PRECISION": "modelopt_mixed",
}


def quantization(settings: Config) -> Quantization | None:
    """Read a ``quantization_config`` (or the ``hf_quant_config.json`` of Model Optimizer); None if it has none.

    ``method`` is vLLM's name, even if the config spells it differently.
    """
    if not settings:
        return None
    inner = mapping(settings, "quantization") or settings
    method = (text(settings, "quant_method") or "").lower().replace("compressed_tensors", "compressed-tensors")
    algorithm = (text(inner, "quant_algo") or "").upper()
    if algorithm in _MODELOPT and method in ("", "modelopt"):
        method = _MODELOPT[algorithm]
    if not method:
        method = "compressed-tensors" if "config_groups" in settings else ""
    if not method:
        method = UNKNOWN_FORMAT if number(settings, "bits") else ""
    if not method:
        return None
    groups = _group_weights(settings)
    bits = number(settings, "bits", "w_bit", "weight_bits") or number(groups, "num_bits") or _bits(settings, method)
    return Quantization(
        method,
        bits if bits is not None and bits <= 32 else None,
        _group_size(settings, inner, groups, method),
        _block(settings, groups),
        floating=method == "compressed-tensors" and bits == 8 and text(groups, "type") == "float",
        ordered=method == "gptq" and _ordered(settings),
        symmetric=method != "gptq" or settings.get("sym") is not False,
    )


def _ordered(settings: Config) -> bool:
    """Whether a module uses ``desc_act``, unless its groups are columns (``normalize_and_validate_gptq_desc_act``)."""
    rules = [one for name, one in mapping(settings, "dynamic").items() if not name.startswith("-:")]
    modules = [settings, *({**settings, **one} for one in rules if isinstance(one, dict))]
    return any(one.get("desc_act") is True and one.get("group_size") != -1 for one in modules)


def kv_cache_quantization(settings: Config) -> str | None:
    """The KV cache format that the checkpoint has scales for and vLLM reads from its config: ``fp8`` or None."""
    inner = mapping(settings, "quantization") or settings
    if (text(inner, "kv_cache_quant_algo") or "").upper() == "FP8":
        return "fp8"
    scheme = mapping(settings, "kv_cache_scheme")
    if number(scheme, "num_bits") == 8 and text(scheme, "type") == "float":
        return "fp8"
    return None


def _group_weights(settings: Config) -> Config:
    """Weights of the group with the fewest bits: in a mixed model, these are the linear layers.

    Without a group size if the groups have different ones, since it is unknown which layers have which.
    """
    found = [mapping(group, "weights") for group in objects(settings.get("config_groups"))]
    quark = mapping(mapping(settings, "global_quant_config"), "weight")
    if quark:
        kind = text(quark, "dtype") or ""
        size = 4 if "4" in kind.replace("e4m3", "") else 8
        return {"num_bits": size, "group_size": quark.get("group_size")}
    sized = [weights for weights in found if number(weights, "num_bits")]
    least = min(sized, key=lambda weights: number(weights, "num_bits") or 0) if sized else {}
    mixed = len({str(weights.get("group_size")) for weights in sized}) > 1
    return {name: value for name, value in least.items() if name != "group_size"} if mixed else least


def _bits(settings: Config, method: str) -> int | None:
    if method == "bitsandbytes":
        return 4 if settings.get("load_in_4bit") is True else 8 if settings.get("load_in_8bit") is True else None
    if method == "compressed-tensors":
        return _bits_of_format(text(settings, "format", "_format") or "")
    return _BITS.get(method)


def _bits_of_format(name: str) -> int | None:
    """Bits from the name of a compressed-tensors format, if the config lists no groups."""
    if "fp4" in name or "int4" in name or "w4" in name:
        return 4
    return 8 if "fp8" in name or "float-quantized" in name or "int-quantized" in name or "int8" in name else None


def _group_size(settings: Config, inner: Config, groups: Config, method: str) -> int | None:
    for source, name in ((settings, "group_size"), (settings, "q_group_size"), (groups, "group_size")):
        if source.get(name) == -1:
            return -1
        if size := number(source, name):
            return size
    return number(inner, "group_size") or _GROUPS.get(method)


def _block(settings: Config, groups: Config) -> tuple[int, int] | None:
    sizes = whole_numbers(settings, "weight_block_size") or whole_numbers(groups, "block_structure")
    return (sizes[0], sizes[1]) if len(sizes) == 2 and min(sizes) > 0 else None


_TWO_MATRICES = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "opt", "phi", "starcoder2", "RefinedWebModel"}
)
"""Types whose feed-forward network has no gate."""
_TIED = frozenset(
    {"bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"}
    | {"gemma4", "gemma4_text", "gpt2", "gpt_bigcode", "mpt", "opt", "starcoder2"}
)
"""Types that tie the output layer to the embedding by default."""
_GATED_DELTA = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"})
_BIASED = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"})
_FOUR_NORMS = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "olmo2", "olmo3"})
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")


def count_parameters(config: Config, part: Config, merged: Config, facts: ModelFacts) -> int | None:
    """Count a model's parameters; None if unknown. ``part`` is its text config as written, ``merged`` has defaults."""
    kind = facts.model_type or ""
    written = number(part, "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", *_EXPERT_WIDTH)
    if not (facts.hidden_size and facts.layers and facts.vocabulary and written):
        return None
    total = facts.vocabulary * facts.hidden_size * (1 if facts.tied else 2) + facts.hidden_size
    for at, layer in enumerate(facts.layers):
        mixer = _mixer(facts, layer, merged, kind)
        network = _network(facts, at, merged, kind)
        if mixer is None or network is None:
            return None
        total += mixer + network + (4 if kind in _FOUR_NORMS else 2) * facts.hidden_size
    return total + sum(_tower(mapping(config, name), facts.hidden_size) for name in VISION_PARTS)


def _tied(config: Config, part: Config, kind: str) -> bool:
    return part.get("tie_word_embeddings", config.get("tie_word_embeddings", kind in _TIED)) is not False


def _mixer(facts: ModelFacts, layer: LayerKind, config: Config, kind: str) -> int | None:
    """Parameters of a layer's attention, or its replacement; None if unknown."""
    hidden = facts.hidden_size or 0
    if layer is LayerKind.NONE:
        return 0
    if layer is LayerKind.LINEAR:
        return _delta_net_weights(config, hidden) if kind in _GATED_DELTA else None
    if facts.kv_lora_rank is not None:
        return _latent(facts, config, hidden)
    full = layer is LayerKind.FULL and LayerKind.SLIDING in facts.layers
    kv_heads = (facts.full_kv_heads if full else None) or facts.kv_heads
    size = (facts.full_head_dim if full else None) or facts.head_dim
    if not facts.heads or not kv_heads or not size:
        return None
    queries = 2 * facts.heads if kind in _GATED_DELTA else facts.heads  # each query head has an output gate
    found = hidden * size * (queries + facts.heads + 2 * kv_heads)
    if kind in _BIASED:
        found += size * (facts.heads + 2 * kv_heads)
    return found + (2 * size if kind.startswith(("qwen3", "gemma3", "gemma4")) else 0)


def _latent(facts: ModelFacts, config: Config, hidden: int) -> int | None:
    """Parameters of multi-head latent attention (DeepSeek)."""
    rank, rope, nope = facts.kv_lora_rank or 0, facts.qk_rope_head_dim or 0, number(config, "qk_nope_head_dim")
    value, heads = facts.v_head_dim, facts.heads
    if not nope or not value or not heads:
        return None
    low = number(config, "q_lora_rank")
    queries = hidden * low + low * heads * (nope + rope) if low else hidden * heads * (nope + rope)
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _delta_net_weights(config: Config, hidden: int) -> int | None:
    """Parameters of a gated delta net (Qwen3-Next and later)."""
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
    if every := number(config, "expert_layer_period"):  # Jamba
        return at % every == (number(config, "expert_layer_offset") or 0)
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
    inner = inner_width(config, wide)
    gates = 3 if config.get("hidden_act") == "silu" else 2
    merged = wide * (number(config, "spatial_merge_size") or 1) ** 2
    patch = (number(config, "patch_size") or 14) ** 2 * 3 * (number(config, "temporal_patch_size") or 1)
    return depth * (4 * wide * wide + gates * wide * inner) + merged * (merged + hidden) + patch * wide

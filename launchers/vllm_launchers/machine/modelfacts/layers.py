"""How each layer of a model remembers earlier tokens, read from its config as vLLM's model classes read it."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_launchers.machine.modelfacts.model import LayerKind
from vllm_launchers.machine.modelfacts.values import Config, factor, mapping, number, objects, texts, whole_numbers

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
"""Types whose config has a window that is used only with ``use_sliding_window``."""


def layer_kinds(config: Config, model_type: str, count: int | None) -> Kinds | None:
    """Return one entry per layer that counts in memory, in order; None when the config does not tell.

    ``config`` is the text part with its defaults, ``count`` its number of layers.
    """
    kinds = _stated(config, model_type, count)
    if kinds is None:
        if count is None or count > MOST_LAYERS:
            return None
        kinds = _derived(config, model_type, count)
    if window(config, model_type) is None:
        kinds = tuple(_FULL if kind is _SLIDING else kind for kind in kinds)
    if number(config, "attention_chunk_size") is None:
        kinds = tuple(_FULL if kind is _CHUNKED else kind for kind in kinds)
    shared = min(number(config, "num_kv_shared_layers") or 0, max(len(kinds) - 1, 0))
    return (*kinds[: len(kinds) - shared], *(_NONE for _ in range(shared)))


def window(config: Config, model_type: str) -> int | None:
    """Tokens that a sliding layer looks back over, or None when the model has no such layers."""
    wanted = config.get("use_sliding_window", model_type not in _WINDOW_ON_REQUEST)
    if wanted is False:
        return None
    size = number(config, "sliding_window", "sliding_window_size")
    if size is None:
        sizes = [entry for entry in _entries(config.get("sliding_window")) if type(entry) is int and entry > 0]
        size = sizes[0] if sizes else None
    # Cohere's layers see the token itself besides the window.
    return size + 1 if size is not None and model_type == "cohere2" else size


def _entries(value: object) -> Iterable[object]:
    return value if isinstance(value, list) else ()


def _stated(config: Config, model_type: str, count: int | None) -> Kinds | None:
    """Kinds that the config lists layer by layer."""
    names = texts(config, "layers_block_type", "layer_types")
    if names and model_type == "zamba2":
        return _flat((_LINEAR, _FULL) if name == "hybrid" else (_LINEAR,) for name in names[:MOST_LAYERS])
    if names and all(name in _NAMED for name in names):
        names = names[: min(count or MOST_LAYERS, MOST_LAYERS)]  # layers of a draft head stand at the end
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
    """Kinds that follow from a rule of the model's type."""
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
    if window(config, model_type) is not None:
        return tuple(_SLIDING if index >= (first or 0) else _FULL for index in layers)
    return (_FULL,) * count


def _attending(config: Config, model_type: str, count: int) -> set[int]:
    """Numbers of the layers with attention in a model whose other layers have a state; empty for other models."""
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
    """Llama 4: layers without rotary embedding (0 in the list) look at everything, the others at their chunk."""
    rope = whole_numbers(config, "no_rope_layers")
    if len(rope) == count:
        return tuple(_CHUNKED if used else _FULL for used in rope)
    interval = number(config, "no_rope_layer_interval") or 4
    return tuple(_CHUNKED if (index + 1) % interval else _FULL for index in range(count))

"""The state that a layer without attention keeps per request, as vLLM's Mamba state calculators shape it."""

from __future__ import annotations

from vllm_launchers.machine.modelfacts.values import Config, mapping, number, text

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "half": 2, "float": 4}
"""Of one number of these types."""

State = tuple[int, int]
"""Bytes per layer and request without speculation, and what each speculative token adds."""


def state_bytes(config: Config, model_type: str, dtype: str | None) -> State | None:
    """Return the size of one linear layer's state before any split over GPUs, or None when the config does not tell.

    ``config`` is the text part with its defaults. The short convolution keeps ``kernel - 1`` rows in the model's type;
    the recurrent state is kept in the type that the config names, float32 for Nemotron-H and Kimi Linear.
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

"""Config values that default to those of a model's class in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_launchers.vllm.modelfacts.values import Config

SHAPE = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Columns of the table of shapes, by their names in configs."""

_SHAPES: Mapping[str, tuple[int | None, ...]] = {
    "cohere": (40, 64, None, None, 8192, 22528, 256000, 8192),
    "cohere2": (40, 64, None, None, 8192, 22528, 256000, 8192),
    "exaone4": (32, 32, 32, None, 4096, 16384, 102400, 2048),
    "gemma": (28, 16, 16, 256, 3072, 24576, 256000, 8192),
    "gemma2": (26, 8, 4, 256, 2304, 9216, 256000, 8192),
    "gemma3_text": (26, 8, 4, 256, 2304, 9216, 262208, 131072),
    "gemma3n_text": (35, 8, 2, 256, 2048, 16384, 262400, 32768),
    "gemma4_text": (30, 8, 4, 256, 2304, 9216, 262144, 131072),
    "gpt_oss": (36, 64, 8, 64, 2880, 2880, 201088, 131072),
    "granite": (32, 32, None, None, 4096, 11008, 32000, 2048),
    "jamba": (32, 32, 8, None, 4096, 14336, 65536, 262144),
    "llama": (32, 32, None, None, 4096, 11008, 32000, 2048),
    "llama4_text": (48, 40, 8, 128, 5120, 8192, 202048, 131072),
    "mistral": (32, 32, 8, None, 4096, 14336, 32000, 131072),
    "mixtral": (32, 32, 8, None, 4096, 14336, 32000, 131072),
    "mllama_text_model": (40, 32, 8, None, 4096, 14336, 128256, 131072),
    "olmo3": (32, 32, None, None, 4096, 11008, 50304, 2048),
    "phi3": (32, 32, None, None, 3072, 8192, 32064, 4096),
    "qwen2": (32, 32, 32, None, 4096, 22016, 151936, 32768),
    "qwen3": (32, 32, 32, 128, 4096, 22016, 151936, 32768),
    "qwen3_moe": (24, 32, 4, None, 2048, 6144, 151936, 32768),
    "qwen3_next": (48, 16, 2, 256, 2048, 5632, 151936, 32768),
    "qwen3_5_text": (32, 16, 4, 256, 4096, 12288, 248320, 32768),
    "qwen3_5_moe_text": (40, 16, 2, 256, 2048, None, 248320, 32768),
    "qwen3_vl_text": (32, 32, 32, 128, 4096, 22016, 151936, 128000),
    "starcoder2": (30, 24, 2, None, 3072, 12288, 49152, 4096),
}

_DELTA_NET = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}

_MORE: Mapping[str, Mapping[str, Any]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "deepseek_v2": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {"sliding_window": 4096, "sliding_window_pattern": 6},
    "gemma3n_text": {"sliding_window": 512, "sliding_window_pattern": 5, "num_kv_shared_layers": 15},
    "gemma4_text": {"sliding_window": 512, "sliding_window_pattern": 6, "global_head_dim": 512},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2, "num_local_experts": 128, "num_experts_per_tok": 4},
    "jamba": {"attn_layer_period": 8, "attn_layer_offset": 4, "num_experts": 16, "num_experts_per_tok": 2}
    | {"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4}
    | {"num_local_experts": 16, "num_experts_per_tok": 1},
    "ministral": {"sliding_window": 4096},
    "mistral": {"sliding_window": 4096},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8},
    "qwen3_next": {**_DELTA_NET, "num_experts": 512, "num_experts_per_tok": 10},
    # every published checkpoint of this family asks for states in float32
    "qwen3_5_text": {**_DELTA_NET, "mamba_ssm_dtype": "float32"},
    "qwen3_5_moe_text": {**_DELTA_NET, "mamba_ssm_dtype": "float32", "num_experts": 256, "num_experts_per_tok": 8},
}

_SAME = {
    "exaone_moe": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "llama4": "llama4_text",
    "mllama": "mllama_text_model",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "llava": "llama",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "kimi_k2": "deepseek_v3",
    "deepseek_v32": "deepseek_v3",
    "RefinedWebModel": "falcon",
}
"""Types that have the defaults of another type."""


def with_defaults(config: Config, model_type: str | None) -> Config:
    """Return the text part of a config with its class's defaults; a null entry stays null, as in transformers."""
    kind = _SAME.get(model_type or "", model_type or "")
    shape = {name: value for name, value in zip(SHAPE, _SHAPES.get(kind, ()), strict=False) if value is not None}
    return {**shape, **_MORE.get(kind, {}), **config}

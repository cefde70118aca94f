"""Mistral's own ``params.json``, put into the words of a ``config.json`` as vLLM does it."""

from __future__ import annotations

from typing import Any

from vllm_launchers.machine.modelfacts.values import Config, mapping, number

_NAMES = {
    "dim": "hidden_size",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}
_LENGTH = 128_000
"""Tokens that vLLM takes where the file says nothing."""


def config_from_params(params: Config) -> Config:
    """Translate a ``params.json``; whatever is unknown stays as it is."""
    config: dict[str, Any] = {_NAMES.get(name, name): value for name, value in params.items()}
    config.setdefault("max_position_embeddings", number(params, "max_seq_len") or _LENGTH)
    config.setdefault("sliding_window", None)
    config.setdefault("dtype", "bfloat16")
    moe = mapping(params, "moe")
    config.update({name: moe[name] for name in ("num_experts", "num_experts_per_tok") if name in moe})
    config["model_type"] = "deepseek_v3" if number(params, "kv_lora_rank") else "mixtral" if moe else "mistral"
    config["architectures"] = [_architecture(config, moe, params)]
    if yarn := mapping(params, "yarn"):
        config["rope_parameters"] = {"rope_type": "yarn", **yarn}
    settings = mapping(params, "quantization")
    if settings.get("qformat_weight") == "fp8_e4m3":
        config["quantization_config"] = {"quant_method": "fp8"}
    elif settings:
        config["quantization_config"] = settings
    vision = mapping(mapping(params, "multimodal"), "vision_encoder_args") or mapping(params, "vision_encoder")
    return {**config, "vision_config": vision} if vision else config


def _architecture(config: Config, moe: Config, params: Config) -> str:
    if mapping(params, "vision_encoder") or mapping(mapping(params, "multimodal"), "vision_encoder_args"):
        return "PixtralForConditionalGeneration"
    if config["model_type"] == "deepseek_v3":
        return "MistralLarge3ForCausalLM"
    return "MixtralForCausalLM" if moe else "MistralForCausalLM"

"""Checks a model's folder before a launch: vLLM's own error for a wrong one takes 7 s and misleads."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from vllm_launchers.vllm.modelfacts.values import Config, mapping, number

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(?:/[\w.-]{1,96})?")
REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")
CONFIGS = ("config.json", "params.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")


def model_folder_problem(model: str) -> str | None:
    """What is wrong with a model given as a folder, in one sentence, or None.

    Hub ids (``org/name``) and remote addresses are accepted: whether they exist is unknown here.
    """
    if REMOTE.match(model):
        return None
    if model.startswith("~"):
        return f"model {model}: write the whole path, the server does not know '~': {_expanded(model)}"
    path = Path(model)
    try:
        return _relative_problem(model, path) if not path.is_absolute() else _folder_problem(path)
    except OSError as error:
        return f"model {model}: cannot be read: {os.strerror(error.errno or 0)}"


def _relative_problem(model: str, path: Path) -> str | None:
    if not model.startswith(".") and not path.is_dir() and HUB_ID.fullmatch(model):
        return None
    if path.exists() and not HUB_ID.fullmatch(model):
        return f"model {model}: write the whole path, the server runs in another folder: {path.absolute()}"
    if not path.exists():
        return f"model {model}: is neither a folder here nor a hub id such as Qwen/Qwen3-8B-AWQ"
    return _folder_problem(path)


def _folder_problem(path: Path) -> str | None:
    if not path.exists():
        return f"model {path}: there is no such folder; give a folder with a config.json, or a hub id (org/name)"
    if path.is_file():
        if path.suffix == ".gguf":
            return None
        return f"model {path}: is a file; give the folder that holds its config.json"
    names = [entry.name for entry in path.iterdir()]
    if not any(name in CONFIGS for name in names):
        inside = next((name for name in sorted(names) if (path / name / "config.json").is_file()), None)
        hint = f"; did you mean {path / inside}?" if inside else ""
        return f"model {path}: is not a model folder: it holds no config.json{hint}"
    if not any(name.endswith(WEIGHTS) for name in names):
        return f"model {path}: holds no weights ({', '.join(WEIGHTS[:2])}, …); was its download cut off?"
    return None


def _expanded(model: str) -> str:
    try:
        return str(Path(model).expanduser())
    except RuntimeError:
        return "/…"


# -- Mistral's own ``params.json`` ------------------------------------------------------------------------------------


_NAMES = {
    "dim": "hidden_size",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
}
_LENGTH = 128_000
"""Tokens that vLLM assumes if the file has no value."""


def config_from_params(params: Config) -> Config:
    """Translate a ``params.json``; unknown keys stay unchanged."""
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

"""Checks folders of models and LoRA adapters before a launch: vLLM's own error takes 7 s and is misleading."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from vllm_launchers.errors import UsageError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.vllm.modelfacts.values import Config, mapping, number

HUB_ID = lazy_pattern(r"[A-Za-z0-9][\w.-]{0,95}(?:/[\w.-]{1,96})?")
REMOTE = lazy_pattern(r"[a-z][a-z0-9+.-]*://")
CONFIGS = ("config.json", "params.json")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")


def model_folder_problem(model: str) -> str | None:
    """What is wrong with a model given as a folder, in one sentence, or None.

    Hub ids (``org/name``) and remote addresses are accepted without checking whether they exist.
    """
    if REMOTE.match(model):
        return None
    if model.startswith("~"):
        return f"model {model}: write the whole path, the server does not know '~': {_expanded(model)}"
    path = Path(model)
    try:
        return _relative_problem(model, path) if not path.is_absolute() else _folder_problem(path)
    except OSError as error:
        return f"model {model}: can't be read: {os.strerror(error.errno or 0)}"


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
        return f"model {path}: has no weights ({', '.join(WEIGHTS[:2])}, …); was its download cut off?"
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
"""Context length that vLLM assumes if the file has none."""


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


RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""Environment variable that enables a server's routes to load and unload adapters."""
CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for ``--max-lora-rank``."""


def updates_adapters(environment: Mapping[str, str]) -> bool:
    """Whether vLLM enables these routes with these variables."""
    return environment.get(RUNTIME_LORA, "0").strip().lower() in ("1", "true")


class AdapterError(UsageError):
    """A folder has no adapter that vLLM can load; the message is one sentence."""


class _Config(msgspec.Struct, frozen=True):
    r: int = 0
    rank_pattern: dict[str, int] | None = None
    base_model_name_or_path: str | None = None
    use_dora: bool | None = None


class AdapterFolder(msgspec.Struct, frozen=True):
    """An adapter on disk: its highest rank, the size of its weights in bytes, and the model it was trained on."""

    path: Path
    rank: int
    size: int
    base_model: str

    @property
    def needed_rank(self) -> int | None:
        """The smallest ``--max-lora-rank`` that this adapter fits; None if there is none."""
        return next((rank for rank in RANKS if rank >= self.rank), None)


def read_adapter(path: Path) -> AdapterFolder:
    """Read an adapter's folder.

    Raises:
        AdapterError: there is no such folder, it has no adapter, or vLLM cannot load it.
    """
    try:
        config = msgspec.json.decode((path / CONFIG).read_bytes(), type=_Config)
        size = next(((path / name).stat().st_size for name in ADAPTER_WEIGHTS if (path / name).is_file()), None)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterError(f"{path} is not an adapter: it has no {CONFIG}") from None
    except (OSError, UnicodeEncodeError) as error:
        raise AdapterError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{path / CONFIG} is not an adapter's configuration: {error}") from error
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank < 1:
        raise AdapterError(f"{path / CONFIG} has no rank (r): is it a LoRA adapter?")
    if config.use_dora:
        raise AdapterError(f"{path} is a DoRA adapter, which vLLM does not support")
    if size is None:
        raise AdapterError(f"{path} has no weights ({', '.join(ADAPTER_WEIGHTS)}); was its download cut off?")
    return AdapterFolder(path, rank, size, config.base_model_name_or_path or "")

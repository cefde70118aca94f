"""LoRA adapters: what a folder says, read before vLLM does, and whether a server loads them while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

RUNTIME_LORA = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""The variable that gives a server its routes to load and unload adapters."""
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for ``--max-lora-rank``."""


def updates_adapters(environment: Mapping[str, str]) -> bool:
    """Whether a server with these variables has the routes, as vLLM reads them."""
    return environment.get(RUNTIME_LORA, "0").strip().lower() in ("1", "true")


class AdapterError(ValueError):
    """A folder holds no adapter that vLLM can load; the message is one sentence."""


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
        """The smallest ``--max-lora-rank`` for it; None if there is none."""
        return next((rank for rank in RANKS if rank >= self.rank), None)


def read_adapter(path: Path) -> AdapterFolder:
    """Read a folder.

    Raises:
        AdapterError: it is none, holds no adapter, or one that no vLLM can load.
    """
    try:
        config = msgspec.json.decode((path / CONFIG).read_bytes(), type=_Config)
        size = next(((path / name).stat().st_size for name in WEIGHTS if (path / name).is_file()), None)
    except (FileNotFoundError, NotADirectoryError):
        raise AdapterError(f"{path} holds no adapter: there is no {CONFIG}") from None
    except (OSError, UnicodeEncodeError) as error:
        raise AdapterError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterError(f"{path / CONFIG} is no adapter's configuration: {error}") from error
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    if rank < 1:
        raise AdapterError(f"{path / CONFIG} names no rank (r): is it a LoRA adapter?")
    if config.use_dora:
        raise AdapterError(f"{path} is a DoRA adapter, which vLLM does not support")
    if size is None:
        raise AdapterError(f"{path} holds no weights ({', '.join(WEIGHTS)}); was its download cut off?")
    return AdapterFolder(path, rank, size, config.base_model_name_or_path or "")

"""Generated model folders and caches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

Files = Mapping[str, bytes | str | dict[str, Any]]


class Maker:
    """Creates model folders below ``root``; its cache is ``root/hub``."""

    config: Mapping[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
    }
    commit = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, name: str, files: Files) -> Path:
        """Write files: bytes and text unchanged, objects as JSON."""
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        for one, content in files.items():
            if isinstance(content, Mapping):
                content = json.dumps(content)
            (folder / one).write_bytes(content.encode() if isinstance(content, str) else content)
        return folder

    def cached(self, model: str, files: Files, hub: str = "hub") -> Path:
        """Add files of a model to a Hugging Face cache, linked like the hub's tools do; existing files stay."""
        name = f"{hub}/models--{model.replace('/', '--')}"
        self.folder(f"{name}/blobs", {f"blob-{one}": content for one, content in files.items()})
        snapshot = self.folder(f"{name}/snapshots/{self.commit}", {})
        for one in files:
            (snapshot / one).symlink_to(f"../../blobs/blob-{one}")
        self.folder(f"{name}/refs", {"main": self.commit})
        return self.root / name

    @staticmethod
    def safetensors(tensors: Mapping[str, tuple[str, int]]) -> bytes:
        """A file with these tensors (name to type and bytes) in the safetensors format."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (kind, size) in tensors.items():
            header[name] = {"dtype": kind, "shape": [size], "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + bytes(end)

    @staticmethod
    def index(count: int, total: int) -> dict[str, Any]:
        """An index of this many shards with this total size in bytes."""
        names = {f"layer.{one}": f"model-{one:05d}-of-{count:05d}.safetensors" for one in range(1, count + 1)}
        return {"metadata": {"total_size": total}, "weight_map": names}


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    return Maker(tmp_path)

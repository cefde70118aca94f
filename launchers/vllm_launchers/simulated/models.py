"""What a model is made of: a table of well-known ones, a local folder's ``config.json``, or a guess from its name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


class ModelNotFoundError(Exception):
    """The model is neither known, nor a local folder, nor named in a way that tells its size."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """A decoder's shape. ``parameters`` counts all weights, ``active`` those that one token passes through.

    ``quantization`` is the checkpoint's method (``awq``, ``fp8``, …) or None; ``weight_bytes`` is what all weights take
    in memory on one GPU; ``note`` says where the figures come from when that is not obvious.
    """

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_len: int
    parameters: float
    active: float
    weight_bytes: float
    quantization: str | None = None
    note: str = ""

    def kv_bytes_per_token(self, element_bytes: int, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> float:
        """Bytes of keys and values per token on one GPU: 2 · max(1, kv_heads // TP) · head_dim · bytes · layers/PP."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * heads * self.head_dim * element_bytes * math.ceil(self.layers / pipeline_parallel)


@dataclass(frozen=True, slots=True)
class _Shape:
    """A row of the table. ``experts`` is (how many, how many a token uses, their intermediate size)."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    max_len: int
    tied: bool = False
    experts: tuple[int, int, int] | None = None


_QWEN2, _QWEN3, _LLAMA = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"
_QWEN3_MOE, _MISTRAL, _MIXTRAL = "Qwen3MoeForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"

_SHAPES: dict[str, _Shape] = {
    "qwen2.5-0.5b": _Shape(_QWEN2, 24, 14, 2, 64, 896, 4864, 151936, 32768, tied=True),
    "qwen2.5-1.5b": _Shape(_QWEN2, 28, 12, 2, 128, 1536, 8960, 151936, 32768, tied=True),
    "qwen2.5-3b": _Shape(_QWEN2, 36, 16, 2, 128, 2048, 11008, 151936, 32768, tied=True),
    "qwen2.5-7b": _Shape(_QWEN2, 28, 28, 4, 128, 3584, 18944, 152064, 32768),
    "qwen2.5-14b": _Shape(_QWEN2, 48, 40, 8, 128, 5120, 13824, 152064, 32768),
    "qwen2.5-32b": _Shape(_QWEN2, 64, 40, 8, 128, 5120, 27648, 152064, 32768),
    "qwen2.5-72b": _Shape(_QWEN2, 80, 64, 8, 128, 8192, 29568, 152064, 32768),
    "qwen3-0.6b": _Shape(_QWEN3, 28, 16, 8, 128, 1024, 3072, 151936, 40960, tied=True),
    "qwen3-1.7b": _Shape(_QWEN3, 28, 16, 8, 128, 2048, 6144, 151936, 40960, tied=True),
    "qwen3-4b": _Shape(_QWEN3, 36, 32, 8, 128, 2560, 9728, 151936, 40960, tied=True),
    "qwen3-4b-2507": _Shape(_QWEN3, 36, 32, 8, 128, 2560, 9728, 151936, 262144, tied=True),
    "qwen3-8b": _Shape(_QWEN3, 36, 32, 8, 128, 4096, 12288, 151936, 40960),
    "qwen3-14b": _Shape(_QWEN3, 40, 40, 8, 128, 5120, 17408, 151936, 40960),
    "qwen3-32b": _Shape(_QWEN3, 64, 64, 8, 128, 5120, 25600, 151936, 40960),
    "qwen3-30b-a3b": _Shape(_QWEN3_MOE, 48, 32, 4, 128, 2048, 6144, 151936, 40960, experts=(128, 8, 768)),
    "qwen3-30b-a3b-2507": _Shape(_QWEN3_MOE, 48, 32, 4, 128, 2048, 6144, 151936, 262144, experts=(128, 8, 768)),
    "llama-3-8b": _Shape(_LLAMA, 32, 32, 8, 128, 4096, 14336, 128256, 8192),
    "llama-3.1-8b": _Shape(_LLAMA, 32, 32, 8, 128, 4096, 14336, 128256, 131072),
    "llama-3.1-70b": _Shape(_LLAMA, 80, 64, 8, 128, 8192, 28672, 128256, 131072),
    "llama-3.3-70b": _Shape(_LLAMA, 80, 64, 8, 128, 8192, 28672, 128256, 131072),
    "llama-3.2-1b": _Shape(_LLAMA, 16, 32, 8, 64, 2048, 8192, 128256, 131072, tied=True),
    "llama-3.2-3b": _Shape(_LLAMA, 28, 24, 8, 128, 3072, 8192, 128256, 131072, tied=True),
    "tinyllama-1.1b": _Shape(_LLAMA, 22, 32, 4, 64, 2048, 5632, 32000, 2048),
    "mistral-7b": _Shape(_MISTRAL, 32, 32, 8, 128, 4096, 14336, 32768, 32768),
    "mixtral-8x7b": _Shape(_MIXTRAL, 32, 32, 8, 128, 4096, 14336, 32000, 32768, experts=(8, 2, 14336)),
    "simulated-tiny": _Shape(_LLAMA, 4, 4, 2, 32, 128, 384, 4096, 4096, tied=True),
}

_QUANTIZED: tuple[tuple[str, str, float], ...] = (
    ("awq", "awq", 4.25),
    ("gptq-int4", "gptq", 4.25),
    ("gptq-int8", "gptq", 8.25),
    ("gptq", "gptq", 4.25),
    ("w4a16", "compressed-tensors", 4.25),
    ("w8a8", "compressed-tensors", 8.0),
    ("w8a16", "compressed-tensors", 8.25),
    ("fp8-dynamic", "compressed-tensors", 8.0),
    ("fp8", "fp8", 8.0),
    ("int4", "compressed-tensors", 4.25),
)
"""What stands in a name, the method it means, and bits per weight with scales."""

_FILLER = re.compile(r"-(instruct|chat|base|it|hf|coder|thinking|v\d+(\.\d+)?)(?=-|$)")
_SIZE = re.compile(r"(?<![\w.])(?:(\d+)x)?(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])", re.IGNORECASE)


def resolve_model(name: str) -> Geometry:
    """Find a model's geometry by hub id or folder.

    A folder is read; a known name is looked up, whoever published it; an unknown hub id whose name carries a size is
    given a Llama's proportions at that size. Raises :class:`ModelNotFoundError`, in vLLM's own words where it has any.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_folder(name, folder)
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or not re.fullmatch(r"[\w.\-]+/[\w.\-]+", name):
        raise ModelNotFoundError(
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': {name!r}. "
            "Use `repo_type` argument if needed."
        )
    base, method, bits = _split_quantization(name.rsplit("/", 1)[1].lower())
    shape = _SHAPES.get(_key(base))
    if shape is not None:
        return _from_shape(name, shape, method, bits)
    size = _size_in(base)
    if size is None:
        raise ModelNotFoundError(
            f"The simulated engine knows no model {name!r}, and its name tells no size as '-7B' does. "
            "Give a folder with a config.json, or a well-known model."
        )
    return replace(
        _from_shape(name, _interpolated(size), method, bits),
        note=f"geometry interpolated from the {size / 1e9:g}B in the name",
    )


def quantized_in_flight(model: Geometry, method: str) -> Geometry:
    """Return a 16-bit ``model`` as vLLM holds it when it quantizes the layers to 8 bits while loading."""
    embeddings = 2 * model.vocabulary * model.hidden
    return replace(model, quantization=method, weight_bytes=(model.weight_bytes + embeddings) / 2)


def _split_quantization(base: str) -> tuple[str, str | None, float]:
    for mark, method, bits in _QUANTIZED:
        found = re.search(rf"[-_.]{re.escape(mark)}(?=[-_.]|$)", base)
        if found:
            return base[: found.start()] + base[found.end() :], method, bits
    return base, None, 16.0


def _key(base: str) -> str:
    key = _FILLER.sub("", base.removeprefix("meta-").replace("_", "-"))
    return _FILLER.sub("", key)


def _size_in(base: str) -> float | None:
    found = _SIZE.search(base)
    if found is None:
        return None
    scale = 1e9 if found[3].lower() == "b" else 1e6
    return float(found[1] or 1) * float(found[2]) * scale


def _counts(shape: _Shape) -> tuple[float, float]:
    """All parameters and those active per token, embeddings included."""
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    if shape.experts is None:
        every = used = 3.0 * shape.hidden * shape.intermediate
    else:
        total, chosen, width = shape.experts
        every, used = (3.0 * shape.hidden * width * count for count in (total, chosen))
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * (attention + every) + embeddings, shape.layers * (attention + used) + embeddings


def _from_shape(name: str, shape: _Shape, method: str | None, bits: float) -> Geometry:
    parameters, active = _counts(shape)
    embeddings = shape.vocabulary * shape.hidden * (1 if shape.tied else 2)
    return Geometry(
        name=name,
        architecture=shape.architecture,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        max_len=shape.max_len,
        parameters=parameters,
        active=active,
        weight_bytes=(parameters - embeddings) * bits / 8 + embeddings * 2,
        quantization=method,
    )


def _interpolated(size: float) -> _Shape:
    """A Llama-like shape of about ``size`` parameters: layers and width grow with its cube root."""
    ratio = (size / 8.03e9) ** (1 / 3)
    heads = max(4, round(32 * ratio / 4) * 4)
    hidden = heads * 128
    kv_heads = 8 if heads % 8 == 0 else 4
    layers = max(4, round(32 * ratio))
    vocabulary, tied = (128256, False) if size >= 2e9 else (32000, True)
    attention = hidden * 128 * (2 * heads + 2 * kv_heads)
    left = (size - vocabulary * hidden * (1 if tied else 2)) / layers - attention
    intermediate = max(hidden, round(left / (3 * hidden)))
    return _Shape(_LLAMA, layers, heads, kv_heads, 128, hidden, intermediate, vocabulary, 32768, tied)


def _from_folder(name: str, folder: Path) -> Geometry:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        shape, method, bits = _shape_of(config.get("text_config") or config), *_quantization_of(config)
    except FileNotFoundError:
        raise ModelNotFoundError(
            f"Invalid repository ID or local directory specified: {name!r}. There is no config.json in it."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelNotFoundError(f"{path} is not a decoder's configuration: {error!r}") from error
    geometry = _from_shape(name, shape, method, bits)
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    architectures = config.get("architectures") or [shape.architecture]
    return replace(
        geometry, architecture=str(architectures[0]), weight_bytes=float(sum(sizes)) or geometry.weight_bytes
    )


def _shape_of(config: Mapping[str, Any]) -> _Shape:
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    intermediate = int(config.get("intermediate_size") or 4 * hidden)
    count = config.get("num_experts") or config.get("num_local_experts")
    experts = None
    if count:
        width = int(config.get("moe_intermediate_size") or intermediate)
        experts = (int(count), int(config.get("num_experts_per_tok") or 2), width)
    return _Shape(
        architecture=_LLAMA,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=int(config.get("vocab_size") or 32000),
        max_len=int(config.get("max_position_embeddings") or 2048),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
    )


def _quantization_of(config: Mapping[str, Any]) -> tuple[str | None, float]:
    section = config.get("quantization_config")
    if not section:
        return None, 16.0
    method = str(section["quant_method"])
    bits = section.get("bits") or (8 if "fp8" in method else 4)
    return method, float(bits) + (0.25 if float(bits) <= 4 else 0.0)

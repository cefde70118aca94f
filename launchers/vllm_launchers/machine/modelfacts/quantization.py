"""How a checkpoint's weights are stored, from the many ways in which configs say it."""

from __future__ import annotations

from vllm_launchers.machine.modelfacts.model import Quantization
from vllm_launchers.machine.modelfacts.values import Config, mapping, number, objects, text, whole_numbers

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
"""Where the method leaves no choice; of ``gptq`` and ``bitsandbytes`` the config says it."""

_GROUPS = {"mxfp4": 32, "modelopt_fp4": 16, "mxfp8": 32, "gpt_oss_mxfp4": 32}
_MODELOPT = {"FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt", "FP8_PB_WO": "modelopt"} | {
    "NVFP4": "modelopt_fp4",
    "W4A16_NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8",
    "MIXED_PRECISION": "modelopt_mixed",
}


def quantization(settings: Config) -> Quantization | None:
    """Read a ``quantization_config`` (or the ``hf_quant_config.json`` of Model Optimizer); None when it says nothing.

    ``method`` is what vLLM calls it, also where the config has another spelling.
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
        return None
    groups = _group_weights(settings)
    bits = number(settings, "bits", "w_bit", "weight_bits") or number(groups, "num_bits") or _bits(settings, method)
    return Quantization(
        method,
        bits if bits is not None and bits <= 32 else None,
        _group_size(settings, inner, groups, method),
        _block(settings, groups),
    )


def kv_cache_quantization(settings: Config) -> str | None:
    """What a checkpoint brings scales for, so that vLLM keeps the KV cache in it: ``fp8``, or None."""
    inner = mapping(settings, "quantization") or settings
    if (text(inner, "kv_cache_quant_algo") or "").upper() == "FP8":
        return "fp8"
    scheme = mapping(settings, "kv_cache_scheme")
    if number(scheme, "num_bits") == 8 and text(scheme, "type") == "float":
        return "fp8"
    quark = mapping(settings, "kv_cache_quant_config")
    outputs = [mapping(entry, "output_tensors") for entry in objects(quark)]
    if any((text(entry, "dtype") or "").startswith("fp8") for entry in outputs):
        return "fp8"
    return None


def _group_weights(settings: Config) -> Config:
    """The weights of the group with the fewest bits: it holds the linear layers, where a model is mixed."""
    found = [mapping(group, "weights") for group in objects(settings.get("config_groups"))]
    quark = mapping(mapping(settings, "global_quant_config"), "weight")
    if quark:
        kind = text(quark, "dtype") or ""
        size = 4 if "4" in kind.replace("e4m3", "") else 8
        return {"num_bits": size, "group_size": quark.get("group_size")}
    sized = [weights for weights in found if number(weights, "num_bits")]
    return min(sized, key=lambda weights: number(weights, "num_bits") or 0) if sized else {}


def _bits(settings: Config, method: str) -> int | None:
    if method == "bitsandbytes":
        return 4 if settings.get("load_in_4bit") is True else 8 if settings.get("load_in_8bit") is True else None
    if method == "compressed-tensors":
        return _bits_of_format(text(settings, "format", "_format") or "")
    return _BITS.get(method)


def _bits_of_format(name: str) -> int | None:
    """Of the format that compressed-tensors names when it lists no groups."""
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

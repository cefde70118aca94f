"""What a model's name says of it: size and number format, in the words that publishers use."""

from __future__ import annotations

import re

from vllm_launchers.machine.modelfacts.model import Quantization

_QUANTIZED: tuple[tuple[str, Quantization], ...] = (
    ("awq-8bit", Quantization("awq", 8)),
    ("awq", Quantization("awq", 4, 128)),
    ("gptq-int8", Quantization("gptq", 8, 128)),
    ("gptq-8bit", Quantization("gptq", 8, 128)),
    ("gptq", Quantization("gptq", 4, 128)),
    ("bnb-4bit", Quantization("bitsandbytes", 4)),
    ("bnb-8bit", Quantization("bitsandbytes", 8)),
    ("quantized.w4a16", Quantization("compressed-tensors", 4, 128)),
    ("quantized.w8a8", Quantization("compressed-tensors", 8)),
    ("quantized.w8a16", Quantization("compressed-tensors", 8)),
    ("w4a16", Quantization("compressed-tensors", 4, 128)),
    ("w8a16", Quantization("compressed-tensors", 8)),
    ("w8a8", Quantization("compressed-tensors", 8)),
    ("nvfp4", Quantization("modelopt_fp4", 4, 16)),
    ("mxfp4", Quantization("mxfp4", 4, 32)),
    ("fp8-dynamic", Quantization("compressed-tensors", 8)),
    ("fp8-block", Quantization("compressed-tensors", 8)),
    ("fp8", Quantization("fp8", 8)),
    ("int4", Quantization("compressed-tensors", 4, 128)),
    ("int8", Quantization("compressed-tensors", 8)),
    ("gguf", Quantization("gguf")),
)
"""What stands in names, the longer first, and what is behind it in most checkpoints."""

_SIZE = re.compile(r"(?<![\w.])(?:(\d{1,3})x)?(\d{1,5}(?:\.\d{1,3})?)([bmt])(?![a-z0-9])")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_SHARED = 0.83
"""In ``8x7B`` the experts share all but their MLPs: Mixtral's 8 × 7 are 46.7, its 8 × 22 are 141."""


def split_name(model: str) -> tuple[str, Quantization | None]:
    """Return a hub id's last part in lower case without what it says of quantization, and that."""
    name = model.rsplit("/", 1)[-1].lower().replace("_", "-")
    for word, quantization in _QUANTIZED:
        found = re.search(rf"(?:^|[-.]){re.escape(word)}(?![a-z0-9])", name)
        if found:
            rest = (name[: found.start()] + name[found.end() :]).strip("-.")
            return re.sub(r"-(?:int[48]|[48]bit|g128|128g|block|dynamic)$", "", rest), quantization
    return name, None


def parameters_in(name: str) -> int | None:
    """Return the number of parameters that a name in lower case tells, or None."""
    found = _SIZE.search(name)
    if found is None:
        return None
    each = float(found[2]) * _UNITS[found[3]]
    return int(each * int(found[1]) * _SHARED) if found[1] else int(each)

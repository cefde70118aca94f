"""Codes of conditions and causes as people write them. Pure."""

from __future__ import annotations

from vllm_console.text import plain

_UPPER = {"kv": "KV", "gpu": "GPU", "cuda": "CUDA", "oom": "OOM", "tp": "TP", "pcie": "PCIe", "itl": "ITL"}


def title_of_code(code: str) -> str:
    """A condition's or cause's code in words: ``kv_cache_pressure`` is ``KV cache pressure``."""
    return " ".join(_UPPER.get(word, word) for word in plain(code).split("_"))

"""Changes that say in today's words what a retired flag or variable meant. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_launchers.plan.model import Changes, Flags, FlagValue

FlagCarry = Callable[[Flags], Changes | None]
VariableCarry = Callable[[str, Flags], Changes | None]

_WHOLE = re.compile(r"[0-9]{1,18}")

SPECULATIVE_KEYS: Mapping[str, str] = {
    "speculative-model": "model",
    "num-speculative-tokens": "num_speculative_tokens",
    "speculative-model-quantization": "quantization",
    "speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "speculative-max-model-len": "max_model_len",
    "ngram-prompt-lookup-max": "prompt_lookup_max",
    "ngram-prompt-lookup-min": "prompt_lookup_min",
}
"""Flags of speculative decoding before 0.8, and the keys of ``speculative-config`` that they became."""

EPLB_KEYS: Mapping[str, str] = {
    "num-redundant-experts": "num_redundant_experts",
    "eplb-window-size": "window_size",
    "eplb-step-interval": "step_interval",
    "eplb-log-balancedness": "log_balancedness",
}

STRUCTURED_KEYS: Mapping[str, str] = {
    "guided-decoding-backend": "backend",
    "guided-decoding-disable-any-whitespace": "disable_any_whitespace",
    "guided-decoding-disable-additional-properties": "disable_additional_properties",
}
STRUCTURED_FLAGS = (*STRUCTURED_KEYS, "guided-decoding-disable-fallback")

_POOLING = ("embed", "embedding", "classify", "score", "reward")


def drop(*names: str) -> FlagCarry:
    """Leave the flags out: they did what vLLM now always does, or nothing is left that they could do."""

    def carry(flags: Flags) -> Changes | None:
        return Changes(unset=_present(names, flags))

    return carry


def lost(flags: Flags) -> Changes | None:  # noqa: ARG001 - one of the carries
    """What it meant has to be said in another way, which is not for a program to guess."""
    return None


def rename(old: str, new: str) -> FlagCarry:
    """The same value under another name."""

    def carry(flags: Flags) -> Changes | None:
        return _moved({new: flags[old]}, (old,), flags)

    return carry


def becomes(old: str, new: str, value: FlagValue) -> FlagCarry:
    """A switch that is now one value of another flag; switched off it is simply left out."""

    def carry(flags: Flags) -> Changes | None:
        return _moved({new: value} if flags[old] is True else {}, (old,), flags)

    return carry


def into_json(keys: Mapping[str, str], target: str) -> FlagCarry:
    """Several flags that are now keys of one JSON flag; what is set there already stays."""

    def carry(flags: Flags) -> Changes | None:
        said = {key: flags[name] for name, key in keys.items() if name in flags}
        return _merged(target, said, keys, flags)

    return carry


def speculative(flags: Flags) -> Changes | None:
    """``--speculative-model M --num-speculative-tokens N`` as ``--speculative-config``; None without both."""
    if "speculative-config" in flags:
        return Changes(unset=_present(SPECULATIVE_KEYS, flags))
    said: dict[str, Any] = {key: flags[name] for name, key in SPECULATIVE_KEYS.items() if name in flags}
    if "model" not in said or "num_speculative_tokens" not in said:
        return None
    if said["model"] == "[ngram]":
        said = {"method": "ngram"} | {key: value for key, value in said.items() if key != "model"}
    return _merged("speculative-config", said, SPECULATIVE_KEYS, flags)


def structured(flags: Flags) -> Changes | None:
    """The ``guided-decoding-*`` flags as ``--structured-outputs-config``."""
    said = {key: flags[name] for name, key in STRUCTURED_KEYS.items() if name in flags}
    backend = said.get("backend")
    if isinstance(backend, str):
        said["backend"] = backend.partition(":")[0]  # xgrammar:no-fallback, as it was written for a while
    return _merged("structured-outputs-config", said, STRUCTURED_FLAGS, flags)


def swap_space(flags: Flags) -> Changes | None:
    """GiB per GPU to swap requests to → GiB in all for KV blocks that leave the GPUs."""
    size = flags["swap-space"]
    if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0:
        return Changes(unset=("swap-space",))
    ways = flags.get("tensor-parallel-size", 1)
    total = size * ways if isinstance(ways, int) and not isinstance(ways, bool) else size
    return _moved({"kv-offloading-size": total}, ("swap-space",), flags)


def log_requests(flags: Flags) -> Changes | None:
    """Requests are not logged unless asked for: on is left out, off is said the other way round."""
    wanted: dict[str, FlagValue] = {"enable-log-requests": True} if flags["disable-log-requests"] is False else {}
    return _moved(wanted, ("disable-log-requests",), flags)


def task(flags: Flags) -> Changes | None:
    """``--task`` as ``--runner``; which kind of pooling vLLM finds out by itself."""
    said = flags["task"]
    if said in _POOLING:
        return _moved({"runner": "pooling"}, ("task",), flags)
    return _moved({"runner": said} if said in ("generate", "draft") else {}, ("task",), flags)


def no_mm_cache(flags: Flags) -> Changes | None:
    """A switch that is now a size of zero."""
    return becomes("disable-mm-preprocessor-cache", "mm-processor-cache-gb", 0)(flags)


def attention_backend(value: str, flags: Flags) -> Changes | None:
    """``VLLM_ATTENTION_BACKEND`` as a flag, without the endings that told V0 from V1."""
    name = value.strip().upper()
    for ending in ("_VLLM_V1", "_V1"):
        name = name.removesuffix(ending)
    gone = not name or name in ("XFORMERS", "ROCM_FLASH", "DUAL_CHUNK_FLASH_ATTN")
    return None if gone else _set("attention-backend", name, flags)


def variable_to_flag(name: str) -> VariableCarry:
    """A variable whose value a flag takes now."""

    def carry(value: str, flags: Flags) -> Changes | None:
        text = value.strip()
        return _set(name, int(text) if _WHOLE.fullmatch(text) else text, flags) if text else None

    return carry


def variable_to_switch(name: str) -> VariableCarry:
    """A variable that was a switch (1 or 0), and is a switch among the flags now."""

    def carry(value: str, flags: Flags) -> Changes | None:
        return _set(name, value.strip().lower() in ("1", "true"), flags)

    return carry


def variable_to_json(target: str, key: str, *, switch: bool = False, besides: Mapping[str, Any] = {}) -> VariableCarry:
    """A variable that is now a key of a JSON flag."""

    def carry(value: str, flags: Flags) -> Changes | None:
        text = value.strip()
        if not text:
            return None
        inner: Any = int(text) if _WHOLE.fullmatch(text) else text
        if switch:
            inner = text.lower() in ("1", "true")
        return _merged(target, {**besides, key: inner}, (), flags)

    return carry


def _present(names: Iterable[str], flags: Flags) -> tuple[str, ...]:
    return tuple(name for name in names if name in flags)


def _set(name: str, value: FlagValue, flags: Flags) -> Changes | None:
    """Set a flag, unless it says something already, which then wins."""
    return None if name in flags else Changes(set={name: value})


def _moved(wanted: Flags, old: Iterable[str], flags: Flags) -> Changes:
    """Leave ``old`` out and set what is wanted; a new flag that is set already stays as it is."""
    return Changes(set={name: value for name, value in wanted.items() if name not in flags}, unset=_present(old, flags))


def _merged(target: str, said: Mapping[str, Any], old: Iterable[str], flags: Flags) -> Changes | None:
    """Put ``said`` into a JSON flag beside what it holds already; None where that is no JSON object."""
    if not said:
        return Changes(unset=_present(old, flags))
    held: Any = {}
    if target in flags:
        try:
            held = json.loads(str(flags[target]))
        except (ValueError, RecursionError):
            return None
    if not isinstance(held, dict) or any(name.startswith(f"{target}.") for name in flags):
        return None
    return Changes(set={target: json.dumps({**said, **held})}, unset=_present(old, flags))

"""Flags of ``vllm serve``: as users write them, normalized, and as argv. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.plan.findings import FlagError
from vllm_launchers.presets.rules import FLAG_NAME, refused_flag, refused_value
from vllm_launchers.presets.rules import LENGTH as LENGTH_TEXT
from vllm_launchers.vllm.flags.changes import Flags, FlagValue, human_int
from vllm_launchers.vllm.flags.several_words import REPEATED, list_problem, several_words

LENGTH = "max-model-len"
SEQUENCES = "max-num-seqs"
BATCHED = "max-num-batched-tokens"
PREFIX = "enable-prefix-caching"
CHUNKED = "enable-chunked-prefill"
ASYNC = "async-scheduling"
WHOLE_ITEMS = "disable-chunked-mm-input"
KV_DTYPE = "kv-cache-dtype"
QUANTIZATION = "quantization"
TENSOR, PIPELINE, DATA = "tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size"
DECODE_CONTEXT = "decode-context-parallel-size"
BACKEND = "distributed-executor-backend"
EXPERTS = "enable-expert-parallel"
UTILIZATION = "gpu-memory-utilization"
TRANSFER = "kv-transfer-config"
BLOCKS, BYTES = "num-gpu-blocks-override", "kv-cache-memory-bytes"
OVERRIDES = "hf-overrides"
KV_OFFLOAD, KV_OFFLOAD_BY = "kv-offloading-size", "kv-offloading-backend"
OFFLOAD, OFFLOAD_BACKEND, OFFLOAD_GROUPS = "cpu-offload-gb", "offload-backend", "offload-group-size"
LORA = "enable-lora"
SLEEP_MODE = "enable-sleep-mode"
SERVED_NAME = "served-model-name"

VISIBLE, DEVICE_ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"

SHORT_NAMES: Mapping[str, str] = {
    "q": "quantization",
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "ep": "enable-expert-parallel",
    "dcp": "decode-context-parallel-size",
    "asc": "api-server-count",
    "pcp": "prefill-context-parallel-size",
    "dpn": "data-parallel-rank",
    "dpr": "data-parallel-start-rank",
    "dpl": "data-parallel-size-local",
    "dpa": "data-parallel-address",
    "dpp": "data-parallel-rpc-port",
    "dpb": "data-parallel-backend",
    "dph": "data-parallel-hybrid-lb",
    "dpe": "data-parallel-external-lb",
    "dpm": "data-parallel-multi-port-external-lb",
    "n": "nnodes",
    "r": "node-rank",
    "ac": "attention-config",
    "cc": "compilation-config",
    "dc": "diffusion-config",
    "sc": "speculative-config",
    "device-memory-utilization": "gpu-memory-utilization",
}
"""vLLM's aliases, so that a flag is never passed under two names."""

TRUE_ONLY: frozenset[str] = frozenset(
    {
        "headless",
        "grpc",
        "disable-log-stats",
        "aggregate-engine-logging",
        "data-parallel-multi-port-external-lb",
        "use-v2-block-manager",
        "disable-async-output-proc",
        "expand-tools-even-if-tool-choice-none",
        "enable-multimodal-encoder-data-parallel",
        "enable-prompt-adapter",
    }
)
"""Switches without a ``--no-`` form in some releases or all, which are omitted if false (vLLM 0.8.5 to 0.33)."""

TEXT_FLAGS: frozenset[str] = frozenset(
    {
        SERVED_NAME,
        "tokenizer",
        "revision",
        "tokenizer-revision",
        "code-revision",
        "chat-template",
        "config",
        "download-dir",
        "device-ids",
    }
)
"""Flags whose value stays text even if it looks like a number: a model may be named ``1.10``."""

_INTEGER = lazy_pattern(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT = lazy_pattern(
    r"-?(?:[0-9]{1,30}\.[0-9]{0,30}|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?|-?[0-9]{1,30}[eE][+-]?[0-9]{1,3}"
)


def normalize(name: str) -> str:
    """Normalize a flag's name: no leading dashes, ``-`` instead of ``_``, no ``no-``, no alias.

    ``--enable_prefix_caching``, ``no-enable-prefix-caching`` → ``enable-prefix-caching``; ``-tp`` →
    ``tensor-parallel-size``. The part after a dot is a key of a JSON flag and stays unchanged.

    Raises:
        FlagError: it is not a valid flag name.
    """
    return _split(name)[0]


def spellings(name: str) -> tuple[str, ...]:
    """Names under which a flag to unset may be stored: ``no-x`` is stored as ``x``, unless it was set to a value.

    Raises:
        FlagError: it is not a valid flag name.
    """
    plain, negated = _split(name)
    return (plain, f"no-{plain}") if negated else (plain,)


def not_set(server: str, name: str, flags: Flags) -> str:
    """A message if a server doesn't set the flag to unset, with the closest one that it sets; else empty.

    Raises:
        FlagError: it is not a valid flag name.
    """
    if any(spelling in flags for spelling in spellings(name)):
        return ""
    from difflib import get_close_matches  # imported late: most commands don't need it

    near = get_close_matches(spellings(name)[0], flags, 1)
    return f"{server} does not set --{name}" + (f"; did you mean --{near[0]}?" if near else "")


def _split(name: str) -> tuple[str, bool]:
    """The normalized name, and whether it was written with ``no-``."""
    head, dot, tail = name.strip().partition(".")
    head = head.lstrip("-").replace("_", "-")
    negated = head.startswith("no-")
    plain = head.removeprefix("no-") if negated else head
    plain = SHORT_NAMES.get(plain, plain) + dot + tail
    if not FLAG_NAME.fullmatch(plain) or plain.startswith("no-"):
        raise FlagError(f"{quoted(name)} is not a flag name; write it like 'max-num-seqs'")
    return plain, negated


def normalize_setting(name: str, value: FlagValue) -> tuple[str, FlagValue]:
    """Normalize the name and value of a flag to set; ``no-x`` = true becomes ``x`` = false.

    Raises:
        FlagError: an invalid name, a flag with an option of its own, a secret, or an invalid number.
    """
    plain, negated = _split(name)
    if refusal := refused_flag(plain):
        raise FlagError(f"--{plain} can't be set here: {refusal}")
    if negated and isinstance(value, bool):
        value = not value
    elif negated:
        plain = f"no-{plain}"  # a flag that really has this name, or a mistake that vLLM will report
    if plain == "max-model-len" and value == -1:
        value = "-1"  # not a length: vLLM reads it as auto, and `rules` allows it as text
    if isinstance(value, float) and not math.isfinite(value):
        raise FlagError(f"--{plain}: {value} is not a number vLLM can use")
    if refusal := refused_value(value):
        raise FlagError(f"--{plain} can't have this value: {refusal}")
    if isinstance(value, str) and "\0" in value:
        raise FlagError(f"--{plain}: a value can't contain a NUL byte")
    if wrong := list_problem(plain, value):
        example = """'["qwen", "default"]' or '[1, 2, 4]'"""
        raise FlagError(f"--{plain}: expected a value, or several as a JSON list such as {example}: {wrong}")
    return plain, value


def parse_value(text: str, *, name: str = "") -> FlagValue:
    """Parse ``true`` and ``false``, integers, and decimals; everything else, such as ``4k`` or JSON, stays text.

    ``1e3`` stays text, too: integer flags refuse it, and the error then quotes it as typed.
    """
    if name in TEXT_FLAGS:
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text) and text != "-0":
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return text if "e" in text.lower() and number.is_integer() else number
    return text


def token_count(value: object) -> int | None:
    """Parse a length in tokens like vLLM does (``4k`` = 4,000, ``4K`` = 4,096); None for ``auto`` and invalid text."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if value > 0 else None
    if not isinstance(value, str) or value in ("auto", "-1") or not LENGTH_TEXT.fullmatch(value):
        return None
    return human_int(value)


def served_name(flags: Flags, model: str) -> str:
    """The name that clients use for a server's model, also in its metrics: the first one, if it has several.

    vLLM's flag takes several words, but a flag has a single value here: several names are written as a JSON list.
    """
    return served_names(flags, model)[0]


def served_names(flags: Flags, model: str) -> tuple[str, ...]:
    """All names that clients may use for a server's model."""
    value = flags.get(SERVED_NAME)
    return several_words(SERVED_NAME, value) or (str(value or model),)


def flag_names(flags: Flags) -> frozenset[str]:
    """The flags that are set. A JSON flag counts as set if one of its keys is."""
    return frozenset(name.partition(".")[0] for name in flags)


def flag_words(flags: Flags) -> tuple[str, ...]:
    """Flags as argv words, in order."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool) and "." in name:
            words += [f"--{name}", str(value).lower()]  # a key of a JSON flag takes a value, no `--no-`
        elif value is True:
            words.append(f"--{name}")
        elif value is False:
            if name not in TRUE_ONLY:
                words.append(f"--no-{name}")
        elif several := several_words(name, value):
            each = ((one,) for one in several) if name in REPEATED else (several,)
            words += [word for values in each for word in (f"--{name}", *values)]
        elif str(value).startswith("-"):
            words.append(f"--{name}={value}")  # otherwise the parser reads the value as a flag, even a negative number
        else:
            words += [f"--{name}", str(value)]
    return tuple(words)


def quoted(text: str) -> str:
    """A word in quotes for a message, shortened and without unprintable characters."""
    return "'" + "".join(c if c.isprintable() else "?" for c in text[:80]) + "'"

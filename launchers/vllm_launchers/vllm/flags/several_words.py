"""Flags that take several words on a command line: their value here is one word, or several as a JSON list. Pure."""

from __future__ import annotations

import json

LIST_FLAGS = frozenset(
    {
        "allowed-media-domains",
        "cpu-offload-params",
        "cuda-graph-sizes",
        "cudagraph-capture-sizes",
        "kv-cache-dtype-skip-layers",
        "logits-processors",
        "lora-modules",
        "lora-target-modules",
        "numa-bind-cpus",
        "numa-bind-nodes",
        "offload-params",
        "served-model-name",
        "sleep-preserve-parameter-names",
    }
)
"""``--flag VALUE…`` in every release that has the flag (vLLM 0.8.5 to 0.33)."""


def is_listed(name: str, value: object) -> bool:
    """Whether a flag's value is meant as several words, also if its end is missing. A name may begin with a bracket."""
    text = value.strip() if name in LIST_FLAGS and isinstance(value, str) else ""
    return text.startswith('["') or (text.startswith("[") and text.endswith("]"))


def several_words(name: str, value: object) -> tuple[str, ...]:
    """The words that a JSON list holds; an object in it becomes one word of JSON, as of ``--lora-modules``.

    None where the value is one word, or the list is empty or has what can't be a word: text that begins with a dash,
    since the parser takes that for a flag, or is not printable.
    """
    if not isinstance(value, str) or not is_listed(name, value):
        return ()
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return ()
    words = [_word(one) for one in found]
    return tuple(words) if all(word and word.isprintable() and word[0] != "-" for word in words) else ()


def _word(one: object) -> str:
    """A part of a list as a word; empty if it can't be one."""
    if isinstance(one, str):
        return one
    if isinstance(one, dict):
        return json.dumps(one)
    return str(one) if isinstance(one, (int, float)) and not isinstance(one, bool) else ""

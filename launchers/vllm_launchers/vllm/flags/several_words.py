"""Flags with several command-line arguments: a value here is one argument, or several as a JSON list. Pure."""

from __future__ import annotations

import json

LIST_FLAGS = frozenset(
    {
        "allowed-media-domains",
        "collect-detailed-traces",
        "cpu-offload-params",
        "cuda-graph-sizes",
        "cudagraph-capture-sizes",
        "ignore-patterns",
        "kv-cache-dtype-skip-layers",
        "logits-processors",
        "lora-modules",
        "lora-target-modules",
        "middleware",
        "numa-bind-cpus",
        "numa-bind-nodes",
        "offload-params",
        "served-model-name",
        "sleep-preserve-parameter-names",
    }
)
"""``--flag VALUE…`` in every supported release that has the flag (vLLM 0.10 to 0.33)."""

REPEATED = frozenset({"middleware"})
"""Those that vLLM takes one value at a time: ``--flag VALUE --flag VALUE``."""


def is_listed(name: str, value: object) -> bool:
    """Whether a flag's value is meant as a JSON list, even if its end is missing. A plain name may begin with ``[``."""
    text = value.strip() if name in LIST_FLAGS and isinstance(value, str) else ""
    return text.startswith('["') or (text.startswith("[") and text.endswith("]"))


def several_words(name: str, value: object) -> tuple[str, ...]:
    """The arguments in a JSON list. An object in it becomes one argument in JSON, as for ``--lora-modules``.

    Empty if the value is a single argument, or if the list is invalid (see `list_problem`).
    """
    if not is_listed(name, value) or list_problem(name, value):
        return ()
    return tuple(_word(one) for one in json.loads(str(value)))


def list_problem(name: str, value: object) -> str:
    """Why a value that is meant as a list is invalid, as the rest of a sentence; empty if it is valid."""
    if not is_listed(name, value):
        return ""
    try:
        found = json.loads(str(value))
    except (ValueError, RecursionError):
        return "it is not valid JSON"
    if not found:
        return "the list is empty"
    return next(filter(None, map(_part_problem, found)), "")


def _part_problem(one: object) -> str:
    word = _word(one)
    if not word:
        return f"{json.dumps(one)[:40]} can't be one of them"
    if word[0] == "-":  # would be parsed as a flag
        return f"{json.dumps(one)[:40]} begins with a dash"
    return "" if word.isprintable() else f"{json.dumps(one)[:40]} is not printable"


def _word(one: object) -> str:
    """A list's item as an argument; empty if it can't be one."""
    if isinstance(one, str):
        return one
    if isinstance(one, dict):
        return json.dumps(one)
    return str(one) if isinstance(one, (int, float)) and not isinstance(one, bool) else ""

"""How messages about flags word values and what is accepted instead."""

from __future__ import annotations

from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind

_SHOWN = 60
MANY = 8
"""Maximum number of names in a list."""


def expected(spec: FlagSpec) -> str:
    """What a flag accepts, in words: ``a whole number``, ``auto, fp8 or fp8_e4m3``."""
    if spec.choices:
        return either(spec.choices)
    if spec.closed and spec.words:
        return either(spec.words)
    if spec.kind is ValueKind.INT and spec.many:
        return "whole numbers as a JSON list such as [1, 2, 4]"
    plain = {
        ValueKind.BOOL: "on or off",
        ValueKind.INT: "a whole number",
        ValueKind.FLOAT: "a number",
        ValueKind.HUMAN_INT: "a whole number such as 4096, 4k (4,000) or 4K (4,096)",
        ValueKind.JSON: 'a JSON object such as {"key": 1}',
        ValueKind.JSON_LIST: 'a JSON list such as ["*"]',
    }
    words = plain.get(spec.kind, "text")
    return f"{words}, or {spec.words[0]}" if spec.kind is ValueKind.HUMAN_INT and spec.words else words


def either(names: tuple[str, ...] | list[str]) -> str:
    """``a, b or c``; a long list is shortened."""
    if len(names) > MANY + 1:
        return listed(names)
    return " or ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def listed(names: tuple[str, ...] | list[str]) -> str:
    """``a, b, c``; a long list is shortened."""
    if len(names) <= MANY + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MANY])} or one of {len(names) - MANY} others"


def shown(value: object) -> str:
    """A value in quotes, truncated, with ``?`` for unprintable characters."""
    text = str(value)
    text = "".join(c if c.isprintable() else "?" for c in text[:_SHOWN]) + ("…" if len(text) > _SHOWN else "")
    return f"'{text}'"

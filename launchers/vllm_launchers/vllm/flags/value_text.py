"""Defaults, choices and enum members in a package's source, written as a person would type them."""

from __future__ import annotations

import json
import re

from vllm_launchers.vllm.flags.hints import UNKNOWN, EnumMember, Instance
from vllm_launchers.vllm.flags.package import Symbol


def texts(values: object) -> tuple[str, ...]:
    """Choices as text; empty if one of them is unknown, so that no valid value is rejected."""
    if not isinstance(values, (list, tuple)) or any(value is UNKNOWN for value in values):
        return ()
    plain = (value.value if isinstance(value, EnumMember) else value for value in values)
    return tuple(dict.fromkeys(str(value) for value in plain if value is not None and value != "None"))


def enum_word(member: EnumMember) -> str:
    """How an enum member is typed: its value if that is a number or one plain word, else its name."""
    if isinstance(member.value, int):
        return str(member.value)
    return member.value if isinstance(member.value, str) and re.fullmatch(r"[a-z0-9_]+", member.value) else member.name


def default_text(value: object) -> str | None:
    """A default as a person would type it, or None if vLLM derives it or it is unknown."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, EnumMember):
        return enum_word(value)
    if value is None or value is UNKNOWN or isinstance(value, (Symbol, Instance)):
        return None
    if isinstance(value, (set, frozenset, tuple)):
        value = sorted(value, key=str)
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=str)
    return str(value)

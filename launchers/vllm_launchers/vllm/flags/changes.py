"""Values of flags, and changes to them: staged by a user, or made by a fix. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

FlagValue = bool | int | float | str
"""A flag's value. A boolean becomes ``--flag`` or ``--no-flag``, anything else ``--flag VALUE``."""

Flags = Mapping[str, FlagValue]
"""Flags by name, without leading dashes, words joined by ``-``: ``{"max-num-seqs": 256}``."""

Edits = Mapping[str, FlagValue | None]
"""Changed flags, newest last; None unsets a flag."""


def same_value(one: FlagValue | None, other: FlagValue | None) -> bool:
    """Whether vLLM treats two values as the same; ``1`` is not ``True``."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def value_word(value: FlagValue) -> str:
    """A value as written in ``--set FLAG=VALUE``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def whole_number(flags: Flags, name: str, otherwise: int = 1) -> int:
    """A flag's positive whole number, which may be text such as ``007`` or ``4k``; else ``otherwise``."""
    value = flags.get(name)
    value = human_int(value) if isinstance(value, str) else value
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


def json_object(text: object) -> dict[str, Any] | None:
    """The JSON object in a flag's value; None if it is not one."""
    try:
        document = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def json_flag(flags: Flags, name: str) -> Mapping[str, Any]:
    """A JSON flag's keys, set as an object or one by one (``name.key``); empty if it is not an object.

    Keys set one by one replace the whole object, as in vLLM.
    """
    prefix = f"{name}."
    keys = {key[len(prefix) :].replace("-", "_"): flags[key] for key in flags if key.startswith(prefix)}
    return keys or json_object(flags.get(name)) or {}


class Changes(msgspec.Struct, frozen=True):
    """Changes to flags: staged by a user, or given as ``--set``/``--unset``."""

    set: Flags = msgspec.field(default_factory=dict)
    unset: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is changed."""
        return not self.set and not self.unset

    @classmethod
    def of(cls, edits: Edits) -> Changes:
        """Create changes from edits."""
        set_ = {name: value for name, value in edits.items() if value is not None}
        return cls(set_, tuple(name for name, value in edits.items() if value is None))

    @property
    def edits(self) -> Edits:
        """The changes as edits."""
        return {**self.set, **dict.fromkeys(self.unset)}


def unapplied(flags: Flags, edits: Edits) -> Edits:
    """The edits that would change these flags."""
    return {name: value for name, value in edits.items() if not same_value(flags.get(name), value)}


def apply_changes(flags: Flags, changes: Changes) -> Flags:
    """Apply changes to flags. A flag that is both set and unset is unset."""
    return {name: value for name, value in {**flags, **changes.set}.items() if name not in changes.unset}


# -- numbers as vLLM's parser reads them. Pure ------------------------------------------------------------------------


Number = int | float

_SUFFIXED = r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT])"
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Suffixes of numbers: ``4k`` is 4,000 and ``4K`` is 4,096."""


def human_int(text: str) -> int | None:
    """A whole number, also written as 4k (4,000), 4K (4,096) or 1.5k, but not 1.5K. None if invalid."""
    text = text.strip()
    try:
        if match := re.fullmatch(_SUFFIXED, text):
            number, unit = match.groups()
            return int(float(number) * UNITS[unit]) if unit.islower() else int(number) * UNITS[unit]
        return int(text)
    except ValueError:
        return None


def flag_text(value: FlagValue | None, unset: str = "–") -> str:
    """Format a flag's value: ``on``, ``off``, or the value; ``unset`` if it has none."""
    if value is None:
        return unset
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def change_text(flag: str, before: FlagValue | None, after: FlagValue | None) -> str:
    """Format a changed flag: ``max-num-seqs 256 → 128``."""
    return f"{flag} {flag_text(before, 'unset')} → {flag_text(after, 'unset')}"

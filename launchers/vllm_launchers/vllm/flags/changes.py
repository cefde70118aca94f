"""Values of flags, and changes of them: staged by a user, or made by a fix. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FlagValue = bool | int | float | str
"""A flag's value: a boolean becomes ``--flag`` or ``--no-flag``, all else ``--flag VALUE``."""

Flags = Mapping[str, FlagValue]
"""Flags without leading dashes, words joined by ``-``: ``{"max-num-seqs": 256}``."""


def same_value(one: FlagValue | None, other: FlagValue | None) -> bool:
    """Whether two values are the same to vLLM: ``1`` is not ``True``."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


class Changes(msgspec.Struct, frozen=True):
    """A difference of flags: staged by a user, or given as ``--set``/``--unset``."""

    set: Flags = msgspec.field(default_factory=dict)
    unset: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is changed."""
        return not self.set and not self.unset

"""Flags of ``vllm serve`` as one installation, or one release, has them. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

FlagValue = bool | int | float | str
"""A flag's value as presets and plans hold it: a boolean becomes ``--flag`` or ``--no-flag``, all else one word."""


class ValueKind(StrEnum):
    """What a flag's value is to vLLM's parser."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    HUMAN_INT = "human_int"
    """A whole number that may be written 4k (4,000), 4K (4,096) or 1.5k; where ``words`` says so also 'auto'."""
    JSON = "json"
    """A JSON object; its keys may also be set one by one as ``--flag.key value``."""
    JSON_LIST = "json_list"
    """A JSON list, as one word."""
    OTHER = "other"
    """Something that could not be told from the source: every text passes."""


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag, its name without leading dashes.

    ``choices`` is all that the parser takes, empty where it takes anything of its kind. ``default`` is the default as
    text (``None`` where vLLM works it out itself). ``minimum`` and ``maximum`` are bounds that vLLM's configuration
    checks (inclusive; ``above`` and ``below`` are exclusive). ``many`` takes several values; ``negatable`` has a
    ``--no-`` form. ``nullable`` also takes ``None`` or nothing (``--flag ""``) for no value. ``words`` are values worth
    offering where others pass as well. ``aliases`` are as typed: ``-tp``. ``deprecated`` is what vLLM says of it.
    """

    name: str
    kind: ValueKind
    default: str | None = None
    choices: tuple[str, ...] = ()
    help: str = ""
    group: str = ""
    aliases: tuple[str, ...] = ()
    negatable: bool = False
    many: bool = False
    nullable: bool = False
    words: tuple[str, ...] = ()
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    deprecated: str = ""
    closed: bool = False
    """The parser takes any text, but vLLM's configuration only ``words``, in small or capital letters."""
    opposite: str = ""
    """Another option that says the opposite: ``disable-x`` of ``enable-x``, as vLLM has it since 0.33."""
    bare: bool = False
    """May also stand without a value, as ``--hf-token`` does."""
    parts: tuple[FlagSpec, ...] = ()
    """The keys that a JSON object may have, where vLLM refuses others; empty where any key passes."""


@dataclass(frozen=True, slots=True)
class FlagTable:
    """All flags of one vLLM. ``source`` is ``installation`` (read from its files) or ``release`` (our own table).

    A table of a release knows names, defaults and choices; help may be missing. ``variables`` are the environment
    variables that this vLLM reads (``VLLM_*``); empty where that is not known.
    """

    version: str | None
    source: str
    flags: Mapping[str, FlagSpec]
    variables: frozenset[str] = field(default_factory=frozenset)

    def get(self, name: str) -> FlagSpec | None:
        """The flag of that name (normalised: no dashes before it, ``-`` between words), or None."""
        return self.flags.get(name)

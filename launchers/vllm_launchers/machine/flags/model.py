"""Flags of ``vllm serve`` as one installation, or one release, has them. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
    OTHER = "other"
    """Something that could not be told from the source: every text passes."""


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag, its name without leading dashes.

    ``choices`` is all that the parser takes, empty where it takes anything of its kind. ``default`` is the default as
    text (``None`` where vLLM works it out itself). ``minimum`` and ``maximum`` are bounds that vLLM's configuration
    checks (inclusive; ``above`` is exclusive). ``many`` takes several values; ``negatable`` has a ``--no-`` form.
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

"""Flags of ``vllm serve`` in one installation, or one release. Pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum

import msgspec


class FlagsUnknownError(Exception):
    """The flags of an installation cannot be determined; the message is one clear sentence."""


class ValueKind(StrEnum):
    """A flag's type in vLLM's parser."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"
    TEXT = "text"
    HUMAN_INT = "human_int"
    """A whole number that may be written 4k (4,000), 4K (4,096) or 1.5k; also 'auto' if in ``words``."""
    JSON = "json"
    """A JSON object; its keys may also be set one by one as ``--flag.key value``."""
    JSON_LIST = "json_list"
    """A JSON list, as one argument."""
    OTHER = "other"
    """Cannot be determined from the source; any text is accepted."""


class FlagSpec(msgspec.Struct, frozen=True):
    """One flag. ``name`` has no leading dashes.

    ``choices`` are the only values that the parser accepts; empty if it accepts anything of this kind. ``default`` is
    the default as text, ``None`` if vLLM derives it. ``minimum`` and ``maximum`` are bounds that vLLM's configuration
    checks (inclusive; ``above`` and ``below`` are exclusive). A flag with ``many`` accepts several values, one with
    ``negatable`` has a ``--no-`` form, and one with ``nullable`` also accepts ``None`` or an empty text (``--flag ""``)
    for no value. ``words`` are suggestions; other values are accepted too. ``aliases`` are written as typed: ``-tp``.
    ``deprecated`` is vLLM's message.
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
    """The parser accepts any text, but vLLM's configuration accepts only ``words``, ignoring case."""
    opposite: str = ""
    """Another option with the opposite meaning: ``disable-x`` of ``enable-x``, as in vLLM since 0.33."""
    bare: bool = False
    """Also valid without a value, like ``--hf-token``."""
    parts: tuple[FlagSpec, ...] = ()
    """The keys that a JSON object may have, if vLLM rejects others; empty if any key is accepted."""


class VariableKind(StrEnum):
    """The type that vLLM converts an environment variable to. vLLM fails to start if the conversion fails."""

    INT = "int"
    """A whole number. Includes switches, which are read as ``bool(int(text))``."""
    FLOAT = "float"
    CHOICE = "choice"
    JSON = "json"


class VariableSpec(msgspec.Struct, frozen=True):
    """The values that one environment variable accepts.

    ``choices`` lists them for ``CHOICE``, case-sensitive if ``exact``. ``many`` accepts several, separated by commas.
    With ``empty``, an empty text counts as not set.
    """

    kind: VariableKind
    choices: tuple[str, ...] = ()
    exact: bool = True
    many: bool = False
    empty: bool = False

    def problem(self, text: str) -> str | None:
        """What the variable accepts instead of this text, as ``a whole number`` or ``spawn or fork``; None if valid."""
        if not text and self.empty:
            return None
        try:
            if self.kind is VariableKind.INT:
                int(text)
            elif self.kind is VariableKind.FLOAT:
                float(text)
            elif self.kind is VariableKind.JSON and not text.startswith(("/", ".")) and not text.endswith(".json"):
                json.loads(text)
        except (ValueError, RecursionError):
            return {VariableKind.INT: "a whole number", VariableKind.FLOAT: "a number"}.get(self.kind, "JSON")
        if self.kind is not VariableKind.CHOICE or self._chosen(text):
            return None
        *most, last = self.choices
        words = f"{', '.join(most)} or {last}" if most else last
        return f"one or more of {words}" if self.many else words

    def _chosen(self, text: str) -> bool:
        words = [word.strip() for word in text.split(",") if word.strip()] if self.many else [text]
        if self.exact:
            return all(word in self.choices for word in words)
        known = {choice.lower() for choice in self.choices}
        return all(word.lower() in known for word in words)


class Limits(msgspec.Struct, frozen=True):
    """Hardware that a vLLM supports. Unknown fields are empty or None and imply nothing.

    ``capabilities`` maps quantization methods to their minimum compute capability (75 for 7.5). ``architectures`` are
    those that its PyTorch has code for (``sm_75``). CPU block sizes must be multiples of ``cpu_block``.
    """

    capabilities: Mapping[str, int] = msgspec.field(default_factory=dict)
    architectures: tuple[str, ...] = ()
    cpu_block: int | None = None


class FlagTable(msgspec.Struct, frozen=True):
    """All flags of one vLLM. ``source`` is ``installation`` (read from its files), ``release`` (our own table) or
    ``assumed`` (see `assumed`).

    A release's table has names, defaults and choices, but may lack help texts. ``variables`` are the ``VLLM_*``
    environment variables that this vLLM reads; empty if unknown.
    """

    version: str | None
    source: str
    flags: Mapping[str, FlagSpec]
    variables: frozenset[str] = msgspec.field(default_factory=frozenset)
    values: Mapping[str, VariableSpec] = msgspec.field(default_factory=dict)
    """Accepted values of variables, including some not named ``VLLM_*``; variables not listed accept any text."""
    reads_all: bool = False
    """Whether vLLM reads all variables at every start, so that an invalid value is fatal even if unused."""
    limits: Limits = msgspec.field(default_factory=Limits)

    @property
    def assumed(self) -> bool:
        """Whether these are another vLLM's flags, since this one's are unknown."""
        return self.source == "assumed"

    def get(self, name: str) -> FlagSpec | None:
        """The flag of that normalized name (no leading dashes, ``-`` between words), or None."""
        return self.flags.get(name)

"""The results of evaluating source expressions without running them."""

from __future__ import annotations

import re

import msgspec

from vllm_launchers.vllm.flags.package import Symbol


class Unknown:
    """A value that could not be determined."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()


class EnumMember(msgspec.Struct, frozen=True):
    """One member of an enumeration."""

    name: str
    value: object
    dotted: str


class Instance(msgspec.Struct, frozen=True):
    """An object of a class of the package, its contents unknown."""

    symbol: Symbol


class Optional(msgspec.Struct, frozen=True):
    """The result of vLLM's ``optional_type``: the empty text and ``None`` mean nothing, all else is ``inner``'s."""

    inner: object


class FieldValue(msgspec.Struct, frozen=True):
    """``field(…)`` or ``Field(…)``: its default, `UNKNOWN` without one, and the bounds that pydantic checks."""

    default: object = UNKNOWN
    init: bool = True
    bounds: dict[str, float] = msgspec.field(default_factory=dict)


class Hints(msgspec.Struct, frozen=True):
    """A parsed annotation: the plain types in it, and its parts.

    ``names`` are of ``bool int float str list tuple set dict None literal class``. ``element`` is what a list, tuple
    or set holds; ``count`` how many a tuple has, None for any number.
    """

    names: frozenset[str] = frozenset()
    options: tuple[object, ...] = ()
    element: Hints | None = None
    count: int | None = None
    config: Symbol | None = None
    """The dataclass that the JSON object is checked against."""
    enum: Symbol | None = None
    bounds: dict[str, float] = msgspec.field(default_factory=dict)
    values: Hints | None = None
    """The type of a dictionary's values."""

    def joined(self, other: Hints) -> Hints:
        """Union of both."""
        return Hints(
            self.names | other.names,
            self.options + tuple(option for option in other.options if option not in self.options),
            self.element or other.element,
            self.count if self.element else other.count,
            self.config or other.config,
            self.enum or other.enum,
            self.bounds | other.bounds,
            self.values or other.values,
        )


class ConfigField(msgspec.Struct, frozen=True):
    """One field of a configuration class: the basis of its flag.

    ``suggested`` are the words of types that only a type checker sees; ``init`` is whether it can be set.
    """

    name: str
    hints: Hints
    default: object
    help: str
    bounds: dict[str, float]
    suggested: tuple[str, ...] = ()
    init: bool = True


# -- numbers as vLLM's parser reads them. Pure ------------------------------------------------------------------------


Number = int | float

_SUFFIXED = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kKmMgGtT])")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""The meaning of a letter after a number: ``4k`` is 4,000 and ``4K`` 4,096."""


def human_int(text: str) -> int | None:
    """A whole number that may be written 4k (4,000), 4K (4,096) or 1.5k; there is no 1.5K. None if invalid."""
    text = text.strip()
    try:
        if match := _SUFFIXED.fullmatch(text):
            number, unit = match.groups()
            return int(float(number) * UNITS[unit]) if unit.islower() else int(number) * UNITS[unit]
        return int(text)
    except ValueError:
        return None

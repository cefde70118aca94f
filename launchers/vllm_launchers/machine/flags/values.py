"""What an expression in somebody's source comes to, as far as it can be told without running it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_launchers.machine.flags.package import Symbol


class Unknown:
    """The value of what could not be told."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()


@dataclass(frozen=True, slots=True)
class EnumMember:
    """One member of an enumeration."""

    name: str
    value: object
    dotted: str


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class of the package, its contents not told."""

    symbol: Symbol


@dataclass(frozen=True, slots=True)
class Optional:
    """What vLLM's ``optional_type`` returns: the empty text and ``None`` mean nothing, all else is ``inner``'s."""

    inner: object


@dataclass(frozen=True, slots=True)
class FieldValue:
    """``field(…)`` or ``Field(…)``: its default, if it has one, and the bounds that pydantic checks."""

    default: object = UNKNOWN
    has_default: bool = False
    init: bool = True
    bounds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hints:
    """An annotation taken apart: the plain types in it, and what its parts are.

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
    bounds: dict[str, float] = field(default_factory=dict)
    values: Hints | None = None
    """What a dictionary's values are."""

    def joined(self, other: Hints) -> Hints:
        """Both, as in a union."""
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


@dataclass(frozen=True, slots=True)
class ConfigField:
    """One field of a configuration class: what its flag is made of.

    ``suggested`` are the words of types that only a type checker sees; ``init`` says whether it can be set.
    """

    name: str
    hints: Hints
    default: object
    help: str
    bounds: dict[str, float]
    suggested: tuple[str, ...] = ()
    init: bool = True

"""Immutable values for packages limited to the standard library; used like frozen dataclasses.

Python generates a dataclass's code when it is defined, at each start of the program: a frozen one with slots takes
about a millisecond, one of these 0.01 ms. Packages that may use msgspec use ``msgspec.Struct``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

NOTHING: Mapping[str, Any] = MappingProxyType({})
"""Default of a mapping field; immutable, because all values share a default."""


@dataclass_transform(frozen_default=True)
class Value:
    """Base class of immutable values. A class's annotations are its fields, in order, after those of its base.

    Created from positional or keyword arguments; equal only to values of its own class; hashed and printed by its
    fields.
    """

    FIELDS: ClassVar[tuple[str, ...]] = ()
    DEFAULTS: ClassVar[Mapping[str, Any]] = NOTHING

    def __init_subclass__(cls) -> None:
        own = tuple(cls.__annotations__)
        cls.FIELDS = (*cls.FIELDS, *own)
        setattr(cls, "__match_args__", cls.FIELDS)  # noqa: B010 - mypy lets nobody assign it
        cls.DEFAULTS = {**cls.DEFAULTS, **{name: cls.__dict__[name] for name in own if name in cls.__dict__}}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = self.FIELDS
        given = dict(zip(names, args, strict=False))
        values = {**self.DEFAULTS, **given, **kwargs}
        if len(args) > len(names) or not given.keys().isdisjoint(kwargs) or values.keys() != set(names):
            raise TypeError(f"{type(self).__name__}({', '.join(names)}) can't be made of {len(args)} and {[*kwargs]}")
        self.__dict__.update(values)

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__[name] for name in self.FIELDS))

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={self.__dict__[name]!r}' for name in self.FIELDS)})"

    def __setattr__(self, name: str, _value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} can't be set")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} can't be deleted")


AnyValue = TypeVar("AnyValue", bound=Value)


def replace(value: AnyValue, **changes: Any) -> AnyValue:
    """A copy of the value with some fields changed."""
    return type(value)(**{**as_dict(value), **changes})


def as_dict(value: Value) -> dict[str, Any]:
    """A value's fields by name, in order; nested values are not converted."""
    return {name: getattr(value, name) for name in value.FIELDS}

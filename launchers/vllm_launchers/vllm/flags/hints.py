"""Parses annotations in a package's source as vLLM's own ``get_type_hints`` treats the real types."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import msgspec

from vllm_launchers.python_source import parse_expression
from vllm_launchers.vllm.flags.package import Module, Symbol

if TYPE_CHECKING:
    from vllm_launchers.vllm.flags.evaluate import Evaluator


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
    """An instance of a class in the package, with unknown contents."""


class Optional(msgspec.Struct, frozen=True):
    """vLLM's ``optional_type``: empty text and ``None`` mean no value, anything else is parsed by ``inner``."""

    inner: object


class FieldValue(msgspec.Struct, frozen=True):
    """``field(…)`` or ``Field(…)``: its default (`UNKNOWN` without one), and the bounds that pydantic checks."""

    default: object = UNKNOWN
    init: bool = True
    bounds: dict[str, float] = msgspec.field(default_factory=dict)


class TypeHints(msgspec.Struct, frozen=True):
    """A parsed annotation: the plain types in it, and its parts.

    ``names`` are some of ``bool int float str list tuple set dict None literal class``. ``element`` is the type of the
    items of a list, tuple or set; ``count`` is the length of a tuple, None if it has no fixed one.
    """

    names: frozenset[str] = frozenset()
    options: tuple[object, ...] = ()
    element: TypeHints | None = None
    count: int | None = None
    config: Symbol | None = None
    """The dataclass that validates the JSON object."""
    enum: Symbol | None = None
    bounds: dict[str, float] = msgspec.field(default_factory=dict)
    values: TypeHints | None = None
    """The type of a dictionary's values."""
    checked: bool = True
    """Whether the types alone decide: false with ``SkipValidation``, or with a validator in the annotation."""

    def joined(self, other: TypeHints) -> TypeHints:
        """Union of both."""
        return TypeHints(
            self.names | other.names,
            self.options + tuple(option for option in other.options if option not in self.options),
            self.element or other.element,
            self.count if self.element else other.count,
            self.config or other.config,
            self.enum or other.enum,
            self.bounds | other.bounds,
            self.values or other.values,
            self.checked and other.checked,
        )


class ConfigField(msgspec.Struct, frozen=True):
    """One field of a configuration class, from which its flag is made.

    ``suggested`` are words of types that are imported only for type checkers; ``init`` is whether the field can be set.
    """

    name: str
    hints: TypeHints
    default: object
    help: str
    bounds: dict[str, float]
    suggested: tuple[str, ...] = ()
    init: bool = True


# -- annotations ------------------------------------------------------------------------------------------------------


_PLAIN = frozenset(("bool", "int", "float", "str", "dict", "list", "tuple", "set"))
_SEQUENCES = {
    "list": "list",
    "List": "list",
    "tuple": "tuple",
    "Tuple": "tuple",
    "set": "set",
    "Set": "set",
    "Sequence": "class",
    "frozenset": "class",
}
_DICTS = frozenset(("dict", "Dict"))
_THROUGH = frozenset(("SkipValidation", "Required", "NotRequired", "Final"))
_OTHER = TypeHints(frozenset(("class",)))
_DEPTH = 12


def hints_of(evaluator: Evaluator, module: Module, node: ast.AST | None, depth: int = 0) -> TypeHints:
    """The types in an annotation at the top level of ``module``."""
    if depth > _DEPTH:
        return _OTHER
    match node:
        case ast.Constant(value=None):
            return TypeHints(frozenset(("None",)))
        case ast.Constant(value=str(text)):
            try:
                return hints_of(evaluator, module, parse_expression(text), depth + 1)
            except SyntaxError:
                return _OTHER
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return hints_of(evaluator, module, left, depth + 1).joined(hints_of(evaluator, module, right, depth + 1))
        case ast.Subscript():
            return _subscript(evaluator, module, node, depth)
        case ast.Name() | ast.Attribute():
            symbol = evaluator.package.name_of(module, node)
            return _OTHER if symbol is None else _named(evaluator, symbol, depth)
    return _OTHER


def _named(evaluator: Evaluator, symbol: Symbol, depth: int) -> TypeHints:
    name = symbol.name
    if symbol.dotted.startswith("builtins.") and name in _PLAIN:
        return TypeHints(frozenset((name,)))
    if symbol.module is None:
        return TypeHints(frozenset((_SEQUENCES.get(name) or ("dict" if name in _DICTS else "class"),)))
    match symbol.node:
        case ast.Assign(value=value) | ast.AnnAssign(value=value):
            return hints_of(evaluator, symbol.module, value, depth + 1)
        case ast.ClassDef():
            return _class(evaluator, symbol)
    if type(symbol.node).__name__ == "TypeAlias":
        return hints_of(evaluator, symbol.module, getattr(symbol.node, "value", None), depth + 1)
    return _OTHER


def _class(evaluator: Evaluator, symbol: Symbol) -> TypeHints:
    if evaluator.is_enum(symbol):
        return TypeHints(frozenset(("class",)), enum=symbol)
    if is_dataclass(symbol):
        return TypeHints(frozenset(("class",)), config=symbol)
    bases = {base.dotted for base in evaluator.package.bases(symbol)}
    return TypeHints(frozenset(("dict",))) if "builtins.dict" in bases else _OTHER


def is_dataclass(symbol: Symbol) -> bool:
    """Whether a class has a dataclass decorator: the standard one, pydantic's, or vLLM's ``config``."""
    if not isinstance(symbol.node, ast.ClassDef):
        return False
    for decorator in symbol.node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if ast.unparse(called).rpartition(".")[2] in ("dataclass", "config"):
            return True
    return False


def _subscript(evaluator: Evaluator, module: Module, node: ast.Subscript, depth: int) -> TypeHints:
    symbol = evaluator.package.name_of(module, node.value)
    name = symbol.name if symbol is not None else ast.unparse(node.value).rpartition(".")[2]
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        return TypeHints(frozenset(("literal",)), options=_options(evaluator, module, inner, depth))
    if name in ("Union", "Optional"):
        result = TypeHints(frozenset(("None",)) if name == "Optional" else frozenset())
        for part in inner:
            result = result.joined(hints_of(evaluator, module, part, depth + 1))
        return result
    if name == "Annotated":
        bounds: dict[str, float] = {}
        for extra in inner[1:]:
            if isinstance(value := evaluator.value(module, extra), FieldValue):
                bounds |= value.bounds
        plain = not any("Validator" in ast.unparse(extra) for extra in inner[1:])
        return TypeHints(bounds=bounds, checked=plain).joined(hints_of(evaluator, module, inner[0], depth + 1))
    if name in _THROUGH:
        checked = name != "SkipValidation"
        return TypeHints(checked=checked).joined(hints_of(evaluator, module, inner[0], depth + 1))
    if name in _DICTS:
        values = hints_of(evaluator, module, inner[1], depth + 1) if len(inner) == 2 else None
        return TypeHints(frozenset(("dict",)), values=values)
    kind = _SEQUENCES.get(name, "class")
    if kind == "class":
        return _OTHER
    element = hints_of(evaluator, module, inner[0], depth + 1)
    counted = kind == "tuple" and not any(isinstance(p, ast.Constant) and p.value is Ellipsis for p in inner)
    return TypeHints(frozenset((kind,)), element=element, count=len(inner) if counted else None)


def _options(evaluator: Evaluator, module: Module, inner: list[ast.expr], depth: int) -> tuple[object, ...]:
    options: list[object] = []
    for part in inner:
        if isinstance(part, ast.Constant):
            options.append(part.value)
        elif isinstance(part, ast.Starred):
            value = evaluator.value(module, part.value)
            options += value if isinstance(value, (list, tuple)) else ()
        elif nested := hints_of(evaluator, module, part, depth + 1).options:
            options += nested
        else:
            options.append(evaluator.value(module, part))
    return tuple(dict.fromkeys(options))

"""Evaluates values and types in a package's source without running it: constants, ``Literal``, enums, ``Field``, …"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm_launchers.vllm.flags.hints import UNKNOWN, EnumMember, FieldValue, Instance, Optional, TypeHints, hints_of
from vllm_launchers.vllm.flags.package import Module, Package, Symbol

Scope = Mapping[str, object]

_NOTHING: Scope = {}
_BOUNDS = ("ge", "gt", "le", "lt")
_TEXT_METHODS = ("format", "join", "lower", "removeprefix", "replace", "split", "strip", "title", "upper")
_LIST_METHODS = ("append", "copy", "extend", "pop", "remove", "sort")
_DICT_METHODS = ("copy", "get", "items", "keys", "pop", "setdefault", "update", "values")
_METHODS = frozenset((*_TEXT_METHODS, *_LIST_METHODS, *_DICT_METHODS))
_CONSTANTS = {"ssl.CERT_NONE": 0, "ssl.CERT_OPTIONAL": 1, "ssl.CERT_REQUIRED": 2}
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.LShift: operator.lshift,
    ast.BitOr: operator.or_,
}
_BUILTINS: Mapping[str, Callable[..., object]] = {
    "dict": dict,
    "int": int,
    "list": list,
    "set": set,
    "sorted": sorted,
    "str": str,
    "tuple": tuple,
}
_MISTAKES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors that evaluating an unusual expression may raise."""

Call = Callable[[Symbol, ast.Call, Module, Scope], object]


class Evaluator:
    """Evaluates expressions. ``facts`` maps full names to values known in advance."""

    def __init__(self, package: Package, facts: Mapping[str, object] | None = None) -> None:
        self.package = package
        self.facts = _CONSTANTS | dict(facts or {})
        self.call: Call | None = None
        """Called first for calls to something in the package; returns UNKNOWN if it has no answer."""
        self._symbols: dict[str, object] = {}

    def value(self, module: Module, node: ast.AST | None, scope: Scope = _NOTHING) -> object:
        """The value of an expression at the top level of ``module``, with the names in ``scope``, or UNKNOWN."""
        if not isinstance(node, ast.expr):
            return None if node is None else UNKNOWN
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Lambda):
            return Symbol(f"{module.name}.<lambda>", module, node)
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is None:
            return UNKNOWN
        try:
            result: object = method(module, node, scope)
        except _MISTAKES:
            return UNKNOWN
        return result

    def symbol_value(self, symbol: Symbol) -> object:
        """The value of a constant, or the symbol itself for a class or function."""
        if symbol.dotted in self.facts:
            return self.facts[symbol.dotted]
        if isinstance(symbol.node, (ast.Assign, ast.AnnAssign)) and symbol.module is not None:
            if symbol.node.value is None:
                return symbol
            if symbol.dotted not in self._symbols:
                self._symbols[symbol.dotted] = UNKNOWN  # ends the evaluation of a recursive definition
                self._symbols[symbol.dotted] = self.value(symbol.module, symbol.node.value)
            return self._symbols[symbol.dotted]
        return symbol

    def attribute(self, owner: object, name: str) -> object:  # noqa: C901 (one branch per kind of attribute)
        """``owner.name``: a module's definition, a class's field default, an enum member, a docstring."""
        if isinstance(owner, EnumMember):
            return {"value": owner.value, "name": owner.name}.get(name, UNKNOWN)
        if not isinstance(owner, Symbol):
            return UNKNOWN
        dotted = f"{owner.dotted}.{name}"
        if dotted in self.facts:
            return self.facts[dotted]
        if owner.node is None:
            if owner.module is None:
                return Symbol(dotted)
            found = self.package.find(owner.module, name)
            return UNKNOWN if found is None else self.symbol_value(found)
        if not isinstance(owner.node, ast.ClassDef):
            return UNKNOWN
        if name == "__doc__":
            return ast.get_docstring(owner.node) or ""
        if name == "__name__":
            return owner.node.name
        for base in self.package.bases(owner):
            if isinstance(base.node, ast.ClassDef) and base.module is not None:
                for statement in base.node.body:
                    if _defines(statement, name):
                        return self._class_value(owner, base, statement, name)
        return UNKNOWN

    def _class_value(self, owner: Symbol, base: Symbol, statement: ast.stmt, name: str) -> object:
        assert base.module is not None
        if isinstance(statement, ast.FunctionDef):
            return Symbol(f"{base.dotted}.{name}", base.module, statement)
        value = self.class_expression(base, getattr(statement, "value", None))
        if self.is_enum(owner):
            return EnumMember(name, self._member_value(name, value), base.dotted)
        if isinstance(value, FieldValue):
            return value.default
        return UNKNOWN if getattr(statement, "value", None) is None else value

    @staticmethod
    def _member_value(name: str, value: object) -> object:
        return name.lower() if isinstance(value, Instance) or value is UNKNOWN else value

    def class_expression(self, owner: Symbol, node: ast.AST | None) -> object:
        """The value of an expression in a class body, where names of the class take precedence."""
        assert owner.module is not None
        scope = {}
        if isinstance(owner.node, ast.ClassDef) and node is not None:
            wanted = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            for statement in owner.node.body:
                for name in wanted:
                    if _defines(statement, name) and getattr(statement, "value", None) is not node:
                        scope[name] = self.value(owner.module, getattr(statement, "value", None))
        return self.value(owner.module, node, scope)

    def is_enum(self, symbol: Symbol) -> bool:
        """Whether a class is an enumeration."""
        return any(base.name in ("Enum", "StrEnum", "IntEnum", "Flag") for base in self.package.bases(symbol))

    def members(self, symbol: Symbol) -> list[EnumMember]:
        """An enumeration's members, in order."""
        body = symbol.node.body if isinstance(symbol.node, ast.ClassDef) else []
        found = []
        for statement in body:
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if isinstance(target, ast.Name) and not target.id.startswith("_"):
                member = self.attribute(symbol, target.id)
                found += [member] if isinstance(member, EnumMember) else []
        return found

    # Expressions: one method per type of node.

    def _name(self, module: Module, node: ast.Name, scope: Scope) -> object:
        if node.id in scope:
            return scope[node.id]
        found = self.package.find(module, node.id)
        return UNKNOWN if found is None else self.symbol_value(found)

    def _attribute(self, module: Module, node: ast.Attribute, scope: Scope) -> object:
        return self.attribute(self.value(module, node.value, scope), node.attr)

    def _list(self, module: Module, node: ast.List | ast.Tuple | ast.Set, scope: Scope) -> object:
        items: list[object] = []
        for element in node.elts:
            if isinstance(element, ast.Starred):
                inner = self.value(module, element.value, scope)
                if not isinstance(inner, (list, tuple, set)):
                    return UNKNOWN
                items += inner
            else:
                items.append(self.value(module, element, scope))
        return items

    def _tuple(self, module: Module, node: ast.Tuple, scope: Scope) -> object:
        items = self._list(module, node, scope)
        return tuple(items) if isinstance(items, list) else UNKNOWN

    def _set(self, module: Module, node: ast.Set, scope: Scope) -> object:
        items = self._list(module, node, scope)
        return set(items) if isinstance(items, list) else UNKNOWN

    def _dict(self, module: Module, node: ast.Dict, scope: Scope) -> object:
        result: dict[object, object] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            known = self.value(module, value, scope)
            if key is None and isinstance(known, dict):
                result |= known
            elif key is not None:
                result[self.value(module, key, scope)] = known
        return result

    def _unaryop(self, module: Module, node: ast.UnaryOp, scope: Scope) -> object:
        value = self.value(module, node.operand, scope)
        if isinstance(node.op, ast.Not):
            return UNKNOWN if _untold(value) else not value
        if isinstance(node.op, ast.USub) and isinstance(value, (int, float)):
            return -value
        return UNKNOWN

    def _binop(self, module: Module, node: ast.BinOp, scope: Scope) -> object:
        left, right = self.value(module, node.left, scope), self.value(module, node.right, scope)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int) and 0 <= right <= 64:
            return left**right
        function = _OPERATORS.get(type(node.op))
        if function is None or _untold(left) or _untold(right):
            return UNKNOWN
        if isinstance(node.op, (ast.Mult, ast.LShift)) and not (_small(left) and _small(right)):
            return UNKNOWN
        return function(left, right)

    def _boolop(self, module: Module, node: ast.BoolOp, scope: Scope) -> object:
        stop = isinstance(node.op, ast.Or)
        value: object = UNKNOWN
        for part in node.values:
            value = self.value(module, part, scope)
            if _untold(value) or bool(value) is stop:
                return value
        return value

    def _ifexp(self, module: Module, node: ast.IfExp, scope: Scope) -> object:
        test = self.value(module, node.test, scope)
        if _untold(test):
            return UNKNOWN
        return self.value(module, node.body if test else node.orelse, scope)

    def _compare(self, module: Module, node: ast.Compare, scope: Scope) -> object:
        left = self.value(module, node.left, scope)
        right = self.value(module, node.comparators[0], scope)
        if len(node.ops) != 1 or _untold(left) or _untold(right):
            return UNKNOWN
        match node.ops[0]:
            case ast.In():
                return left in right  # type: ignore[operator]
            case ast.NotIn():
                return left not in right  # type: ignore[operator]
            case ast.Eq():
                return left == right
            case ast.NotEq():
                return left != right
            case ast.Is():
                return left is right
            case ast.IsNot():
                return left is not right
        return UNKNOWN

    def _joinedstr(self, module: Module, node: ast.JoinedStr, scope: Scope) -> object:
        text = ""
        for part in node.values:
            value = self.value(module, part.value if isinstance(part, ast.FormattedValue) else part, scope)
            if _untold(value):
                return UNKNOWN
            text += str(value)
        return text

    def _subscript(self, module: Module, node: ast.Subscript, scope: Scope) -> object:
        owner: Any = self.value(module, node.value, scope)
        key: Any = self.value(module, node.slice, scope)
        if isinstance(owner, (dict, list, tuple, str)) and not isinstance(node.slice, ast.Slice):
            found: object = owner[key]
            return found
        return UNKNOWN

    def _listcomp(self, module: Module, node: ast.ListComp | ast.GeneratorExp, scope: Scope) -> object:
        loop = node.generators[0]
        items = self.iterated(self.value(module, loop.iter, scope))
        if len(node.generators) != 1 or loop.ifs or items is None or not isinstance(loop.target, ast.Name):
            return UNKNOWN
        return [self.value(module, node.elt, {**scope, loop.target.id: item}) for item in items]

    _generatorexp = _setcomp = _listcomp

    def iterated(self, value: object) -> list[object] | None:
        """The items that a loop over a value yields, or None."""
        if isinstance(value, Symbol) and self.is_enum(value):
            return list(self.members(value))
        return list(value) if isinstance(value, Iterable) else None

    def _call(self, module: Module, node: ast.Call, scope: Scope) -> object:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
            owner = self.value(module, node.func.value, scope)
            if isinstance(owner, (str, list, dict, set, tuple)):
                values = [self.value(module, argument, scope) for argument in node.args]
                result: object = getattr(owner, node.func.attr)(*values)
                return result
        function = self.value(module, node.func, scope)
        if not isinstance(function, Symbol):
            return UNKNOWN
        if function.node is not None and self.call is not None:
            found = self.call(function, node, module, scope)
            if found is not UNKNOWN:
                return found
        return self._known_call(function, module, node, scope)

    def _known_call(self, function: Symbol, module: Module, node: ast.Call, scope: Scope) -> object:
        values = [self.value(module, argument, scope) for argument in node.args]
        match function.name:
            case "field" | "Field":
                return self._field(module, node, scope)
            case "get_field" if len(values) == 2 and isinstance(values[1], str):
                return self.attribute(values[0], values[1])
            case "get_args" if node.args:
                return hints_of(self, module, node.args[0]).options
            case "optional_type" if values:
                return Optional(values[0])
            case "parse_type" | "cast" if values:
                return values[-1]
            case "permutations" if values and isinstance(values[0], (list, tuple)) and len(values[0]) < 6:
                length = {k.arg: self.value(module, k.value, scope) for k in node.keywords}.get("r")
                return list(itertools.permutations(values[0], length if isinstance(length, int) else None))
        if function.dotted.startswith("builtins.") and function.name in _BUILTINS:
            items = self.iterated(values[0]) if values and isinstance(values[0], Symbol) else None
            values = [items] if items is not None else values
            return UNKNOWN if any(map(_untold, values)) else _BUILTINS[function.name](*values)
        return Instance()

    def _field(self, module: Module, node: ast.Call, scope: Scope) -> object:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        known = {name: self.value(module, keywords[name], scope) for name in (*_BOUNDS, "init") if name in keywords}
        bounds = {
            name: float(bound)
            for name in _BOUNDS
            if isinstance(bound := known.get(name), (int, float)) and not isinstance(bound, bool)
        }
        init = known.get("init") is not False
        default = keywords.get("default") or (node.args[0] if node.args else None)
        if default is not None:
            value = self.value(module, default, scope)
            return FieldValue(value, init, bounds)
        if (factory := keywords.get("default_factory")) is not None:
            return FieldValue(self._made(self.value(module, factory, scope)), init, bounds)
        return FieldValue(init=init, bounds=bounds)

    def _made(self, factory: object) -> object:
        """What a default factory returns."""
        if not isinstance(factory, Symbol):
            return UNKNOWN
        if isinstance(factory.node, ast.Lambda) and factory.module is not None:
            return self.value(factory.module, factory.node.body)
        empty: dict[str, object] = {"builtins.list": [], "builtins.dict": {}, "builtins.set": set()}
        bases = [base.dotted for base in self.package.bases(factory)]
        return next((empty[base] for base in bases if base in empty), Instance())


def _defines(statement: ast.stmt, name: str) -> bool:
    match statement:
        case ast.AnnAssign(target=ast.Name(id=found)):
            return found == name
        case ast.FunctionDef(name=found):
            return found == name
        case ast.Assign(targets=targets):
            return any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return False


def _untold(value: object) -> bool:
    return value is UNKNOWN or isinstance(value, (Symbol, Instance, FieldValue, TypeHints))


def _small(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= 2**40

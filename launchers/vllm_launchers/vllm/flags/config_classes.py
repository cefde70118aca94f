"""Configuration classes in a package's source: their fields, and how validators change what a field accepts."""

from __future__ import annotations

import ast
import inspect
import re
from enum import Enum, auto

from vllm_launchers.vllm.flags.evaluate import Evaluator
from vllm_launchers.vllm.flags.hints import UNKNOWN, ConfigField, FieldValue, hints_of
from vllm_launchers.vllm.flags.package import Module, Symbol


def config_fields(evaluator: Evaluator, symbol: Symbol) -> dict[str, ConfigField]:
    """Fields of a dataclass of the package, its bases' first, like ``dataclasses.fields``."""
    found: dict[str, ConfigField] = {}
    for base in reversed(list(evaluator.package.bases(symbol))):
        if not isinstance(base.node, ast.ClassDef) or base.module is None:
            continue
        body = base.node.body
        for place, statement in enumerate(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                after = body[place + 1] if place + 1 < len(body) else None
                if (made := _field(evaluator, base, base.module, statement, after)) is not None:
                    found[made.name] = made
    return found


def _field(
    evaluator: Evaluator, owner: Symbol, module: Module, node: ast.AnnAssign, after: ast.stmt | None
) -> ConfigField | None:
    assert isinstance(node.target, ast.Name)
    annotation = ast.unparse(node.annotation)
    if annotation.startswith(("ClassVar", "InitVar", "typing.ClassVar")):
        return None
    hints = hints_of(evaluator, module, node.annotation)
    default = evaluator.class_expression(owner, node.value) if node.value is not None else UNKNOWN
    bounds, init = hints.bounds, True
    if isinstance(default, FieldValue):
        bounds, init = bounds | default.bounds, default.init
        default = default.default
    help = ""
    if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
        help = inspect.cleandoc(after.value.value).strip()
    return ConfigField(node.target.id, hints, default, help, bounds, _suggested(evaluator, module, node), init)


def _suggested(evaluator: Evaluator, module: Module, node: ast.AnnAssign) -> tuple[str, ...]:
    """Words of a ``Literal`` that a module imports only for type checkers, like ``QuantizationMethods``."""
    words: list[str] = []
    for name in (n.id for n in ast.walk(node.annotation) if isinstance(n, ast.Name)):
        statement = module.hinted.get(name)
        if isinstance(statement, ast.ImportFrom):
            symbol = evaluator.package.imported(module, statement, name)
            if (
                symbol is not None
                and isinstance(symbol.node, (ast.Assign, ast.AnnAssign))
                and symbol.module is not None
            ):
                options = hints_of(evaluator, symbol.module, symbol.node.value).options
                words += [option for option in options if isinstance(option, str)]
    return tuple(dict.fromkeys(words))


def forbids_other_keys(evaluator: Evaluator, config: Symbol) -> bool:
    """Whether pydantic rejects unknown keys of a class: its decorator has ``extra="forbid"``."""
    if not isinstance(config.node, ast.ClassDef) or config.module is None:
        return False
    for decorator in config.node.decorator_list:
        text = ast.unparse(decorator)
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        symbol = evaluator.package.name_of(config.module, called)
        if symbol is not None and symbol.node is not None:
            text += ast.unparse(symbol.node)
        if re.search(r"extra\W{1,4}forbid", text):
            return True
    return False


class Reading(Enum):
    """How a field's validators treat a value before its type is checked."""

    OR_NOTHING = auto()
    """``None`` is accepted too."""
    MEMBER_NAME = auto()
    """Text is the name of an enum member, in any case."""
    MEMBER_NAME_OR_AUTO = auto()
    PLAIN_WORD = auto()
    """Text is lowercased, and ``-`` becomes ``_``."""
    UNKNOWN = auto()


def readings(evaluator: Evaluator, config: Symbol) -> dict[str, frozenset[Reading]]:
    """How validators treat values before types are checked, by field; ``*`` stands for all fields."""
    found: dict[str, frozenset[Reading]] = {}
    for base in reversed(list(evaluator.package.bases(config))):
        for statement in base.node.body if isinstance(base.node, ast.ClassDef) else ():
            if not isinstance(statement, ast.FunctionDef):
                continue
            for decorator in statement.decorator_list:
                names, mode = _validator(decorator)
                if names and mode != "after" and (reading := _reading(statement, mode)) is not None:
                    found.update((name, found.get(name, frozenset()) | {reading}) for name in names)
    return found


def rewrites_keys(evaluator: Evaluator, config: Symbol) -> bool:
    """Whether a class-level validator may change the keys before they are checked."""
    for base in evaluator.package.bases(config):
        for statement in base.node.body if isinstance(base.node, ast.ClassDef) else ():
            if not isinstance(statement, ast.FunctionDef):
                continue
            text = " ".join(ast.unparse(decorator) for decorator in statement.decorator_list)
            if re.search(r"model_validator\(.*(before|wrap)", text) and re.search(
                r"\.pop\(|\] = |\.update\(|setdefault\(|del |\{\*\*|dict\(", ast.unparse(statement)
            ):
                return True
    return False


def _validator(decorator: ast.expr) -> tuple[list[str], str]:
    """The fields and the mode of a ``field_validator(…)``; no fields for other decorators."""
    if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith("field_validator"):
        return [], ""
    names = [argument.value for argument in decorator.args if isinstance(argument, ast.Constant)]
    modes = [keyword.value for keyword in decorator.keywords if keyword.arg == "mode"]
    mode = modes[0].value if modes and isinstance(modes[0], ast.Constant) else "" if modes else "after"
    return [name for name in names if isinstance(name, str)] if len(names) == len(decorator.args) else ["*"], str(mode)


def _reading(validator: ast.FunctionDef, mode: str) -> Reading | None:
    """How a validator treats a value, UNKNOWN if that is unclear; None if it leaves the value to the type check."""
    text = ast.unparse(validator)
    if mode == "wrap":
        plain = "is None:" in text and text.rstrip().endswith("return handler(value)")
        return Reading.OR_NOTHING if plain and text.count("handler(value)") == 1 else Reading.UNKNOWN
    if mode != "before" or not text.rstrip().endswith("return value"):
        return Reading.UNKNOWN
    if ".upper()" in text:
        return Reading.MEMBER_NAME_OR_AUTO if "'auto'" in text else Reading.MEMBER_NAME
    if ".lower().replace('-', '_')" in text:
        return Reading.PLAIN_WORD
    return None if re.search(r"isinstance\(value, dict\):\n\s+return \w+\(\*\*value\)\n", text) else Reading.UNKNOWN

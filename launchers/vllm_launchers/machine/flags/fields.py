"""The fields of vLLM's configuration classes, and what its ``get_kwargs`` makes of each for argparse."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping

from vllm_launchers.machine.flags.evaluate import Evaluator
from vllm_launchers.machine.flags.hints import hints_of, is_dataclass
from vllm_launchers.machine.flags.package import Module, Symbol
from vllm_launchers.machine.flags.values import UNKNOWN, ConfigField, FieldValue, Hints, Optional

Kwargs = dict[str, object]
"""Keyword arguments of ``add_argument``; under FIELD the field that they were made from."""

FIELD = "__field__"
HUMAN, HUMAN_OR_AUTO = "human_readable_int", "human_readable_int_or_auto"
JSON, TEXT_OR_JSON, OBJECT = "json.loads", "union_dict_and_str", "parse_dataclass"


def config_fields(evaluator: Evaluator, symbol: Symbol) -> dict[str, ConfigField]:
    """Fields of a dataclass of the package, its bases' first, as ``dataclasses.fields`` has them."""
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
    """Words of a ``Literal`` that a module imports for type checkers only, as ``QuantizationMethods`` is."""
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


def human_names(get_kwargs: Symbol) -> dict[str, str]:
    """Fields whose whole numbers may be written 4k, by what reads them: as the source of ``get_kwargs`` says."""
    module = get_kwargs.module
    function = module.names.get("_compute_kwargs", get_kwargs.node) if module is not None else None
    if not isinstance(function, ast.FunctionDef):
        return {}
    sets = {
        target.id: _strings(node.value)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
    }
    names: dict[str, str] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
            continue
        used = {inner.id for stmt in node.body for inner in ast.walk(stmt) if isinstance(inner, ast.Name)}
        reader = HUMAN_OR_AUTO if HUMAN_OR_AUTO in used else HUMAN if HUMAN in used else None
        if reader is not None and isinstance(node.test.left, ast.Name) and node.test.left.id == "name":
            right = node.test.comparators[0]
            wanted = sets.get(right.id, ()) if isinstance(right, ast.Name) else _strings(right)
            for name in wanted:
                names.setdefault(name, reader)
    return names


def _strings(node: ast.expr) -> tuple[str, ...]:
    return tuple(n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def argparse_kwargs(field: ConfigField, humans: Mapping[str, str]) -> Kwargs:
    """What ``get_kwargs`` gives for a field."""
    kwargs: Kwargs = {"default": field.default, "help": field.help, FIELD: field}
    names = field.hints.names
    if field.hints.config is not None and is_dataclass(field.hints.config):
        kwargs["type"] = OBJECT
    elif names == {"bool", "str", "None"}:
        return kwargs | {"type": "str", "nargs": "?", "const": True}
    elif "bool" in names:
        return kwargs | {"action": "BooleanOptionalAction"}
    elif "literal" in names:
        kwargs |= _literal(field.hints)
    elif collection := names & {"tuple", "list", "set"}:
        kwargs |= _collection(field.hints, "tuple" in collection)
    elif "int" in names:
        kwargs["type"] = humans.get(field.name, "int")
    elif "float" in names:
        kwargs["type"] = "float"
    elif "dict" in names:
        kwargs["type"] = TEXT_OR_JSON if names & {"str", "class"} else JSON
    else:
        kwargs["type"] = "str"
    if "None" in names:
        kwargs["type"] = Optional(kwargs["type"])
        if isinstance(choices := kwargs.get("choices"), list):
            choices.append(None)
    return kwargs


def _literal(hints: Hints) -> Kwargs:
    told = [option for option in hints.options if isinstance(option, (str, int))]
    kind = "int" if told and all(isinstance(option, int) for option in told) else "str"
    if len(told) != len(hints.options):
        return {"type": kind, "choices": UNKNOWN}
    ordered = sorted(told, key=lambda option: (isinstance(option, str), option))
    return {"type": kind, ("metavar" if "str" in hints.names else "choices"): ordered}


def _collection(hints: Hints, is_tuple: bool) -> Kwargs:
    nargs = hints.count if is_tuple and hints.count is not None else "+"
    element = hints.element
    if element is None:
        return {"type": UNKNOWN, "nargs": nargs}
    if "literal" in element.names and len(element.names) == 1:
        return {"nargs": nargs} | _literal(element)
    plain = element.names & {"int", "float", "str", "bool"}
    return {"type": next(iter(plain)) if len(element.names) == 1 and plain else "str", "nargs": nargs}

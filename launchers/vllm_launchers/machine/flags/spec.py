"""From one ``add_argument`` of vLLM, as its source has it, to a flag as this program knows it."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace

from vllm_launchers.machine.flags.evaluate import Evaluator
from vllm_launchers.machine.flags.fields import (
    FIELD,
    HUMAN,
    HUMAN_OR_AUTO,
    JSON,
    OBJECT,
    TEXT_OR_JSON,
    config_fields,
)
from vllm_launchers.machine.flags.hints import is_dataclass
from vllm_launchers.machine.flags.model import FlagSpec, ValueKind
from vllm_launchers.machine.flags.package import Symbol
from vllm_launchers.machine.flags.registration import Registered
from vllm_launchers.machine.flags.values import UNKNOWN, ConfigField, EnumMember, Hints, Instance, Optional

_KINDS = {
    "int": ValueKind.INT,
    "float": ValueKind.FLOAT,
    "str": ValueKind.TEXT,
    HUMAN: ValueKind.HUMAN_INT,
    HUMAN_OR_AUTO: ValueKind.HUMAN_INT,
    JSON: ValueKind.JSON,
    "json.loads": ValueKind.JSON,
    OBJECT: ValueKind.JSON,
    TEXT_OR_JSON: ValueKind.OTHER,
    "": ValueKind.TEXT,
}
_OBJECTS = frozenset(("hf-overrides", "additional-config"))
"""Read as text or as an object, but only an object (or a function, from Python) passes the configuration."""

_CLOSED = frozenset(("quantization",))
"""Any text to the types; the configuration refuses what is not among their words."""

_HELP = 4000
_OBSOLETE = re.compile(r"\[?\bdeprecated\b", re.IGNORECASE)


def flag_spec(evaluator: Evaluator, registered: Registered) -> FlagSpec | None:
    """The flag that a call of ``add_argument`` makes, or None for a positional argument or ``--help``."""
    long = [option[2:].replace("_", "-") for option in registered.options if option.startswith("--")]
    if not long or long[0] == "help":
        return None
    kwargs = registered.kwargs
    field = kwargs.get(FIELD) or _configured(evaluator, registered.group, long[0].replace("-", "_"))
    field = field if isinstance(field, ConfigField) else None
    others = tuple(option for option in registered.options if option.replace("_", "-") != f"--{long[0]}")
    help = kwargs.get("help")
    text = help.replace("%%", "%").strip() if isinstance(help, str) else ""
    spec = FlagSpec(
        name=long[0],
        kind=ValueKind.TEXT,
        default=default_text(kwargs.get("default")),
        help=text[:_HELP],
        group=registered.group,
        aliases=others,
        deprecated=_deprecated(kwargs, text),
    )
    spec = _with_action(evaluator, spec, registered)
    if field is not None and spec.kind is ValueKind.JSON and field.hints.names & {"list", "tuple", "set"}:
        spec = replace(spec, kind=ValueKind.JSON_LIST)
    if field is not None and spec.kind is not ValueKind.BOOL:
        ge, gt, le, lt = (field.bounds.get(name) for name in ("ge", "gt", "le", "lt"))
        spec = replace(spec, minimum=ge, above=gt, maximum=le, below=lt)
        spec = _with_words(evaluator, spec, field)
        if spec.name in _OBJECTS and spec.kind is ValueKind.OTHER:
            spec = replace(spec, kind=ValueKind.JSON)
    return spec


def _configured(evaluator: Evaluator, group: str, name: str) -> ConfigField | None:
    """The configuration's field that a flag ends in whose arguments were written out by hand, as far as names tell."""
    module = evaluator.package.module(f"{evaluator.package.name}.config")
    config = evaluator.package.find(module, group or "VllmConfig") if module is not None else None
    if config is None or not isinstance(config.node, ast.ClassDef) or not is_dataclass(config):
        return None
    return config_fields(evaluator, config).get(name)


def _with_action(evaluator: Evaluator, spec: FlagSpec, registered: Registered) -> FlagSpec:
    kwargs = registered.kwargs
    if kwargs.get("action") is UNKNOWN and "type" not in kwargs:  # it may be a switch, or take anything
        return replace(spec, kind=ValueKind.OTHER, bare=True, negatable=True)
    action = _named(kwargs.get("action"))
    if action in ("store_true", "store_false", "BooleanOptionalAction"):
        default = spec.default
        if "default" not in kwargs and action != "BooleanOptionalAction":
            default = "false" if action == "store_true" else "true"
        return replace(spec, kind=ValueKind.BOOL, negatable=action == "BooleanOptionalAction", default=default)
    reader = kwargs.get("type", "")
    nullable = isinstance(reader, Optional)
    kind, words = _kind(reader.inner if isinstance(reader, Optional) else reader)
    choices = _texts(kwargs.get("choices"))
    nargs = kwargs.get("nargs")
    many = action == "append" or nargs in ("+", "*") or (isinstance(nargs, int) and nargs > 1)
    metavar = kwargs.get("metavar")
    if isinstance(metavar, list):
        words += _texts(metavar)
    field = kwargs.get(FIELD)
    parts: tuple[FlagSpec, ...] = ()
    if kind is ValueKind.JSON and isinstance(field, ConfigField):
        parts = _parts(evaluator, field.hints)
    return replace(
        spec, kind=kind, choices=choices, many=many, nullable=nullable, words=words, bare=nargs == "?", parts=parts
    )


def _kind(reader: object) -> tuple[ValueKind, tuple[str, ...]]:
    name = _named(reader)
    if isinstance(reader, Symbol) and isinstance(reader.node, (ast.Lambda, ast.FunctionDef)) and name not in _KINDS:
        return ValueKind.OTHER, ()
    return _KINDS.get(name, ValueKind.OTHER), (("auto", "-1") if name == HUMAN_OR_AUTO else ())


def _named(value: object) -> str:
    """A type's or action's name, ``json.loads`` in full."""
    if isinstance(value, Symbol):
        return "json.loads" if value.dotted == "json.loads" else value.name
    return value if isinstance(value, str) else "?"


def _texts(values: object) -> tuple[str, ...]:
    """Choices as text; none where one of them could not be told, so that no right value is refused."""
    if not isinstance(values, (list, tuple)) or any(value is UNKNOWN for value in values):
        return ()
    plain = (value.value if isinstance(value, EnumMember) else value for value in values)
    return tuple(dict.fromkeys(str(value) for value in plain if value is not None and value != "None"))


def _with_words(evaluator: Evaluator, spec: FlagSpec, field: ConfigField) -> FlagSpec:
    """Words to be completed where any text is parsed: names of an enumeration, and what type checkers are told."""
    if spec.choices or spec.kind not in (ValueKind.TEXT, ValueKind.OTHER):
        return spec
    words = spec.words + field.suggested
    enum = field.hints.enum
    if enum is None:
        options = () if "str" in field.hints.names else _texts(field.hints.options)
        closed = bool(options) or spec.name in _CLOSED
        return replace(spec, words=tuple(dict.fromkeys((*words, *options))), closed=closed and bool(words or options))
    words += tuple(_enum_word(member) for member in evaluator.members(enum))
    return replace(spec, words=tuple(dict.fromkeys(words)), closed="str" not in field.hints.names)


def _enum_word(member: EnumMember) -> str:
    """How a member is written on a command line: its value where that is a number or one plain word, else its name."""
    if isinstance(member.value, int):
        return str(member.value)
    return member.value if isinstance(member.value, str) and re.fullmatch(r"[a-z0-9_]+", member.value) else member.name


def _parts(evaluator: Evaluator, hints: Hints) -> tuple[FlagSpec, ...]:
    """The keys that a JSON object may have, where the class that reads it forbids others."""
    if hints.config is None or not _forbids(evaluator, hints.config):
        return ()
    return tuple(
        FlagSpec(field.name, ValueKind.OTHER, default_text(field.default), help=field.help.partition("\n\n")[0][:_HELP])
        for field in config_fields(evaluator, hints.config).values()
        if field.init and not field.name.startswith("_")
    )


def _forbids(evaluator: Evaluator, config: Symbol) -> bool:
    """Whether pydantic refuses keys that a class does not have: its decorator says ``extra="forbid"``."""
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


def default_text(value: object) -> str | None:
    """A default as a person would type it, or None where vLLM works it out itself or it could not be told."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, EnumMember):
        return _enum_word(value)
    if value is None or value is UNKNOWN or isinstance(value, (Symbol, Instance)):
        return None
    if isinstance(value, (set, frozenset, tuple)):
        value = sorted(value, key=str)
    if isinstance(value, (list, dict)):
        return json.dumps(value, default=str)
    return str(value)


def _deprecated(kwargs: dict[str, object], help: str) -> str:
    if kwargs.get("deprecated") is True:
        return help.partition("\n\n")[0] or "deprecated"
    if _OBSOLETE.match(help.strip()) or re.match(r"--[a-z-]+ is deprecated", help):
        return help.partition("\n\n")[0]
    return ""

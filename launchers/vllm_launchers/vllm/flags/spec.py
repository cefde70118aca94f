"""Converts ``add_argument`` calls in vLLM's source to `FlagSpec`."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.python_source import parse_expression
from vllm_launchers.vllm.flags.config_classes import config_fields
from vllm_launchers.vllm.flags.evaluate import Evaluator, Scope
from vllm_launchers.vllm.flags.flag_table import FlagSpec, ValueKind
from vllm_launchers.vllm.flags.hints import (
    UNKNOWN,
    ConfigField,
    Optional,
    TypeHints,
    is_dataclass,
)
from vllm_launchers.vllm.flags.nested import parts_of
from vllm_launchers.vllm.flags.package import Module, Symbol, imported_as
from vllm_launchers.vllm.flags.value_text import default_text, enum_word, texts

Kwargs = dict[str, object]
"""Keyword arguments of ``add_argument``; the key FIELD holds the field that they were made from."""

FIELD = "__field__"
HUMAN, HUMAN_OR_AUTO = "human_readable_int", "human_readable_int_or_auto"
JSON, TEXT_OR_JSON, OBJECT = "json.loads", "union_dict_and_str", "parse_dataclass"


def human_names(get_kwargs: Symbol) -> dict[str, str]:
    """Fields that accept numbers such as 4k, with their converter, from the source of ``get_kwargs``."""
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


def argparse_kwargs(field: ConfigField, humans: Mapping[str, str]) -> Kwargs:  # noqa: C901 (one branch per kind of type)
    """What vLLM's ``get_kwargs`` returns for a field."""
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


def _literal(hints: TypeHints) -> Kwargs:
    choices = [option for option in hints.options if isinstance(option, (str, int))]
    kind = "int" if choices and all(isinstance(option, int) for option in choices) else "str"
    if len(choices) != len(hints.options):
        return {"type": kind, "choices": UNKNOWN}
    ordered = sorted(choices, key=lambda option: (isinstance(option, str), option))
    return {"type": kind, ("metavar" if "str" in hints.names else "choices"): ordered}


def _collection(hints: TypeHints, is_tuple: bool) -> Kwargs:
    nargs = hints.count if is_tuple and hints.count is not None else "+"
    element = hints.element
    if element is None:
        return {"type": UNKNOWN, "nargs": nargs}
    if "literal" in element.names and len(element.names) == 1:
        return {"nargs": nargs} | _literal(element)
    plain = element.names & {"int", "float", "str", "bool"}
    return {"type": next(iter(plain)) if len(element.names) == 1 and plain else "str", "nargs": nargs}


_DEPTH = 12


@dataclass(eq=False, slots=True)
class ArgumentGroup:
    """A parser or one of its groups."""

    group: str = ""


class Registered(msgspec.Struct, frozen=True):
    """One call of ``add_argument``: option strings as written, evaluated keyword arguments, the group's title."""

    options: tuple[str, ...]
    kwargs: Kwargs
    group: str


@dataclass(slots=True)
class _Frame:
    """A function being followed."""

    module: Module
    names: dict[str, object] = field(default_factory=dict)
    owner: Symbol | None = None
    """The class that the method was called on."""
    holder: Symbol | None = None
    """The class that defines it."""
    result: object = UNKNOWN
    done: bool = False


class Registration:
    """Follows functions that add arguments to a parser. ``found`` are the flags, in order."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.found: list[Registered] = []
        self._evaluator = evaluator
        self._kwargs: dict[str, dict[str, Kwargs]] = {}
        self._frames: list[_Frame] = []
        evaluator.call = self._asked

    def follow(
        self, function: Symbol, arguments: list[object], owner: Symbol | None = None, holder: Symbol | None = None
    ) -> object:
        """Follow a function of the package, called with these positional arguments; return its result or UNKNOWN."""
        node = function.node
        if not isinstance(node, ast.FunctionDef) or function.module is None or len(self._frames) >= _DEPTH:
            return UNKNOWN
        parameters = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        frame = _Frame(function.module, owner=owner, holder=holder)
        if owner is not None and any(_is_name(d, "classmethod") for d in node.decorator_list):
            arguments = [owner, *arguments]
        for name, value in zip(parameters[::-1], node.args.defaults[::-1], strict=False):
            frame.names[name] = self._evaluator.value(frame.module, value)
        frame.names |= dict(zip(parameters, arguments, strict=False))
        self._frames.append(frame)
        try:
            self._run(frame, node.body)
        finally:
            self._frames.pop()
        return frame.result

    def _value(self, frame: _Frame, node: ast.AST | None) -> object:
        return self._evaluator.value(frame.module, node, frame.names)

    def _run(self, frame: _Frame, body: list[ast.stmt]) -> None:
        for statement in body:
            if frame.done:
                return
            self._step(frame, statement)

    def _step(self, frame: _Frame, statement: ast.stmt) -> None:  # noqa: C901 (one branch per kind of statement)
        match statement:
            case ast.Assign(targets=targets, value=value):
                value_known = self._call_or_value(frame, value)
                for target in targets:
                    self._assign(frame, target, value_known)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(frame, target, self._call_or_value(frame, value))
            case ast.AugAssign(target=target, op=op, value=value):
                load = parse_expression(ast.unparse(target))
                self._assign(frame, target, self._value(frame, ast.BinOp(left=load, op=op, right=value)))
            case ast.Delete(targets=targets):
                for target in targets:
                    if isinstance(target, ast.Subscript):
                        owner, key = self._value(frame, target.value), self._value(frame, target.slice)
                        if isinstance(owner, dict):
                            owner.pop(key, None)
            case ast.Expr(value=value):
                self._call_or_value(frame, value)
            case ast.Return(value=value):
                frame.result, frame.done = (self._call_or_value(frame, value) if value else None), True
            case ast.If():
                self._branch(frame, statement)
            case ast.For(target=target, iter=iterated, body=body):
                for item in self._evaluator.iterated(self._value(frame, iterated)) or []:
                    self._assign(frame, target, item)
                    self._run(frame, body)
            case ast.With(body=body) | ast.Try(body=body):
                self._run(frame, body)
            case ast.FunctionDef(name=name):
                frame.names[name] = Symbol(f"{frame.module.name}.{name}", frame.module, statement)
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    name = imported_as(alias)
                    found = self._evaluator.package.imported(frame.module, statement, name)
                    frame.names[name] = UNKNOWN if found is None else self._evaluator.symbol_value(found)

    def _branch(self, frame: _Frame, statement: ast.If) -> None:
        test = self._value(frame, statement.test)
        if isinstance(test, (bool, int, str, list, dict, set)) or test is None:
            self._run(frame, statement.body if test else statement.orelse)
            return
        if not _leaves(statement.body):
            self._run(frame, statement.body)  # run both: better show a flag that only some machines have than hide it
        self._run(frame, statement.orelse)

    def _assign(self, frame: _Frame, target: ast.expr, value: object) -> None:
        match target:
            case ast.Name(id=name):
                frame.names[name] = value
            case ast.Subscript(value=owner, slice=key):
                held = self._value(frame, owner)
                if isinstance(held, dict):
                    held[self._value(frame, key)] = value
            case ast.Tuple(elts=parts) if isinstance(value, (tuple, list)) and len(value) == len(parts):
                for part, item in zip(parts, value, strict=True):
                    self._assign(frame, part, item)

    def _call_or_value(self, frame: _Frame, node: ast.expr) -> object:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            attribute = node.func.attr
            if attribute == "set_defaults":
                return UNKNOWN
            owner = None if _is_super(node.func.value) else self._value(frame, node.func.value)
            if isinstance(owner, ArgumentGroup):
                return self._on_target(frame, owner, attribute, node)
            if owner is None and frame.owner is not None:
                return self._inherited(frame, attribute, node)
            if isinstance(owner, Symbol) and isinstance(owner.node, ast.ClassDef):
                return self._method(frame, self._evaluator.package.bases(owner), owner, attribute, node)
        return self._value(frame, node)

    def _on_target(self, frame: _Frame, target: ArgumentGroup, attribute: str, node: ast.Call) -> object:
        keywords: Kwargs = {}
        for keyword in node.keywords:
            value_known = self._value(frame, keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value_known
            else:
                keywords |= value_known if isinstance(value_known, dict) else {"action": UNKNOWN}
        if attribute == "add_argument_group":
            title = keywords.get("title") or (self._value(frame, node.args[0]) if node.args else "")
            return ArgumentGroup(title if isinstance(title, str) else "")
        if attribute == "add_mutually_exclusive_group":
            return target
        if attribute == "add_argument":
            words: list[object] = []
            for argument in node.args:
                starred = isinstance(argument, ast.Starred)
                value_known = self._value(frame, argument.value if isinstance(argument, ast.Starred) else argument)
                words += (value_known if isinstance(value_known, (list, tuple)) else []) if starred else [value_known]
            options = tuple(word for word in words if isinstance(word, str))
            self.found.append(Registered(options, dict(keywords), target.group))
        return UNKNOWN

    def _inherited(self, frame: _Frame, attribute: str, node: ast.Call) -> object:
        """Call ``super().attribute(…)``: look it up in the classes after the one whose method is being followed."""
        assert frame.owner is not None
        bases = list(self._evaluator.package.bases(frame.owner))
        after = bases[bases.index(frame.holder) + 1 :] if frame.holder in bases else bases[1:]
        return self._method(frame, after, frame.owner, attribute, node)

    @staticmethod
    def _body_of(owner: Symbol, attribute: str) -> ast.FunctionDef | None:
        body = owner.node.body if isinstance(owner.node, ast.ClassDef) else []
        return next((s for s in body if isinstance(s, ast.FunctionDef) and s.name == attribute), None)

    def _method(
        self, frame: _Frame, classes: Iterable[Symbol], owner: Symbol, attribute: str, node: ast.Call
    ) -> object:
        for holder in classes:
            if (body := self._body_of(holder, attribute)) is not None:
                method = Symbol(f"{holder.dotted}.{attribute}", holder.module, body)
                arguments = [self._value(frame, argument) for argument in node.args]
                return self.follow(method, arguments, owner, holder)
        return UNKNOWN

    def _asked(self, function: Symbol, node: ast.Call, module: Module, scope: Scope) -> object:
        """Handle a call to something in the package inside an expression."""
        values = [self._evaluator.value(module, argument, scope) for argument in node.args]
        if function.name == "get_kwargs" and values and isinstance(values[0], Symbol):
            return self._config_kwargs(function, values[0])
        if isinstance(function.node, ast.FunctionDef) and any(isinstance(v, (ArgumentGroup, dict)) for v in values):
            return self.follow(function, values)
        return UNKNOWN

    def _config_kwargs(self, function: Symbol, config: Symbol) -> object:
        if config.dotted not in self._kwargs:
            humans = human_names(function)
            fields = config_fields(self._evaluator, config)
            self._kwargs[config.dotted] = {name: argparse_kwargs(field, humans) for name, field in fields.items()}
        return {
            name: {
                key: copy.copy(value) if isinstance(value, (list, dict, set)) else value
                for key, value in kwargs.items()
            }
            for name, kwargs in self._kwargs[config.dotted].items()
        }


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _is_name(node.func, "super")


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _leaves(body: list[ast.stmt]) -> bool:
    return any(isinstance(statement, (ast.Return, ast.Raise, ast.Continue, ast.Break)) for statement in body)


_KINDS = {
    "int": ValueKind.INT,
    "float": ValueKind.FLOAT,
    "str": ValueKind.TEXT,
    HUMAN: ValueKind.HUMAN_INT,
    HUMAN_OR_AUTO: ValueKind.HUMAN_INT,
    JSON: ValueKind.JSON,
    OBJECT: ValueKind.JSON,
    TEXT_OR_JSON: ValueKind.OTHER,
    "": ValueKind.TEXT,
}
_OBJECTS = frozenset(("hf-overrides", "additional-config"))
"""Parsed as text or an object, but the configuration accepts only an object (or, from Python, a function)."""

_CLOSED = frozenset(("quantization",))
"""Typed as any text, but the configuration accepts only the known words."""

_HELP = 4000
_OBSOLETE = lazy_pattern(r"\[?\bdeprecated\b", re.IGNORECASE)


def flag_spec(evaluator: Evaluator, registered: Registered) -> FlagSpec | None:
    """The flag that an ``add_argument`` call defines; None for a positional argument or ``--help``."""
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
    """The configuration field with the name of a flag that vLLM does not generate from it."""
    module = evaluator.package.module(f"{evaluator.package.name}.config")
    config = evaluator.package.find(module, group or "VllmConfig") if module is not None else None
    if config is None or not isinstance(config.node, ast.ClassDef) or not is_dataclass(config):
        return None
    return config_fields(evaluator, config).get(name)


def _with_action(evaluator: Evaluator, spec: FlagSpec, registered: Registered) -> FlagSpec:
    kwargs = registered.kwargs
    if kwargs.get("action") is UNKNOWN and "type" not in kwargs:  # it may be a switch, or accept anything
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
    choices = texts(kwargs.get("choices"))
    nargs = kwargs.get("nargs")
    many = action == "append" or nargs in ("+", "*") or (isinstance(nargs, int) and nargs > 1)
    metavar = kwargs.get("metavar")
    if isinstance(metavar, list):
        words += texts(metavar)
    field = kwargs.get(FIELD)
    parts: tuple[FlagSpec, ...] = ()
    if kind is ValueKind.JSON and isinstance(field, ConfigField):
        parts = parts_of(evaluator, field.hints)
    return replace(
        spec, kind=kind, choices=choices, many=many, nullable=nullable, words=words, bare=nargs == "?", parts=parts
    )


def _kind(reader: object) -> tuple[ValueKind, tuple[str, ...]]:
    name = _named(reader)
    if isinstance(reader, Symbol) and isinstance(reader.node, (ast.Lambda, ast.FunctionDef)) and name not in _KINDS:
        return ValueKind.OTHER, ()
    return _KINDS.get(name, ValueKind.OTHER), (("auto", "-1") if name == HUMAN_OR_AUTO else ())


def _named(value: object) -> str:
    """A type's or action's name; ``json.loads`` in full."""
    if isinstance(value, Symbol):
        return "json.loads" if value.dotted == "json.loads" else value.name
    return value if isinstance(value, str) else "?"


def _with_words(evaluator: Evaluator, spec: FlagSpec, field: ConfigField) -> FlagSpec:
    """Add suggestions to a flag that accepts any text: enum members, and words meant for type checkers."""
    if spec.choices or spec.kind not in (ValueKind.TEXT, ValueKind.OTHER):
        return spec
    words = spec.words + field.suggested
    enum = field.hints.enum
    if enum is None:
        options = () if "str" in field.hints.names else texts(field.hints.options)
        closed = bool(options) or spec.name in _CLOSED
        return replace(spec, words=tuple(dict.fromkeys((*words, *options))), closed=closed and bool(words or options))
    words += tuple(enum_word(member) for member in evaluator.members(enum))
    return replace(spec, words=tuple(dict.fromkeys(words)), closed="str" not in field.hints.names)


def _deprecated(kwargs: dict[str, object], help: str) -> str:
    if kwargs.get("deprecated") is True:
        return help.partition("\n\n")[0] or "deprecated"
    if _OBSOLETE.match(help.strip()) or re.match(r"--[a-z-]+ is deprecated", help):
        return help.partition("\n\n")[0]
    return ""

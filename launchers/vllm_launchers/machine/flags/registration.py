"""Follows vLLM's ``make_arg_parser`` through its source and writes down every flag that it would register.

A small interpreter of what those functions do: dictionaries of keyword arguments, taken from configuration classes,
changed here and there, and handed to ``add_argument``. What it does not understand it passes over.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_launchers.machine.flags.evaluate import Evaluator, Scope
from vllm_launchers.machine.flags.fields import Kwargs, argparse_kwargs, config_fields, human_names
from vllm_launchers.machine.flags.package import Module, Symbol, imported_as
from vllm_launchers.machine.flags.values import UNKNOWN

_DEPTH = 12


@dataclass(eq=False, slots=True)
class Target:
    """A parser or one of its groups."""

    group: str = ""


@dataclass(frozen=True, slots=True)
class Registered:
    """One call of ``add_argument``: option strings as written, keyword arguments as told, the group's title."""

    options: tuple[str, ...]
    kwargs: Kwargs
    group: str


@dataclass(slots=True)
class _Frame:
    """A function that is being followed."""

    module: Module
    names: dict[str, object] = field(default_factory=dict)
    owner: Symbol | None = None
    """The class that the method was called on."""
    holder: Symbol | None = None
    """The class that defines it."""
    result: object = UNKNOWN
    done: bool = False


class Registration:
    """Follows functions that fill a parser. ``found`` are their flags, in order."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.found: list[Registered] = []
        self._evaluator = evaluator
        self._kwargs: dict[str, dict[str, Kwargs]] = {}
        self._frames: list[_Frame] = []
        evaluator.call = self._asked

    def follow(
        self, function: Symbol, arguments: list[object], owner: Symbol | None = None, holder: Symbol | None = None
    ) -> object:
        """Follow a function of the package with its positional arguments; what it returns, or UNKNOWN."""
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

    def _step(self, frame: _Frame, statement: ast.stmt) -> None:
        match statement:
            case ast.Assign(targets=targets, value=value):
                told = self._call_or_value(frame, value)
                for target in targets:
                    self._assign(frame, target, told)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(frame, target, self._call_or_value(frame, value))
            case ast.AugAssign(target=target, op=op, value=value):
                load = ast.parse(ast.unparse(target), mode="eval").body
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
            self._run(frame, statement.body)  # either may be; a flag that one machine has is better shown than hidden
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
            if isinstance(owner, Target):
                return self._on_target(frame, owner, attribute, node)
            if owner is None and frame.owner is not None:
                return self._inherited(frame, attribute, node)
            if isinstance(owner, Symbol) and isinstance(owner.node, ast.ClassDef):
                return self._method(frame, self._evaluator.package.bases(owner), owner, attribute, node)
        return self._value(frame, node)

    def _on_target(self, frame: _Frame, target: Target, attribute: str, node: ast.Call) -> object:
        keywords: Kwargs = {}
        for keyword in node.keywords:
            told = self._value(frame, keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = told
            else:
                keywords |= told if isinstance(told, dict) else {"action": UNKNOWN}
        if attribute == "add_argument_group":
            title = keywords.get("title") or (self._value(frame, node.args[0]) if node.args else "")
            return Target(title if isinstance(title, str) else "")
        if attribute == "add_mutually_exclusive_group":
            return target
        if attribute == "add_argument":
            words: list[object] = []
            for argument in node.args:
                starred = isinstance(argument, ast.Starred)
                told = self._value(frame, argument.value if isinstance(argument, ast.Starred) else argument)
                words += (told if isinstance(told, (list, tuple)) else []) if starred else [told]
            options = tuple(word for word in words if isinstance(word, str))
            self.found.append(Registered(options, dict(keywords), target.group))
        return UNKNOWN

    def _inherited(self, frame: _Frame, attribute: str, node: ast.Call) -> object:
        """``super().attribute(…)``: the next class that has it, after the one whose method is being followed."""
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
        """A call of something in the package, met inside an expression."""
        values = [self._evaluator.value(module, argument, scope) for argument in node.args]
        if function.name == "get_kwargs" and values and isinstance(values[0], Symbol):
            return self._config_kwargs(function, values[0])
        if isinstance(function.node, ast.FunctionDef) and any(isinstance(v, (Target, dict)) for v in values):
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

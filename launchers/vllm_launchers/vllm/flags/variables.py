"""Values that environment variables accept, parsed from ``vllm/envs.py`` without running it.

Each entry of ``environment_variables`` is an expression or function that reads and converts variables:
``int(os.getenv("X", "5"))``, ``bool(int(…))``, ``env_with_choices("X", None, ["a", "b"])``. To find the conversions
that raise for invalid text, each text is followed from where it is read to where it is converted. A variable that is
not understood accepts any text, so that no valid value is ever rejected.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from vllm_launchers.vllm.flags.flag_table import VariableKind, VariableSpec
from vllm_launchers.vllm.flags.package import Module

_READERS = ("os.getenv", "os.environ.get")
_CHOICES = {"env_with_choices": False, "env_list_with_choices": True, "env_set_with_choices": True}
"""vLLM's functions that check choices, and whether each accepts a list."""
_CONVERTERS = {"int": VariableKind.INT, "float": VariableKind.FLOAT, "json.loads": VariableKind.JSON}
_SAME = ("strip", "lower", "upper")
"""Methods that do not change whether a text is a number."""
_DEPTH = 4
_READS_ALL = "enable_envs_cache"
"""The function that evaluates every variable when the engine starts (in vLLM since 0.11.1)."""


def variable_specs(module: Module) -> dict[str, VariableSpec]:
    """The accepted values of each variable that the module reads, except variables that accept any text."""
    table = module.names.get("environment_variables")
    if not isinstance(table, (ast.Assign, ast.AnnAssign)) or table.value is None:
        return {}
    found: dict[str, VariableSpec] = {}
    for node in ast.walk(table.value):
        if isinstance(node, ast.Dict):
            for entry in node.values:
                found.update(_Reader(module).entry(entry))
    return found


def reads_all(module: Module) -> bool:
    """Whether every start evaluates all variables, so that any invalid value is fatal."""
    function = module.names.get(_READS_ALL)
    loops = (node for node in ast.walk(function) if isinstance(node, ast.For)) if function is not None else ()
    return any(ast.unparse(loop.iter) == "environment_variables" for loop in loops)


class _Text(msgspec.Struct, frozen=True):
    """A variable's text while it is followed. ``guarded``: an empty text never gets here."""

    name: str
    guarded: bool = False


class _Reader:
    """Follows one entry and collects what its conversions require of each variable."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._specs: dict[str, VariableSpec] = {}

    def entry(self, node: ast.expr) -> Mapping[str, VariableSpec]:
        """What an entry's expression requires of the variables that it reads."""
        if isinstance(node, ast.Lambda):
            self._expression(node.body, {}, 0)
        elif isinstance(node, ast.Name):
            self._function(node.id, (), 0)
        elif isinstance(node, ast.Call):
            self._choices(node)
        return self._specs

    def _choices(self, node: ast.Call) -> None:
        many = _CHOICES.get(ast.unparse(node.func))
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        names = ("env_name", "default", "choices", "case_sensitive")
        given |= dict(zip(names, node.args, strict=False))
        name, choices = _constant(given.get("env_name")), given.get("choices")
        if many is None or not isinstance(name, str) or not isinstance(choices, (ast.List, ast.Tuple)):
            return
        words = tuple(value for one in choices.elts if isinstance(value := _constant(one), str))
        if len(words) == len(choices.elts):
            exact = _constant(given.get("case_sensitive")) is not False
            self._specs[name] = VariableSpec(VariableKind.CHOICE, choices=words, exact=exact, many=many)

    def _function(self, name: str, texts: Sequence[_Text | None], depth: int) -> None:
        """Follow a function of the module that is called with these texts."""
        node = self._module.names.get(name)
        if not isinstance(node, ast.FunctionDef) or depth > _DEPTH:
            return
        scope = {arg.arg: text for arg, text in zip(node.args.args, texts, strict=False) if text is not None}
        for statement in _statements(node.body):
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(value, ast.expr):
                text, target = self._text(value, scope), statement.targets[0]
                if isinstance(target, ast.Name):
                    scope = {key: one for key, one in scope.items() if key != target.id}
                    scope |= {target.id: text} if text is not None else {}
            for expression in _expressions(statement):
                self._expression(expression, scope, depth)

    def _expression(self, node: ast.expr, scope: Mapping[str, _Text], depth: int) -> None:
        """Find conversions anywhere in an expression."""
        if isinstance(node, ast.IfExp):
            inner = {key: replace(text, guarded=True) for key, text in scope.items()}
            guarded = self._text(node.test, scope)
            self._expression(node.test, scope, depth)
            if guarded is not None and _empty_is_false(node.test):
                self._guarded(node.body, inner, depth, guarded.name)
            else:
                self._expression(node.body, scope, depth)
            self._expression(node.orelse, scope, depth)
            return
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            texts = [self._text(argument, scope) for argument in node.args]
            if called in _CONVERTERS and texts and texts[0] is not None:
                self._note(texts[0], _CONVERTERS[called])
            elif isinstance(node.func, ast.Name) and any(texts):
                self._function(node.func.id, texts, depth + 1)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and not isinstance(child, ast.Lambda):
                self._expression(child, scope, depth)

    def _guarded(self, node: ast.expr, scope: Mapping[str, _Text], depth: int, name: str) -> None:
        """Follow an expression that is only evaluated if the variable is not empty."""
        inner = _Reader(self._module)
        inner._expression(node, scope, depth)
        for found, spec in inner._specs.items():
            self._specs.setdefault(found, replace(spec, empty=spec.empty or found == name))

    def _text(self, node: ast.expr, scope: Mapping[str, _Text]) -> _Text | None:
        """The variable whose unmodified text an expression is, else None."""
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            return _named(node.slice)
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) in _READERS and node.args:
                return _named(node.args[0])
            if isinstance(node.func, ast.Attribute) and node.func.attr in _SAME and not node.args:
                return self._text(node.func.value, scope)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            first = self._text(node.values[0], scope)
            return replace(first, guarded=True) if first is not None else None
        if isinstance(node, ast.NamedExpr):
            return self._text(node.value, scope)
        return None

    def _note(self, text: _Text, kind: VariableKind) -> None:
        self._specs.setdefault(text.name, VariableSpec(kind, empty=text.guarded))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements of a function in order, except those whose errors are caught and ignored."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            continue
        if isinstance(statement, ast.Try):
            raising = all(any(isinstance(n, ast.Raise) for n in ast.walk(h)) for h in statement.handlers)
            if raising:
                yield from _statements(statement.body)
            continue
        yield statement
        for part in ("body", "orelse"):
            yield from _statements(getattr(statement, part, []))


def _expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions directly in a statement, not in its nested statements."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child


def _empty_is_false(test: ast.expr) -> bool:
    """Whether a test such as ``if os.getenv("X")`` fails for an empty text."""
    return not isinstance(test, (ast.Compare, ast.UnaryOp))


def _named(node: ast.expr) -> _Text | None:
    name = _constant(node)
    return _Text(name) if isinstance(name, str) else None


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None

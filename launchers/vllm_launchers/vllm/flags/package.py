"""A Python package as files: what its modules define and import, found by parsing. Nothing is run."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from vllm_launchers.python_source import parse_module

MAX_BYTES = 4_000_000
"""Longer modules are skipped: they are not hand-written source."""

_DEPTH = 25
"""Maximum number of imports to follow; two modules may import a name from each other."""


class Module:
    """One parsed file. ``names`` are its top-level definitions and imports; ``hinted`` is for ``if TYPE_CHECKING``.

    ``calls`` are top-level statements that are just a call, such as those that fill a registry.
    """

    def __init__(self, name: str, *, is_package: bool) -> None:
        self.name = name
        self.is_package = is_package
        self.names: dict[str, ast.AST] = {}
        self.hinted: dict[str, ast.AST] = {}
        self.calls: list[ast.Call] = []

    @classmethod
    def parse(cls, name: str, text: str, *, is_package: bool) -> Module:
        """Parse a file's text.

        Raises:
            SyntaxError, ValueError, RecursionError: it is not Python that this interpreter can parse.
        """
        module = cls(name, is_package=is_package)
        body = parse_module(text)
        module._collect(body, module.names)
        module.calls += [node.value for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
        return module

    def _collect(self, body: Sequence[ast.stmt], names: dict[str, ast.AST]) -> None:
        for node in body:
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    names[node.name] = node
                case ast.Assign(targets=targets):
                    names.update((target.id, node) for target in targets if isinstance(target, ast.Name))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names[name] = node
                case ast.ImportFrom() | ast.Import():
                    names.update((imported_as(alias), node) for alias in node.names)
                case ast.If(test=test):
                    hidden = ast.unparse(test).endswith("TYPE_CHECKING")
                    self._collect(node.body, self.hinted if hidden else names)
                    self._collect(node.orelse, names)
                case ast.Try():
                    for handler in node.handlers:
                        self._collect(handler.body, names)
                    self._collect([*node.body, *node.orelse], names)
                case _ if type(node).__name__ == "TypeAlias":  # ``type X = …``, Python 3.12
                    names[node.name.id] = node  # type: ignore[attr-defined]


class Symbol(msgspec.Struct, frozen=True):
    """What a name refers to: a definition in the package (``node`` in ``module``), or something outside it.

    ``dotted`` is its full name, such as ``vllm.config.cache.CacheConfig``, ``json.loads`` or ``builtins.int``.
    A module of the package has no ``node``.
    """

    dotted: str
    module: Module | None = None
    node: ast.AST | None = None

    @property
    def name(self) -> str:
        """The last part of its full name."""
        return self.dotted.rpartition(".")[2]


class Package:
    """A package's folder. Modules are parsed on first use; those that cannot be parsed define nothing."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is the package itself (it contains ``__init__.py``) and has its name."""
        self.folder = folder
        self.name = folder.name
        self._modules: dict[str, Module | None] = {}

    def module(self, dotted: str) -> Module | None:
        """The module of that full name, or None."""
        if dotted not in self._modules:
            self._modules[dotted] = self._load(dotted)
        return self._modules[dotted]

    def _load(self, dotted: str) -> Module | None:
        root, *parts = dotted.split(".")
        if root != self.name:
            return None
        path = self.folder.joinpath(*parts)
        for file, is_package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
            if parts or is_package:
                try:
                    if file.stat().st_size > MAX_BYTES:
                        return None
                    return Module.parse(dotted, file.read_text(encoding="utf-8"), is_package=is_package)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except (SyntaxError, ValueError, RecursionError):
                    return None
        return None

    def find(self, module: Module, name: str, depth: int = 0) -> Symbol | None:
        """Resolve ``name`` at the top level of ``module``, following imports; None if it is undefined."""
        node = module.names.get(name) or module.hinted.get(name)
        if node is None:
            inner = self.module(f"{module.name}.{name}") if module.is_package else None
            if inner is not None:
                return Symbol(inner.name, inner)
            return Symbol(f"builtins.{name}") if hasattr(builtins, name) else None
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self.imported(module, node, name, depth)
        return Symbol(f"{module.name}.{name}", module, node)

    def imported(self, module: Module, node: ast.Import | ast.ImportFrom, name: str, depth: int = 0) -> Symbol | None:
        """What an import statement binds ``name`` to."""
        for alias in node.names:
            if imported_as(alias) != name:
                continue
            if isinstance(node, ast.Import):
                dotted = alias.name if alias.asname else name
                return Symbol(dotted, self.module(dotted))
            source = self._source(module, node)
            inner = self.module(source)
            if inner is None:
                return Symbol(f"{source}.{alias.name}")
            return self.find(inner, alias.name, depth + 1) if depth < _DEPTH else None
        return None

    def _source(self, module: Module, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.name.split(".")
        parts = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
        return ".".join([*parts, node.module] if node.module else parts)

    def bases(self, symbol: Symbol) -> Iterator[Symbol]:
        """Yield a class of the package and its bases, each once, itself first."""
        seen: set[str] = set()
        waiting = [symbol]
        while waiting:
            current = waiting.pop(0)
            if current.dotted in seen:
                continue
            seen.add(current.dotted)
            yield current
            if isinstance(current.node, ast.ClassDef) and current.module is not None:
                for base in current.node.bases:
                    plain = base.value if isinstance(base, ast.Subscript) else base  # dict[str, int] is a dict
                    if (found := self.name_of(current.module, plain)) is not None:
                        waiting.append(found)

    def name_of(self, module: Module, node: ast.expr) -> Symbol | None:
        """Resolve a plain or dotted name at the top level of ``module``."""
        match node:
            case ast.Name(id=name):
                return self.find(module, name)
            case ast.Attribute(value=value, attr=attr):
                owner = self.name_of(module, value)
                if owner is None:
                    return None
                if owner.node is None and owner.module is not None:
                    return self.find(owner.module, attr)
                return Symbol(f"{owner.dotted}.{attr}") if owner.node is None else None
            case ast.Subscript(value=value):
                return self.name_of(module, value)
        return None


def imported_as(alias: ast.alias) -> str:
    """The name that an import binds."""
    return alias.asname or alias.name.partition(".")[0]

"""No module imports itself through others, including imports inside functions.

Imports under ``if TYPE_CHECKING:`` do not count, since they don't exist at run time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "console", ROOT / "launchers")

Graph = Mapping[str, Mapping[str, int]]
"""Module → imported module → line of the first such import."""


def modules(*roots: Path) -> dict[str, Path]:
    """Every module below the source roots, by dotted name."""
    found = {}
    for root in roots:
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def run_time_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree, except the bodies of ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from run_time_nodes(other)
            continue
        yield child
        yield from run_time_nodes(child)


def imported(node: ast.AST, package: str, known: Mapping[str, Path]) -> Iterator[str]:
    """Our modules that a statement imports, including `import_module` with a string literal."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        yield from (str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant))


@cache
def graph(*roots: Path) -> dict[str, dict[str, int]]:
    known = modules(*roots)
    edges: dict[str, dict[str, int]] = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found = edges.setdefault(name, {})
        for node in run_time_nodes(ast.parse(path.read_text(encoding="utf-8"))):
            for other in imported(node, package, known):
                if other in known and other != name:
                    found.setdefault(other, getattr(node, "lineno", 0))
    return edges


def reachable(edges: Graph, start: str) -> set[str]:
    """Every module that a module imports directly or indirectly."""
    found: set[str] = set()
    queue = [start]
    while queue:
        new = edges[queue.pop()].keys() - found
        found |= new
        queue += new
    return found


def cycles(edges: Graph) -> list[frozenset[str]]:
    """Strongly connected components of more than one module."""
    reach = {name: reachable(edges, name) for name in edges}
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in edges if name in reach[name]
    }
    return sorted(groups, key=sorted)


def shortest(edges: Graph, group: frozenset[str]) -> str:
    """The shortest cycle, with the line of each import."""
    best: list[str] = []
    for start in sorted(group):
        ways = [[start]]
        seen: set[str] = set()
        while ways and (not best or len(ways[0]) < len(best)):
            way = ways.pop(0)
            for other in sorted(edges[way[-1]].keys() & group):
                if other == start:
                    best, ways = way, []
                    break
                if other not in seen:
                    seen.add(other)
                    ways.append([*way, other])
    steps = zip(best, [*best[1:], best[0]], strict=True)
    return best[0] + "".join(f"\n  line {edges[one][other]} imports {other}" for one, other in steps)


def format_cycles(edges: Graph, groups: list[frozenset[str]]) -> str:
    return "\n".join(f"{len(group)} modules import each other: {shortest(edges, group)}" for group in groups)


def test_no_import_cycles() -> None:
    edges = graph(*SOURCES)
    assert len(edges) > 200, "the modules were not found"
    found = cycles(edges)
    assert not found, format_cycles(edges, found)


def test_import_cycle_detection(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    files = {
        "__init__": "",
        "one": "from made import two\n",
        "two": "def later():\n    from .three import x\n",
        "three": "import importlib\nx = lambda: importlib.import_module('made.one')\n",
        "four": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from made.five import y\n",
        "five": "from made.four import z\n",
    }
    for name, text in files.items():
        (tmp_path / "made" / f"{name}.py").write_text(text)
    edges = graph(tmp_path)
    assert cycles(edges) == [frozenset({"made.one", "made.two", "made.three"})]
    assert format_cycles(edges, cycles(edges)) == (
        "3 modules import each other: made.one\n  line 1 imports made.two\n"
        "  line 2 imports made.three\n  line 2 imports made.one"
    )

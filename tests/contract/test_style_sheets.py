"""Style sheets select widgets by class: a selector with an unknown class matches nothing, without a warning."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import textual.containers
import textual.screen
import textual.widgets
import textual.widgets._toast

UI = Path(__file__).resolve().parents[2] / "console" / "vllm_console" / "ui"

SOURCES = sorted(UI.rglob("*.py"))

TEXTUALS = {
    name
    for module in (textual.containers, textual.screen, textual.widgets, textual.widgets._toast)
    for name in {*dir(module), *getattr(module, "__all__", ())}  # `textual.widgets` imports widgets lazily
}


@cache
def tree_of(path: Path) -> ast.Module:
    """A parsed source file. Every test process collects these tests, so few files are parsed."""
    return ast.parse(path.read_text())


@cache
def ours() -> set[str]:
    """The names of all our classes."""
    return {node.name for path in SOURCES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)}


def sheets() -> Iterator[tuple[str, str]]:
    """Every style sheet: its location and its text."""
    for path in sorted(UI.rglob("*.tcss")):
        yield path.name, path.read_text()
    for path in SOURCES:
        if "CSS = " not in path.read_text():
            continue
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
                continue
            if any(isinstance(one, ast.Name) and one.id in ("CSS", "DEFAULT_CSS") for one in node.targets):
                yield f"{path.name}:{node.lineno}", str(node.value.value)


@pytest.mark.parametrize(("where", "sheet"), [pytest.param(*one, id=one[0]) for one in sheets()])
def test_each_selector_names_a_class(where: str, sheet: str) -> None:
    text = re.sub(r"/\*.*?\*/|\{[^}]*\}", " ", sheet, flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w.#:-])[A-Z]\w*", text))
    assert named <= ours() | TEXTUALS, where

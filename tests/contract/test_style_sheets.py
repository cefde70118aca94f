"""Style sheets name widgets by their classes: a selector that names none applies to nothing, and nobody is warned."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import textual.containers
import textual.screen
import textual.widgets
import textual.widgets._toast

UI = Path(__file__).resolve().parents[2] / "console" / "vllm_console" / "ui"

SOURCES = sorted(UI.rglob("*.py"))

TREES = {path: ast.parse(path.read_text()) for path in SOURCES}

OURS = {node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

TEXTUALS = {
    name
    for module in (textual.containers, textual.screen, textual.widgets, textual.widgets._toast)
    for name in dir(module)
}


def sheets() -> Iterator[tuple[str, str]]:
    """Every style sheet: where it is, and its text."""
    for path in sorted(UI.rglob("*.tcss")):
        yield path.name, path.read_text()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
                continue
            if any(isinstance(one, ast.Name) and one.id in ("CSS", "DEFAULT_CSS") for one in node.targets):
                yield f"{path.name}:{node.lineno}", str(node.value.value)


@pytest.mark.parametrize(("where", "sheet"), [pytest.param(*one, id=one[0]) for one in sheets()])
def test_each_selector_names_a_class(where: str, sheet: str) -> None:
    text = re.sub(r"/\*.*?\*/|\{[^}]*\}", " ", sheet, flags=re.DOTALL)
    named = set(re.findall(r"(?<![\w.#:-])[A-Z]\w*", text))
    assert named <= OURS | TEXTUALS, where

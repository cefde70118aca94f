"""Names from outside are shown as text, and no shell is there to read them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from vllm_console.text import plain

ROOT = Path(__file__).resolve().parents[2]
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}


def calls() -> list[tuple[str, ast.Call]]:
    found = []
    for folder in ("console", "launchers"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text())
            found += [(f"{path}:{node.lineno}", node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return found


def test_no_shell_is_ever_used() -> None:
    found = calls()
    assert len(found) > 5000
    for where, call in found:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        owner = getattr(getattr(call.func, "value", None), "id", "")
        assert not (name in SHELLS and owner in ("os", "subprocess", "asyncio", "")), where
        assert name not in ("eval", "exec") or owner, where
        assert all(word.arg != "shell" for word in call.keywords), where


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a\x1b]52;c;AAAA\x07b", "ab"),
        ("a\x1b]8;;http://x\x1b\\b\x1b]8;;\x1b\\", "ab"),
        ("a\x1b[2J\x1b[31mb", "ab"),
        ("a\x9b31mb\x9d0;title\x9cc", "abc"),
        ("a\x90q\x9cb", "ab"),
        ("a\u202egnp.exe", "agnp.exe"),
        ("a\u200bb\u2060c\U000e0041d\ufeffe", "abcde"),
        ("a\ud800b", "ab"),
        ("a\nb\u2028c\xa0d", "a b c d"),
        ("[bold red]x[/]", "[bold red]x[/]"),
        ("$(touch x); `id`", "$(touch x); `id`"),
        ("日本語 é 👍🏽", "日本語 é 👍🏽"),
    ],
)
def test_a_name_is_one_line_of_what_can_be_seen(name: str, shown: str) -> None:
    assert plain(name) == shown
    assert plain(name).isprintable()
    plain(name).encode()

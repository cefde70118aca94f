"""Patterns that are compiled on first use."""

from __future__ import annotations

import copy
import re
import subprocess
import sys

import pytest

from vllm_launchers import patterns
from vllm_launchers.patterns import lazy_pattern


def test_pattern_compiles_once_and_only_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    monkeypatch.setattr(
        patterns.re,
        "compile",
        lambda *given: compiled.append(given) or re._compiler.compile(*given),  # type: ignore[attr-defined]
    )
    words = lazy_pattern("(?P<first>a+)b", re.IGNORECASE)
    assert compiled == []
    found = [words.fullmatch(text) for text in ("AAb", "aab", "b")]
    assert [one and one["first"] for one in found] == ["AA", "aa", None]
    assert compiled == [("(?P<first>a+)b", re.IGNORECASE)]
    assert words.sub("x", "abab") == "xx"
    assert lazy_pattern(rb"\d").findall(b"a1b2") == [b"1", b"2"]


def test_pattern_can_be_copied() -> None:
    assert copy.copy(lazy_pattern("a+")).fullmatch("aa")


def test_invalid_pattern_is_refused_when_used() -> None:
    with pytest.raises(re.error, match="unterminated"):
        lazy_pattern("(").match("")


def test_every_defined_pattern_is_valid() -> None:
    """An invalid pattern that is compiled on first use would only fail there."""
    done = subprocess.run([sys.executable, "-c", EVERY_PATTERN], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 150


EVERY_PATTERN = """
import importlib, pkgutil, re
from vllm_launchers import patterns
made = []
patterns.lazy_pattern = lambda source, flags=0: made.append(re.compile(source, flags)) or made[-1]
import vllm_console, vllm_launchers
for package in (vllm_launchers, vllm_console):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
print(len(made))
"""

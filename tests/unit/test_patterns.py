"""Patterns that are compiled when they are first used."""

from __future__ import annotations

import re

import pytest

from vllm_launchers import patterns
from vllm_launchers.patterns import lazy_pattern


def test_it_compiles_once_and_only_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_wrong_pattern_is_refused_where_it_is_used() -> None:
    with pytest.raises(re.error, match="unterminated"):
        lazy_pattern("(").match("")

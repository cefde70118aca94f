"""Secrets are removed from a log however its bytes are split, and nothing else is changed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.keeper.log_forwarder import Redaction, values_of

KEY = "k3y-Zq9-very-secret-value"
TEXT = (
    f"one {KEY} two\n{KEY}{KEY}\nprogress \r50 %\r{{'api_key': ['other-one']}}\nk3y-Zq9-very is only the beginning k3y"
).encode()


def redacted(parts: list[bytes], *secrets: str) -> bytes:
    """The written output for these parts; what is held back is passed in again with the next part."""
    redaction, held, written = Redaction(secrets or [KEY]), b"", []
    for number, part in enumerate(parts, 1):
        text, used = redaction.clean(held + part, whole=number == len(parts))
        held = (held + part)[used:]
        written.append(text)
    assert held == b""
    return b"".join(written)


@given(st.lists(st.integers(0, len(TEXT)), max_size=12).map(sorted))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_known_secret_is_found_across_reads(cuts: list[int]) -> None:
    parts = [TEXT[a:b] for a, b in zip([0, *cuts], [*cuts, len(TEXT)], strict=True)]
    found = redacted(parts)
    assert KEY.encode() not in found
    assert found.replace("•••".encode(), b"").count(b"k3y") == 2
    assert found.endswith(b"is only the beginning k3y")


@pytest.mark.parametrize("secrets", [("abcd", "abcdWXYZsecret"), ("1abcd", "abcdWXYZsecret"), ("1abcd1abcdW",)])
def test_secret_that_contains_or_overlaps_another_is_found_across_reads(secrets: tuple[str, ...]) -> None:
    text = b"1abcd1abcdWXYZsecret abcd1abcdWabcd"
    whole = redacted([text], *secrets)
    for first in range(len(text)):
        for second in range(first, len(text)):
            assert redacted([text[:first], text[first:second], text[second:]], *secrets) == whole


def test_secrets_that_overlap_are_redacted_together() -> None:
    assert redacted([b"<abcdefghijklm>"], "abcdefgh", "efghijklm").decode() == "<•••>"
    assert redacted([b"<1abcd1abcd1a>"], "1abcd1a").decode() == "<•••>"
    assert redacted([b"<abcdefgh>"], "abcd", "efgh").decode() == "<••••••>"


@given(st.lists(st.binary(max_size=40), max_size=8))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_text_without_a_secret_is_unchanged(parts: list[bytes]) -> None:
    assert redacted(parts) == b"".join(parts)


def test_possible_key_is_redacted_by_line() -> None:
    assert redacted([TEXT]).decode().splitlines()[4] == "{'api_key': ['•••']}"


def test_redacted_values() -> None:
    environment = {"MY_TOKEN": "long-enough", "A_KEY": "on", "PATH": "/usr/bin:/bin"}
    assert values_of({"VLLM_API_KEY": "abcd", "HF_TOKEN": "1"}, environment) == {"abcd", "long-enough"}

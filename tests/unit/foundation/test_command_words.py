"""Which command a command line means, and what its output cannot say."""

from __future__ import annotations

import io
import sys

import pytest

from vllm_console.cli.main import _command_in, main


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("list --json", "list"),
        ("--state demo list --json", "list"),
        ("--state=demo list", "list"),
        ("--sta start --refresh 2 --ascii status x", "status"),
        ("--host demo", None),
        ("--read-only", None),
        ("", None),
        ("lsit list", None),
    ],
)
def test_a_folder_may_be_called_like_a_command(words: str, command: str | None) -> None:
    assert _command_in(words.split()) == command


def test_what_a_terminal_cannot_write_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a POSIX locale without UTF-8 a dash must not be a fault of the program."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert main(["presets"]) == 0
    print("p99 –")
    sys.stdout.flush()
    assert b"chatbot" in written.getvalue()
    assert b"p99 ?" in written.getvalue()

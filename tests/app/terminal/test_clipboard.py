"""Copying inside tmux loads tmux's buffer, takes bounded time, and says where the text went."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from vllm_console.ui.terminal import clipboard
from vllm_console.ui.terminal.clipboard import load_tmux_buffer

FAKE = """#!/bin/sh
echo "$@" >> {calls}
{script}
"""


@pytest.fixture
def tmux(tmp_path, monkeypatch):
    """Replace tmux by a script; returns the file with the arguments of each call."""

    def put(script: str) -> Path:
        folder, calls = tmp_path / "bin", tmp_path / "calls"
        folder.mkdir()
        program = folder / "tmux"
        program.write_text(FAKE.format(calls=calls, script=script))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("TMUX", "/nowhere,1,0")
        return calls

    return put


def test_a_text_goes_to_tmux_as_it_is(tmux, tmp_path):
    calls = tmux(f"cat > {tmp_path}/text")
    text = "vllm serve 'a b' \"$HOME\" `id`; é\nsecond line"
    assert load_tmux_buffer(text) == ""
    assert (tmp_path / "text").read_text() == text
    assert calls.read_text() == "load-buffer -w -\n"


def test_a_tmux_without_the_flag_is_asked_without_it(tmux):
    calls = tmux('test "$2" = - && exec cat > /dev/null; echo "unknown option -- w" >&2; exit 1')
    assert load_tmux_buffer("text") == ""
    assert calls.read_text() == "load-buffer -w -\nload-buffer -\n"


def test_why_tmux_refuses_is_reported(tmux):
    tmux('echo "no server running on /nowhere" >&2; exit 1')
    assert load_tmux_buffer("text") == "no server running on /nowhere"


def test_a_tmux_that_hangs_is_given_up(tmux, monkeypatch):
    monkeypatch.setattr(clipboard, "TMUX_SECONDS", 0.2)
    tmux("exec sleep 60")
    began = time.monotonic()
    assert "did not accept it" in load_tmux_buffer("text")
    assert time.monotonic() - began < 30


def test_without_a_tmux_command_that_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no tmux command" in load_tmux_buffer("text")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("cat > /dev/null", "Command line of chat copied to tmux's buffer: prefix ] pastes it."),
        ("cat > /dev/null; echo no >&2; exit 1", "Command line of chat not copied: no."),
    ],
)
async def test_the_console_says_where_it_went(console, tmux, script, said):
    tmux(script)
    async with console() as c:
        await c.press("y")
        await c.sees(said)


async def test_outside_tmux_the_terminal_gets_what_is_copied(console, monkeypatch):
    monkeypatch.delenv("TMUX", raising=False)
    async with console() as c:
        await c.press("y")
        await c.sees("Command line of chat copied to the terminal's clipboard (OSC 52).")
        assert c.app.clipboard.startswith("vllm serve") or "serve" in c.app.clipboard


def test_a_real_tmux_has_it_in_its_buffer(tmp_path, monkeypatch):
    """The only test with real tmux, if installed."""
    import shutil

    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    monkeypatch.setenv("TMUX_TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMUX", raising=False)
    subprocess.run(["tmux", "-L", "copying", "-f", "/dev/null", "new-session", "-d", "sleep 100"], check=True)
    try:
        shown = ["tmux", "-L", "copying", "display-message", "-p", "#{socket_path},#{pid},0"]
        monkeypatch.setenv("TMUX", subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip())
        assert load_tmux_buffer("vllm serve it") == ""
        shown = ["tmux", "-L", "copying", "show-buffer"]
        assert subprocess.run(shown, check=True, capture_output=True, text=True).stdout == "vllm serve it"
    finally:
        subprocess.run(["tmux", "-L", "copying", "kill-server"], check=False)

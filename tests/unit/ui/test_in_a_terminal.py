"""The app in a pseudo-terminal: what goes over the wire, and how it ends."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyte
import pytest

pytestmark = pytest.mark.terminal

PROGRAM = """
import argparse, runpy, sys
fakes = runpy.run_path(sys.argv[1])
from vllm_console.cli.console import show
from vllm_console.config import Config
fleet = fakes["FakeFleet"](fakes["chat"], fakes["coder"], step=1.0)
sys.exit(show(fleet, Config(), argparse.Namespace(refresh=0.1, ascii=False)))
"""
FAKES = Path(__file__).parents[2] / "fakes" / "fake_fleet.py"


class Terminal:
    """A pseudo-terminal of 120×40 with the app in it."""

    def __init__(self) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
            unwanted = ("NO_COLOR", "COLUMNS", "LINES")
            environment = {name: value for name, value in os.environ.items() if name not in unwanted}
            environment |= {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
            # execve: GNU readline, which pytest loads, puts COLUMNS into an environment that os.environ does not see
            os.execve(sys.executable, [sys.executable, "-c", PROGRAM, str(FAKES)], environment)
        self.data = b""
        self.status: int | None = None
        self.screen = pyte.Screen(120, 40)
        self._stream = pyte.ByteStream(self.screen)

    def pump(self, true: Callable[[], object], seconds: float = 20.0) -> None:
        """Read until something holds."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "\n".join(self.screen.display)
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    chunk = os.read(self.fd, 65536)
                except OSError:
                    return
                self.data += chunk
                self._stream.feed(chunk)

    def shows(self, text: str) -> bool:
        return any(text in row for row in self.screen.display)

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is not None

    def wait_end(self, seconds: float = 20.0) -> int:
        end = time.monotonic() + seconds
        while not self.ended():
            assert time.monotonic() < end, "the app did not end"
            time.sleep(0.02)
        assert self.status is not None
        return os.waitstatus_to_exitcode(self.status)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    try:
        terminal.pump(lambda: terminal.shows("4 Requests"))
        yield terminal
    finally:
        if not terminal.ended():
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)
        with suppress(OSError):
            os.close(terminal.fd)


def left_clean(data: bytes) -> bool:
    """Whether the alternate screen, the mouse and the hidden cursor were given back, in the end."""
    return all(
        data.rfind(back) > data.rfind(taken) >= 0
        for taken, back in (
            (b"\x1b[?1049h", b"\x1b[?1049l"),
            (b"\x1b[?25l", b"\x1b[?25h"),
            (b"\x1b[?1000h", b"\x1b[?1000l"),
        )
    )


def test_q_ends_and_says_once_what_still_runs(terminal):
    os.write(terminal.fd, b"q")
    terminal.pump(lambda: False)  # until it lets go of the terminal
    assert terminal.data.count(b"2 servers still running: chat, coder") == 1
    assert terminal.wait_end() == 0
    assert left_clean(terminal.data)


def test_sigterm_leaves_the_terminal_clean(terminal):
    os.kill(terminal.pid, signal.SIGTERM)
    terminal.pump(lambda: b"\x1b[?1049l" in terminal.data)
    assert terminal.wait_end() == 0
    terminal.pump(lambda: left_clean(terminal.data), 2)


def test_the_app_ends_when_its_terminal_goes(terminal):
    os.close(terminal.fd)
    assert terminal.wait_end() >= -signal.SIGHUP


def test_only_what_changed_goes_over_the_wire(terminal):
    """A look changes some figures; the screen has 4,800 cells, and a full paint takes about 15,000 bytes."""
    start = len(terminal.data)
    end = time.monotonic() + 3
    terminal.pump(lambda: time.monotonic() > end)
    assert 0 < len(terminal.data) - start < 30 * 1500

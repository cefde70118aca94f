"""A stalled terminal, as over a hanging connection, and a closed one: the console continues or exits cleanly."""

from __future__ import annotations

import fcntl
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PROGRAM = """
import argparse, runpy, signal, sys
from pathlib import Path
fakes = runpy.run_path(sys.argv[1])
folder = Path(sys.argv[2])
from vllm_console.cli.console import show
from vllm_console.settings import Alerts, Config

class CountedFleet(fakes["FakeFleet"]):
    def snapshot(self, selected=None, *time):
        (folder / "refreshes").write_text(str(self.looks))
        return super().snapshot(selected, *time)

def chat(at):
    return fakes["pressed" if (folder / "pressure").exists() else "chat"](at)

fleet = CountedFleet(chat, fakes["coder"], step=1.0)
config = Config(alerts=Alerts(terminal=("osc9",)))
code = show(fleet, config, argparse.Namespace(refresh=0.05, ascii=False, state=folder, at=None))
(folder / "ended").write_text(str(code))
"""
FAKES = Path(__file__).parents[1] / "fakes" / "fake_fleet.py"
SIZES = ((120, 40), (118, 39), (121, 38), (119, 41))
SECONDS = 60.0


class Console:
    """The console on two servers in a terminal; counts its refreshes."""

    def __init__(self, folder: Path, terminal_module: ModuleType) -> None:
        self.folder = folder
        words = [sys.executable, "-c", PROGRAM, str(FAKES), str(folder)]
        self.terminal: Any = terminal_module.Terminal(words, 120, 40, {"LANG": "C.UTF-8"})
        self.terminal.wait_for("4 Throughput")

    def refreshes(self) -> int:
        return int((self.folder / "refreshes").read_text() or 0)

    def unread(self) -> int:
        """Unread terminal bytes in the kernel's buffer."""
        found = fcntl.ioctl(self.terminal.master, termios.FIONREAD, b"\0" * 4)
        return int(struct.unpack("i", found)[0])

    def stall(self) -> None:
        """Stop reading while the console paints, until the kernel buffer is full."""
        held, since = -1, self.refreshes()
        for turn in range(2000):
            self.terminal.resize(*SIZES[turn % len(SIZES)])
            time.sleep(0.05)
            if self.unread() != held:
                held, since = self.unread(), self.refreshes()
            elif held > 1000 and self.refreshes() > since + 20:
                return
        pytest.fail("the terminal never stalled")

    def wait_refreshes(self, count: int = 20) -> None:
        wanted = self.refreshes() + count
        within(lambda: self.refreshes() >= wanted)


def within(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def console(tmp_path: Path, terminal_module: ModuleType) -> Iterator[Console]:
    made = Console(tmp_path, terminal_module)
    yield made
    made.terminal.close()


def test_stalled_terminal_does_not_block_and_catches_up(console: Console) -> None:
    """Monitoring, keys and findings keep working; afterwards the screen is current and complete."""
    terminal = console.terminal
    console.stall()
    terminal.press("j")
    (console.folder / "pressure").touch()
    findings = console.folder / "findings.log"
    within(lambda: "kv_cache_pressure" in findings.read_text() if findings.exists() else False)
    console.wait_refreshes()

    terminal.resize(120, 40)
    terminal.wait_for(lambda text: "▸ coder" in text and "no log: started outside this console" in text)
    terminal.press(" ")
    terminal.wait_for("paused")
    settled = ""
    while settled != terminal.text:  # a refresh in progress is still painted
        settled = terminal.text
        for _ in range(20):
            terminal.pump()
    assert b"\x1b]9;vllm-console: chat" in terminal.raw
    terminal.resize(121, 40)
    terminal.wait_for(lambda text: text != settled)
    terminal.resize(120, 40)
    terminal.wait_for(settled)
    terminal.press("q")
    assert terminal.wait_end() == 0
    assert terminal.restored()


@pytest.mark.parametrize("way", [signal.SIGTERM, None])
def test_stalled_terminal_does_not_delay_exit(console: Console, way: signal.Signals | None) -> None:
    """Both after a signal and when the terminal closes."""
    console.stall()
    if way is None:
        console.terminal.hang_up()
    else:
        console.terminal.process.send_signal(way)
    assert console.terminal.process.wait(SECONDS) == 0
    assert (console.folder / "ended").read_text() == "0"

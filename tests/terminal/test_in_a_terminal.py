"""The app in a pseudo-terminal: output size and exit."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fakes.terminal import DEADLINE

pytestmark = pytest.mark.terminal

PROGRAM = """
import argparse, runpy, sys
fakes = runpy.run_path(sys.argv[1])
from vllm_console.cli.console import show
from vllm_console.settings import Config
fleet = fakes["FakeFleet"](fakes["chat"], fakes["coder"], step=1.0)
sys.exit(show(fleet, Config(), argparse.Namespace(refresh=0.1, ascii=False, state=None, at=None)))
"""
FAKES = Path(__file__).parents[1] / "fakes" / "fake_fleet.py"


@pytest.fixture
def terminal(terminal_module: ModuleType) -> Iterator[Any]:
    """The app with two servers, at 120×40."""
    terminal = terminal_module.Terminal([sys.executable, "-c", PROGRAM, str(FAKES)], 120, 40, {"LANG": "C.UTF-8"})
    try:
        terminal.wait_for("4 Throughput")
        yield terminal
    finally:
        terminal.close()


def test_q_quits_and_lists_running_servers_once(terminal: Any) -> None:
    terminal.press("q")
    assert terminal.wait_end() == 0
    assert terminal.raw.count(b"2 servers still running: chat, coder") == 1
    assert terminal.restored()


def test_sigterm_restores_terminal(terminal: Any) -> None:
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.wait_end() == 0
    assert terminal.restored()


def test_app_ends_when_terminal_closes(terminal: Any) -> None:
    terminal.hang_up()
    assert terminal.process.wait(60) >= -signal.SIGHUP


def test_refresh_sends_only_changed_cells(terminal: Any) -> None:
    """A refresh changes some values; the screen has 4,800 cells, and a full paint takes about 15,000 bytes. On a busy
    machine the first refresh may be late."""
    start = len(terminal.raw)
    end = time.monotonic() + 3
    while time.monotonic() < end or (len(terminal.raw) == start and time.monotonic() < end + DEADLINE):
        terminal.pump()
    assert 0 < len(terminal.raw) - start < 30 * 3000  # a fifth of a full paint for each refresh

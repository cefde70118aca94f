"""Keys pressed while the demo's servers start."""

from __future__ import annotations

import os
import pty
import select
from pathlib import Path

import pytest

from vllm_console.cli import demo


@pytest.mark.parametrize("typed", [b"sy", b"sy\n"])
def test_keys_pressed_before_the_console_opens_are_dropped(monkeypatch, typed):
    master, slave = pty.openpty()
    with os.fdopen(slave, closefd=True) as terminal:
        monkeypatch.setattr(demo.sys, "stdin", terminal)
        os.write(master, typed)
        demo._drop_typed()
        os.write(master, b"q\n")
        assert select.select([terminal], [], [], 10)[0]
        assert os.read(slave, 100) == b"q\n"
    os.close(master)


def test_without_a_terminal_nothing_is_dropped(monkeypatch):
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(demo.sys, "stdin", nothing)
        demo._drop_typed()

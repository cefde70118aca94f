"""A new keeper that does not answer in time: it is ended, or if it no longer can be, the error says so."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_launchers.keeper import client, folders
from vllm_launchers.keeper.errors import KeeperError, SilentError


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Start a keeper with a shell script as its program, which may write to ``pid``; an error is raised."""
    home, program = folders.prepare(tmp_path, "one"), tmp_path / "program"
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(client, "START_SECONDS", 1.0)
    monkeypatch.setattr(client, "END_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)

    def run(script: str) -> None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        lock = folders.take_lock(home, 0.0)
        assert lock is not None
        try:
            client._start_keeper(home, lock, {"do": "adopt"}, None)
        finally:
            os.close(lock)

    return run


def test_keeper_that_has_not_begun_in_time_is_ended(start: Callable[[str], None], tmp_path: Path) -> None:
    """It could otherwise start the server after the error."""
    with pytest.raises(KeeperError, match="keeper of one did not start within 1s") as failed:
        start("exec sleep 600")
    assert not isinstance(failed.value, SilentError)
    assert not folders.lock_is_held(folders.server_folder(tmp_path, "one"))


def test_keeper_that_has_begun_may_still_start(start: Callable[[str], None], tmp_path: Path) -> None:
    """Like a keeper, it has left the process that the console started."""
    home = folders.server_folder(tmp_path, "one")
    try:
        with pytest.raises(KeeperError) as failed:
            start("sleep 600 & echo $! > pid")
        assert folders.lock_is_held(home)
        expected = f"the keeper of one has not answered within 1s and may still start; see {home / 'keeper.log'}"
        assert str(failed.value) == expected
    finally:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

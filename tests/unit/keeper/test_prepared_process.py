"""A prepared process that can't be read from, and a keeper killed while it reports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from vllm_launchers.keeper import spawn
from vllm_launchers.keeper.preparation import PreparedProcess
from vllm_launchers.keeper.prepared_launch import FirstStart, PreparedLaunch
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity


def test_process_is_killed_if_its_message_thread_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    command = spawn.ProcessCommand((sys.executable, "-c", "import time; time.sleep(600)"), {}, "/", 1)
    begun: list[ProcessIdentity] = []
    with pytest.raises(OSError, match="can't start new thread"):
        PreparedProcess(1, cast("LaunchSpec", None), command, cast("Any", None), begun.append)
    _, status = os.waitpid(begun[0].pid, 0)
    assert os.WTERMSIG(status) == 9


def test_killed_keeper_with_a_partial_line_has_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Killed:
        """Writes a partial last line, like a process killed while it reports."""

        def __init__(self, words: list[str], **_: object) -> None:
            self._theirs = os.dup(int(words[-1]))

        def wait(self) -> None:
            os.read(self._theirs, 1 << 16)
            os.write(self._theirs, b'{"pid": 7}\n{"step": "refu')
            os.close(self._theirs)

    monkeypatch.setattr(subprocess, "Popen", Killed)
    prepared = PreparedLaunch(FirstStart(tmp_path, ("vllm",), LaunchSpec(("vllm",), "127.0.0.1", 8000), {}))
    assert prepared.wait(10.0, "refused") == {}
    assert prepared.over

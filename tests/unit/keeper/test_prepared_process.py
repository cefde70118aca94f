"""A prepared process that can't be listened to."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, cast

import pytest

from vllm_launchers.keeper import spawn
from vllm_launchers.keeper.preparation import PreparedProcess
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity


def test_without_a_thread_for_its_messages_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    command = spawn.ProcessCommand((sys.executable, "-c", "import time; time.sleep(600)"), {}, "/", 1)
    begun: list[ProcessIdentity] = []
    with pytest.raises(OSError, match="can't start new thread"):
        PreparedProcess(1, cast("LaunchSpec", None), command, cast("Any", None), begun.append)
    _, status = os.waitpid(begun[0].pid, 0)
    assert os.WTERMSIG(status) == 9

"""The bootstrap of a prepared vLLM as a process, started as the keeper starts it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fakes.forked import Forked, Forks

AS_THE_KEEPER = """
import ctypes, os, signal, sys
os.dup2(int(sys.argv[1]), 3, inheritable=True)
if sys.argv[1] != "3":
    os.close(int(sys.argv[1]))
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Like the keeper between fork and exec: the socket is descriptor 3, and the process dies with its parent."""

SECONDS = 600
"""Timeout for a busy machine; only failures wait that long."""


class Prepared:
    """The bootstrap as a process, from its keeper's side."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], folder: Path, forks: Forks | None = None
    ) -> None:
        """With ``forks`` (same Python as ``argv``), its modules are already imported."""
        self.own_output = folder / "own-output"
        self.server_output = folder / "server-output"
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(SECONDS)
        self.process: subprocess.Popen[bytes] | Forked
        with self.own_output.open("wb") as output:
            if forks is not None:
                with Path(os.devnull).open("rb") as nothing:
                    self.process = forks.start(argv[1:], environment, nothing, output, output, theirs.fileno())
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", AS_THE_KEEPER, str(theirs.fileno()), *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    cwd=folder,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        theirs.close()
        self._lines = self.socket.makefile("r")

    def step(self) -> dict[str, Any]:
        """The next step that it reports; empty once it has closed the socket."""
        line = self._lines.readline()
        answer: dict[str, Any] = json.loads(line) if line else {}
        return answer

    def until(self, name: str) -> dict[str, Any]:
        """Read steps up to the one with this name, and return that."""
        seen = []
        while step := self.step():
            seen.append(step)
            if step["step"] == name:
                return step
        pytest.fail(f"never {name}: {seen}\n{self.own_output.read_text()}")

    def go(self) -> None:
        with self.server_output.open("wb") as output:
            socket.send_fds(self.socket, [b"g"], [output.fileno()])

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def close(self) -> None:
        self._lines.close()
        self.socket.close()

    def end(self) -> None:
        self.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

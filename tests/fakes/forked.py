"""Short programs in forks of a process that has already imported their modules (`fork_server`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

SERVER = Path(__file__).with_name("fork_server.py")


class Forked:
    """A process that is not our child, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def ended(self, code: int) -> None:
        """Called when its parent reports the exit code."""
        self.returncode = code
        self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """Runs programs in forks of a process that has imported some modules."""

    def __init__(self, python: str, environment: Mapping[str, str], imported: Sequence[str]) -> None:
        self.environment = dict(environment)
        """Of the fork server; each fork gets its own."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        self._process = subprocess.Popen(
            [python, str(SERVER), str(number), *imported],
            env=self.environment,
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._starting = threading.Lock()
        self._started: list[Forked] = []
        self._answered = threading.Condition()
        self._running: dict[int, Forked] = {}
        self._ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, argv: Sequence[str], env: Mapping[str, str], *streams: IO[bytes] | int) -> Forked:
        """Run ``python ARGV`` with this environment, these standard streams and optionally a descriptor 3.

        May be called from any thread.
        """
        request = json.dumps({"argv": list(argv), "env": dict(env), "cwd": str(Path.cwd())}).encode()
        files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
        with self._starting:
            socket.send_fds(self._socket, [request], files)
            with self._answered:
                while not self._started:
                    assert not self._ended, "the fork server ended: did its imports fail?"
                    assert self._answered.wait(600), "the fork server did not answer"
                return self._started.pop()

    def run(self, argv: Sequence[str], given: str, env: Mapping[str, str] | None = None) -> str:
        """Run ``python ARGV`` to its end with this input and these additional variables; returns its output."""
        with TemporaryFile() as read, TemporaryFile() as written, TemporaryFile() as errors:
            read.write(given.encode())
            read.seek(0)
            code = self.start(argv, {**self.environment, **(env or {})}, read, written, errors).wait(600)
            for file in (written, errors):
                file.seek(0)
            assert code == 0, errors.read().decode(errors="replace")[-3000:]
            return written.read().decode()

    def close(self) -> None:
        """End the fork server, but not its forks."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._socket.recv(1 << 16):
                answer = json.loads(data)
                with self._answered:
                    if "code" in answer:
                        self._running.pop(answer["pid"]).ended(answer["code"])
                    else:
                        self._running[answer["pid"]] = forked = Forked(answer["pid"])
                        self._started.append(forked)
                        self._answered.notify_all()
        with self._answered:
            self._ended = True
            self._answered.notify_all()
            for forked in self._running.values():
                forked.ended(-signal.SIGKILL)  # their exit codes are unknown now

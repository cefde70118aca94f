"""Prepares a server's first process while its launch is still being planned.

No record or other part of a server exists yet: only its future keeper, which owns the process as it would for a
prepared restart. Console and keeper share a socket with one JSON object per line:

- from the console, first: what to prepare (``folder``, ``spec``, ``argv``, ``secrets``, ``tuning``)
- from the keeper: ``{"pid": …}``, and each line that the process writes (`preparation`)
- from the console: ``{"do": "launch" | "restart", …}`` as `client` sends it to any new keeper, with the descriptor of
  the folder's lock. The keeper answers with its first record and is the server's keeper from then on

The process may be asked to become the server before it has checked its flags: it does so once it has. If the socket
closes before that, if the process ends, or after `Tuning.prepare` seconds, the keeper ends the process and itself. The
kernel kills the process with the keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_launchers.keeper import wire
from vllm_launchers.keeper.context import KeeperContext, Tuning
from vllm_launchers.keeper.errors import KeeperError, SilentError
from vllm_launchers.keeper.lifecycle import Event, LaunchRequested, PreparedStep
from vllm_launchers.keeper.preparation import PreparedProcess
from vllm_launchers.keeper.records import LaunchSpec
from vllm_launchers.keeper.spawn import SpawnError, server_process_command
from vllm_launchers.values import Value

if TYPE_CHECKING:
    import subprocess

PREPARE = "--prepare"
"""Command line option that starts a keeper in this mode; followed by the socket's descriptor."""
ANSWER_SECONDS = 60.0
"""Like the time that any keeper may take to start."""
CHECK_SECONDS = 1.0
LONGEST_REQUEST = 1 << 20


class FirstStart(Value):
    """How a server's first process is started. It can be launched only if nothing of this has changed by then."""

    folder: Path
    argv: tuple[str, ...]
    spec: LaunchSpec
    secrets: Mapping[str, str]

    def difference(self, other: FirstStart) -> str:
        """How it differs from another start, as a clause; empty if it does not."""
        mine, theirs = self.spec, other.spec
        if (mine.host, mine.port) != (theirs.host, theirs.port):
            return f"its address is now {theirs.host}:{theirs.port}"
        if self.argv != other.argv or mine.argv != theirs.argv:
            return "its flags have changed"
        if self.folder != other.folder:
            return "its name has changed"
        if mine.environment != theirs.environment or dict(self.secrets) != dict(other.secrets):
            return "its environment has changed"
        return "" if (mine.cwd, mine.probe) == (theirs.cwd, theirs.probe) else "its folder has changed"


# -- the console's side -----------------------------------------------------------------------------------------------


class PreparedLaunch:
    """The console's side of a keeper that prepares a server's first process. Thread-safe."""

    def __init__(self, start: FirstStart, tuning: Mapping[str, Any] | None = None) -> None:
        """Start it. Raises OSError if no process can be started."""
        import subprocess  # not at the top, because a keeper needs only the other side of this module

        self.start = start
        self.pid: int | None = None
        """Pid of the prepared process, once it runs."""
        self.version = ""
        """The version of its vLLM, once known."""
        self._reports: dict[str, Mapping[str, Any]] = {}
        self._answer: Mapping[str, Any] | None = None
        self._ended = self._launched = False
        self._changed = threading.Condition()
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                program = str(Path(__file__).with_name("__main__.py"))
                starter = subprocess.Popen(
                    [sys.executable, "-I", "-S", program, PREPARE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            plain = {"folder": str(start.folder), "spec": wire.to_plain(start.spec), "argv": start.argv}
            self._send({**plain, "secrets": dict(start.secrets), "tuning": tuning})
            threading.Thread(target=self._listen, args=(starter,), name="prepared launch", daemon=True).start()
        except BaseException:
            self._socket.close()
            raise

    def wait(self, seconds: float, *steps: str) -> Mapping[str, Any]:
        """The report of one of these steps; empty if the process ends or is launched first, or on a timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self.over or not self._reports.keys().isdisjoint(steps), seconds)
            return next((self._reports[step] for step in steps if step in self._reports), {})

    @property
    def over(self) -> bool:
        """Whether it has ended or was launched."""
        return self._ended or self._launched

    @property
    def usable(self) -> bool:
        """Whether the process can still become the server."""
        with self._changed:
            return not self.over and self._reports.keys().isdisjoint({"refused", "unprepared"})

    def launch(self, lock: int, request: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Let it become the keeper of its folder, whose lock this is; returns its answer, or None if it has ended.

        Raises `SilentError` if it does not answer.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.over or self.pid is not None, ANSWER_SECONDS)
            if self.over:
                return None
            self._launched = True
            self._changed.notify_all()
            with contextlib.suppress(OSError):
                self._send(request, lock)
            self._changed.wait_for(lambda: self._ended or self._answer is not None, ANSWER_SECONDS)
            answer, ended = self._answer, self._ended
        self._close()
        if answer is None and not ended:  # it is alive and has the lock
            raise SilentError.starting(self.start.folder, ANSWER_SECONDS)
        return answer

    def end(self) -> None:
        """End it, unless it was launched."""
        with self._changed:
            if self._launched:
                return
            self._ended = True
            self._changed.notify_all()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self, request: Mapping[str, Any], descriptor: int | None = None) -> None:
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(self._socket, [data], [descriptor]) if descriptor is not None else 0
        self._socket.sendall(data[sent:])

    def _listen(self, starter: subprocess.Popen[bytes]) -> None:
        starter.wait()  # it ends immediately, because the keeper is not a child of this process
        # ValueError: a keeper was killed while it wrote a line
        with self._socket, contextlib.suppress(OSError, ValueError), self._socket.makefile("rb") as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    if "pid" in message:
                        self.pid = message["pid"]
                    elif "step" in message:
                        self._reports[message["step"]] = message
                        self.version = str(message.get("vllm") or self.version)
                    else:
                        self._answer = message
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


# -- the keeper's side ------------------------------------------------------------------------------------------------


class WaitingProcess(Value):
    """A prepared process and the ``request`` to launch it; its events go to ``events``."""

    context: KeeperContext
    process: PreparedProcess
    events: queue.SimpleQueue[Event]
    request: Mapping[str, Any]
    lock: int


def hold(control: socket.socket, umask: int) -> WaitingProcess | None:
    """Prepare what the console asks for and wait until the console launches it; None if it does not."""
    data, _ = _received(control)
    if not data:
        return None
    asked = json.loads(data)
    tuning = wire.from_plain(Tuning, asked.get("tuning") or {})
    context = KeeperContext(Path(asked["folder"]), dict(os.environ), umask, tuning)
    spec, events = wire.from_plain(LaunchSpec, asked["spec"]), queue.SimpleQueue[Event]()
    try:
        command = server_process_command(context, spec, asked["argv"], asked["secrets"])
        process = PreparedProcess(0, spec, command, events.put, lambda _: None)
    except (KeeperError, SpawnError, OSError) as error:
        _say(control, {"step": "unprepared", "message": f"its process could not be started: {error}"})
        return None
    _say(control, {"pid": process.process.pid})
    threading.Thread(target=_await_launch, args=(control, events), name="console", daemon=True).start()
    launch = _launch_of(control, process, events, tuning.prepare)
    if launch is None:
        process.close()
        process.end()
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
    return None if launch is None else WaitingProcess(context, process, events, launch.request, launch.lock)


def _launch_of(
    control: socket.socket, process: PreparedProcess, events: queue.SimpleQueue[Event], seconds: float
) -> LaunchRequested | None:
    """Pass on the process's reports until it is launched; None if it can no longer be."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not process.too_much_output:
        try:
            event = events.get(timeout=CHECK_SECONDS)
        except queue.Empty:
            continue
        if isinstance(event, LaunchRequested):
            return event if event.lock >= 0 else None
        if isinstance(event, PreparedStep):
            if event.message is None:
                return None
            process.accepted |= event.message.get("step") == "accepted"
            _say(control, event.message)
    return None


def _await_launch(control: socket.socket, events: queue.SimpleQueue[Event]) -> None:
    """Post the console's request to launch, or one without a lock if there will be none."""
    data, lock = _received(control)
    events.put(LaunchRequested(json.loads(data), lock) if data and lock >= 0 else LaunchRequested({}, -1))


def _received(control: socket.socket) -> tuple[bytes, int]:
    """A line from the console and the descriptor that came with it (-1 if none); empty at the end of the stream."""
    data, lock = b"", -1
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n"):
            part, descriptors, _, _ = socket.recv_fds(control, LONGEST_REQUEST, 1, socket.MSG_CMSG_CLOEXEC)
            lock = descriptors[0] if descriptors else lock
            data += part
            if not part:
                return b"", lock
    return data, lock


def _say(control: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the reading thread notices the end of the socket
        control.sendall(json.dumps(message).encode() + b"\n")

"""A server's next process, prepared while the present one still serves: most of a start, without its downtime.

It is started with a socket as descriptor 3 (`spawn.CONTROL_FD`) and says there, one JSON object per line, how far it
is: ``{"step": "imported"}``, ``"accepted"``, ``"refused"`` (with ``"message"``) or ``"unprepared"`` (it can't be
prepared, or what it has loaded was replaced since; ``"message"`` says why). Accepted, it waits. `PreparedProcess.go`
sends it the server's output file: it writes there from then on, says ``"started"`` and goes on as the server.

Until then it belongs to nobody but this keeper: the kernel kills it when the keeper ends, and what it prints goes to a
file in memory, which has no name and is gone with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm_launchers.keeper import processes, spawn
from vllm_launchers.keeper.lifecycle import Post, PreparedStep
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity
from vllm_launchers.values import replace

GO = b"g"
"""The byte that the output's descriptor comes with."""
GO_SECONDS = 10.0
"""How long it may take to say "started"."""
MOST_OUTPUT = 8 << 20
"""Bytes that it may print while it is prepared. They are kept in memory."""
LAST_MESSAGE_SECONDS = 1.0
"""How long to wait for the socket's end after the process's: at once, unless something that it started holds it."""
LONGEST_MESSAGE = 1 << 16
"""Bytes of one line on the socket."""


class PreparedProcess:
    """One prepared process. Only the keeper's loop calls it; its thread posts `PreparedStep`."""

    def __init__(
        self,
        epoch: int,
        spec: LaunchSpec,
        command: spawn.Command,
        post: Post,
        before: Callable[[ProcessIdentity], None],
    ) -> None:
        """Start it; ``before`` gets its identity while it is held back. Raises `spawn.SpawnError`, OSError."""
        self.spec, self.epoch = spec, epoch
        self._output = -1
        self.started_at = time.monotonic()
        self.accepted = False
        """Whether it has accepted the flags, and waits."""
        self.before_launch = False
        """Whether it was prepared before there was a server, and so may be launched before it has judged its flags."""
        self.launched = False
        """Whether it is the server's process: asked to go on, or to be asked once it waits."""
        self.went_at: float | None = None
        """When it was asked to become the server; None before."""
        self.why_not = ""
        """Why it did not go on then, if that is known."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._last: Mapping[str, Any] = {}
        self._listener = threading.Thread(target=self._listen, args=(post,), name="prepared", daemon=True)
        try:
            with theirs:
                self._output = os.memfd_create("prepared", os.MFD_CLOEXEC)
                command = replace(command, output_fd=self._output, control_fd=theirs.fileno(), dies_with_parent=True)
                self.process = spawn.start(command, before)
            self._start_listener()
        except BaseException:
            self.close()
            self._control.close()
            raise

    @property
    def too_much_output(self) -> bool:
        """Whether it prints more than may be kept."""
        return os.fstat(self._output).st_size > MOST_OUTPUT

    def output(self) -> bytes:
        """What it has printed until now."""
        with contextlib.suppress(OSError):
            return os.pread(self._output, MOST_OUTPUT, 0)
        return b""

    def go(self, output_fd: int) -> None:
        """Let it go on as the server, with this file as its output, at first what it has printed until now.

        Raises OSError if it is gone.
        """
        os.write(output_fd, self.output())
        socket.send_fds(self._control, [GO], [output_fd])
        self.went_at = time.monotonic()

    def last_message(self) -> Mapping[str, Any]:
        """What it said last, once it has ended: its end may be noticed before that was read from the socket."""
        self._listener.join(LAST_MESSAGE_SECONDS)
        return self._last

    def overdue(self, now: float) -> bool:
        """Whether it was asked long ago to become the server and has not reported that it did."""
        return self.went_at is not None and now - self.went_at >= GO_SECONDS

    def end(self) -> None:
        """End it and everything that it started. It holds nothing that has to be cleaned up."""
        processes.end_session(self.process)

    def close(self) -> None:
        """Close its socket and its output."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _start_listener(self) -> None:
        try:
            self._listener.start()
        except RuntimeError as error:  # a shortage of threads
            self.end()
            raise OSError(str(error)) from error

    def _listen(self, post: Post) -> None:
        """Post each line that it sends, then None."""
        with self._control as control, contextlib.suppress(OSError), control.makefile("rb") as lines:
            while line := lines.readline(LONGEST_MESSAGE):
                if (message := _decoded(line)) is not None:
                    self._last = message
                    post(PreparedStep(self.epoch, message))
        post(PreparedStep(self.epoch, None))


def _decoded(line: bytes) -> Mapping[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None

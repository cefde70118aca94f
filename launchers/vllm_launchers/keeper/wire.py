"""One request, one answer, over the keeper's unix socket: a line of JSON each way.

The socket is reached by way of an open descriptor of its folder (``/proc/self/fd/N/keeper.sock``), because a socket's
path may have 107 bytes only. Both sides look who is at the other end; only the same user is spoken to.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.keeper.errors import KeeperError, SilentError
from vllm_launchers.keeper.events import Asked, HelperFailed, Post

SOCKET = "keeper.sock"
LONGEST_MESSAGE = 8 << 20
REQUEST_SECONDS = 2.0
ANSWER_SECONDS = 15.0
REST_SECONDS = 0.1
"""Until connections are taken again after none could be (no descriptor or memory left)."""


class UnreachableError(Exception):
    """No keeper answers there (any more)."""


def ask(folder: Path, request: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Send a request and wait for its answer.

    Raises `UnreachableError`, `SilentError` where that takes longer, and `KeeperError` on nonsense.
    """
    deadline = time.monotonic() + seconds
    try:
        with _address(folder) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            if not stat.S_ISSOCK(os.stat(address, follow_symlinks=False).st_mode):  # noqa: PTH116 - a descriptor's path
                raise UnreachableError("a link or a file is in the socket's place")
            connection.connect(address)
            if _peer_uid(connection) != os.geteuid():
                raise UnreachableError("another user's process listens there")
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = read_line(connection, deadline)
    except TimeoutError as error:
        raise SilentError(
            f"the keeper of {folder.name} did not answer within {seconds:g} s; see {folder / 'keeper.log'}"
        ) from error
    except OSError as error:
        raise UnreachableError(str(error)) from error
    if not line:
        raise UnreachableError("it closed the connection")
    try:
        answer = json.loads(line)
        return dict(answer)
    except (ValueError, TypeError, RecursionError) as error:
        raise KeeperError(f"the keeper of {folder.name} answered what cannot be read") from error


def read_line(connection: socket.socket, deadline: float) -> bytes:
    """One line, without its end; empty when the other side closed first. Raises TimeoutError."""
    data = bytearray()
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or len(data) > LONGEST_MESSAGE:
            raise TimeoutError
        connection.settimeout(left)
        chunk = connection.recv(1 << 16)
        if not chunk:
            return b""
        data += chunk
    return bytes(data[:-1])


class Listener(threading.Thread):
    """Takes requests, one at a time, posts them to the owner and sends back its answer."""

    def __init__(self, folder: Path, post: Post) -> None:
        super().__init__(name="listener", daemon=True)
        self._post = post
        self._path = folder / SOCKET
        self._closing = threading.Event()
        self._path.unlink(missing_ok=True)  # a dead keeper's; we hold the lock
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(folder) as address:
            self._socket.bind(address)
        self._path.chmod(0o600)
        self._socket.listen(16)

    def run(self) -> None:
        """Serve for as long as the keeper lives."""
        told = ""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                if repr(error) != told:
                    told = repr(error)
                    self._post(HelperFailed("listener", told))
                self._closing.wait(REST_SECONDS)
                continue
            told = ""
            try:
                with connection:
                    self._serve(connection)
            except (OSError, ValueError, RecursionError):
                continue  # a console that went away, hung, or sent no JSON
            except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and the listening goes on
                self._post(HelperFailed("listener", repr(error)))

    def close(self) -> None:
        """Take no more requests."""
        self._closing.set()
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self, connection: socket.socket) -> None:
        if _peer_uid(connection) != os.geteuid():
            return
        line = read_line(connection, time.monotonic() + REQUEST_SECONDS)
        request = json.loads(line) if line else None
        if not isinstance(request, dict) or _has_left(connection):
            return
        answered = threading.Event()
        answers: list[Mapping[str, Any]] = []

        def reply(answer: Mapping[str, Any]) -> None:
            answers.append(answer)
            answered.set()

        self._post(Asked(request, reply))
        if answered.wait(ANSWER_SECONDS):
            connection.settimeout(REQUEST_SECONDS)
            connection.sendall(json.dumps(answers[0]).encode() + b"\n")


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def _has_left(connection: socket.socket) -> bool:
    """Whether who asked has gone: told that no answer came, and not to be surprised later, when a stopped keeper
    goes on, by what nobody waits for any more."""
    poller = select.poll()
    poller.register(connection, 0)  # a hang-up is told without being asked for
    return bool(poller.poll(0))


def _peer_uid(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)

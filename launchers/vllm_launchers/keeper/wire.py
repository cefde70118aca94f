"""One request and one answer over the keeper's Unix socket: a line of JSON each way.

The socket is reached through an open descriptor of its folder (``/proc/self/fd/N/keeper.sock``), because a socket's
path is limited to 107 bytes. Both sides check the peer's uid; only the same user is answered.
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
from enum import Enum
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from vllm_launchers.keeper.errors import KeeperError, NewerRecordError, RecordError, SilentError
from vllm_launchers.keeper.lifecycle import ConsoleRequest, HelperFailed, Post
from vllm_launchers.keeper.records import RECORD_VERSION, ServerRecord
from vllm_launchers.values import Value, as_dict, replace

MOST_SECONDS = 6e10
"""Every float in a record is a time (Unix seconds, up to the year 3871) or a duration; larger values are invalid."""

Shape = TypeVar("Shape")
Recorded = TypeVar("Recorded", bound=Value)


def dumps(record: ServerRecord) -> bytes:
    """The bytes of ``record.json``: readable ASCII JSON with one trailing newline.

    ASCII, because a path may contain any bytes: those that are not UTF-8 are restored unchanged.
    """
    return json.dumps(to_plain(record), indent=1).encode() + b"\n"


def loads(data: bytes) -> ServerRecord:
    """Read ``record.json``. Raises `RecordError` with a sentence naming the invalid field."""
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not JSON: {error}") from error
    return record_of(raw)


def record_of(raw: Any) -> ServerRecord:
    """A record from plain JSON, in a file or a keeper's response. Raises `RecordError`."""
    version = raw.get("version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > RECORD_VERSION:
        raise NewerRecordError(
            f"was written by a newer vllm-console (record version {version}, this one reads up to {RECORD_VERSION}); "
            "update vllm-console"
        )
    record = replace(from_plain(ServerRecord, raw), version=RECORD_VERSION)
    if not record.generations:
        raise RecordError("has no generations")
    return record


def to_plain(value: Any) -> Any:
    """Convert values, mappings, tuples and enums to JSON types."""
    if isinstance(value, Value):
        return {name: to_plain(field) for name, field in as_dict(value).items()}
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(kind: type[Recorded], raw: Any, where: str = "") -> Recorded:
    """Check plain JSON and build a value of ``records`` from it; unknown fields are ignored."""
    if not isinstance(raw, dict):
        raise RecordError(f"expected an object at {where or 'the top'}, found {_found(raw)}")
    values: dict[str, Any] = {}
    for name, (annotation, required) in _schema(cast(type, kind)).items():
        if name in raw:
            values[name] = _decode(annotation, raw[name], f"{where}.{name}" if where else name)
        elif required:
            raise RecordError(f"lacks {where + '.' if where else ''}{name}")
    return kind(**values)


@cache
def _schema(kind: type[Value]) -> dict[str, tuple[Any, bool]]:
    """Each field's type and whether it is required."""
    hints = get_type_hints(kind)
    return {name: (hints[name], name not in kind.DEFAULTS) for name in kind.FIELDS}


def _decode(kind: Any, raw: Any, where: str) -> Any:  # noqa: C901 (one branch per type)
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        if raw is None:
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
        origin = get_origin(kind)
    if kind is Any:
        return raw
    if origin is tuple:
        item_kind = get_args(kind)[0]
        return tuple(_decode(item_kind, item, f"{where}[{i}]") for i, item in enumerate(_expect(list, raw, where)))
    if origin is not None:
        item_kind = get_args(kind)[1]
        return {key: _decode(item_kind, item, f"{where}.{key}") for key, item in _expect(dict, raw, where).items()}
    if issubclass(kind, Value):
        return from_plain(kind, raw, where)
    if issubclass(kind, Enum):
        try:
            return kind(raw)
        except ValueError as error:
            known = ", ".join(str(member.value) for member in kind)
            raise RecordError(f"{where} is {repr(raw)[:80]}, expected one of {known}") from error
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        if not abs(raw) <= MOST_SECONDS:  # nor is NaN
            raise RecordError(f"expected seconds at {where}, found a number out of range")
        return float(raw)
    return _expect(kind, raw, where)


def _expect(kind: type[Shape], raw: Any, where: str) -> Shape:
    if not isinstance(raw, kind) or (isinstance(raw, bool) and kind is not bool):
        raise RecordError(f"expected {kind.__name__} at {where}, found {_found(raw)}")
    return raw


def _found(raw: Any) -> str:
    return "nothing" if raw is None else type(raw).__name__


SOCKET = "keeper.sock"
LONGEST_MESSAGE = 8 << 20
REQUEST_SECONDS = 2.0
ANSWER_SECONDS = 15.0
GONE_SECONDS = 0.2
"""How often to check that a client is still waiting."""

REST_SECONDS = 0.1
"""Pause after a failed accept (no descriptors or memory left)."""


class UnreachableError(Exception):
    """No keeper is listening there (any more)."""


def ask(folder: Path, request: Mapping[str, Any], seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """Send a request and wait for its answer.

    Raises `UnreachableError`, `SilentError` on a timeout, and `KeeperError` on an invalid answer.
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
            f"the keeper of {folder.name} did not answer within {seconds:g}s; see {folder / 'keeper.log'}"
        ) from error
    except OSError as error:
        raise UnreachableError(str(error)) from error
    if not line:
        raise UnreachableError("it closed the connection")
    try:
        answer = json.loads(line)
        return dict(answer)
    except (ValueError, TypeError, RecursionError) as error:
        raise KeeperError(f"unreadable answer from the keeper of {folder.name}") from error


def read_line(connection: socket.socket, deadline: float) -> bytes:
    """One line without its newline; empty if the other side closed first. Raises TimeoutError."""
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


class RequestListener(threading.Thread):
    """Accepts requests, one at a time, posts them to the owner and sends back its answer."""

    def __init__(self, folder: Path, post: Post) -> None:
        super().__init__(name="listener", daemon=True)
        self._post = post
        self._path = folder / SOCKET
        self._closing = threading.Event()
        self._bind()

    def run(self) -> None:
        """Serve as long as the keeper lives."""
        fault = ""
        while True:
            try:
                taken = self._socket
                connection, _ = taken.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                if taken is not self._socket:
                    continue  # it was replaced
                if repr(error) != fault:
                    fault = repr(error)
                    self._post(HelperFailed("listener", fault))
                self._closing.wait(REST_SECONDS)
                continue
            fault = ""
            try:
                with connection:
                    self._serve(connection)
            except (OSError, ValueError, RecursionError):
                continue  # a console that went away, hung, or sent no JSON
            except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and listening continues
                self._post(HelperFailed("listener", repr(error)))

    def restore(self) -> bool:
        """Listen again if the socket's file was deleted or replaced; returns whether it was."""
        with contextlib.suppress(OSError):
            found = self._path.lstat()
            if (found.st_dev, found.st_ino) == self._file:
                return False
        old = self._socket
        try:
            self._bind()
        except OSError:
            return False  # retried at the next check
        with contextlib.suppress(OSError):
            old.shutdown(socket.SHUT_RDWR)  # makes the thread notice the new one
        old.close()
        return True

    def close(self, *, remove: bool = True) -> None:
        """Stop accepting requests; ``remove`` also removes the socket's file."""
        self._closing.set()
        if remove:
            self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _bind(self) -> None:
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()  # left by a dead keeper, or not a socket of ours: this keeper holds the lock
            with _address(self._path.parent) as address:
                fresh.bind(address)
            self._path.chmod(0o600)
            fresh.listen(16)
            found = self._path.lstat()
        except OSError:
            fresh.close()
            raise
        self._socket, self._file = fresh, (found.st_dev, found.st_ino)

    def _serve(self, connection: socket.socket) -> None:
        if _peer_uid(connection) != os.geteuid():
            return
        line = read_line(connection, time.monotonic() + REQUEST_SECONDS)
        request = json.loads(line) if line else None
        if not isinstance(request, dict) or _has_gone(connection):
            return
        answered, abandoned = threading.Event(), threading.Event()
        answers: list[Mapping[str, Any]] = []

        def reply(answer: Mapping[str, Any]) -> None:
            answers.append(answer)
            answered.set()

        self._post(ConsoleRequest(request, reply, abandoned))
        deadline = time.monotonic() + ANSWER_SECONDS
        while not answered.wait(GONE_SECONDS):
            if time.monotonic() > deadline or _has_gone(connection):
                abandoned.set()
                return
        connection.settimeout(REQUEST_SECONDS)
        connection.sendall(json.dumps(answers[0]).encode() + b"\n")


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def _has_gone(connection: socket.socket) -> bool:
    """Whether the client is gone.

    It has already reported that no answer came, so its request must not be executed later, when a stopped or busy
    keeper continues.
    """
    poller = select.poll()
    poller.register(connection, 0)  # a hang-up is always reported
    return bool(poller.poll(0))


def _peer_uid(connection: socket.socket) -> int:
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)

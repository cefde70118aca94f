"""Sends a keeper's requests to its server: one HTTP request per connection, with a deadline.

The connection goes to a socket on which the server's own processes listen, so that no key reaches another program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_launchers.addresses import tls_to_own
from vllm_launchers.listeners import Owner
from vllm_launchers.secrets import API_KEY
from vllm_launchers.values import Value

if TYPE_CHECKING:
    from vllm_launchers.keeper.records import ProcessIdentity, ServerRecord

ASK_SECONDS = 10.0
"""Timeout for connecting, and for a response that needs no engine."""
MOST_BYTES = 8 << 20


class Response(Value):
    """An HTTP response: status and body."""

    status: int
    body: bytes

    @property
    def document(self) -> dict[str, Any] | None:
        """The body, if it is a JSON object."""
        try:
            found = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    @property
    def message(self) -> str:
        """Status and error message, as a clause."""
        document = self.document or {}
        error = document.get("error", document)
        message = (error.get("message") or error.get("detail")) if isinstance(error, dict) else error
        text = " ".join(str(message or "").split())[:200]
        return f"{self.status} {text}".strip()


class RequestTimeoutError(OSError):
    """No response to a request for ``path`` within ``seconds``.

    ``taken``: the request was sent and was for the engine. Otherwise nothing is known about the engine.
    """

    def __init__(self, path: str, seconds: float, *, taken: bool) -> None:
        super().__init__(f"{path}: no response within {round(seconds, 1):g}s")
        self.taken = taken


class ServerClient:
    """Sends requests to one server from one thread; any thread may `cancel`."""

    def __init__(self, owner: Owner, host: str, port: int, key: str = "", *, tls: bool = False) -> None:
        self._owner, self._host, self._port, self._key, self._tls = owner, host, port, key, tls
        self.canceled = threading.Event()
        self._connection: socket.socket | None = None

    def cancel(self) -> None:
        """End the open request immediately and send no more."""
        self.canceled.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def ask(
        self, method: str, path: str, body: object = None, *, seconds: float | None = None, engine: int | None = None
    ) -> Response:
        """Send one request over its own connection; ``seconds``: time limit for all of it, default `ASK_SECONDS`.

        ``engine``: the data-parallel rank that should serve it. Raises OSError, including `RequestTimeoutError` and
        `WrongProcessError`.
        """
        sent, since, limit = False, time.monotonic(), ASK_SECONDS if seconds is None else seconds
        content = b"" if body is None else json.dumps(body).encode()
        try:
            with (
                self._owner.connect(self._port, min(ASK_SECONDS, limit)) as plain,
                over_tls(plain) if self._tls else plain as connection,
            ):
                self._connection = connection
                if self.canceled.is_set():
                    raise ConnectionAbortedError
                connection.sendall(self._head(method, path, len(content), engine) + content)
                sent = True
                data = _read(connection, since + limit)
        except TimeoutError as error:
            raise RequestTimeoutError(path, time.monotonic() - since, taken=sent and bool(content)) from error
        self._connection = None
        return _parsed(data)

    def _head(self, method: str, path: str, length: int, engine: int | None) -> bytes:
        head = [f"{method} {path} HTTP/1.1", f"Host: {self._host}:{self._port}", "Connection: close"]
        if length:
            head.append("Content-Type: application/json")
        if length or method == "POST":
            head.append(f"Content-Length: {length}")
        if engine is not None:
            head.append(f"X-data-parallel-rank: {engine}")
        if self._key and path != "/metrics":
            head.append(f"Authorization: Bearer {self._key}")
        return "\r\n".join([*head, "", ""]).encode()


def client_of(record: ServerRecord, server: ProcessIdentity) -> ServerClient:
    """A client for the process that a record names; an API key comes from our own environment."""
    spec = record.current.spec
    key = os.environ.get(API_KEY, "") if API_KEY in spec.secret_names else ""
    return ServerClient(Owner(server.pid, server.start_time), spec.host, spec.port, key, tls=spec.tls)


def over_tls(connection: socket.socket) -> socket.socket:
    """The connection wrapped in TLS, accepting any certificate."""
    return tls_to_own().wrap_socket(connection)


def base_model(document: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The model of a ``/v1/models`` response that is not a LoRA adapter; None if it names none."""
    data = (document or {}).get("data")
    models = [one for one in data if isinstance(one, dict) and one.get("id")] if isinstance(data, list) else []
    return next((one for one in models if not one.get("parent")), models[0] if models else None)


def _read(connection: socket.socket, ends: float) -> bytes:
    """Read until the other side closes, or to the end of its ``Content-Length``. Raises OSError."""
    data = b""
    while len(data) < MOST_BYTES and not _complete(data):
        if (left := ends - time.monotonic()) <= 0:
            raise TimeoutError
        connection.settimeout(left)
        if not (chunk := connection.recv(1 << 16)):
            break
        data += chunk
    return data


def _complete(data: bytes) -> bool:
    head, between, body = data.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length:[ \t]*(\d+)", head, re.IGNORECASE) if between else None
    return length is not None and len(body) >= int(length[1])


def _parsed(data: bytes) -> Response:
    """Parse an HTTP response. Raises ConnectionError if it is invalid."""
    head, _, body = data.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise ConnectionError("connection closed without a response" if not data else "not an HTTP response")
    if re.search(rb"\r\ntransfer-encoding:[ \t]*chunked", head, re.IGNORECASE):
        body = _joined(body)
    return Response(int(words[1]), body)


def _joined(body: bytes) -> bytes:
    """Join the chunks of a chunked body."""
    found = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        try:
            length = int(size.split(b";")[0], 16)
        except ValueError:
            break
        if length <= 0:
            break
        found, body = found + rest[:length], rest[length + 2 :]
    return found

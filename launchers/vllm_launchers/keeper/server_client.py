"""Sends a keeper's requests to its server: one HTTP request per connection, with a deadline.

The connection goes to a socket on which the server's own processes listen, so that no key reaches another program.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_launchers.addresses import reachable, tls_to_own
from vllm_launchers.http_connection import CutOffError, HttpConnection, NotHttpError, TooLargeError
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
        self._owner, self._host, self._port, self._tls = owner, reachable(host), port, tls
        sendable = not {"\r", "\n"} & set(key)
        self._key = key.encode(errors="surrogateescape").decode("latin-1") if sendable else ""
        self.canceled = threading.Event()
        self._connection: HttpConnection | None = None

    def cancel(self) -> None:
        """End the open request immediately and send no more."""
        self.canceled.set()
        if self._connection is not None:
            self._connection.abort()

    def ask(
        self, method: str, path: str, body: object = None, *, seconds: float | None = None, engine: int | None = None
    ) -> Response:
        """Send one request over its own connection; ``seconds``: time limit for all of it, default `ASK_SECONDS`.

        ``engine``: the data-parallel rank that should serve it. Of a body that is cut off, the response has what
        arrived. Raises OSError, including `RequestTimeoutError` and `WrongProcessError`.
        """
        sent, since, limit = False, time.monotonic(), ASK_SECONDS if seconds is None else seconds
        content = b"" if body is None else json.dumps(body).encode()
        tls = tls_to_own() if self._tls else None
        try:
            with contextlib.closing(HttpConnection(self._host, self._port, tls, self._owner)) as connection:
                self._connection = connection
                connection.deadline = since + min(ASK_SECONDS, limit)
                connection.open()
                if self.canceled.is_set():
                    raise ConnectionAbortedError
                connection.send(method, path, self._headers(path, content, engine), content)
                sent, connection.deadline = True, since + limit
                response = connection.response()
                try:
                    return Response(response.status, response.read(MOST_BYTES))
                except (CutOffError, NotHttpError, TooLargeError):
                    return Response(response.status, response.arrived())
        except TimeoutError as error:
            raise RequestTimeoutError(path, time.monotonic() - since, taken=sent and bool(content)) from error
        except (CutOffError, NotHttpError) as error:
            raise ConnectionError("not an HTTP response") from error

    def _headers(self, path: str, content: bytes, engine: int | None) -> dict[str, str]:
        headers = {"Connection": "close"}
        if content:
            headers["Content-Type"] = "application/json"
        if engine is not None:
            headers["X-data-parallel-rank"] = str(engine)
        if self._key and path != "/metrics":
            headers["Authorization"] = f"Bearer {self._key}"
        return headers


def client_of(record: ServerRecord, server: ProcessIdentity) -> ServerClient:
    """A client for the process that a record names; an API key comes from our own environment."""
    spec = record.current.spec
    key = os.environ.get(API_KEY, "") if API_KEY in spec.secret_names else ""
    return ServerClient(Owner(server.pid, server.start_time), spec.host, spec.port, key, tls=spec.tls)


def base_model(document: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The model of a ``/v1/models`` response that is not a LoRA adapter; None if it names none."""
    data = (document or {}).get("data")
    models = [one for one in data if isinstance(one, dict) and one.get("id")] if isinstance(data, list) else []
    return next((one for one in models if not one.get("parent")), models[0] if models else None)

"""A minimal HTTP/1.1 client: one keep-alive connection, a deadline for a whole response, a cap on its size.

Standard library only: keepers and recorders, which run beside every server, use it. Python's ``http.client`` parses
headers as email headers and imports TLS even for plain HTTP. In a recorder it took a fifth of the memory and of the CPU
time.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_launchers.listeners import Owner
from vllm_launchers.patterns import lazy_pattern

if TYPE_CHECKING:
    import ssl

LARGEST_HEAD = 64 * 1024
_BEGIN = b"HTTP/1."
_END_OF_HEAD = lazy_pattern(rb"\r?\n\r?\n")
_STATUS = lazy_pattern(rb"HTTP/1\.(\d) (\d{3})(?: ([^\r\n]*))?\r?\n")
_HEADER = lazy_pattern(rb"^([^\s:]+):[ \t]*([^\r\n]*)", re.MULTILINE)
_CHUNK_SIZE = lazy_pattern(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_WITHOUT_BODY = frozenset({204, 304})


class NotHttpError(Exception):
    """What was received is not an HTTP response."""


class CutOffError(Exception):
    """The other side closed the connection in the middle of its response."""


class TooLargeError(Exception):
    """The body exceeds the limit."""


class NoResponseError(ConnectionResetError):
    """The other side closed the connection without a response."""


class HttpConnection:
    """A connection to a server, opened on demand, with TLS if a context is given. For one thread, but for `abort`.

    With an ``owner``, it connects to a socket on which that process listens, whatever address the host's name resolves
    to. Every operation raises TimeoutError once ``deadline`` (`time.monotonic`) has passed.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, owner: Owner | None) -> None:
        self.deadline = 0.0
        self.sock: socket.socket | None = None
        self._host, self._port, self._tls, self._owner = host, port, tls, owner
        self._received = bytearray()
        """Received bytes that are not consumed yet."""

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        self._received.clear()
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def abort(self) -> None:
        """End the open request, from any thread: its response ends where it is."""
        if (connection := self.sock) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def get(self, path: str, headers: Mapping[str, str]) -> HttpResponse:
        """`send` and `response`."""
        self.send("GET", path, headers)
        return self.response()

    def open(self) -> socket.socket:
        """Connect unless connected. Raises OSError, including `WrongProcessError` if the port is not the owner's."""
        return self.sock or self._connect()

    def send(self, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Send a request. Raises like `open`, and ValueError if path or headers contain invalid characters."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self._authority()}", "Accept-Encoding: identity"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body or method == "POST":
            lines.append(f"Content-Length: {len(body)}")
        if any("\r" in line or "\n" in line for line in lines):
            raise ValueError("a line of a request can't have line ends")
        request = "\r\n".join([*lines, "", ""]).encode("latin-1")
        connection = self.open()
        connection.settimeout(self._left())
        connection.sendall(request + body)

    def response(self) -> HttpResponse:
        """Wait for the head of the response to the request that was sent.

        Raises:
            NoResponseError: the connection was closed, perhaps before the request was sent.
            CutOffError, NotHttpError, OSError: there is no usable response.
        """
        while (response := self._head()).status == 100:
            pass  # the final response follows
        return response

    def _authority(self) -> str:
        """The value of the header Host."""
        host = self._host if self._host.isascii() else self._host.encode("idna").decode("ascii")
        name = f"[{host}]" if ":" in host else host
        return name if self._port == (443 if self._tls else 80) else f"{name}:{self._port}"

    def _connect(self) -> socket.socket:
        if self._owner is not None:
            return self._opened(self._owner.connect(self._port, self._left()))
        problem: OSError = OSError(f"{self._host} has no address")
        # A str would make Python load a megabyte of IDNA tables.
        name = self._host.encode() if self._host.isascii() else self._host
        for family, kind, protocol, _, address in socket.getaddrinfo(name, self._port, 0, socket.SOCK_STREAM):
            candidate = socket.socket(family, kind, protocol)
            try:
                candidate.settimeout(self._left())
                candidate.connect(address)
                return self._opened(candidate)
            except OSError as error:
                candidate.close()
                problem = error
        raise problem

    def _opened(self, connection: socket.socket) -> socket.socket:
        """Use a new connection, with TLS if wanted; it is closed if that fails."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection.settimeout(self._left())
                connection = self._tls.wrap_socket(connection, server_hostname=self._host)
        except OSError:
            connection.close()
            raise
        self._received.clear()
        self.sock = connection
        return connection

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("deadline passed")
        return left

    def _receive(self) -> bool:
        """Wait for more data; False at the end of the stream."""
        if self.sock is None:
            return False
        self.sock.settimeout(self._left())
        data = self.sock.recv(1 << 16)
        self._received += data
        return bool(data)

    def _head(self) -> HttpResponse:
        received = self._received
        while (end := _END_OF_HEAD.search(received)) is None:
            if len(received) > LARGEST_HEAD or (b"\n" in received and not received.startswith(_BEGIN)):
                raise NotHttpError
            if not self._receive():
                raise CutOffError if received else NoResponseError("connection closed without a response")
        head = self._taken(end.end())
        status = _STATUS.match(head)
        if status is None:
            raise NotHttpError
        headers: dict[str, str] = {}
        for name, value in _HEADER.findall(head, status.end()):
            headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1").rstrip())
        lasting = headers.get("connection", "").lower() != "close" and status[1] != b"0"
        return HttpResponse(self, int(status[2]), (status[3] or b"").decode("latin-1"), headers, lasting=lasting)

    def _taken(self, count: int) -> bytes:
        """Consume the next bytes, which must have been received."""
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def exactly(self, count: int) -> bytes:
        """Consume the next bytes of a body. Raises `CutOffError`."""
        while len(self._received) < count:
            if not self._receive():
                raise CutOffError
        return self._taken(count)

    def line(self) -> bytes:
        """Consume the next line of a chunked body. Raises `CutOffError`, `NotHttpError`."""
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > LARGEST_HEAD:
                raise NotHttpError
            if not self._receive():
                raise CutOffError
        return self._taken(end + 1).rstrip(b"\r\n")

    def rest(self, limit: int) -> bytes:
        """All bytes until the other side closes the connection. Raises `TooLargeError`."""
        more = True
        while more:
            if len(self._received) > limit:
                raise TooLargeError
            more = self._receive()
        return self.arrived()

    def arrived(self) -> bytes:
        """Consume all bytes that have been received."""
        return self._taken(len(self._received))

    def finish(self, *, lasting: bool) -> None:
        """After reading a response, close the connection unless it is reusable and nothing unsolicited arrived."""
        if not lasting or self._received:
            self.close()


class HttpResponse:
    """A response whose head has arrived; ``headers`` by lower-case name."""

    def __init__(
        self, connection: HttpConnection, status: int, reason: str, headers: Mapping[str, str], *, lasting: bool
    ) -> None:
        self.status, self.reason, self.headers = status, reason, headers
        self._connection, self._lasting = connection, lasting
        self._chunks = bytearray()
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length", "")
        self._length = 0 if status in _WITHOUT_BODY else int(length) if length.isascii() and length.isdigit() else None

    def read(self, limit: int) -> bytes:
        """Read the body once. Raises TooLargeError above ``limit`` bytes, CutOffError, NotHttpError, OSError."""
        if self._chunked:
            body, bounded = self._read_chunks(limit), True
        elif bounded := self._length is not None:
            if (length := self._length or 0) > limit:
                raise TooLargeError
            body = self._connection.exactly(length)
        else:
            body = self._connection.rest(limit)
        self._connection.finish(lasting=self._lasting and bounded)
        return body

    def arrived(self) -> bytes:
        """What has arrived of a body that could not be read."""
        return bytes(self._chunks) + self._connection.arrived()

    def _read_chunks(self, limit: int) -> bytes:
        body = self._chunks
        while True:
            size = _CHUNK_SIZE.fullmatch(self._connection.line())
            if size is None:
                raise NotHttpError
            length = int(size[1], 16)
            if len(body) + length > limit:
                raise TooLargeError
            if not length:
                break
            body += self._connection.exactly(length)
            if self._connection.line():
                raise NotHttpError
        trailers = 0
        while trailer := self._connection.line():
            trailers += len(trailer)
            if trailers > LARGEST_HEAD:
                raise NotHttpError
        return bytes(body)

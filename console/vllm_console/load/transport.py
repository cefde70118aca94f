"""HTTP/1.1 for httpx at a fraction of the usual cost per token, so that a load measures the server and not itself.

A streamed answer is one small chunk per token and stream. httpx's own transport takes about 150 µs of CPU for each,
which shows in the latencies if the server runs on the same machine. This transport parses chunks as they arrive.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import unquote

import httpx

from vllm_console.text import plain
from vllm_launchers.listeners import Listener, WrongProcessError, listens

LARGEST_HEAD = 64 * 1024
LARGEST_LINE = 1024
IDLE_SECONDS = 3.0
"""Idle connections are reused within this time; vLLM closes its own after five seconds."""


def unreachable(error: httpx.ConnectError) -> str:
    """Why there is no connection, as a clause; empty if it was refused, i.e. nothing listens there."""
    cause = error.__cause__
    # asyncio joins the errors of a name's several addresses in one text.
    if isinstance(cause, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(cause):
        return ""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted: {plain(cause.verify_message, 120).rstrip('.')}"
    if isinstance(cause, ssl.SSLError):
        return "the TLS handshake failed: check scheme (https) and port"
    return plain(getattr(cause, "strerror", None) or str(error), 200)


def connection_problem(error: httpx.HTTPError) -> str:
    """Why there was no answer, as a clause, the same for all failures of its kind."""
    match error:
        case httpx.ConnectError():
            why = unreachable(error)
            return f"no connection: {why}" if why else "connection refused"
        case httpx.ConnectTimeout():
            return str(error)
        case httpx.RemoteProtocolError():
            return f"the response is not valid HTTP: {error}"
    return "the connection was lost"


class LeanTransport(httpx.AsyncBaseTransport):
    """Connections to one server; ``tls`` is the TLS context for https.

    With ``lookup``, which finds where the server listens on this machine, it connects only to that socket.
    """

    def __init__(
        self, connect_seconds: float, tls: ssl.SSLContext, lookup: Callable[[], Listener | None] | None = None
    ) -> None:
        self._connect_seconds = connect_seconds
        self._reach = _Reach(lookup) if lookup is not None else None
        self._tls = tls
        self._idle: list[tuple[float, _Connection]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; return once the head of its response has arrived."""
        connection = self._waiting() or await self._connect(request)
        try:
            connection.send(_head(request), await request.aread())
            status, headers = await connection.head()
        except BaseException:
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(connection, self._idle), request=request)

    def _waiting(self) -> _Connection | None:
        """An idle connection that is still usable."""
        while self._idle:
            since, connection = self._idle.pop()
            if connection.usable and time.monotonic() - since < IDLE_SECONDS:
                return connection
            connection.close()
        return None

    async def _connect(self, request: httpx.Request) -> _Connection:
        try:
            if self._reach is None:
                return await self._made(request.url, request.url.host)
            return await self._reach.connect(lambda host: self._made(request.url, host))
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {self._connect_seconds:.0f}s", request=request) from error
        except (OSError, UnicodeError) as error:
            raise httpx.ConnectError(str(error), request=request) from error

    async def _made(self, url: httpx.URL, host: str) -> _Connection:
        secure = url.scheme == "https"
        port, tls = url.port or (443 if secure else 80), self._tls if secure else None
        async with asyncio.timeout(self._connect_seconds):
            return (await asyncio.get_running_loop().create_connection(_Connection, host, port, ssl=tls))[1]

    async def aclose(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop()[1].close()


class _Reach:
    """Connects to the socket found by ``lookup``, and to no other process.

    Asking the kernel who listens takes milliseconds, and more with many connections. It is done in a thread, and one
    answer covers every connection made before the query.
    """

    def __init__(self, lookup: Callable[[], Listener | None]) -> None:
        self._lookup = lookup
        self._listener: Listener | None = None
        self._asking = asyncio.Lock()
        self._made = self._asked = 0
        """Connections made so far, and how many of them the last answer covers."""

    async def connect(self, make: Callable[[str], Awaitable[_Connection]]) -> _Connection:
        """Make a connection. Raises OSError if nothing listens, or only other processes do."""
        known = self._listener is not None
        try:
            return await self._attempt(make)
        except (ConnectionRefusedError, WrongProcessError):
            if not known:
                raise
        return await self._attempt(make)  # the server was restarted and has a new socket

    async def _attempt(self, make: Callable[[str], Awaitable[_Connection]]) -> _Connection:
        async with self._asking:
            if self._listener is None:
                self._listener = await asyncio.to_thread(self._lookup)
            listener = self._listener
        if listener is None:
            raise ConnectionRefusedError("connection refused")
        try:
            made = await make(listener.address)
        except ConnectionRefusedError:
            self._forget(listener)
            raise
        if await self._still(listener):
            return made
        made.close()
        self._forget(listener)
        raise WrongProcessError(f"port {listener.port} was taken over by another process")

    async def _still(self, listener: Listener) -> bool:
        """Whether the server was still listening after a connection was made."""
        self._made += 1
        mine = self._made
        async with self._asking:
            if self._asked < mine and self._listener == listener:
                self._asked = self._made
                if not await asyncio.to_thread(listens, listener):
                    self._forget(listener)
        return self._listener == listener

    def _forget(self, listener: Listener) -> None:
        if self._listener == listener:
            self._listener = None


class _Body(httpx.AsyncByteStream):
    """The body of one response; a connection whose response was fully read becomes idle."""

    def __init__(self, connection: _Connection, idle: list[tuple[float, _Connection]]) -> None:
        self._connection, self._idle = connection, idle

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while data := await self._connection.body():
            yield data

    async def aclose(self) -> None:
        connection = self._connection
        if connection.usable:
            self._idle.append((time.monotonic(), connection))
        else:
            connection.close()


class _Connection(asyncio.Protocol):
    """One connection: one request at a time, the head of its response, then pieces of the body as they arrive."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._data = bytearray()
        self._over = False
        """Whether the peer will send nothing more."""
        self._waiter: asyncio.Future[None] | None = None
        self._left: int | None = 0
        """Remaining bytes of the chunk or body; None if the body ends with the connection."""
        self._chunked = self._ended = self._keep = False

    # -- asyncio.Protocol ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Buffer data for the reader."""
        self._data += data
        self._wake()

    def eof_received(self) -> bool:
        """Note that the peer sends nothing more."""
        self._over = True
        self._wake()
        return False

    def connection_lost(self, _error: Exception | None) -> None:
        """Note that the connection is gone."""
        self._over = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- for the transport -----------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it can take another request."""
        return self._ended and self._keep and not self._over and not self._data

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def send(self, head: bytes, content: bytes) -> None:
        """Send a request."""
        assert self._transport is not None
        self._ended = False
        self._transport.write(head + content)

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Status and headers of the response.

        Raises:
            httpx.RemoteProtocolError: it is invalid.
            httpx.ReadError: the connection ended before its end.
        """
        while True:
            while (end := self._data.find(b"\r\n\r\n")) < 0:
                if len(self._data) > LARGEST_HEAD:
                    raise httpx.RemoteProtocolError("the response header is too long")
                await self._more()
            lines = bytes(self._data[:end]).split(b"\r\n")
            del self._data[: end + 4]
            words = lines[0].split(None, 2)
            if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not (words[1].isdigit() and len(words[1]) == 3):
                raise httpx.RemoteProtocolError("the response is not HTTP/1.1")
            if (status := int(words[1])) >= 200:
                break
        headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(b":") for line in lines[1:])]
        known = {name.lower(): value.lower() for name, value in headers}
        self._keep = words[0] == b"HTTP/1.1" and known.get(b"connection") != b"close"
        self._chunked = known.get(b"transfer-encoding", b"").endswith(b"chunked")
        length = known.get(b"content-length", b"")
        if length and not (length.isdigit() and len(length) < 16):
            raise httpx.RemoteProtocolError("the response's content length is not a number")
        self._left = 0 if self._chunked or status in (204, 304) else int(length) if length else None
        self._ended = not self._chunked and self._left == 0
        return status, headers

    async def body(self) -> bytes:
        """The next available pieces of the body; empty at its end. Raises as `head`."""
        while not self._ended:
            found = self._chunks() if self._chunked else self._plain()
            if found or self._ended:
                return found
            if self._over and self._left is None:
                self._ended = True
                return b""
            await self._more()
        return b""

    def _plain(self) -> bytes:
        taken = bytes(self._data if self._left is None else self._data[: self._left])
        del self._data[: len(taken)]
        if self._left is not None:
            self._left -= len(taken)
            self._ended = self._left == 0
        return taken

    def _chunks(self) -> bytes:
        """The available chunk data, without chunk sizes. ``_left`` includes the line end after a chunk."""
        data, at, pieces = self._data, 0, []
        while not self._ended:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                self._left -= len(piece)
                pieces.append(piece[: len(piece) - max(0, 2 - self._left)])
                if self._left:
                    break
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > LARGEST_LINE:
                    raise httpx.RemoteProtocolError("the chunk size is too long")
                break
            size = _size(bytes(data[at:end]))
            if size:
                at, self._left = end + 2, size + 2
            elif data[end : end + 4] == b"\r\n\r\n":  # no trailers
                at, self._ended = end + 4, True
            elif len(data) - end > LARGEST_LINE:
                raise httpx.RemoteProtocolError("there is extra data after the response")
            else:
                break
        del data[:at]
        return b"".join(pieces)

    async def _more(self) -> None:
        """Wait for more data. Raises httpx.ReadError if the connection has ended."""
        if self._over:
            raise httpx.ReadError("the connection ended in the middle of a response")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 15 or digits.strip(b"0123456789abcdefABCDEF"):
        raise httpx.RemoteProtocolError("the chunk size is not a number")
    return int(digits, 16)


def _head(request: httpx.Request) -> bytes:
    """The request's head. Raises httpx.LocalProtocolError if a header contains a line end."""
    target = request.url.raw_path
    lines = [request.method.encode() + b" " + target + b" HTTP/1.1"]
    for name, value in request.headers.raw:
        if b"\r" in value or b"\n" in value or b"\0" in value:
            raise httpx.LocalProtocolError(f"the header {unquote(name.decode())} can't be sent", request=request)
        lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])

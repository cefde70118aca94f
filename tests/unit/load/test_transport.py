"""The small transport reads every response however the network splits it, and refuses non-HTTP."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.load.transport import LeanTransport, _Connection, connection_problem
from vllm_launchers.addresses import tls_to_own

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(pieces: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def read(parts: Sequence[bytes], *, end: bool = False) -> tuple[int, bytes, bool]:
    """Status, body, and whether the connection can be reused, for a response that arrives in these parts."""
    connection = _Connection()

    async def come() -> None:
        for part in parts:
            connection.data_received(part)
            await asyncio.sleep(0)
        if end:
            connection.eof_received()

    coming = asyncio.create_task(come())
    try:
        status, _ = await connection.head()
        body = b""
        while data := await connection.body():
            body += data
        return status, body, connection.usable
    finally:
        await coming


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=6), st.lists(st.integers(1, 30), min_size=1, max_size=8))
@settings(deadline=None, max_examples=150)
def test_chunks_do_not_depend_on_the_reads(pieces: list[bytes], cuts: list[int]) -> None:
    data, parts = HEAD + chunked(pieces), []
    while data:
        cut = cuts[len(parts) % len(cuts)]
        parts.append(data[:cut])
        data = data[cut:]
    assert asyncio.run(read(parts)) == (200, b"".join(pieces), True)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", (200, b"hello", True)),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", (404, b"", True)),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", (200, b"ok", True)),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", (200, b"ok", False)),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", (200, b"to the end", False)),
        (HEAD + b"2;name=value\r\nok\r\n0\r\n\r\n", (200, b"ok", True)),
    ],
)
async def test_all_response_formats_are_read(answer: bytes, found: tuple[int, bytes, bool]) -> None:
    assert await read([answer], end=not found[2]) == found


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        HEAD + b"5\r\nhel",
        HEAD + b"-5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"0x5\r\nhello\r\n0\r\n\r\n",
        HEAD + b"9" * 5000,
        HEAD + b"0\r\n" + b"x: y\r\n" * 5000,
        b"x" * 100_000,
        b"",
    ],
)
async def test_incomplete_response_is_refused(answer: bytes) -> None:
    async with asyncio.timeout(10):
        with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
            await read([answer], end=True)


async def test_connection_that_ends_early_is_not_called_invalid() -> None:
    with pytest.raises(httpx.ReadError):
        await read([HEAD + b"5\r\nhel"], end=True)


async def test_every_reason_for_no_connection_is_named(free_port: int) -> None:
    async def why(url: str) -> str:
        with pytest.raises(httpx.ConnectError) as raised:
            await LeanTransport(5, ssl.create_default_context()).handle_async_request(httpx.Request("GET", url))
        return connection_problem(raised.value)

    async def plain_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    assert await why(f"http://127.0.0.1:{free_port}/") == "connection refused"
    assert await why(f"http://localhost:{free_port}/") == "connection refused", "refused at each address of the name"
    assert (await why("http://no-such-host.invalid/")).startswith("no connection: ")
    async with await asyncio.start_server(plain_http, "127.0.0.1", free_port):
        tls = "no connection: the TLS handshake failed: check scheme (https) and port"
        assert await why(f"https://127.0.0.1:{free_port}/") == tls


async def test_a_connection_that_takes_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = LeanTransport(0.0, ssl.create_default_context())
    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", lambda *_, **_words: asyncio.Event().wait())
    with pytest.raises(httpx.ConnectTimeout) as raised:
        await transport.handle_async_request(httpx.Request("GET", "http://127.0.0.1:1/"))
    assert connection_problem(raised.value) == "no connection within 0s"


def test_other_failures_are_named() -> None:
    assert connection_problem(httpx.RemoteProtocolError("no head")) == "the response is not valid HTTP: no head"
    assert connection_problem(httpx.ReadError("reset")) == "the connection was lost"


async def test_header_with_a_line_break_is_not_sent(free_port: int) -> None:
    async def never(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(never, "127.0.0.1", free_port):
        request = httpx.Request("GET", f"http://127.0.0.1:{free_port}/", headers=[(b"a", b"b\r\nc: d")])
        with pytest.raises(httpx.LocalProtocolError):
            await LeanTransport(5, tls_to_own()).handle_async_request(request)


async def test_connection_is_reused_unless_the_server_closed_it(free_port: int) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", free_port):
        transport = LeanTransport(5, tls_to_own())
        async with httpx.AsyncClient(transport=transport, base_url=f"http://127.0.0.1:{free_port}") as client:
            for _ in range(2):
                assert (await client.get("/")).text == "ok"
            assert connections == 1
            async with asyncio.timeout(10):
                while transport._idle and transport._idle[0][1].usable:
                    await asyncio.sleep(0.01)
            assert (await client.get("/")).text == "ok"
            assert connections == 2

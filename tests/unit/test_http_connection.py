"""HTTP of the scraper: valid and invalid responses over one connection."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from vllm_launchers.http_connection import (
    CutOffError,
    HttpConnection,
    NoResponseError,
    NotHttpError,
    TooLargeError,
)

LIMIT = 1000


@pytest.fixture
def talk():
    """A connection to a peer that sends this and then closes, and the peer's end."""
    ends = []

    def send(far, answer):
        with contextlib.suppress(OSError):  # the connection was closed before everything was read
            far.sendall(answer)
            far.shutdown(socket.SHUT_WR)

    def begin(answer):
        near, far = socket.socketpair()
        ends.extend((near, far))
        threading.Thread(target=send, args=(far, answer), daemon=True).start()
        connection = HttpConnection("127.0.0.1", 8000, None, None)
        connection.sock = near
        connection.deadline = time.monotonic() + 10
        return connection, far

    yield begin
    for end in ends:
        end.close()


def test_request_bytes(talk):
    connection, far = talk(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    connection.get("/metrics", {"Accept": "text/plain"})
    assert far.recv(1000) == (
        b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept-Encoding: identity\r\nAccept: text/plain\r\n\r\n"
    )


@pytest.mark.parametrize("host", ["::1", "münchen.example"])
def test_host_header(talk, host):
    connection, far = talk(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    near, connection = connection.sock, HttpConnection(host, 80, None, None)
    connection.sock, connection.deadline = near, time.monotonic() + 10
    connection.get("/", {})
    assert {"::1": b"Host: [::1]\r\n"}.get(host, b"Host: xn--mnchen-3ya.example\r\n") in far.recv(1000)


@pytest.mark.parametrize(("host", "name"), [("münchen", b"xn--mnchen-3ya"), ("::1", b"[::1]")])
def test_host_header_with_a_port(talk, host, name):
    connection, far = talk(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    near, connection = connection.sock, HttpConnection(host, 8000, None, None)
    connection.sock, connection.deadline = near, time.monotonic() + 10
    connection.get("/", {})
    assert b"Host: " + name + b":8000\r\n" in far.recv(1000)


def test_header_injection_is_refused(talk):
    connection, _ = talk(b"")
    with pytest.raises(ValueError, match="line ends"):
        connection.get("/metrics", {"Authorization": "Bearer a\r\nX-Other: b"})


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\nCONTENT-length:5\n\nhello",
        b"HTTP/1.1 200\r\ncontent-length:  5 \r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nhe\r\n003;a=b\r\nllo\r\n0\r\nX-Trailer: 1\r\n\r\n",
    ],
)
def test_response_bodies(talk, answer):
    connection, _ = talk(answer)
    response = connection.get("/", {})
    assert (response.status, response.read(LIMIT)) == (200, b"hello")


def test_response_without_a_body(talk):
    connection, _ = talk(b"HTTP/1.1 204 No Content\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    assert connection.get("/", {}).read(LIMIT) == b""


@pytest.mark.parametrize(
    ("end", "open_"),
    [
        (b"Content-Length: 2\r\n\r\nok", True),
        (b"Content-Length: 2\r\nConnection: Close\r\n\r\nok", False),
        (b"\r\nok", False),
        (b"Content-Length: 2\r\n\r\nok and more", False),  # extra bytes belong to no request
    ],
)
def test_connection_stays_open_as_announced(talk, end, open_):
    connection, _ = talk(b"HTTP/1.1 200 OK\r\n" + end)
    assert connection.get("/", {}).read(LIMIT) == b"ok"
    assert (connection.sock is not None) == open_


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", NoResponseError),
        (b"HTTP/1.1 200 OK\r\nContent-Le", CutOffError),
        (b"SSH-2.0-OpenSSH_9.6\r\n", NotHttpError),
        (b"HTTP/1.1 two hundred\r\n\r\n", NotHttpError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, NotHttpError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", TooLargeError),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"a" * 1001, TooLargeError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3E9\r\n", TooLargeError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello", NotHttpError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello, more\r\n", NotHttpError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n", CutOffError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000, NotHttpError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000, NotHttpError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nhello", CutOffError),
    ],
    ids=range(14),
)
def test_unusable_response_is_an_error(talk, answer, error):
    connection, _ = talk(answer)
    with pytest.raises(error):
        connection.get("/", {}).read(LIMIT)

"""What a keeper's client makes of complete, cut-off and invalid responses."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from vllm_launchers.keeper.server_client import RequestTimeoutError, Response, ServerClient
from vllm_launchers.listeners import Owner

Ask = Callable[..., Response]
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Server:
    """A server in this process that sends the same bytes to each request, and then closes."""

    def __init__(self) -> None:
        self.answer: bytes | None = b""
        """None: it never answers."""
        self.asked: list[bytes] = []
        self.reached = threading.Event()
        self._over = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                self.asked.append(connection.recv(1 << 16))
                self.reached.set()
                if self.answer is None:
                    self._over.wait()
                else:
                    connection.sendall(self.answer)

    def client(self, key: str = "") -> ServerClient:
        owner = Owner.of(os.getpid())
        assert owner is not None
        return ServerClient(owner, "127.0.0.1", self.port, key)

    def close(self) -> None:
        self._over.set()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", 200, b"hello"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nhello", 503, b"hello"),
        (CHUNKED + b"2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n", 200, b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", 200, b"hello"),
        (CHUNKED + b"5\r\nhello\r\n", 200, b"hello"),
        (CHUNKED + b"9\r\nhello", 200, b"hello"),
        (CHUNKED + b"5\r\nhello\r\nx\r\n", 200, b"hello"),
    ],
    ids=["length", "to the end", "chunks", "cut off", "chunks cut off", "chunk cut off", "invalid chunk"],
)
def test_body_is_what_arrived_of_it(server: Server, answer: bytes, status: int, body: bytes) -> None:
    """A body that is cut off is not an error: callers judge the status, and what they find in the body."""
    server.answer = answer
    assert server.client().ask("GET", "/health") == Response(status, body)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "connection closed without a response"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not an HTTP response"),
        (b"HTTP/1.1 two hundred\r\n\r\n", "not an HTTP response"),
    ],
)
def test_response_without_a_status_is_an_error(server: Server, answer: bytes, message: str) -> None:
    server.answer = answer
    with pytest.raises(ConnectionError) as caught:
        server.client().ask("GET", "/health")
    assert str(caught.value) == message


@pytest.mark.parametrize(("body", "taken"), [(None, False), ({"a": 1}, True)])
def test_unanswered_request(server: Server, body: object, taken: bool) -> None:
    server.answer = None
    with pytest.raises(RequestTimeoutError, match=r"^/x: no response within 0\.[2-9]s$") as caught:
        server.client().ask("POST", "/x", body, seconds=0.2)
    assert caught.value.taken is taken


def test_cancel_ends_the_open_request(server: Server) -> None:
    server.answer = None
    client = server.client()
    canceler = threading.Thread(target=lambda: server.reached.wait() and client.cancel())
    canceler.start()
    with pytest.raises(ConnectionError, match="connection closed without a response"):
        client.ask("POST", "/sleep", seconds=60)
    canceler.join()
    with pytest.raises(ConnectionAbortedError):
        client.ask("GET", "/health")
    assert len(server.asked) <= 2


def test_request(server: Server) -> None:
    server.answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    client = server.client("sécret")
    client.ask("POST", "/v1/completions", {"a": 1}, engine=1)
    client.ask("POST", "/sleep")
    client.ask("GET", "/metrics")
    heads = [asked.partition(b"\r\n\r\n") for asked in server.asked]
    assert heads[0][2] == b'{"a": 1}'
    assert {
        b"Content-Type: application/json",
        b"Content-Length: 8",
        b"X-data-parallel-rank: 1",
        "Authorization: Bearer sécret".encode(),
        b"Host: 127.0.0.1:%d" % server.port,
        b"Connection: close",
    } <= set(heads[0][0].split(b"\r\n"))
    assert b"Content-Length: 0" in heads[1][0].split(b"\r\n")
    assert b"Authorization" not in heads[2][0]
    assert b"Content-Length" not in heads[2][0]


@pytest.mark.parametrize(("key", "sent"), [("\udcff", b"Authorization: Bearer \xff"), ("a\nX-Other: b", None)])
def test_odd_key(server: Server, key: str, sent: bytes | None) -> None:
    """A key is sent with the bytes that it has in the environment, and not at all if no header can carry it."""
    server.answer = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n"
    assert server.client(key).ask("GET", "/v1/models").status == 401
    lines = server.asked[0].split(b"\r\n")
    assert [line for line in lines if line.startswith((b"Authorization", b"X-Other"))] == ([sent] if sent else [])

"""An HTTP server whose every response is an attack: ``/KIND/anything`` returns an attack of ``KIND``."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import socket
import threading
import time
from collections.abc import Iterator

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"
PAGE = b"vllm:num_requests_running 3.0\n"
MODELS = b'{"data": [{"id": "m", "max_model_len": 4096}]}'
CHUNK = b"10000\r\n" + b"x" * 65536 + b"\r\n"
ENDLESS = b"x" * 65536

STUCK = {"continue", "drip", "silent"}
"""Kinds that only a deadline ends."""
KINDS = (
    *("headers", "header", "status", "continue", "redirect", "file", "bomb", "long", "short", "chunks", "extension"),
    *("trailers", "drip", "silent", "halves", "not-http"),
)
THEN = ("headers", "status", "redirect", "bomb", "chunks", "drip", "halves", "not-http")
"""Kinds of responses to completions that follow a valid response to ``/v1/models``."""


class HostileServer:
    """Listens on its own port; ``elsewhere`` is the redirect target, which counts connections."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._trap = socket.create_server(("127.0.0.1", 0))
        self.port, self.elsewhere = self._listener.getsockname()[1], self._trap.getsockname()[1]
        self.asked: list[str] = []
        self._bomb = gzip.compress(b"\0" * (256 << 20), 9)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        self._listener.close()

    def went_elsewhere(self) -> bool:
        """Whether a client followed a redirect."""
        self._trap.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._trap.accept()
            return True
        return False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, IndexError):
            path = connection.recv(65536).split(b" ")[1].decode()
            self.asked.append(path)
            kind = path.split("/")[1]
            models = kind.startswith("then-") and path.endswith("/v1/models")
            for piece in self._whole(MODELS) if models else self._answer(kind.removeprefix("then-")):
                if self._ended.is_set():
                    return
                connection.sendall(piece)

    @staticmethod
    def _whole(body: bytes) -> Iterator[bytes]:
        yield OK + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body

    def _answer(self, kind: str) -> Iterator[bytes]:
        once = {
            "redirect": f"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:{self.elsewhere}/metrics\r\n\r\n".encode(),
            "file": b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n",
            "bomb": OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(self._bomb) + self._bomb,
            "long": OK + b"Content-Length: 1%s\r\n\r\n" % (b"0" * 30) + PAGE,
            "short": OK + b"Content-Length: 7\r\n\r\n" + PAGE * 9,
            "halves": OK + b"Content-Length: 500\r\n\r\n" + PAGE,
            "not-http": b"\xff\x00SSH-2.0-x\r\n" * 9,
        }
        endless = {
            "headers": (b"HTTP/1.1 200 OK\r\n", b"".join(b"X-%d: y\r\n" % n for n in range(5000))),
            "header": (b"HTTP/1.1 200 OK\r\nX: ", ENDLESS),
            "status": (b"HTTP/1.1 200 ", ENDLESS),
            "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 500),
            "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n", CHUNK),
            "extension": (OK + b"Transfer-Encoding: chunked\r\n\r\n10;", ENDLESS),
            "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n" * 500),
        }
        if kind in once:
            yield once[kind]
        elif kind in endless:
            head, again = endless[kind]
            yield head
            yield from itertools.repeat(again)
        elif kind == "drip":
            for byte in OK + b"Content-Length: 30\r\n\r\n" + PAGE:
                yield bytes([byte])
                time.sleep(0.2)
        elif kind == "silent":
            self._ended.wait(60)

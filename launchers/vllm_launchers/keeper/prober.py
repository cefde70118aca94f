"""Asks a server's ``/health`` again and again, and posts what it hears.

One HTTP GET per probe, over TLS where the server speaks that, with a deadline for the whole of it, over a fresh
connection, loopback where the server binds to all addresses. Whether the answer really came from our server is the
owner's to find out.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
import time
from dataclasses import dataclass

from vllm_launchers.addresses import reachable, tls_to_own
from vllm_launchers.keeper.events import HelperFailed, Post, Probed

DEADLINE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to ask: the process started as number ``epoch``, and how often in seconds."""

    epoch: int
    host: str
    port: int
    interval: float
    tls: bool = False


class Prober(threading.Thread):
    """Probes its target until it is given another, or none. It keeps no state of its own."""

    def __init__(self, post: Post) -> None:
        super().__init__(name="prober", daemon=True)
        self._post = post
        self._change = threading.Condition()
        self._target: Target | None = None

    def aim(self, target: Target | None) -> None:
        """Probe this from now on; None rests. What a probe needs is loaded here, before anything on disk can change."""
        if target is not None and target.tls:
            with contextlib.suppress(ImportError):  # a Python without TLS: each probe says so
                importlib.import_module("ssl")
        with self._change:
            self._target = target
            self._change.notify()

    def run(self) -> None:
        """Probe for as long as the keeper lives."""
        while True:
            with self._change:
                while self._target is None:
                    self._change.wait()
                target = self._target
            try:
                problem = probe(target.host, target.port, tls=target.tls)
                self._post(Probed(target.epoch, healthy=not problem, detail=problem))
            except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and the probing goes on
                self._post(HelperFailed("prober", repr(error)))
            self._rest(target)

    def _rest(self, target: Target) -> None:
        with self._change:
            if self._target == target:
                self._change.wait(target.interval)


def probe(host: str, port: int, deadline_seconds: float = DEADLINE_SECONDS, *, tls: bool = False) -> str:
    """Ask once; returns what went wrong as a clause for people, empty on a 200."""
    ends = time.monotonic() + deadline_seconds
    try:
        with (
            _connected(reachable(host), port, deadline_seconds) as plain,
            _over_tls(plain) if tls else plain as connection,
        ):
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            answer = b""
            while b"\r\n" not in answer and len(answer) < 4096:
                left = ends - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                connection.settimeout(left)
                chunk = connection.recv(1024)
                if not chunk:
                    break
                answer += chunk
    except TimeoutError:
        return f"no answer within {deadline_seconds:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    except ImportError as error:
        return f"this Python cannot speak TLS ({error})"
    words = answer.split(b"\r\n", 1)[0].split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        return "an answer that is not HTTP"
    return "" if words[1] == b"200" else f"answer {words[1].decode('ascii', 'replace')}"


def _connected(host: str, port: int, seconds: float) -> socket.socket:
    """A connection. The name goes as bytes: as text Python would load a megabyte to see what it is in other scripts."""
    name = host.encode() if host.isascii() else host
    return socket.create_connection((name, port), timeout=seconds)  # type: ignore[arg-type]


def _over_tls(connection: socket.socket) -> socket.socket:
    """The connection with TLS on top, whatever certificate the other side shows."""
    return tls_to_own().wrap_socket(connection)

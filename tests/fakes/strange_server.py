"""A program detected as a vLLM server with unusual ``/metrics``: ``vllm serve MODEL --port N``.

It is linked as ``vllm`` and run by Python. MODEL selects the behavior: ``well``, ``hangs``, ``garbage``, ``huge`` (50
MB without a length), ``large`` (4 MB of metrics, about the limit of what is read), ``drips`` (one byte per second) and
``halfway`` (closes halfway). It prints a line per request. Standard library only.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

METRIC = 'vllm:num_requests_running{{engine="{0}",model_name="tiny"}} 3.0\n'
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"


def body() -> bytes:
    """Valid metrics."""
    return ("# TYPE vllm:num_requests_running gauge\n" + METRIC.format(0) * 20).encode()


def answer(kind: str) -> Iterator[bytes]:
    good = body()
    if kind == "hangs":
        time.sleep(3600)
    elif kind == "garbage":
        yield HEAD + b"Content-Length: 4000000\r\n\r\n" + os.urandom(4_000_000)
    elif kind == "huge":
        yield HEAD + b"Connection: close\r\n\r\n"
        for _ in range(50):
            yield b"x" * 1_000_000
    elif kind == "large":
        lines = "".join(METRIC.format(number) for number in range(60_000))
        yield HEAD + b"Content-Length: %d\r\n\r\n" % len(lines) + lines.encode()
    elif kind == "drips":
        for byte in HEAD + good:
            yield bytes([byte])
            time.sleep(1.0)
    else:
        whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(good) + good
        yield whole[: len(whole) // 2] if kind == "halfway" else whole


def serve(connection: socket.socket, kind: str) -> None:
    with connection:
        while b"\r\n\r\n" in connection.recv(65536):
            print("asked", flush=True)
            try:
                for piece in answer(kind):
                    connection.sendall(piece)
            except OSError:
                return
            if kind != "well":
                return


def main(words: list[str]) -> None:
    kind, port = words[2], int(words[words.index("--port") + 1])
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    print("listening", flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=serve, args=(connection, kind), daemon=True).start()


if __name__ == "__main__":
    main(sys.argv)

"""A server with scripted responses over a real connection that records requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest


def event(**body: Any) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def delta(**fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": None}])


END = event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]) + b"data: [DONE]\n\n"


@dataclass
class Script:
    """The server's response; None in ``pieces`` waits until the client disconnects."""

    pieces: list[bytes | None] = field(default_factory=list)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and message by path."""
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)
    url: str = ""


async def _answer(script: Script, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next((int(row.split(":")[1]) for row in head.splitlines() if row.lower().startswith("content-length")), 0)
    body = await reader.readexactly(length)
    path = head.split()[1]
    script.heads.append(head)
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" if path not in script.refusals else b"")
    if path == "/v1/models":
        writer.write(b'{"data": [{"id": "tiny", "max_model_len": 512}]}')
    elif path in script.refusals:
        script.requests.append((path, json.loads(body)))
        status, message = script.refusals[path]
        writer.write(f"HTTP/1.1 {status} No\r\nconnection: close\r\n\r\n".encode())
        writer.write(json.dumps({"error": {"message": message}}).encode())
    else:
        script.requests.append((path, json.loads(body)))
        for piece in script.pieces:
            if piece is None:
                await writer.drain()
                await reader.read()
                script.gone.set()
            else:
                writer.write(piece)
    writer.close()


@pytest.fixture
def script() -> Iterator[Script]:
    """A server in a thread; set its ``pieces`` before sending a request."""
    script, ready, loops = Script(), threading.Event(), []

    async def serve() -> None:
        server = await asyncio.start_server(lambda r, w: _answer(script, r, w), "127.0.0.1", 0)
        script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    yield script
    loop, stop = loops[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join()


@pytest.fixture
def said() -> Callable[..., bytes]:
    return delta


@pytest.fixture
def end() -> bytes:
    return END

"""A stub of vLLM's API in a thread, with configurable faults."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fakes import ports
from vllm_launchers.presets.model import Workload


@dataclass
class Stub:
    """Settings, and recorded requests."""

    token_seconds: float = 0.0
    models: Any = field(default_factory=lambda: {"data": [{"id": "tiny", "max_model_len": 512}]})
    status: int = 200
    error: Any = None
    cut_after: int | None = None
    abort: bool = False
    hang: bool = False
    needs_key: str | None = None
    tokens_per_event: int = 1
    usage: bool = True
    vocabulary: Any = None
    most_tokens: int = 1_000_000
    prompt_extra: int = 0
    refuse_every: int = 0
    hang_after: int | None = None
    gate: asyncio.Event | None = None
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    loop: asyncio.AbstractEventLoop | None = None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    def refused(self, request: Request) -> Response | None:
        if self.needs_key and request.headers.get("authorization") != f"Bearer {self.needs_key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return None

    async def list_models(self, request: Request) -> Response:
        return self.refused(request) or (
            Response(self.models) if isinstance(self.models, str) else JSONResponse(self.models)
        )

    async def complete(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        if (refusal := self.refused(request)) is not None:
            return refusal
        if self.refuse_every and len(self.bodies) % self.refuse_every == 0:
            return JSONResponse({"error": {"message": "refused"}}, 500)
        if self.status != 200:
            return JSONResponse({"error": {"message": self.error}}, self.status)
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            async for line in self.tokens(min(self.most_tokens, body["max_tokens"]), len(body["prompt"])):
                yield line
        finally:
            self.in_flight -= 1

    async def tokenize(self, request: Request) -> Response:
        self.tokenized.append(json.loads(await request.body()))
        if self.vocabulary is None:
            return JSONResponse({"detail": "Not Found"}, 404)
        return JSONResponse({"count": len(self.vocabulary), "max_model_len": 512, "tokens": self.vocabulary})

    def open_gate(self) -> None:
        assert self.gate is not None
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.gate.set)

    async def tokens(self, count: int, prompt: int) -> AsyncIterator[str]:
        if self.gate is not None:
            self.loop = asyncio.get_running_loop()
            await self.gate.wait()
        while self.hang:
            await asyncio.sleep(0.01)
        for start in range(0, count, self.tokens_per_event):
            await asyncio.sleep(self.token_seconds)
            while self.hang_after is not None and start >= self.hang_after:
                await asyncio.sleep(0.01)
            last = start + self.tokens_per_event >= count
            finish = ("abort" if self.abort else "length") if last else None
            choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": finish}
            if self.cut_after is not None and start >= self.cut_after:
                return
            yield f"data: {json.dumps({'id': 'cmpl-1', 'choices': [choice], 'usage': None})}\n\n"
        if self.usage:
            usage = {"prompt_tokens": prompt + self.prompt_extra, "completion_tokens": count}
            yield f"data: {json.dumps({'id': 'cmpl-1', 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    @contextmanager
    def listen(self, port: int = 0) -> Iterator[Stub]:
        app = Starlette(
            routes=[
                Route("/v1/models", self.list_models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
            ]
        )
        with socket.create_server(("127.0.0.1", port)) as listener:
            config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.should_exit = server.force_exit = True
                thread.join(10)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with Stub().listen() as server:
        yield server


@pytest.fixture
def new_stub() -> Callable[[], Stub]:
    """Makes stubs that do not listen yet."""
    return Stub


@pytest.fixture
def workload() -> Workload:
    """Short prompts and outputs; half of each prompt is shared."""
    return Workload(input_tokens_p95=64, output_tokens_p95=16, prefix_reuse=0.5, concurrency=4)


@pytest.fixture
def free_port() -> int:
    return ports.free_port()

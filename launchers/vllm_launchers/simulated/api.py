"""The HTTP API of a server: the routes that vLLM always has."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_launchers.simulated.engine import Engine, Engines, Stream
from vllm_launchers.simulated.log import Log
from vllm_launchers.simulated.metrics import Metrics
from vllm_launchers.simulated.protocol import ApiError, Ask, Chunks, bad_request, read_ask, usage_of, whole_answer
from vllm_launchers.simulated.settings import SIMULATED_VERSION
from vllm_launchers.simulated.words import tokenize

GUARDED = ("/v1", "/v2", "/inference")
"""Path prefixes that ``--api-key`` guards; all others stay open."""


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What the API takes from the flags."""

    names: tuple[str, ...]
    root: str
    max_model_len: int
    api_keys: tuple[str, ...] = ()
    usage_details: bool = False
    track_load: bool = False
    developing: bool = False
    """Whether ``/pause`` and ``/resume`` are there, as with ``VLLM_SERVER_DEV_MODE=1``."""
    log_requests: bool = False


class Api:
    """The handlers, and what they share."""

    def __init__(self, options: ApiOptions, engines: Engines, metrics: Metrics, log: Log) -> None:
        self._options = options
        self._engines = engines
        self._metrics = metrics
        self._log = log
        self._created = int(time.time())

    def application(self) -> ASGIApp:
        """The ASGI application with all routes, behind the API key if there is one."""
        routes = [
            Route("/health", self.health),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        if self._options.developing:
            routes += [Route("/pause", self.pause, methods=["POST"]), Route("/resume", self.resume, methods=["POST"])]
        app = Starlette(routes=routes, exception_handlers={ApiError: _refuse})
        return _Guard(app, self._options.api_keys) if self._options.api_keys else app

    async def health(self, _request: HttpRequest) -> Response:
        """Answer 200 with nothing."""
        return Response()

    async def pause(self, request: HttpRequest) -> Response:
        """Stop the engines: requests end (``mode=abort``) or stay as they are (``keep``), and new ones wait."""
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "keep"):
            raise bad_request("mode must be abort or keep here.", "mode")
        if mode == "abort":
            self._engines.abort_all()
        for engine in self._engines.ranks:
            engine.pause()
        return JSONResponse({"status": "paused"})

    async def resume(self, _request: HttpRequest) -> Response:
        """Let the engines go on."""
        for engine in self._engines.ranks:
            engine.resume()
        return JSONResponse({"status": "resumed"})

    async def version(self, _request: HttpRequest) -> Response:
        """Tell the version, marked as simulated."""
        return JSONResponse({"version": SIMULATED_VERSION})

    async def load(self, _request: HttpRequest) -> Response:
        """Tell requests in flight; always 0 without ``--enable-server-load-tracking``, as in vLLM."""
        return JSONResponse({"server_load": self._engines.in_flight if self._options.track_load else 0})

    async def metrics(self, _request: HttpRequest) -> Response:
        """Show all metrics."""
        return Response(self._metrics.render(), media_type="text/plain; version=1.0.0; charset=utf-8")

    async def tokenize(self, request: HttpRequest) -> Response:
        """Count a prompt's tokens."""
        body = await _json(request)
        prompt = body.get("prompt") if isinstance(body, dict) else None
        if not isinstance(prompt, str):
            raise bad_request("prompt must be a text.", "prompt")
        tokens = tokenize(prompt)
        length = self._options.max_model_len
        return JSONResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": None})

    async def models(self, _request: HttpRequest) -> Response:
        """List the served names."""
        cards = [self._card(name) for name in self._options.names]
        return JSONResponse({"object": "list", "data": cards})

    async def completions(self, request: HttpRequest) -> Response:
        """Complete a prompt."""
        return await self._answer(request, chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        """Answer a conversation."""
        return await self._answer(request, chat=True)

    async def _answer(self, http: HttpRequest, *, chat: bool) -> Response:
        options = self._options
        ask = read_ask(await _json(http), chat=chat, names=options.names, max_model_len=options.max_model_len)
        if self._engines.closing:
            raise ApiError(503, "ServiceUnavailableError", "The server is shutting down.")
        engine, stream = self._engines.submit(ask.request())
        request = stream.request
        if options.log_requests:
            self._log.api("logger.py:76", f"Received request {request.id}: max_tokens={ask.max_tokens}.")
        if ask.stream:
            return EventStream(ask, engine, stream, details=options.usage_details)
        if not await _wait(http, stream):
            engine.abort(stream)
            return Response(status_code=499)
        return JSONResponse(whole_answer(ask, request, details=options.usage_details))

    def _card(self, name: str) -> dict[str, object]:
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": self._options.root,
            "parent": None,
            "max_model_len": self._options.max_model_len,
            "permission": [permission],
        }


class EventStream(Response):
    """Server-sent events of one request, sent as its tokens come; a client that leaves ends the request."""

    media_type = "text/event-stream"

    def __init__(self, ask: Ask, engine: Engine, stream: Stream, *, details: bool) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers({"content-type": "text/event-stream; charset=utf-8"})
        del self.raw_headers[1:]  # no content-length: the stream's end is not known
        self._ask = ask
        self._engine = engine
        self._stream = stream
        self._details = details

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI calls it so
        """Send the stream."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            await self._send(send)
        finally:
            watch.cancel()
            self._engine.abort(self._stream)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.abort(self._stream)

    async def _send(self, send: Send) -> None:
        ask, stream = self._ask, self._stream
        chunks = Chunks(ask, stream.request)
        held = chunks.role() if ask.chat else b""
        reason = None
        while reason is None:
            start, end, reason = await stream.read()
            usage = self._usage() if ask.continuous_usage else ""
            held += chunks.tokens(start, end, reason, usage)
            if reason is not None:
                held += (chunks.usage(self._usage()) if ask.include_usage else b"") + b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": held, "more_body": reason is None})
            held = b""

    def _usage(self) -> str:
        return json.dumps(usage_of(self._stream.request, details=self._details))


class _Guard:
    """Asks for ``Authorization: Bearer KEY`` on guarded paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith(GUARDED)
        if guarded and not self._allowed(scope):
            await JSONResponse({"error": "Unauthorized"}, status_code=401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _space, key = given.partition(b" ")
        digest = hashlib.sha256(key).digest()
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


async def _refuse(_request: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, ApiError):
        raise error
    return JSONResponse(error.body, status_code=error.status)


async def _json(request: HttpRequest) -> object:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise bad_request(f"The body is not JSON: {error}") from None


async def _wait(http: HttpRequest, stream: Stream) -> bool:
    """Wait for a request's end; False when its client left first."""
    watch = asyncio.ensure_future(_disconnected(http))
    end = asyncio.ensure_future(_finished(stream))
    try:
        await asyncio.wait((watch, end), return_when=asyncio.FIRST_COMPLETED)
        return end.done()
    finally:
        watch.cancel()
        end.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _finished(stream: Stream) -> None:
    while (await stream.read())[2] is None:
        pass

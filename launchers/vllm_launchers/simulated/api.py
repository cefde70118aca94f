"""The HTTP API of a server: the routes of ``vllm serve`` 0.32 for a text generation model."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from prometheus_client import make_asgi_app
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_launchers.simulated.adapters import RuntimeAdapters
from vllm_launchers.simulated.completions import DONE, AnswerWriter, Style, error_event
from vllm_launchers.simulated.engine import Engines, SimulatedEngine, Stream
from vllm_launchers.simulated.messages import (
    COUNTED_FIELDS,
    MESSAGES_FIELDS,
    AnthropicError,
    MessageWriter,
    as_chat,
    count_tokens,
    late_error,
    read_messages,
)
from vllm_launchers.simulated.metrics import Metrics
from vllm_launchers.simulated.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    GeneratedAnswer,
    GenerationRequest,
    ServedModel,
    chat_text,
    check_continued,
    check_model,
    read_chat,
    read_completion,
)
from vllm_launchers.simulated.responses import RESPONSES_FIELDS, ResponseWriter, not_found, read_response
from vllm_launchers.simulated.settings import REPORTED_VERSION
from vllm_launchers.simulated.sleep import GARBAGE, SleepMode, WorkerError
from vllm_launchers.simulated.startup import Log
from vllm_launchers.simulated.validation import (
    INT64_MAX,
    ApiError,
    Errors,
    Field,
    bad_request,
    body_missing,
    body_not_json,
    boolean,
    integer,
    listing,
    not_modeled,
    optional,
    read_body,
    record,
    string,
)

GUARDED = ("/v1", "/v2", "/inference")
"""Path prefixes that require ``--api-key``; all others are open."""

Handler = Callable[[HttpRequest], Awaitable[Response]]


class ApiOptions(msgspec.Struct, frozen=True):
    """API settings from the flags."""

    served: ServedModel
    root: str
    style: Style
    api_keys: tuple[str, ...] = ()
    track_load: bool = False
    developing: bool = False
    """Whether the routes for sleep, pause and reset exist, as with ``VLLM_SERVER_DEV_MODE=1``."""
    log_requests: bool = False
    updates_adapters: bool = False
    """Whether the routes to load and unload LoRA adapters exist, as with ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``."""


@dataclass(slots=True)
class Running:
    """A request's sequences on their engines."""

    parts: list[tuple[GeneratedAnswer, SimulatedEngine, Stream]]
    news: asyncio.Event

    @classmethod
    def start(cls, engines: Engines, outputs: Sequence[GeneratedAnswer]) -> Running:
        """Queue all sequences. Raises ValueError if one can never run; then none runs."""
        running = cls([], asyncio.Event())
        try:
            for output in outputs:
                running.parts.append((output, *engines.submit(output.request, running.news)))
        except ValueError:
            running.abort()
            raise
        return running

    @property
    def ended(self) -> bool:
        """Whether all sequences have ended."""
        return all(output.request.finished is not None for output, _engine, _stream in self.parts)

    @property
    def outputs(self) -> list[GeneratedAnswer]:
        """The sequences' answers."""
        return [output for output, _engine, _stream in self.parts]

    async def read(self, sent: set[int]) -> list[tuple[GeneratedAnswer, int, int]]:
        """Wait for news; returns each sequence with new tokens and their range. Adds ended ones to ``sent``."""
        while True:
            self.news.clear()
            found = []
            for output, _engine, stream in self.parts:
                start, end = stream.take()
                ended = output.request.finished is not None and output.index not in sent
                if end > start or ended:
                    found.append((output, start, end))
                if ended:
                    sent.add(output.index)
            if found:
                return found
            await self.news.wait()

    async def finish(self) -> None:
        """Wait until all sequences have ended."""
        while not self.ended:
            self.news.clear()
            await self.news.wait()

    def abort(self) -> None:
        """Abort unfinished sequences and free their blocks."""
        for _output, engine, stream in self.parts:
            engine.abort(stream)


class Api:
    """The handlers and their shared state."""

    def __init__(
        self,
        options: ApiOptions,
        engines: Engines,
        metrics: Metrics,
        log: Log,
        sleep: SleepMode,
        adapters: RuntimeAdapters,
    ) -> None:
        self._options = options
        self._adapters = adapters
        self._using: list[tuple[str, Running]] = []
        self._sleep = sleep
        self._served = options.served
        self._engines = engines
        self._metrics = metrics
        self._log = log
        self._load = 0

    def application(self) -> ASGIApp:
        """The ASGI application with all routes, behind the API key if there is one."""
        documented: list[tuple[str, str, Handler, Mapping[str, Field] | None]] = [
            ("GET", "/load", self.load, None),
            ("GET", "/version", self.version, None),
            ("GET", "/health", self.health, None),
            ("GET", "/metrics", self.metrics, None),
            ("POST", "/tokenize", self.tokenize, _TOKENIZE),
            ("POST", "/detokenize", self.detokenize, _DETOKENIZE),
            ("GET", "/v1/models", self.models, None),
            ("GET", "/ping", self.health, None),
            ("POST", "/ping", self.health, None),
            ("POST", "/invocations", self.invocations, None),
            ("POST", "/v1/chat/completions", self.chat, CHAT_FIELDS),
            ("POST", "/v1/chat/completions/batch", _batches, None),
            ("POST", "/v1/responses", self.responses, RESPONSES_FIELDS),
            ("GET", "/v1/responses/{response_id}", self.stored_response, None),
            ("POST", "/v1/responses/{response_id}/cancel", self.stored_response, None),
            ("POST", "/v1/completions", self.completions, COMPLETION_FIELDS),
            ("POST", "/v1/messages", self.messages, MESSAGES_FIELDS),
            ("POST", "/v1/messages/count_tokens", self.count_tokens, COUNTED_FIELDS),
        ]
        document = openapi_document([(method, path, fields) for method, path, _handler, fields in documented])
        routes: list[BaseRoute] = [_route(method, path, handler) for method, path, handler, _fields in documented]
        routes += [
            _route("POST", "/v1/completions/render", _scale_out),
            _route("POST", "/v1/chat/completions/render", _scale_out),
            _route("POST", "/inference/v1/generate", _scale_out),
            _route("GET", "/openapi.json", _fixed(lambda: JSONResponse(document))),
            _route("GET", "/docs", _fixed(lambda: HTMLResponse(SWAGGER))),
            _route("GET", "/docs/oauth2-redirect", _fixed(lambda: HTMLResponse(OAUTH2))),
            _route("GET", "/redoc", _fixed(lambda: HTMLResponse(REDOC))),
            Mount("/metrics/", make_asgi_app(self._metrics.registry)),
        ]
        if self._options.developing:
            routes += [
                _route("POST", "/pause", self.pause),
                _route("POST", "/resume", self.resume),
                _route("POST", "/sleep", self.sleep),
                _route("POST", "/wake_up", self.wake_up),
                _route("GET", "/is_sleeping", self.is_sleeping),
                _route("POST", "/collective_rpc", self.collective_rpc),
                _route("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            ]
        if self._options.updates_adapters:
            routes += [
                _route("POST", "/v1/load_lora_adapter", self.load_adapter),
                _route("POST", "/v1/unload_lora_adapter", self.unload_adapter),
            ]
        known = frozenset(route.path for route in routes if isinstance(route, Route))
        app = Starlette(
            routes=routes,
            exception_handlers={
                ApiError: _refuse,
                AnthropicError: _refuse,
                HTTPException: _http_error,
                ValueError: _value_error,
            },
            middleware=[Middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"])],
        )
        counted = _Counted(app, self._metrics, known)
        return _Guard(counted, self._options.api_keys) if self._options.api_keys else counted

    async def health(self, _request: HttpRequest) -> Response:
        """Respond with an empty 200."""
        return Response()

    async def load_adapter(self, request: HttpRequest) -> Response:
        """Load a LoRA adapter."""
        return Response(self._adapters.load(await _json(request)))

    async def unload_adapter(self, request: HttpRequest) -> Response:
        """Unload a LoRA adapter; its running requests continue."""
        return Response(self._adapters.unload(await _json(request)))

    async def pause(self, request: HttpRequest) -> Response:
        """Pause the engines: running requests end (``mode=abort``) or freeze (``keep``), and new ones wait."""
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "keep"):
            raise bad_request("mode must be abort or keep here.", "mode")
        if mode == "abort":
            self._engines.abort_all()
        for engine in self._engines.ranks:
            engine.pause()
        return JSONResponse({"status": "paused"})

    async def resume(self, _request: HttpRequest) -> Response:
        """Resume the engines."""
        for engine in self._engines.ranks:
            engine.resume()
        return JSONResponse({"status": "resumed"})

    async def sleep(self, request: HttpRequest) -> Response:
        """Put the engines to sleep; running requests end (``mode=abort``, the only mode here)."""
        level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
        if level not in ("0", "1", "2"):
            raise bad_request("Input should be 0, 1 or 2", "level")
        if mode != "abort":
            raise bad_request("mode must be abort here.", "mode")
        try:
            await self._sleep.sleep(int(level))
        except WorkerError as error:
            raise ApiError(500, "InternalServerError", str(error)) from error
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: HttpRequest) -> Response:
        """Wake the engines up, completely or the parts named by ``tags``."""
        tags = request.query_params.getlist("tags")
        awake = await self._sleep.wake(tags)
        return JSONResponse({"status": "awake" if awake else "sleeping", "tags": tags or None})

    async def is_sleeping(self, _request: HttpRequest) -> Response:
        """Report whether the engines sleep."""
        return JSONResponse({"is_sleeping": self._sleep.sleeping})

    async def collective_rpc(self, request: HttpRequest) -> Response:
        """Call a method of the workers; only ``reload_weights`` here."""
        body = await _json(request)
        method = body.get("method") if isinstance(body, dict) else None
        if method != "reload_weights":
            raise bad_request(f"The simulated workers have no method {method!r}.", "method")
        try:
            await self._sleep.reload_weights()
        except WorkerError as error:
            raise ApiError(500, "InternalServerError", str(error)) from error
        return JSONResponse({"results": [None]})

    async def reset_prefix_cache(self, _request: HttpRequest) -> Response:
        """Empty the prefix cache."""
        return JSONResponse({"success": self._sleep.forget_prefixes()})

    async def version(self, _request: HttpRequest) -> Response:
        """Report the version, marked as simulated."""
        return JSONResponse({"version": REPORTED_VERSION})

    async def load(self, _request: HttpRequest) -> Response:
        """Report requests in flight; always 0 without ``--enable-server-load-tracking``, as in vLLM."""
        return JSONResponse({"server_load": self._load if self._options.track_load else 0})

    async def metrics(self, _request: HttpRequest) -> Response:
        """Report all metrics."""
        self._note_adapters()
        return Response(self._metrics.render(), media_type="text/plain; version=1.0.0; charset=utf-8")

    async def tokenize(self, request: HttpRequest) -> Response:
        """Convert text or a conversation to tokens."""
        body = await _json(request)
        errors = Errors()
        fields: dict[str, Any] = {}
        for schema in (_TOKENIZE, _TOKENIZE_CHAT):
            tried = Errors()
            fields = record(schema)(body, ("body",), tried)
            if not tried.found:
                break
            errors.found += tried.found
            if isinstance(body, dict):
                check_continued(body)
        else:
            errors.refuse()
        check_model(fields, self._served)
        text = fields["prompt"] if "prompt" in fields else chat_text(fields["messages"], fields, self._served)
        vocabulary = self._served.vocabulary
        tokens = vocabulary.encode(text)
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self._served.max_model_len,
                "tokens": tokens,
                "token_strs": [vocabulary.decode(token) for token in tokens] if fields["return_token_strs"] else None,
            }
        )

    async def detokenize(self, request: HttpRequest) -> Response:
        """Convert tokens to text."""
        fields = read_body(await _json(request), _DETOKENIZE)
        check_model(fields, self._served)
        return JSONResponse({"prompt": self._served.vocabulary.text(fields["tokens"])})

    async def models(self, _request: HttpRequest) -> Response:
        """List the served names."""
        cards = [self._card(name) for name in self._served.names]
        for name, path in self._served.adapters.items():
            parent = {"root": path, "parent": self._served.names[0], "max_model_len": None}
            cards.append({**self._card(name), **parent})
        return JSONResponse({"object": "list", "data": cards})

    async def completions(self, request: HttpRequest) -> Response:
        """Complete prompts."""
        return await self._complete(request, await _json(request))

    async def chat(self, request: HttpRequest) -> Response:
        """Answer a conversation."""
        return await self._converse(request, await _json(request))

    async def invocations(self, request: HttpRequest) -> Response:
        """SageMaker's single endpoint for all kinds of requests."""
        body = await _json(request)
        chat = isinstance(body, dict) and "messages" in body
        return await (self._converse if chat else self._complete)(request, body)

    async def responses(self, request: HttpRequest) -> Response:
        """Answer in the format of OpenAI's Responses API."""
        ask = read_response(await _json(request), self._served)
        running = self._start(ask)
        return await self._respond(request, ask, running, ResponseWriter(ask, running.outputs[0]))

    async def messages(self, request: HttpRequest) -> Response:
        """Answer in the format of Anthropic's Messages API."""
        fields = read_messages(await _json(request))
        try:
            ask = as_chat(fields, self._served, request.headers.get("x-request-id"))
            if ask.late is not None:
                return StreamingResponse(iter([late_error(ask.late)]), headers=STREAM_HEADERS)
            running = self._start(ask)
        except ApiError as error:
            raise AnthropicError(error) from error
        writer = MessageWriter(ask, running.outputs[0], self._options.style)
        return await self._respond(request, ask, running, writer)

    async def count_tokens(self, request: HttpRequest) -> Response:
        """Count the tokens of a conversation in Anthropic's format."""
        return JSONResponse(count_tokens(await _json(request), self._served))

    async def stored_response(self, request: HttpRequest) -> Response:
        """Respond that there is no such response, because none is ever stored."""
        raise not_found(request.path_params["response_id"])

    async def _complete(self, http: HttpRequest, body: Any) -> Response:
        return await self._answer(http, read_completion(body, self._served, http.headers.get("x-request-id")))

    async def _converse(self, http: HttpRequest, body: Any) -> Response:
        return await self._answer(http, read_chat(body, self._served, http.headers.get("x-request-id")))

    async def _answer(self, http: HttpRequest, ask: GenerationRequest) -> Response:
        if ask.late is not None:
            return StreamingResponse(iter([error_event(ask.late), DONE]), headers=STREAM_HEADERS)
        running = self._start(ask)
        return await self._respond(http, ask, running, AnswerWriter(ask, running.outputs, self._options.style))

    async def _respond(
        self, http: HttpRequest, ask: GenerationRequest, running: Running, writer: ResponseBodyWriter
    ) -> Response:
        """A stream, or the complete answer once it has ended."""
        if ask.stream:
            return EventStream(self, running, writer)
        if not await self._finished(http, running):
            return JSONResponse(None)  # like vLLM, which counts a client that left as 2xx
        return JSONResponse(writer.whole())

    def _start(self, ask: GenerationRequest) -> Running:
        if self._engines.closing:
            raise ApiError(503, "ServiceUnavailableError", "The server is shutting down.")
        sequences = ask.sequences()
        if self._sleep.garbage:
            for one in sequences:
                one.request.seed ^= GARBAGE
        running = Running.start(self._engines, sequences)
        if ask.model in self._served.adapters:
            self._using.append((ask.model, running))
            self._note_adapters()
        if self._options.log_requests:
            self._log.api("logger.py:76", f"Received request {ask.id}: max_tokens={ask.max_tokens}.")
        return running

    def _note_adapters(self) -> None:
        self._using = [(name, running) for name, running in self._using if not running.ended]
        self._adapters.note(name for name, _running in self._using)

    async def _finished(self, http: HttpRequest, running: Running) -> bool:
        """Wait for a request's end; False if its client disconnects first, which ends the request."""
        watch = asyncio.ensure_future(_disconnected(http.receive))
        end = asyncio.ensure_future(running.finish())
        with self.counted():
            try:
                await asyncio.wait((watch, end), return_when=asyncio.FIRST_COMPLETED)
                return end.done()
            finally:
                watch.cancel()
                end.cancel()
                running.abort()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request as in flight."""
        self._load += 1
        try:
            yield
        finally:
            self._load -= 1

    def _card(self, name: str) -> dict[str, object]:
        created = int(time.time())  # of the answer, as in vLLM
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": created,
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
            "created": created,
            "owned_by": "vllm",
            "root": self._options.root,
            "parent": None,
            "max_model_len": self._served.max_model_len,
            "permission": [permission],
        }


class ResponseBodyWriter(Protocol):
    """Writes the answer to one request, complete or as events."""

    def whole(self) -> dict[str, Any]:
        """The complete answer."""

    def begin(self) -> bytes:
        """The data before the first tokens."""

    def tokens(self, output: GeneratedAnswer, start: int, end: int) -> bytes:
        """The event for some tokens."""

    def end(self) -> bytes:
        """The data after the last tokens."""


STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8"}


class EventStream(Response):
    """Server-sent events of one request, sent as its tokens arrive; a disconnect ends all of its sequences."""

    media_type = "text/event-stream"

    def __init__(self, api: Api, running: Running, writer: ResponseBodyWriter) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.init_headers(STREAM_HEADERS)
        # No content-length, because the stream's length is unknown.
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._api = api
        self._running = running
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI calls it so
        """Send the stream."""
        watch = asyncio.ensure_future(self._watch(receive))
        try:
            with self._api.counted():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send(send)
        finally:
            watch.cancel()
            self._running.abort()

    async def _watch(self, receive: Receive) -> None:
        await _disconnected(receive)
        self._running.abort()

    async def _send(self, send: Send) -> None:
        running, writer = self._running, self._writer
        sent: set[int] = set()
        written = b""
        begun = False
        while len(sent) < len(running.parts):
            news = await running.read(sent)
            if not begun:
                begun, written = True, writer.begin()
            written += b"".join(writer.tokens(*part) for part in news)
            if len(sent) == len(running.parts):
                written += writer.end()
            await send({"type": "http.response.body", "body": written, "more_body": len(sent) < len(running.parts)})
            written = b""


_UNCOUNTED = ("/metrics", "/health", "/load", "/ping", "/version", "/server_info")


class _Counted:
    """Counts responses by route and status like vLLM's instrumentation: inside the guard, without health probes etc."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_UNCOUNTED):
            await self._app(scope, receive, send)
            return
        status = 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            self._metrics.answered(scope["path"] if scope["path"] in self._routes else "none", scope["method"], status)


class _Guard:
    """Requires ``Authorization: Bearer KEY`` on guarded paths."""

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


_TOKENIZE = {
    "model": Field(optional(string)),
    "prompt": Field(string, required=True),
    "add_special_tokens": Field(boolean, True),
    "return_token_strs": Field(optional(boolean), False),
}
_TOKENIZE_CHAT = {
    "model": Field(optional(string)),
    "messages": CHAT_FIELDS["messages"],
    "add_generation_prompt": Field(boolean, True),
    "return_token_strs": Field(optional(boolean), False),
    "continue_final_message": Field(boolean, False),
}
_DETOKENIZE = {
    "model": Field(optional(string)),
    "tokens": Field(listing(integer(0, INT64_MAX)), required=True),
}


def _route(method: str, path: str, handler: Handler) -> Route:
    """A route for exactly one method: FastAPI's ``GET``, unlike Starlette's, does not include ``HEAD``."""
    route = Route(path, handler, methods=[method])
    route.methods = {method}
    return route


def _fixed(response: Callable[[], Response]) -> Handler:
    async def answer(_request: HttpRequest) -> Response:
        return response()

    return answer


async def _batches(_request: HttpRequest) -> Response:
    raise not_modeled("batches of conversations")


async def _scale_out(_request: HttpRequest) -> Response:
    raise ApiError(
        403,
        "PermissionDeniedError",
        "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
    )


async def _refuse(_request: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, ApiError | AnthropicError):
        raise error
    return JSONResponse(error.body, status_code=error.status)


async def _http_error(_request: HttpRequest, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)


async def _value_error(_request: HttpRequest, error: Exception) -> Response:
    return JSONResponse(bad_request(str(error)).body, status_code=400)


async def _json(request: HttpRequest) -> object:
    """The body, which must be JSON and declared as such."""
    content = await request.body()
    kind = request.headers.get("content-type", "").lower().partition(";")[0].strip()
    if kind != "application/json":
        raise ApiError(
            400,
            "Bad Request",
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
        )
    if not content:
        raise body_missing()
    try:
        body = json.loads(content)
    except json.JSONDecodeError as error:
        raise body_not_json(error.pos, error.msg) from None
    except (ValueError, RecursionError):
        raise ApiError(400, "Bad Request", "There was an error parsing the body") from None
    if body is None:
        raise body_missing()
    return body


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# -- the API's description --------------------------------------------------------------------------------------------


Operation = tuple[str, str, Mapping[str, Field] | None]
"""Method, path, and the body's fields if it takes one."""


def openapi_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI document. Bodies list only the names of their fields and which ones are required."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for method, path, fields in operations:
        name = "".join(part.capitalize() for part in path.strip("/").replace("{", "").replace("}", "").split("/"))
        operation: dict[str, Any] = {
            "operationId": f"{name}_{method.lower()}",
            "responses": {
                "200": {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
            },
        }
        if "{" in path:
            key = path.partition("{")[2].partition("}")[0]
            operation["parameters"] = [{"name": key, "in": "path", "required": True, "schema": {"type": "string"}}]
        if fields is not None:
            schemas[f"{name}Request"] = {
                "type": "object",
                "properties": {field: {"title": field} for field in fields},
                "required": [field for field, entry in fields.items() if entry.required],
            }
            content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}Request"}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "FastAPI", "version": "0.1.0"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


_PAGE = "<!DOCTYPE html>\n<html>\n<head>\n<title>{title}</title>\n{head}</head>\n<body>\n{body}\n</body>\n</html>\n"
_CDN = "https://cdn.jsdelivr.net/npm"

SWAGGER = _PAGE.format(
    title="Simulated vLLM - Swagger UI",
    head=f'<link rel="stylesheet" href="{_CDN}/swagger-ui-dist@5/swagger-ui.css">\n',
    body='<div id="swagger-ui"></div>\n'
    f'<script src="{_CDN}/swagger-ui-dist@5/swagger-ui-bundle.js"></script>\n'
    "<script>SwaggerUIBundle({url: '/openapi.json', dom_id: '#swagger-ui'})</script>",
)
"""The page at ``/docs``; like vLLM's, it loads an external script."""
REDOC = _PAGE.format(
    title="Simulated vLLM - ReDoc",
    head="",
    body='<redoc spec-url="/openapi.json"></redoc>\n'
    f'<script src="{_CDN}/redoc@2/bundles/redoc.standalone.js"></script>',
)
OAUTH2 = _PAGE.format(title="OAuth2 redirect", head="", body="<script>window.close()</script>")

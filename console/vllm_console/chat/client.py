"""Requests an answer from a server and reads its stream. Canceling the call closes the stream, so vLLM aborts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx
import msgspec

from vllm_console.chat.answer import Answer, AnswerReader
from vllm_console.chat.conversation import NO_TEMPLATE, ChatOptions, ChatRequest, Turn, raw_note, request_for
from vllm_console.load.client import (
    LARGEST_ERROR,
    ApiAccess,
    LoadError,
    LoadTarget,
    Lookup,
    find_served_model,
    key_wanted,
    open_client,
    read_body,
)
from vllm_console.load.events import AnswerError, message_of
from vllm_console.load.transport import connection_problem
from vllm_console.text import plain
from vllm_launchers.secrets import redact

STREAMING = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


class ChatServer(msgspec.Struct, frozen=True):
    """A server to chat with. ``lookup`` finds where its own process listens: nothing is sent anywhere else."""

    name: str
    url: str
    access: ApiAccess = ApiAccess()
    lookup: Lookup | None = None
    model: str | None = None
    """The served model to use; None means the first one."""


class _NoTemplateError(Exception):
    """The server refused a chat because its model has no chat template."""


class ChatClient:
    """Requests answers from one server, one at a time. Remembers which models have no chat template."""

    def __init__(self, server: ChatServer) -> None:
        self.server = server
        self.target: LoadTarget | None = None
        """The served model, once the server has been asked."""
        self._raw_models: set[str] = set()

    async def ask(
        self, turns: Sequence[Turn], prompt: str, options: ChatOptions, changed: Callable[[AnswerReader], object]
    ) -> Answer:
        """Get the answer to ``prompt`` after these turns; ``changed`` is called with the reader whenever a part
        arrives.

        Errors are reported as the answer's ``problem``, one sentence; what was received stays.
        """
        reader = AnswerReader(time.perf_counter())
        try:
            async with open_client(self.server.url, self.server.access, self.server.lookup) as client:
                self.target = await find_served_model(client, self.server.model, self.server.access)
                model = self.target.model
                for raw in (True,) if options.raw or model in self._raw_models else (False, True):
                    note = raw_note(options, asked=options.raw) if raw else ""
                    context = self.target.max_model_len
                    request = request_for(model, turns, prompt, options, raw=raw, context=context)
                    reader = AnswerReader(time.perf_counter(), raw=raw, note=note)
                    changed(reader)
                    try:
                        await self._stream(client, request, reader, changed)
                    except _NoTemplateError:
                        self._raw_models.add(model)
                        continue
                    break
        except (LoadError, AnswerError) as error:
            return reader.answer(problem=self._sentence(str(error)))
        except httpx.HTTPError as error:
            return reader.answer(problem=self._sentence(connection_problem(error)))
        return reader.answer()

    def _sentence(self, problem: str) -> str:
        return plain(redact(f"{self.server.name}: {problem}", [self.server.access.key]), 500)

    async def _stream(
        self,
        client: httpx.AsyncClient,
        request: ChatRequest,
        reader: AnswerReader,
        changed: Callable[[AnswerReader], object],
    ) -> None:
        content = msgspec.json.encode(request.body | STREAMING)
        async with client.stream("POST", request.path, content=content) as response:
            if response.status_code != 200:
                body = await read_body(response, LARGEST_ERROR)
                raise _refusal(response.status_code, body, self.server.access, raw="prompt" in request.body)
            async for data in response.aiter_raw():
                reader.feed(data, time.perf_counter())
                changed(reader)
        reader.end()


def _refusal(status: int, body: bytes, access: ApiAccess, *, raw: bool) -> Exception:
    message = message_of(body)
    if status in (401, 403):
        return AnswerError(f"it {key_wanted(access)}")
    if not raw and status < 500 and NO_TEMPLATE.search(body.decode(errors="replace")):
        return _NoTemplateError()
    return AnswerError(f"HTTP {status}: {message or 'no reason given'}")

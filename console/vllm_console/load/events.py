"""Reads streamed answers, whose events are JSON documents, and the error messages in responses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import msgspec

from vllm_console.text import plain

LARGEST_EVENT = 1024 * 1024
LONGEST_MESSAGE = 400
"""Maximum length of a shown error. vLLM's message about a prompt that is too long has 270 characters."""

NO_ERROR = (msgspec.Raw(), msgspec.Raw(b"null"))


class AnswerError(Exception):
    """A request was refused, or its answer can't be read: one sentence, the same for all failures of its kind."""


def check_finish(reason: str | None) -> None:
    """Raise AnswerError if the server gave up an answer: ``abort`` is vLLM's reason, ``error`` that of others.

    ``error`` is also one of vLLM's engine (since 0.13), but its API server sends an error message instead.
    """
    if reason in ("abort", "error"):
        raise AnswerError("the server aborted the request")


class Usage(msgspec.Struct):
    """Token counts of an answer so far, by the server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class StreamEvent(msgspec.Struct):
    """The fields of an event that any reader needs; fields that a reader does not name are skipped, never built."""

    usage: Usage | None = None
    error: msgspec.Raw = NO_ERROR[0]


E = TypeVar("E", bound=StreamEvent)


class EventStream(Generic[E]):
    """The events of one streamed answer."""

    def __init__(self, decode: Callable[[bytes], E]) -> None:
        self._decode = decode
        self.rest = b""
        """The beginning of an event whose end has not arrived."""
        self.done = False
        """Whether the server has said that the answer is complete."""

    def feed(self, data: bytes) -> Iterator[E]:
        """The events that ``data`` completes.

        Raises:
            AnswerError: they are not an event stream of completions, or report an error.
        """
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        events = (self.rest + data).split(b"\n\n")
        self.rest = events.pop()
        if len(self.rest) > LARGEST_EVENT:
            raise AnswerError("the server sent an event of more than 1 MiB, too large for a token")
        for event in events:
            if not event.startswith(b"data:"):
                continue
            payload = event[5:].strip()
            if payload == b"[DONE]":
                self.done = True
                continue
            try:
                decoded = self._decode(payload)
            except (ValueError, RecursionError) as error:
                raise AnswerError("the response is not an event stream of completions") from error
            if decoded.error not in NO_ERROR:
                raise AnswerError(f"the server reports: {message_of(bytes(decoded.error))}")
            yield decoded


def message_of(error: bytes) -> str:
    """An API error's message, or the raw text, in one short line."""
    try:
        document = msgspec.json.decode(error)
    except (ValueError, RecursionError):
        document = error.decode(errors="replace")
    if isinstance(document, dict):
        document = document.get("error", document)
    if isinstance(document, dict):
        document = document.get("message") or document.get("detail") or document
    text = plain(" ".join(str(document).split()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 1].rstrip()}…"

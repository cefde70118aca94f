"""Reads the event stream of one completion as it comes in."""

from __future__ import annotations

import msgspec

from vllm_console.load.report import Tally
from vllm_console.text import plain

LARGEST_EVENT = 1024 * 1024


class AnswerError(Exception):
    """A request failed: one sentence, the same for all failures of its kind."""


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    """What is read of an event; all else in it is skipped without being built."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode


def message_of(error: bytes) -> str:
    """The message of an error as the API sends it, or the text as it stands, in one short line."""
    try:
        document = msgspec.json.decode(error)
    except (ValueError, RecursionError):
        document = error.decode(errors="replace")
    if isinstance(document, dict):
        document = document.get("error", document)
    if isinstance(document, dict):
        document = document.get("message") or document.get("detail") or document
    return plain(" ".join(str(document).split()), 200)


class Answer:
    """One answer while it streams. The first event with a choice is the first token; gaps between such events are ITL.

    An event is timed when its bytes arrive, so events that arrive together have no gap. Tokens are counted as the
    server's ``usage`` says, or else one per event.
    """

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._rest = b""
        self._begin = 0.0
        self._last: float | None = None
        self._tokens = 0
        self._counted = 0
        self._finish: str | None = None
        self._done = False

    def begin(self, at: float) -> None:
        """When the request was sent, on the clock of `feed`."""
        self._begin = at

    def feed(self, data: bytes, at: float) -> None:
        """Take in bytes that arrived at ``at``.

        Raises:
            AnswerError: they are no event stream of completions, or report an error.
        """
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        events = (self._rest + data).split(b"\n\n")
        self._rest = events.pop()
        if len(self._rest) > LARGEST_EVENT:
            raise AnswerError("an event of more than 1 MiB came, which no token needs")
        for event in events:
            if event.startswith(b"data:"):
                self._event(event[5:].strip(), at)

    def end(self) -> None:
        """The stream is over.

        Raises:
            AnswerError: it ended too soon.
        """
        if self._finish == "abort":
            raise AnswerError("the server aborted the request")
        if not self._done or self._last is None:
            raise AnswerError("the answer ended before its last token")

    def _event(self, payload: bytes, at: float) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        try:
            event = _decode(payload)
        except (ValueError, RecursionError) as error:
            raise AnswerError("the answer is no event stream of completions") from error
        if bytes(event.error) not in (b"", b"null"):
            raise AnswerError(f"the server reports: {message_of(bytes(event.error))}")
        if event.choices:
            self._finish = event.choices[0].finish_reason or self._finish
            self._token(at)
        if event.usage is not None:
            self._count(event.usage.completion_tokens)

    def _token(self, at: float) -> None:
        if self._last is None:
            self._tally.ttft.add(at - self._begin)
        else:
            self._tally.itl.add(at - self._last)
        self._last = at
        self._tokens += 1
        if self._tokens > self._counted:
            self._count(self._tokens)

    def _count(self, tokens: int) -> None:
        """``tokens`` came so far; the tally is kept up to date while the answer streams."""
        self._tally.output_tokens += tokens - self._counted
        self._counted = tokens

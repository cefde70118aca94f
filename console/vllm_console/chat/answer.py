"""One streamed answer: its parts as they arrive, and its figures. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from vllm_console.load.events import AnswerError, EventStream, StreamEvent, check_finish
from vllm_console.text import count, rate, seconds
from vllm_launchers.typed_decoding import json_decoder

LARGEST_ANSWER = 8 << 20
"""Maximum number of characters. No model's context holds as many."""


class PartKind(StrEnum):
    """The kind of a part of an answer."""

    REASONING = "reasoning"
    CONTENT = "content"
    TOOL_CALL = "tool_call"


class Part(msgspec.Struct, frozen=True):
    """A part of an answer; for a tool call, ``name`` is the tool's and ``text`` its arguments in JSON."""

    kind: PartKind
    text: str
    name: str = ""


class AnswerFigures(msgspec.Struct, frozen=True):
    """Measurements of an answer, in seconds and tokens; None while unknown.

    TTFT and ``e2e_seconds`` count from when the request is sent. ``itl_seconds`` is the mean time between tokens,
    ``tokens_per_second`` the rate after the first token.
    """

    ttft_seconds: float | None = None
    itl_seconds: float | None = None
    itl_longest_seconds: float | None = None
    tokens_per_second: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    e2e_seconds: float | None = None


class Answer(msgspec.Struct, frozen=True):
    """An answer as received so far. ``problem`` is why it ended early; ``stopped`` means that the user stopped it."""

    parts: tuple[Part, ...] = ()
    figures: AnswerFigures = AnswerFigures()
    finish_reason: str = ""
    problem: str = ""
    stopped: bool = False
    running: bool = False
    raw: bool = False
    """Whether it continues the text, without a chat template."""
    note: str = ""
    """A note on how it was requested; may be empty."""

    def text(self, kind: PartKind = PartKind.CONTENT) -> str:
        """All text of one kind; for tool calls, their arguments."""
        return "".join(part.text for part in self.parts if part.kind is kind)


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct):
    index: int = 0
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    text: str | None = None
    finish_reason: str | None = None


class _Event(StreamEvent):
    choices: tuple[_Choice, ...] = ()


class _Piece(msgspec.Struct):
    kind: PartKind
    index: int
    name: str = ""
    texts: list[str] = []


_decode = json_decoder(_Event).decode


class AnswerReader:
    """Reads the event stream of a chat or of a completion. Times are when bytes arrive, on any clock.

    The server's ``usage`` counts the tokens; without it, each event with text counts as one.
    """

    def __init__(self, begin: float, *, raw: bool = False, note: str = "") -> None:
        self._begin, self._raw, self._note = begin, raw, note
        self._stream = EventStream(_decode)
        self._pieces: list[_Piece] = []
        self._size = 0
        self._first: float | None = None
        self._last = begin
        self._longest: float | None = None
        self._tokens = 0
        self._events = 0
        self._prompt_tokens: int | None = None
        self._finish = ""

    def feed(self, data: bytes, at: float) -> None:
        """Process bytes that arrived at ``at``.

        Raises:
            AnswerError: they are not an event stream of an answer, or report an error.
        """
        for event in self._stream.feed(data):
            before, has_text = self._tokens, False
            if event.usage is not None:
                self._prompt_tokens = event.usage.prompt_tokens or self._prompt_tokens
                self._tokens = max(self._tokens, event.usage.completion_tokens or 0)
            for choice in event.choices[:1]:
                self._finish = choice.finish_reason or self._finish
                has_text = self._take(choice)
            if event.choices and (has_text or self._tokens > before):
                self._token(at)

    def end(self) -> None:
        """Handle the end of the stream. Raises AnswerError if it ended before the answer did."""
        check_finish(self._finish)
        rest = self._stream.rest
        if rest.strip() and not rest.startswith(b"data:") and self._first is None:
            raise AnswerError("the response is not an event stream: is this vLLM's address?")
        if not self._stream.done:
            raise AnswerError("the connection ended before the answer did")

    def answer(self, **ended: Any) -> Answer:
        """The answer so far; callable from any thread. ``ended`` are fields that describe how it ended."""
        parts = tuple(Part(piece.kind, "".join(piece.texts), piece.name) for piece in self._pieces)
        fields: dict[str, Any] = {"finish_reason": self._finish, "raw": self._raw, "note": self._note} | ended
        return Answer(parts, self._figures(), **fields)

    def _figures(self) -> AnswerFigures:
        first, tokens = self._first, self._count
        if first is None:
            return AnswerFigures(prompt_tokens=self._prompt_tokens)
        decoding = self._last - first
        mean = decoding / (tokens - 1) if tokens > 1 and decoding > 0 else None  # all in one event: no interval
        return AnswerFigures(
            ttft_seconds=first - self._begin,
            itl_seconds=mean,
            itl_longest_seconds=self._longest if mean is not None else None,
            tokens_per_second=1 / mean if mean else None,
            prompt_tokens=self._prompt_tokens,
            output_tokens=tokens,
            e2e_seconds=self._last - self._begin,
        )

    @property
    def _count(self) -> int:
        return self._tokens or self._events

    def _take(self, choice: _Choice) -> bool:
        """Add a choice's content; return whether there was any."""
        delta = choice.delta
        has_text = self._add(PartKind.REASONING, delta.reasoning or delta.reasoning_content)
        has_text |= self._add(PartKind.CONTENT, delta.content or choice.text)
        for call in delta.tool_calls or ():
            has_text |= self._add(PartKind.TOOL_CALL, call.function.arguments, call.function.name or "", call.index)
        return has_text

    def _add(self, kind: PartKind, text: str | None, name: str = "", index: int = 0) -> bool:
        if not (text or name):
            return False
        last = self._pieces[-1] if self._pieces else None
        if last is None or (last.kind, last.index) != (kind, index):
            last = _Piece(kind, index)
            self._pieces.append(last)
        last.texts.append(text or "")
        last.name += name
        self._size += len(text or "") + len(name)
        if self._size > LARGEST_ANSWER:
            raise AnswerError("the answer exceeded 8 MiB and was stopped")
        return True

    def _token(self, at: float) -> None:
        self._events += 1
        if self._first is None:
            self._first = at
        else:
            self._longest = max(self._longest or 0.0, at - self._last)
        self._last = at


def figures_text(answer: Answer) -> str:
    """TTFT, ITL, tokens per second and token counts; empty before the first token."""
    found = answer.figures
    if found.ttft_seconds is None:
        return ""
    itl = f"ITL {seconds(found.itl_seconds)}"
    if found.itl_longest_seconds is not None:
        itl += f" (longest {seconds(found.itl_longest_seconds)})"
    speed = rate(found.tokens_per_second, "tok")
    tokens = f"{count(found.prompt_tokens)} in + {count(found.output_tokens)} out tokens"
    return " · ".join((f"TTFT {seconds(found.ttft_seconds)}", itl, speed, tokens, *_ended(answer)))


def _ended(answer: Answer) -> list[str]:
    if answer.stopped:
        return ["stopped"]
    return ["ended by max tokens"] if answer.finish_reason == "length" else []

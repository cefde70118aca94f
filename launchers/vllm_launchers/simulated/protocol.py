"""Bodies of requests and answers: what a client may ask, and what it is told, in vLLM's shapes."""

from __future__ import annotations

import random
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_launchers.simulated.scheduler import FinishReason, Request
from vllm_launchers.simulated.words import output_text, tokenize

COMPLETION_TOKENS = 16
"""``max_tokens`` of a completion that names none, as in OpenAI's API."""
CHAT_LENGTH = 256
"""About how long an answer gets that nobody bounds."""


class ApiError(Exception):
    """An answer other than 200, in vLLM's error body."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Build a 400."""
    return ApiError(400, "BadRequestError", message, param)


@dataclass(frozen=True, slots=True)
class Ask:
    """A completion or chat request, read and checked."""

    chat: bool
    model: str
    tokens: list[int]
    max_tokens: int
    output_length: int
    seed: int
    stream: bool
    include_usage: bool
    continuous_usage: bool

    def request(self) -> Request:
        """Make the scheduler's request of it, with an id as vLLM's."""
        name = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        return Request(name, list(self.tokens), self.max_tokens, self.output_length, seed=self.seed)


def read_ask(body: Any, *, chat: bool, names: tuple[str, ...], max_model_len: int) -> Ask:
    """Check a request's body. Raises :class:`ApiError` as vLLM answers."""
    if not isinstance(body, Mapping):
        raise bad_request("The body must be a JSON object.")
    model = body.get("model") or names[0]
    if model not in names:
        raise ApiError(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
    if _integer(body, "n", 1) != 1:
        raise bad_request("The simulated engine answers with one choice: n must be 1.", "n")
    tokens = _chat_tokens(body) if chat else _prompt_tokens(body.get("prompt"))
    room = max_model_len - len(tokens)
    if room < 1:
        raise bad_request(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{len(tokens)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
        )
    asked = _integer(body, "max_completion_tokens", None) if chat else None
    if asked is None:
        asked = _integer(body, "max_tokens", None if chat else COMPLETION_TOKENS)
    if asked is not None and asked < 1:
        raise bad_request(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
    limit = room if asked is None else min(asked, room)
    seed = zlib.crc32(repr(tokens[-4096:]).encode()) ^ (_integer(body, "seed", 0) or 0)
    options = body.get("stream_options") or {}
    return Ask(
        chat=chat,
        model=model,
        tokens=tokens,
        max_tokens=limit,
        output_length=_output_length(body, limit, asked is None, seed),
        seed=seed,
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
    )


def _integer(body: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = body.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_request(f"{key} must be an integer, got {value!r}.", key)
    return value


def _output_length(body: Mapping[str, Any], limit: int, unbounded: bool, seed: int) -> int:
    """How many tokens come: all with ``ignore_eos``, else a draw that the same prompt always repeats."""
    least = _integer(body, "min_tokens", 0) or 0
    if least < 0:
        raise bad_request(f"min_tokens must be greater than or equal to 0, got {least}.", "min_tokens")
    if least > limit:
        raise bad_request(f"min_tokens must be less than or equal to max_tokens={limit}, got {least}.", "min_tokens")
    if body.get("ignore_eos"):
        return limit
    middle = min(CHAT_LENGTH, limit) if unbounded else limit * 0.8
    drawn = round(random.Random(seed).gauss(middle, middle * 0.3))
    return max(1, least, min(limit, drawn))


def _prompt_tokens(prompt: Any) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return tokenize(prompt) or [0]
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and token >= 0 for token in prompt):
        return list(prompt)
    raise bad_request("Give one prompt: a text, or a list of token ids. The simulated engine takes no batch.", "prompt")


def _chat_tokens(body: Mapping[str, Any]) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("messages must be a list of at least one message.", "messages")
    parts: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise bad_request("Every message needs a role and a content.", "messages")
        parts.append(f"<|start|>{message['role']}\n{_content(message.get('content'))}<|end|>\n")
    return tokenize("".join(parts) + "<|start|>assistant\n")


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if all(isinstance(text, str) for text in texts) and len(texts) == len(content):
            return "".join(str(text) for text in texts)
    raise bad_request(
        "The simulated engine takes text only: content must be a text or a list of text parts.", "messages"
    )


def usage_of(request: Request, *, details: bool) -> dict[str, Any]:
    """The ``usage`` object; ``details`` adds the cached tokens, as ``--enable-prompt-tokens-details`` does."""
    usage: dict[str, Any] = {
        "prompt_tokens": request.prompt_length,
        "total_tokens": request.prompt_length + request.generated,
        "completion_tokens": request.generated,
        "prompt_tokens_details": None,
    }
    if details:
        usage["prompt_tokens_details"] = {"cached_tokens": request.cached or 0}
    return usage


def whole_answer(ask: Ask, request: Request, *, details: bool) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    text = output_text(request.seed, 0, request.generated)
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": request.finished, "stop_reason": None}
    if ask.chat:
        choice["message"] = {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}
    else:
        choice["text"] = text
    return {
        "id": request.id,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [choice],
        "usage": usage_of(request, details=details),
    }


class Chunks:
    """Writes a stream's events. Text is plain words, so that no JSON encoder is needed for each token."""

    def __init__(self, ask: Ask, request: Request) -> None:
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        model = ask.model.replace("\\", "\\\\").replace('"', '\\"')
        self._head = f'data: {{"id":"{request.id}","object":"{kind}","created":{int(time.time())},"model":"{model}",'
        self._seed = request.seed
        self._chat = ask.chat

    def role(self) -> bytes:
        """The first event of a chat."""
        choice = '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return f'{self._head}"choices":[{choice}]}}\n\n'.encode()

    def tokens(self, start: int, end: int, reason: FinishReason | None, usage: str = "") -> bytes:
        """The tokens at positions ``start`` to ``end``; ``usage`` is JSON to be added, or nothing."""
        text = output_text(self._seed, start, end)
        finish = "null" if reason is None else f'"{reason}"'
        piece = f'"delta":{{"content":"{text}"}}' if self._chat else f'"text":"{text}"'
        tail = f',"usage":{usage}' if usage else ""
        choice = f'{{"index":0,{piece},"logprobs":null,"finish_reason":{finish},"stop_reason":null}}'
        return f'{self._head}"choices":[{choice}]{tail}}}\n\n'.encode()

    def usage(self, usage: str) -> bytes:
        """The last event with ``stream_options.include_usage``."""
        return f'{self._head}"choices":[],"usage":{usage}}}\n\n'.encode()

"""Responses for completions and chats, complete or as stream events, with the fields of vLLM 0.32."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_launchers.simulated.requests import GeneratedAnswer, GenerationRequest, Prompt
from vllm_launchers.simulated.validation import ApiError
from vllm_launchers.simulated.vocabulary import Ranked, Vocabulary, output_text, ranked_tokens

DONE = b"data: [DONE]\n\n"


class Style(msgspec.Struct, frozen=True):
    """Response settings from the server's flags."""

    fingerprint: str
    usage_details: bool = False
    """``--enable-prompt-tokens-details``."""


def event(body: Any, kind: str = "") -> bytes:
    """A server-sent event with a JSON body; ``kind``: its type, if the API has event types."""
    head = f"event: {kind}\n" if kind else ""
    return head.encode() + b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The event of a stream that the engine rejects; vLLM formats it with spaces."""
    return b"data: " + json.dumps(error.body).encode() + b"\n\n"


# ---- token counts


def usage_of(ask: GenerationRequest, outputs: Sequence[GeneratedAnswer], style: Style) -> dict[str, Any]:
    """The ``usage`` object of a complete response: each prompt counts once, and every choice's tokens count."""
    usage = _counts(sum(len(prompt.tokens) for prompt in ask.prompts), sum(one.request.generated for one in outputs))
    return {**usage, "prompt_tokens_details": _details(outputs, style), "completion_tokens_details": None}


def _counts(prompt: int, generated: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def _details(outputs: Sequence[GeneratedAnswer], style: Style) -> dict[str, Any] | None:
    if not style.usage_details:
        return None
    cached = outputs[-1].request.cached or 0
    return {"cached_tokens": cached, "created_cache_tokens": None, "multimodal_tokens": None}


# ---- log probabilities


class TokenPlace(msgspec.Struct, frozen=True):
    """A token at its position, with ``top``: itself and the most likely tokens there."""

    token: int
    text: str
    top: Sequence[Ranked]


def _output_places(ask: GenerationRequest, one: GeneratedAnswer, start: int, end: int, count: int) -> list[TokenPlace]:
    seed = one.request.seed
    greedy = ask.fields.get("temperature") == 0
    places = []
    for position, token in enumerate(one.tokens(start, end), start):
        top = ranked_tokens(seed, position, token, count, greedy=greedy)
        places.append(TokenPlace(token, output_text(seed, position, position + 1), top))
    return places


def _prompt_places(ask: GenerationRequest, prompt: Prompt, count: int) -> list[TokenPlace | None]:
    """The prompt's tokens; the first has no prediction."""
    places: list[TokenPlace | None] = [None]
    for position, token in enumerate(prompt.tokens[1:], 1):
        text = ask.served.vocabulary.decode(token)
        places.append(TokenPlace(token, text, ranked_tokens(0, position, token, count)))
    return places


def _piece(token: int, text: str, ask: GenerationRequest) -> str:
    return f"token_id:{token}" if ask.fields.get("return_tokens_as_token_ids") else text


def _top_texts(place: TokenPlace, ask: GenerationRequest) -> Iterable[tuple[str, float]]:
    vocabulary: Vocabulary = ask.served.vocabulary
    for index, one in enumerate(place.top):
        token = one.token % vocabulary.size
        yield _piece(token, vocabulary.decode(token) if index else place.text, ask), one.log_probability


def completion_logprobs(
    places: Sequence[TokenPlace | None], prompt: Prompt, ask: GenerationRequest, offset: int = 0
) -> dict[str, Any]:
    """``logprobs`` of a completion."""
    result: dict[str, list[Any]] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
    for place in places:
        if place is None:
            first = prompt.tokens[0]
            text, value, top = _piece(first, ask.served.vocabulary.decode(first), ask), None, None
        else:
            text, value, top = (
                _piece(place.token, place.text, ask),
                place.top[0].log_probability,
                dict(_top_texts(place, ask)),
            )
        result["text_offset"].append(offset)
        result["tokens"].append(text)
        result["token_logprobs"].append(value)
        result["top_logprobs"].append(top)
        offset += len(text)
    return result


def chat_logprobs(places: Sequence[TokenPlace], count: int, ask: GenerationRequest) -> dict[str, Any]:
    """``logprobs`` of a chat."""
    content = []
    for place in places:
        entries = [
            {"token": text, "logprob": value, "bytes": list(text.encode())} for text, value in _top_texts(place, ask)
        ]
        own = {"token": _piece(place.token, place.text, ask), "logprob": place.top[0].log_probability}
        content.append({**own, "bytes": list(place.text.encode()), "top_logprobs": entries[:count]})
    return {"content": content}


def _prompt_logprobs(ask: GenerationRequest, prompt: Prompt) -> list[dict[str, Any] | None] | None:
    """``prompt_logprobs``, if requested or implied by an echo with log probabilities."""
    fields = ask.fields
    count = fields.get("prompt_logprobs")
    if count is None and fields.get("echo"):
        count = (fields.get("top_logprobs") or 0) if ask.chat else fields.get("logprobs")
    if count is None:
        return None
    vocabulary = ask.served.vocabulary
    found: list[dict[str, Any] | None] = []
    for place in _prompt_places(ask, prompt, count):
        if place is None:
            found.append(None)
            continue
        entry = {}
        for one in place.top:
            token = one.token % vocabulary.size
            text = vocabulary.decode(token)
            entry[str(token)] = {"logprob": one.log_probability, "rank": one.rank, "decoded_token": text}
        found.append(entry)
    return found


# ---- complete responses


def _completion_answer(ask: GenerationRequest, outputs: Sequence[GeneratedAnswer], style: Style) -> dict[str, Any]:
    return {
        "id": ask.id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [_completion_choice(ask, one) for one in outputs],
        "service_tier": None,
        "system_fingerprint": style.fingerprint,
        "usage": usage_of(ask, outputs, style),
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _completion_choice(ask: GenerationRequest, one: GeneratedAnswer) -> dict[str, Any]:
    fields, end = ask.fields, one.request.generated
    ids = bool(fields.get("return_token_ids"))
    text = _echo_text(ask, one) if fields.get("echo") else ""
    if not _prompt_only(ask):
        text += one.text(end)
    return {
        "index": one.index,
        "text": text,
        "logprobs": _completion_choice_logprobs(ask, one, 0, end, echo=bool(fields.get("echo"))),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "token_ids": one.tokens(0, end) if ids else None,
        "prompt_logprobs": _prompt_logprobs(ask, one.prompt),
        "prompt_token_ids": one.prompt.tokens if ids else None,
        "routed_experts": None,
    }


def _completion_choice_logprobs(
    ask: GenerationRequest, one: GeneratedAnswer, start: int, end: int, *, echo: bool, offset: int = 0
) -> dict[str, Any] | None:
    count = ask.fields.get("logprobs")
    if count is None:
        return None
    places: list[TokenPlace | None] = _prompt_places(ask, one.prompt, count) if echo else []
    if not _prompt_only(ask):
        places += _output_places(ask, one, start, end, count)
    return completion_logprobs(places, one.prompt, ask, offset)


def _prompt_only(ask: GenerationRequest) -> bool:
    return bool(ask.fields.get("echo")) and ask.max_tokens == 0 and not ask.chat


def _echo_text(ask: GenerationRequest, one: GeneratedAnswer) -> str:
    if ask.fields.get("return_token_ids"):
        return ""
    prompt = one.prompt
    return prompt.text if prompt.text is not None else ask.served.vocabulary.text(prompt.tokens)


def _chat_answer(ask: GenerationRequest, outputs: Sequence[GeneratedAnswer], style: Style) -> dict[str, Any]:
    fields, prompt = ask.fields, ask.prompts[0]
    return {
        "id": ask.id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [_chat_choice(ask, one) for one in outputs],
        "service_tier": None,
        "system_fingerprint": style.fingerprint,
        "usage": usage_of(ask, outputs, style),
        "prompt_logprobs": _prompt_logprobs(ask, prompt),
        "prompt_token_ids": prompt.tokens if fields.get("return_token_ids") else None,
        "prompt_text": prompt.text if fields.get("return_prompt_text") else None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def _chat_choice(ask: GenerationRequest, one: GeneratedAnswer) -> dict[str, Any]:
    fields, end = ask.fields, one.request.generated
    content = (echoed(ask) if fields.get("echo") else "") + one.text(end)
    message = {
        "role": role_of(ask),
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {
        "index": one.index,
        "message": message,
        "logprobs": _chat_choice_logprobs(ask, one, 0, end),
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "token_ids": one.tokens(0, end) if fields.get("return_token_ids") else None,
        "routed_experts": None,
    }


def _chat_choice_logprobs(ask: GenerationRequest, one: GeneratedAnswer, start: int, end: int) -> dict[str, Any] | None:
    if not ask.fields.get("logprobs"):
        return None
    count = ask.fields.get("top_logprobs") or 0
    return chat_logprobs(_output_places(ask, one, start, end, count), count, ask)


def role_of(ask: GenerationRequest) -> str:
    """The role: assistant, or the author of the message that is continued."""
    if ask.fields.get("add_generation_prompt", True):
        return "assistant"
    return str(ask.fields["messages"][-1]["role"])


def echoed(ask: GenerationRequest) -> str:
    """The last message's text, if its role is the response's."""
    last = ask.fields["messages"][-1]
    content = last.get("content")
    return content if last["role"] == role_of(ask) and isinstance(content, str) else ""


# ---- streams


@dataclass(slots=True)
class _Progress:
    """How much of one choice has been sent: characters shown, and characters of its tokens."""

    shown: int = 0
    offset: int = 0
    begun: bool = False


@dataclass(slots=True)
class AnswerWriter:
    """Writes the answer to a completion or a chat, complete or as events."""

    ask: GenerationRequest
    outputs: Sequence[GeneratedAnswer]
    style: Style
    progress: dict[int, _Progress] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        return (_chat_answer if self.ask.chat else _completion_answer)(self.ask, self.outputs, self.style)

    def begin(self) -> bytes:
        """A chat's first events, sent with the first token as in vLLM: each choice's role and the text it continues."""
        ask = self.ask
        if not ask.chat:
            return b""
        fields, prompt = ask.fields, ask.prompts[0]
        given = {
            "prompt_token_ids": prompt.tokens if fields.get("return_token_ids") else None,
            "prompt_text": prompt.text if fields.get("return_prompt_text") else None,
        }
        events: list[tuple[dict[str, str], dict[str, Any]]] = [({"role": role_of(ask), "content": ""}, given)]
        if fields.get("echo") and (text := echoed(ask)):
            events.append(({"content": text}, {}))
        written = b""
        for delta, more in events:
            for one in self.outputs:
                choice = {"index": one.index, "delta": delta, "logprobs": None, "finish_reason": None}
                written += event({**self._body([choice]), **self._usage(one, 0), **more})
        return written

    def tokens(self, one: GeneratedAnswer, start: int, end: int) -> bytes:
        """The event for one choice's tokens at positions ``start`` to ``end``."""
        progress = self.progress.setdefault(one.index, _Progress())
        ended = one.request.finished is not None
        if self.ask.stops or one.visible is not None:
            text = one.text(end)
            delta, progress.shown = text[progress.shown :], max(progress.shown, len(text))
        else:
            delta = output_text(one.request.seed, start, end)
        choice = (self._chat_choice if self.ask.chat else self._completion_choice)(one, start, end, delta, progress)
        body = {**self._body([choice]), **self._usage(one, end)}
        if ended and not self.ask.include_usage:
            body["system_fingerprint"] = self.style.fingerprint
        return event(body)

    def end(self) -> bytes:
        """The last events: token counts, if requested, and the end marker."""
        if not self.ask.include_usage:
            return DONE
        usage = {key: value for key, value in usage_of(self.ask, self.outputs, self.style).items() if value is not None}
        if "prompt_tokens_details" in usage:
            usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]}
        return event({**self._body([]), "usage": usage, "system_fingerprint": self.style.fingerprint}) + DONE

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        ask = self.ask
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        return {"id": ask.id, "object": kind, "created": self.created, "model": ask.model, "choices": choices}

    def _usage(self, one: GeneratedAnswer, end: int) -> dict[str, Any]:
        """Token counts so far, if each event should have them."""
        if not self.ask.continuous_usage:
            return {}
        details = {"completion_tokens_details": None} if self.ask.chat else {}
        return {"usage": {**_counts(len(one.prompt.tokens), end), **details}}

    def _completion_choice(
        self, one: GeneratedAnswer, start: int, end: int, delta: str, progress: _Progress
    ) -> dict[str, Any]:
        ask = self.ask
        first, progress.begun = not progress.begun, True
        echo = bool(ask.fields.get("echo")) and first
        ids = bool(ask.fields.get("return_token_ids"))
        if echo:
            delta = _echo_text(ask, one) + ("" if _prompt_only(ask) else delta)
        logprobs = _completion_choice_logprobs(ask, one, start, end, echo=echo, offset=progress.offset)
        if logprobs is not None and logprobs["tokens"]:
            progress.offset = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        ended = one.request.finished is not None
        return {
            "index": one.index,
            "text": delta,
            "logprobs": logprobs,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason if ended else None,
            "prompt_token_ids": one.prompt.tokens if echo or (ids and first) else None,
            "token_ids": one.tokens(start, end) if ids else None,
        }

    def _chat_choice(
        self, one: GeneratedAnswer, start: int, end: int, delta: str, _progress: _Progress
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": one.index,
            "delta": {"content": delta},
            "logprobs": _chat_choice_logprobs(self.ask, one, start, end),
            "finish_reason": one.finish_reason,
        }
        if one.request.finished is not None:
            choice["stop_reason"] = one.stop_reason
        choice["token_ids"] = one.tokens(start, end) if self.ask.fields.get("return_token_ids") else None
        return choice

"""``/v1/responses``: OpenAI's Responses API, as vLLM 0.32 serves it without storing responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_launchers.simulated.completions import event
from vllm_launchers.simulated.requests import (
    GeneratedAnswer,
    GenerationRequest,
    ServedModel,
    chat_text,
    check_lengths,
    check_model,
    check_request,
    check_tool_names,
    fields_of,
    read_prompt,
)
from vllm_launchers.simulated.validation import (
    ApiError,
    Errors,
    Field,
    Place,
    anything,
    either,
    invalid,
    listing,
    literal,
    mapping,
    not_modeled,
    read_body,
    string,
)

RESPONSES_FIELDS = {
    **fields_of("background include", include=listing(string), defaults={"background": False}),
    "input": Field(lambda value, place, errors: _input(value, place, errors), required=True),
    **fields_of(
        """
        instructions max_output_tokens max_tool_calls metadata model logit_bias parallel_tool_calls previous_response_id
        prompt reasoning include_reasoning service_tier store stream temperature text tool_choice tools top_logprobs
        top_p top_k min_p truncation user include_stop_str_in_output presence_penalty frequency_penalty
        repetition_penalty seed stop stop_token_ids ignore_eos structured_outputs request_id
        """,
        "include_reasoning service_tier tool_choice tools include_stop_str_in_output ignore_eos request_id",
        {
            "parallel_tool_calls": True, "include_reasoning": True, "service_tier": "auto", "store": True,
            "stream": False, "tool_choice": "auto", "tools": [], "truncation": "disabled",
            "include_stop_str_in_output": False, "stop": [], "ignore_eos": False,
        },
        metadata=mapping(string),
        prompt=anything,
        reasoning=mapping(),
        service_tier=literal("auto", "default", "flex", "scale", "priority"),
        text=mapping(),
        tool_choice=either(literal("none", "auto", "required"), mapping()),
        tools=listing(mapping()),
        truncation=literal("auto", "disabled"),
    ),
}  # fmt: skip


def _input(value: Any, place: Place, errors: Errors) -> Any:
    """A string or a list of items. A message must have content; vLLM also lists errors of some thirty other types."""
    tried = Errors()
    result = either(string, listing(mapping()))(value, place, tried)
    for index, item in enumerate(value if isinstance(value, list) and not tried.found else ()):
        where = (*place, index, "EasyInputMessageParam", "content")
        if item.get("type", "message") != "message" or isinstance(item.get("content"), str | list):
            continue
        string(value, place, tried)
        if "content" in item:
            either(string, listing(anything))(item["content"], where, tried)
        else:
            tried.add("missing", where, "Field required", item)
    errors.found += tried.found
    return result


def not_found(name: str) -> ApiError:
    """The rejection of a response that is not stored: none is without ``VLLM_ENABLE_RESPONSES_API_STORE``."""
    return ApiError(404, "invalid_request_error", f"Response with id '{name}' not found.", "response_id")


def read_response(body: Any, served: ServedModel) -> GenerationRequest:
    """Parse a body of ``/v1/responses``. Raises `ApiError` with vLLM's response."""
    if isinstance(body, dict):
        body = _prepared(body)
    fields = read_body(body, RESPONSES_FIELDS)
    check_model(fields, served)
    if fields["background"]:
        raise ApiError(
            400,
            "invalid_request_error",
            "This vLLM engine does not support `store=True` and therefore does not support the background mode. To "
            "enable these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching "
            "the vLLM server.",
            "background",
        )
    if fields["previous_response_id"] is not None:
        raise not_found(fields["previous_response_id"])
    if ((fields["text"] or {}).get("format") or {}).get("type") not in (None, "text"):
        raise not_modeled("output that is bound to a format", "text")
    if fields["include"] and "message.output_text.logprobs" in fields["include"]:
        raise not_modeled("log probabilities in responses", "include")
    text = chat_text(_messages(fields), {"add_generation_prompt": True}, served)
    asked = fields["max_output_tokens"]
    check_lengths(fields, served, asked, "max_output_tokens")
    if fields["truncation"] == "auto":
        fields["truncate_prompt_tokens"] = -1
    prompt = read_prompt(text, fields, served, asked)
    name = fields.get("request_id") or f"resp_{uuid.uuid4().hex[:16]}"
    return check_request("response", name, (prompt,), fields, served, asked)


def _prepared(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Check the raw body, and set the tool choice to ``none`` if there are no tools."""
    tools, choice = body.get("tools"), body.get("tool_choice", "auto")
    if not tools:
        if choice in ("auto", "none"):
            body = {**body, "tool_choice": "none"}
        elif choice == "required":
            raise invalid("Tool choice 'required' must be specified with 'tools' parameter.", "tool_choice")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        check_tool_names(choice, tools)
    if body.get("prompt") is not None:
        raise invalid("prompt template is not supported", "prompt")
    if body.get("background") and not body.get("store", True):
        raise invalid("background can only be used when `store` is true", "background")
    return body


def _messages(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation: instructions and input."""
    messages: list[dict[str, Any]] = []
    if fields["instructions"]:
        messages.append({"role": "system", "content": fields["instructions"]})
    if isinstance(fields["input"], str):
        return [*messages, {"role": "user", "content": fields["input"]}]
    for item in fields["input"]:
        if item.get("type", "message") != "message" or "role" not in item:
            raise not_modeled(f"input items of type {item.get('type')!r}", "input")
        messages.append(item)
    return messages


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as it is returned, with all fields."""
    empty = ("strict", "allowed_callers", "async", "defer_loading", "description", "output_schema")
    return {**dict.fromkeys(empty), **tool}


@dataclass(slots=True)
class ResponseWriter:
    """Writes the response to one request, complete or as events."""

    ask: GenerationRequest
    output: GeneratedAnswer
    created: int = field(default_factory=lambda: int(time.time()))
    _item: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex[:16]}")
    _number: int = 0
    _shown: int = 0
    _begun: bool = False

    def whole(self) -> dict[str, Any]:
        """The complete response."""
        incomplete = self.output.finish_reason == "length"
        status = "incomplete" if incomplete else "completed"
        return self._response(status, [self._message("completed", self._text())])

    def begin(self) -> bytes:
        """The events before the first token."""
        body = self._response("in_progress", [])
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def tokens(self, _output: GeneratedAnswer, _start: int, end: int) -> bytes:
        """The event for the text up to the token at ``end``; the first one is preceded by its item's events."""
        written = b""
        text = self.output.text(end)
        if not self._begun:
            self._begun = True
            added = self._event("response.output_item.added", item=self._message("in_progress", None), output_index=0)
            part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            written = added + self._part_event("response.content_part.added", part=part)
        delta, self._shown = text[self._shown :], max(self._shown, len(text))
        if delta:
            written += self._part_event("response.output_text.delta", delta=delta, logprobs=[])
        return written

    def end(self) -> bytes:
        """The events after the last token."""
        text = self._text()
        part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        return (
            self._part_event("response.output_text.done", logprobs=[], text=text)
            + self._part_event("response.content_part.done", part=part)
            + self._event("response.output_item.done", item=self._message("completed", text), output_index=0)
            + self._event("response.completed", response=self.whole())
        )

    def _text(self) -> str:
        return self.output.text(self.output.request.generated)

    def _message(self, status: str, text: str | None) -> dict[str, Any]:
        part: dict[str, Any] = {"annotations": [], "text": text, "type": "output_text", "logprobs": None}
        return {
            "id": self._item,
            "content": [] if text is None else [part],
            "role": "assistant",
            "status": status,
            "type": "message",
            "phase": None,
        }

    def _part_event(self, kind: str, **values: Any) -> bytes:
        return self._event(kind, content_index=0, item_id=self._item, output_index=0, **values)

    def _event(self, kind: str, **values: Any) -> bytes:
        body = {**values, "sequence_number": self._number, "type": kind}
        self._number += 1
        return event(body, kind)

    def _response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        ask, fields = self.ask, self.ask.fields
        ended = status != "in_progress"
        given = {name: fields[name] for name in ("instructions", "metadata")}
        kept = ("max_tool_calls", "previous_response_id", "prompt", "reasoning", "service_tier")
        return {
            "id": ask.id,
            "created_at": self.created,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            **given,
            "model": ask.model,
            "object": "response",
            "output": items,
            "parallel_tool_calls": fields["parallel_tool_calls"] is not False,
            "temperature": _or(fields["temperature"], 1.0),
            "tool_choice": fields["tool_choice"],
            "tools": [_tool(tool) for tool in fields["tools"]],
            "top_p": _or(fields["top_p"], 1.0),
            "background": False,
            "max_output_tokens": self.output.request.max_tokens,
            **{name: fields[name] for name in kept},
            "status": status,
            "text": fields["text"],
            "top_logprobs": None,
            "truncation": fields["truncation"],
            "usage": self._usage() if ended else None,
            "user": fields["user"],
            "presence_penalty": _or(fields["presence_penalty"], 0.0),
            "frequency_penalty": _or(fields["frequency_penalty"], 0.0),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }

    def _usage(self) -> dict[str, Any]:
        request = self.output.request
        turns: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
        tools: dict[str, Any] = {
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        }
        return {
            "input_tokens": request.prompt_length,
            "input_tokens_details": {"cached_tokens": request.cached or 0, "cache_write_tokens": 0, **turns},
            "output_tokens": request.generated,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0, **tools},
            "total_tokens": request.prompt_length + request.generated,
        }


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

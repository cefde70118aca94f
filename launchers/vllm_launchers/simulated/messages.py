"""``/v1/messages``: Anthropic's API as vLLM 0.32 serves it: requests become chats, and answers are translated back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_launchers.simulated.completions import Style, event
from vllm_launchers.simulated.requests import (
    CHAT_CHECKS,
    CHAT_FIELDS,
    EFFORTS,
    MOST_STOPS,
    GeneratedAnswer,
    GenerationRequest,
    ServedModel,
    check_model,
    check_tool_parser,
    converse,
    read_conversation,
    run_checks,
)
from vllm_launchers.simulated.validation import (
    ApiError,
    Errors,
    Field,
    Place,
    Reader,
    anything,
    boolean,
    bounded_string,
    either,
    integer,
    listing,
    literal,
    mapping,
    not_modeled,
    number,
    optional,
    read_body,
    record,
    string,
)

LEAST_BUDGET = 1024
"""Minimum thinking budget in Anthropic's API, in tokens."""
BILLING_HEADER = "x-anthropic-billing-header"
"""Prefix of a system text that clients send for accounting; vLLM omits it from the prompt."""


def _refused(errors: Errors, place: Place, message: str, value: object) -> None:
    errors.add("value_error", place, f"Value error, {message}", value, error=ValueError(message))


def _model(value: Any, place: Place, errors: Errors) -> Any:
    if value == "":
        _refused(errors, place, "Model is required", value)
    return string(value, place, errors)


def _max_tokens(value: Any, place: Place, errors: Errors) -> Any:
    count = integer()(value, place, errors)
    if count is not None and count <= 0:
        _refused(errors, place, "max_tokens must be positive", value)
    return count


_BLOCK = record(
    {
        "type": Field(
            literal(
                "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking",
                "tool_addition", "tool_removal",
            ),
            required=True,
        ),
        "text": Field(optional(string)),
        "source": Field(optional(mapping())),
        "id": Field(optional(string)),
        "tool_use_id": Field(optional(string)),
        "name": Field(optional(string)),
        "input": Field(optional(mapping())),
        "content": Field(optional(either(string, listing(mapping())))),
        "is_error": Field(optional(boolean)),
        "thinking": Field(optional(string)),
    }
)  # fmt: skip
_CONTENT = either(string, listing(_BLOCK))
_TOOL_CHANGES = ("tool_addition", "tool_removal")


def _changed_tools(content: Any) -> str | None:
    """Type of the first block that changes the tools."""
    blocks = content if isinstance(content, list) else ()
    return next((block["type"] for block in blocks if block["type"] in _TOOL_CHANGES), None)


def _message(value: Any, place: Place, errors: Errors) -> Any:
    fields = {
        "role": Field(literal("user", "assistant", "system"), required=True),
        "content": Field(_CONTENT, required=True),
    }
    tried = Errors()
    message = record(fields)(value, place, tried)
    if not tried.found and message["role"] != "system":
        _reject_tool_changes(message["content"], value, place, tried)
    errors.found += tried.found
    return message


def _system(value: Any, place: Place, errors: Errors) -> Any:
    tried = Errors()
    content = _CONTENT(value, place, tried)
    if not tried.found:
        _reject_tool_changes(content, value, place, tried)
    errors.found += tried.found
    return content


def _reject_tool_changes(content: Any, value: Any, place: Place, errors: Errors) -> None:
    if kind := _changed_tools(content):
        _refused(errors, place, f'{kind} blocks are only allowed in messages with role "system"', value)


_OUTPUT = record(
    {
        "effort": Field(optional(literal(*(effort for effort in EFFORTS if effort not in ("none", "minimal"))))),
        "format": Field(
            optional(
                record(
                    {"schema": Field(optional(mapping())), "type": Field(literal("json_schema"), "json_schema")},
                )
            )
        ),
    }
)
_TOOL = record(
    {
        "name": Field(string, required=True),
        "description": Field(optional(string)),
        "input_schema": Field(mapping(), required=True),
        "strict": Field(optional(boolean)),
        "defer_loading": Field(optional(boolean)),
    }
)
_DISPLAY = Field(optional(literal("summarized", "omitted", "updates")))
_THINKING: Mapping[str, Reader] = {
    "enabled": record({"budget_tokens": Field(integer(LEAST_BUDGET), required=True), "display": _DISPLAY}),
    "disabled": record({}),
    "adaptive": record({"display": _DISPLAY}),
}


def _thinking(value: Any, place: Place, errors: Errors) -> Any:
    """A union discriminated by ``type``."""
    if not isinstance(value, dict):
        return record({})(value, place, errors)
    by = "'type'"
    if "type" not in value:
        text = f"Unable to extract tag using discriminator {by}"
        errors.add("union_tag_not_found", place, text, value, discriminator=by)
        return None
    tag, tags = value["type"], ", ".join(f"'{tag}'" for tag in _THINKING)
    if not isinstance(tag, str) or tag not in _THINKING:
        text = f"Input tag '{tag}' found using {by} does not match any of the expected tags: {tags}"
        errors.add("union_tag_invalid", place, text, value, discriminator=by, tag=str(tag), expected_tags=tags)
        return None
    return _THINKING[tag](value, (*place, tag), errors)


def _tool_choice(value: Any, place: Place, errors: Errors) -> Any:
    fields = {
        "type": Field(literal("auto", "any", "tool", "none"), required=True),
        "name": Field(optional(string)),
        "disable_parallel_tool_use": Field(optional(boolean)),
    }
    tried = Errors()
    choice = record(fields)(value, place, tried)
    if not tried.found and choice["type"] == "tool" and not choice["name"]:
        _refused(tried, place, "tool_choice.name is required when type is 'tool'", value)
    errors.found += tried.found
    return choice


_CHAT_TEMPLATE = Field(optional(mapping()))
MESSAGES_FIELDS = {
    "model": Field(_model, required=True),
    "messages": Field(listing(_message), required=True),
    "max_tokens": Field(_max_tokens, required=True),
    "metadata": Field(optional(mapping())),
    "output_config": Field(optional(_OUTPUT)),
    "thinking": Field(optional(_thinking)),
    "stop_sequences": Field(optional(listing(string, MOST_STOPS))),
    "stream": Field(optional(boolean), False),
    "system": Field(optional(_system)),
    "temperature": Field(optional(number)),
    "tool_choice": Field(optional(_tool_choice)),
    "tools": Field(optional(listing(_TOOL))),
    "top_k": Field(optional(integer())),
    "top_p": Field(optional(number)),
    "cache_salt": Field(optional(bounded_string(1024))),
    "watermarking": Field(optional(boolean)),
    "kv_transfer_params": Field(optional(mapping())),
    "ec_transfer_params": Field(optional(mapping())),
    "vllm_xargs": Field(optional(mapping(anything))),
    "chat_template_kwargs": _CHAT_TEMPLATE,
}
COUNTED_FIELDS = {
    name: MESSAGES_FIELDS[name]
    for name in ("model", "messages", "output_config", "system", "thinking", "tool_choice", "tools")
} | {"chat_template_kwargs": _CHAT_TEMPLATE}
"""The fields of ``/v1/messages/count_tokens``."""


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's format."""
    found = error.body["error"]
    return {"type": "error", "error": {"type": found["type"], "message": found["message"]}}


def read_messages(body: Any) -> dict[str, Any]:
    """Parse a body of ``/v1/messages``. Raises `ApiError` with all errors."""
    errors = Errors()
    fields: dict[str, Any] = record(MESSAGES_FIELDS)(body, ("body",), errors)
    thinking = fields.get("thinking")
    if not errors.found and thinking and thinking.get("budget_tokens", 0) >= fields["max_tokens"]:
        _refused(errors, ("body",), "thinking.budget_tokens must be less than max_tokens", body)
    errors.refuse()
    return fields


def as_chat(fields: Mapping[str, Any], served: ServedModel, header_id: str | None) -> GenerationRequest:
    """Convert a request to a chat. Raises `ApiError` with vLLM's response."""
    body = {
        "model": fields["model"],
        "messages": list(_conversation(fields)),
        "max_tokens": fields["max_tokens"],
        "max_completion_tokens": fields["max_tokens"],
        "stop": fields["stop_sequences"],
        **{name: fields[name] for name in ("temperature", "top_p", "top_k", "cache_salt")},
    }
    run_checks(body, CHAT_CHECKS)
    chat = {**read_body(body, CHAT_FIELDS), "tool_choice": _choice(fields), "stream": fields["stream"]}
    if ((fields["output_config"] or {}).get("format") or {}).get("schema") is not None:
        chat["response_format"] = {"type": "json_schema"}
    chat["thinking_token_budget"] = (fields["thinking"] or {}).get("budget_tokens")
    return converse(chat, served, header_id)


def count_tokens(body: Any, served: ServedModel) -> dict[str, Any]:
    """The response of ``/v1/messages/count_tokens``. Raises `AnthropicError` or `ApiError` with vLLM's response."""
    fields = read_body(body, COUNTED_FIELDS)
    try:
        chat = read_body({"messages": list(_conversation(fields))}, CHAT_FIELDS)
        check_model(fields, served)
        check_tool_parser(_choice(fields))
        count = len(read_conversation(chat, served, None).tokens)
    except ApiError as error:
        raise AnthropicError(error) from error
    return {"input_tokens": count, "context_management": {"original_input_tokens": count}}


class AnthropicError(Exception):
    """An error that is sent in Anthropic's format."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(str(error))
        self.status = error.status
        self.body = anthropic_error(error)


def _choice(fields: Mapping[str, Any]) -> Any:
    """The tool choice in OpenAI's format; ``auto`` by default if there are tools."""
    choice = fields["tool_choice"]
    if choice is None:
        return None if fields["tools"] is None else "auto"
    if choice["type"] == "tool":
        return {"type": "function", "function": {"name": choice["name"]}}
    return "required" if choice["type"] == "any" else choice["type"]


def _conversation(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages in OpenAI's format."""
    system = _system_text(fields["system"])
    if system:
        yield {"role": "system", "content": system}
    for message in fields["messages"]:
        role, content = message["role"], message["content"]
        if role == "system":
            if _changed_tools(content):
                raise not_modeled("tools that are added or removed within a conversation", "messages")
            if text := _system_text(content):
                yield {"role": role, "content": text}
        elif isinstance(content, str):
            yield {"role": role, "content": content}
        else:
            yield from _converted(role, content)


def _system_text(content: Any) -> str:
    texts = [content] if isinstance(content, str) else [block["text"] for block in content or () if _is_text(block)]
    return "".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _is_text(block: Mapping[str, Any]) -> bool:
    return block["type"] == "text" and bool(block["text"])


_IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


def _converted(role: str, blocks: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Convert a message of blocks; tool results become separate messages before it."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block["type"]
        if _is_text(block):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image" and block["source"]:
            parts.append(_IMAGE)
        elif kind == "tool_use":
            function = {"name": block["name"] or "", "arguments": json.dumps(block["input"] or {})}
            calls.append({"id": block["id"] or "", "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            yield from _results(block)
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block['content'] or ''}"})
    message: dict[str, Any] = {"role": role}
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts
    if parts or role != "user":
        yield message


def _results(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Convert a tool's result to messages: its text, then its images."""
    content = block["content"] or ""
    if isinstance(content, list):
        images = any(item.get("type") == "image" for item in content)
        content = "\n".join(str(item.get("text", "")) for item in content if item.get("type") == "text")
    else:
        images = False
    yield {"role": "tool", "tool_call_id": block["tool_use_id"] or "", "content": content}
    if images:
        yield {"role": "user", "content": [_IMAGE]}


def _stop_reason(reason: str | None, stopped_by: str | int | None) -> tuple[str | None, str | None]:
    """``stop_reason`` and ``stop_sequence``."""
    if reason == "length":
        return "max_tokens", None
    if reason != "stop":
        return None, None
    return ("stop_sequence", stopped_by) if isinstance(stopped_by, str) else ("end_turn", None)


@dataclass(slots=True)
class MessageWriter:
    """Writes the answer to one request, complete or as events."""

    ask: GenerationRequest
    output: GeneratedAnswer
    style: Style
    _shown: int = 0
    _begun: bool = False

    def whole(self) -> dict[str, Any]:
        """The complete answer."""
        request = self.output.request
        reason, sequence = _stop_reason(self.output.finish_reason, self.output.stop_reason)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        return {
            **self._head([{"type": "text", "text": self.output.text(request.generated)}]),
            **{name: value for name, value in ended.items() if value is not None},
            "usage": self._usage(request.generated, ended=True),
        }

    def begin(self) -> bytes:
        """The event before the first token."""
        message = {**self._head([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(0, ended=False)}
        return self._event("message_start", message=message)

    def tokens(self, _output: GeneratedAnswer, _start: int, end: int) -> bytes:
        """The event for the text up to the token at ``end``; the first one is preceded by its block's event."""
        text = self.output.text(end)
        delta, self._shown = text[self._shown :], max(self._shown, len(text))
        if not delta:
            return b""
        written = b""
        if not self._begun:
            self._begun = True
            written = self._event("content_block_start", content_block={"type": "text", "text": ""}, index=0)
        return written + self._event("content_block_delta", delta={"type": "text_delta", "text": delta}, index=0)

    def end(self) -> bytes:
        """The events after the last token."""
        reason, sequence = _stop_reason(self.output.finish_reason, self.output.stop_reason)
        usage = self._usage(self.output.request.generated, ended=True)
        return (
            (self._event("content_block_stop", index=0) if self._begun else b"")
            + self._event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)
            + self._event("message_stop")
        )

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.ask.id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self.ask.model,
        }

    def _usage(self, generated: int, *, ended: bool) -> dict[str, Any]:
        """Token counts. If cached tokens are reported, they are not included in the input tokens."""
        request = self.output.request
        if not ended or not self.style.usage_details:
            return {"input_tokens": request.prompt_length, "output_tokens": generated}
        cached = request.cached or 0
        return {
            "input_tokens": request.prompt_length - cached,
            "output_tokens": generated,
            "cache_read_input_tokens": cached,
        }

    def _event(self, kind: str, **values: Any) -> bytes:
        return event({"type": kind, **values}, kind)


def late_error(error: ApiError) -> bytes:
    """The event of a stream that the engine rejects."""
    body = {"type": "error", "error": {"type": "internal_error", "message": error.body["error"]["message"]}}
    return event(body, "error")

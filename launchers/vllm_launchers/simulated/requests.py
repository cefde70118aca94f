"""Requests: the fields of vLLM 0.32's request models, the order of their checks, and the engine's input.

Each body is processed in vLLM's own order: checks of the raw body, types of all fields, the model's name, the
renderer's checks, lengths, sampling parameters. Errors have vLLM's messages (``entrypoints/openai``, ``renderers``,
``sampling_params.py``).
"""

from __future__ import annotations

import json
import math
import os
import random
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.scheduler import Parent, Request
from vllm_launchers.simulated.validation import (
    INT64_MAX,
    ApiError,
    Errors,
    Field,
    Reader,
    anything,
    bad_request,
    boolean,
    bounded_string,
    either,
    integer,
    invalid,
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
from vllm_launchers.simulated.vocabulary import LONGEST_PIECE, Vocabulary, find_stop, output_text

COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of a completion, as in OpenAI's API."""
MEDIAN_ANSWER = 256
"""Median length of answers that end on their own, in tokens."""
ANSWER_SPREAD = 0.6
"""Standard deviation of the logarithm of an answer's length: nine in ten are between 95 and 690 tokens."""
MOST_SEQUENCES = 16_384
"""vLLM's ``VLLM_MAX_N_SEQUENCES``."""
MOST_STOPS = 4
"""vLLM's ``VLLM_MAX_STOP_STRINGS``."""
MOST_PROMPTS = 1024
"""vLLM's ``VLLM_MAX_COMPLETION_PROMPTS``."""

Check = Callable[[Mapping[str, Any]], None]


class ServedModel(msgspec.Struct, frozen=True):
    """The server's properties that requests depend on. ``size``: the size of the model's vocabulary."""

    names: tuple[str, ...]
    max_model_len: int
    vocabulary: Vocabulary
    size: int
    max_logprobs: int = 20
    adapters: dict[str, str] = msgspec.field(default_factory=dict)
    """LoRA adapters by name, with their source. They answer like the model."""


class Prompt(msgspec.Struct, frozen=True):
    """A prompt; ``text`` is None if it was given as token ids."""

    tokens: list[int]
    text: str | None


class GenerationRequest(msgspec.Struct, frozen=True):
    """A parsed and checked request. ``fields``: those of its body, with defaults filled in."""

    kind: str
    """``completion``, ``chat`` or ``response``."""
    id: str
    model: str
    prompts: tuple[Prompt, ...]
    n: int
    max_tokens: int | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    fields: Mapping[str, Any]
    served: ServedModel
    late: ApiError | None = None
    """The engine's rejection. By then a stream has begun, so it gets the error in its first event."""

    @property
    def chat(self) -> bool:
        """Whether it is a conversation."""
        return self.kind != "completion"

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        stop = self.fields.get("stop") or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    def sequences(self) -> list[GeneratedAnswer]:
        """One sequence for each prompt and choice, in the order of the choices' indices."""
        found = []
        for place, prompt in enumerate(self.prompts):
            seed = zlib.crc32(repr(prompt.tokens[-4096:]).encode()) ^ (self.fields.get("seed") or 0) % 2**32
            limit = self.limit(prompt)
            parent = Parent(self.n, self.n) if self.n > 1 else None
            for choice in range(self.n):
                # A client may use the same id for two requests, but the engine's own ids must differ.
                name = f"{choice}_{self.id}-{place}-{uuid.uuid4().hex[:8]}"
                index = place * self.n + choice
                output = plan_sequence(self, prompt, index, name, seed + choice * 7_919, limit)
                output.request.parent = parent
                found.append(output)
        return found

    def limit(self, prompt: Prompt) -> int:
        """Maximum number of tokens to generate for a prompt."""
        room = self.served.max_model_len - len(prompt.tokens)
        if self.kind == "completion" and self.fields.get("echo") and self.max_tokens == 0:
            return 1  # vLLM generates one token but does not show it
        return room if self.max_tokens is None else min(self.max_tokens, room)


@dataclass(slots=True)
class GeneratedAnswer:
    """One answer in progress: the scheduler's request, and where its text ends.

    ``visible``: how many characters of the final text are shown, None for all. ``stop_reason``: the stop string or
    token that ends it. Until it ends, the last ``held_back`` characters may be part of a stop string.
    """

    index: int
    prompt: Prompt
    request: Request
    stop_reason: str | int | None = None
    visible: int | None = None
    held_back: int = 0

    @property
    def finish_reason(self) -> str | None:
        """The finish reason, in the API's terms."""
        return None if self.request.finished is None else str(self.request.finished)

    def text(self, end: int) -> str:
        """The text of the first ``end`` tokens that a client sees."""
        text = output_text(self.request.seed, 0, end)
        if self.visible is not None and end >= self.request.output_length:
            return text[: self.visible]
        return text if self.request.finished is not None else text[: len(text) - self.held_back]

    def tokens(self, start: int, end: int) -> list[int]:
        """The token ids generated at positions ``start`` to ``end``."""
        return self.request.tokens[self.request.prompt_length + start : self.request.prompt_length + end]


def plan_sequence(
    ask: GenerationRequest, prompt: Prompt, index: int, name: str, seed: int, limit: int
) -> GeneratedAnswer:
    """Decide how an answer ends: by the limit, a random length, a stop token or a stop string."""
    fields = ask.fields
    least = int(fields.get("min_tokens") or 0)
    length = _output_length(ask, limit, seed, least)
    reason: str | int | None = None
    visible: int | None = None
    sample = ask.served.vocabulary.output_token
    shown = bool(fields.get("include_stop_str_in_output"))
    ids = frozenset(fields.get("stop_token_ids") or ())
    hit = next((p for p in range(least, length) if sample(seed, p) in ids), None) if ids else None
    if hit is not None:
        length, reason = hit + 1, sample(seed, hit)
        visible = None if shown else len(output_text(seed, 0, hit))
    held_back = 0
    if ask.stops:
        held_back = 0 if shown else max(map(len, ask.stops)) - 1
        pieces = [output_text(seed, position, position + 1) for position in range(length)]
        found = find_stop(pieces, ask.stops, least)
        if found is not None:
            length, reason, begin = found
            visible = begin + len(str(reason)) if shown else begin
    request = Request(name, list(prompt.tokens), limit, length, seed=seed, sample=sample, stopped=reason is not None)
    return GeneratedAnswer(index, prompt, request, reason, visible, held_back)


def _output_length(ask: GenerationRequest, limit: int, seed: int, least: int) -> int:
    """Number of generated tokens: all with ``ignore_eos``, else random but always the same for the same prompt.

    Where an answer ends on its own does not depend on the limit, so a low limit nearly always truncates it. The token
    that ends it comes after the first ``least`` tokens, as in vLLM.
    """
    if ask.fields.get("ignore_eos"):
        return limit
    drawn = round(random.Random(seed).lognormvariate(math.log(MEDIAN_ANSWER), ANSWER_SPREAD))
    return min(limit, max(drawn, least + 1))


# ---- fields, in the order in which vLLM's models declare them, which is the order of errors

_INT = integer()
_INT64 = integer(-(2**63), INT64_MAX)
_STREAM_OPTIONS = record(
    {name: Field(optional(boolean), False) for name in ("include_usage", "continuous_usage_stats")}
)
_RESPONSE_FORMAT = either(
    record(
        {
            "type": Field(literal("text", "json_object", "json_schema"), required=True),
            "json_schema": Field(optional(record({"name": Field(string, required=True)}))),
        }
    ),
    record({"type": Field(literal("structural_tag"), required=True), "format": Field(anything, required=True)}),
    record(
        {
            "type": Field(literal("structural_tag"), required=True),
            "structures": Field(listing(anything), required=True),
            "triggers": Field(listing(string), required=True),
        }
    ),
)
_STOP = either(string, listing(string, MOST_STOPS))
_TOOL = record(
    {
        "type": Field(literal("function"), "function"),
        "function": Field(record({"name": Field(string, required=True)}), required=True),
    }
)
_NAMED_TOOL = record({"function": Field(record({"name": Field(string, required=True)}), required=True)})
_TOKEN = integer(0)


def _prompt(value: Any, place: tuple[str | int, ...], errors: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return value
    return _PROMPT(value, place, errors)


_PROMPT = either(listing(_TOKEN), listing(listing(_TOKEN)), string, listing(string))


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BOOLEANS = """
    add_generation_prompt add_special_tokens background continue_final_message echo ignore_eos include_reasoning
    include_stop_str_in_output logprobs parallel_tool_calls return_prompt_text return_token_ids
    return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens store stream use_beam_search
"""
_STRINGS = "chat_template instructions model previous_response_id request_id session_id suffix user"
_NUMBERS = "frequency_penalty length_penalty min_p presence_penalty repetition_penalty temperature top_p"
_INTEGERS = """
    max_completion_tokens max_output_tokens max_tokens max_tool_calls min_tokens n prompt_logprobs thinking_token_budget
    top_k top_logprobs
"""
_READERS: dict[str, Reader] = {
    **dict.fromkeys(_BOOLEANS.split(), boolean),
    **dict.fromkeys(_STRINGS.split(), string),
    **dict.fromkeys(_NUMBERS.split(), number),
    **dict.fromkeys(_INTEGERS.split(), _INT),
    **dict.fromkeys(("priority", "seed"), _INT64),
    **dict.fromkeys(("allowed_token_ids", "logprob_token_ids", "stop_token_ids"), listing(_INT)),
    **dict.fromkeys(
        ("chat_template_kwargs", "ec_transfer_params", "kv_transfer_params", "structured_outputs"), mapping()
    ),
    "bad_words": listing(string),
    "cache_salt": bounded_string(1024),
    "documents": listing(mapping(string)),
    "logit_bias": mapping(number),
    "prompt": _prompt,
    "prompt_embeds": anything,
    "reasoning_effort": literal(*EFFORTS),
    "response_format": _RESPONSE_FORMAT,
    "stop": _STOP,
    "stream_interval": integer(1),
    "stream_options": _STREAM_OPTIONS,
    "tool_choice": either(literal("none", "auto", "required"), _NAMED_TOOL),
    "tools": listing(_TOOL),
    "truncate_prompt_tokens": integer(-1, INT64_MAX),
    "truncation_side": literal("left", "right"),
}
"""Types of fields, which are the same in nearly all APIs."""


def fields_of(
    names: str, plain: str = "", defaults: Mapping[str, Any] = MappingProxyType({}), **own: Reader
) -> dict[str, Field]:
    """Fields in order. They may be null, except the ``plain`` ones; ``own``: types specific to this API."""
    readers, never_null = {**_READERS, **own}, plain.split()
    return {
        name: Field(readers[name] if name in never_null else optional(readers[name]), defaults.get(name))
        for name in names.split()
    }


_SAMPLING = """
    use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
"""
_TAIL = """
    priority request_id session_id return_tokens_as_token_ids return_token_ids return_prompt_text cache_salt
    kv_transfer_params ec_transfer_params stream_interval thinking_token_budget
"""
_PLAIN = """
    use_beam_search length_penalty include_stop_str_in_output ignore_eos min_tokens bad_words skip_special_tokens
    spaces_between_special_tokens priority request_id
"""
_DEFAULTS: dict[str, Any] = {"stop": [], "min_tokens": 0, "ignore_eos": False, "priority": 0, "n": 1}

COMPLETION_FIELDS = fields_of(
    f"""
    model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user {_SAMPLING} allowed_token_ids prompt_logprobs logprob_token_ids
    bad_words prompt_embeds add_special_tokens response_format structured_outputs {_TAIL}
    """,
    f"{_PLAIN} n add_special_tokens",
    {**_DEFAULTS, "max_tokens": COMPLETION_TOKENS},
    logprobs=_INT,
)
CHAT_FIELDS = {
    "messages": Field(lambda value, place, errors: _messages(value, place, errors), required=True),
    **fields_of(
        f"""
        model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
        response_format seed stop stream stream_options temperature top_p tools tool_choice reasoning_effort
        include_reasoning parallel_tool_calls user {_SAMPLING} prompt_logprobs logprob_token_ids allowed_token_ids
        bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
        chat_template_kwargs structured_outputs {_TAIL}
        """,
        f"{_PLAIN} include_reasoning echo add_generation_prompt continue_final_message",
        {**_DEFAULTS, "add_generation_prompt": True, "tool_choice": "none"},
    ),
}
_NO_TEXT = ("string_type", "Input should be a valid string")
_NO_PARTS = ("iterable_type", "Input should be iterable")
_NO_LIST = ("list_type", "Input should be a valid list")


class _MessageKind(msgspec.Struct, frozen=True):
    """One of the types that vLLM tries for a message: its fields in order, and the types of its ``content``.

    ``role``: its only role; empty if any string is allowed. ``wrong``: the errors for other content.
    """

    name: str
    fields: tuple[str, ...] = ("content", "role")
    takes: tuple[type, ...] = (str, list, dict)
    wrong: tuple[tuple[str, str], ...] = (_NO_TEXT, _NO_PARTS)
    role: str = ""
    optional: tuple[str, ...] = ()


_NULL = type(None)
_MESSAGE_KINDS = (
    _MessageKind("ChatCompletionDeveloperMessageParam", role="developer"),
    _MessageKind("ChatCompletionSystemMessageParam", role="system"),
    _MessageKind("ChatCompletionUserMessageParam", role="user"),
    _MessageKind(
        "ChatCompletionAssistantMessageParam",
        ("role", "content"),
        (str, list, dict, _NULL),
        role="assistant",
        optional=("content",),
    ),
    _MessageKind("ChatCompletionToolMessageParam", ("content", "role", "tool_call_id"), role="tool"),
    _MessageKind(
        "ChatCompletionFunctionMessageParam", ("content", "name", "role"), (str, _NULL), (_NO_TEXT,), role="function"
    ),
    _MessageKind(
        "CustomChatCompletionMessageParam",
        ("role", "content"),
        (str, list),
        (_NO_TEXT, _NO_LIST),
        optional=("content",),
    ),
    _MessageKind("Message", ("author", "content"), (list,), (_NO_LIST,), optional=("content",)),
)


def _messages(value: Any, place: tuple[str | int, ...], errors: Any) -> Any:
    """Messages, each of one of the eight types that vLLM tries; if it is none, all their errors are reported."""
    if not isinstance(value, list):
        errors.add("list_type", place, "Input should be a valid list", value)
        return []
    for index, message in enumerate(value):
        tried = Errors()
        for kind in _MESSAGE_KINDS:
            own = Errors()
            _read_as(kind, message, (*place, index, kind.name), own)
            if not own.found:
                break
            tried.found += own.found
        else:
            errors.found += tried.found
    return value


def _read_as(kind: _MessageKind, message: Any, place: tuple[str | int, ...], errors: Errors) -> None:
    """Record the errors of a message as one of the types."""
    if not isinstance(message, dict):
        if kind.name == "Message":
            text = "Input should be a valid dictionary or object to extract fields from"
            errors.add("model_attributes_type", place, text, message)
        else:
            errors.add("dict_type", place, "Input should be a valid dictionary", message)
        return
    for name in kind.fields:
        where = (*place, name)
        if name not in message:
            if name not in kind.optional:
                errors.add("missing", where, "Field required", message)
        elif name == "role":
            (literal(kind.role) if kind.role else string)(message[name], where, errors)
        elif name == "content" and not isinstance(message[name], kind.takes):
            for error, text in kind.wrong:
                errors.add(error, where, text, message[name])


# ---- checks of the raw body, each in vLLM's order


def _check_stream_options(body: Mapping[str, Any]) -> None:
    if body.get("stream_options") and not body.get("stream"):
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")


def _check_prompt(body: Mapping[str, Any]) -> None:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > MOST_PROMPTS and not all(isinstance(item, int) for item in prompt):
        raise invalid(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of {MOST_PROMPTS}. To increase this "
            "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    if prompt in (None, "") and not body.get("prompt_embeds"):
        raise invalid("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


def _check_counts(body: Mapping[str, Any], name: str) -> None:
    for key in ("prompt_logprobs", name):
        value = body.get(key)
        if value is not None and not isinstance(value, int | float):
            raise invalid(f"`{key}` must be an integer.", key, value)
    count = body.get("prompt_logprobs")
    if count is not None:
        if body.get("stream") and (count > 0 or count == -1):
            raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
        if count < 0 and count != -1:
            raise invalid("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", count)
    count = body.get(name)
    if count is not None and count < 0 and count != -1:
        raise invalid(f"`{name}` must be a positive value or -1.", name, count)


def _check_completion_logprobs(body: Mapping[str, Any]) -> None:
    if body.get("logprob_token_ids") and body.get("logprobs") is None:
        raise invalid("when using `logprob_token_ids`, `logprobs` must be set.", "logprob_token_ids")
    _check_counts(body, "logprobs")


def _check_chat_logprobs(body: Mapping[str, Any]) -> None:
    if body.get("logprob_token_ids") and not body.get("logprobs"):
        raise invalid("when using `logprob_token_ids`, `logprobs` must be set to true.", "logprob_token_ids")
    _check_counts(body, "top_logprobs")
    count = body.get("top_logprobs")
    if count is not None and (count == -1 or count > 0) and not body.get("logprobs"):
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")


def _check_constraints(body: Mapping[str, Any]) -> None:
    given = body.get("structured_outputs")
    if isinstance(given, dict) and sum(given.get(key) is not None for key in ("json", "regex", "choice")) > 1:
        raise invalid(
            "You can only use one kind of constraints for structured outputs ('json', 'regex' or 'choice').",
            "structured_outputs" if "prompt" in body else None,
        )


def _check_response_format(body: Mapping[str, Any]) -> None:
    given = body.get("response_format")
    if isinstance(given, dict) and given.get("type") == "json_schema" and given.get("json_schema") is None:
        raise invalid(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )


def _check_salt(body: Mapping[str, Any]) -> None:
    salt = body.get("cache_salt")
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise invalid("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > 128 or any(character in "@/\\\0" for character in salt):
        raise invalid(
            "Parameter 'cache_salt' must be at most 128 characters and must not contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )


def check_continued(body: Mapping[str, Any]) -> None:
    """Reject a message that should be both continued and answered. Raises `ApiError`."""
    if body.get("continue_final_message") and body.get("add_generation_prompt"):
        raise invalid("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")


_TOOL_USAGE = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'


def _check_tools(body: Mapping[str, Any]) -> None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        raise invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    if choice is None or choice == "none":
        return
    if tools is None:
        raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, dict):
        _check_named_tool(choice, tools)
    elif choice not in ("auto", "required"):
        raise invalid(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )


def check_tool_names(choice: Mapping[str, Any], tools: Any) -> None:
    """Reject a named tool of ``/v1/responses`` that is not offered."""
    offered = [tool.get("name") for tool in tools or () if isinstance(tool, dict)]
    if not choice.get("name") or choice["name"] not in offered:
        raise invalid("Tool choice 'function' not found in 'tools' parameter.", "tool_choice")


def _check_named_tool(choice: Mapping[str, Any], tools: Any) -> None:
    function = choice.get("function")
    if not isinstance(function, dict):
        raise invalid(
            f"Invalid value for `function`: `{function}` in `tool_choice`! {_TOOL_USAGE}", "tool_choice.function"
        )
    if "name" not in function:
        raise invalid(
            f"Expected field `name` in `function` in `tool_choice`! {_TOOL_USAGE}", "tool_choice.function.name"
        )
    name = function["name"]
    if not isinstance(name, str) or not name:
        raise invalid(
            f"Invalid `name` in `function`: `{name}` in `tool_choice`! {_TOOL_USAGE}", "tool_choice.function.name"
        )
    offered = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    if not any(isinstance(tool, dict) and tool.get("name") == name for tool in offered):
        raise invalid("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")


# pydantic runs a model's checks of the raw body from the last declared to the first.
_COMPLETION_CHECKS: tuple[Check, ...] = (
    _check_prompt, _check_stream_options, _check_completion_logprobs, _check_constraints, _check_response_format,
    _check_salt,
)  # fmt: skip
CHAT_CHECKS: tuple[Check, ...] = (
    check_continued, _check_tools, _check_constraints, _check_chat_logprobs, _check_stream_options,
    _check_response_format, _check_salt,
)  # fmt: skip


def read_completion(body: Any, served: ServedModel, header_id: str | None = None) -> GenerationRequest:
    """Parse a body of ``/v1/completions``. Raises `ApiError` with vLLM's response."""
    run_checks(body, _COMPLETION_CHECKS)
    if isinstance(body, dict) and body.get("max_tokens") is None:
        body = {**body, "max_tokens": COMPLETION_TOKENS}
    fields = read_body(body, COMPLETION_FIELDS)
    check_model(fields, served)
    if fields["use_beam_search"]:
        raise not_modeled("beam search", "use_beam_search")
    _check_suffix(fields)
    if fields["prompt_embeds"]:
        raise not_modeled("prompts given as embeddings", "prompt_embeds")
    prompts = _completion_prompts(fields["prompt"])
    check_lengths(fields, served, fields["max_tokens"], "max_tokens")
    read = tuple(read_prompt(prompt, fields, served, fields["max_tokens"]) for prompt in prompts)
    return check_request("completion", f"cmpl-{_name(fields, header_id)}", read, fields, served, fields["max_tokens"])


def _check_suffix(fields: Mapping[str, Any]) -> None:
    """Reject a suffix, as vLLM does for all models except fill-in-the-middle ones."""
    if fields["suffix"] is None:
        return
    prompts = fields["prompt"] if isinstance(fields["prompt"], list) else [fields["prompt"]]
    if fields["echo"]:
        message = "Echo is unsupported with suffix."
    elif fields["prompt_embeds"] is not None:
        message = "suffix is not supported with prompt_embeds"
    elif fields["truncate_prompt_tokens"] is not None:
        message = "suffix is not supported with truncate_prompt_tokens"
    elif not all(isinstance(prompt, str) for prompt in prompts):
        message = "suffix requires text prompt input for FIM completion rendering"
    else:
        message = "suffix is only supported for models with FIM completion rendering"
    raise bad_request(message, "suffix")


def read_chat(body: Any, served: ServedModel, header_id: str | None = None) -> GenerationRequest:
    """Parse a body of ``/v1/chat/completions``. Raises `ApiError` with vLLM's response."""
    run_checks(body, CHAT_CHECKS)
    if isinstance(body, dict) and body.get("tools") and "tool_choice" not in body:
        body = {**body, "tool_choice": "auto"}
    return converse(read_body(body, CHAT_FIELDS), served, header_id)


def converse(fields: Mapping[str, Any], served: ServedModel, header_id: str | None = None) -> GenerationRequest:
    """Create the request of a conversation from its parsed fields. Raises `ApiError` with vLLM's response."""
    check_model(fields, served)
    check_tool_parser(fields["tool_choice"])
    asked = fields["max_completion_tokens"]
    name = "max_tokens" if asked is None else "max_completion_tokens"
    asked = fields["max_tokens"] if asked is None else asked
    prompt = read_conversation(fields, served, asked, name)
    if fields["use_beam_search"]:
        raise not_modeled("beam search", "use_beam_search")
    return check_request("chat", f"chatcmpl-{_name(fields, header_id)}", (prompt,), fields, served, asked)


def read_conversation(
    fields: Mapping[str, Any], served: ServedModel, asked: int | None, name: str = "max_tokens"
) -> Prompt:
    """A conversation as the model gets it; ``asked``: its token limit, from field ``name``."""
    if fields["chat_template"] is not None:
        raise bad_request(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    text = chat_text(fields["messages"], fields, served)
    check_lengths(fields, served, asked, name)
    return read_prompt(text, fields, served, asked)


def run_checks(body: Any, checks: Sequence[Check]) -> None:
    """Check a raw body if it is an object. Raises `ApiError`."""
    if isinstance(body, dict):
        for check in checks:
            check(body)


def check_model(fields: Mapping[str, Any], served: ServedModel) -> None:
    """Reject a model that is not served. Raises `ApiError` (404)."""
    name = fields.get("model")
    if name and name not in served.names and name not in served.adapters:
        raise ApiError(
            404,
            "NotFoundError",
            f"The model `{name}` does not exist. Valid aliases: {', '.join(served.names)}.",
            "model",
        )


def check_tool_parser(choice: Any) -> None:
    """Reject tool choices that need a tool parser, which is not simulated: answers are words and never call a tool."""
    if choice in (None, "none"):
        return
    if choice == "auto":
        raise bad_request('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    choice_text = f'function "{choice["function"]["name"]}"' if isinstance(choice, dict) else f'"{choice}"'
    raise bad_request(f"tool_choice={choice_text} requires --tool-call-parser to be set")


def _name(fields: Mapping[str, Any], header_id: str | None) -> str:
    return header_id or fields.get("request_id") or uuid.uuid4().hex[:16]


def check_request(
    kind: str, name: str, prompts: tuple[Prompt, ...], fields: Mapping[str, Any], served: ServedModel, most: int | None
) -> GenerationRequest:
    """Create the request, with checked parameters; a stream gets the engine's own rejections as an event.

    Raises `ApiError` with vLLM's response.
    """
    options = fields.get("stream_options") or {}
    usage = bool(options.get("include_usage"))
    ask = GenerationRequest(
        kind=kind,
        id=name,
        model=fields.get("model") or served.names[0],
        prompts=prompts,
        n=1 if fields.get("n") is None else fields["n"],
        max_tokens=most,
        stream=bool(fields.get("stream")),
        include_usage=usage,
        continuous_usage=usage and bool(options.get("continuous_usage_stats")),
        fields=fields,
        served=served,
    )
    for constraint in ("structured_outputs", "logprob_token_ids"):
        if fields.get(constraint):
            raise not_modeled(f"`{constraint}`", constraint)
    if (fields.get("response_format") or {}).get("type") not in (None, "text"):
        raise not_modeled("output that is bound to a format", "response_format")
    for prompt in ask.prompts:
        check_sampling(fields, ask.limit(prompt), ask.n)
    try:
        check_engine(ask)
    except ApiError as error:
        if not ask.stream or kind == "response":
            raise
        return replace(ask, late=error)
    return ask


# ---- prompts


def _completion_prompts(prompt: Any) -> list[str | list[int]]:
    if prompt == []:
        raise bad_request("You must pass at least one prompt")
    if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
        return [prompt]
    return list(prompt)


def check_lengths(fields: Mapping[str, Any], served: ServedModel, asked: int | None, name: str) -> None:
    """Reject output or truncation limits beyond the context length. Raises `ApiError`."""
    length = served.max_model_len
    if asked is not None and asked > length:
        raise invalid(
            f"{name}={asked} cannot be greater than max_model_len={length}. Please request fewer output tokens.",
            name,
            asked,
        )
    truncate = fields.get("truncate_prompt_tokens")
    if truncate is not None and truncate > length:
        raise invalid(
            f"truncate_prompt_tokens={truncate} cannot be greater than max_model_len = {length}. "
            "Please request a smaller truncation size.",
            "truncate_prompt_tokens",
            truncate,
        )


def read_prompt(prompt: str | list[int], fields: Mapping[str, Any], served: ServedModel, asked: int | None) -> Prompt:
    """A prompt as tokens, truncated if requested, and rejected if longer than the context."""
    length = served.max_model_len
    truncate = fields.get("truncate_prompt_tokens")
    text = prompt if isinstance(prompt, str) else None
    if text is not None and truncate is None and len(text) > length * LONGEST_PIECE:
        raise invalid(
            f"This model's maximum context length is {length} tokens. However, your prompt contains {len(text)} "
            f"characters (more than {length * LONGEST_PIECE} characters, which is the upper bound for {length} input "
            "tokens). Please reduce the length of the input prompt.",
            "input_text",
            len(text),
        )
    tokens = served.vocabulary.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if truncate is not None:
        keep = (length - 1 if asked else length) if truncate < 0 else truncate
        tokens = tokens[-keep:] if fields.get("truncation_side") == "left" and keep else tokens[:keep]
    elif text is not None:
        tokens = tokens[: length + 1]  # vLLM's tokenizer stops there
    if len(tokens) > length:
        at_least = "at least " if len(tokens) == length + 1 else ""
        raise invalid(
            f"This model's maximum context length is {length} tokens. However, your prompt contains {at_least}"
            f"{len(tokens)} input tokens, which exceeds this limit even without any output tokens. "
            "Please reduce the length of the input prompt.",
            "input_tokens",
            len(tokens),
        )
    if not tokens:
        raise bad_request("The decoder prompt cannot be empty")
    return Prompt(tokens, text)


_EITHER_CONTINUED_OR_BEGUN = (
    "continue_final_message and add_generation_prompt are not compatible. Use continue_final_message when you want the "
    "model to continue the final message, and add_generation_prompt when you want to add a header that will prompt it "
    "to start a new assistant message instead."
)


def chat_text(messages: Sequence[Any], fields: Mapping[str, Any], served: ServedModel) -> str:
    """The text that the simulated model's chat template makes of a conversation."""
    if not messages:
        raise bad_request("Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = [f"<|start|>{message['role']}\n{content_text(message, served)}<|end|>\n" for message in messages]
    text = "".join(parts)
    if fields.get("continue_final_message"):
        if fields.get("add_generation_prompt", True):
            raise bad_request(_EITHER_CONTINUED_OR_BEGUN)
        return text.removesuffix("<|end|>\n")
    return f"{text}<|start|>assistant\n" if fields.get("add_generation_prompt", True) else text


def content_text(message: Mapping[str, Any], served: ServedModel) -> str:
    """A message's content as text. Raises `ApiError` for anything else."""
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request("content must be a text or a list of parts.", "messages")
    parts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            parts.append(part["text"])
        elif kind in ("image_url", "input_image", "video_url", "audio_url", "input_audio", "image_embeds"):
            raise bad_request(f"{served.names[0]} is not a multimodal model")
        else:
            raise bad_request(f"Unknown part type: {json.dumps(kind)}")
    return "\n".join(parts)


# ---- sampling parameters


_RANGES: tuple[tuple[str, Callable[[float], bool], str, bool], ...] = (
    ("presence_penalty", lambda value: -2 <= value <= 2, "be in [-2, 2]", False),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "be in [-2, 2]", False),
    ("repetition_penalty", math.isfinite, "be a finite number", False),
    ("repetition_penalty", lambda value: value > 0, "be greater than zero", False),
    ("temperature", math.isfinite, "be a finite number", True),
    ("temperature", lambda value: value >= 0, "be non-negative", True),
    ("temperature", lambda value: value <= 2, "be in [0, 2]", True),
    ("top_p", lambda value: 0 < value <= 1, "be in (0, 1]", True),
    ("top_k", lambda value: value >= -1, "be 0 (disable), or at least 1", False),
    ("min_p", lambda value: 0 <= value <= 1, "be in [0, 1]", False),
)
"""Allowed values of each parameter, vLLM's wording, and whether the message repeats parameter and value."""


def check_sampling(fields: Mapping[str, Any], max_tokens: int, n: int) -> None:
    """Run the checks of vLLM's ``SamplingParams`` in its order. Raises `ApiError`."""
    _check_count(n)
    _check_bias_keys(fields)
    for name, allowed, text, repeated in _RANGES:
        value = fields.get(name)
        if value is not None and not allowed(value):
            raise invalid(f"{name} must {text}, got {value}.", *((name, value) if repeated else ()))
    if max_tokens < 1:
        raise invalid(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens", max_tokens)
    least = fields.get("min_tokens") or 0
    if least < 0:
        raise invalid(f"min_tokens must be greater than or equal to 0, got {least}.")
    if least > max_tokens:
        raise invalid(f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {least}.")
    stop = fields.get("stop") if fields.get("stop") is not None else []
    if stop == "" or (isinstance(stop, list) and "" in stop):
        raise invalid("stop cannot contain an empty string.")
    if "" in (fields.get("bad_words") or []):
        raise invalid(f"bad_words cannot contain an empty string. Got bad_words={fields['bad_words']}")
    if fields.get("temperature") is not None and fields["temperature"] < 1e-5 and n > 1:
        raise invalid(f"n must be 1 when using greedy sampling, got {n}.")


def _check_count(n: int) -> None:
    if n < 1:
        raise invalid(f"n must be at least 1, got {n}.")
    most = int(os.environ.get("VLLM_MAX_N_SEQUENCES") or MOST_SEQUENCES)
    if n > most:
        raise invalid(
            f"n must be at most {most}, got {n}. To increase this limit, set the VLLM_MAX_N_SEQUENCES environment "
            "variable."
        )


def _check_bias_keys(fields: Mapping[str, Any]) -> None:
    wrong = [key for key in fields.get("logit_bias") or {} if not _is_whole(key)]
    if wrong:
        raise invalid(
            f"logit_bias contains key(s) that cannot be converted to integer token IDs: {wrong!r}", "logit_bias", wrong
        )


def _is_whole(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


def check_engine(ask: GenerationRequest) -> None:
    """Run the engine's checks of a new request. Raises `ApiError`."""
    fields, served = ask.fields, ask.served
    top = fields.get("top_logprobs") if fields.get("logprobs") else None
    _check_logprobs("sample", "logprobs", top if ask.chat else fields.get("logprobs"), served)
    _check_logprobs("prompt", "prompt_logprobs", fields.get("prompt_logprobs"), served)
    for name in ("logit_bias", "stop_token_ids"):
        wrong = [token for token in (int(key) for key in fields.get(name) or ()) if not 0 <= token < served.size]
        if wrong:
            raise invalid(
                f"token_id(s) {wrong} in {name} contain out-of-vocab token ids. Vocabulary size: {served.size}",
                name,
                wrong,
            )
    allowed = fields.get("allowed_token_ids")
    if allowed is not None:
        if not allowed:
            raise invalid("allowed_token_ids is not None and empty!", "allowed_token_ids", allowed)
        wrong = [token for token in allowed if not 0 <= token < served.size]
        if wrong:
            raise invalid("allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", wrong)
    if fields.get("thinking_token_budget") is not None:
        raise bad_request(
            "thinking_token_budget is set but reasoning_config is not configured. Please set --reasoning-parser and/or "
            "--reasoning-config to use thinking_token_budget."
        )
    for prompt in ask.prompts:
        if prompt.text is None and (most := max(prompt.tokens)) >= served.size:
            raise bad_request(f"Token id {most} is out of vocabulary")


def _check_logprobs(what: str, name: str, count: int | None, served: ServedModel) -> None:
    if not count:
        return
    wanted = served.size if count == -1 else count
    most = served.size if served.max_logprobs == -1 else served.max_logprobs
    if wanted > most:
        raise invalid(f"Requested {what} logprobs of {wanted}, which is greater than max allowed: {most}", name, wanted)

"""A conversation: its turns, its options, and the request for the next answer. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_console.chat.answer import Answer
from vllm_launchers.patterns import lazy_pattern

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

RAW_TOKENS = 256
"""Default maximum of tokens that continue a text; vLLM's own default is 16."""

NO_TEMPLATE = lazy_pattern(
    r"default chat template is no longer allowed|(?:must|need to) provide a chat template|no chat template"
    r"|chat_template is not set|does not have a (?:default )?chat template",
    re.IGNORECASE,
)
"""vLLM's refusal of a chat with a base model (status 400)."""


class ChatOptions(msgspec.Struct, frozen=True):
    """Options of requests; None leaves a value to the server. ``tools`` have the API's format."""

    system: str = ""
    temperature: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    raw: bool = False
    """Send the text as is, without a chat template."""
    tools: tuple[dict[str, Any], ...] = ()


class Turn(msgspec.Struct, frozen=True):
    """A user message and its answer."""

    prompt: str
    answer: Answer


class ChatRequest(msgspec.Struct, frozen=True):
    """The request for an answer."""

    path: str
    body: dict[str, Any]


def request_for(
    model: str, turns: Sequence[Turn], prompt: str, options: ChatOptions, *, raw: bool, context: int | None = None
) -> ChatRequest:
    """The request for the answer to ``prompt`` after these turns; ``context`` is the server's, in tokens.

    Turns without an answer are left out, because chat templates require alternating prompts and answers. With ``raw``,
    the text so far is continued; a system prompt and tools need a chat template and are not sent.
    """
    answered = [turn for turn in turns if turn.answer.text()]
    if raw:
        text = "".join(turn.prompt + turn.answer.text() for turn in answered) + prompt
        body: dict[str, Any] = {"model": model, "prompt": text}
        path, default = COMPLETIONS, min(RAW_TOKENS, max(1, context // 4)) if context else RAW_TOKENS
    else:
        messages = [{"role": "system", "content": options.system}] if options.system else []
        for turn in answered:
            messages.append({"role": "user", "content": turn.prompt})
            messages.append({"role": "assistant", "content": turn.answer.text()})
        body = {"model": model, "messages": [*messages, {"role": "user", "content": prompt}]}
        path, default = CHAT, None
        if options.tools:
            body["tools"] = list(options.tools)
    body |= {"temperature": options.temperature} if options.temperature is not None else {}
    most = options.max_tokens or default
    body |= {"max_tokens": most} if most else {}
    body |= {"stop": list(options.stop)} if options.stop else {}
    return ChatRequest(path, body)


def raw_note(options: ChatOptions, *, asked: bool) -> str:
    """A sentence about text that is sent as is; ``asked`` is whether the user requested that."""
    why = "The prompt is sent as it is" if asked else "This model has no chat template: the prompt is sent as it is"
    lost = [name for name, given in (("system prompt", options.system), ("tools", options.tools)) if given]
    without = f", without the {' and '.join(lost)}" if lost else ""
    return f"{why}, and the model continues the text{without}."

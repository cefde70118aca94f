"""Calls of the OpenAI Python client to a server. Run with the Python of a vLLM installation, which has the client.

Usage: ``python openai_calls.py URL``. Prints one line per call: a short form of the response, or the client's
exception.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60)
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
EXTRA = {"ignore_eos": True}
USAGE: Any = {"include_usage": True}


def complete(**fields: Any) -> Any:
    given = {"model": "tiny", "prompt": "Hello there my friend", "max_tokens": 5, "extra_body": EXTRA, **fields}
    return client.completions.create(**given)


def chat(**fields: Any) -> Any:
    messages = [{"role": "user", "content": "Hello there"}]
    given = {"model": "tiny", "messages": messages, "max_tokens": 5, "extra_body": EXTRA, **fields}
    return client.chat.completions.create(**given)


def respond(**fields: Any) -> Any:
    given = {"model": "tiny", "input": "Hello", "max_output_tokens": 16, "extra_body": EXTRA, **fields}
    return client.responses.create(**given)


def streamed(events: Any) -> Any:
    """How a stream ended, and how many tokens it contained."""
    reason = tokens = None
    for event in events:
        if event.choices:
            reason = event.choices[0].finish_reason
        if event.usage:
            tokens = event.usage.completion_tokens
    return reason, tokens


def first_of_each(items: list[str]) -> list[str]:
    return list(dict.fromkeys(items))


CALLS: dict[str, Callable[[], Any]] = {
    "models": lambda: [model.id for model in client.models.list().data],
    "one model": lambda: client.models.retrieve("tiny").id,
    "completion": lambda: (complete().choices[0].finish_reason, complete().usage.completion_tokens),
    "two choices": lambda: [choice.index for choice in complete(n=2).choices],
    "two prompts": lambda: [choice.index for choice in complete(prompt=["a b c", "d e f"]).choices],
    "logprobs": lambda: len(complete(logprobs=2).choices[0].logprobs.tokens),
    "echo": lambda: complete(echo=True).choices[0].text.startswith("Hello there my friend"),
    "stop": lambda: complete(stop=[" ", "e"], max_tokens=100).choices[0].finish_reason,
    "stream": lambda: streamed(complete(stream=True, stream_options=USAGE)),
    "chat": lambda: (
        chat().choices[0].message.role,
        chat().choices[0].message.tool_calls,
        chat().usage.total_tokens > 5,
    ),
    "chat logprobs": lambda: len(chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content),
    "three chats": lambda: [choice.index for choice in chat(n=3).choices],
    "chat stream": lambda: streamed(chat(stream=True, stream_options=USAGE)),
    "tools": lambda: chat(tools=[TOOL]),
    "tools required": lambda: chat(tools=[TOOL], tool_choice="required"),
    "tools not used": lambda: chat(tools=[TOOL], tool_choice="none").choices[0].message.tool_calls,
    "unknown model": lambda: chat(model="gpt-4"),
    "too many tokens": lambda: complete(max_tokens=5000),
    "temperature": lambda: complete(temperature=-2),
    "top_p": lambda: chat(top_p=1.5),
    "a bad stream": lambda: list(complete(stream=True, temperature=5)),
    "a stream the engine refuses": lambda: list(complete(stream=True, logprobs=500)),
    "a chat the engine refuses": lambda: list(chat(stream=True, logprobs=True, top_logprobs=500)),
    "no messages": lambda: chat(messages=[]),
    "messages of a wrong type": lambda: chat(messages="x"),
    "response format": lambda: chat(response_format={"type": "yaml"}),
    "response": lambda: (respond().status, respond().incomplete_details.reason, respond().usage.output_tokens),
    "response stream": lambda: first_of_each([event.type for event in respond(stream=True)]),
    "response of an unknown model": lambda: respond(model="gpt-4"),
    "response after another": lambda: respond(previous_response_id="resp_1"),
    "stored response": lambda: client.responses.retrieve("resp_1"),
    "response temperature": lambda: respond(temperature=-1),
    "embeddings": lambda: client.embeddings.create(model="tiny", input="a"),
    "speech": lambda: client.audio.speech.create(model="tiny", input="a", voice="alloy"),
    "files": lambda: client.files.list().data,
}


def outcome(call: Callable[[], Any]) -> str:
    try:
        return f"-> {call()!r}"
    except openai.APIStatusError as error:
        return f"{type(error).__name__} {error.status_code} {error.body!r}"
    except openai.OpenAIError as error:
        return f"{type(error).__name__} {error}"


if __name__ == "__main__":
    complete(prompt="word " * 40)  # vLLM 0.32 on CPUs with AMX crashes if the first request is short
    for name, call in CALLS.items():
        print(name, outcome(call))

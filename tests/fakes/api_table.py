"""Requests for vLLM's HTTP API, sent to real vLLM and to the simulated engine, and the comparison of their responses.

Compared are the status, the header names and the values that clients read, the whole body of an error, and for a
successful response the fields at every level with their types and some of their values. For a stream: the framing, and
the shapes of its events in order of first occurrence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

MODEL = "tiny"
CONTEXT = 512
"""Both servers run with ``--max-model-len 512``."""

C = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"

IDS = [40, 41, 42, 43, 44, 45, 46, 47]
WORDS = "Tell me about the weather in the mountains"
ALL_IDS = list(range(512))
LETTERS = ["e", " ", "t", "a"]
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
ANTHROPIC_TOOL = {"name": "look_up", "input_schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"name": "answer", "schema": {"type": "object"}}
HI = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Case:
    """One request.

    ``modelled`` is False where the simulated engine refuses what real vLLM serves. ``worded`` is False where vLLM's
    error message lists types of a client library; only the kind of error is compared then.
    """

    name: str
    path: str
    body: Any = None
    method: str = "POST"
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    modelled: bool = True
    worded: bool = True


def _completion(name: str, modelled: bool = True, **fields: Any) -> Case:
    body = {"model": MODEL, "prompt": IDS, "max_tokens": 4, "ignore_eos": True, **fields}
    return Case(
        f"completion: {name}", C, {key: value for key, value in body.items() if value != "-"}, modelled=modelled
    )


def _chat(name: str, modelled: bool = True, worded: bool = True, **fields: Any) -> Case:
    body = {"model": MODEL, "messages": HI, "max_tokens": 4, "ignore_eos": True, **fields}
    given = {key: value for key, value in body.items() if value != "-"}
    return Case(f"chat: {name}", CHAT, given, modelled=modelled, worded=worded)


def _responses(name: str, worded: bool = True, **fields: Any) -> Case:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 16, "ignore_eos": True, **fields}
    return Case(f"responses: {name}", RESPONSES, {k: v for k, v in body.items() if v != "-"}, worded=worded)


def _messages(name: str, modelled: bool = True, path: str = MESSAGES, **fields: Any) -> Case:
    body = {"model": MODEL, "messages": HI, **({"max_tokens": 16} if path == MESSAGES else {}), **fields}
    given = {key: value for key, value in body.items() if value != "-"}
    return Case(f"{path.removeprefix('/v1/')}: {name}", path, given, modelled=modelled)


def _said(content: Any, role: str = "user", **more: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content, **more}]


def _get(path: str, method: str = "GET") -> Case:
    return Case(f"{method} {path}", path, method=method)


STREAM = {"stream": True, "max_tokens": 16}
USAGE = {**STREAM, "stream_options": {"include_usage": True}}
CONTINUOUS = {**STREAM, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}

GOOD_COMPLETIONS = (
    _completion("token ids"),
    _completion("a text", prompt=WORDS),
    _completion("no model named", model="-"),
    _completion("an empty model name", model=""),
    _completion("two texts", prompt=[WORDS, "Hello"]),
    _completion("two lists of ids", prompt=[IDS, IDS[:4]]),
    _completion("one text in a list", prompt=[WORDS]),
    _completion("n = 2", n=2, seed=1),
    _completion("n = 2 of two prompts", n=2, prompt=[IDS, IDS[:4]]),
    _completion("echo", echo=True),
    _completion("echo and no token", echo=True, max_tokens=0),
    _completion("echo of n = 2", echo=True, n=2),
    _completion("logprobs 2", logprobs=2),
    _completion("logprobs 0", logprobs=0),
    _completion("logprobs of n = 2", logprobs=1, n=2),
    _completion("echo with logprobs", echo=True, logprobs=1),
    _completion("echo with logprobs and no token", echo=True, logprobs=1, max_tokens=0),
    _completion("logprobs as ids", logprobs=1, return_tokens_as_token_ids=True),
    _completion("token ids returned", return_token_ids=True),
    _completion("prompt logprobs", prompt_logprobs=1),
    _completion("a stop token", stop_token_ids=ALL_IDS),
    _completion("a stop string", stop=LETTERS, min_tokens=3, max_tokens=100),
    _completion("a stop string included", stop=LETTERS, min_tokens=3, max_tokens=100, include_stop_str_in_output=True),
    _completion("a stop string that never comes", stop="never to be seen"),
    _completion("a seed", seed=7),
    _completion("greedy", temperature=0),
    _completion("all sampling parameters", temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, presence_penalty=1,
                frequency_penalty=-1, repetition_penalty=1.1, logit_bias={"5": 1}, user="me"),
    _completion("an unknown field", nonsense=1),
    _completion("null fields", temperature=None, top_p=None, n=1, stop=None, stream=None, max_tokens=None),
    _completion("a number as text", max_tokens="4", temperature="0.5"),
    _completion("a whole float", max_tokens=4.0),
    _completion("truncated prompt", truncate_prompt_tokens=4),
    _completion("bad words", bad_words=["a"]),
    _completion("a request id", request_id="mine"),
    Case("completion: a request id in a header", C, {"prompt": IDS, "max_tokens": 2, "ignore_eos": True},
         headers={"X-Request-Id": "mine-too"}),
    _completion("no max_tokens", max_tokens="-"),
    _completion("up to the context", max_tokens=CONTEXT),
    _completion("response format text", response_format={"type": "text"}),
    _completion("response format json_object", modelled=False, response_format={"type": "json_object"}, max_tokens=30),
    _completion("structured outputs", modelled=False, structured_outputs={"choice": ["a", "b"]}, max_tokens=10),
    _completion("beam search", modelled=False, use_beam_search=True, n=2),
    _completion("stream", **STREAM),
    _completion("stream with usage", **USAGE),
    _completion("stream with continuous usage", **CONTINUOUS),
    _completion("stream of n = 2", **STREAM, n=2),
    _completion("stream of two prompts with usage", prompt=[IDS, IDS[:4]], **USAGE),
    _completion("stream with logprobs", **STREAM, logprobs=1),
    _completion("stream with echo", **STREAM, echo=True),
    _completion("stream with echo and no token", stream=True, echo=True, max_tokens=0),
    _completion("stream with token ids", **STREAM, return_token_ids=True),
    _completion("stream with a stop string", stream=True, stop=LETTERS, min_tokens=3, max_tokens=100),
    _completion("stream with a stop token", stream=True, stop_token_ids=ALL_IDS),
)  # fmt: skip

BAD_COMPLETIONS = (
    Case("completion: not JSON", C, raw=b"{nonsense", headers={"content-type": "application/json"}),
    Case("completion: an empty body", C, raw=b"", headers={"content-type": "application/json"}),
    Case("completion: a list", C, [1]),
    Case("completion: a bare text", C, "hello"),
    Case("completion: not declared as JSON", C, raw=b'{"prompt": "a"}', headers={"content-type": "text/plain"}),
    Case("completion: no content type", C, raw=b'{"prompt": "a"}'),
    Case("completion: null", C, raw=b"null", headers={"content-type": "application/json"}),
    _completion("no prompt", prompt="-"),
    _completion("an empty prompt", prompt=""),
    _completion("an empty list", prompt=[]),
    _completion("a prompt that is an object", prompt={"a": 1}),
    _completion("a prompt that is a number", prompt=5),
    _completion("a negative token", prompt=[-1]),
    _completion("a token out of vocabulary", prompt=[999_999]),
    _completion("a mixed prompt", prompt=["a", 5]),
    _completion("an empty text in a list", prompt=[""]),
    _completion("an empty list in a list", prompt=[[]]),
    _completion("an unknown model", model="gpt-4"),
    _completion("a model that is a number", model=4),
    _completion("max_tokens 0", max_tokens=0),
    _completion("max_tokens -1", max_tokens=-1),
    _completion("max_tokens as words", max_tokens="many"),
    _completion("max_tokens 1.5", max_tokens=1.5),
    _completion("max_tokens a list", max_tokens=[1]),
    _completion("max_tokens beyond the context", max_tokens=CONTEXT + 88),
    _completion("a prompt beyond the context", prompt=[40] * (CONTEXT + 88)),
    _completion("a prompt as long as the context", prompt=[40] * CONTEXT),
    _completion("a text beyond the context", prompt="word " * 3000),
    _completion("temperature -2", temperature=-2),
    _completion("temperature warm", temperature="warm"),
    _completion("temperature 3", temperature=3),
    _completion("temperature true", temperature=[True]),
    _completion("top_p 0", top_p=0),
    _completion("top_p 1.5", top_p=1.5),
    _completion("top_k -5", top_k=-5),
    _completion("top_k 1.5", top_k=1.5),
    _completion("min_p 2", min_p=2),
    _completion("presence_penalty 9", presence_penalty=9),
    _completion("frequency_penalty -9", frequency_penalty=-9),
    _completion("repetition_penalty 0", repetition_penalty=0),
    _completion("n 0", n=0),
    _completion("n as words", n="two"),
    _completion("n null", n=None),
    _completion("n far too many", n=20_000),
    _completion("n = 2 greedy", n=2, temperature=0),
    _completion("logprobs 500", logprobs=500),
    _completion("logprobs -3", logprobs=-3),
    _completion("logprobs as words", logprobs="all"),
    _completion("prompt_logprobs 500", prompt_logprobs=500),
    _completion("prompt_logprobs in a stream", prompt_logprobs=1, stream=True),
    _completion("stream_options without stream", stream_options={"include_usage": True}),
    _completion("stream_options that is no object", stream=True, stream_options=5),
    _completion("stop empty", stop=""),
    _completion("stop a number", stop=5),
    _completion("stop a list of numbers", stop=[1]),
    _completion("stop_token_ids out of vocabulary", stop_token_ids=[999_999]),
    _completion("stop_token_ids as words", stop_token_ids=["a"]),
    _completion("min_tokens -1", min_tokens=-1),
    _completion("min_tokens above max_tokens", min_tokens=5),
    _completion("ended by a stop token after min_tokens", min_tokens=3, max_tokens=100, stop_token_ids=ALL_IDS),
    _completion("seed 1.5", seed=1.5),
    _completion("seed too large", seed=2**70),
    _completion("logit_bias of words", logit_bias={"a": 1}),
    _completion("logit_bias out of vocabulary", logit_bias={"999999": 1}),
    _completion("an unknown response format", response_format={"type": "yaml"}),
    _completion("a response format that is a text", response_format="json"),
    _completion("json_schema without a schema", response_format={"type": "json_schema"}),
    _completion("two constraints", structured_outputs={"choice": ["a"], "regex": "a"}),
    _completion("priority", priority=5),
    _completion("truncate beyond the context", truncate_prompt_tokens=CONTEXT + 1),
    _completion("suffix", suffix="end"),
    _completion("suffix of a text", suffix="end", prompt=WORDS),
    _completion("suffix of texts", suffix="end", prompt=[WORDS, "Hello"]),
    _completion("suffix of lists of ids", suffix="end", prompt=[IDS]),
    _completion("suffix empty", suffix="", prompt=WORDS),
    _completion("suffix with echo", suffix="end", prompt=WORDS, echo=True),
    _completion("suffix with truncation", suffix="end", prompt=WORDS, truncate_prompt_tokens=4),
    _completion("suffix of a text beyond the context", suffix="end", prompt="word " * 3000),
    _completion("a text of too many words", prompt="the " * 600),
    _completion("allowed_token_ids empty", allowed_token_ids=[]),
    _completion("allowed_token_ids out of vocabulary", allowed_token_ids=[999_999]),
    _completion("bad_words with an empty one", bad_words=[""]),
    _completion("echo that is no boolean", echo="maybe"),
    _completion("stream that is no boolean", stream="maybe"),
    _completion("ignore_eos 3", ignore_eos=3),
    _completion("cache_salt empty", cache_salt=""),
    _completion("stream_interval 0", stream_interval=0),
    _completion("several wrong at once", temperature="warm", n="two", echo="maybe"),
    _completion("a stream of a bad request", stream=True, top_p=0),
    _completion("a stream beyond the vocabulary", stream=True, prompt=[999_999]),
    _completion("a stream with too many logprobs", stream=True, logprobs=500),
)  # fmt: skip

GOOD_CHATS = (
    _chat("plain"),
    _chat("no model named", model="-"),
    _chat("several messages", messages=[{"role": "system", "content": "Be brief."}, *HI,
          {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Go on"}]),
    _chat("text parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]),
    _chat("n = 2", n=2),
    _chat("logprobs", logprobs=True),
    _chat("top_logprobs 2", logprobs=True, top_logprobs=2),
    _chat("max_completion_tokens", max_tokens="-", max_completion_tokens=3),
    _chat("both limits", max_completion_tokens=3),
    _chat("echo", echo=True),
    _chat("echo of the assistant", echo=True, add_generation_prompt=False, continue_final_message=True,
          messages=[*HI, {"role": "assistant", "content": "Well"}]),
    _chat("a stop token", stop_token_ids=ALL_IDS),
    _chat("a stop string", stop=LETTERS, min_tokens=3, max_tokens=100),
    _chat("tools not to be used", tools=[TOOL], tool_choice="none"),
    _chat("token ids returned", return_token_ids=True),
    _chat("prompt text returned", return_prompt_text=True),
    _chat("prompt logprobs", prompt_logprobs=1),
    _chat("response format text", response_format={"type": "text"}),
    _chat("response format json_object", modelled=False, response_format={"type": "json_object"}, max_tokens=30),
    _chat("response format json_schema", modelled=False, max_tokens=30,
          response_format={"type": "json_schema", "json_schema": SCHEMA}),
    _chat("an unusual role", messages=[{"role": "banana", "content": "Hello"}]),
    _chat("a message without content", messages=[{"role": "user"}]),
    _chat("null content", messages=[{"role": "assistant", "content": None}]),
    _chat("null content of a function", messages=_said(None, "function", name="look_up")),
    _chat("null content beside a tool call", messages=[
        *HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, *_said("42", "tool", tool_call_id="c1")]),
    *(_chat(f"no content of {role}", messages=[{"role": role}]) for role in ("system", "developer", "assistant", "tool",
                                                                         "function", "banana")),
    _chat("no parts", messages=_said([])),
    _chat("an empty text", messages=_said("")),
    _chat("a continued question", messages=HI, continue_final_message=True, add_generation_prompt=False),
    _chat("stream", **STREAM),
    _chat("stream with usage", **USAGE),
    _chat("stream with continuous usage", **CONTINUOUS),
    _chat("stream of n = 2", **STREAM, n=2),
    _chat("stream with logprobs", **STREAM, logprobs=True, top_logprobs=1),
    _chat("stream with echo", **STREAM, echo=True, add_generation_prompt=False, continue_final_message=True,
          messages=[*HI, {"role": "assistant", "content": "Well"}]),
    _chat("stream with token ids", **STREAM, return_token_ids=True),
    _chat("stream with a stop string", stream=True, stop=LETTERS, min_tokens=3, max_tokens=100),
    _chat("stream with a stop token", stream=True, stop_token_ids=ALL_IDS),
)  # fmt: skip

BAD_CHATS = (
    Case("chat: not JSON", CHAT, raw=b"nonsense", headers={"content-type": "application/json"}),
    _chat("no messages", messages="-"),
    _chat("empty messages", messages=[]),
    _chat("messages a text", messages="Hello"),
    _chat("a message that is a text", messages=["Hello"]),
    _chat("a message without role", messages=[{"content": "Hello"}]),
    _chat("an unknown part", worded=False, messages=[{"role": "user", "content": [{"type": "smell", "smell": "x"}]}]),
    _chat("an image", messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]),
    _chat("an unknown model", model="gpt-4"),
    _chat("tools without a parser", tools=[TOOL]),
    _chat("tools required", tools=[TOOL], tool_choice="required"),
    _chat("a named tool", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look_up"}}),
    _chat("a named tool that is not there", tools=[TOOL], tool_choice={"type": "function", "function": {"name": "x"}}),
    _chat("a tool choice without a name", tools=[TOOL], tool_choice={"type": "function", "function": {}}),
    _chat("no tools in the list", tools=[]),
    _chat("a tool without a function", tools=[{"type": "function"}]),
    _chat("tool_choice without tools", tool_choice="auto"),
    _chat("an unknown tool_choice", tools=[TOOL], tool_choice="sometimes"),
    _chat("top_logprobs without logprobs", top_logprobs=2),
    _chat("top_logprobs 500", logprobs=True, top_logprobs=500),
    _chat("logprobs that is no boolean", logprobs="maybe"),
    _chat("max_tokens 0", max_tokens=0),
    _chat("max_tokens beyond the context", max_tokens=CONTEXT + 88),
    _chat("max_completion_tokens beyond the context", max_tokens="-", max_completion_tokens=CONTEXT + 88),
    *(_chat(f"null content of {role}", messages=_said(None, role)) for role in ("user", "system", "developer", "tool",
                                                                            "function", "banana")),
    *(_chat(f"content of {role} that is a number", messages=_said(5, role)) for role in ("user", "assistant", "tool",
                                                                                     "function", "banana")),
    _chat("null content in the second message", messages=[*HI, *_said(None)]),
    _chat("null content twice", messages=[*_said(None), *_said(None)]),
    _chat("content of a banana that is an object", messages=_said({"a": 1}, "banana")),
    _chat("a role that is a number", messages=_said("Hello", 5)),
    _chat("a role that is null", messages=_said("Hello", None)),
    _chat("a thinking budget", thinking_token_budget=5),
    _chat("a conversation of too many words", messages=_said("the " * 600)),
    _chat("a conversation beyond the context", messages=[{"role": "user", "content": "word " * 3000}]),
    _chat("temperature -2", temperature=-2),
    _chat("temperature warm", temperature="warm"),
    _chat("top_p 0", top_p=0),
    _chat("n = 0", n=0),
    _chat("stream_options without stream", stream_options={"include_usage": True}),
    _chat("an unknown response format", response_format={"type": "yaml"}),
    _chat("json_schema without a schema", response_format={"type": "json_schema"}),
    _chat("continued and begun", continue_final_message=True, add_generation_prompt=True),
    _chat("continued, and begun by default", continue_final_message=True),
    _chat("a stream continued, and begun by default", stream=True, continue_final_message=True),
    _chat("continued, and begun by null", continue_final_message=True, add_generation_prompt=None),
    _chat("an empty conversation continued", messages=[], continue_final_message=True),
    _chat("a chat template of the request", chat_template="{{ messages }}"),
    _chat("a reasoning effort unknown", reasoning_effort="heroic"),
    _chat("min_tokens above max_tokens", min_tokens=5),
    _chat("beam search in a stream", modelled=False, use_beam_search=True, stream=True),
)  # fmt: skip

RESPONSES_CASES = (
    _responses("a text"),
    _responses("messages", input=[{"role": "user", "content": "Hello"}]),
    _responses("instructions", instructions="Be brief."),
    _responses("stored", store=True),
    _responses("metadata", metadata={"a": "b"}, user="me", temperature=0.5, top_p=0.9),
    _responses("a stop string", stop=LETTERS, max_output_tokens=100),
    _responses("stream", stream=True),
    _responses("no input", input="-"),
    _responses("null content", worded=False, input=_said(None)),
    _responses("no content", worded=False, input=[{"role": "user"}]),
    _responses("content that is a number", worded=False, input=_said(5)),
    _responses("temperature -2", temperature=-2),
    _responses("temperature warm", temperature="warm"),
    _responses("an unknown model", model="gpt-4"),
    _responses("max_output_tokens beyond the context", max_output_tokens=CONTEXT + 88),
    _responses("an unknown earlier response", previous_response_id="resp_none"),
    _responses("an earlier response with a wrong id", previous_response_id="nothing"),
    _responses("background without store", background=True, store=False),
    _responses("background and stored", background=True),
    _responses("tools", tools=[{"type": "function", "name": "look_up", "parameters": {"type": "object"}}]),
    _get(f"{RESPONSES}/resp_none"),
    _get(f"{RESPONSES}/nothing"),
    _get(f"{RESPONSES}/resp_none/cancel", "POST"),
)

_JSON = {"type": "json_schema", "schema": {"type": "object"}}
_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
_USE = {"type": "tool_use", "id": "a", "name": "look_up", "input": {"q": 1}}
_RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "42"}
_PARTS = [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]
_ADDITION = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "x"}}

MESSAGES_CASES = (
    _messages("plain"),
    _messages("stream", stream=True, temperature=0),
    _messages("a null stream", stream=None),
    _messages("a system prompt", system="Be brief."),
    _messages("system blocks", system=_PARTS),
    _messages("a system message", messages=[*_said("Be brief.", "system"), *HI]),
    _messages("a block", messages=_said([{"type": "text", "text": "Hello"}])),
    _messages("two blocks", messages=_said(_PARTS)),
    _messages("an empty text", messages=_said("")),
    _messages("the assistant last", messages=[*HI, *_said("Well", "assistant")]),
    _messages("the assistant empty", messages=[*HI, *_said([], "assistant")]),
    _messages("thinking blocks", messages=[
        *HI, *_said([{"type": "thinking", "thinking": "hm"}, _PARTS[0]], "assistant"), *HI]),
    _messages("a tool used", messages=[*HI, *_said([_USE], "assistant"), *_said([_RESULT])]),
    _messages("a stop sequence", stop_sequences=LETTERS, max_tokens=100),
    _messages("a stream with a stop sequence", stop_sequences=["never to be seen"], stream=True, temperature=0),
    _messages("sampling parameters", temperature=0.5, top_p=0.9, top_k=5, metadata={"user_id": "me"}),
    _messages("an unknown field", nonsense=1),
    _messages("thinking disabled", thinking={"type": "disabled"}),
    _messages("thinking adaptive", thinking={"type": "adaptive"}),
    _messages("an effort", output_config={"effort": "low"}),
    _messages("tools not to be used", tools=[ANTHROPIC_TOOL], tool_choice={"type": "none"}),
    Case("messages: a request id", MESSAGES, {"model": MODEL, "messages": HI, "max_tokens": 4},
         headers={"X-Request-Id": "mine-too"}),
    _messages("bound to a format", modelled=False, output_config={"format": _JSON}),
    Case("messages: not JSON", MESSAGES, raw=b"{nonsense", headers={"content-type": "application/json"}),
    Case("messages: a list", MESSAGES, [1]),
    Case("messages: no content type", MESSAGES, raw=b"{}"),
    _messages("no model", model="-"),
    _messages("an empty model name", model=""),
    _messages("a model that is a number", model=4),
    _messages("an unknown model", model="gpt-4"),
    _messages("no max_tokens", max_tokens="-"),
    _messages("max_tokens null", max_tokens=None),
    _messages("max_tokens 0", max_tokens=0),
    _messages("max_tokens as words", max_tokens="many"),
    _messages("max_tokens beyond the context", max_tokens=CONTEXT + 88),
    _messages("no messages", messages="-"),
    _messages("empty messages", messages=[]),
    _messages("messages a text", messages="Hello"),
    _messages("a message that is a text", messages=["Hello"]),
    _messages("an unknown role", messages=_said("Hello", "banana")),
    _messages("no role", messages=[{"content": "Hello"}]),
    _messages("null content", messages=_said(None)),
    _messages("no content", messages=[{"role": "user"}]),
    _messages("no blocks", messages=_said([])),
    _messages("an unknown block", messages=_said([{"type": "smell"}])),
    _messages("a block without a type", messages=_said([{"text": "Hello"}])),
    _messages("an image", messages=_said([_IMAGE])),
    _messages("an image in a result", messages=[*HI, *_said([_USE], "assistant"),
                                                *_said([{**_RESULT, "content": [_IMAGE]}])]),
    _messages("a tool added by a user", messages=_said([_ADDITION])),
    _messages("a tool added in the system prompt", system=[_ADDITION]),
    _messages("a system prompt that is a number", system=5),
    _messages("too many stop sequences", stop_sequences=["a"] * 5),
    _messages("an empty stop sequence", stop_sequences=[""]),
    _messages("temperature -2", temperature=-2),
    _messages("temperature warm", temperature="warm"),
    _messages("a stream of temperature 3", stream=True, temperature=3),
    _messages("top_p 0", top_p=0),
    _messages("top_k -5", top_k=-5),
    _messages("tools without a parser", tools=[ANTHROPIC_TOOL]),
    _messages("any tool", tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}),
    _messages("a named tool", tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool", "name": "look_up"}),
    _messages("a tool choice without tools", tool_choice={"type": "auto"}),
    _messages("a tool choice without a name", tools=[ANTHROPIC_TOOL], tool_choice={"type": "tool"}),
    _messages("an unknown tool choice", tools=[ANTHROPIC_TOOL], tool_choice={"type": "x"}),
    _messages("a tool without a name", tools=[{"input_schema": {}}]),
    _messages("a tool without a schema", tools=[{"name": "x"}]),
    _messages("a thinking budget above max_tokens", thinking={"type": "enabled", "budget_tokens": 1024}),
    _messages("a small thinking budget", thinking={"type": "enabled", "budget_tokens": 10}),
    _messages("unknown thinking", thinking={"type": "x"}),
    _messages("thinking without a type", thinking={}),
    _messages("an unknown effort", output_config={"effort": "x"}),
    _messages("a cache salt with a slash", cache_salt="a/b"),
    _messages("a prompt beyond the context", messages=_said("word " * 3000)),
    _messages("a prompt of too many words", messages=_said("the " * 600)),
    _messages("several wrong at once", messages="x", max_tokens="x", temperature="warm"),
    _messages("plain", path=COUNT),
    _messages("a system prompt", path=COUNT, system="Be brief."),
    _messages("an unknown model", path=COUNT, model="gpt-4"),
    _messages("empty messages", path=COUNT, messages=[]),
    _messages("no messages", path=COUNT, messages="-"),
    _messages("null content", path=COUNT, messages=_said(None)),
    _messages("tools without a parser", path=COUNT, tools=[ANTHROPIC_TOOL]),
    _messages("a prompt beyond the context", path=COUNT, messages=_said("word " * 3000)),
)  # fmt: skip

TOKENS = (
    Case("tokenize: a text", "/tokenize", {"model": MODEL, "prompt": WORDS}),
    Case("tokenize: with the tokens' texts", "/tokenize", {"prompt": WORDS, "return_token_strs": True}),
    Case("tokenize: a conversation", "/tokenize", {"messages": HI}),
    Case("tokenize: a continued conversation", "/tokenize",
         {"messages": HI, "continue_final_message": True, "add_generation_prompt": False}),
    Case("tokenize: continued, and begun by default", "/tokenize", {"messages": HI, "continue_final_message": True}),
    Case("tokenize: continued and begun", "/tokenize",
         {"messages": HI, "continue_final_message": True, "add_generation_prompt": True}),
    Case("tokenize: null content", "/tokenize", {"messages": _said(None)}),
    Case("tokenize: nothing", "/tokenize", {"model": MODEL}),
    Case("tokenize: a number", "/tokenize", {"prompt": 5}),
    Case("tokenize: an unknown model", "/tokenize", {"model": "gpt-4", "prompt": "a"}),
    Case("tokenize: not JSON", "/tokenize", raw=b"{", headers={"content-type": "application/json"}),
    Case("detokenize: ids", "/detokenize", {"model": MODEL, "tokens": IDS}),
    Case("detokenize: nothing", "/detokenize", {"tokens": []}),
    Case("detokenize: no tokens", "/detokenize", {"model": MODEL}),
    Case("detokenize: words", "/detokenize", {"tokens": ["a"]}),
    Case("detokenize: negative", "/detokenize", {"tokens": [-1]}),
    Case("detokenize: an unknown model", "/detokenize", {"model": "gpt-4", "tokens": IDS}),
    Case("detokenize: out of vocabulary", "/detokenize", {"tokens": [999_999]}),
)  # fmt: skip

PLACES = (
    _get("/health"),
    _get("/ping"),
    _get("/ping", "POST"),
    _get("/version"),
    _get("/load"),
    _get("/v1/models"),
    _get("/v1/models/tiny"),
    _get("/metrics"),
    _get("/openapi.json"),
    _get("/docs"),
    _get("/redoc"),
    _get("/docs/oauth2-redirect"),
    _get("/"),
    _get("/nope"),
    _get("/v1/nope"),
    _get("/v1/models/"),
    _get("/metrics/"),
    _get("/health", "HEAD"),
    _get("/health", "DELETE"),
    _get("/v1/models", "POST"),
    _get(C),
    _get(CHAT),
    _get("/tokenize"),
    _get("/health", "OPTIONS"),
    Case("CORS: a plain request", "/version", method="GET", headers={"Origin": "http://example.org"}),
    Case("CORS: a preflight", CHAT, method="OPTIONS", headers={
        "Origin": "http://example.org", "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization"}),
    Case("POST /v1/embeddings", "/v1/embeddings", {"model": MODEL, "input": "a"}),
    Case("POST /pooling", "/pooling", {"model": MODEL, "input": "a"}),
    Case("POST /score", "/score", {"model": MODEL, "text_1": "a", "text_2": "b"}),
    Case("POST /rerank", "/rerank", {"model": MODEL, "query": "a", "documents": ["b"]}),
    Case("POST /v1/audio/transcriptions", "/v1/audio/transcriptions", {}),
    _get("/server_info"),
    _get("/reset_prefix_cache", "POST"),
    _get("/is_sleeping"),
    _get("/sleep", "POST"),
    _get("/tokenizer_info"),
    _get("/get_world_size"),
    _get(MESSAGES),
    Case("POST /v1/chat/completions/batch", f"{CHAT}/batch", {"model": MODEL, "max_tokens": 4, "messages": [HI]},
         modelled=False),
    Case("POST /v1/completions/render", f"{C}/render", {"model": MODEL, "prompt": IDS}),
    Case("POST /v1/chat/completions/render", f"{CHAT}/render", {"model": MODEL, "messages": HI}),
    Case(
        "POST /inference/v1/generate",
        "/inference/v1/generate",
        {"token_ids": IDS, "sampling_params": {"max_tokens": 4}},
    ),
    Case("POST /invocations", "/invocations", {"prompt": IDS, "max_tokens": 4, "ignore_eos": True}),
    Case("POST /invocations, which nothing fits", "/invocations", {"nonsense": 1}),
    Case("POST /v1/load_lora_adapter", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
)  # fmt: skip

TABLE: tuple[Case, ...] = (
    *GOOD_COMPLETIONS, *BAD_COMPLETIONS, *GOOD_CHATS, *BAD_CHATS, *RESPONSES_CASES, *MESSAGES_CASES, *TOKENS, *PLACES,
)  # fmt: skip
WARM_UP = Case("warm-up", C, {"prompt": [40] * 48, "max_tokens": 4, "ignore_eos": True})
"""First request. It must be long: vLLM 0.32 on CPUs with AMX crashes if it is short."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str


def send(client: httpx.Client, url: str, case: Case) -> Answer:
    headers = dict(case.headers)
    if case.body is not None:
        response = client.request(case.method, url + case.path, json=case.body, headers=headers)
    else:
        response = client.request(case.method, url + case.path, content=case.raw, headers=headers)
    named = {name: value for name, value in response.headers.items() if name != "date"}
    return Answer(response.status_code, named, response.text)


EXACT = frozenset({"object", "finish_reason", "index", "model", "role", "completion_tokens", "type", "status", "code"})
"""Fields of successful responses whose values must be equal."""
BY_TYPE = frozenset({"content-length", "x-request-id"})
"""Headers for which only the name is compared."""


def shape(answer: Answer) -> Any:
    """The parts of a response that must be equal."""
    headers = {name: "…" if name in BY_TYPE else value for name, value in answer.headers.items()}
    if "location" in headers:
        headers["location"] = httpx.URL(headers["location"]).path
    kind = answer.headers.get("content-type", "")
    body: Any = answer.body
    if kind.startswith("text/event-stream"):
        body = _events(answer.body)
    elif kind.startswith("application/json") and answer.body:
        value = json.loads(answer.body)
        if isinstance(value, dict) and "paths" in value:
            body = sorted(value)
        else:
            body = _without_sizes(value) if answer.status >= 400 else _whole(value)
    elif answer.body:
        body = "…"
    return {"status": answer.status, "headers": headers, "body": body}


def _without_sizes(error: Any) -> Any:
    """An error's body without values that depend on the tokenizer (characters per token)."""
    text = json.dumps(error)
    text = re.sub(
        r"contains \d+ characters \(more than \d+ characters", "contains … characters (more than … characters", text
    )
    return json.loads(re.sub(r"parameter=input_text, value=\d+", "parameter=input_text, value=…", text))


def _whole(value: Any) -> Any:
    """Fields of a complete response; with a stop string, its length depends on the model's output."""
    fields = _fields(value)
    if '"finish_reason": "stop"' in json.dumps(fields):
        fields["usage"]["completion_tokens"] = "int"
    return fields


def _events(body: str) -> dict[str, Any]:
    """The shapes of a stream's events in order of first occurrence, and their choices."""
    shapes: list[Any] = []
    indices: set[int] = set()
    for event in body.split("\n\n"):
        entry: list[Any] = []
        for line in event.split("\n"):
            name, colon, text = line.partition(": ")
            if name != "data" or not text.startswith("{"):
                entry.append(line)
                continue
            value = json.loads(text)
            for choice in value.get("choices", ()):
                indices.add(choice["index"])
                choice["index"] = "…"
            entry.append([name + colon, value if "error" in value else _stream_fields(value)])
        if entry not in shapes:
            shapes.append(entry)
    return {"events": shapes, "indices": sorted(indices)}


def _stream_fields(value: Any) -> Any:
    """An event's fields, without the number of tokens per event, which depends on timing."""
    fields = _fields(value)
    if isinstance(fields, dict) and fields.get("choices") and isinstance(fields.get("usage"), dict):
        fields["usage"]["completion_tokens"] = "int"
    return fields


def _fields(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        by_token = name == "top_logprobs" and all(isinstance(item, float) for item in value.values())
        if by_token or name == "metadata" or (value and all(key.isdigit() for key in value)):
            return {"…": _fields(next(iter(value.values()), None))}
        return {key: _fields(value[key], key) for key in sorted(value)}
    if isinstance(value, list):
        if name == "bytes":
            return "list"
        shapes: list[Any] = []
        for item in value:
            entry = _fields(item, name)
            if entry not in shapes[-1:]:
                shapes.append(entry)
        return shapes
    return value if name in EXACT else type(value).__name__


REFUSALS = (400, 403, 501)


def differences(case: Case, real: Answer, simulated: Answer) -> list[str]:
    """Differences between the simulated engine's response and real vLLM's; empty if none."""
    if not case.modelled:
        body = json.loads(simulated.body) if simulated.status in REFUSALS else {}
        return [] if "message" in body.get("error", {}) else [f"not refused: {simulated.status} {simulated.body[:300]}"]
    expected, found = shape(real), shape(simulated)
    if not case.worded:
        for one in (expected, found):
            one["body"] = {**one["body"]["error"], "message": "…"}
            one["headers"].pop("content-length", None)
    return [
        f"{part}: real {json.dumps(expected[part], ensure_ascii=False)}, "
        f"simulated {json.dumps(found[part], ensure_ascii=False)}"
        for part in expected
        if expected[part] != found[part]
    ]

"""A stream becomes parts and measured values; invalid streams become a one-sentence error."""

from __future__ import annotations

import json

import pytest

from vllm_console.chat.answer import Answer, AnswerFigures, AnswerReader, Part, PartKind, figures_text
from vllm_console.chat.code import Language, code_for
from vllm_console.chat.conversation import ChatOptions, Turn, request_for
from vllm_console.load.events import AnswerError


def read(*pieces: bytes, at: float = 1.0, step: float = 0.5) -> AnswerReader:
    reader = AnswerReader(0.0)
    for index, piece in enumerate(pieces):
        reader.feed(piece, at + index * step)
    return reader


def test_parts_keep_their_order_and_kind(said, end):
    reader = read(
        said(role="assistant", content=""), said(reasoning="Let me "), said(reasoning_content="think"),
        said(content="Yes"), said(content="."),
        said(tool_calls=[{"index": 0, "function": {"name": "weather", "arguments": ""}}]),
        said(tool_calls=[{"index": 0, "function": {"arguments": '{"city"'}}]),
        said(tool_calls=[{"index": 0, "function": {"arguments": ': "Lima"}'}}]),
        said(tool_calls=[{"index": 1, "function": {"name": "time", "arguments": "{}"}}]),
        end,
    )  # fmt: skip
    reader.end()
    answer = reader.answer()
    assert answer.parts == (
        Part(PartKind.REASONING, "Let me think"),
        Part(PartKind.CONTENT, "Yes."),
        Part(PartKind.TOOL_CALL, '{"city": "Lima"}', "weather"),
        Part(PartKind.TOOL_CALL, "{}", "time"),
    )
    assert (answer.text(), answer.finish_reason) == ("Yes.", "stop")


def test_events_may_be_split_anywhere(said, end):
    stream = said(content="grüße") + end
    for at in range(1, len(stream)):
        reader = read(stream[:at], stream[at:])
        reader.end()
        assert reader.answer().text() == "grüße"


def test_tokens_are_counted_by_the_server():
    """The first event has one token, the second three more."""

    def event(text: str, tokens: int) -> bytes:
        usage = {"prompt_tokens": 7, "completion_tokens": tokens}
        return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}], "usage": usage}).encode() + b"\n\n"

    figures = read(event("", 0), event("a", 1), event("bcd", 4)).answer().figures
    assert figures == AnswerFigures(1.5, pytest.approx(0.5 / 3), 0.5, pytest.approx(6.0), 7, 4, 2.0)
    assert (
        figures_text(Answer(figures=figures))
        == "TTFT 1.5s · ITL 167ms (longest 500ms) · 6.0 tok/s · 7 in + 4 out tokens"
    )


def test_tokens_that_arrive_at_once_have_no_interval(said):
    figures = read(said(content="a") + said(content="b"), step=0.0).answer().figures
    assert (figures.output_tokens, figures.itl_seconds, figures.tokens_per_second) == (2, None, None)
    assert figures.itl_longest_seconds is None


def test_without_counts_each_event_with_text_is_a_token(said):
    figures = read(said(role="assistant", content=""), said(content="a"), said(content="b")).answer().figures
    assert (figures.ttft_seconds, figures.output_tokens, figures.prompt_tokens) == (1.5, 2, None)


@pytest.mark.parametrize(
    ("stream", "why"),
    [
        (b"data: nonsense\n\n", "not an event stream"),
        (b'data: {"choices": [{"delta": "x"}]}\n\n', "not an event stream"),
        (b'data: {"error": {"message": "EngineCore died"}}\n\n', "EngineCore died"),
        (b"data: " + b"x" * (2 << 20), "more than 1 MiB"),
        (b'data: {"choices": [{"delta": {"content": "half"}}]}\n\n', "ended before the answer did"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n', "aborted"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "error"}]}\n\ndata: [DONE]\n\n', "aborted"),
        (b"", "ended before"),
    ],
)
def test_invalid_answer_is_reported_in_one_sentence(stream, why):
    with pytest.raises(AnswerError, match=why):
        read(stream).end()


def turn(prompt: str, text: str, **answer: object) -> Turn:
    return Turn(
        prompt, Answer((Part(PartKind.REASONING, "hm"), Part(PartKind.CONTENT, text)) if text else (), **answer)
    )


def test_request_holds_answered_turns_without_reasoning():
    turns = [turn("one", "1"), turn("lost", "", problem="it ended"), turn("two", "2", stopped=True)]
    options = ChatOptions("Be brief.", 0.0, 9, ("\n",), tools=({"type": "function"},))
    assert request_for("tiny", turns, "three", options, raw=False).body == {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "one"}, {"role": "assistant", "content": "1"},
            {"role": "user", "content": "two"}, {"role": "assistant", "content": "2"},
            {"role": "user", "content": "three"},
        ],
        "tools": [{"type": "function"}], "temperature": 0.0, "max_tokens": 9, "stop": ["\n"],
    }  # fmt: skip


def test_raw_text_continues_and_limits_the_answer_to_the_context():
    found = request_for("tiny", [turn("Once", " upon")], " a", ChatOptions("x"), raw=True, context=512)
    assert found.path == "/v1/completions"
    assert found.body == {"model": "tiny", "prompt": "Once upon a", "max_tokens": 128}


HOSTILE = "'; $(touch x) `id` \\ \" \x1b]52;c;aGk=\x07 \u202eevil \u2028 [red]é😀 ${x}"


def test_generated_code_takes_the_key_from_the_environment(tmp_path):
    import subprocess

    request = request_for("m'x", [], HOSTILE, ChatOptions(temperature=0.5), raw=False)
    codes = {one: code_for("http://127.0.0.1:8000", request, one, variable="VLLM_API_KEY") for one in Language}
    for code in codes.values():
        assert "VLLM_API_KEY" in code
        assert all(one.isprintable() or one == "\n" for one in code)
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    curl.chmod(0o700)
    done = subprocess.run(
        ["sh", "-c", codes[Language.CURL]], capture_output=True, text=True, check=True, cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "VLLM_API_KEY": "key"},
    )  # fmt: skip
    assert "Authorization: Bearer key" in done.stdout
    sent = json.loads(done.stdout[done.stdout.index("\n{") :])
    assert sent == request.body | {"stream": True}
    assert not (tmp_path / "x").exists()
    calls: list[dict[str, object]] = []
    source = codes[Language.PYTHON].replace("from openai import OpenAI", "")
    fake = type("Client", (), {})()
    fake.chat = type("Chat", (), {})()
    fake.chat.completions = type("Completions", (), {"create": lambda self, **words: calls.append(words) or []})()
    exec(source, {"OpenAI": lambda **words: fake})
    assert calls == [request.body | {"stream": True}]

"""Conversations over real connections: stopped, interrupted, refused, with a base model, and through the command."""

from __future__ import annotations

import asyncio
import io
import json
import time

import pytest

from vllm_console.chat.client import ChatClient, ChatServer
from vllm_console.chat.conversation import ChatOptions
from vllm_console.chat.session import ChatSession
from vllm_console.cli.main import main
from vllm_console.load.client import ApiAccess
from vllm_launchers.errors import OperationError

TEMPLATE = (
    "As of transformers v4.44, default chat template is no longer allowed, so you must provide a chat template if the "
    "tokenizer does not define one."
)
HOSTILE = "[red]x[/] \x1b[31mred\x1b]52;c;aGk=\x07\u202e end"


def ask(server: ChatServer, prompt: str = "hi", options: ChatOptions = ChatOptions()):  # noqa: B008 - it is immutable
    return asyncio.run(ChatClient(server).ask((), prompt, options, lambda _: None))


def session_on(script) -> ChatSession:
    return ChatSession(lambda: ChatServer("chat", script.url), OperationError)


def until(true) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_key_is_sent_and_answer_tokens_are_counted(script, said, end):
    script.pieces = [said(content="Hel"), said(content="lo"), end]
    answer = ask(ChatServer("chat", script.url, access=ApiAccess("sesame")))
    assert (answer.text(), answer.problem) == ("Hello", "")
    assert all("authorization: Bearer sesame" in head for head in script.heads)
    path, body = script.requests[0]
    assert path == "/v1/chat/completions"
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_base_model_continues_the_text_with_a_notice(script):
    script.refusals["/v1/chat/completions"] = (400, TEMPLATE)
    script.pieces = [b'data: {"choices": [{"text": " time", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n']
    client = ChatClient(ChatServer("base", script.url))
    for _ in range(2):
        answer = asyncio.run(client.ask((), "Once upon a", ChatOptions(system="x"), lambda _: None))
        assert (answer.text(), answer.raw, answer.problem) == (" time", True, "")
        assert answer.note == (
            "This model has no chat template: the prompt is sent as it is, and the model continues the text, without "
            "the system prompt."
        )
    paths = [path for path, _ in script.requests]
    assert paths == ["/v1/chat/completions", "/v1/completions", "/v1/completions"], "it is refused only once"


@pytest.mark.parametrize(
    ("status", "message", "why"),
    [(400, "max_tokens is too large", "HTTP 400: max_tokens is too large"), (401, "no", "set VLLM_API_KEY"),
     (404, TEMPLATE[:10], "HTTP 404"), (500, TEMPLATE, "HTTP 500"), (400, HOSTILE, "[red]x[/] red end")],
)  # fmt: skip
def test_refusal_is_one_sentence(script, status, message, why):
    script.refusals["/v1/chat/completions"] = (status, message)
    answer = ask(ChatServer("chat", script.url))
    assert why in answer.problem
    assert answer.problem.isprintable()


def test_stopping_closes_the_stream_and_keeps_the_conversation(script, said, end):
    session = session_on(script)
    script.pieces = [said(content="a long"), None]
    assert session.send("one", ChatOptions())
    until(lambda: session.turns[-1].answer.text() == "a long")
    assert not session.send("two", ChatOptions()), "one answer at a time"
    session.stop()
    assert script.gone.wait(20), "the server sees that its client is gone"
    until(lambda: not session.running)
    assert session.turns[0].answer.stopped
    script.pieces = [said(content="fine"), end]
    session.send("two", ChatOptions())
    until(lambda: not session.running)
    assert [message["content"] for message in script.requests[-1][1]["messages"]] == ["one", "a long", "two"]
    session.clear()
    assert session.turns == ()


def test_server_ending_mid_answer_is_one_message(script, said):
    session = session_on(script)
    script.pieces = [said(content="half")]
    session.send("one", ChatOptions())
    until(lambda: not session.running)
    answer = session.turns[0].answer
    assert answer.text() == "half"
    assert answer.problem == "chat: the connection ended before the answer did"
    script.url = "http://127.0.0.1:9"
    session.send("two", ChatOptions())
    until(lambda: not session.running)
    assert "is the server up?" in session.turns[1].answer.problem
    assert len(session.turns) == 2


def test_refusal_before_sending_is_the_answers_problem():
    def find() -> ChatServer:
        raise OperationError("chat is stopped: you can chat with it once it is ready")

    session = ChatSession(find, OperationError)
    session.send("one", ChatOptions())
    until(lambda: not session.running)
    assert session.turns[0].answer.problem.startswith("chat is stopped")


@pytest.fixture
def piped(monkeypatch, tmp_path):
    """Run ``chat`` with a text on standard input."""

    def run(text: bytes, *words: str) -> int:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        return main(["--state", str(tmp_path / "state"), "chat", *words])

    return run


def test_piped_output_holds_only_the_sanitized_answer(script, said, end, piped, capsys):
    call = {"index": 0, "function": {"name": "we\x1b[2Jather", "arguments": "{}"}}
    half = HOSTILE.index("52")
    script.pieces = [said(reasoning=HOSTILE), said(content=HOSTILE[:half]), said(content=HOSTILE[half:] + "\n\tb"),
                     said(tool_calls=[call]), end]  # fmt: skip
    assert piped(b"hi\n", script.url) == 0
    out, errors = capsys.readouterr()
    assert out == "[red]x[/] red end\n\tb\ntool call weather {}\n"
    assert errors.startswith("reasoning: [red]x[/] red end\nTTFT ")
    assert script.requests[0][1]["messages"] == [{"role": "user", "content": "hi"}]


def test_json_keeps_the_answer_unchanged(script, said, end, piped, capsys):
    script.pieces = [said(content=HOSTILE), end]
    assert piped(b"hi", script.url, "--json", "--also", script.url, "--temperature", "0") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] == found["also"]["answer"] == HOSTILE
    assert (found["model"], found["figures"]["output_tokens"], found["problem"]) == ("tiny", 1, None)
    assert script.requests[0][1]["temperature"] == 0


def test_broken_answer_exits_with_code_1(script, said, piped, capsys):
    script.pieces = [said(content="half")]
    assert piped(b"hi", script.url) == 1
    out, errors = capsys.readouterr()
    assert out == "half\n"
    assert "ended before the answer did" in errors


@pytest.mark.parametrize(("text", "words"), [(b"", []), (b" \n", []), (b"\xff", []), (b"hi", ["--tools", "none.json"])])
def test_invalid_prompt_is_a_usage_error(script, piped, text, words):
    assert piped(text, script.url, *words) == 2
    assert script.requests == []


def test_temperature_out_of_range_is_refused(piped):
    with pytest.raises(SystemExit) as ended:
        piped(b"hi", "chat", "--temperature", "3")
    assert ended.value.code == 2


def test_unknown_server_and_read_only_exit_codes(piped, monkeypatch, tmp_path):
    assert piped(b"hi", "nobody") == 3
    assert main(["--read-only", "chat", "nobody"]) == 4


def test_code_is_printed_without_a_request(script, piped, capsys):
    assert piped(b"hi", script.url, "--code", "python") == 0
    assert "model='tiny'" in capsys.readouterr().out
    assert script.requests == []


def test_code_is_not_printed_as_json(script, piped, capsys):
    assert piped(b"hi", script.url, "--code", "python", "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--code prints code" in captured.err

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from vllm_console.chat.client import ChatServer
from vllm_console.chat.conversation import ChatOptions
from vllm_console.chat.session import ChatSession

if TYPE_CHECKING:
    from conftest import RealServer
else:
    RealServer = Any

pytestmark = pytest.mark.real


def figure(server: RealServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def until(true: Any) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("raw", [False, True])
def test_chat_matches_server_token_counts_and_keeps_history(shared_server: RealServer, raw: bool) -> None:
    before = figure(shared_server, "generation_tokens_total")
    session = ChatSession(lambda: ChatServer("tiny", shared_server.url), OSError)
    options = ChatOptions(temperature=0.0, max_tokens=12, raw=raw)
    for prompt in ("Hello there", "And again"):
        session.send(prompt, options)
        until(lambda: not session.running)
    one, two = (turn.answer for turn in session.turns)
    assert (one.problem, two.problem, one.raw) == ("", "", raw)
    counted = (one.figures.output_tokens or 0) + (two.figures.output_tokens or 0)
    assert counted == figure(shared_server, "generation_tokens_total") - before
    assert (two.figures.prompt_tokens or 0) > (one.figures.prompt_tokens or 0), "the first turn is included"
    assert one.figures.ttft_seconds


def test_stopped_response_is_aborted(shared_server: RealServer) -> None:
    for _ in range(10):  # on a busy machine a response may finish before it is stopped
        session = ChatSession(lambda: ChatServer("tiny", shared_server.url), OSError)
        session.send("Tell me everything", ChatOptions(max_tokens=400, temperature=0.0))
        until(lambda session=session: session.turns and session.turns[0].answer.parts)
        session.stop()
        until(lambda session=session: not session.running)
        if session.turns[0].answer.stopped:
            break
    else:
        pytest.fail("no answer was stopped")
    until(lambda: figure(shared_server, "num_requests_running") == 0)

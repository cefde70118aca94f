"""Screenshots of a chat: reasoning, a tool call, an interrupted response, and two servers side by side."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from vllm_console.chat.answer import Answer, AnswerFigures, Part, PartKind
from vllm_console.chat.conversation import ChatOptions, Turn
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_console.ui.parts.chat import Chat
from vllm_console.ui.screens.chat import ChatScreen

FIGURES = AnswerFigures(0.212, 0.0238, 0.061, 42.0, 1204, 61, 1.64)
KEPT = "The KV cache holds the keys and values of all tokens so far, so that each new token attends to them without "
THOUGHT = Part(PartKind.REASONING, "They want a short answer.")
ANSWER = Part(PartKind.CONTENT, KEPT + "computing them again.\n\n    bytes = 2 * layers * heads * dim")
CALL = Part(PartKind.TOOL_CALL, '{"city": "Lima"}', "weather")
HALF = Part(PartKind.CONTENT, "Its size follows from")
BROKEN = "chat: the connection was lost"
TURNS = (
    Turn("What is a KV cache?", Answer((THOUGHT, ANSWER), FIGURES, "stop")),
    Turn("And the weather?\nIn Lima.", Answer((CALL,), FIGURES, "tool_calls")),
    Turn("Go on", Answer((HALF,), FIGURES, problem=BROKEN)),
)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_chat(snap_compare, alone, fakes, servers):
    seen = Sample(fakes.NOW, {"0": EngineSample(kv_cache_usage=0.63, requests_running=4.0, requests_waiting=0.0)})
    server = replace(fakes.chat(fakes.NOW), sample=seen)
    chat = Chat(SimpleNamespace(chat_server=str), "chat", ChatOptions("Be brief.", 0.7, 400))
    chat.sessions = {name: SimpleNamespace(turns=TURNS, running=False) for name in ("chat", "coder")[:servers]}
    console = SimpleNamespace(server=lambda _: server, snapshot=SimpleNamespace(at=fakes.NOW))
    size = (80, 24) if servers == 1 else (120, 40)
    assert snap_compare(alone(lambda: ChatScreen(console, chat)), terminal_size=size)

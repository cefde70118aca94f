"""The comparison of two servers' responses."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from vllm_console.cli.restart import who_serves
from vllm_console.fleet import rolling
from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.rolling import AnswerComparison
from vllm_console.fleet.snapshot import ServerView
from vllm_launchers.keeper import golden
from vllm_launchers.keeper.health import TEXT
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.keeper.server_client import Response


@pytest.mark.parametrize(
    ("compared", "sentence"),
    [
        (AnswerComparison(0), "answers were not compared: the servers do not complete the golden prompts"),
        (AnswerComparison(4), "same answers to all 4 golden prompts"),
        (
            AnswerComparison(4, ("a",)),
            "different answers to 1 of 4 golden prompts; flags such as the data type can change answers",
        ),
    ],
)
def test_difference_is_reported_with_possible_reasons(compared: AnswerComparison, sentence: str) -> None:
    assert compared.sentence == sentence


def test_server_without_warm_up_gets_a_longer_first_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Client:
        def ask(self, method: str, _path: str, body: Any = None, **_: Any) -> Response:
            if method == "GET":
                return Response(200, json.dumps({"data": [{"id": "m", "max_model_len": 4096}]}).encode())
            asked.append(body["prompt"])
            choice = {"text": "x", "finish_reason": "length", "token_ids": [1]}
            return Response(200, json.dumps({"choices": [choice]}).encode())

    monkeypatch.setattr(rolling, "_client", lambda _: Client())
    cold = cast("ServerRecord", SimpleNamespace(name="a", current=SimpleNamespace(spec=SimpleNamespace(warm_up=None))))
    assert rolling.compare_answers(cold, cold).compared == len(golden.PROMPTS)
    assert asked[:2] == [TEXT, TEXT]
    assert TEXT not in asked[2:]


@pytest.mark.parametrize(
    ("old", "sentence"),
    [(State.READY, "chat keeps serving"), (State.FAILED, "chat-2 is ready at http://127.0.0.1:8001")],
)
def test_final_message_names_the_serving_server(old: State, sentence: str) -> None:
    views = {name: ServerView(name, state, 0.0) for name, state in (("chat", old), ("chat-2", State.READY))}
    views["chat-2"] = replace(views["chat-2"], port=8001)
    fleet = cast("LocalFleet", SimpleNamespace(snapshot=lambda: SimpleNamespace(server=views.get)))
    assert who_serves(fleet, "chat", views["chat-2"]) == sentence

"""Golden prompts: what counts as the same response, and which responses are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from vllm_launchers.keeper import golden
from vllm_launchers.keeper.records import GoldenAnswer
from vllm_launchers.keeper.server_client import Response, ServerClient


class Scripted:
    """Responds with ``answer``, which gets the prompt and how often it was requested before."""

    def __init__(self, answer: Callable[[str, int], Response]) -> None:
        self._answer = answer
        self._asked: dict[str, int] = {}

    def ask(self, method: str, path: str, body: Any = None, **_: Any) -> Response:
        if method == "GET":
            return Response(200, json.dumps({"data": [{"id": "m", "max_model_len": 64}]}).encode())
        count = self._asked.get(body["prompt"], 0)
        self._asked[body["prompt"]] = count + 1
        return self._answer(body["prompt"], count)


def completion(text: str, tokens: list[int] | None, reason: str = "length") -> Response:
    choice = {"text": text, "finish_reason": reason, "token_ids": tokens}
    return Response(200, json.dumps({"choices": [choice]}).encode())


def recorded(answer: Callable[[str, int], Response]) -> tuple[GoldenAnswer, ...]:
    return golden.record(cast("ServerClient", Scripted(answer)), 1.0, ("a", "b"))


def test_answers_are_kept_with_their_tokens() -> None:
    found = recorded(lambda prompt, _: completion(f"{prompt}!", [1, 2]))
    assert found == (GoldenAnswer("a", "a!", (1, 2)), GoldenAnswer("b", "b!", (1, 2)))


def test_irreproducible_answer_is_left_out() -> None:
    found = recorded(lambda prompt, count: completion("x", [count if prompt == "a" else 7]))
    assert [one.prompt for one in found] == ["b"]


def test_server_without_completions_has_no_golden_prompts() -> None:
    assert recorded(lambda *_: Response(404, b"{}")) == ()


def test_aborted_answer_is_discarded() -> None:
    assert recorded(lambda *_: completion("", [], "abort")) == ()


def test_failing_engine_is_an_error() -> None:
    with pytest.raises(OSError, match="500"):
        recorded(lambda *_: Response(500, b"{}"))


@pytest.mark.parametrize(
    ("after", "differs"),
    [
        (GoldenAnswer("a", "other text", (1, 2)), False),
        (GoldenAnswer("a", "x", (1, 3)), True),
        (GoldenAnswer("a", "x"), False),
        (GoldenAnswer("a", "y"), True),
    ],
    ids=["same tokens", "other tokens", "same text without tokens", "other text without tokens"],
)
def test_tokens_decide_if_both_answers_have_them(after: GoldenAnswer, *, differs: bool) -> None:
    assert golden.differing([GoldenAnswer("a", "x", (1, 2))], [after]) == (("a",) if differs else ())


def test_unanswered_prompt_counts_as_different() -> None:
    assert golden.differing([GoldenAnswer("a", "x")], []) == ("a",)

"""Golden prompts: a few fixed prompts whose greedy answers show whether a server still computes the same results.

The answers are recorded when a server becomes ready. They are compared after it has slept, or with those of another
generation of the same model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_launchers.keeper.records import GoldenAnswer
from vllm_launchers.keeper.server_client import ServerClient, base_model

PROMPTS = (
    "The capital of France is",
    "One, two, three, four, five, six,",
    "def add(a, b):\n    return",
    "Water boils at a temperature of",
)
"""Shorter than one KV cache block, so that none is answered from the prefix cache."""
TOKENS = 16
"""Number of tokens in each answer."""
PATH = "/v1/completions"


def record(client: ServerClient, seconds: float, prompts: Sequence[str] = PROMPTS) -> tuple[GoldenAnswer, ...]:
    """The server's answers, each within ``seconds``; those that differ when asked again are left out.

    Empty if the server does not complete text (a pooling model, no tokenizer). Raises OSError.
    """
    first = answers(client, seconds, prompts)
    unstable = differing(first, answers(client, seconds, [one.prompt for one in first]))
    return tuple(one for one in first if one.prompt not in unstable)


def answers(client: ServerClient, seconds: float, prompts: Sequence[str]) -> tuple[GoldenAnswer, ...]:
    """The server's answers, up to the first prompt that it does not accept. Raises OSError."""
    model = base_model(client.ask("GET", "/v1/models").document)
    if model is None:
        return ()
    found = []
    for prompt in prompts:
        response = client.ask("POST", PATH, request(str(model["id"]), prompt), seconds=seconds)
        if response.status >= 500:
            raise OSError(f"{PATH}: {response.message}")
        answer = read_answer(prompt, response.document) if response.status == 200 else None
        if answer is None:
            break
        found.append(answer)
    return tuple(found)


def request(model: str, prompt: str) -> dict[str, Any]:
    """The request for a deterministic completion. vLLM before 0.10.2 ignores ``return_token_ids``."""
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "seed": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def read_answer(prompt: str, document: Mapping[str, Any] | None) -> GoldenAnswer | None:
    """The answer in a response; None if it has none."""
    choices = (document or {}).get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
        return None
    if choice.get("finish_reason") not in ("length", "stop"):
        return None  # aborted
    ids = choice.get("token_ids")
    tokens = tuple(ids) if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else ()
    return GoldenAnswer(prompt, choice["text"], tokens)


def differing(before: Sequence[GoldenAnswer], after: Sequence[GoldenAnswer]) -> tuple[str, ...]:
    """Prompts whose answers differ or are missing. Compares tokens if available, else text."""
    again = {one.prompt: one for one in after}
    return tuple(one.prompt for one in before if not _same(one, again.get(one.prompt)))


def _same(one: GoldenAnswer, other: GoldenAnswer | None) -> bool:
    if other is None:
        return False
    return one.tokens == other.tokens if one.tokens and other.tokens else one.text == other.text

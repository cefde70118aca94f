"""The figures of an answer in a line, as commands and screens write them."""

from __future__ import annotations

from vllm_console.chat.answer import Answer
from vllm_console.text import count, rate, seconds


def figures_text(answer: Answer) -> str:
    """TTFT, ITL, tokens per second and counts of tokens; empty while no token has come."""
    found = answer.figures
    if found.ttft_seconds is None:
        return ""
    itl = f"ITL {seconds(found.itl_seconds)}"
    if found.itl_longest_seconds is not None:
        itl += f" (longest {seconds(found.itl_longest_seconds)})"
    speed = rate(found.tokens_per_second, "tok")
    tokens = f"{count(found.prompt_tokens)} + {count(found.output_tokens)} tokens"
    return " · ".join((f"TTFT {seconds(found.ttft_seconds)}", itl, speed, tokens, *_ended(answer)))


def _ended(answer: Answer) -> list[str]:
    if answer.stopped:
        return ["stopped"]
    return ["ended by max tokens"] if answer.finish_reason == "length" else []

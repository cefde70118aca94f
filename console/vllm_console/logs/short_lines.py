"""Lines of a vLLM log as a narrow pane shows them: the time of day and the message, its statistics in brief. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from vllm_console.logs.vllm_lines import parse_line

_ENGINE = r"Engine (\d+): "
_STATISTICS = (
    ("prompt", r"Avg prompt throughput: ([\d.]+) tokens/s", " tok/s"),
    ("gen", r"Avg generation throughput: ([\d.]+) tokens/s", " tok/s"),
    ("run", r"Running: (\d+)", ""),
    ("wait", r"(?:Waiting|Pending): (\d+)", ""),
    ("KV", r"(?:GPU )?KV cache usage: ([\d.]+)%", "%"),
)
"""The figures of vLLM's periodic line, in the order in which they are shown. One such line comes in ten seconds: what
matches them is not compiled before."""


@lru_cache(maxsize=512)
def short_line(text: str) -> str:
    """``18:01:43 message``: without process, date, place in the source, and level unless it is a warning or worse."""
    line = next(parse_line(0, text), None)
    if line is None or not line.message.strip():
        return text
    clock = line.clock[-8:]
    level = line.level if line.level not in ("", "INFO") else ""
    return " ".join(filter(None, (clock, level, _statistics(line.message) or line.message)))


def _statistics(message: str) -> str:
    """``prompt 1758 tok/s · gen 1100 tok/s · run 40 · wait 13 · KV 62%``; empty for any other message."""
    if "Avg prompt throughput" not in message:
        return ""
    found = [(name, figure[1], unit) for name, pattern, unit in _STATISTICS if (figure := re.search(pattern, message))]
    parts = [f"{name} {float(figure):.0f}{unit}" for name, figure, unit in found]
    engine = re.match(_ENGINE, message)
    if engine is not None and int(engine[1]):
        parts.insert(0, f"engine {int(engine[1])}")
    return " · ".join(parts)

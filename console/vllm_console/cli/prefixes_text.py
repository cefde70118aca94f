"""What the prefix cache did for a server's requests, as ``requests --prefixes`` prints it."""

from __future__ import annotations

from msgspec.structs import asdict

from vllm_console.cli.output import Document
from vllm_console.history.prefix_use import PrefixUse, StillCached
from vllm_console.text import count, percent

_COLUMNS = (
    ("PROMPT TOKENS", 16),
    ("REQUESTS", 10),
    ("WITH HITS", 11),
    ("TOKENS", 12),
    ("CACHED", 12),
    ("HIT RATE", 10),
)


def prefixes_document(use: PrefixUse) -> Document:
    """It as JSON values."""
    classes = [{**asdict(one), "hit_rate": one.hit_rate} for one in use.classes]
    return {
        "requests": use.requests,
        "requests_with_hits": use.hits,
        "requests_unknown": use.unknown,
        "prompt_tokens": use.prompt_tokens,
        "cached_tokens": use.cached_tokens,
        "hit_rate": use.hit_rate,
        "by_prompt_tokens": [
            {"from": one.pop("least"), "to": one.pop("most"), "requests_with_hits": one.pop("hits"), **one}
            for one in classes
        ],
        "resumed": asdict(use.resumed) if use.resumed is not None else None,
    }


def prefixes_lines(use: PrefixUse) -> list[str]:
    """A line for each class of prompt lengths, and what became of cached prefixes."""
    lines = [f"{percent(use.hit_rate)} of the prompt tokens of {count(use.requests)} requests were cached:", ""]
    lines.append("".join(f"{title:<{width}}" for title, width in _COLUMNS).rstrip())
    for one in use.classes:
        cells = (
            f"{count(one.least)}-{count(one.most)}", count(one.requests), count(one.hits), count(one.prompt_tokens),
            count(one.cached_tokens), percent(one.hit_rate),
        )  # fmt: skip
        lines.append("".join(f"{cell:<{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True)).rstrip())
    lines.append("")
    if use.unknown:
        lines.append(f"{count(use.unknown)} more ended before their first token, or their cached tokens are not known")
    lines.append(f"resumed after a preemption: {resumed_text(use.resumed)}")
    return lines


def resumed_text(resumed: StillCached | None) -> str:
    """What resumed requests still found."""
    if resumed is None:
        return "none known"
    found = f"{count(resumed.cached_tokens)} of {count(resumed.tokens)} tokens"
    return f"{count(resumed.requests)} requests found {found} still cached"

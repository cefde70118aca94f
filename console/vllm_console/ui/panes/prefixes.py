"""What the prefix cache did for the requests of pane 7, by the length of their prompts: one of the pane's views."""

from __future__ import annotations

from textual.strip import Strip

from vllm_console.history.prefix_use import LengthClass, PrefixUse, StillCached
from vllm_console.metrics.sample import Window
from vllm_console.text import count, percent
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, DIM, WARN
from vllm_console.ui.widgets.draw import Part, bar, fit

_COLUMNS = (("PROMPT TOKENS", 15, "<"), ("REQUESTS", 8, ">"), ("HIT", 6, ">"), ("CACHED", 8, ">"), ("RATE", 5, ">"))
"""``HIT``: requests with a hit; ``CACHED``: tokens."""

SHORTEST_BAR, LONGEST_BAR = 8, 40


def prefix_lines(use: PrefixUse, window: Window | None, width: int, height: int) -> list[Strip]:
    """A line for each class of lengths with its hit rate as a bar; then all together, and resumed requests."""
    if window is not None and window.prefix_caching is False:
        return [line(), line((" Prefix caching is off.", WARN))][:height]
    if not use.requests:
        return [line(), line((fit(" No finished request with known cached tokens.", width).rstrip(), DIM))][:height]
    below = _below(use, window, width)
    room = max(1, height - 1 - len(below))
    used = 1 + sum(wide + 1 for _, wide, _ in _COLUMNS)
    long_bar = min(LONGEST_BAR, width - used - 1)
    head = " " + " ".join(fit(name, wide, align) for name, wide, align in _COLUMNS)
    rows = [_row(one, long_bar, width) for one in use.classes]
    if len(rows) > room:
        rows = [
            *rows[: room - 1],
            line((f" {len(rows) - room + 1} more: a larger pane shows them", DIM)).crop(0, width),
        ]
    return [line((fit(head, width).rstrip(), DIM)), *rows, *below][:height]


def _row(one: LengthClass, long_bar: int, width: int) -> Strip:
    cells = (f"{count(one.least)}-{count(one.most)}", count(one.requests), count(one.hits), count(one.cached_tokens),
             percent(one.hit_rate))  # fmt: skip
    text = " ".join(fit(cell, wide, align) for cell, (_, wide, align) in zip(cells, _COLUMNS, strict=True))
    parts: list[Part] = [f" {text}"]
    if long_bar >= SHORTEST_BAR:
        parts += [" ", (bar(one.hit_rate, long_bar), ACCENT)]
    return line(*parts).crop(0, width)


def _below(use: PrefixUse, window: Window | None, width: int) -> list[Strip]:
    """All of them together, how fine the cache is, resumed requests: what is known."""
    step = window.prefix_step if window is not None else None
    whole: list[Part] = [(" all ", DIM), percent(use.hit_rate), (" of ", DIM), count(use.prompt_tokens),
                         (" prompt tokens cached", DIM)]  # fmt: skip
    if step is not None:
        whole += [(" · found in steps of ", DIM), count(step)]
    lines = [line(*whole).crop(0, width)]
    if use.resumed is not None and use.resumed.tokens:
        lines.append(_resumed(use.resumed).crop(0, width))
    return lines


def _resumed(resumed: StillCached) -> Strip:
    gone = resumed.tokens - resumed.cached_tokens
    return line((" ", DIM), count(resumed.requests), (" resumed after preemption: ", DIM),
                percent(resumed.cached_tokens / resumed.tokens), (" still cached, ", DIM),
                (count(gone), WARN if gone else None), (" tokens again", DIM))  # fmt: skip

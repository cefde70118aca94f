"""Pane 4: how much work gets done, and how much waits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.model import ServerView
from vllm_console.format import UNKNOWN, count
from vllm_console.text import plain
from vllm_console.ui.panes.base import Pane, age_note, title_of
from vllm_console.ui.theme import ACCENT, DIM, WARN
from vllm_console.ui.widgets.chart import chart_of
from vllm_console.ui.widgets.draw import Part, rule
from vllm_console.ui.widgets.lines import line

SMALLEST_CHART = 4


class ThroughputPane(Pane):
    """Tokens and requests per second, running and waiting requests, now and over a quarter of an hour."""

    def draw(self, server: ServerView, now: float, width: int, height: int) -> Sequence[Strip]:
        """The pane's lines."""
        return throughput_lines(server, now, width, height)


def rate(value: float | None) -> str:
    """Requests per second: one decimal below ten."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if value < 10 else count(value)


def throughput_lines(server: ServerView, now: float, width: int, height: int) -> list[Strip]:
    """Title, figures, and charts of tokens per second, running and waiting, as there is room."""
    window = server.window
    out, prompt, requests, running, waiting = (
        (
            window.generation_tokens_per_second,
            window.prompt_tokens_per_second,
            window.requests_per_second,
            window.requests_running,
            window.requests_waiting,
        )
        if window
        else (None,) * 5
    )
    figures: list[Part] = [
        f" {count(out)}", (" out ", DIM), count(prompt), (" in tok/s · ", DIM), rate(requests), (" req/s", DIM)
    ]  # fmt: skip
    load: list[Part] = [f" {count(running)}", (" running · ", DIM), count(waiting), (" waiting", DIM)]
    lines = [rule(title_of(4, "Requests", server), width, age_note(server, now)), line(*figures), line(*load)]
    if server.load:
        sent: list[Part] = [(plain(server.load), ACCENT)]
        beside = lines[-1].cell_length + 3 + cell_len(server.load) <= width
        lines[2:] = [line(*load, (" · ", DIM), *sent)] if beside else [lines[-1], line(" ", *sent)]
    room = height - len(lines)
    charts = [
        ("generation_tokens_per_second", "tokens/s out", ACCENT),
        ("requests_running", "running", ACCENT),
        ("requests_waiting", "waiting", WARN),
    ]
    fitting = min(len(charts), max(1, room // SMALLEST_CHART))
    for index, (key, title, style) in enumerate(charts[:fitting]):
        share = room // fitting + (1 if index < room % fitting else 0)
        if share >= 2:
            lines.append(line((f" {title}", DIM)))
            lines += chart_of(server.series, key, width, share - 1, count, style=style)
    return lines[:height]

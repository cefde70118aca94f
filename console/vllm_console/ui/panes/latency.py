"""Pane 3: how long requests wait and take."""

from __future__ import annotations

from collections.abc import Sequence

from textual.strip import Strip

from vllm_console.fleet.model import ServerView
from vllm_console.format import seconds
from vllm_console.ui.panes.base import Pane, age_note, over, quantile, title_of
from vllm_console.ui.theme import BAD, DIM, STRONG
from vllm_console.ui.widgets.chart import chart_of
from vllm_console.ui.widgets.draw import Part, fit, rule
from vllm_console.ui.widgets.lines import line

LABELS = {
    "ttft": "TTFT",
    "itl": "ITL",
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "e2e": "end-to-end",
}
SMALLEST_CHART = 5


class LatencyPane(Pane):
    """Quantiles of the last minute against the goals, and the p99 of TTFT and ITL over a quarter of an hour."""

    def draw(self, server: ServerView, now: float, width: int, height: int) -> Sequence[Strip]:
        """The pane's lines."""
        return latency_lines(server, now, width, height)


def latency_lines(server: ServerView, now: float, width: int, height: int) -> list[Strip]:
    """Title, table, and as many small charts as there is room for."""
    goals = goals_of(server)
    column = min(10, max(6, (width - 14) // 4))
    heads = "".join(fit(head, column, ">") for head in ("p50", "p90", "p99", "goal"))
    note = age_note(server, now) or (("last minute", DIM),)
    lines = [rule(title_of(3, "Latency", server), width, note), line((fit("", 11) + heads, DIM))]
    lines += [_row(server, latency, goals.get(latency), column) for latency in LABELS]
    room = height - len(lines)
    charts = [("ttft_p99", "TTFT p99", "ttft"), ("itl_p99", "ITL p99", "itl")]
    fitting = min(len(charts), room // SMALLEST_CHART)
    for index, (key, title, latency) in enumerate(charts[:fitting]):
        share = room // fitting + (1 if index < room % fitting else 0)
        lines.append(line((f" {title}", DIM)))
        lines += chart_of(server.series, key, width, share - 1, seconds, goal=goals.get(latency))
    return lines[:height]


def goals_of(server: ServerView) -> dict[str, float]:
    """The p99 objectives, in seconds, by latency."""
    goals = server.objectives
    return {"ttft": goals.ttft_p99_seconds, "itl": goals.itl_p99_seconds} if goals else {}


def _row(server: ServerView, latency: str, goal: float | None, column: int) -> Strip:
    found = quantile(server.window, latency)
    missed = over(found.p99 if found else None, goal)
    parts: list[Part] = [fit(f" {LABELS[latency]}", 11)]
    parts += [fit(seconds(value), column, ">") for value in ((found.p50, found.p90) if found else (None, None))]
    p99 = fit(seconds(found.p99 if found else None), column, ">")
    parts.append((p99, BAD if missed else STRONG))
    parts.append((fit(seconds(goal) if goal is not None else "", column, ">"), DIM))
    if missed:
        parts.append((" !", BAD))
    return line(*parts)

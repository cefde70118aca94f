"""Pane 2: how often requests are thrown out of the KV cache and computed anew."""

from __future__ import annotations

from collections.abc import Sequence

from textual.strip import Strip

from vllm_console.fleet.model import ServerView
from vllm_console.format import count, percent
from vllm_console.ui.panes.base import Pane, age_note, marked, over, title_of
from vllm_console.ui.theme import DIM, WARN
from vllm_console.ui.widgets.chart import chart_of
from vllm_console.ui.widgets.draw import Part, rule
from vllm_console.ui.widgets.lines import line


class PreemptionsPane(Pane):
    """Preemptions per minute, their share of requests against the goal, and when they happened."""

    def draw(self, server: ServerView, now: float, width: int, height: int) -> Sequence[Strip]:
        """The pane's lines."""
        return preemption_lines(server, now, width, height)


def preemption_lines(server: ServerView, now: float, width: int, height: int) -> list[Strip]:
    """Title with the rate now, share against the goal, timeline."""
    window = server.window
    share = window.preemption_share if window else None
    goal = server.objectives.preemption_rate if server.objectives else None
    rate = count(window.preemptions_per_minute if window else None)
    right = age_note(server, now) or (f"{rate}/min",)
    often = share is not None and share > 1
    shown, of = (f"{share:.1f}", " per request") if often else (percent(share, 1), " of requests")
    parts: list[Part] = [" ", marked(shown, over(share, goal)), (of, DIM)]
    if goal is not None:
        parts += [(" · goal ", DIM), percent(goal, 1 if goal < 0.01 else 0)]
    per_minute = 60.0 / server.series.step if server.series else 1.0
    chart = chart_of(server.series, "preemptions", width, height - 2, count, how=_mean, scale=per_minute, style=WARN)
    return [rule(title_of(2, "Preemptions", server), width, right), line(*parts), *chart][:height]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)  # `statistics` would add milliseconds to the start of the console

"""Pane 1: how full the KV cache is."""

from __future__ import annotations

from collections.abc import Sequence

from textual.strip import Strip

from vllm_console.fleet.model import ServerView
from vllm_console.format import UNKNOWN, count, percent
from vllm_console.ui.panes.base import Pane, age_note, marked, over, title_of
from vllm_console.ui.theme import DIM
from vllm_console.ui.widgets.chart import chart_of
from vllm_console.ui.widgets.draw import Part, rule
from vllm_console.ui.widgets.lines import line


class KvCachePane(Pane):
    """Usage over a quarter of an hour on a fixed scale, tokens used of all, prefix hit rate."""

    def draw(self, server: ServerView, now: float, width: int, height: int) -> Sequence[Strip]:
        """The pane's lines."""
        return kv_cache_lines(server, now, width, height)


def kv_cache_lines(server: ServerView, now: float, width: int, height: int) -> list[Strip]:
    """Title with the usage now, chart, figures."""
    window = server.window
    usage = window.kv_cache_usage if window else None
    fullest = window.kv_cache_usage_max if window else None
    goal = server.objectives.kv_cache_usage if server.objectives else None
    right = age_note(server, now) or (marked(percent(usage), over(fullest if fullest is not None else usage, goal)),)
    figures = _figures(server, width)
    chart = chart_of(server.series, "kv_cache_usage", width, height - 1 - len(figures), percent, hi=1.0, goal=goal)
    return [rule(title_of(1, "KV cache", server), width, right), *chart, *figures][:height]


def _figures(server: ServerView, width: int) -> list[Strip]:
    window = server.window
    total = window.kv_cache_tokens if window else None
    usage = window.kv_cache_usage if window else None
    used = total * usage if total is not None and usage is not None else None
    tokens: tuple[Part, ...] = (f" {count(used)}", (" of ", DIM), count(total), (" tokens", DIM))
    hits: tuple[Part, ...] = (("prefix hits ", DIM), percent(window.prefix_hit_rate if window else None))
    if window and over(window.kv_cache_usage_max, (usage or 0) + 0.02):
        hits = (*hits, (" · fullest engine ", DIM), percent(window.kv_cache_usage_max))
    if width >= 42 or UNKNOWN in (count(used), count(total)):
        return [line(*tokens, (" · ", DIM), *hits)]
    return [line(*tokens), line(" ", *hits)]

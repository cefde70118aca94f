"""Pane 1: KV cache usage."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import UNKNOWN, count, percent
from vllm_console.ui.panes.base import age_note, marked, over, title_line, usage_missed, why_empty, window_note
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, chart_of
from vllm_console.ui.widgets.draw import Part, whole_clauses

USAGE = Curve("kv_cache_usage")


def kv_cache_lines(server: ServerView, now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """Title with the usage of the last minute, chart, figures."""
    objective = server.objectives.kv_cache_usage if server.objectives else None
    note = age_note(server, now)
    right, *shorter = (note,) if note else _title_notes(server, now)
    figures = _figures(server, width)
    chart = chart_of(
        server.series,
        (USAGE,),
        width,
        height - 1 - len(figures),
        percent,
        hi=1.0,
        objective=objective,
        area=True,
        view=replace(view, log=False),
        markers=server.markers,
        empty=why_empty(server),
    )
    return [title_line(1, "KV cache", width, right, *shorter), *chart, *figures][:height]


def _title_notes(server: ServerView, now: float) -> Sequence[Sequence[Part]]:
    """The sustained usage of the last minute, which is judged, and the current usage; longest form first.

    If nothing is judged, such as without traffic, only the current usage.
    """
    held = next((one.value for one in server.judged if one.name == "kv_cache_usage"), None)
    usage = percent(server.window.kv_cache_usage if server.window else None)
    of = "mean " if _uneven(server) else ""
    present: Part = (f"{of}{'then' if server.moment is not None else 'now'} ", DIM)
    if held is None:
        return ((present, marked(usage, usage_missed(server))),)
    judged: tuple[Part, ...] = (("sustained ", DIM), marked(percent(held), usage_missed(server, held)))
    both: tuple[Part, ...] = (*judged, (" · ", DIM), present, usage)
    return ((f"{window_note(server, now)}: ", DIM), *both), both, judged


def _uneven(server: ServerView) -> bool:
    """Whether one of several engines has a fuller cache than their mean."""
    window = server.window
    return window is not None and over(window.kv_cache_usage_max, (window.kv_cache_usage or 0) + 0.02)


def _figures(server: ServerView, width: int) -> list[Strip]:
    window = server.window
    total = window.kv_cache_tokens if window else None
    usage = window.kv_cache_usage if window else None
    used = total * usage if total is not None and usage is not None else None
    tokens: tuple[Part, ...] = (f" {count(used)}", (" of ", DIM), count(total), (" tokens", DIM))
    hits: tuple[Part, ...] = (("prefix hits ", DIM), percent(window.prefix_hit_rate if window else None))
    if window and window.prefix_caching is False:
        hits = (("prefix caching off", DIM),)
    if window and _uneven(server):
        hits = (*hits, (" · fullest engine ", DIM), percent(window.kv_cache_usage_max))
    if width >= 42 or UNKNOWN in (count(used), count(total)):
        return [whole_clauses(line(*tokens, (" · ", DIM), *hits), width)]
    return [whole_clauses(row, width) for row in (line(*tokens), line(" ", *hits))]

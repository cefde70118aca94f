"""Pane 1: how full the KV cache is."""

from __future__ import annotations

from msgspec.structs import replace
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import UNKNOWN, count, percent
from vllm_console.ui.panes.base import age_note, marked, over, title_line, usage_missed, why_empty
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, chart_of
from vllm_console.ui.widgets.draw import Part

USAGE = Curve("kv_cache_usage")

WIDE = 50
"""From this width on the title says in full what the median is over."""

APART = 0.05
"""Minimum difference for the median beside the present usage."""


def kv_cache_lines(server: ServerView, now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """Title with the usage now, chart, figures."""
    window = server.window
    usage = window.kv_cache_usage if window else None
    fullest = window.kv_cache_usage_max if window else None
    objective = server.objectives.kv_cache_usage if server.objectives else None
    held = _sustained(server, fullest if fullest is not None else usage)
    right = age_note(server, now) or _title_note(server, held, width)
    figures = _figures(server, width, now=held is not None and server.moment is None)
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
    return [title_line(1, "KV cache", width, right), *chart, *figures][:height]


def _sustained(server: ServerView, now: float | None) -> float | None:
    """The usage that held in the last minute, which is what is judged, if the present one differs."""
    held = next((one.value for one in server.judged if one.name == "kv_cache_usage"), None)
    return held if held is not None and now is not None and abs(held - now) >= APART else None


def _title_note(server: ServerView, held: float | None, width: int) -> tuple[Part, ...]:
    """The usage now, behind what held in the last minute if that differs; the latter alone in a narrow pane."""
    usage = percent(server.window.kv_cache_usage if server.window else None)
    if held is None:
        return (marked(usage, usage_missed(server)),)
    judged = marked(percent(held), usage_missed(server, held))
    if width < WIDE:
        return (("median ", DIM), judged)
    name, when = ("median", "then") if server.moment is not None else ("last minute: median", "now")
    return ((f"{name} ", DIM), judged, (f" · {when} ", DIM), usage)


def _figures(server: ServerView, width: int, *, now: bool) -> list[Strip]:
    """Tokens in the cache and the prefix cache's hits; ``now`` where the title has a figure of the last minute."""
    window = server.window
    total = window.kv_cache_tokens if window else None
    usage = window.kv_cache_usage if window else None
    used = total * usage if total is not None and usage is not None else None
    unit = " tokens now" if now else " tokens"
    tokens: tuple[Part, ...] = (f" {count(used)}", (" of ", DIM), count(total), (unit, DIM))
    hits: tuple[Part, ...] = (("prefix hits ", DIM), percent(window.prefix_hit_rate if window else None))
    if window and window.prefix_caching is False:
        hits = (("prefix caching off", DIM),)
    if window and over(window.kv_cache_usage_max, (usage or 0) + 0.02):
        hits = (*hits, (" · fullest engine ", DIM), percent(window.kv_cache_usage_max))
    if width >= 42 or UNKNOWN in (count(used), count(total)):
        return [line(*tokens, (" · ", DIM), *hits)]
    return [line(*tokens), line(" ", *hits)]

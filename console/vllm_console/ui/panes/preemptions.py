"""Pane 2: how often requests are preempted, i.e. evicted from the KV cache and recomputed."""

from __future__ import annotations

from msgspec.structs import replace
from textual.strip import Strip

from vllm_console.diagnosis.finding import MOST_PREEMPTIONS
from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import UNKNOWN, count
from vllm_console.ui.panes.base import age_note, marked, past_load, preemptions_missed, rate_note, title_line, why_empty
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import DIM
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, chart_of, mean
from vllm_console.ui.widgets.draw import Part, whole_clauses

WIDE = 56
"""Minimum width for the full name of the rate's window."""

NEEDED = 26
"""Cells that the title takes besides the window and the rate."""


def preemption_lines(server: ServerView, now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """Title with the current rate, timeline, preemptions per request against the objective."""
    window = server.window
    share = window.preemption_share if window else None
    objective = server.objectives.preemption_rate if server.objectives else None
    rate = count(window.preemptions_per_minute if window else None)
    # The chart has the rate of each point, the title that of the last minute, so they differ.
    whole = width >= WIDE or server.moment is not None or past_load(server)
    window_text = rate_note(server, now) if whole else "last min"
    note: Part = (f"{window_text} ", DIM) if len(window_text) + len(rate) + NEEDED < width else ""
    right = age_note(server, now) or (note, f"{rate}/min")
    shown = UNKNOWN if share is None else f"{share:.2g}"
    parts: list[Part] = [" ", marked(shown, preemptions_missed(server)), (" per request", DIM)]
    if objective is not None:
        parts += [(" · objective ", DIM), f"{objective:g}"]
    per_minute = 60.0 / server.series.step if server.series else 1.0
    curve = Curve("preemptions", how=mean, scale=per_minute)
    chart = chart_of(
        server.series,
        (curve,),
        width,
        height - 2,
        count,
        objective=MOST_PREEMPTIONS,
        area=True,
        whole=True,
        view=replace(view, log=False),
        markers=server.markers,
        empty=why_empty(server),
    )
    return [title_line(2, "Preemptions", width, right), *chart, whole_clauses(line(*parts), width)][:height]

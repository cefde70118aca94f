"""Pane 4: how much work gets done, and how much is waiting."""

from __future__ import annotations

from msgspec.structs import replace
from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.window import format_unserved
from vllm_console.text import amount, count, duration, plain, rate
from vllm_console.ui.panes.base import age_note, longest_wait, rate_note, title_line, why_empty
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, DIM, SECOND, WARN
from vllm_console.ui.widgets.chart import PLAIN, ChartView, Curve, chart_of
from vllm_console.ui.widgets.draw import Part, paragraph, shares, whole_clauses

CHARTS = (
    ("tokens/s out", (Curve("generation_tokens_per_second", "out", ACCENT),)),
    (
        "requests running, waiting",
        (Curve("requests_running", "run", ACCENT), Curve("requests_waiting", "wait", SECOND)),
    ),
)
"""The charts, in order of priority."""

DRAFTED = ("acceptance length of drafts", (Curve("acceptance_length", "tokens", ACCENT),))
"""An additional chart if speculative decoding is used."""

SMALLEST_CHART = 4


def throughput_lines(server: ServerView, now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """Title, figures, and the charts of tokens per second and requests that fit."""
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
        f" {count(out)}", (" out ", DIM), count(prompt), (" in tok/s · ", DIM), rate(requests, "req")
    ]  # fmt: skip
    if (drafted := window.speculation if window else None) is not None:
        figures += [(" · acceptance length ", DIM), f"{drafted.acceptance_length:.2f}"]
    if unserved := format_unserved(window.responses if window else None):
        figures += [(" · ", DIM), (unserved, WARN)]
    load: list[Part] = [f" {count(running)}", (" running · ", DIM), count(waiting), (" waiting", DIM)]
    if waiting and window is not None and (wait := longest_wait(window)) is not None:
        load.append((f", longest ≥ {duration(wait)}", WARN))
    if server.last_window is not None:
        load = []  # the load has ended
    note = age_note(server, now) or ((rate_note(server, now), DIM),)
    rows = [whole_clauses(line(*parts), width) for parts in (figures, load) if parts]
    lines = [title_line(4, "Throughput", width, note), *rows]
    if about := server.load or server.load_result:
        sent: list[Part] = [(plain(about), ACCENT)]
        beside = bool(load) and lines[-1].cell_length + 3 + cell_len(about) <= width
        below = paragraph(about, width, ACCENT, most=2)
        lines[2:] = [line(*load, (" · ", DIM), *sent)] if beside else [*lines[2:], *below]
    room = height - len(lines)
    drafts = server.series is not None and any(server.series.values.get("acceptance_length", ()))
    charts = (*CHARTS, DRAFTED) if drafts else CHARTS
    fitting = min(len(charts), max(1, room // SMALLEST_CHART))
    for (title, curves), share in zip(charts, shares(room, fitting), strict=False):
        if share >= 2:
            lines.append(line((f" {title}", DIM)))
            lines += chart_of(
                server.series,
                curves,
                width,
                share - 1,
                amount if curves is DRAFTED[1] else count,
                whole=True,
                view=replace(view, log=False),
                markers=server.markers,
                empty=why_empty(server),
            )
    return lines[:height]

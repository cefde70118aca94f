"""Panes that have no room of their own, as one line each: name, sparkline, figure. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import msgspec
from rich.cells import cell_len
from textual.strip import Strip

from vllm_console.diagnosis.finding import MOST_PREEMPTIONS
from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.quantile import text_of
from vllm_console.metrics.sample import Series, Window
from vllm_console.text import UNKNOWN, count, percent, round_duration
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.base import latencies_of, past_load, preemptions_missed, usage_missed
from vllm_console.ui.panes.pane_bar import KV_CACHE, LATENCY, NAMES, PREEMPTIONS, THROUGHPUT
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY
from vllm_console.ui.widgets.draw import fit

_LABEL, _FIGURE = 14, 20
_BARS = "▁▂▃▄▅▆▇█"


class Spark(msgspec.Struct, frozen=True):
    """What a pane's line shows: a series, its current figure, whether that misses its objective, the top of the scale.

    Points up to ``limit`` are dim, if there is a limit.
    """

    number: int
    key: str
    figure: Callable[[Window], str]
    missed: Callable[[ServerView], bool] = lambda _server: False
    top: float | None = None
    limit: Callable[[ServerView], float | None] = lambda _server: None


def _objective(name: str) -> Callable[[ServerView], float | None]:
    return lambda server: getattr(server.objectives, name) if server.objectives is not None else None


def _most_preemptions(server: ServerView) -> float | None:
    """The maximum preemptions within one point of the series, regardless of the share of requests."""
    return MOST_PREEMPTIONS * server.series.step / 60 if server.series is not None else None


def _ttft(window: Window) -> str:
    found = latencies_of(window, "ttft")
    return f"{text_of(found.p99 if found else None)} TTFT p99"


SPARKS = {
    "kv-cache": Spark(
        KV_CACHE,
        "kv_cache_usage",
        lambda w: f"{percent(w.kv_cache_usage)} used",
        usage_missed,
        1.0,
        _objective("kv_cache_usage"),
    ),
    "preemptions": Spark(
        PREEMPTIONS,
        "preemptions",
        lambda w: f"{count(w.preemptions_per_minute)}/min",
        preemptions_missed,
        limit=_most_preemptions,
    ),
    "latency": Spark(
        LATENCY,
        "ttft_p99",
        _ttft,
        lambda server: server.missed("ttft_p99_seconds"),
        limit=_objective("ttft_p99_seconds"),
    ),
    "throughput": Spark(
        THROUGHPUT, "generation_tokens_per_second", lambda w: f"{count(w.generation_tokens_per_second)} tok/s out"
    ),
}


def spark_lines(server: ServerView, panes: Sequence[str], width: int) -> list[Strip]:
    """A line for each of these panes; a click enlarges the pane."""
    return [_spark_line(server, SPARKS[pane], width) for pane in panes]


def _spark_line(server: ServerView, spark: Spark, width: int) -> Strip:
    series, action = server.series, f"screen.pane({spark.number})"
    figure = spark.figure(server.window) if server.window is not None else UNKNOWN
    failed = server.last_window is not None
    past = DIM if failed or (spark.number == LATENCY and past_load(server)) else None
    missed = not failed and spark.missed(server) and not figure.startswith(UNKNOWN)
    covered = round_duration(len(series.values.get(spark.key, ())) * series.step) if series is not None else ""
    key = f" {key_of(f'pane_{spark.number}')} "
    room = max(0, width - _LABEL - _FIGURE - len(covered) - 3)
    limit = spark.limit(server)
    cells = spark_cells(series, spark.key, room, spark.top)
    drawn = [
        ("".join(text for text, _ in group), ACCENT if over or limit is None else ACCENT + DIM)
        for over, group in groupby(cells, key=lambda cell: limit is not None and cell[1] > limit)
    ]
    return line(
        (key, clickable(action, KEY)),
        (fit(NAMES[spark.number], _LABEL - cell_len(key)), clickable(action)),
        *drawn,
        ("  ", None),
        (fit(figure + (" !" if missed else ""), _FIGURE), BAD if missed else past),
        (covered, DIM),
    )


def spark_cells(series: Series | None, key: str, width: int, top: float | None) -> list[tuple[str, float]]:
    """A series as ``width`` cells with their values, newest at the right; missing values are blank.

    A cell shows the maximum of its points. A point's cell depends only on its time, so the past moves by whole cells
    and does not flicker.
    """
    values = series.values.get(key, ()) if series is not None else ()
    if series is None or not values or width <= 0:
        return [(" ", 0.0)] * max(0, width)
    columns = min(width, len(values))
    first = round(series.end / series.step) - len(values) + 1
    cells: dict[int, float] = {}
    for number, value in enumerate(values, first):
        if value is not None:
            at = number * columns // len(values)
            cells[at] = max(value, cells.get(at, value))
    last = (first + len(values) - 1) * columns // len(values)
    scale = top or max(cells.values(), default=0.0) or 1.0
    drawn = [
        (_BARS[min(7, max(0, int(cells[at] / scale * 8)))], cells[at]) if at in cells else (" ", 0.0)
        for at in range(last - columns + 1, last + 1)
    ]
    return [(" ", 0.0)] * (width - columns) + drawn

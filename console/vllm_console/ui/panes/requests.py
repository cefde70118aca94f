"""Pane 7: finished requests, each with where its time went.

Its other views: TTFT over prompt length, and prefix cache use by prompt length.
"""

from __future__ import annotations

import msgspec
from rich.style import Style
from textual.strip import Strip

from vllm_console.fleet.probe import ORDERS, RequestsSeen
from vllm_console.fleet.snapshot import STALE_SECONDS, ServerView
from vllm_console.history.prefix_use import LengthClass, PrefixUse, StillCached
from vllm_console.history.probe_records import EngineStep, FinishedRequest
from vllm_console.metrics.sample import Window
from vllm_console.metrics.window import format_unserved
from vllm_console.text import UNKNOWN, clock, count, percent, plain, round_duration, seconds
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.base import nothing_recorded, title_line
from vllm_console.ui.terminal.lines import clickable, line
from vllm_console.ui.theme import ACCENT, BAD, DIM, KEY, WARN
from vllm_console.ui.widgets.chart import PLAIN, ChartView
from vllm_console.ui.widgets.draw import Part, bar, beside, fit, paragraph, parts_length, whole_clauses
from vllm_console.ui.widgets.scatter import scatter

SCATTER_WIDTH, SCATTER_HEIGHT = 40, 9
"""Minimum size of the scatter plot with its heading."""

LIST_WIDTH, LIST_ROWS = 64, 8
"""Minimum columns and rows of the list next to or above the plot."""

SHORT = 3
"""Lists of up to this many rows have no legend."""

PREFIXES = "prefixes"
VIEWS = (*ORDERS, PREFIXES)
"""What the key cycles through: the requests in each order, and prefix cache use."""

SHORTEST_BAR, LONGEST_BAR, LONGEST_PREFIX_BAR = 8, 60, 40
ID_WIDTH = 25


class _Stage(msgspec.Struct, frozen=True):
    """A part of a request's time: its mark in the bar (also available in ASCII) and its name in the legend."""

    mark: str
    name: str
    style: Style | None


_STAGES = (
    _Stage("·", "queue", None),
    _Stage("▒", "prefill", ACCENT),
    _Stage("█", "decode", None),
    _Stage("─", "other", DIM),
)
"""In chronological order. The rest, such as tokenizing, happens in the API server."""

_COLUMNS = (("ENDED", 9, "<"), ("PROMPT", 7, ">"), ("OUT", 6, ">"), ("TTFT", 7, ">"), ("E2E", 7, ">"))
_LATER = (("PREEMPT", 8, ">"), ("REASON", 7, "<"))

_NOTHING = {
    "preempted": "No finished request was preempted.",
    "aborted": "None aborted. Requests cut off by a stop, a restart or their client are not recorded.",
}


def requests_lines(server: ServerView, now: float, width: int, height: int, view: ChartView = PLAIN) -> list[Strip]:
    """Title, running requests, legend, and a line per request; next to or below it the plot if it fits."""
    seen = server.probe.requests if server.probe is not None else None
    title = title_line(7, "Requests", width, _title_note(server, seen, view, now))
    if seen is None:
        return [title, *nothing_recorded(server, width)][:height]
    lines = [title, _figures(server, seen, now, width)]
    below = height - len(lines)
    plot_width = min(width * 2 // 5, width - LIST_WIDTH - 1)
    if plot_width >= SCATTER_WIDTH and below >= SCATTER_HEIGHT:
        listed = _view(server, seen, view, now, width - plot_width - 1, below)
        plot = _plot(seen, plot_width, below, view)
        listed += [line()] * (len(plot) - len(listed))
        return [*lines, *(beside(one, width - plot_width, other) for one, other in zip(listed, plot, strict=False))]
    plot_height = max(SCATTER_HEIGHT, below // 2) if below >= LIST_ROWS + SCATTER_HEIGHT else 0
    lines += _view(server, seen, view, now, width, below - plot_height)
    return [*lines, *_plot(seen, width, plot_height, view)][:height] if plot_height else lines[:height]


def _view(server: ServerView, seen: RequestsSeen, view: ChartView, now: float, width: int, height: int) -> list[Strip]:
    if view.order == PREFIXES:
        return prefix_lines(seen.prefixes, server.window, width, height, view)
    return _list(seen, ORDERS.index(view.order), now, width, height)


def _title_note(server: ServerView, seen: RequestsSeen | None, view: ChartView, now: float) -> list[Part]:
    if seen is None:
        return []
    if server.moment is not None and view.cursor is not None:
        span = f"minute to {clock(seen.until, now, seconds=True)}"
    else:
        span = f"last {round_duration(seen.until - seen.since)}"
        if server.series is not None and server.series.as_of is not None:
            span += f" to {clock(seen.until, now)}"
    action = "screen.requests_order"
    key = (key_of("requests_order"), clickable(action, KEY))
    return [
        (f"{view.order} · {span} · ", DIM),
        key,
        (" view" if view.order == PREFIXES else " order", clickable(action, DIM)),
    ]


def _figures(server: ServerView, seen: RequestsSeen, now: float, width: int) -> Strip:
    """What is running now, and how many requests finished, were preempted or were aborted."""
    last = server.probe.last if server.probe is not None and server.last_window is None else None
    parts: list[Part] = [" ", *_running(last, now)] if last is not None else [" "]
    kinds = [("finished", seen.counts[0], None), *zip(ORDERS[2:], seen.counts[2:], (WARN, BAD), strict=True)]
    for name, number, style in kinds:
        more = "+" if name == "finished" and seen.partial else ""
        after = ": " if name == "finished" else ", "
        parts += [(f"{count(number)}{more}", style if number else None), (f" {name}{after}", DIM)]
    if parts_length(parts) > width and last is not None:
        parts = [" ", *_running(last, now)]
    *rest, end = parts
    shown = [*rest, (str(end[0]).rstrip(" ·,"), DIM)]
    if unserved := format_unserved(server.window.responses if server.window is not None else None):
        # For the last minute, while the rest of the line is for the range in the title.
        when = "" if server.moment is not None else " in the last minute"
        shown = shown if parts_length(shown) + len(unserved + when) + 3 <= width else [" "]
        shown += [(" · " if len(shown) > 1 else "", DIM), (unserved, WARN), (when, DIM)]
    return whole_clauses(line(*shown), width)


def _running(last: EngineStep, now: float) -> list[Part]:
    age = now - last.at
    parts: list[Part] = [count(last.running), (" running · ", DIM)]
    parts += [(count(last.waiting), WARN if last.waiting else None), (" waiting", DIM)]
    parts.append((f" at {clock(last.at, now, seconds=True)} · " if age > STALE_SECONDS else " now · ", DIM))
    return parts


def _list(seen: RequestsSeen, order: int, now: float, width: int, height: int) -> list[Strip]:
    requests = seen.listed[order][: max(1, height - 1)]
    if not requests:
        nothing = _NOTHING.get(ORDERS[order], "No request has finished.")
        return [line(), *paragraph(nothing, width - 1, DIM)][:height]
    columns = [*_COLUMNS, *_LATER] if width >= LIST_WIDTH else list(_COLUMNS)
    used = 1 + sum(wide + 1 for _, wide, _ in columns)
    with_id = width - used - 2 * SHORTEST_BAR - ID_WIDTH >= 0
    bar = min(LONGEST_BAR, width - used - 1 - (ID_WIDTH + 1 if with_id else 0))
    longest = max((one.e2e_seconds or 0.0 for one in requests), default=0.0)
    if bar < SHORTEST_BAR:
        bar = 0
    head = " " + " ".join(fit(name, wide, align) for name, wide, align in columns[: len(_COLUMNS)])
    later = columns[len(_COLUMNS) :]
    head += f" {fit(f'0 to {seconds(longest)}', bar)}" if bar else ""
    head += "".join(f" {fit(name, wide, align)}" for name, wide, align in later) + (" ID" if with_id else "")
    lines = [_legend(width)] if height > SHORT else []
    lines.append(line((fit(head, width).rstrip(), DIM)))
    for one in requests:
        cells = _cells(one, now)
        first = [fit(cell, wide, align) for cell, (_, wide, align) in zip(cells, columns, strict=False)]
        parts: list[Part] = [" " + " ".join(first[: len(_COLUMNS)])]
        parts += [" ", *_bar(one, longest, bar)] if bar else []
        for text, (name, _, _) in zip(first[len(_COLUMNS) :], later, strict=True):
            parts += [" ", (text, WARN if name == "PREEMPT" and one.preemptions else None)]
        parts += [" ", (plain(one.id, ID_WIDTH) or UNKNOWN, DIM)] if with_id else []
        lines.append(line(*parts).crop(0, width))
    return lines[:height]


def _legend(width: int) -> Strip:
    parts: list[Part] = []
    for stage in _STAGES:
        parts += [" ", (stage.mark, stage.style), (f" {stage.name} ", DIM)]
    return line(*parts) if parts_length(parts) <= width else line()


def _cells(one: FinishedRequest, now: float) -> tuple[str, ...]:
    return (
        clock(one.finished_at, one.finished_at if now - one.finished_at < 86_400 else now, seconds=True)[-8:],
        count(one.prompt_tokens),
        count(one.output_tokens),
        seconds(one.ttft_seconds),
        seconds(one.e2e_seconds),
        count(one.preemptions),
        plain(one.finish_reason) or UNKNOWN,
    )


def _bar(one: FinishedRequest, longest: float, width: int) -> list[Part]:
    """A request's time to scale, split into its known stages."""
    whole = one.e2e_seconds
    if not whole or not longest:
        return [" " * width]
    stages = [one.queue_seconds, one.prefill_seconds, one.decode_seconds]
    known = [value or 0.0 for value in stages]
    ends = [sum(known[: at + 1]) for at in range(len(known))] + [max(whole, sum(known))]
    cells = [min(width, round(end / longest * width)) for end in ends]
    cells[-1] = max(1, cells[-1])
    parts: list[Part] = []
    before = 0
    for stage, end in zip(_STAGES, cells, strict=True):
        parts.append((stage.mark * (end - before), stage.style))
        before = max(before, end)
    return [*parts, " " * (width - before)]


def _plot(seen: RequestsSeen, width: int, height: int, view: ChartView) -> list[Strip]:
    heading = line((fit(" TTFT over prompt tokens" + (", log scale" if view.log else ""), width).rstrip(), DIM))
    return [heading, *scatter(seen.dots, width, height - 1, count, seconds, log=bool(view.log))]


def order_after(order: str) -> str:
    """The order or view after this one."""
    return VIEWS[(VIEWS.index(order) + 1) % len(VIEWS)]


_PREFIX_COLUMNS = (
    ("PROMPT TOKENS", 15, "<"),
    ("REQUESTS", 8, ">"),
    ("HIT", 6, ">"),
    ("CACHED", 8, ">"),
    ("RATE", 5, ">"),
)
"""``HIT``: requests with a hit; ``CACHED``: tokens."""


def prefix_lines(
    use: PrefixUse, window: Window | None, width: int, height: int, view: ChartView = PLAIN
) -> list[Strip]:
    """A line per prompt length class with its hit rate as a bar, then the total and resumed requests."""
    if window is not None and window.prefix_caching is False:
        return [line(), line((" Prefix caching is off.", WARN))][:height]
    if not use.requests:
        return [line(), line((fit(" No finished request with known cached tokens.", width).rstrip(), DIM))][:height]
    below = _below(use, window, width)
    room = max(1, height - 1 - len(below))
    used = 1 + sum(wide + 1 for _, wide, _ in _PREFIX_COLUMNS)
    long_bar = min(LONGEST_PREFIX_BAR, width - used - 1)
    head = " " + " ".join(fit(name, wide, align) for name, wide, align in _PREFIX_COLUMNS)
    rows = [_prefix_row(one, long_bar, width) for one in use.classes]
    if len(rows) > room:
        more = f" {len(rows) - room + 1} more: enlarge the {'window' if view.large else 'pane'}"
        rows = [*rows[: room - 1], line((more, DIM)).crop(0, width)]
    return [line((fit(head, width).rstrip(), DIM)), *rows, *below][:height]


def _prefix_row(one: LengthClass, long_bar: int, width: int) -> Strip:
    cells = (f"{count(one.least)}-{count(one.most)}", count(one.requests), count(one.hits), count(one.cached_tokens),
             percent(one.hit_rate))  # fmt: skip
    text = " ".join(fit(cell, wide, align) for cell, (_, wide, align) in zip(cells, _PREFIX_COLUMNS, strict=True))
    parts: list[Part] = [f" {text}"]
    if long_bar >= SHORTEST_BAR:
        parts += [" ", (bar(one.hit_rate, long_bar), ACCENT)]
    return line(*parts).crop(0, width)


def _below(use: PrefixUse, window: Window | None, width: int) -> list[Strip]:
    """The known totals: hit rate, granularity of the cache, resumed requests."""
    step = window.prefix_step if window is not None else None
    whole: list[Part] = [(" all ", DIM), percent(use.hit_rate), (" of ", DIM), count(use.prompt_tokens),
                         (" prompt tokens cached", DIM)]  # fmt: skip
    if step is not None:
        whole += [(" · granularity ", DIM), count(step)]
    lines = [whole_clauses(line(*whole), width)]
    if use.resumed is not None and use.resumed.tokens:
        lines.append(whole_clauses(_resumed(use.resumed), width))
    return lines


def _resumed(resumed: StillCached) -> Strip:
    gone = resumed.tokens - resumed.cached_tokens
    return line((" ", DIM), count(resumed.requests), (" resumed after preemption: ", DIM),
                percent(resumed.cached_tokens / resumed.tokens), (" still cached, ", DIM),
                (count(gone), WARN if gone else None), (" recomputed", DIM))  # fmt: skip

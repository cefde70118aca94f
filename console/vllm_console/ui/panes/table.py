"""The table of all servers: which columns fit, what stands in them, and the widget around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip

from vllm_console.fleet.model import ServerView, State, Window
from vllm_console.format import UNKNOWN, count, duration, percent, seconds
from vllm_console.telemetry.progress import share_of
from vllm_console.text import plain
from vllm_console.ui.findings import worst_sign
from vllm_console.ui.panes.base import STALE_SECONDS, over, quantile
from vllm_console.ui.panes.state import left_words
from vllm_console.ui.panes.throughput import rate
from vllm_console.ui.theme import ACCENT, BAD, DIM, OK, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, bar, fit, progress, rule
from vllm_console.ui.widgets.lines import LineView, line

STATE_STYLE = {
    State.READY: OK,
    State.STARTING: ACCENT,
    State.STOPPING: WARN,
    State.UNRESPONSIVE: BAD,
    State.FAILED: BAD,
    State.STOPPED: DIM,
}

Cell = tuple[str, Style | None]
"""A cell's text and style."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: heading, width in cells, alignment, and the cell of a server at a moment.

    A metric column stands empty for a server that has none to show, and its text runs on over it.
    """

    title: str
    width: int
    align: str
    cell: Callable[[ServerView, float, int], Cell]
    metric: bool = True


def columns_for(servers: Sequence[ServerView], width: int) -> list[Column]:
    """The columns that fit into ``width`` cells: the leftmost ones; what room is left widens name and bar."""
    names = max([len("NAME"), *(cell_len(_name(server)) for server in servers)])
    presets = max([len("PRESET"), *(cell_len(_preset(server)) for server in servers)])
    columns = [
        Column("NAME", min(names, 20 if width < 140 else 32), "<", _name_cell, False),
        Column("PRESET", min(presets, 10 if width < 100 else 16), "<", _preset_cell, False),
        Column("STATE", 13, "<", _state_cell, False),
        Column("GPU", 4, "<", _gpu_cell, False),
        Column("PORT", 6 if any(server.exposed for server in servers) else 5, "<", _port_cell, False),
        Column("KV CACHE", 13 if width < 160 else 24, "<", _kv_cell),
        Column("RUN", 4, ">", lambda s, _now, _width: (count(_value(s, "requests_running")), None)),
        Column("WAIT", 5, ">", _waiting_cell),
        Column("PREEMPT/min", 11, ">", _preemption_cell),
        Column("TTFT99", 8, ">", lambda s, _now, _width: _latency_cell(s, "ttft")),
        Column("ITL99", 8, ">", lambda s, _now, _width: _latency_cell(s, "itl")),
        Column("TOK/S", 7, ">", lambda s, _now, _width: (count(_value(s, "generation_tokens_per_second")), None)),
        Column("REQ/S", 6, ">", lambda s, _now, _width: (rate(_value(s, "requests_per_second")), None)),
        Column("HIT", 5, ">", lambda s, _now, _width: (percent(_value(s, "prefix_hit_rate")), None)),
        Column("ENGINE", 17, "<", lambda s, _now, _width: (s.engine.label if s.engine else UNKNOWN, DIM), False),
        Column("MODEL", 28, "<", lambda s, _now, _width: (s.model or UNKNOWN, DIM), False),
    ]
    used, fitting = 2, []
    for column in columns:
        if used + column.width > width:
            break
        fitting.append(column)
        used += column.width + 1
    return fitting


def heading(columns: Sequence[Column]) -> Strip:
    """The line of column titles."""
    return line(("  " + " ".join(fit(column.title, column.width, column.align) for column in columns), DIM))


def row(server: ServerView, columns: Sequence[Column], now: float, width: int, selected: bool) -> Strip:
    """One server's line, with the sign of a problem before its name.

    Without metrics its reason or progress runs over the columns that would show them.
    """
    parts: list[Part] = [("▸ ", ACCENT) if selected else "  "]
    if (sign := worst_sign(server)) is not None:
        parts = [("▸", ACCENT) if selected else " ", sign]
    used = 2
    told = _told(server, now, width)
    for index, column in enumerate(columns):
        if index:
            parts.append(" ")
        if told and column.metric:
            parts.append((fit(plain(told[0]), max(0, width - used)), told[1]))
            break
        text, style = column.cell(server, now, column.width)
        text = fit(text, column.width, column.align)
        if column.title == "NAME":
            parts += _name_parts(text, selected)
        else:
            parts.append((text, style))
        used += column.width + 1
    return line(*parts)


def _name_parts(text: str, selected: bool) -> list[Part]:
    style = STRONG if selected else None
    name, mark, rest = text.rpartition(" sim")
    return [(name, style), (" sim", SIMULATED), (rest, None)] if mark and not rest.strip() else [(text, style)]


def _told(server: ServerView, now: float, width: int) -> Cell | None:
    """What a row says instead of metrics, and its style; None when it shows metrics."""
    if server.next_attempt_at is not None and server.next_attempt_at > now:
        return f"starts again in {duration(server.next_attempt_at - now)}: {server.reason}", STATE_STYLE[server.state]
    if server.state is State.STARTING:
        quiet = server.startup.quiet_seconds if server.startup is not None else None
        if quiet is not None:
            return f"! {server.stages[-1].name}: no sign of life for {duration(quiet)}", WARN
        return _starting(server, now, width), ACCENT
    if server.state is State.READY:
        stale = server.sample is not None and now - server.sample.at > STALE_SECONDS
        if server.window is None:
            return ("no metrics" if server.sample is None else "measuring", DIM)
        return (
            (f"no answer from /metrics for {duration(now - server.sample.at)}", WARN)
            if (stale and server.sample)
            else None
        )
    style = STATE_STYLE[server.state]
    return server.reason or UNKNOWN, style if server.state is not State.STOPPED else DIM


def _starting(server: ServerView, now: float, width: int) -> str:
    stage = server.stages[-1] if server.stages else None
    if stage is None:
        return server.reason or "waiting for its first line of log"
    share = share_of(stage.detail)
    drawn = f" {progress(share, 8 if width < 100 else 16)}" if share is not None else ""
    running = duration(stage.seconds if stage.seconds is not None else now - stage.started_at)
    way = server.startup.progress if server.startup is not None else None
    told = way is not None and way.seconds_left is not None and width >= 100
    left = f" · {left_words(way)}" if told and way is not None else ""
    return f"{stage.name} {stage.detail}{drawn} {running}{left}".replace("  ", " ")


def _value(server: ServerView, name: str) -> float | None:
    window: Window | None = server.window
    return getattr(window, name) if window else None


def _name(server: ServerView) -> str:
    return plain(server.name) + (" sim" if server.simulated else "")


def _preset(server: ServerView) -> str:
    if not server.ours:
        return f"by {plain(server.owner) or 'someone else'}"
    return plain(server.preset) or UNKNOWN


def _name_cell(server: ServerView, _now: float, width: int) -> Cell:
    if server.simulated:
        return fit(plain(server.name), min(width - 4, cell_len(plain(server.name)))) + " sim", None
    return plain(server.name), None


def _preset_cell(server: ServerView, _now: float, _width: int) -> Cell:
    return _preset(server), None if server.ours else DIM


def _state_cell(server: ServerView, now: float, width: int) -> Cell:
    text = str(server.state)
    age = duration(now - server.state_since)
    room = width - len(text)
    return text + (fit(age, room, ">") if len(age) < room else ""), STATE_STYLE[server.state]


def _gpu_cell(server: ServerView, _now: float, _width: int) -> Cell:
    gpus = server.gpus
    if len(gpus) > 2 and gpus == tuple(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}", None
    return ",".join(map(str, gpus)) or UNKNOWN, None


def _port_cell(server: ServerView, _now: float, _width: int) -> Cell:
    """With a mark where others can use it without an API key."""
    port = str(server.port or UNKNOWN)
    return (f"{port}!", WARN) if server.exposed else (port, None)


def _kv_cell(server: ServerView, _now: float, width: int) -> Cell:
    usage, fullest = _value(server, "kv_cache_usage"), _value(server, "kv_cache_usage_max")
    missed = over(
        fullest if fullest is not None else usage, server.objectives.kv_cache_usage if server.objectives else None
    )
    text = f"{bar(usage, width - 6)} {fit(percent(usage), 4, '>')}" + ("!" if missed else " ")
    return text, BAD if missed else (OK if usage is not None else None)


def _waiting_cell(server: ServerView, _now: float, _width: int) -> Cell:
    waiting = _value(server, "requests_waiting")
    return count(waiting), WARN if waiting else None


def _preemption_cell(server: ServerView, _now: float, _width: int) -> Cell:
    missed = over(_value(server, "preemption_share"), server.objectives.preemption_rate if server.objectives else None)
    return _with_mark(count(_value(server, "preemptions_per_minute")), missed)


def _latency_cell(server: ServerView, latency: str) -> Cell:
    found = quantile(server.window, latency)
    goals = server.objectives
    goal = (goals.ttft_p99_seconds if latency == "ttft" else goals.itl_p99_seconds) if goals else None
    p99 = found.p99 if found else None
    return _with_mark(seconds(p99), over(p99, goal))


def _with_mark(text: str, missed: bool) -> Cell:
    return (f"{text} !", BAD) if missed else (f"{text}  ", None)


def counted(servers: Sequence[ServerView]) -> str:
    """How many servers are in each state: ``2 ready · 1 starting``."""
    states = [server.state for server in servers]
    order = (State.READY, State.STARTING, State.STOPPING, State.UNRESPONSIVE, State.FAILED, State.STOPPED)
    return " · ".join(f"{states.count(state)} {state}" for state in order if state in states)


class ServersTable(LineView):
    """All servers, one line each, with a cursor; scrolls so that the cursor stays in sight."""

    DEFAULT_CSS = "ServersTable { height: 6; width: 1fr; }"

    class Picked(Message):
        """A server was clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    _given: tuple[Sequence[ServerView], str | None, float, str] | None = None
    _shown: tuple[ServerView, ...] = ()
    _top = 0

    def give(self, servers: Sequence[ServerView], selected: str | None, now: float, title: str) -> None:
        """Show these servers; ``selected`` is the name under the cursor, ``title`` stands in the rule."""
        self._given = (servers, selected, now, title)
        self._draw(*self.size)

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new size."""
        self._draw(*event.size)

    def _draw(self, width: int, height: int) -> None:
        if not width or self._given is None:
            return
        servers, selected, now, title = self._given
        rows = max(1, height - 2)
        index = next((i for i, server in enumerate(servers) if server.name == selected), 0)
        self._top = max(0, min(self._top, index, len(servers) - rows), index - rows + 1)
        self._shown = tuple(servers[self._top : self._top + rows])
        columns = columns_for(servers, width)
        hidden = len(servers) - len(self._shown)
        more = f"{hidden} more ↑↓" if hidden else ""
        right = " · ".join(text for text in (counted(servers), more) if text)
        if cell_len(right) + cell_len(title) > width - 12:
            right = more or f"{len(servers)} in all"
        lines = [rule(title, width, (right,) if right else ()), heading(columns)]
        lines += [row(server, columns, now, width, server.name == selected) for server in self._shown]
        self.show(lines)

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked line."""
        index = event.y - 2
        if 0 <= index < len(self._shown):
            self.post_message(self.Picked(self._shown[index].name))

"""The table of all servers: columns that fit, cells, height, and the widget."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace
from rich.cells import cell_len
from rich.style import Style
from textual import events, on
from textual.message import Message
from textual.strip import Strip

from vllm_console.diagnosis.finding import PAIR_ASLEEP
from vllm_console.fleet.snapshot import STALE_SECONDS, ServerView
from vllm_console.metrics.quantile import p99_of
from vllm_console.metrics.sample import EngineSample, Window
from vllm_console.metrics.window import in_order
from vllm_console.text import UNKNOWN, amount, count, duration, percent, plain
from vllm_console.ui.findings import worst_sign
from vllm_console.ui.panes.base import latencies_of, past_load, preemptions_missed, usage_missed
from vllm_console.ui.panes.state import format_left
from vllm_console.ui.terminal.lines import clickable, line, wheel_step
from vllm_console.ui.theme import ACCENT, BAD, CURSOR, DIM, OK, SIMULATED, STRONG, WARN
from vllm_console.ui.widgets.draw import Part, bar, fit, progress_line, rule
from vllm_console.ui.widgets.framed import FramedView
from vllm_launchers.keeper.records import State
from vllm_launchers.units import natural_key

STATE_STYLE = {
    State.READY: OK,
    State.ASLEEP: DIM,
    State.STARTING: ACCENT,
    State.STOPPING: WARN,
    State.UNRESPONSIVE: BAD,
    State.FAILED: BAD,
    State.STOPPED: DIM,
}

WITH_MODEL = 118
"""Minimum width for the model column. On narrower screens the name stands for model and preset, since it is the
preset's unless the user chose another."""

_FIGURE = 6
"""Cells of the usage after the KV cache bar."""

RUNNING = "running"
"""State shown for a server that cannot be queried."""

YOUNG_SECONDS = 5.0
"""A server that became ready more recently than this was polled at most once."""

Cell = tuple[str, Style | None]


SortKey = str | float | None
"""A column's sort key; None is unknown and sorts last."""


class ServerColumn(msgspec.Struct, frozen=True):
    """A column: heading, width in cells, alignment, a server's cell at a moment, and sort key.

    If a server has no metrics, its metric columns are empty and its status text runs over them. If not all columns fit,
    those with the highest ``rank`` are left out first.
    """

    title: str
    width: int
    align: str
    cell: Callable[[ServerView, float, int], Cell]
    key: Callable[[ServerView], SortKey]
    rank: int
    metric: bool = True


class Order(msgspec.Struct, frozen=True):
    """The column that servers are sorted by; without a title they are in fleet order."""

    title: str = ""
    descending: bool = False

    def after(self, title: str) -> Order:
        """The order after choosing a column: figures start descending, texts ascending.

        Choosing it again reverses the order; the third time restores fleet order.
        """
        first = title not in TEXTS
        if title != self.title:
            return Order(title, first)
        return Order(title, not first) if self.descending is first else Order()


def ordered(servers: Sequence[ServerView], order: Order) -> list[ServerView]:
    """The servers in this order; those with an unknown value come last."""
    column = next((one for one in columns_of(servers, 200) if one.title == order.title), None)
    if column is None:
        return list(servers)
    keys = {server.name: column.key(server) for server in servers}
    known = [server for server in servers if keys[server.name] is not None]
    known.sort(key=lambda server: keys[server.name], reverse=order.descending)  # type: ignore[arg-type,return-value]
    return [*known, *(server for server in servers if keys[server.name] is None)]


COLUMNS = {
    "name": "NAME", "model": "MODEL", "preset": "PRESET", "owner": "OWNER", "state": "STATE", "gpu": "GPU",
    "port": "PORT", "kv": "KV CACHE", "run": "RUN", "wait": "WAIT", "preempt": "PREEMPT/min", "ttft": "TTFT p99",
    "itl": "ITL p99", "tokens": "TOK/S", "requests": "REQ/S", "hit": "HIT", "engine": "ENGINE", "host": "HOST",
}  # fmt: skip
"""Every column's heading, by its name in settings and on the command line."""

DEFAULT_COLUMNS = tuple(COLUMNS)
"""The columns shown, as far as they fit, unless the user chose others."""

TEXTS = ("NAME", "MODEL", "PRESET", "OWNER", "HOST", "STATE", "GPU", "PORT", "ENGINE")
"""Columns that sort ascending first."""


def columns_of(servers: Sequence[ServerView], width: int, chosen: Sequence[str] = ()) -> list[ServerColumn]:
    """The available columns at this screen width; if ``chosen`` (names from `COLUMNS`), those in that order.

    By default all of them, but OWNER only if a server belongs to someone else, HOST only if one runs elsewhere, GPU
    only if one has GPUs, and MODEL only on a wide screen.
    """
    names = max([len("NAME"), *(cell_len(server.marked_name) for server in servers)])
    presets = max([len("PRESET"), *(cell_len(_preset(server)) for server in servers)])
    owners = max([len("OWNER"), *(cell_len(_owner(server)) for server in servers)])
    hosts = max([len("HOST"), *(cell_len(plain(server.where)) for server in servers)])
    models = max([len("MODEL"), *(cell_len(_model(server)) for server in servers)])
    elsewhere = any(server.where for server in servers)  # figures take precedence over facts about one machine
    owner_rank, gpu_rank, port_rank = (9, 9, 9) if elsewhere else (2, 1, 2)
    columns = [
        ServerColumn("NAME", min(names, 20 if width < 140 else 32), "<", _name_cell, lambda s: natural_key(s.name), 0,
                     False),
        ServerColumn("MODEL", min(models, 20 if width < 160 else 28), "<", lambda s, _now, _width: (_model(s), DIM),
               lambda s: _model(s).casefold() if s.model else None, 9, False),
        ServerColumn("PRESET", min(presets, 10 if width < 100 else 16), "<", _preset_cell,
               lambda s: _preset(s).casefold() if s.preset else None, 10, False),
        ServerColumn("OWNER", min(owners, 10), "<", lambda s, _now, _width: (_owner(s), STRONG if s.owner else None),
               lambda s: _owner(s).casefold(), owner_rank, False),
        ServerColumn("HOST", min(hosts, 12 if width < 140 else 24), "<",
               lambda s, _now, _width: (plain(s.where) or "here", STRONG if s.where else DIM),
               lambda s: s.where, 2, False),
        ServerColumn("STATE", 13, "<", _state_cell, lambda s: str(s.state), 0, False),
        ServerColumn("GPU", 4, "<", _gpu_cell, lambda s: s.gpus[0] if s.gpus else None, gpu_rank, False),
        ServerColumn("PORT", 6 if any(server.exposed for server in servers) else 5, "<", _port_cell,
               lambda s: s.port or None, port_rank, False),
        ServerColumn("KV CACHE", 13 if width < 160 else 24, "<", _kv_cell, _by("kv_cache_usage"), 3),
        ServerColumn("RUN", 4, ">", lambda s, _now, _width: (count(_value(s, "requests_running")), None),
               _by("requests_running"), 4),
        ServerColumn("WAIT", 5, ">", _waiting_cell, _by("requests_waiting"), 5),
        ServerColumn("PREEMPT/min", 11, ">", _preemption_cell, _by("preemptions_per_minute"), 6),
        ServerColumn("TTFT p99", 8, ">", lambda s, _now, _width: _latency_cell(s, "ttft"), _by_latency("ttft"), 7),
        ServerColumn("ITL p99", 8, ">", lambda s, _now, _width: _latency_cell(s, "itl"), _by_latency("itl"), 8),
        ServerColumn("TOK/S", 7, ">", lambda s, _now, _width: (count(_value(s, "generation_tokens_per_second")), None),
               _by("generation_tokens_per_second"), 11),
        ServerColumn("REQ/S", 6, ">", lambda s, _now, _width: (amount(_value(s, "requests_per_second")), None),
               _by("requests_per_second"), 12),
        ServerColumn("HIT", 5, ">", lambda s, _now, _width: (percent(_value(s, "prefix_hit_rate")), None),
               _by("prefix_hit_rate"), 13),
        ServerColumn("ENGINE", 17, "<", lambda s, _now, _width: (s.engine.label if s.engine else UNKNOWN, DIM),
               lambda s: s.engine.label if s.engine else None, 14, False),
    ]  # fmt: skip
    if chosen:  # what the user names first is kept longest
        by_title = {column.title: column for column in columns}
        kept = dict.fromkeys(("name", *chosen))
        return [replace(by_title[COLUMNS[name]], rank=rank) for rank, name in enumerate(kept)]
    absent = {"OWNER"} if all(server.recorded for server in servers) else set()
    absent |= {"HOST"} if not elsewhere else set()
    absent |= {"GPU"} if servers and not any(server.gpus for server in servers) else set()
    absent |= {"MODEL"} if width < WITH_MODEL else set()
    return [column for column in columns if column.title not in absent]


def sort_names(servers: Sequence[ServerView]) -> list[str]:
    """The names of the columns that are useful for sorting these servers."""
    titles = {column.title for column in columns_of(servers, WITH_MODEL)}
    return [name for name, title in COLUMNS.items() if title in titles]


def columns_for(servers: Sequence[ServerView], width: int, chosen: Sequence[str] = ()) -> list[ServerColumn]:
    """The columns that fit into ``width`` cells, in order; the least important are left out."""
    columns = columns_of(servers, width, chosen)
    used, fitting, full = 2, set(), False
    for column in sorted(columns, key=lambda one: one.rank):
        if used + column.width > width or (column.metric and full):
            full = full or column.metric
            continue
        fitting.add(column.title)
        used += column.width + 1
    return [column for column in columns if column.title in fitting]


def _by(figure: str) -> Callable[[ServerView], SortKey]:
    return lambda server: _value(server, figure)


def _by_latency(latency: str) -> Callable[[ServerView], SortKey]:
    def key(server: ServerView) -> SortKey:
        found = latencies_of(server.window, latency)
        p99 = found.p99 if found else None
        return (p99.value if p99.value is not None else p99.low) if p99 is not None else None

    return key


def column_titles(columns: Sequence[ServerColumn], order: Order = Order()) -> Strip:  # noqa: B008 - immutable
    """The line of column titles, with an arrow at the sort column; a click on a title sorts by it."""
    parts: list[Part] = ["  "]
    for column in columns:
        here = column.title == order.title
        style = clickable(f"screen.sort_by('{column.title}')", STRONG if here else DIM)
        mark = ("↓" if order.descending else "↑") if here else " "
        if here and len(column.title) < column.width:
            parts += [(fit(column.title + mark, column.width, column.align), style), " "]
        else:
            parts += [(fit(column.title, column.width, column.align), style), (mark, style)]
    return line(*parts[: None if parts[-1][0] in "↑↓" else -1])


def row(
    server: ServerView,
    columns: Sequence[ServerColumn],
    now: float,
    width: int,
    selected: bool,
    marked: bool = False,
    past: bool = False,
) -> Strip:
    """A server's line, with a problem sign before its name; a marked one has a star and its name in reverse.

    Without metrics, its reason or progress runs over the first metric columns. ``past``: the screen shows an earlier
    moment; a server that does not is dim and has no figures.
    """
    live = past and server.moment is None
    dim = live or server.removed
    sign = worst_sign(server) if not live else None
    parts: list[Part] = [("▸", ACCENT) if selected else (("*", STRONG) if marked else " "), sign or " "]
    status = (_unmeasured(server) or _status(server, now, width)) if not live else None
    free = _status_room(columns, width) if live or status else {}
    if live:
        status = (_not_then(server, selected, free[min(free)] if free else 0), DIM)
    for index, column in enumerate(columns):
        if status and column.metric:
            if index in free:
                text, style = status if index == min(free) else ("", None)
                parts.append((" " + fit(plain(text), free[index]), style))
            continue
        if index:
            parts.append(" ")
        text, style = column.cell(server, now, column.width)
        if live and column.title == "STATE" and not server.replayed:
            text = f"now: {server.state_text}"
        if live or (dim and not column.metric):
            style = DIM
        text = fit(text, column.width, column.align)
        if column.title == "NAME" and not dim:
            parts += _name_parts(text, selected, marked)
        elif column.title == "KV CACHE" and style is BAD:  # only the figure is red, not the bar
            parts += [(text[:-_FIGURE], OK), (text[-_FIGURE:], BAD)]
        else:
            parts.append((text, style))
    return line(*parts)


def _status_room(columns: Sequence[ServerColumn], width: int) -> dict[int, int]:
    """The cells of each run of metric columns, by the index of its first column; the last run takes the remaining
    cells.

    The status goes into the first run, so that later columns stay below their headings.
    """
    runs: dict[int, int] = {}
    at = 0
    for index, column in enumerate(columns):
        if column.metric and not (index and columns[index - 1].metric):
            at = index
            runs[at] = column.width
        elif column.metric:
            runs[at] += column.width + 1
    if runs and columns[-1].metric:
        runs[at] += max(0, width - 1 - sum(column.width + 1 for column in columns))
    return runs


def _not_then(server: ServerView, selected: bool, room: int) -> str:
    """Text of up to ``room`` cells in place of the figures of a server that is not shown at the selected moment."""
    if not server.recorded:
        texts = ["no history: not your server", "no history: not yours", "no history"]
    elif selected:
        texts = ["reading this moment", "reading"]
    else:
        texts = ["select it to see it at this moment", "select it to see it", "select it"]
    return next((text for text in texts if cell_len(text) <= room), texts[-1])


def _name_parts(text: str, selected: bool, marked: bool) -> list[Part]:
    style = CURSOR if marked else (STRONG if selected else None)
    name, mark, rest = text.rpartition(" sim")
    return [(name, style), (" sim", SIMULATED), (rest, None)] if mark and not rest.strip() else [(text, style)]


def _unmeasured(server: ServerView) -> Cell | None:
    """The status of an attached endpoint or a node without metrics."""
    endpoint = server.attached
    if server.node and server.moment is None:
        return _node_status(server)
    if endpoint is None or server.moment is not None or server.window is not None or server.state is State.UNRESPONSIVE:
        return None
    text = endpoint.notice or ("" if server.contacted else "not read yet")
    return (text, DIM) if text else None


def _node_status(server: ServerView) -> Cell | None:
    """The status of a node that waits for others or has no metrics; None otherwise."""
    if server.node and server.state is State.STARTING and server.pid is None:
        return server.reason, ACCENT
    return (server.node, DIM) if server.headless and server.state is State.READY else None


def _status(server: ServerView, now: float, width: int) -> Cell | None:
    """What a row shows in place of metrics, and its style; None if it shows metrics."""
    if server.moment is not None:
        return _status_then(server)
    if server.next_attempt_at is not None and server.next_attempt_at > now:
        return f"restarts in {duration(server.next_attempt_at - now)}: {server.reason}", STATE_STYLE[server.state]
    if server.state is State.STARTING:
        quiet = server.startup.quiet_seconds if server.startup is not None else None
        if quiet is not None:
            return f"! {server.stages[-1].name}: no progress for {duration(quiet)}", WARN
        return f"{'tuner: ' if server.tuner_restart else ''}{starting_text(server, now, width)}", ACCENT
    if server.state is State.READY:
        stale = server.sample is not None and now - server.sample.at > STALE_SECONDS
        if server.window is None:
            young = now - server.state_since < YOUNG_SECONDS
            return ("no metrics" if server.sample is None and not young else "measuring", DIM)
        return (f"no new metrics for {duration(now - server.sample.at)}", WARN) if (stale and server.sample) else None
    if server.state is State.ASLEEP and server.sleep is not None:
        if any(one.code == PAIR_ASLEEP for one in server.findings):
            return f"neither it nor {server.partner} is serving", STATE_STYLE[State.FAILED]
        return server.sleep.sentence.removeprefix("asleep, "), DIM
    reason = server.reason or UNKNOWN
    if server.state is State.UNRESPONSIVE:  # the state's column is too narrow for its age
        place = f"{server.host}:{server.port} " if server.attached is not None else ""
        reason = f"for {duration(now - server.state_since)}: {reason.removeprefix(place)}"  # HOST shows the place
    return reason, STATE_STYLE[server.state] if server.state is not State.STOPPED else DIM


def _status_then(server: ServerView) -> Cell | None:
    """What a row shows in place of metrics at an earlier moment; None if it shows metrics."""
    if server.then.state not in (None, State.READY):
        return "not ready then", DIM  # the minute before belongs to an earlier run
    return None if server.window is not None else ("nothing recorded then", DIM)


def starting_text(server: ServerView, now: float, width: int) -> str:
    """A server's startup progress, in a shorter form below a ``width`` of 100."""
    stage = server.stages[-1] if server.stages else None
    if stage is None:
        return server.reason or "waiting for its first log line"
    share = stage.share
    drawn = f" {progress_line(share, 8 if width < 100 else 16)}" if share is not None else ""
    running = duration(stage.seconds if stage.seconds is not None else now - stage.started_at)
    done = server.startup.progress if server.startup is not None else None
    left = f" · {format_left(done)}" if done is not None and done.seconds_left is not None and width >= 100 else ""
    return f"{stage.name} {stage.detail}{drawn} {running}{left}".replace("  ", " ")


def _value(server: ServerView, name: str) -> float | None:
    window: Window | None = server.window
    return getattr(window, name) if window else None


def _preset(server: ServerView) -> str:
    return plain(server.preset) or UNKNOWN


def _owner(server: ServerView) -> str:
    return "you" if server.ours or server.remote_ours else plain(server.owner) or UNKNOWN


def _model(server: ServerView) -> str:
    """The model without its organization or folder."""
    return plain(server.model).rstrip("/").rpartition("/")[2] or UNKNOWN


def _name_cell(server: ServerView, _now: float, width: int) -> Cell:
    if server.simulated:
        return fit(plain(server.name), min(width - 4, cell_len(plain(server.name)))) + " sim", None
    return plain(server.name), None


def _preset_cell(server: ServerView, _now: float, _width: int) -> Cell:
    return _preset(server), None if server.ours else DIM


def _can_not_be_asked(server: ServerView) -> bool:
    """Whether nothing is known except that its process runs, e.g. in a container."""
    return not server.contacted and bool(server.reason)


def _state_cell(server: ServerView, now: float, width: int) -> Cell:
    if server.removed:
        return "removed", DIM
    if server.replayed and server.moment is None:
        return "replay", DIM
    if server.moment is not None:
        return _state_then(server, server.moment, width)
    if _can_not_be_asked(server):
        return RUNNING, DIM
    if server.tuning:
        return server.tuning, ACCENT
    if server.since_start:
        return server.state_text, STATE_STYLE[server.state]
    return _with_age(server.state_text, now - server.state_since, width), STATE_STYLE[server.state]


def _with_age(text: str, seconds: float, width: int) -> str:
    """A state and its age; the age is cut to its largest unit, or left out, if it does not fit."""
    room = width - len(text)
    whole = duration(seconds)
    for age in (whole, re.sub(r"(?<=[a-z]).*", "", whole)):
        if len(age) < room:
            return text + fit(age, room, ">")
    return text


def _state_then(server: ServerView, moment: float, width: int) -> Cell:
    """The state at an earlier moment and its age then, with the generation if it differs from the current one."""
    then = server.then
    if then.state is None:
        return "before launch" if then.before else UNKNOWN, DIM
    text = str(then.state) if then.generation == server.generation else f"r{then.generation} {then.state}"
    if then.since is not None:
        text = _with_age(text, moment - then.since, width)
    return text, STATE_STYLE[then.state]


def _gpu_cell(server: ServerView, _now: float, _width: int) -> Cell:
    gpus = server.gpus
    if len(gpus) > 2 and gpus == tuple(range(gpus[0], gpus[-1] + 1)):
        return f"{gpus[0]}-{gpus[-1]}", None
    return ",".join(map(str, gpus)) or UNKNOWN, None


def _port_cell(server: ServerView, _now: float, _width: int) -> Cell:
    """The port, marked if others can use the server without an API key."""
    port = str(server.port or UNKNOWN)
    return (f"{port}!", WARN) if server.exposed else (port, None)


def _kv_cell(server: ServerView, _now: float, width: int) -> Cell:
    usage, missed = _value(server, "kv_cache_usage"), usage_missed(server)
    text = f"{bar(usage, width - _FIGURE)} {fit(percent(usage), 4, '>')}" + ("!" if missed else " ")
    return text, BAD if missed else (OK if usage is not None else None)


def _waiting_cell(server: ServerView, _now: float, _width: int) -> Cell:
    waiting = _value(server, "requests_waiting")
    return count(waiting), WARN if waiting else None


def _preemption_cell(server: ServerView, _now: float, _width: int) -> Cell:
    return _with_mark(count(_value(server, "preemptions_per_minute")), preemptions_missed(server))


def _latency_cell(server: ServerView, latency: str) -> Cell:
    shown = p99_of(latencies_of(server.window, latency))
    text, style = _with_mark(shown, server.missed(f"{latency}_p99_seconds"))
    return text, DIM if style is None and past_load(server) else style


def _with_mark(text: str, missed: bool) -> Cell:
    return (f"{text} !", BAD) if missed and text != UNKNOWN else (f"{text}  ", None)


def state_counts(servers: Sequence[ServerView]) -> str:
    """The number of servers in each state: ``2 ready · 1 starting``."""
    listed = [server for server in servers if not server.replayed]
    here = [server for server in listed if server.attached is None]
    states = [RUNNING if _can_not_be_asked(server) else server.state for server in here]
    attached = [server.state_text for server in listed if server.attached is not None]
    order = dict.fromkeys((State.READY, RUNNING, *STATE_STYLE))
    parts = [f"{states.count(state)} {state}" for state in order if state in states]
    return " · ".join(parts + [f"{attached.count(text)} {text}" for text in dict.fromkeys(sorted(attached))])


class TableState(msgspec.Struct, frozen=True):
    """How to show the table: the name under the cursor, the order, the marked names, title and columns."""

    selected: str | None
    order: Order = Order()
    marked: frozenset[str] = frozenset()
    title: str = "Servers"
    columns: tuple[str, ...] = ()
    """Names of the columns that the user chose; empty for those that fit."""
    past: bool = False
    expanded: frozenset[str] = frozenset()
    """Names of servers whose ranks have their own rows."""


class Entry(msgspec.Struct, frozen=True):
    """A row of the table: a server, or one of its data-parallel ranks if it has a label."""

    server: ServerView
    rank: str = ""


def entries_of(servers: Sequence[ServerView], expanded: frozenset[str]) -> list[Entry]:
    """The rows: every server, with an expanded server's ranks below it."""
    return [
        entry
        for server in servers
        for entry in (
            Entry(server),
            *(Entry(server, rank) for rank in (ranks_of(server) if server.name in expanded else ())),
        )
    ]


def ranks_of(server: ServerView) -> Mapping[str, EngineSample]:
    """The current data-parallel ranks by label; empty with a single engine or at an earlier moment."""
    engines = server.sample.engines if server.sample is not None and server.moment is None else {}
    return in_order(engines) if len(engines) > 1 else {}


def rank_row(server: ServerView, rank: str, columns: Sequence[ServerColumn], width: int) -> Strip:
    """One rank's line, below its server: what vLLM reports for it."""
    one = ranks_of(server)[rank]
    usage = one.kv_cache_usage
    known: dict[str, Cell] = {
        "KV CACHE": (f"{bar(usage, (13 if width < 160 else 24) - _FIGURE)} {fit(percent(usage), 4, '>')} ", OK),
        "RUN": (count(one.requests_running), None),
        "WAIT": (count(one.requests_waiting), WARN if one.requests_waiting else None),
    }
    first = next((at for at, column in enumerate(columns) if column.metric), len(columns))
    room = sum(column.width + 1 for column in columns[:first]) - 1
    parts: list[Part] = ["  ", (fit(f"  rank {plain(rank)}", room), DIM), " "]
    for column in columns[first:]:
        text, style = known.get(column.title, ("", None))
        parts += [(fit(text, column.width, column.align), style), " "]
    return line(*parts[:-1])


class ServersTable(FramedView):
    """All servers, one line each, with a cursor; scrolls to keep the cursor visible."""

    DEFAULT_CSS = "ServersTable { height: 6; width: 1fr; }"

    class Picked(Message):
        """A server was clicked ``times`` in a row; ``mark`` toggles its mark."""

        def __init__(self, name: str, times: int, mark: bool) -> None:
            super().__init__()
            self.name, self.times, self.mark = name, times, mark

    _arguments: tuple[Sequence[ServerView], float, TableState] | None = None
    _shown: tuple[Entry, ...] = ()
    _top = 0

    def show_servers(self, servers: Sequence[ServerView], now: float, state: TableState) -> None:
        """Show these servers, already sorted by ``state``'s order."""
        self._arguments = (servers, now, state)
        self._draw(*self.room)

    def on_resize(self) -> None:
        """Redraw for the new size."""
        self._draw(*self.room)

    def _draw(self, width: int, height: int) -> None:
        if not width or self._arguments is None:
            return
        servers, now, state = self._arguments
        rows = max(1, height - 2)
        entries = entries_of(servers, state.expanded)
        index = next((i for i, one in enumerate(entries) if one.server.name == state.selected), 0)
        last = max((i for i, one in enumerate(entries) if one.server.name == state.selected), default=0)
        top = max(min(self._top, index, len(entries) - rows), last - rows + 1)
        self._top = max(0, min(top, index))  # as many of its ranks as fit below it
        self._shown = tuple(entries[self._top : self._top + rows])
        columns = columns_for(servers, width, state.columns)
        hidden = len(entries) - len(self._shown)
        more = f"{hidden} more ↑↓" if hidden else ""
        marks = f"{len(state.marked)} marked" if state.marked else ""
        right = " · ".join(filter(None, (marks, ("now: " if state.past else "") + state_counts(servers), more)))
        if cell_len(right) + cell_len(state.title) > width - 12:
            right = marks or more or f"{len(servers)} total"
        lines = [rule(state.title, width, (right,) if right else ()), column_titles(columns, state.order)]
        lines += [
            rank_row(one.server, one.rank, columns, width)
            if one.rank
            else row(
                one.server,
                columns,
                now,
                width,
                one.server.name == state.selected,
                one.server.name in state.marked,
                state.past,
            )
            for one in self._shown
        ]
        self.show_lines(lines)

    async def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked line; a click before the name or with ctrl marks it."""
        index = event.y - 2
        if 0 <= index < len(self._shown):
            mark = event.ctrl or event.x < 2 + self.framed
            self.post_message(self.Picked(self._shown[index].server.name, event.chain, mark))

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    async def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        await self.run_action(f"screen.cursor({wheel_step(event)})")


SHRINK_SECONDS = 15.0
"""The table shrinks after it has needed fewer rows for this long. A restarting server of someone else disappears for a
few seconds, which should not move anything; our own servers stay in the table until removed."""


class TableHeight:
    """Grows immediately, shrinks after `SHRINK_SECONDS`, and adjusts to the needed rows after `reset`."""

    def __init__(self) -> None:
        self._rows = 0
        self._fewer_since: float | None = None
        self._most_since = 0

    def reset(self) -> None:
        """Start over, when everything else moves, too."""
        self._rows, self._fewer_since = 0, None

    def rows(self, needed: int, now: float) -> int:
        """The table's rows at ``now`` (Unix seconds) if it needs ``needed``."""
        if needed >= self._rows:
            self._rows, self._fewer_since = needed, None
        elif self._fewer_since is None:
            self._fewer_since, self._most_since = now, needed
        else:
            self._most_since = max(self._most_since, needed)
            if now - self._fewer_since >= SHRINK_SECONDS:
                self._rows, self._fewer_since = self._most_since, None
        return self._rows

"""Details of one server: command line, flags with the reason for each, generations, paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from textual.binding import BindingType
from textual.strip import Strip

from vllm_console.fleet.adapters import limits_text, request_states
from vllm_console.fleet.snapshot import ServerView
from vllm_console.metrics.window import in_order
from vllm_console.runs.startup import startup_lines
from vllm_console.runs.store import Run
from vllm_console.text import count, duration, percent, plain, size, took
from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import now_lines, shown_value
from vllm_console.ui.panes.state import memory_lines, stage_lines
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.terminal.lines import line
from vllm_console.ui.theme import ACCENT, DIM, SIMULATED, WARN
from vllm_console.ui.threads import answer_for, begin_worker
from vllm_console.ui.widgets.draw import KeyHint, beside, fit
from vllm_console.ui.widgets.reader import ReaderScreen, TextReader, scroll_hint
from vllm_console.ui.widgets.table import Value, facts, section, sections, table
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper.records import State
from vllm_launchers.plan.flags import LORA
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import FlagValue, same_value

if TYPE_CHECKING:
    from vllm_console.fleet.adapters import Adapters
    from vllm_console.fleet.local import LocalFleet

TWO_COLUMNS, GAP = 110, 4
"""Minimum width to show the command next to the facts, and the gap between them in cells."""

MOST_VALUE = 32
"""Maximum width of a flag's value in cells; the command line shows it in full."""


class DescribeScreen(ReaderScreen):
    """Describes one server as it was when the screen was opened. ``y`` copies its command line.

    ``moment`` (Unix seconds) is the earlier moment that the operations screen shows, if any.
    """

    SCOPE = "describe"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("describe")]

    def __init__(self, server: ServerView, now: float, moment: float | None, fleet: LocalFleet) -> None:
        super().__init__(TextReader(lambda: server.marked_name, self._lines, self._hints))
        self._server, self._now, self._moment, self._fleet = server, now, moment, fleet
        self._runs: Sequence[Run] = ()
        self._adapters: Adapters | None = None

    def _lines(self, width: int) -> list[Strip]:
        about = describe_lines(self._server, self._now, width, self._runs, self._adapters)
        return [*now_lines(self._moment, self._now, width), *about]

    def _hints(self) -> Sequence[KeyHint]:
        return scroll_hint(), (key_of("describe_copy"), "copy command line", "screen.describe_copy")

    def on_mount(self) -> None:
        """Load earlier runs and LoRA adapters in the background."""
        if self._server.recorded:
            begin_worker(self, self._read_runs, "runs", "runs")
        if self._moment is None and serves_adapters(self._server):
            begin_worker(self, self._read_adapters, "adapters", "adapters")

    async def _read_runs(self) -> None:
        try:
            self._runs, _ = await answer_for(self, partial(self._fleet.history.runs, self._server.name), "runs")
        except OperationError:
            return  # no run is recorded
        self._reader.redraw()

    async def _read_adapters(self) -> None:
        try:
            self._adapters = await answer_for(self, partial(self._fleet.adapters, self._server.name), "adapters")
        except OperationError:
            return  # no answer: the server's state says so
        self._reader.redraw()

    def action_describe_copy(self) -> None:
        """Copy the command line."""
        copy(
            self.app,
            " ".join(self._server.command),
            "Command line",
            lambda message: self.notify(message, markup=False, timeout=4),
        )


def serves_adapters(server: ServerView) -> bool:
    """Whether the server may have LoRA adapters and can be asked for them."""
    return server.ours and not server.replayed and server.state is State.READY and server.flags.get(LORA) is True


def describe_lines(
    server: ServerView, now: float, width: int, runs: Sequence[Run] = (), adapters: Adapters | None = None
) -> list[Strip]:
    """Tables of facts, command, flags, changes, start-ups (including earlier ``runs``, newest first), and workload."""
    top = _beside(server, now, width)
    parts = [
        top or _facts(server, now, width),
        section("Data-parallel ranks", _ranks(server, width)),
        section("LoRA adapters", _adapters(adapters, width)),
        [] if top else section("Command", _command(server.command, width)),
        section("Flags", _flags(server, width)),
        _changed(server, width),
        _startup(server, now, width),
        section("Start-ups side by side", _startups(runs, width)),
        section("Sized for", _workload(server, width)),
    ]
    return sections(parts)


def _beside(server: ServerView, now: float, width: int) -> list[Strip]:
    """Facts and command side by side; empty if the width does not suffice."""
    known = _facts(server, now, width)
    left = max(strip.cell_length for strip in known) + GAP
    command = section("Command", _command(server.command, width - left))
    if width < TWO_COLUMNS or not command or max(strip.cell_length for strip in command) > width - left:
        return []
    return [beside(one, left, other) for one, other in zip_longest(known, command, fillvalue=line())]


def describe_facts(server: ServerView, now: float) -> Mapping[str, str]:
    """Facts about a server by name; empty where unknown."""
    engine, age = server.engine, duration(now - server.state_since)
    return {
        "state": f"{server.state_text}{', running' if server.since_start else ''} for {age}",
        "owner": _owner(server),
        "attached": server.foreign.removeprefix("is attached ") if server.attached is not None else "",
        "preset": server.preset,
        "model": server.model,
        "engine": f"{engine.label}  {engine.path}" if engine else "",
        "address": server.address,
        "GPUs": ", ".join(map(str, server.gpus)),
        "pid": str(server.pid) if server.pid is not None else "",
        "run": str(server.generation),
        "probe": f"none: {server.no_probe}" if server.no_probe else "",
        "tuner": server.tuner.sentence(now) if server.tuner is not None else "",
        "attempt": str(server.attempt) if server.attempt else "",
        "downtime": f"{took(server.downtime_seconds)} at the last restart" if server.downtime_seconds else "",
        "last exit": server.exit.reason if server.exit else "",
        "log": server.log_path,
    }


def _owner(server: ServerView) -> str:
    """The owner and what that allows; empty for our own or attached servers."""
    if server.recorded:
        return ""
    if server.lost:
        return "you"
    if server.remote:
        return f"{'you' if server.remote_ours else server.owner or 'someone else'} (it {server.foreign})"
    return f"{server.owner or 'someone else'} (started outside this console: read-only)"


def _facts(server: ServerView, now: float, width: int) -> list[Strip]:
    """Names and values, then why the server is down and notices."""
    rows: list[tuple[str, Value]] = []
    for name, value in describe_facts(server, now).items():
        if value:
            simulated = name == "engine" and value.startswith("simulated")
            rows.append((name, (value, SIMULATED if simulated else None)))
    rows += [(name, (value, WARN)) for name, value in (("why", server.reason), ("note", server.notice)) if value]
    return facts(rows, width)


def _command(words: Sequence[str], width: int) -> list[Strip]:
    """The command on several lines, broken before flags, ready to paste."""
    if not words:
        return []
    rows, row = [], ""
    for word in words:
        if row and (cell_len(row) + cell_len(word) + 5 > width or word.startswith("--")):
            rows.append(row + " \\")
            row = "    "
        row += word if row.strip() == "" else f" {word}"
    rows.append(row)
    return [line("  " + row) for row in rows]


def _flags(server: ServerView, width: int) -> list[Strip]:
    rows: list[list[Value]] = [
        [f"--{flag}", (_short(value), ACCENT), (server.reasons.get(flag, ""), DIM)]
        for flag, value in server.flags.items()
    ]
    return table(("FLAG", "VALUE", "WHY"), rows, width)


def _short(value: FlagValue | None) -> str:
    text = shown_value(value)
    return fit(text, min(MOST_VALUE, cell_len(text)))


def _changed(server: ServerView, width: int) -> list[Strip]:
    before, after = server.previous_flags, server.flags
    if before is None:
        return []
    rows: list[list[Value]] = [
        [f"--{flag}", (_short(before.get(flag)), DIM), (shown_value(after.get(flag)), ACCENT)]
        for flag in sorted({*before, *after})
        if not same_value(before.get(flag), after.get(flag))
    ]
    lines = table(("FLAG", "BEFORE", "NOW"), rows, width)
    return section("Changed since the previous run", lines or [line((" nothing", DIM))])


def _startup(server: ServerView, now: float, width: int) -> list[Strip]:
    if not server.stages:
        return []
    return section("Start-up", [*stage_lines(server.stages, now, width), *memory_lines(server.startup, width)])


def _startups(runs: Sequence[Run], width: int) -> list[Strip]:
    started = [run for run in runs if run.stages]
    return [line(f" {row}") for row in startup_lines(runs, width - 1)] if len(started) > 1 else []


def _ranks(server: ServerView, width: int) -> list[Strip]:
    """One row per data-parallel rank, if there are several; the servers table shows their sum."""
    engines = in_order(server.sample.engines) if server.sample is not None else {}
    if len(engines) < 2:
        return []
    rows: list[list[Value]] = [
        [label, percent(one.kv_cache_usage), count(one.requests_running), count(one.requests_waiting),
         count(one.generation_tokens_total)]
        for label, one in engines.items()
    ]  # fmt: skip
    return table(("rank", "KV cache", "running", "waiting", "tokens since its start"), rows, width)


def _adapters(found: Adapters | None, width: int) -> list[Strip]:
    if found is None:
        return []
    rows: list[list[Value]] = [
        [plain(one.name), (request_states(one), ACCENT if one.running else WARN if one.waiting else DIM),
         count(one.rank), size(one.size), (plain(one.path), DIM)]
        for one in found.adapters
    ]  # fmt: skip
    columns = ("ADAPTER", "REQUESTS", ">RANK", ">SIZE", "PATH")
    limits = line((fit(f" {limits_text(found)}", width).rstrip(), DIM))
    return [*(table(columns, rows, width) or [line((" none is loaded", DIM))]), limits]


def _workload(server: ServerView, width: int) -> list[Strip]:
    load = server.workload
    if load is None:
        return []
    shared = f"{percent(load.prefix_reuse)} of them shared"
    rows: list[tuple[str, Value]] = [
        ("prompts", f"{count(load.input_tokens_p95)} tokens (p95), {shared}"),
        ("answers", f"{count(load.output_tokens_p95)} tokens (p95)"),
        ("concurrent", counted(load.concurrency, "request")),
    ]
    return facts(rows, width)

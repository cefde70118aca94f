"""The main screen: a table of all servers, panes for the selected one, and the keys that act on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace
from rich.cells import cell_len
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.diagnosis.finding import Fix
from vllm_console.fleet.markers import flag_change
from vllm_console.fleet.snapshot import FIRST, FleetSnapshot, ServerView
from vllm_console.fleet.types import NothingToCompareError, flag_difference
from vllm_console.history.time_view import TimeView
from vllm_console.text import clock, duration, plain
from vllm_console.ui.actions import Action, bindings, changing
from vllm_console.ui.findings import edits_of, findings_of, unjudged
from vllm_console.ui.keymap import changing_keys, key_of
from vllm_console.ui.panes.bars import header_line, message_lines, notices_of, staged_line
from vllm_console.ui.panes.base import Pane
from vllm_console.ui.panes.finding import (
    StagedState,
    cancelable,
    event_line,
    finding_lines,
    finding_rows,
    preparing,
    restart_line,
)
from vllm_console.ui.panes.gpus import GpusPane
from vllm_console.ui.panes.kv_cache import kv_cache_lines
from vllm_console.ui.panes.latency import latency_lines, on_log_scale
from vllm_console.ui.panes.log import LogPane
from vllm_console.ui.panes.pane_bar import pane_bar, problem_panes
from vllm_console.ui.panes.preemptions import preemption_lines
from vllm_console.ui.panes.servers import (
    TEXTS,
    Order,
    ServersTable,
    TableHeight,
    TableState,
    columns_of,
    entries_of,
    ordered,
    ranks_of,
)
from vllm_console.ui.panes.sparks import spark_lines
from vllm_console.ui.panes.state import state_lines
from vllm_console.ui.panes.throughput import throughput_lines
from vllm_console.ui.panes.tuner import tuner_line
from vllm_console.ui.parts import change_report, staging
from vllm_console.ui.parts.change_report import ChangeReport
from vllm_console.ui.parts.fixes import FixCycle
from vllm_console.ui.parts.footer_keys import FooterContext, applying, footer_hints, tail_hints
from vllm_console.ui.parts.hints import DemoHints
from vllm_console.ui.parts.pane_layout import (
    GPUS,
    PANES,
    REQUESTS,
    SPARKS,
    STEPS,
    Arrangement,
    GpuHistoryChoice,
    LayoutInputs,
    PaneChoice,
    PaneLayout,
    best_layout,
)
from vllm_console.ui.parts.server_events import SeenServer, events_between, seen_of
from vllm_console.ui.parts.server_filter import matches
from vllm_console.ui.parts.server_verbs import RefusalError, ServerVerbs, change_rows
from vllm_console.ui.parts.staged_plan import StagedPlans
from vllm_console.ui.parts.staged_prediction import Predictions, prediction_text
from vllm_console.ui.parts.staging import MeasuredTraffic, StagedStep, Staging, measured_traffic
from vllm_console.ui.parts.time_cursor import TimeCursor
from vllm_console.ui.parts.tuning_bar import TuningBar
from vllm_console.ui.terminal.choice import in_browser
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.terminal.lines import LineView, actions_of, clickable, line
from vllm_console.ui.terminal.repaint import PartialRepaintScreen
from vllm_console.ui.theme import DIM, KEY, STRONG, WARN
from vllm_console.ui.widgets.chart import ChartView
from vllm_console.ui.widgets.draw import Part, keys_line
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.framed import frames_fit
from vllm_console.ui.widgets.placed_area import PlacedArea, set_display, set_height
from vllm_launchers.errors import NotFoundError
from vllm_launchers.keeper.records import State
from vllm_launchers.units import counted
from vllm_launchers.vllm.flags.changes import Edits, Flags

if TYPE_CHECKING:
    from vllm_console.fleet.runs import RunHistory
    from vllm_console.fleet.types import Replay
    from vllm_console.runs.compare import Comparison
    from vllm_console.runs.store import Run
    from vllm_console.ui.app import ConsoleApp
    from vllm_console.ui.panes.gpu_charts import GpuHistoryView
    from vllm_console.ui.screens.findings import FindingsScreen

MEASURED = (State.READY, State.UNRESPONSIVE)
"""States in which metric panes have live data. A server that failed while serving shows its last minutes."""

CHART_ROWS = 16

TWO_MESSAGE_ROWS = 40
"""Minimum screen height for two message rows."""

PREDICTION_WIDTH = 160
"""Maximum width of a predicted effect on the findings screen, where it wraps."""

SHORT = 20
"""Screen height below which rows are scarce."""


def _verb(method: Callable[[ServerVerbs, ServerView | None], None]) -> Callable[[OperationsScreen], None]:
    """An action that does this to the server under the cursor."""
    return lambda screen: method(screen.verbs, screen.live)


class OperationsScreen(PartialRepaintScreen):
    """Shows the newest snapshot. Its keys are in the action registry; helper objects do the work."""

    SCOPE = "operations"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("operations")]

    def __init__(
        self,
        console: ConsoleApp,
        layout: str = "auto",
        at: float | None = None,
        columns: Sequence[str] = (),
        *,
        server: str = "",
        replay: Replay | None = None,
    ) -> None:
        super().__init__()
        self.console = console
        self.staging = Staging(self._staging_changed)
        self.staged_plans = StagedPlans(console, self.staging, self._verdict_changed)
        self.predictions = Predictions(console, self.staging, self.staged_plans, self._prediction_changed)
        self.changes = ChangeReport(console, self.redraw)
        self.verbs = ServerVerbs(
            console, self.staging, self.staged_plans, self.predictions, self._forget, self.changes.undecided
        )
        self.fixes = FixCycle(console, self.staging)
        self.time = TimeCursor(console, self._time_changed, at, replay)
        self.panes = PaneChoice(layout)
        self.columns = tuple(columns)
        """Names of the table columns the user chose; empty to show what fits."""
        self.gpu_history = GpuHistoryChoice()
        self.hints = DemoHints(console.hints is not None, console.hints_ended)
        self._arrangement: Arrangement | None = None
        self._selected_name: str | None = None
        self._wanted = replay.name if replay is not None else server or None
        self._index = 0
        self._hidden: str | None = None
        """The server that was under the cursor until its state changed and the filter hid it; the cursor returns."""
        self._shown_by: str | None = None
        """The filter with which the selected server was shown last."""
        self._before_replay: str | None = None
        """The selected server when a replay was opened; the cursor returns to it."""
        self._filter = ""
        self._order = Order()
        self._marked: frozenset[str] = frozenset()
        self._expanded: frozenset[str] = frozenset()
        self._seen: dict[str, SeenServer] = {}
        self._table_height = TableHeight()
        self._sized_for: Size | None = None
        self._identities: dict[str, tuple[str, str, int, bool]] = {}
        """Preset, model and generation of each server in the newest snapshot, and whether it is ours."""
        self._header = LineView(id="header", classes="bar")
        self._table = ServersTable(id="servers")
        self._finding = LineView(id="finding", action="screen.findings")
        self._findings: FindingsScreen | None = None
        """The newest screen of findings; it may be closed."""
        self._welcome = LineView(id="welcome")
        self._state = Pane(lambda server, now, width, height, _: state_lines(server, now, width, height), id="state")
        self._pane_bar = LineView(id="pane-bar", classes="bar")
        self._sparks = LineView(id=SPARKS)
        self._panes = (
            Pane(kv_cache_lines, id="kv-cache", number=1),
            Pane(preemption_lines, id="preemptions", number=2),
            Pane(latency_lines, id="latency", number=3),
            Pane(throughput_lines, id="throughput", number=4),
            Pane(_request_lines, id=REQUESTS, number=7),
            Pane(_step_lines, id=STEPS, number=8),
        )
        self._requests_order = "slowest"
        self._log = LogPane(id="log")
        self._gpus = GpusPane(id="gpus")
        self._area = PlacedArea(
            self._welcome, self._state, *self._panes, self._log, self._gpus, self._sparks, id="panes"
        )
        self._filter_entry = Entry(id="filter")
        self._filter_entry.select_on_focus = False
        self._hint = LineView(id="hint", classes="bar")
        self._message = LineView(id="message")
        self._tuning = TuningBar(self.staging, self.redraw, console.say, id="tuning")
        self._staged_bar = LineView(id="staged", classes="bar")
        self._footer = LineView(id="footer", classes="bar")
        self._foot = Vertical(id="foot")

    def compose(self) -> ComposeResult:
        """Yield the header, table, finding line, panes and foot."""
        yield self._header
        yield self._table
        yield self._finding
        yield self._pane_bar
        yield self._area
        with self._foot:
            yield self._hint
            yield self._message
            yield self._staged_bar
            yield self._tuning
            yield self._footer

    def on_mount(self) -> None:
        """Compare runs periodically."""
        self.set_interval(change_report.CHECK_SECONDS, lambda: self.changes.check(self.selected))

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Disable mutating actions in read-only mode."""
        return not (self.console.read_only and changing(action))

    def on_key(self, event: events.Key) -> None:
        """Explain why a mutating key does nothing in read-only mode."""
        if self.console.read_only and event.key in changing_keys(self.SCOPE):
            self.console.say(f"Nothing was changed: this console is read-only{self._read_only_by}.", WARN)

    @property
    def _read_only_by(self) -> str:
        by = plain(self.console.fleet.read_only_by)
        if by == "--read-only" and in_browser(os.environ):
            by = "started without --allow-changes, see 'vllm-console web --help'"
        return f" ({by})" if by else ""

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def servers(self) -> Sequence[ServerView]:
        """The servers matching the filter in table order; the selected one as of the moment shown."""
        snapshot = self.console.snapshot
        if snapshot is None:
            return ()
        earlier = snapshot.earlier
        at = self.time.view.at
        if earlier is not None and (at is None or earlier.moment not in (None, at)):
            earlier = None  # read for a moment other than the one in the header
        matching = [
            earlier if earlier is not None and earlier.name == server.name else server
            for server in snapshot.servers
            if matches(self._filter, server, snapshot)
        ]
        replay = self._replay(snapshot)
        matching += [replay] if replay is not None else []
        return ordered(matching, self._order) if self._order.title else matching

    def _replay(self, snapshot: FleetSnapshot) -> ServerView | None:
        """The replayed run, without figures until those of the moment shown have been read."""
        found, replay, at = snapshot.replay, self.time.replay, self.time.view.at
        if found is None or replay is None or found.name != replay.name:
            return None
        if found.moment == at and self._selected_name == found.name:
            return found
        return replace(found, moment=None, window=None, findings=(), judged=())

    @property
    def selected(self) -> ServerView | None:
        """The server under the cursor."""
        return next((server for server in self.servers if server.name == self._selected_name), None)

    @property
    def live(self) -> ServerView | None:
        """The selected server as it is now, whatever moment is shown; verbs act on this one."""
        snapshot, server = self.console.snapshot, self.selected
        if snapshot is None or server is None:
            return None
        return server if server.replayed else snapshot.server(server.name)

    @property
    def filter_text(self) -> str:
        """The table's filter; empty if there is none."""
        return self._filter

    @property
    def past(self) -> bool:
        """Whether the screen shows an earlier moment."""
        return self.time.view.at is not None

    @property
    def selected_name(self) -> str:
        """Name of the server whose charts the next snapshot includes."""
        return self._selected_name or self._wanted or FIRST

    @property
    def wanted_time(self) -> TimeView:
        """What the next snapshot should contain: the time, the GPU with visible charts, and requests if visible."""
        in_sight = self._arrangement.regions if self._arrangement is not None else ()
        view = replace(self.time.view, requests=REQUESTS in in_sight)
        if not self._gpus.display:
            return view
        return replace(view, gpu=self.gpu_history.gpu(self.console.snapshot, self.selected))

    @property
    def log_reader(self) -> Callable[[], None] | None:
        """Function that reads the log for the next snapshot, to be called in a thread; None if no log is visible."""
        return self._log.reader

    @property
    def on_top(self) -> bool:
        """Whether nothing covers this screen and no filter is typed. Otherwise, no question may open on its own."""
        return self.app.screen is self and not self._filter_entry.purpose

    def select(self, name: str) -> None:
        """Move the cursor to a server as soon as it exists."""
        self._wanted = name
        self.redraw()

    def staged_state(self, server: ServerView) -> StagedState:
        """A server's staged changes and the plan's verdict on them."""
        effect = self.predictions.on_finding(server)
        return StagedState(self.staging.of(server.name), self.staged_plans.of(server), self.console.read_only, effect)

    # -- a new snapshot --------------------------------------------------------------------------------------------

    def show_snapshot(self) -> None:
        """Process the newest snapshot; draw it unless another screen covers this one."""
        servers = self.console.snapshot.servers if self.console.snapshot else ()
        self._report_events(servers)
        self._forget_replaced(servers)
        if self.is_mounted and (self.app.screen is self or isinstance(self.app.screen, ModalScreen)):
            self.redraw()

    def _report_events(self, servers: Sequence[ServerView]) -> None:
        """Announce servers that became ready or failed; add other events to the message list."""
        before, self._seen = self._seen, seen_of(servers)
        for event in events_between(before, servers):
            if event.state is State.READY:
                self.console.messages.ready(event.server)
            if event.aloud:
                self.console.say(event.text, event.style, event.server, outage=event.state is State.FAILED)
            else:
                self.console.messages.outdate(event.server)
                self.console.messages.note(event.server, event.text, event.style)

    def _forget_replaced(self, servers: Sequence[ServerView]) -> None:
        """Drop outdated state: everything about removed servers, and staged changes that have been applied.

        A name with another preset or model, or a lower generation, now belongs to another server.
        """
        self.verbs.in_progress.observe(servers)
        self.verbs.rolling.observe(servers)
        before = self._identities
        self._identities = {one.name: (one.preset, one.model, one.generation, one.ours) for one in servers}
        for name, (preset, model, generation, ours) in before.items():
            now = self._identities.get(name)
            if now is None and ours:
                self._table_height.reset()  # removed: it does not come back on its own
            if now is None or now[:2] != (preset, model) or now[2] < generation:
                self._forget(name)
        self._marked &= {server.name for server in servers}
        self.staging.drop_applied(servers)
        self.staged_plans.observe(servers)
        self.verbs.observe(servers)

    def _forget(self, name: str) -> None:
        """Drop all state of a removed server, so that a new server of that name does not inherit it."""
        self.staging.drop(name)
        self.staged_plans.drop(name)
        self.predictions.drop(name)
        self._hidden = self._hidden if self._hidden != name else None
        self.changes.drop(name)
        self.verbs.drop(name)
        self._marked -= {name}

    def _staging_changed(self, name: str) -> None:
        self.redraw()
        self.staged_plans.judge_soon(name)

    def _verdict_changed(self, server: ServerView, _: Edits) -> None:
        self.redraw()
        self.verbs.observe([server])

    def _prediction_changed(self) -> None:
        self.redraw()
        if self._findings is not None:
            self._findings.redraw()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def on_screen_resume(self) -> None:
        """Draw what changed while the screen was covered. The message line repeats toasts, so they are cleared."""
        self.app.clear_notifications()
        self.redraw()
        self._read_requests()

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size; the table shrinks to the rows it needs."""
        if event.size == self._sized_for:
            return  # Textual reports a size more than once
        self._sized_for = event.size
        self._table_height.reset()
        self.call_after_refresh(self.redraw)

    def redraw(self) -> None:
        """Draw everything from the app's snapshot; only changed cells go to the terminal."""
        if self.is_mounted:
            with self.painted_together():
                self._redraw()

    def _redraw(self) -> None:
        snapshot = self.console.snapshot
        self._keep_cursor()
        server = self.selected
        if self._tuning.server_name and (server is None or server.name != self._tuning.server_name):
            self._tuning.close()  # another server was selected: the bar was tuning different flags
            return  # closing redraws everything
        self.predictions.observe(server)
        if server is not None:  # advance to the next hint if this one was followed
            self.hints.observe(server, bool(self.staging.of(server.name)), restarting=self.verbs.restarting(server))
        self._arrange(server)
        self.draw_header()
        if snapshot is not None:
            self._draw_table(snapshot)
            if server is not None:
                large = bool(self.panes.zoomed)
                charts = replace(self.time.charts, order=self._requests_order, large=large)
                shown = _with_last_window(server)
                for pane in (*self._panes, self._state):
                    if pane.display:
                        pane.show_server(shown, snapshot.at, charts)
                self._log.show_server(server)
            self._finding.show(self._finding_lines(server, snapshot) if server is not None else [])
            if self._gpus.display:
                self._gpus.show_snapshot(snapshot, self._gpu_history_view(server), self.time.view.at)
        self._draw_panes(server)
        self.draw_foot()

    def _gpu_history_view(self, server: ServerView | None) -> GpuHistoryView | None:
        """The charts the GPUs pane shows; None for the live view."""
        if not self.gpu_history.shown:
            return None
        from vllm_console.ui.panes.gpu_charts import GpuHistoryView

        markers = server.markers if server is not None else ()
        return GpuHistoryView(self.gpu_history.page, self.time.charts, markers)

    def _draw_panes(self, server: ServerView | None) -> None:
        arrangement, width = self._arrangement, self.app.size.width
        if arrangement is None:
            return
        if server is None:  # nothing to show
            self._pane_bar.show([line()])
            return
        in_sight = [number for number, pane in enumerate(PANES, 1) if pane in arrangement.regions]
        large = PANES.index(arrangement.large) + 1 if arrangement.large in PANES else 0
        problems = problem_panes(server, self.console.snapshot)
        markers, alone = bool(server.markers), not self._table.display
        bar = pane_bar(in_sight, large, problems, self._layout_name(), width, legend=markers, needed=alone)
        self._pane_bar.show([bar])
        if self._sparks.display:
            self._sparks.show(spark_lines(_with_last_window(server), arrangement.spark_panes, width))

    def _layout_name(self) -> str:
        if self.panes.zoomed:
            name = "" if self._table.display else plain(self._selected_name or "", 16)
            return f"back · {name}" if name else "back"
        return f"auto: {best_layout(self.app.size)}" if self.panes.layout is PaneLayout.AUTO else self.panes.layout

    def draw_header(self) -> None:
        """Draw only the header, since the snapshot's age may be all that changed."""
        width = self.app.size.width
        server = self.selected
        shown = self.time.shown(server)
        self._header.show([header_line(self.console.snapshot, self.console.polling, width, shown, server)])

    def draw_foot(self) -> None:
        """Draw the message, the staged changes or tuning bar, and the footer."""
        width, server, snapshot = self.app.size.width, self.selected, self.console.snapshot
        rows = message_rows(self.app.size.height)
        if snapshot is not None:
            states = {one.name: str(one.state) for one in snapshot.servers}
            self.console.messages.observe(self._selected_name or "", states)
        message = self.console.message or self.predictions.text(server, width) or None
        self._message.show(message_lines(message, server, snapshot, width, rows))
        if self.hints.shown:
            staged = server is not None and bool(self.staging.of(server.name))
            awaited = self.changes.awaited(server) if server is not None else ""
            restarting = server is not None and self.verbs.restarting(server)
            self._hint.show([self.hints.line(server, width, staged=staged, awaited=awaited, restarting=restarting)])
        if server is not None and self._tuning.display:
            self._tuning.draw(server, self.staged_state(server).verdict, width)
        self._staged_bar.show([self._staged_line(server, width)])
        if self._filter_entry.purpose:
            back = key_of("clear"), "clear", "screen.clear"
            keys = keys_line(self._filter_entry.keys(back, "keep", chooses=True), width)
        else:
            keys = keys_line(footer_hints(self._situation(server)), width, tail_hints())
        self._footer.show([keys])

    def _staged_line(self, server: ServerView | None, width: int) -> Strip:
        if self.console.read_only:
            return line((f" read-only{self._read_only_by}: nothing can be changed here", DIM))
        if self.time.replay is not None:
            name, leave = plain(self.time.replay.name), key_of("time_live")
            return line((f" {name} is being replayed and can't be changed. {leave} leaves", DIM))
        if self.past and not (server is not None and self.staging.of(server.name)):
            text = " Viewing the past. Changes still apply to the running servers."
            short = " Viewing the past. Changes apply to running servers."
            return line((text if cell_len(text) <= width else short, DIM))
        if server is not None and server.ours and not server.node:
            state = self.staged_state(server)
            fits = state.verdict if self._fit_stands_below(server, state) else None
            return staged_line(server.flags, state.staged, width, revert=server.previous_flags is not None, fits=fits)
        return line()

    def _fit_stands_below(self, server: ServerView, state: StagedState) -> bool:
        """Whether the verdict goes next to the staged changes, as a finding and a change report fill both rows."""
        snapshot, size = self.console.snapshot, self.app.size
        if state.verdict is None or snapshot is None or server.moment is not None or preparing(server):
            return False
        if finding_rows(size.height) != 2 or not (findings_of(server) or unjudged(server)):
            return False
        return self.changes.judged(server) and bool(self.changes.lines(server, snapshot.at, size.width, 1))

    def _situation(self, server: ServerView | None) -> FooterContext:
        staged = server is not None and bool(self.staging.of(server.name))
        replay = self.time.replay is not None
        snapshot = self.console.snapshot
        empty = snapshot is not None and not snapshot.servers
        return FooterContext(
            server,
            staged,
            len(self._marked),
            self.console.read_only,
            self.past,
            replay,
            empty,
            self._tuning.display,
            actions_of(self._finding.lines),
            bool(self._filter) and not (server is not None and cancelable(server, self.console.read_only)),
        )

    @property
    def applying(self) -> tuple[str, Sequence[Action]]:
        """A heading and the actions available now."""
        now = self._situation(self.selected)
        if now.past:
            title = "Now: an earlier moment is shown"
        elif now.marked:
            title = f"Now: {counted(now.marked, 'server')} marked"
        elif now.server is not None:
            title = f"Now: {plain(now.server.name)}, {now.server.state_text}{', changes staged' if now.staged else ''}"
        else:
            title = "Now: no server" if now.empty else "Now: no server selected"
        return title, applying(now)

    def _draw_table(self, snapshot: FleetSnapshot) -> None:
        servers = self.servers
        title = "Servers"
        if self._filter:
            title = f"Servers matching '{plain(self._filter)}' · {len(servers)} of {len(snapshot.servers)}"
        state = TableState(
            self._selected_name, self._order, self._marked, title, self.columns, self.past, self._expanded
        )
        self._table.show_servers(servers, snapshot.at, state)
        if not servers:
            self._welcome.show(_welcome(snapshot, self._filter, self.console.read_only))

    def _table_entries(self, snapshot: FleetSnapshot) -> int:
        """Rows the table can use; constant while a filter is typed, so that nothing moves with each key."""
        matching = self.servers if self._filter and not self._filter_entry.purpose else ()
        if matching:
            return len(entries_of(matching, self._expanded))
        return len(entries_of(snapshot.servers, self._expanded)) + (self.time.replay is not None)

    def _finding_lines(self, server: ServerView, snapshot: FleetSnapshot) -> list[Strip]:
        """The top finding or the latest event, then whether the newest change helped.

        If there is no room for both, the verdict on the change replaces the fix, whose key still works.
        """
        width, most, staged = self.app.size.width, finding_rows(self.app.size.height), self.staged_state(server)
        if self._tuning.display or self._fit_stands_below(server, staged):  # the foot shows the verdict
            staged = StagedState(staged.staged, None, staged.read_only)
        if server.moment is not None:
            found = finding_lines(server, staged, server.moment, width, most)
            return found or [event_line(server, None, server.moment, width)]
        lines = [tuner_line(server, snapshot.at, width)] if server.tuner is not None else []
        lines += [restart_line(server, snapshot.at, width, self.console.read_only)] if preparing(server) else []
        room = most - len(lines)
        change = self.changes.lines(server, snapshot.at, width, 1)
        kept = room > 2 or (room == 2 and self.changes.judged(server))  # "too little data" replaces no fix
        lines += finding_lines(server, staged, snapshot.at, width, room - 1 if change and kept else room)
        event = self.console.messages.newest_of(server.name)
        happened = (event.at, event.text) if event else None
        if not lines:
            lines, happened = [event_line(server, happened, snapshot.at, width)], None
        last = [event_line(server, happened, snapshot.at, width)] if happened else []
        return [*lines, *change, *last][:most]

    def _keep_cursor(self) -> None:
        """Keep the cursor on its server; if that is gone, on the server now in its row.

        A machine that loses its connection is one row instead of its servers. The cursor stays there and returns later.
        It also returns to a server that the filter hides for a while, such as during a restart.
        """
        names = [server.name for server in self.servers]
        same_filter = self._shown_by == self._filter
        if not same_filter:
            self._hidden = None
        if self._wanted in names:
            self._selected_name, self._wanted, self._hidden = self._wanted, None, None
        elif self._hidden in names:
            # Not while another server's flags are being changed: the next key would act on this one instead.
            if not self._tuning.server_name and not self.staging.of(self._selected_name or ""):
                self._selected_name = self._hidden
            self._hidden = None
        elif self.time.replay is None and self._selected_name not in names and self._before_replay in names:
            self._selected_name = self._before_replay
        if self._selected_name in names:
            self._index = names.index(self._selected_name)
        elif names:
            self._leave(self._selected_name or "", names, hidden=same_filter)
        if names:
            self._shown_by = self._filter

    def _leave(self, gone: str, names: Sequence[str], *, hidden: bool) -> None:
        """Move the cursor off a server that is not shown anymore. ``hidden``: the filter may hide it for a while."""
        machine = gone.partition("/")[0]
        back = next((at for at, name in enumerate(names) if name.startswith(f"{gone}/")), None)
        if machine != gone and machine in names:
            self._index, self._wanted = names.index(machine), self._wanted or gone
        elif gone and back is not None:
            self._index, self._wanted = back, None  # the awaited server is gone
        elif hidden and self.console.server(gone) is not None:
            self._hidden = self._hidden or gone
        self._index = min(self._index, len(names) - 1)
        self._selected_name = names[self._index]

    # -- layout ----------------------------------------------------------------------------------------------------

    def _arrange(self, server: ServerView | None) -> None:
        """Lay out the screen. Sets only what differs, since each change costs a layout pass.

        Heights depend on the screen size, not on content, and the table shrinks with a delay. On short screens, an
        enlarged pane also takes the rows of the table.
        """
        screen, snapshot = self.app.size, self.console.snapshot
        finding, foot = finding_rows(screen.height), message_rows(screen.height) + 2
        every = self._table_entries(snapshot) if snapshot is not None else 0
        most = max(3, screen.height // 4) if screen.height < SHORT else max(4, screen.height // 3)
        framed = frames_fit(screen)
        needed = min(most, max(1, every) + 2 + framed)
        table_rows = self._table_height.rows(needed, snapshot.at if snapshot is not None else 0.0)
        measured = server is not None and _measured(server)
        alone = bool(self.panes.zoomed) and measured and screen.height < SHORT
        table = 0 if alone else table_rows
        set_height(self._table, table)
        set_display(self._table, not alone)
        set_height(self._finding, finding)
        set_height(self._message, foot - 2)
        set_height(self._filter_entry, foot - 2)
        set_height(self._tuning, foot - 1)
        foot += int(self.hints.shown)
        set_height(self._foot, foot)
        self._arrange_foot()
        area = Size(screen.width, max(1, screen.height - 1 - table - finding - 1 - foot))
        known = snapshot is not None and snapshot.host is not None and bool(snapshot.host.gpus)
        gpu_rows = self._gpus.wanted_height(snapshot, screen.width) + framed if known else 0
        if known and self.gpu_history.shown:
            gpu_rows = max(gpu_rows, CHART_ROWS)
        shown = LayoutInputs(server is not None, measured, gpu_rows)
        self._arrangement = self.panes.arrangement(screen, area, shown)
        for pane in (self._table, self._state, self._gpus, self._log, *self._panes):
            pane.framed, pane.focused_frame = framed, bool(pane.id) and pane.id == self.panes.zoomed
        self._area.place(self._arrangement.regions)

    def _arrange_foot(self) -> None:
        """The filter replaces the message; the tuning bar replaces the message and the staged changes."""
        tuning = self._tuning.display
        set_display(self._message, not tuning and not self._filter_entry.purpose)
        set_display(self._staged_bar, not tuning)
        set_display(self._hint, self.hints.shown)

    def action_pane(self, number: int) -> None:
        """Enlarge a pane; a second call restores the layout."""
        self.panes.zoom(number)
        self._panes_changed()

    def action_step_pane(self, by: int) -> None:
        """Enlarge the next or previous pane."""
        self.panes.step(by, self._arrangement.large if self._arrangement is not None else "")
        self._panes_changed()

    def action_next_layout(self) -> None:
        """Switch to the next pane layout."""
        zoomed, before = bool(self.panes.zoomed), self._arrangement
        self._table_height.reset()
        for _ in PaneLayout:
            self.panes.next_layout()
            self.redraw()
            after = self._arrangement
            if zoomed or before is None or after is None or before.regions != after.regions:
                return
        self.console.say("All layouts look the same at this screen size.")

    def choose_layout(self, layout: PaneLayout) -> None:
        """Use this pane layout."""
        self.panes.layout, self.panes.zoomed = layout, ""
        self._table_height.reset()
        self.redraw()

    def show_pane(self, pane: str) -> None:
        """Enlarge a pane."""
        self.panes.zoomed = pane
        self._panes_changed()

    def choose_columns(self, columns: Sequence[str]) -> None:
        """Show these table columns (names); with none, show what fits."""
        self.columns = tuple(columns)
        self.redraw()

    def _panes_changed(self) -> None:
        self._table_height.reset()
        self.redraw()
        self._read_requests()

    def _read_requests(self) -> None:
        """Poll now if the requests pane has become visible without data."""
        server = self.selected
        if self.wanted_time.requests and server is not None and (server.probe is None or not server.probe.requests):
            self.console.poll_once()

    def action_requests_order(self) -> None:
        """Switch to the next order of finished requests; if their pane is not visible, enlarge it instead."""
        from vllm_console.ui.panes.requests import order_after

        if self.wanted_time.requests:
            self._requests_order = order_after(self._requests_order)
            self.redraw()
        else:
            self.show_pane(REQUESTS)

    def action_gpu_history(self) -> None:
        """Toggle GPU charts in the GPUs pane; if the pane is not visible, enlarge it with charts."""
        in_sight = self._gpus.display
        if not in_sight:
            self.panes.zoomed = GPUS
        if in_sight or not self.gpu_history.shown:
            self.gpu_history.toggle()
        self._time_changed()

    def action_gpu_charts(self, by: int) -> None:
        """Show the next charts of the GPU, or those of the next GPU."""
        if not (self.gpu_history.shown and self._gpus.display):
            raise RefusalError(f"No charts of GPUs are shown: {key_of('gpu_history')} shows them.")
        self.gpu_history.step(by, self._gpus.chart_pages, self.console.snapshot, self.selected)
        self._time_changed()

    # -- time ------------------------------------------------------------------------------------------------------

    def _time_changed(self) -> None:
        self.redraw()
        self.console.poll_once()

    def action_time(self, steps: int, pages: int = 0) -> None:
        """Move the time cursor."""
        self.time.move(self.selected, steps, pages)

    def action_time_at(self, place: float) -> None:
        """Go to a position in the charts, from 0 (left) to 1."""
        self.time.go_to_place(self.selected, place)

    def action_time_first(self) -> None:
        """Go to the beginning of the charts."""
        self.time.first(self.selected)

    def action_time_live(self) -> None:
        """Return to live."""
        self.time.live()

    def start_replay(self, replay: Replay) -> None:
        """Start showing an ended run."""
        self._filter = ""
        if self.time.replay is None:
            self._before_replay = self._selected_name
        self._wanted = replay.name
        self.time.start_replay(replay)

    def replay(self, word: str) -> None:
        """Find an ended run and show it."""
        fleet = self.console.fleet

        def found(replay: Replay) -> str:
            self.start_replay(replay)
            return ""

        self.console.act("", lambda: fleet.replays.find(word), found, once="replay")

    def action_replay(self) -> None:
        """Choose a run to replay."""
        fleet, selected = self.console.fleet, self._selected_name

        def listed(found: tuple[Sequence[Run], object]) -> str:
            runs = [run for run in found[0] if run.replayable]
            if not runs:
                return "No run to replay: none has served requests and ended, or the histories were deleted."
            from vllm_console.ui.screens.compare import run_names
            from vllm_console.ui.screens.dialogs import choose

            named = run_names(runs)
            here = next((name for name, run in named.items() if run.server == selected), None)
            choices = [(name, _run_note(run)) for name, run in named.items()]
            choose(self.app, "Replay which run?", choices, lambda name: self.replay(str(named[name].id)), here)
            return ""

        self.console.late_screens.open("", fleet.history.runs, listed, once="runs to replay")

    def action_marker(self, by: int) -> None:
        """Go to the previous or next marker."""
        self.time.to_marker(self.selected, by)

    def action_step_range(self, by: int) -> None:
        """Switch to the next longer or shorter range."""
        self.time.step_range(by)

    def action_log_scale(self) -> None:
        """Toggle between a logarithmic and a linear latency scale."""
        server = self.selected
        self.time.toggle_log(server is not None and on_log_scale(server, "ttft", self.time.charts))

    # -- cursor and filter -----------------------------------------------------------------------------------------

    def _move_to(self, index: int) -> None:
        servers = self.servers
        if servers:
            self._index = max(0, min(len(servers) - 1, index))
            self._selected_name, self._wanted, self._hidden = servers[self._index].name, None, None
            if self._tuning.server_name not in ("", self._selected_name):
                self._tuning.close()
            self.redraw()
            server, paused = self.selected, self.console.polling.paused
            if not paused:
                self.call_after_refresh(self.console.poll_now)  # draw first: polling holds the GIL
            elif server is not None and server.series is None:
                self.console.poll_once()  # a snapshot contains only the selected server's series

    def go_to(self, name: str) -> None:
        """Move the cursor to a server of the snapshot; clear a filter that hides it."""
        if name not in [server.name for server in self.servers]:
            self._filter = ""
        names = [server.name for server in self.servers]
        if name in names:
            self._move_to(names.index(name))

    def action_cursor(self, by: int) -> None:
        """Select the next or previous server."""
        self._move_to(self._index + by)

    def action_cursor_first(self) -> None:
        """Select the first server."""
        self._move_to(0)

    def action_cursor_last(self) -> None:
        """Select the last server."""
        self._move_to(len(self.servers) - 1)

    @on(ServersTable.Picked)
    async def _picked(self, event: ServersTable.Picked) -> None:
        names = [server.name for server in self.servers]
        if event.name in names:
            self._move_to(names.index(event.name))
            if event.mark and not self.console.read_only:
                await self.run_action("mark")
            elif event.times == 2:
                await self.run_action("describe")

    # -- order and marks -------------------------------------------------------------------------------------------

    def action_sort_by(self, title: str) -> None:
        """Sort by a column. A second call reverses the order, a third restores the default order."""
        self._order = self._order.after(title)
        self.redraw()

    def action_sort(self) -> None:
        """Ask for the column to sort by."""
        from vllm_console.ui.screens.dialogs import choose

        titles = [column.title for column in columns_of(self.servers, self.app.size.width, self.columns)]
        choices = [(title, _order_note(self._order, title)) for title in titles]
        present = self._order.title or None
        choose(self.app, "Sort servers by which column?", choices, self.action_sort_by, present)

    def action_ranks(self) -> None:
        """Toggle one row per data-parallel rank for the selected server."""
        server = self.verbs.chosen(self.live)
        if not ranks_of(server):
            raise RefusalError(f"{server.name} has no data-parallel ranks, or reports none.")
        self._expanded ^= {server.name}
        self.redraw()

    def action_mark(self) -> None:
        """Toggle the mark of the selected server. Marked servers are stopped and restarted together."""
        self._marked ^= {self.verbs.own(self.live).name}
        self.redraw()

    @property
    def marked(self) -> list[ServerView]:
        """The marked servers."""
        snapshot = self.console.snapshot
        return [server for server in snapshot.servers if server.name in self._marked] if snapshot is not None else []

    async def action_filter(self) -> None:
        """Open the filter field. It is mounted on first use so that the console starts faster."""
        if self._tuning.display:
            self._tuning.close()
        if not self._filter_entry.is_attached:
            await self._foot.mount(self._filter_entry, before=self._message)
        self._filter_entry.open("filter", self._filter, placeholder="name, model, preset, state, gpu0, :8000, owner")
        self.redraw()

    def filter_by(self, text: str) -> None:
        """Show only servers that match."""
        self._filter = text.strip()
        self.redraw()

    @on(Input.Changed, "#filter")
    def _filter_changed(self, event: Input.Changed) -> None:
        self.filter_by(event.value)

    @on(Entry.Stepped)
    def _filter_stepped(self, event: Entry.Stepped) -> None:
        self.action_cursor(event.step)

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self._filter_entry.shut()
        self._table_height.reset()
        self.redraw()

    def action_clear(self) -> None:
        """Undo one thing: an error, the filter field, a restart being prepared, staged changes, the filter, marks, the
        large pane, the replay, or the hints."""
        server = self.selected
        read = self.console.messages.unseen_error
        self.console.messages_seen()
        if read:
            return  # keep its subject, such as refused staged changes
        if self._filter_entry.purpose:
            self._filter = ""
            self._filter_done()
        elif server is not None and cancelable(server, self.console.read_only):
            self.verbs.cancel_restart(server)
        elif server is not None and (staged := self.staging.of(server.name)):
            self._drop_staged(server, staged)
        elif self._filter:
            self._filter = ""
            self.redraw()
        elif self._marked:
            self._marked = frozenset()
            self.redraw()
        elif self.panes.zoomed:
            self.panes.zoomed = ""
            self.redraw()
        elif self.time.replay is not None:
            self.time.live()
        else:
            self.action_hide_hints()

    def _drop_staged(self, server: ServerView, staged: Edits) -> None:
        """Drop staged changes. Several need a confirmation, since this key is also pressed out of habit."""
        rows = change_rows(server, staged)
        if len(staged) == 1:
            self.staging.drop(server.name)
            self.console.say(f"Dropped {rows[0]}.")
            return

        def drop() -> None:
            self.staging.drop(server.name)
            self.console.say(f"Dropped {len(staged)} changes of {server.name}.")

        self.verbs.ask(f"Drop {len(staged)} staged changes of {server.name}?", rows, "drop all", drop)

    def action_hide_hints(self) -> None:
        """Hide hints for good."""
        self.hints.hide()
        self.redraw()

    # -- verbs -----------------------------------------------------------------------------------------------------

    def action_restart(self) -> None:
        """Restart the marked servers, or else the selected one, with their staged flags."""
        if self._marked:
            self.verbs.restart_all(self.marked, self._unmark)
        else:
            self.verbs.restart(self.live)

    def action_rolling_update(self) -> None:
        """Rolling update: start a second instance of the selected server with the staged flags."""
        self.verbs.rolling.update(self.live)

    def action_stop(self) -> None:
        """Stop the marked servers, or else the selected one."""
        if self._marked:
            self.verbs.stop_all(self.marked, self._unmark)
        else:
            self.verbs.stop(self.live)

    def _unmark(self) -> None:
        self._marked = frozenset()
        self.redraw()

    action_remove = _verb(ServerVerbs.remove)
    action_switch_preset = _verb(ServerVerbs.switch)
    action_switch_pair = _verb(ServerVerbs.switch_pair)
    action_toggle_load = _verb(ServerVerbs.toggle_load)
    action_ramp = _verb(ServerVerbs.ramp)

    def action_chat(self) -> None:
        """Open a chat with the selected server."""
        self.console.open_chat(self.verbs.own(self.live).name)

    # -- staging ---------------------------------------------------------------------------------------------------

    def action_stage(self, id: str) -> None:
        """Stage the change of a tuning key."""
        server = self.verbs.tunable(self.live)
        step = staging.TUNING_KEYS[id].step(server, self.staging.flags_of(server))
        if problem := staging.refused(server, step):
            raise RefusalError(problem, server.name)
        self.stage_step(server, step)

    def stage_step(self, server: ServerView, step: StagedStep) -> None:
        """Stage a step that has passed `staging.refused`."""
        staged = self.staging.of(server.name)
        self.staging.put(server.name, staging.stage(server.flags, staged, step))
        self._report_staged(server, step.note + "." if step.note else "")

    def _report_staged(self, server: ServerView, note: str = "") -> None:
        """Report assumptions, and warn that several changes can't be evaluated separately."""
        warning = staging.combined_warning(server, self.staging.of(server.name))
        if message := " ".join(filter(None, (note, warning))):
            self.console.say(message)

    def action_stage_fix(self) -> None:
        """Stage the best fix for the top finding; repeated calls stage the next fix."""
        self.fixes.stage_next(self.verbs.tunable(self.live))

    def action_adjust(self) -> None:
        """Open the tuning bar."""
        self._tuning.open(self.verbs.tunable(self.live))

    def action_previous_flags(self) -> None:
        """Stage a revert to the previous generation's flags."""
        server = self.verbs.alone(self.verbs.idle(self.live))
        if server.previous_flags is None:
            raise RefusalError(f"{server.name} has no earlier run to revert to.", server.name)
        revert = flag_difference(server.flags, server.previous_flags).edits
        others = {flag: value for flag, value in self.staging.of(server.name).items() if flag not in revert}
        kept = f", in addition to {counted(len(others), 'other change')}" if others else ""
        if revert:
            self.staging.put(server.name, {**others, **revert})
        self.console.say(
            f"Staged a revert to the previous run's flags{kept}: {key_of('restart')} restarts with it."
            if revert
            else "The previous run had the same flags."
        )

    def action_drop_last(self) -> None:
        """Drop the change staged last."""
        server = self.selected
        if server is not None and (staged := self.staging.of(server.name)):
            self.staging.drop_last(server.name)
            self.console.say(f"Dropped {change_rows(server, staged)[-1]}.")

    def action_edit_flags(self) -> None:
        """Open the flag editor."""
        self._edit_flags(self.verbs.tunable(self.live))

    def _edit_flags(self, server: ServerView, traffic: MeasuredTraffic | None = None) -> None:
        from vllm_console.ui.screens.flags import FlagsScreen

        name, self._hidden = server.name, None

        def take(staged: Edits | None) -> None:
            if staged is not None:
                self.staging.put(name, staged)
                self._report_staged(server)

        self.app.push_screen(FlagsScreen(server, self.staging.of(name), self.console.fleet, traffic), take)

    def action_stage_traffic(self) -> None:
        """Open the flag editor with suggestions from measured traffic, or report that there was too little."""
        server = self.verbs.tunable(self.live)
        fleet, name = self.console.fleet, server.name

        def show(traffic: MeasuredTraffic) -> str:
            if not traffic.choices:
                return f"{name}: {traffic.sentence}"
            self._edit_flags(server, traffic)
            return ""

        def missed(traffic: MeasuredTraffic) -> str:
            if not traffic.choices:
                return f"{name}: {traffic.sentence}"
            return f"Suggestions from the traffic of {name} are ready: {key_of('stage_traffic')} shows them."

        doing, once = f"Analyzing the traffic of {name}…", f"traffic {name}"
        self.console.late_screens.open(
            doing, lambda: measured_traffic(fleet, server), show, once=once, about=name, missed=missed
        )

    # -- other screens ---------------------------------------------------------------------------------------------

    def action_findings(self) -> None:
        """Show all findings of the selected server."""
        server, snapshot = self.verbs.chosen(self.selected), self.console.snapshot
        if snapshot is None:
            return
        from vllm_console.ui.screens.findings import FindingsScreen

        self.hints.followed("findings")
        may_stage = server.ours and not server.replayed and not self.console.read_only
        stage = partial(self._stage_fix_of, server) if may_stage else None
        self._findings = FindingsScreen(server, snapshot.at, stage, partial(self._predicted, server))
        self.app.push_screen(self._findings)

    def _predicted(self, server: ServerView, code: str, fix: Fix) -> Part:
        """The predicted effect of a fix on a finding; empty without a prediction."""
        found = self.predictions.seen(server, edits_of(server.flags, fix))
        return prediction_text(found, PREDICTION_WIDTH, code) if found is not None else ""

    def _stage_fix_of(self, server: ServerView, fix: Fix) -> None:
        """Stage a fix for the server as it was when its findings were shown, unless it runs with other flags now."""
        name = server.name
        with self.console.saying_refusals():
            now = self.console.server(name)
            if now is None:
                raise RefusalError(f"{name} is gone.", name)
            if (now.generation, now.preset, now.flags) != (server.generation, server.preset, server.flags):
                raise RefusalError(f"{name} was restarted since: {key_of('findings')} shows its findings now.", name)
            self.fixes.stage(self.verbs.tunable(now), fix)

    def action_compare(self) -> None:
        """Compare the selected server's run with the previous one, on a screen that offers a revert."""
        server = self.verbs.chosen(self.selected)
        if not server.recorded:
            raise RefusalError("Only runs of your own servers can be compared.")
        from vllm_console.runs.compare import ComparisonVerdict
        from vllm_console.ui.screens.compare import CompareScreen, nothing_screen

        fleet, name = self.console.fleet, server.name

        def show(found: Comparison | str) -> str:
            if isinstance(found, str):
                self.app.push_screen(nothing_screen(name, found))
                return ""
            if found.verdict is not ComparisonVerdict.TOO_LITTLE:
                self.hints.followed("compare")
            # No revert for a replayed run: its server may be gone.
            revert = (lambda _: None) if server.replayed else partial(self._revert_to, name)
            self.app.push_screen(CompareScreen(found, revert, self.console))
            return ""

        if (known := self.changes.found(server)) is not None:
            show(known)
            return
        call = partial(_compared, fleet.history, server)
        self.console.late_screens.open("", call, show, once=f"compare {name}", about=name)

    def _revert_to(self, name: str, run: Run) -> Callable[[], None] | None:
        """A callback that restarts the server with a run's flags; None if that is not allowed or changes nothing."""
        server = self.console.server(name)
        if self.console.read_only:
            return None
        if server is None:
            return partial(self._revert, name, run.flags)  # reports that the server is gone
        if run.model != server.model:
            return None
        return None if flag_difference(server.flags, run.flags).empty else partial(self._revert, name, run.flags)

    def _revert(self, name: str, flags: Flags) -> None:
        """Restart the named server, not the one selected meanwhile, with an earlier run's flags."""
        server = self.console.server(name)
        if server is None or not server.ours:
            raise RefusalError(f"{name} is gone.", name)
        self.select(name)
        self.verbs.revert(server, flag_difference(server.flags, flags).edits)

    def action_describe(self) -> None:
        """Describe the selected server as it is now, whatever moment is shown, since keys act on its current state."""
        server, snapshot = self.verbs.chosen(self.live), self.console.snapshot
        if snapshot is None:
            return
        from vllm_console.ui.screens.describe import DescribeScreen

        self.app.push_screen(DescribeScreen(server, snapshot.at, self.time.view.at, self.console.fleet))

    def action_open_log(self) -> None:
        """Open the log in full screen."""
        server = self.verbs.chosen(self.selected)
        if not server.log_path:
            raise RefusalError(_no_log(server))
        from vllm_console.ui.screens.log import LogScreen

        self.app.push_screen(LogScreen(server.name, server.log_path, simulated=server.simulated, at=server.moment))

    def action_new_server(self) -> None:
        """Open the launch screen with the selected server's preset."""
        self._launch()

    def action_find_model(self) -> None:
        """Open the launch screen with the list of local models."""
        self._launch(choose_model=True)

    def action_demo(self) -> None:
        """Switch to the demo, if this console shows no servers."""
        if self.console.polling.demo:
            self.console.say("This is the demo.")
        elif self.console.snapshot is None or self.console.snapshot.servers:
            self.console.say("'vllm-console demo' in another terminal opens the demo.")
        else:
            self.console.demo_wanted = True
            self.console.exit()

    def _launch(self, *, choose_model: bool = False) -> None:
        server = self.selected
        preset = server.preset if server and server.ours and server.preset else None
        self.launch(preset, choose_model=choose_model)

    def launch(self, preset: str | None, *, choose_model: bool = False) -> None:
        """Open the launch screen with a preset, by default the first."""
        from vllm_console.fleet.standby import possible_partners
        from vllm_console.ui.screens.launch import LaunchScreen

        def launched(result: ServerView | None) -> None:
            if result is not None:
                self.select(result.name)
                if why := self.console.fleet.engine_check.unused:
                    self.console.say(f"{result.name} starts without preparation: {why}")
            self.console.poll_once()

        snapshot = self.console.snapshot
        partners = possible_partners(snapshot.servers) if snapshot is not None else ()
        screen = LaunchScreen(self.console.fleet, preset, choose_model=choose_model, partners=partners)
        self.app.push_screen(screen, launched)

    def action_copy_command(self) -> None:
        """Copy the server's command line."""
        server = self.verbs.chosen(self.selected)
        if not server.argv:
            raise RefusalError(f"{server.name} has no known command line.")
        copy(self.app, " ".join(server.command), f"Command line of {server.name}", self.console.say)

    def action_remove_leftovers(self) -> None:
        """Remove leftovers of ended servers, after a confirmation."""
        from vllm_console.ui.screens.leftovers import confirm_leftovers

        confirm_leftovers(self.console)

    def action_adapters(self) -> None:
        """Load a LoRA adapter into the selected server, or unload one."""
        from vllm_console.ui.screens.adapters import change_adapters

        change_adapters(self.console, self.verbs.own(self.selected))

    def action_claim_gpus(self) -> None:
        """Claim GPUs on the shared board, or release them."""
        from vllm_console.ui.screens.claims import claim_gpus

        claim_gpus(self.console)

    def action_messages(self) -> None:
        """Show all messages."""
        from vllm_console.ui.screens.messages import messages_screen

        self.console.messages_seen()
        console = self.console
        screen = messages_screen(lambda: console.messages.history, lambda: notices_of(self.live, console.snapshot))
        self.app.push_screen(screen)

    def action_describe_gpus(self) -> None:
        """Describe the machine's GPUs."""
        snapshot = self.console.snapshot
        if snapshot is None or snapshot.host is None or not snapshot.host.gpus:
            raise RefusalError((snapshot.host_problem if snapshot else "") or "No GPU found on this machine.")
        from vllm_console.ui.screens.gpu_details import GpuDetailsScreen

        self.app.push_screen(GpuDetailsScreen(snapshot, lambda: self.console.snapshot, self.time.view.at))


def _measured(server: ServerView) -> bool:
    """Whether metric panes have data to show for the server."""
    past = server.moment is not None or server.replayed
    return past or server.state in MEASURED or server.last_window is not None


def _with_last_window(server: ServerView) -> ServerView:
    """The server as metric panes show it: a failed one with the figures of its last minute."""
    return server if server.last_window is None else replace(server, window=server.last_window)


def _request_lines(server: ServerView, now: float, width: int, height: int, view: ChartView) -> Sequence[Strip]:
    from vllm_console.ui.panes.requests import requests_lines  # imported on first use: it slows down startup

    return requests_lines(server, now, width, height, view)


def _step_lines(server: ServerView, now: float, width: int, height: int, view: ChartView) -> Sequence[Strip]:
    from vllm_console.ui.panes.steps import step_lines

    return step_lines(server, now, width, height, view)


def _compared(history: RunHistory, server: ServerView) -> Comparison | str:
    """Compare a server's run with the previous one, quickly if its start is stored already; or why that is impossible.

    Raises:
        OperationError: the store cannot be read.
    """
    found = history.last_change(server.name)
    if found is not None and found.after.run.generation == server.generation:
        return found
    try:
        return history.compare(server.name)
    except (NothingToCompareError, NotFoundError) as error:
        return str(error).partition(". ")[0]


def _no_log(server: ServerView) -> str:
    if server.removed:
        return f"The log of {server.name} was deleted with its server."
    if server.remote:
        return f"The log of {server.name} is on {server.remote}; read it with: vllm-console logs {server.name}"
    if server.attached is not None:
        return f"{server.name} is attached: its log is on its own machine."
    return f"{server.name} was not started here: no log."


def _run_note(run: Run) -> str:
    began = clock(run.started_at, time.time())
    lasted = duration((run.ended_at or run.started_at) - run.started_at)
    changed = ", ".join(flag_change(change.flag, change.before, change.after) for change in run.changed)
    return plain(f"{began}  {lasted}  {changed or run.preset}")


def _order_note(order: Order, title: str) -> str:
    after = order.after(title)
    if not after.title:
        return "back to the default order"
    numbers = title not in TEXTS or title in ("GPU", "PORT")
    if numbers:
        return "largest first" if after.descending else "smallest first"
    return "from Z" if after.descending else "from A"


def message_rows(height: int) -> int:
    """Number of message rows on a screen of this height."""
    return 1 if height < TWO_MESSAGE_ROWS else 2


def _welcome(snapshot: FleetSnapshot, wanted: str, read_only: bool) -> list[Strip]:
    if wanted:
        clears = f"{key_of('clear')} shows all {len(snapshot.servers)}"
        return [line(), line(f" No server matches '{plain(wanted)}'; {clears}.")]
    lines = [line(), line((" No servers running.", STRONG)), line()]
    if not read_only:
        offers = (
            ("new_server", "launches one from a preset; whether it fits is checked first"),
            ("find_model", "lists the models on this machine, and which of them fit"),
            ("demo", "opens the demo: two simulated servers, no GPU needed"),
        )
        lines += [line(" ", (key_of(name), clickable(f"screen.{name}", KEY)), f"  {text}") for name, text in offers]
    return [*lines, line(" ", (key_of("help"), clickable("app.help", KEY)), "  shows all keys")]

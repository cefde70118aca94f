"""The screen a person looks at all day: the servers' table, and panes for the one under the cursor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widgets import Input

from vllm_console.fleet.model import FleetSnapshot, ServerView, State
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.panes.bars import footer_line, header_line, message_lines, staged_line
from vllm_console.ui.panes.finding import finding_lines
from vllm_console.ui.panes.gpus import GpusPane
from vllm_console.ui.panes.kv_cache import KvCachePane
from vllm_console.ui.panes.latency import LatencyPane
from vllm_console.ui.panes.log import LogPane
from vllm_console.ui.panes.preemptions import PreemptionsPane
from vllm_console.ui.panes.state import StatePane
from vllm_console.ui.panes.table import ServersTable
from vllm_console.ui.panes.throughput import ThroughputPane
from vllm_console.ui.screens.operations_change import ChangeTold
from vllm_console.ui.screens.operations_panes import GPUS, GRID_HEIGHT, LOG, set_display, set_height
from vllm_console.ui.theme import BAD, DIM, OK, STRONG, WARN
from vllm_console.ui.widgets.lines import LineView, line

GPUS_HEIGHT = 50
"""From this height on the GPUs stand beside the other panes."""

MEASURED = (State.READY, State.UNRESPONSIVE)
"""States in which metric panes have something to say."""


class OperationsScreen(ChangeTold):
    """Shows the newest snapshot. Keys and what they do stand in the registry."""

    SCOPE = "operations"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("operations")]

    def __init__(self) -> None:
        super().__init__()
        self._under: str | None = None
        self._wanted: str | None = None
        self._index = 0
        self._filter = ""
        self._states: dict[str, State] = {}
        self._header = LineView(id="header", classes="bar")
        self._table = ServersTable(id="servers")
        self._finding = LineView(id="finding")
        self._welcome = LineView(id="welcome")
        self._state = StatePane(id="state")
        self._panes = (
            KvCachePane(id="kv-cache"),
            PreemptionsPane(id="preemptions"),
            LatencyPane(id="latency"),
            ThroughputPane(id="throughput"),
        )
        self._log = LogPane(id="log")
        self._gpus = GpusPane(id="gpus")
        self._upper, self._lower = Horizontal(id="upper"), Horizontal(id="lower")
        self._field = Input(id="filter", placeholder="name, preset or state", compact=True, select_on_focus=False)
        self._message = LineView(id="message", classes="bar")
        self._staged_bar = LineView(id="staged", classes="bar")
        self._footer = LineView(id="footer", classes="bar")
        self._foot = Vertical(id="foot")
        self._foot_given = 0

    def compose(self) -> ComposeResult:
        """Header, table, panes, and the lines at the foot."""
        yield self._header
        yield self._table
        yield self._finding
        yield self._welcome
        yield self._state
        with self._upper:
            yield from self._panes[:3]
        yield self._gpus
        with self._lower:
            yield self._panes[3]
            yield self._log
        with self._foot:
            yield self._field
            yield self._message
            yield self._staged_bar
            yield self._footer

    def on_mount(self) -> None:
        """Draw what there is."""
        self.redraw()

    # -- what is shown ---------------------------------------------------------------------------------------------

    @property
    def servers(self) -> Sequence[ServerView]:
        """The servers that pass the filter."""
        snapshot = self.console.snapshot
        if snapshot is None:
            return ()
        wanted = self._filter.casefold()
        return [
            server
            for server in snapshot.servers
            if wanted in f"{server.name} {server.preset} {server.state} {server.owner} {server.model}".casefold()
        ]

    @property
    def selected(self) -> ServerView | None:
        """The server under the cursor."""
        return next((server for server in self.servers if server.name == self._under), None)

    @property
    def selected_name(self) -> str | None:
        """The name under the cursor: the next snapshot brings its series."""
        return self._under

    def select(self, name: str) -> None:
        """Move the cursor to a server; when it is not there yet, as soon as it is."""
        self._wanted = name
        self.redraw()

    def show_snapshot(self) -> None:
        """Draw the app's newest snapshot, unless something covers the whole screen."""
        self._tell_changes()
        self.take_look(self.console.snapshot.servers if self.console.snapshot else ())
        if self.app.screen is self or isinstance(self.app.screen, ModalScreen):
            self.redraw()

    def _tell_changes(self) -> None:
        """Say when a server that was starting is ready, or has failed."""
        servers = self.console.snapshot.servers if self.console.snapshot else ()
        before, self._states = self._states, {server.name: server.state for server in servers}
        for server in servers:
            if before.get(server.name) is not State.STARTING or not server.ours:
                continue
            if server.state is State.READY:
                away = server.downtime_seconds
                said = f"; it was away for {away:.1f} s" if away is not None else ""
                self.console.say(f"{server.name} is ready{said}.", OK)
            elif server.state is State.FAILED:
                self.console.say(f"{server.name} did not start: {server.reason}", BAD)

    def on_screen_resume(self) -> None:
        """Draw what came while it was covered; the message line says what a toast said, which would cover it."""
        self.app.clear_notifications()
        self.redraw()

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.redraw)

    def redraw(self) -> None:
        """Draw everything from the app's snapshot; only changed cells go to the terminal."""
        if not self.is_mounted:
            return
        snapshot = self.console.snapshot
        self._keep_cursor()
        server = self.selected
        self._arrange(server)
        self.draw_header()
        if snapshot is not None:
            self._draw_table(snapshot)
            if server is not None:
                self._draw_finding(server, snapshot)
                for pane in (*self._panes, self._state):
                    if pane.display:
                        pane.give(server, snapshot.at)
                self._log.give_server(server)
            if self._gpus.display:
                self._gpus.give(snapshot)
        self.draw_foot()

    def draw_header(self) -> None:
        """Draw the header alone: how old the last look is may be all that changes."""
        width = self.app.size.width
        self._header.show([header_line(self.console.snapshot, self.console.looking, width)])

    def draw_foot(self) -> None:
        """Draw message, staged changes and footer. A message takes as many lines as it is long."""
        width, server = self.app.size.width, self.selected
        message = self._message_lines(server)
        if self._foot_rows(message) != self._foot_given:
            self._arrange(server)
        self._message.show(message)
        if self.console.read_only:
            by = f" ({plain(self.console.fleet.read_only_by)})" if self.console.fleet.read_only_by else ""
            staged = line((f" read-only{by}: nothing can be changed from here", DIM))
        elif server is not None and server.ours:
            staged = staged_line(server.flags, self.staged.get(server.name, ()), width)
        else:
            staged = line()
        self._staged_bar.show([staged])
        self._footer.show([footer_line(self.console.read_only, width)])

    def _message_lines(self, server: ServerView | None) -> list[Strip]:
        return message_lines(self.console.message, server, self.console.snapshot, self.app.size.width)

    def _foot_rows(self, message: Sequence[Strip]) -> int:
        """Rows of the foot: what is staged, the keys, and above them the message, or the filter that is typed."""
        return 2 + (1 if self._field.display else len(message))

    def _draw_table(self, snapshot: FleetSnapshot) -> None:
        servers = self.servers
        title = "Servers" if not self._filter else f"Servers with “{plain(self._filter)}”"
        self._table.give(servers, self._under, snapshot.at, title)
        if not servers:
            self._welcome.show(_welcome(snapshot, self._filter, self.console.read_only))

    def _finding_lines(self, server: ServerView, snapshot: FleetSnapshot) -> list[Strip]:
        width, most = self.app.size.width, max(1, self.app.size.height // 4 - 1)
        lines = finding_lines(server, self.told(server), snapshot.at, width, most)
        return [*lines, *self.change_lines(server, snapshot.at, width, most - len(lines))]

    def _draw_finding(self, server: ServerView, snapshot: FleetSnapshot) -> None:
        if self._finding.display:
            self._finding.show(self._finding_lines(server, snapshot))

    def _keep_cursor(self) -> None:
        """Keep the cursor on its server by name; when that is gone, on the one now in its place."""
        names = [server.name for server in self.servers]
        if self._wanted in names:
            self._under, self._wanted = self._wanted, None
        if self._under in names:
            self._index = names.index(self._under)
        elif names:
            self._index = min(self._index, len(names) - 1)
            self._under = names[self._index]

    # -- which panes -----------------------------------------------------------------------------------------------

    def _arrange(self, server: ServerView | None) -> None:
        """Show the panes that fit this size and this server's state. Sets only what is different: it costs a layout."""
        height, alone = self.app.size.height, self._one_pane
        rows = max(1, len(self.servers)) + 2
        most = max(4, height // 3) if height < GRID_HEIGHT else height // 3
        set_height(self._table, min(rows, most))
        found, foot = self._arrange_finding(server), self._arrange_foot(server)
        self._arrange_gpus(server, alone, height - 1 - min(rows, most) - found - foot)
        measured = server is not None and server.state in MEASURED
        for index, pane in enumerate((*self._panes, self._log)):
            wanted = server is not None and alone in (None, index) and (measured or pane is self._log)
            set_display(pane, wanted)
        set_display(self._upper, any(pane.display for pane in self._panes[:3]))
        set_display(self._lower, self._panes[3].display or self._log.display)
        set_display(self._state, server is not None and not measured and alone not in (LOG, GPUS))
        set_display(self._welcome, server is None and alone != GPUS)

    def _arrange_finding(self, server: ServerView | None) -> int:
        """How many rows the finding takes."""
        snapshot = self.console.snapshot
        height = len(self._finding_lines(server, snapshot)) if server is not None and snapshot is not None else 0
        set_display(self._finding, height > 0)
        if height:
            set_height(self._finding, height)
        return height

    def _arrange_foot(self, server: ServerView | None) -> int:
        """How many rows the foot takes."""
        message = self._message_lines(server)
        self._foot_given = self._foot_rows(message)
        set_height(self._message, len(message))
        set_height(self._foot, self._foot_given)
        return self._foot_given

    def _arrange_gpus(self, server: ServerView | None, alone: int | None, room: int) -> None:
        """GPUs alone, beside the other panes where it is tall enough, or under the welcome."""
        snapshot = self.console.snapshot
        known = snapshot is not None and snapshot.host is not None and bool(snapshot.host.gpus)
        beside = known and (server is None or (alone is None and self.app.size.height >= GPUS_HEIGHT))
        set_display(self._gpus, alone == GPUS or beside)
        if self._gpus.display:
            part = room // (2 if server is None else 3)
            set_height(self._gpus, room if alone == GPUS else min(part, self._gpus.wanted_height(snapshot)))

    # -- moving about ----------------------------------------------------------------------------------------------

    def _move_to(self, index: int) -> None:
        servers = self.servers
        if servers:
            self._index = max(0, min(len(servers) - 1, index))
            self._under, self._wanted = servers[self._index].name, None
            self.redraw()
            server, paused = self.selected, self.console.looking.paused
            if not paused:
                self.call_after_refresh(self.console.look_now)  # the picture first: a look takes the interpreter
            elif server is not None and server.series is None:
                self.console.look_once()  # only the selected server's charts are looked up

    def action_cursor_down(self) -> None:
        """The next server."""
        self._move_to(self._index + 1)

    def action_cursor_up(self) -> None:
        """The server before."""
        self._move_to(self._index - 1)

    def action_cursor_first(self) -> None:
        """The first server."""
        self._move_to(0)

    def action_cursor_last(self) -> None:
        """The last server."""
        self._move_to(len(self.servers) - 1)

    @on(ServersTable.Picked)
    def _picked(self, event: ServersTable.Picked) -> None:
        names = [server.name for server in self.servers]
        if event.name in names:
            self._move_to(names.index(event.name))

    def action_filter(self) -> None:
        """Type a filter."""
        field = self._field
        field.display = True
        self._message.display = False
        field.value = self._filter
        field.focus()
        self.redraw()

    @on(Input.Changed, "#filter")
    def _filter_changed(self, event: Input.Changed) -> None:
        self._filter = event.value.strip()
        self.redraw()

    @on(Input.Submitted, "#filter")
    def _filter_done(self) -> None:
        self._field.display = False
        self._message.display = True
        self.set_focus(None)
        self.redraw()

    def action_clear(self) -> None:
        """Step by step: leave the filter field, drop what is staged, drop the filter, show all panes."""
        field = self._field
        server = self.selected
        if field.display:
            field.value = self._filter = ""
            self._filter_done()
        elif server is not None and server.name in self.staged:
            self._set_staged(server.name, ())
        elif self._filter:
            self._filter = ""
            self.redraw()
        elif self._zoom is not None:
            self._zoom = None
            self.redraw()

    # -- other screens ---------------------------------------------------------------------------------------------

    def action_describe(self) -> None:
        """Describe the selected server."""
        server, snapshot = self.selected, self.console.snapshot
        if server is None or snapshot is None:
            self.console.say("No server is selected: n launches one.", WARN)
            return
        from vllm_console.ui.screens.describe import DescribeScreen

        self.app.push_screen(DescribeScreen(server, snapshot.at))

    def action_open_log(self) -> None:
        """Read the log on the whole screen."""
        server = self.selected
        if server is None or not server.log_path:
            self.console.say("There is no log to read: this console did not start the server.", WARN)
            return
        from vllm_console.ui.screens.log import LogScreen

        self.app.push_screen(LogScreen(server.name, server.log_path, simulated=server.simulated))


def _welcome(snapshot: FleetSnapshot, wanted: str, read_only: bool) -> list[Strip]:
    if wanted:
        return [line(), line(f" No server matches “{plain(wanted)}”; esc shows all {len(snapshot.servers)}.")]
    lines = [line(), line((" No server is running.", STRONG)), line()]
    if not read_only:
        lines.append(line(" n  launches one from a preset: it is checked whether it fits before it starts"))
    return [*lines, line(" ?  shows all keys")]

"""Pane 5: the end of the selected server's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical

from vllm_console.fleet.snapshot import ServerView
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import LineView, clickable, clickable_line, line
from vllm_console.ui.theme import DIM, KEY
from vllm_console.ui.widgets.draw import Part, rule

if TYPE_CHECKING:
    from vllm_console.ui.widgets.log_view import LogView


class LogPane(Vertical):
    """A title and the log's tail, which follows by itself."""

    DEFAULT_CSS = """
    LogPane { background: ansi_default; }
    LogPane #log-title, LogPane #log-none { height: 1; }
    LogPane LogView { height: 1fr; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._path: str | None = None
        self._removed = False
        self._moment: float | None = None
        self._shown_server: ServerView | None = None
        self._title = LineView(id="log-title")
        self._none = LineView(id="log-none")
        self._view: LogView | None = None
        self._sized = False
        """Whether the view has its height, and has got what it shows."""

    def compose(self) -> ComposeResult:
        """Title, and the log once there is one."""
        yield self._title
        yield self._none

    def on_resize(self) -> None:
        """Draw for the new size."""
        if self._shown_server is not None:
            self.show_server(self._shown_server)

    def show_server(self, server: ServerView) -> None:
        """Show this server's log; opens a file only when it is another one."""
        self._shown_server = server
        width = self.size.width
        if not width or not self.display:
            return
        full = clickable("screen.open_log", KEY), clickable("screen.open_log", DIM)
        keys: tuple[Part, ...] = ((key_of("open_log"), full[0]), (" full screen, search", full[1]))
        if server.removed:
            keys = ()
        elif server.moment is not None:
            keys = (("up to the moment shown", DIM),)
        title = rule(f"{key_of('pane_5')} Log · {server.marked_name}", width, keys)
        self._title.show([clickable_line(title, "screen.pane(5)")])
        if server.log_path != self._path or (not server.log_path and server.removed != self._removed):
            self._path, self._removed = server.log_path, server.removed
            self._open(server.log_path)
        elif self._view is not None and self._sized and server.moment != self._moment:
            self._go_to(self._view, server.moment)
        elif self._view is not None:
            self._view.poll()

    def _go_to(self, view: LogView, moment: float | None) -> None:
        """Show the log up to a moment (Unix seconds), or follow it again."""
        self._moment = moment
        if moment is None:
            view.follow()
        else:
            view.show_moment(moment)

    def _open(self, path: str) -> None:
        self._none.display = not path
        removed = self._shown_server is not None and self._shown_server.removed
        why = "no log: it was deleted with its server" if removed else "no log: started outside this console"
        self._none.show([line((f" {why}", DIM))])
        if not path:
            self.query("#log-view").remove()
            self._view, self._sized = None, False
            return
        if self._view is None:
            from vllm_console.ui.widgets.log_view import LogView

            self._view = LogView(id="log-view")
            self.mount(self._view)
            self.call_after_refresh(self._begin)  # a moment is shown at the bottom: its height must be known
        elif self._sized:
            self._begin()

    def _begin(self) -> None:
        """Show the log of the server that is shown, up to its moment if it has one."""
        if self._view is None or self._shown_server is None or not self._path:
            return
        self._sized, self._moment = True, None
        self._view.open(self._path)
        if self._shown_server.moment is not None:
            self._go_to(self._view, self._shown_server.moment)

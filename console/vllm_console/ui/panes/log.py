"""Pane 5: the end of the selected server's log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Vertical

from vllm_console.fleet.model import ServerView
from vllm_console.text import plain
from vllm_console.ui.theme import DIM
from vllm_console.ui.widgets.draw import rule
from vllm_console.ui.widgets.lines import LineView, line

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
        self._given: ServerView | None = None
        self._title = LineView(id="log-title")
        self._none = LineView(id="log-none")
        self._view: LogView | None = None

    def compose(self) -> ComposeResult:
        """Title, and the log once there is one."""
        yield self._title
        yield self._none

    def on_resize(self) -> None:
        """Draw for the new size."""
        if self._given is not None:
            self.give_server(self._given)

    def give_server(self, server: ServerView) -> None:
        """Show this server's log; opens a file only when it is another one."""
        self._given = server
        width = self.size.width
        if not width or not self.display:
            return
        mark = " · simulated" if server.simulated else ""
        self._title.show([rule(f"5 Log · {plain(server.name)}{mark}", width, (("l: whole screen, search", DIM),))])
        if server.log_path != self._path:
            self._path = server.log_path
            self._open(server.log_path)
        elif self._view is not None:
            self._view.look()

    def _open(self, path: str) -> None:
        self._none.display = not path
        self._none.show([line((" no log: this console did not start the server", DIM))])
        if not path:
            self.query("#log-view").remove()
            self._view = None
            return
        if self._view is not None:
            self._view.open(path)
            return
        from vllm_console.ui.widgets.log_view import LogView

        view = self._view = LogView(id="log-view")
        self.mount(view)
        self.call_after_refresh(view.open, path)

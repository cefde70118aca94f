"""Pane 5: the end of the selected server's log."""

from __future__ import annotations

from collections.abc import Callable

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import LineView, clickable, line
from vllm_console.ui.theme import DIM, KEY
from vllm_console.ui.widgets.draw import Part
from vllm_console.ui.widgets.frame_box import FrameBox
from vllm_console.ui.widgets.log_view import LogView
from vllm_console.ui.widgets.placed_area import set_display


class LogPane(FrameBox):
    """A title and the tail of the log, which it follows."""

    def __init__(self, *, id: str) -> None:
        self._path: str | None = None
        self._removed = False
        self._moment: float | None = None
        self._shown_server: ServerView | None = None
        self._none = LineView(id="log-none")
        set_display(self._none, False)
        self._view = LogView(id="log-view")  # created now: mounting it later would cost another layout
        self._sized = False
        """Whether the view has its height and its log."""
        super().__init__(self._none, self._view, id=id)

    def on_resize(self) -> None:
        """Redraw for the new size."""
        super().on_resize()
        if self._shown_server is not None:
            self.show_server(self._shown_server)

    def show_server(self, server: ServerView) -> None:
        """Show this server's log; reopens the file only if it changed."""
        self._shown_server = server
        if not self.outer_size.width or not self.display:
            return
        full = clickable("screen.open_log", KEY), clickable("screen.open_log", DIM)
        keys: tuple[Part, ...] = ((key_of("open_log"), full[0]), (" full screen, search", full[1]))
        if server.removed or not server.log_path:
            keys = ()
        elif server.moment is not None:
            keys = (("up to the moment shown", DIM),)
        self.show_title("Log", keys, key=key_of("pane_5"), action="screen.pane(5)")
        if server.log_path != self._path or (not server.log_path and server.removed != self._removed):
            self._path, self._removed = server.log_path, server.removed
            self._open(server.log_path)
        elif self._path and self._sized and server.moment != self._moment:
            self._go_to(server.moment)
        elif self._path:
            self._view.show_read()

    @property
    def reader(self) -> Callable[[], None] | None:
        """Reads the log's new lines; call it in a thread before `show_server`. None if no log is visible."""
        return self._view.reader if self._path and self._sized else None

    def _go_to(self, moment: float | None) -> None:
        """Show the log up to a moment (Unix seconds), or follow it again."""
        self._moment = moment
        if moment is None:
            self._view.follow()
        else:
            self._view.show_moment(moment)

    def _open(self, path: str) -> None:
        if not path:
            self._none.show([line((f" {_no_log(self._shown_server)}", DIM))])
        set_display(self._none, not path)
        set_display(self._view, bool(path))
        if path and self._sized:
            self._begin()
        elif path:
            self.call_after_refresh(self._begin)  # a moment is shown at the bottom, so the height must be known

    def _begin(self) -> None:
        """Show the log of the current server, up to its moment if any."""
        if self._shown_server is None or not self._path:
            return
        self._sized, self._moment = True, None
        self._view.open(self._path)
        if self._shown_server.moment is not None:
            self._go_to(self._shown_server.moment)


def _no_log(server: ServerView | None) -> str:
    if server is not None and server.removed:
        return "no log: it was deleted with its server"
    if server is not None and server.remote:
        return f"its log is on its machine: vllm-console logs {plain(server.name)}"
    if server is not None and server.attached is not None:
        return "no log: it is on the endpoint's machine"
    if server is not None and server.lost:
        return "no log: it was deleted with the server's folder"
    return "no log: started outside this console"

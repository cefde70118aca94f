"""Pane 5: the end of the selected server's log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.geometry import Region
from textual.strip import Strip

from vllm_console.fleet.snapshot import ServerView
from vllm_console.text import plain
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import LineView, clickable, clickable_line, line
from vllm_console.ui.theme import ACCENT, DIM, KEY
from vllm_console.ui.widgets.draw import Part, TextFrame, rule
from vllm_console.ui.widgets.placed_area import PlacedArea

if TYPE_CHECKING:
    from vllm_console.ui.widgets.log_view import LogView


class LogPane(PlacedArea):
    """A title and the log's tail, which follows by itself."""

    DEFAULT_CSS = """
    LogPane { width: 1fr; }
    LogPane > LineView { height: 1fr; }
    """

    framed = False
    """Whether it has a frame, from the next `show_server` on."""
    focused_frame = False
    """Whether its frame is drawn in the accent color."""

    def __init__(self, *, id: str) -> None:
        self._path: str | None = None
        self._removed = False
        self._moment: float | None = None
        self._shown_server: ServerView | None = None
        self._title = LineView(id="log-title")
        self._none = LineView(id="log-none")
        self._edges = LineView(id="log-left"), LineView(id="log-right"), LineView(id="log-bottom")
        self._frame = TextFrame()
        self._drawn: object = None
        """What the title and the edges were drawn for."""
        self._view: LogView | None = None
        self._sized = False
        """Whether the view has its height, and has got what it shows."""
        super().__init__(self._title, self._none, *self._edges, id=id)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self._place()
        if self._shown_server is not None:
            self.show_server(self._shown_server)

    def _place(self) -> None:
        """The title, below it the log or why there is none; the edges of the frame, if there is one."""
        width, height = self.size
        side, end = int(self.framed), height - 1 - int(self.framed)
        body = "log-view" if self._path else "log-none"
        regions = {"log-title": Region(0, 0, width, 1), body: Region(side, 1, width - 2 * side, max(0, end))}
        if self.framed:
            regions["log-left"] = Region(0, 1, 1, end)
            regions["log-right"] = Region(width - 1, 1, 1, end)
            regions["log-bottom"] = Region(0, height - 1, width, 1)
        self.place(regions)

    def show_server(self, server: ServerView) -> None:
        """Show this server's log; opens a file only when it is another one."""
        self._shown_server = server
        width = self.size.width
        if not width or not self.display:
            return
        full = clickable("screen.open_log", KEY), clickable("screen.open_log", DIM)
        keys: tuple[Part, ...] = ((key_of("open_log"), full[0]), (" full screen, search", full[1]))
        if server.removed or not server.log_path:
            keys = ()
        elif server.moment is not None:
            keys = (("up to the moment shown", DIM),)
        self._draw_frame(rule("Log", width - 2 * self.framed, keys, key=key_of("pane_5")))
        if server.log_path != self._path or (not server.log_path and server.removed != self._removed):
            self._path, self._removed = server.log_path, server.removed
            self._open(server.log_path)
        elif self._view is not None and self._sized and server.moment != self._moment:
            self._go_to(self._view, server.moment)
        elif self._view is not None:
            self._view.show_read()

    @property
    def reader(self) -> Callable[[], None] | None:
        """Reads the log's new lines, to be called in a thread before `show_server`; None where no log is in sight."""
        return self._view.reader if self._view is not None and self._sized else None

    def _draw_frame(self, title: Strip) -> None:
        """The title, and where it is framed the edges."""
        drawn = (title.text, self.size, self.framed, self.focused_frame)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        width, height = self.size
        style = ACCENT if self.focused_frame else DIM
        lines = self._frame.around([title], width, height, style) if self.framed else [title]
        self._title.show([clickable_line(lines[0], "screen.pane(5)")])
        if self.framed:
            left, right, bottom = self._edges
            left.show([strip.crop(0, 1) for strip in lines[1:-1]])
            right.show([strip.crop(width - 1) for strip in lines[1:-1]])
            bottom.show(lines[-1:])

    def _go_to(self, view: LogView, moment: float | None) -> None:
        """Show the log up to a moment (Unix seconds), or follow it again."""
        self._moment = moment
        if moment is None:
            view.follow()
        else:
            view.show_moment(moment)

    def _open(self, path: str) -> None:
        self._place()
        self._none.show([line((f" {_no_log(self._shown_server)}", DIM))])
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


def _no_log(server: ServerView | None) -> str:
    """Why there is no log, and where it is."""
    if server is not None and server.removed:
        return "no log: it was deleted with its server"
    if server is not None and server.remote:
        return f"its log is there: vllm-console logs {plain(server.name)}"
    if server is not None and server.attached is not None:
        return "no log: it is where the endpoint runs"
    return "no log: started outside this console"

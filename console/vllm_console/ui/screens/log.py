"""The log screen: one server's log in full screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input

from vllm_console.logs.times import HINT, check_moment
from vllm_console.text import plain
from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import key_of
from vllm_console.ui.panes.bars import footer
from vllm_console.ui.terminal.clipboard import copy
from vllm_console.ui.terminal.lines import LineView, line
from vllm_console.ui.terminal.screens import TerminalScreen
from vllm_console.ui.theme import ACCENT, DIM, WARN
from vllm_console.ui.widgets.draw import Part, keys_line
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.frame_box import FrameBox
from vllm_console.ui.widgets.log_view import ACCESS_NAMES, FILTER_NAMES, LogView
from vllm_launchers.units import counted

PLACEHOLDERS = {
    "search": "search text; case-sensitive if it contains capitals",
    "only": "show only lines with this text; case-sensitive if it contains capitals",
    "time": HINT,
}


def _of_view(method: Callable[..., None]) -> Callable[..., None]:
    """An action of the screen that calls a method of its log view."""
    return lambda screen, *args: method(screen._view, *args)


class LogScreen(TerminalScreen[None]):
    """Shows all of a server's log, with search. ``path`` may not exist yet.

    It follows the end, or first shows the log up to ``at`` (Unix seconds).
    """

    CSS_PATH = "log.tcss"
    AUTO_FOCUS = ""
    SCOPE = "log"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("log")]

    def __init__(self, server_name: str, path: Path | str, *, simulated: bool = False, at: float | None = None) -> None:
        super().__init__()
        self._at = at
        self._server_name, self._path, self._simulated = plain(server_name), path, simulated
        self._view, self._entry = LogView(id="log-lines", compact=False), Entry(id="log-search")
        self._wrong = ""
        """Why the typed time was not accepted."""

    def compose(self) -> ComposeResult:
        """Yield the log, message, input and keys."""
        yield FrameBox(self._view, id="log-box")
        yield LineView(id="log-note", classes="bar")
        yield self._entry
        yield LineView(id="log-keys", classes="bar")

    def on_mount(self) -> None:
        """Open the log."""
        self._view.open(self._path)
        if self._at is not None:
            self.call_after_refresh(self._view.show_moment, self._at)  # needs the final height
        self._draw_bars()

    def on_resize(self, _event: events.Resize) -> None:
        """Draw the bars for the new width."""
        self._draw_bars()

    @on(LogView.Moved)
    def _on_moved(self, event: LogView.Moved) -> None:
        event.stop()
        self._draw_bars()

    def _draw_bars(self) -> None:
        width, view = self.app.size.width, self._view
        page = view.page
        mark = " sim" if self._simulated else ""
        state = (view.status, ACCENT if page.following else WARN)
        extras = ["only matches"] if page.only_matches else []
        extras += [f"{FILTER_NAMES[page.filter]} only"] if page.filter is not None else []
        extras += [ACCESS_NAMES[page.access]] if ACCESS_NAMES[page.access] else []
        extras += ["wrapped"] if view.wrap else []
        right: list[Part] = [(f"{view.matches} · ", ACCENT)] if view.matches else []
        right += [*((f"{text} · ", DIM) for text in extras), state]
        self.query_one("#log-box", FrameBox).show_title(f"Log · {self._server_name}{mark}", right)
        note = page.note or (f"search: {plain(page.wanted)}" if page.wanted else plain(str(self._path)))
        note, warns = (self._wrong, True) if self._wrong else (note, bool(page.note))
        self.query_one("#log-note", LineView).show([line((f" {note}", WARN if warns else DIM))])
        keys, purpose = footer("log", width), self._entry.purpose
        if purpose is not None:
            back = key_of("log_back"), "cancel", "screen.log_back"
            keys = keys_line(self._entry.keys(back, "go" if purpose == "time" else "search"), width)
        self.query_one("#log-keys", LineView).show([keys])

    # -- search ----------------------------------------------------------------------------------------------------

    def action_log_search(self) -> None:
        """Open the search."""
        self._ask("search")

    def action_log_matching(self) -> None:
        """Toggle between matching lines and all lines; without a search, ask for one."""
        if self._view.page.wanted:
            self._view.toggle_only_matches()
        else:
            self._ask("only")

    def action_log_time(self) -> None:
        """Ask for a time to go to."""
        self._ask("time")

    def _ask(self, purpose: str) -> None:
        text = "" if purpose == "time" else self._view.page.wanted
        self._entry.open(purpose, text, placeholder=PLACEHOLDERS[purpose])
        self._draw_bars()

    @on(Entry.Stepped)
    def _on_stepped(self, event: Entry.Stepped) -> None:
        event.stop()
        self._view.scroll_rows(event.step)

    @on(Input.Submitted, "#log-search")
    def _on_search(self, event: Input.Submitted) -> None:
        event.stop()
        purpose = self._entry.purpose
        if purpose == "time" and event.value.strip():
            try:
                check_moment(event.value)
            except ValueError as error:
                self._wrong = str(error)  # the text stays, to be corrected
                self._draw_bars()
                return
        self._close_entry()
        if purpose == "search":
            self._view.find(event.value)
        elif purpose == "only":
            self._view.find_only(event.value)
        elif event.value.strip():
            self._view.go_to(event.value)

    @on(Input.Changed, "#log-search")
    def _on_typed(self, event: Input.Changed) -> None:
        event.stop()
        if self._wrong:
            self._wrong = ""
            self._draw_bars()

    def _close_entry(self) -> None:
        self._wrong = ""
        self._entry.shut()
        self._draw_bars()

    def action_log_back(self) -> None:
        """Close the input, or else end the search, or else go back."""
        if self._entry.purpose is not None:
            self._close_entry()
        elif self._view.page.wanted:
            self._view.find("")
        else:
            self.close_with()

    def action_edge(self, to: int) -> None:
        """Go to the oldest line (-1), or to the end and follow."""
        if to < 0:
            self._view.go_home()
        else:
            self._view.follow()

    def action_next_match(self, step: int) -> None:
        """Go to the next match below, or above for -1."""
        self._view.find_next(backwards=step < 0)

    # -- what the view does ----------------------------------------------------------------------------------------

    action_log_end = _of_view(LogView.follow)
    action_log_hold = _of_view(LogView.toggle_hold)
    action_move = _of_view(LogView.scroll_rows)
    action_page = _of_view(LogView.scroll_pages)
    action_sideways = _of_view(LogView.scroll_sideways)
    action_select = _of_view(LogView.select)
    action_log_filter = _of_view(LogView.cycle_filter)
    action_log_access = _of_view(LogView.cycle_access)
    action_log_wrap = _of_view(LogView.toggle_wrap)

    def action_log_copy(self) -> None:
        """Copy the selected line, or all visible lines."""
        text = self._view.copied_text
        if not text:
            return
        what = counted(text.count("\n") + 1, "line")
        copy(self.app, text, what, lambda message: self.notify(message, markup=False, timeout=4))

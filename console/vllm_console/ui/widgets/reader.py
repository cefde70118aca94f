"""Scrollable text with a title and a line of keys: help, a description, findings, a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Offset, Region
from textual.strip import Strip

from vllm_console.ui.actions import bindings
from vllm_console.ui.keymap import key_of
from vllm_console.ui.terminal.lines import LineView
from vllm_console.ui.terminal.screens import TerminalScreen
from vllm_console.ui.widgets.draw import KeyHint, keys_line
from vllm_console.ui.widgets.entry import Entry
from vllm_console.ui.widgets.frame_box import FrameBox


class TextReader(Vertical, can_focus=True):
    """Fills a screen with lines. Each `redraw` calls ``title``, ``content`` (with a width in cells) and ``keys``.

    It has the focus: its keys scroll, and escape or ``q`` closes the screen. ``entry`` is an input line above the keys.
    ``step_back`` does what comes before closing, such as ending a search, and returns whether there was anything to do.
    """

    DEFAULT_CSS = """
    TextReader { background: ansi_default; }
    TextReader #foot { height: 1; }
    TextReader #content { height: auto; }
    TextReader VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("reader")]

    def __init__(
        self,
        title: Callable[[], str],
        content: Callable[[int], Sequence[Strip]],
        keys: Callable[[], Sequence[KeyHint]] = lambda: (scroll_hint(),),
        *,
        entry: Entry | None = None,
        step_back: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._text, self._lines, self._keys = title, content, keys
        self._entry, self._step_back = entry, step_back
        self._content, self._foot = LineView(id="content"), LineView(id="foot")
        self._scroll = VerticalScroll(self._content, can_focus=False)
        self._box = FrameBox(self._scroll)

    def compose(self) -> ComposeResult:
        """Title, lines, input, keys."""
        yield self._box
        if self._entry is not None:
            yield self._entry
        yield self._foot

    def on_mount(self) -> None:
        """Show everything and take the focus."""
        self.focus()
        self.redraw()

    def on_resize(self) -> None:
        """Redraw for the new width."""
        if self.is_mounted:
            self.redraw()

    @property
    def width(self) -> int:
        """Maximum cells of a line."""
        return self._box.inner_width - 2

    def redraw(self) -> None:
        """Draw title, lines and keys."""
        self._box.show_title(self._text())
        self._content.show(self._lines(self.width))
        back = (key_of("reader_back"), "back", "focused.back")
        self._foot.show([keys_line((back, *self._keys()), self.app.size.width)])

    def place_of(self, event: events.Click) -> Offset | None:
        """The clicked cell of the content; None if something else was clicked."""
        inside = self._scroll.region.contains(event.screen_x, event.screen_y)
        return Offset(event.screen_x, event.screen_y) - self._content.region.offset if inside else None

    def scroll_to_rows(self, first: int, end: int) -> None:
        """Scroll these rows (first, one past last) into view."""
        self._scroll.scroll_to_region(Region(0, first, 1, end - first), animate=False)

    def action_back(self) -> None:
        """End what is in progress, such as a search; otherwise close the screen."""
        if not self._step_back() and isinstance(self.screen, TerminalScreen):
            self.screen.close_with()

    def action_move(self, by: int) -> None:
        """Scroll by lines."""
        self._scroll.scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        """Scroll by pages."""
        self._scroll.scroll_relative(y=by * max(1, self._scroll.size.height - 1), animate=False)

    def action_edge(self, to: int) -> None:
        """Scroll to the top or the end."""
        if to < 0:
            self._scroll.scroll_home(animate=False)
        else:
            self._scroll.scroll_end(animate=False)


class ReaderScreen(TerminalScreen[None]):
    """A screen that shows only text."""

    def __init__(self, reader: TextReader) -> None:
        super().__init__()
        self._reader = reader

    def compose(self) -> ComposeResult:
        """The text."""
        yield self._reader

    def redraw(self) -> None:
        """Draw the current text, unless the screen is closed."""
        if self.is_mounted:
            self._reader.redraw()


def scroll_hint() -> KeyHint:
    """The keys that scroll."""
    return f"{key_of('move_down')} {key_of('move_up')}", "scroll"

"""A screen of lines to read and scroll: help and a server's description are made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.strip import Strip

from vllm_console.ui.widgets.draw import keys_line, rule
from vllm_console.ui.widgets.lines import LineView


class ReadingScreen(Screen[None]):
    """Lines under a title. Subclasses say which in `content`; escape or ``q`` goes back."""

    DEFAULT_CSS = """
    ReadingScreen { background: ansi_default; }
    ReadingScreen #title, ReadingScreen #foot { height: 1; }
    ReadingScreen #content { height: auto; }
    ReadingScreen VerticalScroll { height: 1fr; scrollbar-size-vertical: 1; background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "back", "Back", show=False),
        Binding("j,down", "scroll(1)", "Down", show=False),
        Binding("k,up", "scroll(-1)", "Up", show=False),
        Binding("pagedown,space", "page(1)", "A page down", show=False),
        Binding("pageup", "page(-1)", "A page up", show=False),
        Binding("home", "edge(-1)", "To the top", show=False),
        Binding("end", "edge(1)", "To the end", show=False),
    ]
    KEYS: tuple[tuple[str, str], ...] = (("esc", "back"), ("j k", "scroll"))

    def title_text(self) -> str:
        """What stands in the first line."""
        raise NotImplementedError

    def content(self, width: int) -> Sequence[Strip]:
        """The lines, none wider than ``width`` cells."""
        raise NotImplementedError

    def compose(self) -> ComposeResult:
        """Title, lines, keys."""
        yield LineView(id="title")
        with VerticalScroll():
            yield LineView(id="content")
        yield LineView(id="foot")

    def on_mount(self) -> None:
        """Show everything, and let the keys scroll."""
        self.query_one(VerticalScroll).focus()
        self.draw(self.app.size.width)

    def on_resize(self, event: events.Resize) -> None:
        """Draw for the new width."""
        if self.is_mounted:
            self.draw(event.size.width)

    def draw(self, width: int) -> None:
        """Draw title, lines and keys."""
        self.query_one("#title", LineView).show([rule(self.title_text(), width)])
        self.query_one("#content", LineView).show(self.content(width - 2))
        self.query_one("#foot", LineView).show([keys_line(self.KEYS, width)])

    def action_back(self) -> None:
        """Close."""
        self.dismiss(None)

    def action_scroll(self, by: int) -> None:
        """Scroll by lines."""
        self.query_one(VerticalScroll).scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        """A page up or down."""
        scroll = self.query_one(VerticalScroll)
        scroll.scroll_relative(y=by * max(1, scroll.size.height - 1), animate=False)

    def action_edge(self, to: int) -> None:
        """To the top or to the end."""
        scroll = self.query_one(VerticalScroll)
        if to < 0:
            scroll.scroll_home(animate=False)
        else:
            scroll.scroll_end(animate=False)

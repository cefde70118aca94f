"""A container with a title: a frame around its widgets if the screen has room for one, else a line above them."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.geometry import Spacing
from textual.widget import Widget

from vllm_console.ui.terminal.lines import clickable_line
from vllm_console.ui.widgets.draw import Part, rule
from vllm_console.ui.widgets.framed import FramedView, frames_fit

_FRAMED, _PLAIN = Spacing(1, 1, 1, 1), Spacing(1, 0, 0, 0)
"""The cells that the title and the frame take around the widgets."""


class FrameBox(FramedView):
    """Stacks widgets vertically. The frame and the title around them are this view's own lines."""

    DEFAULT_CSS = """
    FrameBox { height: 1fr; width: 1fr; background: ansi_default; }
    FrameBox > Vertical { height: 1fr; background: ansi_default; }
    """

    def __init__(self, *widgets: Widget, id: str | None = None) -> None:
        super().__init__(id=id)
        self.inner = Vertical(*widgets)
        self._shown: tuple[str, tuple[Part, ...], str, str] = ("", (), "", "")
        self._drawn: object = None
        """The inputs that the title and the frame were drawn for."""

    def compose(self) -> ComposeResult:
        """The widgets inside the frame. Their margin is set before the first layout, to avoid a second one."""
        self._leave_room()
        yield self.inner

    def on_mount(self) -> None:
        """Draw for the size of the screen."""
        self._draw()

    def on_resize(self) -> None:
        """Redraw for the new size."""
        self._draw()

    @property
    def inner_width(self) -> int:
        """The width in cells available to a line of the widgets. The box is as wide as the screen."""
        width = self.app.size.width
        return width - 2 if frames_fit(self.app.size) else width

    def show_title(self, title: str, right: Sequence[Part] = (), *, key: str = "", action: str = "") -> None:
        """Show this title after its ``key``, with ``right`` at the right; a click on it runs ``action``."""
        self._shown = (title, tuple(right), key, action)
        self._draw()

    def _leave_room(self) -> None:
        self.framed = frames_fit(self.app.size)
        self.inner.styles.margin = _FRAMED if self.framed else _PLAIN

    def _draw(self) -> None:
        self._leave_room()
        wanted = (self._shown, self.outer_size, self.framed, self.focused_frame)
        if not self.is_mounted or wanted == self._drawn:
            return
        self._drawn = wanted
        title, right, key, action = self._shown
        line = rule(title, self.room.width, right, key=key)
        self.show_lines([clickable_line(line, action) if action else line])

"""A view with a title, in a frame if the screen has room for one."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Size
from textual.strip import Strip

from vllm_console.ui.terminal.lines import LineView
from vllm_console.ui.theme import ACCENT, DIM
from vllm_console.ui.widgets.draw import TextFrame

LEAST_WIDTH, LEAST_HEIGHT = 120, 32
"""Minimum size of the screen for frames. On a smaller one only the title lines separate the views."""


def frames_fit(screen: Size) -> bool:
    """Whether a screen of this size has room for frames."""
    return screen.width >= LEAST_WIDTH and screen.height >= LEAST_HEIGHT


class FramedView(LineView):
    """Shows lines, the title first. ``framed`` puts them in a frame; ``focused_frame`` draws it in the accent color.

    Both take effect at the next `show_lines`.
    """

    framed = False
    focused_frame = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._frame = TextFrame()

    @property
    def room(self) -> Size:
        """The cells available to the title and the lines below it."""
        width, height = self.outer_size  # `size` would compute borders, which this view does not have
        return Size(max(0, width - 2), max(0, height - 1)) if self.framed else self.outer_size

    def show_lines(self, lines: Sequence[Strip]) -> None:
        """Show the title and the lines below it, in the frame if there is one."""
        style = ACCENT if self.focused_frame else DIM
        self.show(self._frame.around(lines, *self.outer_size, style) if self.framed else lines)

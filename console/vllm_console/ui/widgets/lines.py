"""A widget made of lines that repaints only what changed: what keeps a console cheap over SSH."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

BLANK = Strip([])


def changed_span(before: Strip, after: Strip) -> tuple[int, int] | None:
    """The first and one-past-last cell in which two strips differ, or None when they look the same."""
    old, new = list(before), list(after)
    if old == new:
        return None
    start = 0
    index = 0
    for left, right in zip(old, new, strict=False):
        if left != right:
            break
        start += left.cell_length
        index += 1
    end = max(before.cell_length, after.cell_length)
    if before.cell_length == after.cell_length:
        for left, right in zip(reversed(old[index:]), reversed(new[index:]), strict=False):
            if left != right:
                break
            end -= left.cell_length
    return start, max(end, start)


class LineView(Widget):
    """Draws a list of strips. `show` compares with what stands on the screen and repaints the difference only."""

    DEFAULT_CSS = "LineView { height: auto; width: 1fr; }"

    def __init__(self, *, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self._lines: list[Strip] = []

    @property
    def lines(self) -> Sequence[Strip]:
        """What is shown now."""
        return self._lines

    def show(self, lines: Sequence[Strip]) -> None:
        """Show these lines, from the top; what they don't fill stays blank."""
        before, self._lines = self._lines, list(lines)
        if not self.is_mounted or not self.size.width:
            return
        regions = []
        for y in range(min(max(len(before), len(self._lines)), self.size.height)):
            old = before[y] if y < len(before) else BLANK
            new = self._lines[y] if y < len(self._lines) else BLANK
            span = changed_span(old, new)
            if span is not None and span[1] > span[0]:
                regions.append(Region(span[0], y, span[1] - span[0], 1))
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        """The strip for one row of the widget, padded to its width."""
        style = self.rich_style
        if y >= len(self._lines):
            return Strip.blank(self.size.width, style)
        return self._lines[y].apply_style(style).adjust_cell_length(self.size.width, style)


def strip_of(*segments: Segment) -> Strip:
    """A strip from segments, its length worked out."""
    return Strip(segments)

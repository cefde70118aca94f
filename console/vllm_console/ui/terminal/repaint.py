"""Renders and sends exactly the changed cells. Textual 8.2 renders every visible widget for it, and repaints each
changed widget's line from its left edge on.

This leans on Textual's compositor, which is no public API: the version is pinned, and a test counts the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.segment import Segment
from textual._compositor import Compositor, CompositorUpdate
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

Piece = tuple[int, int, Strip]
"""Column, row and what is to stand from there on."""


class PartialUpdate(CompositorUpdate):
    """An update of pieces of lines, each of which begins where a change begins."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> Iterator[Segment]:
        """The same for a Rich console."""
        for x, y, strip in self.pieces:
            yield Control.move_to(x, y).segment
            yield from strip

    def render_segments(self, console: Console) -> str:
        """The bytes for the terminal: a jump to each piece and its text."""
        return "".join(f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self.pieces)


class PartialCompositor(Compositor):
    """A compositor whose partial updates are `PartialUpdate`."""

    def render_partial_update(self) -> PartialUpdate | None:  # type: ignore[override]
        """Render the regions that were marked as changed, and nothing else."""
        screen = self.size.region
        regions = [region.intersection(screen) for region in self._dirty_regions]
        self._dirty_regions.clear()
        rendered: dict[Widget, list[Strip]] = {}
        pieces = [piece for span in self._regions_to_spans(regions) for piece in self._pieces(*span, rendered)]
        return PartialUpdate(pieces) if pieces else None

    def _pieces(self, y: int, left: int, right: int, rendered: dict[Widget, list[Strip]]) -> Iterator[Piece]:
        """What stands in a row from ``left`` to ``right``, of each widget in sight there, the foremost first.

        ``rendered`` keeps each widget's lines over the rows of one update.
        """
        uncovered = [(left, right)]
        for widget, (region, clip) in self.visible_widgets.items():
            if not (region.y <= y < region.bottom and clip.y <= y < clip.bottom):
                continue
            first, last = max(region.x, clip.x), min(region.right, clip.right)
            rest = []
            for start, end in uncovered:
                begin, stop = max(start, first), min(end, last)
                if begin >= stop:
                    rest.append((start, end))
                    continue
                seen = region.intersection(clip)
                if widget not in rendered:
                    rendered[widget] = widget.render_lines(seen.translate(-region.offset))
                strip = rendered[widget][y - seen.y]
                whole = (begin, stop) == seen.column_span
                yield begin, y, strip if whole else strip.crop(begin - seen.x, stop - seen.x)
                rest += [(a, b) for a, b in ((start, begin), (stop, end)) if a < b]
            if not rest:
                return
            uncovered = rest


class PartialRepaintScreen(Screen[None]):
    """A screen that sends only changed cells while nothing covers it."""

    def __init__(self, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self._compositor = PartialCompositor()


__all__ = ["PartialRepaintScreen", "PartialUpdate"]

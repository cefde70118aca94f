"""Render and send only the cells that changed.

Textual 8.2 renders every visible widget for each update, and repaints a changed line of a widget from its left edge.
This relies on Textual's compositor, which is not a public API: the version is pinned, and a test counts the bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions
from rich.control import Control
from rich.segment import Segment
from textual import events
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets._toast import ToastRack

from vllm_console.ui.terminal.lines import LineView
from vllm_console.ui.terminal.screens import TerminalScreen

Piece = tuple[int, int, Sequence[Segment]]
"""Column, row, and the text to write there."""

Layer = tuple[int, int, Widget, Region, Region]
"""A widget's first column in a row and the one past its last, the widget, its region, and the visible part of that."""


class PartialUpdate(CompositorUpdate):
    """An update of parts of lines, each starting where a change starts."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> Iterator[Segment]:
        """The same for a Rich console."""
        for x, y, segments in self.pieces:
            yield Control.move_to(x, y).segment
            yield from segments

    def render_segments(self, console: Console) -> str:
        """The output for the terminal: for each piece, a cursor move and its text."""
        colors = console._color_system or ColorSystem.TRUECOLOR
        parts: list[str] = []
        for x, y, segments in self.pieces:
            parts.append(f"\x1b[{y + 1};{x + 1}H")
            parts += [
                text if style is None else Strip.render_style(style, text, color_system=colors)
                for text, style, _ in segments
            ]
        return "".join(parts)


class PartialCompositor(Compositor):
    """A compositor whose partial updates are `PartialUpdate`."""

    def __init__(self) -> None:
        super().__init__()
        self._rows_of: Mapping[Widget, tuple[Region, Region]] | None = None
        self._rows: Sequence[Sequence[Layer]] = ()
        """The visible widgets of each row, topmost first, for the arrangement in `_rows_of`."""

    def render_partial_update(self) -> PartialUpdate | None:  # type: ignore[override]
        """Render only the regions marked as changed."""
        screen = self.size.region
        regions = [region.intersection(screen) for region in self._dirty_regions]
        self._dirty_regions.clear()
        layers = self._layers_by_row()
        rendered: dict[Widget, list[Strip]] = {}
        pieces = [
            piece
            for y, left, right in self._regions_to_spans(regions)
            for piece in _pieces(y, left, right, layers[y], rendered)
        ]
        return PartialUpdate(pieces) if pieces else None

    def _layers_by_row(self) -> Sequence[Sequence[Layer]]:
        """The visible widgets of each row, computed once per arrangement."""
        visible = self.visible_widgets
        if visible is not self._rows_of:
            rows: list[list[Layer]] = [[] for _ in range(self.size.height)]
            for widget, (region, clip) in visible.items():
                seen = region.intersection(clip)
                for y in range(max(0, seen.y), min(self.size.height, seen.bottom)):
                    rows[y].append((*seen.column_span, widget, region, seen))
            self._rows_of, self._rows = visible, rows
        return self._rows


def _pieces(
    y: int, left: int, right: int, layers: Iterable[Layer], rendered: dict[Widget, list[Strip]]
) -> Iterator[Piece]:
    """The content of a row from ``left`` to ``right``, from each visible widget there, topmost first.

    ``rendered`` caches the lines of widgets that are not a `LineView`, across the rows of one update.
    """
    uncovered = [(left, right)]
    for first, last, widget, region, seen in layers:
        rest = []
        for start, end in uncovered:
            begin, stop = max(start, first), min(end, last)
            if begin >= stop:
                rest.append((start, end))
                continue
            if isinstance(widget, LineView):
                yield begin, y, widget.segments_between(y - region.y, begin - region.x, stop - region.x)
            else:
                if widget not in rendered:
                    rendered[widget] = widget.render_lines(seen.translate(-region.offset))
                strip = rendered[widget][y - seen.y]
                yield begin, y, list(strip.crop(begin - seen.x, stop - seen.x))
            rest += [(a, b) for a, b in ((start, begin), (stop, end)) if a < b]
        if not rest:
            return
        uncovered = rest


class PartialRepaintScreen(TerminalScreen[None]):
    """A screen that sends only changed cells while nothing covers it."""

    def __init__(self, name: str | None = None, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(name=name, id=id, classes=classes)
        self._compositor = PartialCompositor()
        self._taken: set[Widget] = set()

    def on_mount(self) -> None:
        """Hide the empty toast rack before the first layout; later, hiding it would cost another layout."""
        for rack in self.query_children(ToastRack):
            rack.display = False

    def _on_screen_resume(self, event: events.ScreenResume) -> None:
        """Skip duplicate work: Textual lays out and paints the screen for a new size, then requests the same again.

        It also reapplies all styles, although mounting the widgets of a new screen just applied them.
        """
        event.refresh_styles = event.refresh_styles and self.stack_updates > 0
        painted = self._size != self.app.size and self.is_current and not self.app._batch_count
        super()._on_screen_resume(event)
        event.prevent_default()
        if painted:
            self._repaint_required = False

    @contextlib.contextmanager
    def painted_together(self) -> Iterator[None]:
        """Collect changes to line views and paint them together at the end, immediately.

        Textual would send a message to each view, wait until all of them are idle, and then send one to the screen.
        """
        if LineView.painter is not None or self.app._batch_count or not self.is_active:
            yield
            return
        LineView.painter = self._take
        try:
            yield
        finally:
            LineView.painter = None
            taken, self._taken = self._taken, set()
            if taken:
                self._paint(taken)

    def _take(self, view: LineView, regions: Sequence[Region]) -> bool:
        """Mark regions of a view for painting. False if it is not visible or will be fully painted anyway."""
        place = self._compositor.visible_widgets.get(view)
        if place is None or view._repaint_required:
            return False
        region, clip = place
        offset = region.offset
        for one in regions:
            if seen := clip.intersection(one.translate(offset)):
                self._compositor._dirty_regions.add(seen)
        self._taken.add(view)
        return True

    def _paint(self, views: set[Widget]) -> None:
        """Paint the collected regions; if a layout is pending, lay out first."""
        self._dirty_widgets |= views
        if self._awaits_layout:
            self.check_idle()
            return
        self._compositor.update_widgets(self._dirty_widgets)
        self._compositor_refresh()

    @property
    def _awaits_layout(self) -> bool:
        """Whether a layout is pending or possible: it may be requested by a message that is still queued."""
        if self._layout_required or self._scroll_required or not self._message_queue.empty():
            return True
        return any(widget._layout_required for widget in self._compositor.visible_widgets)

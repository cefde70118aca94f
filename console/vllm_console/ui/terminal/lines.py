"""A widget made of lines that repaints only what changed, which keeps a console cheap over SSH."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import is_
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from vllm_console.text import WITHOUT_MARKS, plain

BLANK = Strip([])

JOIN_GAP = 6
"""Maximum unchanged cells between two changes that are cheaper to repaint than to skip (a cursor move takes about 8
bytes)."""

UNDER_MOUSE = Style(underline=True)
SELECTED = Style(reverse=True)

_ACTION = "press"
"""Style metadata key for the action of its cells."""

Cell = tuple[str, Style | None]


@lru_cache(maxsize=512)
def clickable(action: str, style: Style | None = None) -> Style:
    """A style for cells that run ``action`` (as in a binding, e.g. ``screen.stop``) when clicked.

    The action must be the program's own text, never external input.
    """
    return (style or Style.null()) + Style(meta={_ACTION: action})


def clickable_line(strip: Strip, action: str) -> Strip:
    """A line that runs ``action`` wherever it is clicked, except for parts with an action of their own."""
    return strip.apply_style(clickable(action))


def action_of(style: Style | None) -> str:
    """The action that a click on cells of this style runs; empty if none."""
    return str(style.meta.get(_ACTION, "")) if style is not None else ""


def wheel_step(event: events.MouseEvent) -> int:
    """-1 for a wheel turn up or left, else 1."""
    return -1 if isinstance(event, events.MouseScrollUp | events.MouseScrollLeft) else 1


def actions_of(strips: Sequence[Strip]) -> frozenset[str]:
    """The actions that clicks on these lines run."""
    return frozenset(action_of(style) for strip in strips for _, style, _ in strip) - {""}


@lru_cache(maxsize=512)
def line(*parts: str | tuple[str, Style | None]) -> Strip:
    """A strip from plain and styled pieces of text, without empty ones.

    This is the last gate before the screen: it removes terminal control sequences, whatever their origin. The same
    parts return the same (cached) object, so that nothing is computed or compared again.
    """
    segments: list[Segment] = []
    width = 0
    for part in parts:
        text, style = (part, None) if isinstance(part, str) else part
        if text := text if text.isprintable() else plain(text):
            segments.append(Segment(text, style))
            width += cells(text)
    return Strip(segments, width)


@lru_cache(maxsize=4096)
def cells(text: str) -> int:
    """The number of cells that a text takes."""
    return len(text) if text.isascii() else cell_len(text)


@lru_cache(maxsize=4096)
def _one_cell_each(text: str) -> bool:
    """Whether each character takes one cell. Equal counts are not enough, as wide characters and accents cancel out."""
    if text.isascii():
        return True
    if len(text) != cell_len(text):
        return False
    return WITHOUT_MARKS.fullmatch(text) is not None or all(cell_len(char) == 1 for char in text)


def cells_of(segments: Iterable[Segment]) -> list[Cell]:
    """The content of each cell. A wide character is in its first cell; the second one has an empty text."""
    found: list[Cell] = []
    for text, style, control in segments:
        if control:
            continue
        if _one_cell_each(text):
            found.extend(zip(text, repeat(style)))
            continue
        for char in text:
            width = cell_len(char)
            if width == 0 and found:
                place = next(place for place in range(len(found) - 1, -1, -1) if found[place][0])
                found[place] = (found[place][0] + char, found[place][1])
            else:
                found.append((char, style))
                found.extend([("", style)] * (width - 1))
    return found


def text_between(text: str, first: int, end: int) -> str:
    """The cells from ``first`` to before ``end`` of a text, accents included. A cut wide character is a space."""
    if _one_cell_each(text):
        return text[first:end]
    whole = [char for char, _ in cells_of([Segment(text)])]
    part = whole[first:end]
    if not part[0]:
        part[0] = " "
    if end < len(whole) and not whole[end]:
        part[-1] = " "
    return "".join(part)


def changed_spans(before: Strip, after: Strip) -> Iterator[tuple[int, int]]:
    """The spans of cells (first, one past last) in which two strips differ; nearby spans are joined."""
    if before is after:
        return
    was, now = before._segments, after._segments
    if (found := _changed_in_pairs(was, now)) is not None:
        yield from _joined(found)
        return
    same = _same_segments(was, now)
    if same == len(was) == len(now):
        return
    offset = sum(cells(text) for text, _, _ in now[:same])
    old, new = cells_of(was[same:]), cells_of(now[same:])
    length = max(len(old), len(new))
    blank: Cell = (" ", None)
    old.extend([blank] * (length - len(old)))
    new.extend([blank] * (length - len(new)))
    changed = [index for index, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1]]
    for start, end in _joined(changed):
        first, last = _whole(start, end, old, new)
        yield offset + first, offset + last


def _changed_in_pairs(before: Sequence[Segment], after: Sequence[Segment]) -> list[int] | None:
    """The cells in which two lines differ, if their segments have the same widths one by one; else None.

    Most lines are like this from one second to the next, with only a few changed segments.
    """
    if len(before) != len(after):
        return None
    changed: list[int] = []
    at = 0
    for old, new in zip(before, after, strict=True):
        (was, style_before, _), (text, style, _) = old, new
        width = cells(text)
        if old is not new and (was != text or (style_before is not style and style_before != style)):
            if len(was) != len(text) or not (_one_cell_each(was) and _one_cell_each(text)):
                return None
            if style_before is style or style_before == style:
                changed += [at + place for place, pair in enumerate(zip(was, text, strict=True)) if pair[0] != pair[1]]
            else:
                changed += range(at, at + width)
        at += width
    return changed


def _joined(changed: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The spans that cover these cells; nearby ones are joined."""
    start = end = -1
    for index in changed:
        if start < 0:
            start = index
        elif index - end > JOIN_GAP:
            yield start, end
            start = index
        end = index + 1
    if start >= 0:
        yield start, end


def _same_segments(before: Sequence[Segment], after: Sequence[Segment]) -> int:
    """How many leading segments two lines share. The rest does not begin inside a character."""
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += 1
    while same and any(side[same:] and not _begins_a_cell(side[same].text) for side in (before, after)):
        same -= 1
    return same


def _begins_a_cell(text: str) -> bool:
    return text[:1].isascii() or cell_len(text[:1]) > 0


def _whole(start: int, end: int, old: list[Cell], new: list[Cell]) -> tuple[int, int]:
    """The span, widened so that it does not cut a wide character of either line."""
    while start > 0 and (old[start][0] == "" or new[start][0] == ""):
        start -= 1
    while end < len(new) and (old[end][0] == "" or new[end][0] == ""):
        end += 1
    return start, end


class LineView(Widget):
    """Draws a list of strips. `show` compares them with those on the screen and repaints only the difference.

    Segments are drawn as they are, on the terminal's own background; CSS colors and borders of the widget are not used.
    """

    DEFAULT_CSS = "LineView { height: auto; width: 1fr; }"

    painter: ClassVar[Callable[[LineView, Sequence[Region]], bool] | None] = None
    """Paints these regions of a view and returns whether it does. If None, the view asks Textual for a refresh."""

    def __init__(self, *, id: str | None = None, classes: str | None = None, action: str = "") -> None:
        super().__init__(id=id, classes=classes)
        self._action = action
        """The action of a click on cells without an action of their own."""
        self._lines: list[Strip] = []
        self._painted: dict[int, Strip] = {}
        """Rows painted in full since they last changed, each `_painted_width` wide."""
        self._painted_width = -1
        self._hovered: tuple[int, str] | None = None
        """Row and action under the mouse."""
        self._selection: Selection | None = None

    @property
    def lines(self) -> Sequence[Strip]:
        """The lines shown now."""
        return self._lines

    def show(self, lines: Sequence[Strip]) -> None:
        """Show these lines from the top; the remaining rows stay blank."""
        before = self._lines
        self._lines = list(lines)
        if len(before) == len(self._lines) and all(map(is_, before, self._lines)):
            return
        if not self.is_mounted:
            return
        if self.styles.auto_dimensions and self._natural_size(before) != self._natural_size(self._lines):
            self._painted_width = -1
            self.refresh(layout=True)
            return
        width, height = self.outer_size
        if not width:
            self._painted.clear()
            return
        regions = []
        for y in range(max(len(before), len(self._lines))):
            old = before[y] if y < len(before) else BLANK
            new = self._lines[y] if y < len(self._lines) else BLANK
            if old is new:
                continue
            self._painted.pop(y, None)
            if y < height:
                regions += [Region(x, y, min(end, width) - x, 1) for x, end in changed_spans(old, new) if x < width]
        paint = LineView.painter
        if regions and (paint is None or not paint(self, regions)):
            self.refresh(*regions)

    def _natural_size(self, lines: Sequence[Strip]) -> tuple[int, int]:
        wide = self.styles.width is not None and self.styles.width.is_auto
        return max((strip.cell_length for strip in lines), default=1) if wide else 0, len(lines)

    def get_content_width(self, _container: Size, _viewport: Size) -> int:
        """The width of the longest line in cells, for a view whose width is ``auto``."""
        return max((strip.cell_length for strip in self._lines), default=1)

    def get_content_height(self, _container: Size, _viewport: Size, _width: int) -> int:
        """The number of lines, for a view whose height is ``auto``."""
        return max(1, len(self._lines))

    def _finished(self, y: int) -> Strip:
        """The full content of a row, with hover and selection styles and the theme's filters applied."""
        strip = self._lines[y] if y < len(self._lines) else BLANK
        if self._hovered is not None and self._hovered[0] == y:
            strip = _underlined(strip, self._hovered[1])
        filters = self.get_line_filters()
        if self._selection is None and not filters:
            return strip
        strip = strip.adjust_cell_length(self.outer_size.width)
        if (span := self._selected_span(y)) is not None:
            strip = _reversed(strip, *span)
        for line_filter in filters:
            strip = strip.apply_filter(line_filter, self.background_colors[1])
        return strip

    def segments_between(self, y: int, first: int, end: int) -> list[Segment]:
        """The cells from ``first`` to before ``end`` of a row; cells beyond the line are blank."""
        segments: list[Segment] = []
        at = 0
        for segment in self._finished(y):
            text, style, _ = segment
            width = cells(text)
            if at + width > first:
                begin, stop = max(first - at, 0), min(end - at, width)
                if (begin, stop) == (0, width):
                    segments.append(segment)
                else:
                    segments.append(Segment(text_between(text, begin, stop), style))
            at += width
            if at >= end:
                return segments
        return [*segments, Segment(" " * (end - max(at, first)))]

    def render_line(self, y: int) -> Strip:
        """One row of the widget, with the offsets that Textual uses for mouse selection."""
        return self._finished(y).adjust_cell_length(self.outer_size.width).apply_offsets(0, y)

    def render_lines(self, crop: Region) -> list[Strip]:
        """The finished strips of a region. Cached, since Textual requests all of them at each update."""
        width, height = self.outer_size  # `size` would compute borders, which this widget does not have
        if self._painted_width != width:
            self._painted_width = width
            self._painted.clear()
        left, right = crop.column_span
        strips = [self._painted_row(y, width) if y < height else Strip.blank(width) for y in crop.line_range]
        return strips if (left, right) == (0, width) else [strip.crop(left, right) for strip in strips]

    def _painted_row(self, y: int, width: int) -> Strip:
        if (painted := self._painted.get(y)) is None:
            painted = self._painted[y] = self._finished(y).adjust_cell_length(width)
        return painted

    # -- the mouse -------------------------------------------------------------------------------------------------

    def action_at(self, x: int, y: int) -> str:
        """The action of a cell; empty if none."""
        end = 0
        for text, style, _ in self._lines[y] if 0 <= y < len(self._lines) else ():
            end += cell_len(text)
            if x < end:
                return action_of(style)
        return ""

    async def on_click(self, event: events.Click) -> None:
        """Run the action of the clicked cell."""
        event.prevent_default()  # Textual would select the whole widget on a double click
        if action := self.action_at(event.x, event.y) or self._action:
            event.stop()
            if action.startswith("focused.") and self.app.focused is None:
                return  # a late click: its target is closing
            await self.run_action(action)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        """Underline the clickable text under the mouse."""
        action = self.action_at(event.x, event.y)
        self._hover((event.y, action) if action else None)

    def on_leave(self, event: events.Leave) -> None:
        """Remove the underline."""
        if event.node is self:
            self._hover(None)

    def _hover(self, place: tuple[int, str] | None) -> None:
        if place == self._hovered:
            return
        before, self._hovered = self._hovered, place
        width, height = self.outer_size
        for y in {one[0] for one in (before, place) if one is not None}:
            if y < height:
                self._painted.pop(y, None)
                self.refresh(Region(0, y, width, 1))

    def _selected_span(self, y: int) -> tuple[int, int] | None:
        """The cells of a row (first, one past last) that are selected with the mouse."""
        span = self._selection.get_span(y) if self._selection is not None else None
        if span is None:
            return None
        text = self._lines[y].text if y < len(self._lines) else ""
        first, end = span
        return cell_len(text[:first]), cell_len(text if end < 0 else text[:end])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """The text selected with the mouse, row by row."""
        rows = []
        for y, strip in enumerate(self._lines[: self.outer_size.height]):
            if (span := selection.get_span(y)) is not None:
                first, end = span
                rows.append((strip.text[first:] if end < 0 else strip.text[first:end]).rstrip())
        return "\n".join(rows), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Redraw for a new selection."""
        self._selection = selection
        self._painted_width = -1
        self.refresh()

    def notify_style_update(self) -> None:
        """Repaint, since the filters may have changed with the styles."""
        self._painted_width = -1
        super().notify_style_update()


def _underlined(strip: Strip, action: str) -> Strip:
    return Strip(
        [
            Segment(text, style + UNDER_MOUSE)
            if style is not None and action_of(style) == action
            else Segment(text, style)
            for text, style, _ in strip
        ]
    )


def _reversed(strip: Strip, first: int, end: int) -> Strip:
    if first >= end:
        return strip
    return Strip.join([strip.crop(0, first), strip.crop(first, end).apply_style(SELECTED), strip.crop(end)])

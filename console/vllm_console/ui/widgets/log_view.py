"""A log on screen: follows its end, stays in place while read, searches, filters. Files are read in a thread."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path

from msgspec.structs import replace
from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual import events, on
from textual.message import Message
from textual.strip import Strip

from vllm_console.logs.file import Line, LogFile, LogLevel, compile_pattern
from vllm_console.logs.prefix import PROCESSES
from vllm_console.logs.vllm_lines import parse_line
from vllm_console.ui.terminal.lines import LineView, line, wheel_step
from vllm_console.ui.theme import ACCENT, CURSOR, DIM, WARN
from vllm_console.ui.threads import begin_worker, in_thread, woken
from vllm_console.ui.widgets.draw import fit
from vllm_console.ui.widgets.log_pager import AccessLines, Filter, LogPage, LogPager
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.secrets import redact

_ENGINE = r"Engine (\d+): "
_STATISTICS = (
    ("prompt", r"Avg prompt throughput: ([\d.]+) tokens/s", " tok/s"),
    ("gen", r"Avg generation throughput: ([\d.]+) tokens/s", " tok/s"),
    ("run", r"Running: (\d+)", ""),
    ("wait", r"(?:Waiting|Pending): (\d+)", ""),
    ("KV", r"(?:GPU )?KV cache usage: ([\d.]+)%", "%"),
)
"""The figures of vLLM's periodic statistics line, in display order. Compiled on first use, since such a line appears
only every ten seconds."""


@lru_cache(maxsize=512)
def short_line(text: str) -> str:
    """``18:01:43 message``: no process, date or source location, and no level below warning."""
    line = next(parse_line(0, text), None)
    if line is None or not line.message.strip():
        return text
    clock = line.clock[-8:]
    level = line.level if line.level not in ("", "INFO") else ""
    return " ".join(filter(None, (clock, level, _statistics(line.message) or line.message)))


def _statistics(message: str) -> str:
    """``prompt 1758 tok/s · gen 1100 tok/s · run 40 · wait 13 · KV 62%``; empty for any other message."""
    if "Avg prompt throughput" not in message:
        return ""
    found = [(name, figure[1], unit) for name, pattern, unit in _STATISTICS if (figure := re.search(pattern, message))]
    parts = [f"{name} {float(figure):.0f}{unit}" for name, figure, unit in found]
    engine = re.match(_ENGINE, message)
    if engine is not None and int(engine[1]):
        parts.insert(0, f"engine {int(engine[1])}")
    return " · ".join(parts)


# -- the view ---------------------------------------------------------------------------------------------------------


TICK_SECONDS = 0.25
"""Minimum time between two reads of a growing log; lines that scroll by faster are skipped."""

IDLE_SECONDS = 0.5
"""Time between two reads of a log that does not grow."""

SIDEWAYS = 16
"""Cells per step when scrolling sideways."""

MARGIN = 1
"""Blank cells left and right of the lines."""

WHEEL = 3
"""Lines per notch of the mouse wheel."""

FILTERS: tuple[Filter, ...] = (None, LogLevel.WARNING, LogLevel.ERROR)

READING = "reading…"
"""Shown until the first read of the file, which may take a second on a busy machine."""

EMPTY = {None: "log is empty", LogLevel.WARNING: "no warnings or errors", LogLevel.ERROR: "no errors"}
"""Shown if no line passes the filter."""

FILTER_NAMES = {None: "all lines", LogLevel.WARNING: "warnings and errors", LogLevel.ERROR: "errors"}

_ACCESS = tuple(AccessLines)

ACCESS_NAMES = {
    AccessLines.FOLDED: "",
    AccessLines.HIDDEN: "access lines hidden",
    AccessLines.EACH: "each access line",
}

ERROR = Style(color="red")
MATCH = Style(color="black", bgcolor="yellow")
PLAIN = Style()
_STYLES: Mapping[LogLevel | None, Style] = {
    LogLevel.ERROR: ERROR,
    LogLevel.WARNING: WARN,
    LogLevel.DEBUG: DIM,
}

BEFORE, BEHIND = "‹", "›"
"""Marks where a line continues out of view."""

_PREFIX = lazy_pattern(rf"\d\d:\d\d:\d\d |{PROCESSES}(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] )?|[A-Z]+: +)")

_Command = Callable[[LogPager], LogPage]

_Read = tuple[int, Path, LogPage]
"""Sequence number of a read, the file, and the page to show."""


class LogView(LineView):
    """Shows a log file, all of which can be reached. It takes no focus: the widget that holds it calls its methods.

    Lines are shortened (`short_line`) unless they wrap or a search is active. ``compact`` is for a pane: while paused,
    the view's last row shows the status. New lines are read together with the snapshot (`reader`, then `show_read`), so
    that both take one turn and are painted together. If not compact, listen to `Moved` and show `status` elsewhere.
    """

    DEFAULT_CSS = "LogView { height: 1fr; width: 1fr; }"

    class Moved(Message):
        """What the view shows or does has changed. A compact view does not send it for reads."""

    def __init__(self, *, compact: bool = True, id: str | None = None) -> None:
        super().__init__(id=id)
        self.page = LogPage()
        """The page read last."""
        self.wrap = False
        self._compact = compact
        self._left: int | None = None
        """Cells to scroll all lines sideways; None scrolls only lines whose match would not be visible."""
        """The search text and match that were last scrolled into view."""
        self._path: Path | None = None
        self._shown_path: Path | None = None
        """The file that the page belongs to."""
        self._pager: LogPager | None = None
        self._pager_lock = threading.Lock()
        self._reads = 0
        """Number of reads, counted under the lock, since they may return out of order."""
        self._shown_read = 0
        self._read_ahead: _Read | None = None
        """What `reader` has read and has not been shown yet."""
        self._margined: dict[int, tuple[Strip, Strip]] = {}
        """The visible lines by identity, each with a copy that has a margin."""
        self._selected: int | None = None
        self._commands: list[_Command] = []
        self._rows_owed = 0
        self._wake = asyncio.Event()

    # -- what holders call -----------------------------------------------------------------------------------------

    def open(self, path: Path | str) -> None:
        """Show this log from its end. It need not exist yet."""
        self._path, self._selected, self._left = Path(path), None, None
        self._commands = [LogPager.end]  # the previous file may be the same one, at an earlier moment
        self._rows_owed = 0
        self._wake.set()

    @property
    def reader(self) -> Callable[[], None] | None:
        """Reads what was written since; call it in a thread. None while the view is not visible."""
        if self._path is None or not self._in_view:
            return None
        return partial(self._read_for_later, self._path, self._cells)

    def show_read(self) -> None:
        """Show what the `reader` has read."""
        read, self._read_ahead = self._read_ahead, None
        self._show_read(read)
        if read is not None and (self.page.busy or self.page.counting):
            self._wake.set()

    def scroll_rows(self, rows: int) -> None:
        """Scroll down, or up if negative; calls in quick succession are combined."""
        self._selected = None
        self._rows_owed += rows
        self._wake.set()

    def scroll_pages(self, pages: int) -> None:
        """Scroll by pages, which overlap by one line."""
        self.scroll_rows(pages * max(1, self._rows - 1))

    def scroll_sideways(self, steps: int) -> None:
        """Scroll right, or left if negative."""
        if self.wrap:
            return
        now = self._left
        if now is None:  # continue from where the last match is shown
            text = next((shown.text for shown in self.page.lines if shown.offset == self.page.match), "")
            now = _left_for(text, self.page.wanted, self._text_width)
        self._left = max(0, now + steps * SIDEWAYS)
        self._draw()

    def go_home(self) -> None:
        """Go to the oldest line."""
        self._do(LogPager.home)

    def follow(self) -> None:
        """Go to the end and follow."""
        self._selected, self._left = None, None
        self._do(LogPager.end)

    def show_moment(self, moment: float) -> None:
        """Show what was written up to a moment (Unix seconds)."""
        self._selected = None
        stamp = time.strftime("%m-%d %H:%M:%S", time.localtime(moment))  # as vLLM writes it
        self._do(lambda pager: pager.show_moment(stamp))

    def toggle_hold(self) -> None:
        """Stop following at the current position, or follow again."""
        self._do(LogPager.hold if self.page.following else LogPager.end)

    def cycle_filter(self) -> None:
        """Cycle through: all lines, warnings and errors, errors."""
        after = FILTERS[(FILTERS.index(self.page.filter) + 1) % len(FILTERS)]
        self._do(lambda pager: pager.set_filter(after))

    def cycle_access(self) -> None:
        """Cycle through the display of access lines: folded, only those of failed requests, each."""
        after = _ACCESS[(_ACCESS.index(self.page.access) + 1) % len(_ACCESS)]
        self._do(lambda pager: pager.set_access(after))

    def toggle_wrap(self) -> None:
        """Wrap or cut long lines."""
        self.wrap, self._left = not self.wrap, None
        self._resize()
        self._draw()
        self.post_message(self.Moved())

    def find(self, text: str) -> None:
        """Search upwards from the visible lines; an empty text ends the search."""
        self._selected, self._left = None, None
        self._do(lambda pager: pager.find(text))

    def find_next(self, backwards: bool) -> None:
        """Go to the next match above (backwards) or below."""
        self._selected, self._left = None, None
        self._do(lambda pager: pager.find_next(backwards))

    def find_only(self, text: str) -> None:
        """Show only lines that contain a text."""
        self._selected = None
        self._do(lambda pager: pager.find_only(text))

    def toggle_only_matches(self) -> None:
        """Show only lines that match the search, or all again."""
        only = not self.page.only_matches
        self._do(lambda pager: pager.set_only_matches(only))

    def go_to(self, moment: str) -> None:
        """Go to the first line at or after a time, as typed by the user."""
        self._selected = None
        self._do(lambda pager: pager.go_to(moment))

    def select(self, step: int) -> None:
        """Move the selection by lines; the first call selects the last visible line."""
        if not self.page.lines:
            return
        offsets = [shown.offset for shown in self.page.lines]
        if self.marked not in offsets:
            index = len(offsets) - 1
        else:
            index = min(max(0, offsets.index(self.marked) + step), len(offsets) - 1)
        self._selected = offsets[index]
        self._do(LogPager.hold)

    @property
    def marked(self) -> int | None:
        """Offset of the selected line, or of the last line found."""
        return self._selected if self._selected is not None else self.page.match

    @property
    def copied_text(self) -> str:
        """The text of the selected line, or of all visible lines."""
        chosen = [shown.text for shown in self.page.lines if shown.offset == self.marked]
        return "\n".join(chosen or [shown.text for shown in self.page.lines])

    @property
    def matches(self) -> str:
        """``match 3 of 128``: the current match, counted from the oldest; empty without a search.

        ``128 matches`` if the current match is unknown, ``128 matches so far`` while counting.
        """
        page = self.page
        if not page.wanted:
            return ""
        more = "+" if page.more_matches else ""
        if page.match_number is not None:
            return f"match {page.match_number:,} of {page.matches:,}{more}"
        if page.counting:
            return f"{page.matches:,} matches so far"
        return f"{page.matches:,}{more} {'match' if page.matches == 1 else 'matches'}"

    @property
    def status(self) -> str:
        """``following`` or ``paused · 12 new``."""
        if self.page.following:
            return "following"
        return f"paused · {self.page.new_lines:,} new" if self.page.new_lines else "paused"

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def _in_view(self) -> bool:
        """Whether it is visible, including around an open dialog."""
        return self.is_on_screen and self.screen.is_current

    @property
    def _rows(self) -> int:
        return max(1, self.outer_size.height)

    @property
    def _cells(self) -> tuple[int, int]:
        """Number of rows, and the cells after which lines wrap (0: lines are cut)."""
        return self._rows, self._text_width if self.wrap else 0

    @property
    def _text_width(self) -> int:
        return max(1, self.outer_size.width - 2 * MARGIN)

    def on_mount(self) -> None:
        """Begin to read."""
        begin_worker(self, self._serve, "log", "log")

    def _do(self, command: _Command) -> None:
        self._flush_scroll()
        self._commands.append(command)
        self._wake.set()

    def _flush_scroll(self) -> None:
        if self._rows_owed:
            rows, self._rows_owed = self._rows_owed, 0
            self._commands.append(lambda pager: pager.scroll(rows))

    async def _serve(self) -> None:
        """Run queued commands, otherwise read what was written; one read at a time, each in a thread."""
        try:
            while True:
                before = self.page
                await self._turn()
                if self.page is not before and (self.page.busy or self.page.counting):
                    await asyncio.sleep(0.01)
                    continue
                pause = IDLE_SECONDS if self.page == before else TICK_SECONDS
                await woken(self._wake, None if self._compact else pause)
        finally:
            pager = self._pager
            if pager is not None:
                asyncio.get_running_loop().run_in_executor(None, pager.log.close)

    async def _turn(self) -> None:
        self._wake.clear()
        self._flush_scroll()
        commands, self._commands = self._commands, []
        if self._path is None or not (commands or self._in_view):
            return
        self._show_read(await in_thread(partial(self._read, self._path, self._cells, commands), "read log"))

    def _read_for_later(self, path: Path, size: tuple[int, int]) -> None:
        self._read_ahead = self._read(path, size, ())

    def _read(self, path: Path, size: tuple[int, int], commands: Sequence[_Command]) -> _Read | None:
        """Runs in a thread; the only place that uses the pager. On failure the page has a note in place of lines.

        Returns None if another file was opened meanwhile, so that its pager and the reader's choices there are kept.
        """
        with self._pager_lock:
            if path != self._path:
                return None
            self._reads += 1
            try:
                page = self._page_of(path, size, commands)
            except Exception as error:  # noqa: BLE001 - thread boundary: shown in place of the log
                page = LogPage(note=f"can't read the log: {getattr(error, 'strerror', None) or error}")
            return self._reads, path, page

    def _page_of(self, path: Path, size: tuple[int, int], commands: Sequence[_Command]) -> LogPage:
        if self._pager is None or self._pager.log.path != path:
            if self._pager is not None:
                self._pager.log.close()
            self._pager = LogPager(LogFile(path, clean=redact), size[0], access=AccessLines.FOLDED, wrap=size[1])
        for command in commands[:-1]:
            command(self._pager)
        if commands:
            return commands[-1](self._pager)
        return self._pager.step() if self._pager.busy else self._pager.poll()

    # -- drawing ---------------------------------------------------------------------------------------------------

    def _show_read(self, read: _Read | None) -> None:
        """Show a read unless a newer one or another file is shown."""
        if read is None:
            return
        number, path, page = read
        if number < self._shown_read or path != self._path:
            return
        changed = page != self.page or path != self._shown_path
        self._shown_read, self._shown_path, self.page = number, path, page
        if changed:
            self._draw()
            if not self._compact:
                self.post_message(self.Moved())

    def _draw(self) -> None:
        width, height = self.outer_size
        if not width or not height:
            return
        page = self.page
        lines = page.lines if self.wrap else [_shortened(one, page.wanted) for one in page.lines]
        strips = log_strips(
            lines, self._text_width, height, wanted=page.wanted, match=self.marked,
            left=self._left, wrap=self.wrap, from_end=page.from_end, marks=not self._compact,
        )  # fmt: skip
        strips = self._with_margin(strips)
        if not strips and page.note:
            strips = [line((fit(f" {page.note}", width), DIM))]
        elif not strips and self._path is not None:
            hidden = page.access is AccessLines.HIDDEN
            empty = "only access lines, which are hidden" if hidden else EMPTY[page.filter]
            empty = "no line matches" if page.only_matches else empty
            strips = [line((f" {empty if self._shown_path == self._path else READING}", DIM))]
        if self._compact and not page.following:
            room, mark = height - 1, f" {self.status} "
            strips = strips[len(strips) - min(len(strips), room) :] if page.from_end else strips[:room]
            strips += [line()] * (room - len(strips))
            strips.append(line(" " * (width - len(mark)), (mark, CURSOR)).crop(0, width))
        self.show(strips)

    def _with_margin(self, strips: Sequence[Strip]) -> list[Strip]:
        """Add a margin. A line that was shown before returns the same object, so it needs no comparison."""
        before, self._margined = self._margined, {}
        for strip in strips:
            known = before.get(id(strip))
            if known is None:
                known = strip, Strip([Segment(" " * MARGIN), *strip])
            self._margined[id(strip)] = known
        return [self._margined[id(strip)][1] for strip in strips]

    def on_resize(self, event: events.Resize) -> None:
        """Read and draw for the new size."""
        if event.size.height:
            self._draw()
            self._resize()

    def _resize(self) -> None:
        if self._path is not None:
            rows, wrap = self._cells
            self._do(lambda pager: pager.resize(rows, wrap))

    def on_show(self) -> None:
        """Read immediately when the view becomes visible."""
        self._wake.set()

    @on(events.MouseScrollUp)
    @on(events.MouseScrollDown)
    def _wheel(self, event: events.MouseEvent) -> None:
        event.stop()
        self.scroll_rows(wheel_step(event) * WHEEL)

    async def on_click(self, event: events.Click) -> None:
        """Select the clicked line. In a paused pane, a click on the last row resumes following."""
        if self._compact and not self.page.following and event.y == self._rows - 1:
            self.follow()
        elif not self._compact and not self.wrap and event.y < len(self.page.lines):
            self._selected = self.page.lines[event.y].offset
            self._do(LogPager.hold)


@lru_cache(maxsize=256)
def styled(line: Line, wanted: str, current: bool) -> Strip:
    """One line at its full width. ``wanted`` is highlighted wherever it occurs; ``current`` highlights the line."""
    text = line.text
    base = CURSOR if current else _STYLES.get(line.level, PLAIN)
    prefix = _PREFIX.match(text) if line.level is LogLevel.INFO and not current else None
    styles = [(0, prefix.end(), DIM), (prefix.end(), len(text), base)] if prefix else [(0, len(text), base)]
    marks = [match.span() for match in compile_pattern(wanted).finditer(text)] if wanted else []
    segments: list[Segment] = []
    for start, end, style in styles:
        at = start
        for first, last in marks:
            first, last = max(first, at), min(last, end)
            if first < last:
                segments += [Segment(text[at:first], style), Segment(text[first:last], MATCH)]
                at = last
        segments.append(Segment(text[at:end], style))
    return Strip([segment for segment in segments if segment.text])


def _shortened(line: Line, wanted: str) -> Line:
    """The line as it is shown unless lines wrap; whole if only the whole line contains the search text."""
    short = short_line(line.text)
    if wanted and (pattern := compile_pattern(wanted)).search(short) is None and pattern.search(line.text) is not None:
        return line
    return replace(line, text=short)


def _left_for(text: str, wanted: str, width: int) -> int:
    """How many cells to scroll a line to show its first match: 0 if that shows it, else some cells before it."""
    place, length = compile_pattern(wanted).search(text) if wanted else None, cell_len(text)
    if place is None or cell_len(text[: place.end()]) <= width - int(length > width):  # the mark at the end
        return 0
    return max(0, min(cell_len(text[: place.start()]) - width // 3, length - width))


def _marked(strip: Strip, width: int, *, before: bool, behind: bool) -> Strip:
    """A cut line with a mark at each end where it continues."""
    if before and strip.cell_length:
        strip = Strip([Segment(BEFORE, ACCENT), *strip.crop(1)])
    return Strip([*strip.crop(0, width - 1), Segment(BEHIND, ACCENT)]) if behind else strip


def log_strips(
    lines: Sequence[Line],
    width: int,
    height: int,
    *,
    wanted: str = "",
    match: int | None = None,
    left: int | None = None,
    wrap: bool = False,
    from_end: bool = True,
    marks: bool = False,
) -> list[Strip]:
    """The rows of a page, scrolled sideways by ``left`` cells; with None, only as far as a line's match needs it.

    Wrapped rows that don't fit are dropped at the top if ``from_end``, else at the bottom. ``marks`` shows where a line
    continues out of view.
    """
    rows: list[Strip] = []
    for one in lines:
        strip = styled(one, wanted, one.offset == match)
        length = strip.cell_length
        if not wrap:
            at = left if left is not None else _left_for(one.text, wanted, width)
            cut = strip.crop(at, at + width) if at or length > width else strip
            rows.append(_marked(cut, width, before=at > 0, behind=length > at + width) if marks else cut)
            continue
        rows += [strip.crop(at, at + width) for at in range(0, max(length, 1), width)]
    return rows[-height:] if from_end else rows[:height]

"""A reader's position in a log: visible lines, whether it follows the end, search results. Independent of the UI."""

from __future__ import annotations

import enum
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import msgspec
from rich.cells import cell_len

from vllm_console.logs.access import Folding, parse_access_line
from vllm_console.logs.file import Line, LogFile, LogLevel, compile_pattern
from vllm_console.logs.times import find_time, newest_stamp, not_after, parse_moment
from vllm_console.ui.keymap import key_of

MOST_MATCHES = 100_000
"""Maximum number of matches to count."""


class MatchCount:
    """Counts the lines of ``log`` that contain ``text`` and satisfy ``passes``; continues when the log has grown."""

    def __init__(self, log: LogFile, text: str, passes: Callable[[Line], bool]) -> None:
        self._log, self._text, self._passes = log, text, passes
        self._offsets = array("q")
        self._at = log.start
        self._stuck_at = -1
        """The log's end when a step found nothing to read because the last line is unfinished."""

    @property
    def total(self) -> int:
        """Number of matches found so far."""
        return len(self._offsets)

    @property
    def full(self) -> bool:
        """Whether counting stopped at `MOST_MATCHES`."""
        return len(self._offsets) >= MOST_MATCHES

    @property
    def done(self) -> bool:
        """Whether everything written so far has been counted."""
        return self.full or self._at >= self._log.end or self._stuck_at == self._log.end

    def step(self) -> None:
        """Count some more."""
        found, after = self._log.matches(self._text, self._at)
        self._offsets.extend(line.offset for line in found if self._passes(line))
        self._stuck_at = self._log.end if after == self._at else -1
        self._at = after

    def number_of(self, offset: int | None) -> int | None:
        """The match number of the line at this offset, from 1; None if it is not a match or not counted yet."""
        if offset is None:
            return None
        index = bisect_right(self._offsets, offset)
        return index if index and self._offsets[index - 1] == offset else None


# -- pages ------------------------------------------------------------------------------------------------------------


MOST_LINES = 4000
"""Maximum number of lines kept around the reader."""

MOST_FOLDED_LINES = 10 * MOST_LINES
"""Maximum number of lines kept if folding makes a page span more than `MOST_LINES` lines."""

SLICE_BYTES = 1024 * 1024
"""Maximum bytes that one command reads before it yields."""

FOLDED_BYTES = 256 * 1024
"""Maximum bytes to read in each direction to fill a page of folded lines, since folding many lines takes long."""

SKIP_BYTES = 128 * 1024
"""A following reader further behind than this jumps to the end, since lines scrolling by this fast cannot be read."""

_CHUNK = 200

Filter = LogLevel | None


class AccessLines(enum.Enum):
    """How access lines are shown: each run folded into one row, only those of failed requests, or all."""

    FOLDED = "folded"
    HIDDEN = "hidden"
    EACH = "each"


class LogPage(msgspec.Struct, frozen=True):
    """What to show. ``new_lines`` counts the lines added since the reader left the end."""

    lines: tuple[Line, ...] = ()
    following: bool = True
    new_lines: int = 0
    filter: Filter = None
    wanted: str = ""
    """The search text; empty without a search."""
    match: int | None = None
    note: str = ""
    """The outcome of a search or a read, if there is something to report."""
    matches: int = 0
    """Number of matching lines counted so far."""
    match_number: int | None = None
    """The match number of the last line found, from 1; None while unknown."""
    more_matches: bool = False
    """Whether there are, or may be, more matches than counted."""
    counting: bool = False
    only_matches: bool = False
    access: AccessLines = AccessLines.EACH
    from_end: bool = True
    """Whether to align the page to its last line and drop what does not fit at the top; otherwise the reverse."""
    busy: bool = False
    """Whether `LogPager.step` has more to do."""


class LogPager:
    """Moves through a `LogFile` for one reader. Every method reads a bounded amount and returns a `LogPage`.

    It keeps a window of lines that pass the filter, read without gaps from ``_low`` to ``_high``. While following, the
    page is the end of the window. Otherwise ``_place`` determines the first visible line, which stays the same however
    the log grows. A fold of access lines counts as one line; nothing is folded during a search, since a match may be in
    a fold. ``wrap`` is the number of cells after which a line continues in the next row, or 0 if lines are cut.
    Scrolling by rows moves by whole lines.
    """

    def __init__(self, log: LogFile, rows: int = 24, *, access: AccessLines = AccessLines.EACH, wrap: int = 0) -> None:
        self.log = log
        self._rows, self._wrap = max(1, rows), wrap
        self._access = access
        self._folding = Folding()
        self._folded: list[Line] = []
        self._folded_from: tuple[int, ...] = ()
        self._only = False
        self._count: MatchCount | None = None
        self._filter: Filter = None
        self._until: int | None = None
        """Where the lines of the selected moment end; None once the reader has moved."""
        self._lines: list[Line] = []
        self._low = self._high = 0
        self._place = 0
        """The first visible line is the first one that ends after this offset."""
        self._following = True
        self._counted = self._new = 0
        self._epoch = log.epoch
        self._owed = 0
        """Rows still to scroll when more lines have been found; negative means up."""
        self._wanted = ""
        self._match: int | None = None
        self._search_at: int | None = None
        self._backwards = False
        self._note = ""
        self._to_end()

    def page(self) -> LogPage:
        """The current page."""
        shown, count = self._shown(), self._count
        counting = count is not None and not count.done
        return LogPage(
            lines=tuple(shown),
            following=self._following,
            new_lines=self._new,
            filter=self._filter,
            wanted=self._wanted,
            match=self._match,
            note=self.log.problem or self._note,
            matches=count.total if count is not None else 0,
            match_number=count.number_of(self._match) if count is not None else None,
            more_matches=count is not None and (counting or count.full),
            counting=counting,
            only_matches=self._only,
            access=self._access,
            from_end=self._shows_end or self._fills_from_end,
            busy=self.busy,
        )

    @property
    def busy(self) -> bool:
        """Whether `step` has more to do."""
        return bool(self._owed) or self._search_at is not None or self._lacks_lines

    def _shown(self) -> Sequence[Line]:
        lines = self._entries
        whole = self._shows_end or self._fills_from_end
        first = max(0, len(lines) - self._rows) if whole else self._top
        return lines[first : first + self._rows]

    @property
    def _folds(self) -> bool:
        return self._access is AccessLines.FOLDED and self._filter is None and not self._wanted

    @property
    def _entries(self) -> Sequence[Line]:
        """The window's lines, with access lines folded if requested; each ends after the previous one."""
        if not self._folds:
            return self._lines
        # A poll uses this several times, and folding thousands of lines takes milliseconds.
        what = (self._low, self._high, len(self._lines), self._epoch)
        if what != self._folded_from:
            self._folded = self._folding.fold(self._lines, self._epoch, whole=self._low <= self.log.start)
            self._folded_from = what
        return self._folded

    @property
    def _top(self) -> int:
        """Index in the window of the first visible line."""
        return bisect_right(self._entries, self._place, key=lambda line: line.end)

    @_top.setter
    def _top(self, index: int) -> None:
        lines = self._entries
        self._place = lines[index].end - 1 if index < len(lines) else self._high

    @property
    def _shows_end(self) -> bool:
        """Whether the page ends with the last line (the newest, or that of a moment) and is filled from above."""
        return self._following or self._until is not None

    @property
    def _fills_from_end(self) -> bool:
        """Whether wrapped lines are aligned to the end of the page: its first line may have lost its upper rows."""
        return bool(self._wrap) and self._top >= self._last_top

    @property
    def _last_top(self) -> int:
        """Index of the first line of the last page."""
        lines = self._entries
        return len(lines) - min(len(lines), self._lines_in(reversed(lines), self._rows))

    def _lines_in(self, lines: Iterable[Line], rows: int) -> int:
        """How many of these lines fit in ``rows`` rows, at least one; equals ``rows`` if lines are cut."""
        if not self._wrap:
            return rows
        left, number = rows, 0
        for line in lines:
            left -= self._rows_of(line)
            if left < 0 and number:
                break
            number += 1
        return number

    def _rows_of(self, line: Line) -> int:
        return max(1, -(-cell_len(line.text) // self._wrap)) if self._wrap else 1

    def resize(self, rows: int, wrap: int = 0) -> LogPage:
        """Set the number of rows on the screen, and after how many cells lines wrap (0: lines are cut).

        A match that is in view stays in view.
        """
        match = next((line for line in self._in_view() if line.offset == self._match), None)
        self._rows, self._wrap = max(1, rows), wrap
        if self._until is not None:
            self._top = self._last_top
        elif not self._following:
            self._fill_up()
        if match is not None:
            self._show_match(match)
        return self.step()

    def poll(self) -> LogPage:
        """Read what was written since."""
        end = self.log.refresh()
        if self.log.epoch != self._epoch:
            self._epoch = self.log.epoch
            self._match = None
            self._note = "the log was truncated"
            self._count_matches()
            self._to_end()
        elif self._following:
            self._drop_unfinished()
            if end - self._high > SKIP_BYTES:
                self._to_end()
            else:
                self._read_down(MOST_LINES)
        else:
            more, self._counted = self.log.count(self._counted, end)
            self._new += more
        return self.step()

    def step(self) -> LogPage:
        """Continue pending work: rows to scroll, a search, a page that is not full, matches to count."""
        if self._search_at is not None:
            self._search_step()
        elif self._owed:
            owed, self._owed = self._owed, 0
            self._move(owed)
        elif self._lacks_lines:
            self._read_up(self._rows)
        elif self._count is not None and not self._count.done:
            self._count.step()
        return self.page()

    def scroll(self, rows: int) -> LogPage:
        """Scroll down, or up if negative; reaching the end resumes following."""
        self._note = ""
        self._move(self._owed + rows)
        return self.page()

    def home(self) -> LogPage:
        """Go to the oldest line."""
        self._pause()
        self._start_at(self.log.start)
        return self.page()

    def end(self) -> LogPage:
        """Go to the newest line and follow."""
        self._note = ""
        self._owed = 0
        self._search_at = None
        self.log.refresh()
        self._to_end()
        return self.page()

    def show_moment(self, moment: str) -> LogPage:
        """Show what was written up to a time (`11-22 03:10:00`)."""
        self.log.refresh()
        newest = newest_stamp(self.log)
        self._pause()
        if newest is None:
            self._note = "no line near the end names a time"
        else:
            wanted = not_after(parse_moment(moment, newest), newest)
            later = find_time(self.log, wanted + timedelta(seconds=1), newest)
            self._show_until(self.log.end if later is None else later)
        return self.page()

    def _show_until(self, until: int) -> None:
        """Read the lines that end at an offset, enough to fill the rows, and none after it."""
        self._begin_at(until)
        self._until = until
        self._read_up(self._rows)

    def hold(self) -> LogPage:
        """Stop following at the current position."""
        self._pause()
        return self.page()

    def set_filter(self, level: Filter) -> LogPage:
        """Show only lines of at least this level; None shows all."""
        self._filter = level
        self._count_matches()
        self._read_again()
        return self.page()

    def set_access(self, access: AccessLines) -> LogPage:
        """Change how access lines are shown."""
        self._access = access
        self._count_matches()
        self._read_again()
        return self.page()

    def set_only_matches(self, only: bool) -> LogPage:
        """Show only lines that match the search, or all of them."""
        self._only = only and bool(self._wanted)
        self._note = ""
        self._read_again()
        return self.page()

    def find_only(self, text: str) -> LogPage:
        """Show only lines that contain a text, the newest at the bottom."""
        self.find("")
        if text:
            self._wanted, self._only = text, True
            self._count_matches()
            self._to_end()
        return self.page()

    def go_to(self, moment: str) -> LogPage:
        """Go to the first line at or after a time that the user typed; the note says where that is."""
        self.log.refresh()
        newest = newest_stamp(self.log)
        if newest is None:
            self._note = "no line near the end names a time"
            return self.page()
        try:
            wanted = parse_moment(moment, newest)
        except ValueError as error:
            self._note = str(error)
            return self.page()
        found = find_time(self.log, wanted, newest)
        if found is None:
            self._note = f"the newest line is of {newest:%m-%d %H:%M:%S}: nothing at or after {wanted:%m-%d %H:%M:%S}"
            return self.page()
        self._search_at = None
        self._pause()
        self._start_at(found)
        self._fill_up()
        self._note = f"from {wanted:%m-%d %H:%M:%S} on"
        return self.page()

    def _read_again(self) -> None:
        """Reread the page after the filter changed, at the same position if lines pass there."""
        if self._until is not None:
            self._show_until(self._until)
            return
        if self._following or not self._lines:
            self._to_end()
        else:
            self._start_at(self._shown()[0].offset)
            self._fill_up()

    def _fill_up(self) -> None:
        """Fill a paused page from below, then from above. It may stay partly empty if its lines are very long folds."""
        most = FOLDED_BYTES if self._folds else SLICE_BYTES
        for read in (self._read_down, self._read_up):
            free = self._rows - len(self._entries) + self._top
            if free > 0 and len(self._lines) < MOST_LINES:
                read(free, most)
        self._top = min(self._top, self._last_top)

    def _count_matches(self) -> None:
        self._count = MatchCount(self.log, self._wanted, self._passes_filter) if self._wanted else None

    def find(self, text: str, backwards: bool = True) -> LogPage:
        """Search from the reader's position; an empty text ends the search. `step` continues it."""
        edge = self._shown()
        self._wanted, self._match, self._note = text, None, ""
        self._search_at = None
        self._count_matches()
        if self._only:
            self._only = bool(text)
            self._read_again()
        elif not text and not self._shows_end:  # access lines are folded again
            self._fill_up()
        if text:
            here = (edge[-1].end if backwards else edge[0].offset) if edge else self.log.end
            self._begin_search(here, backwards)
        return self.page()

    def find_next(self, backwards: bool) -> LogPage:
        """Go to the next match in this direction."""
        if not self._wanted:
            return self.page()
        if self._match is None:
            return self.find(self._wanted, backwards)
        line = next(iter(self.log.after(self._match, 1)), None)
        self._begin_search(self._match if backwards or line is None else line.end, backwards)
        return self.page()

    def _begin_search(self, offset: int, backwards: bool) -> None:
        self._search_at, self._backwards = offset, backwards
        self._search_step()

    def _search_step(self) -> None:
        assert self._search_at is not None
        found = self.log.search(self._wanted, self._search_at, self._backwards)
        if found.line is not None and self._passes_filter(found.line):
            self._search_at, self._note = None, ""
            self._match = found.line.offset
            self._show_match(found.line)
        elif found.done:
            self._search_at = None
            where = "above" if self._backwards else "below"
            self._note = f"no {'more ' if self._match is not None else ''}matches {where}"
        else:
            self._search_at = found.next_offset
            size = max(1, self.log.end - self.log.start)
            share = (found.next_offset - self.log.start) / size
            self._note = f"searching… {share:.0%} of the log, {key_of('log_back')} stops"

    def _in_view(self) -> Sequence[Line]:
        """The lines that fit on the screen, from where the page is aligned."""
        lines = self._shown()
        in_order = lines[::-1] if self._shows_end or self._fills_from_end else lines
        return in_order[: self._lines_in(in_order, self._rows)]

    def _show_match(self, line: Line) -> None:
        shown = self._in_view()
        self._pause()
        if any(other.offset == line.offset for other in shown):
            return
        self._start_at(line.offset)
        if above := min(self._rows // 3, 8):
            self._move(-above)
        self._owed = 0

    def _move(self, rows: int) -> None:
        self._until = None
        if rows < 0:
            self._move_up(-rows)
        elif not self._following:
            self._move_down(rows)

    def _move_up(self, rows: int) -> None:
        self._pause()
        if self._top < rows + self._folds:
            self._read_up(self._rows - self._top + rows)
        above = self._entries[: self._top]
        top = len(above) - min(len(above), self._lines_in(reversed(above), rows))
        left = rows - sum(map(self._rows_of, above[top:]))
        self._top = top
        self._owed = -left if left > 0 and not top and self._low > self.log.start else 0

    def _move_down(self, rows: int) -> None:
        if (lacking := self._top + rows + self._rows - len(self._entries)) > 0:
            self.log.refresh()
            self._drop_unfinished()
            self._read_down(lacking + 1)
        top = self._top
        bottom, wanted = self._last_top, top + self._lines_in(self._entries[top:], rows)
        if wanted >= bottom and self._high >= self.log.end:
            self._to_end()
        else:
            self._owed = max(0, wanted - bottom) if rows > 1 else 0
            self._top = min(wanted, bottom)

    def _pause(self) -> None:
        if self._following:
            self._top = self._last_top
            self._following = False
            self._counted, self._new = self._high, 0

    def _to_end(self) -> None:
        self._following, self._new, self._owed, self._until = True, 0, 0, None
        self._lines, self._place = [], self.log.end
        self._low = self._high = self.log.end
        self._read_up(self._rows)

    def _start_at(self, offset: int) -> None:
        self._begin_at(offset)
        self._read_down(self._rows)

    def _begin_at(self, offset: int) -> None:
        """Discard the window and move to this offset."""
        self._lines, self._place, self._owed, self._until = [], offset, 0, None
        self._low = self._high = offset

    @property
    def _lacks_lines(self) -> bool:
        """Whether the page is not full although there are lines above. A fold only counts lines within the window."""
        more = self._low > self.log.start and len(self._lines) < MOST_LINES
        return more and self._shows_end and len(self._entries) < self._rows + self._folds

    def _passes_filter(self, line: Line) -> bool:
        """Whether a line passes the level filter and is not a hidden access line."""
        if self._filter is not None and (line.level is None or line.level < self._filter):
            return False
        access = parse_access_line(line.text) if self._access is AccessLines.HIDDEN else None
        return access is None or access.status >= "4"

    def _passes(self, line: Line) -> bool:
        if self._only and compile_pattern(self._wanted).search(line.text) is None:
            return False
        return self._passes_filter(line)

    def _read_up(self, want: int, most: int = SLICE_BYTES) -> None:
        """Read lines above until ``want`` more have been added, the start is reached, or ``most`` bytes are read."""
        stop, added = self._low - most, 0
        while added < want and self._low > max(stop, self.log.start):
            if self._only and self._jump_up():
                continue
            chunk = self.log.before(self._low, self._chunk(want - added), SLICE_BYTES)
            if not chunk:
                self._low = self.log.start
                break
            self._low = chunk[0].offset
            kept = [line for line in chunk if self._passes(line)]
            self._lines[:0] = kept
            added += self._count_entries(kept)
            if self._shows_end and len(self._lines) >= MOST_LINES:
                break
        if self._until is not None:
            self._top = self._last_top
        if len(self._lines) > MOST_LINES and not self._following:
            self._forget_below()

    def _chunk(self, want: int) -> int:
        """How many lines to read for ``want`` more on the page: many if few of them may count."""
        each = self._filter is None and not self._only and self._access is AccessLines.EACH
        return max(want, 1 if each else _CHUNK)

    def _count_entries(self, lines: Sequence[Line]) -> int:
        """Minimum number of page lines that these make: a run of access lines may continue above or below."""
        return sum(parse_access_line(line.text) is None for line in lines) if self._folds else len(lines)

    def _forget_below(self) -> None:
        """Discard lines far below the page. Lines on the page stay unless they exceed `MOST_FOLDED_LINES`."""
        shown = self._entries[self._top : self._top + self._rows]
        page = bisect_left(self._lines, shown[-1].end, key=lambda line: line.end) + 1 if shown else 0
        del self._lines[min(max(MOST_LINES, page), MOST_FOLDED_LINES) :]
        self._high = self._lines[-1].end

    def _jump_up(self) -> bool:
        """Skip text above without matches; returns whether one search step found no match."""
        found = self.log.search(self._wanted, self._low, backwards=True)
        self._low = found.line.end if found.line is not None else found.next_offset
        return found.line is None

    def _jump_down(self) -> bool:
        """Skip text below without matches; returns whether one search step found no match."""
        found = self.log.search(self._wanted, self._high)
        self._high = found.line.offset if found.line is not None else found.next_offset
        return found.line is None

    def _read_down(self, want: int, most: int = SLICE_BYTES) -> None:
        """Read lines below until ``want`` more have been added, the end is reached, or ``most`` bytes are read."""
        stop, added = self._high + most, 0
        while added < want and self._high < min(stop, self.log.end):
            if self._only and not self._following and self._jump_down():
                continue
            chunk = self.log.after(self._high, min(self._chunk(want - added), MOST_LINES), SLICE_BYTES)
            if not chunk:
                break
            self._high = chunk[-1].end
            kept = [line for line in chunk if self._passes(line)]
            self._lines += kept
            added += self._count_entries(kept)
        self._forget_above(len(self._lines) - MOST_LINES)

    def _forget_above(self, excess: int) -> None:
        """Discard this many lines, except those on the page and the one above, whose time a fold below may need."""
        if excess > 0 and not self._following:
            above = self._entries[max(0, self._top - 1)].offset
            excess = min(excess, bisect_left(self._lines, above, key=lambda line: line.offset))
        if excess > 0:
            self._low = self._lines[excess].offset
            del self._lines[:excess]

    def _drop_unfinished(self) -> None:
        """Drop the last line if it had no newline yet, so that it is read again."""
        if self._lines and not self._lines[-1].complete and self._lines[-1].end == self._high:
            self._high = self._lines.pop().offset

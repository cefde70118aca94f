"""Where a reader stands in a log: what is on the screen, whether it follows the end, what a search found. No screen."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_console.logs.file import Level, Line, LogFile

LONGEST = 4000
"""Lines kept around the reader."""

SLICE_BYTES = 1024 * 1024
"""What one command reads at most before it lets others have their turn."""

SKIP_BYTES = 128 * 1024
"""A follower who is further behind than this jumps to the end: what scrolled by cannot be read anyway."""

_CHUNK = 200

Filter = Level | None


@dataclass(frozen=True, slots=True)
class Page:
    """What is to be shown. ``new_lines`` counts what came below since the reader left the end."""

    lines: tuple[Line, ...] = ()
    following: bool = True
    new_lines: int = 0
    filter: Filter = None
    wanted: str = ""
    """The text searched for; empty when none."""
    match: int | None = None
    """Offset of the line found last."""
    note: str = ""
    """What came of a search or a read, when there is something to say."""
    busy: bool = False
    """Whether `LogPager.step` has more to do."""


class LogPager:
    """Moves through a `LogFile` on behalf of one reader. Every method reads a bounded amount and returns a `Page`.

    Kept is a window of lines that pass the filter, read without gaps from ``_low`` to ``_high``. While following,
    the page is its end; else ``_top`` is the first line shown, and stays the same line however the log grows.
    """

    def __init__(self, log: LogFile, rows: int = 24) -> None:
        self.log = log
        self._rows = max(1, rows)
        self._filter: Filter = None
        self._lines: list[Line] = []
        self._low = self._high = 0
        self._top = 0
        self._following = True
        self._counted = self._new = 0
        self._epoch = log.epoch
        self._owed = 0
        """Rows still to scroll once more lines are found: negative upwards."""
        self._wanted = ""
        self._match: int | None = None
        self._search_at: int | None = None
        self._backwards = False
        self._note = ""
        self._to_end()

    def page(self) -> Page:
        """What is to be shown now."""
        first = max(0, len(self._lines) - self._rows) if self._following else self._top
        return Page(
            lines=tuple(self._lines[first : first + self._rows]),
            following=self._following,
            new_lines=self._new,
            filter=self._filter,
            wanted=self._wanted,
            match=self._match,
            note=self.log.problem or self._note,
            busy=bool(self._owed) or self._search_at is not None or self._lacks_lines(),
        )

    def resize(self, rows: int) -> Page:
        """The screen has so many rows now."""
        self._rows = max(1, rows)
        return self.step()

    def tick(self) -> Page:
        """Look what came."""
        end = self.log.refresh()
        if self.log.epoch != self._epoch:
            self._epoch = self.log.epoch
            self._match = None
            self._note = "the log was emptied"
            self._to_end()
        elif self._following:
            self._drop_unfinished()
            if end - self._high > SKIP_BYTES:
                self._to_end()
            else:
                self._read_down(len(self._lines) + LONGEST)
        else:
            more, self._counted = self.log.count(self._counted, end)
            self._new += more
        return self.step()

    def step(self) -> Page:
        """Go on with what the last command left over: lines to scroll, a search, a page not yet full."""
        if self._search_at is not None:
            self._search_step()
        elif self._owed:
            owed, self._owed = self._owed, 0
            self._move(owed)
        elif self._lacks_lines():
            self._read_up(self._rows)
        return self.page()

    def scroll(self, rows: int) -> Page:
        """Scroll down, or up when negative; arriving at the end follows it again."""
        self._note = ""
        self._move(self._owed + rows)
        return self.page()

    def home(self) -> Page:
        """Go to the oldest line."""
        self._pause()
        self._start_at(self.log.start)
        return self.page()

    def end(self) -> Page:
        """Go to the newest line and follow."""
        self._note = ""
        self._owed = 0
        self._search_at = None
        self.log.refresh()
        self._to_end()
        return self.page()

    def hold(self) -> Page:
        """Stop following where the reader is."""
        self._pause()
        return self.page()

    def set_filter(self, level: Filter) -> Page:
        """Show only lines of at least this level; None shows all."""
        anchor = self._lines[self._top].offset if self._lines and not self._following else None
        self._filter = level
        if anchor is None:
            self._to_end()
        else:
            self._start_at(anchor)
        return self.page()

    def find(self, text: str, backwards: bool = True) -> Page:
        """Search from the reader's place; an empty text ends the search. Goes on in `step`."""
        self._wanted, self._match, self._note = text, None, ""
        self._search_at = None
        if text:
            edge = self.page().lines
            here = (edge[-1].end if backwards else edge[0].offset) if edge else self.log.end
            self._begin_search(here, backwards)
        return self.page()

    def find_next(self, backwards: bool) -> Page:
        """The next match of the same text in this direction."""
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
        if found.line is not None and self._passes(found.line):
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
            self._note = f"searching … at {share:.0%} of the log, esc stops"

    def _show_match(self, line: Line) -> None:
        shown = self.page().lines
        self._pause()
        if any(other.offset == line.offset for other in shown):
            return
        self._start_at(line.offset)
        self._move(-min(self._rows // 3, 8))
        self._owed = 0

    def _move(self, rows: int) -> None:
        if rows < 0:
            self._pause()
            if self._top + rows < 0:
                self._read_up(self._rows - self._top - rows)
            moved = max(0, self._top + rows)
            self._owed = self._top + rows if self._top + rows < 0 and self._low > self.log.start else 0
            self._top = moved
        elif not self._following:
            if self._top + rows + self._rows > len(self._lines):
                self.log.refresh()
                self._drop_unfinished()
                self._read_down(self._top + rows + self._rows + 1)
            bottom = max(0, len(self._lines) - self._rows)
            if self._top + rows >= bottom and self._high >= self.log.end:
                self._to_end()
            else:
                self._owed = max(0, self._top + rows - bottom) if rows > 1 else 0
                self._top = min(self._top + rows, bottom)

    def _pause(self) -> None:
        if self._following:
            self._top = max(0, len(self._lines) - self._rows)
            self._following = False
            self._counted, self._new = self._high, 0

    def _to_end(self) -> None:
        self._following, self._new, self._owed = True, 0, 0
        self._lines, self._top = [], 0
        self._low = self._high = self.log.end
        self._read_up(self._rows)

    def _start_at(self, offset: int) -> None:
        self._lines, self._top, self._owed = [], 0, 0
        self._low = self._high = offset
        self._read_down(self._rows)

    def _lacks_lines(self) -> bool:
        """Whether the page is not full though there is more to read above."""
        return len(self._lines) < self._rows and self._low > self.log.start and self._following

    def _passes(self, line: Line) -> bool:
        return self._filter is None or (line.level is not None and line.level >= self._filter)

    def _read_up(self, want: int) -> None:
        """Read lines above until ``want`` more are there, the start is reached, or a slice is used up."""
        stop, added = self._low - SLICE_BYTES, 0
        while added < want and self._low > max(stop, self.log.start):
            chunk = self.log.before(self._low, _CHUNK if self._filter else max(want - added, 1), SLICE_BYTES)
            if not chunk:
                self._low = self.log.start
                break
            self._low = chunk[0].offset
            kept = [line for line in chunk if self._passes(line)]
            self._lines[:0] = kept
            added += len(kept)
        if not self._following:
            self._top += added
        if len(self._lines) > LONGEST and not self._following:
            del self._lines[max(LONGEST, self._top + self._rows) :]
            self._high = self._lines[-1].end

    def _read_down(self, until: int) -> None:
        """Read lines below until there are ``until`` in all, the end is reached, or a slice is used up."""
        stop = self._high + SLICE_BYTES
        while len(self._lines) < until and self._high < min(stop, self.log.end):
            chunk = self.log.after(self._high, min(until - len(self._lines), LONGEST), SLICE_BYTES)
            if not chunk:
                break
            self._high = chunk[-1].end
            self._lines += [line for line in chunk if self._passes(line)]
        excess = len(self._lines) - LONGEST
        cut = excess if self._following else min(excess, self._top)
        if cut > 0:
            self._low = self._lines[cut].offset
            del self._lines[:cut]
            self._top = max(0, self._top - cut)

    def _drop_unfinished(self) -> None:
        """Read the last line again if it had no newline yet."""
        if self._lines and not self._lines[-1].complete and self._lines[-1].end == self._high:
            self._high = self._lines.pop().offset

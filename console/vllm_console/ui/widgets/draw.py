"""Pure drawing helpers: text fitted to cells, rules, bars, keys. Nothing here depends on widgets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from rich.cells import chop_cells, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from vllm_console.text import plain
from vllm_console.ui.terminal.lines import BLANK, cells, clickable, line
from vllm_console.ui.theme import ACCENT, DIM, KEY, STRONG

Part = str | tuple[str, Style | None]

_EIGHTHS = " ▏▎▍▌▋▊▉█"

LEAST_TEXT = 10
"""Minimum cells for a line of text, however narrow the screen is."""


def fit(text: str, width: int, align: str = "<") -> str:
    """``text`` in exactly ``width`` cells, padded or cut with an ellipsis. ``align`` is ``<`` or ``>``."""
    if width <= 0:
        return ""
    length = cells(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…"
    return text + " " * (width - length) if align == "<" else " " * (width - length) + text


def parts_length(parts: Sequence[Part]) -> int:
    """The number of cells that these parts take."""
    return sum([cells(part if isinstance(part, str) else part[0]) for part in parts])


_CLAUSE_ENDS = re.compile(r" · |, |: |; | \(")
"""Where a line of figures may be cut."""


def whole_clauses(strip: Strip, width: int) -> Strip:
    """A line of figures in at most ``width`` cells, dropping whole clauses that don't fit.

    If not even the first clause fits, cut it between words with an ellipsis. A figure is never cut in the middle, where
    it would read as a different one.
    """
    if strip.cell_length <= width:
        return strip
    text = strip.text
    ends = [cells(text[: at.start()]) for at in _CLAUSE_ENDS.finditer(text) if text[: at.start()].strip()]
    if fitting := [end for end in ends if end <= width]:
        return strip.crop(0, fitting[-1])
    words = [cells(text[: at.start()]) for at in re.finditer(r"(?<=\S) ", text)]
    end = max((end for end in words if end < width), default=0)
    return Strip.join([strip.crop(0, end), line(("…", DIM))]) if width > 0 else BLANK


@lru_cache(maxsize=128)
def wrapped(text: str, width: int, most: int | None = None) -> tuple[str, ...]:
    """Like `wrap`, for texts that are drawn repeatedly."""
    return wrap(text, width, most)


_WORDS = re.compile(r"[^ \t\n\r\f\v]+")
"""A word; a no-break space is part of it. White space is not matched, so that a long run of it is read only once."""


def wrap(text: str, width: int, most: int | None = None) -> tuple[str, ...]:
    """Wrap text to ``width`` cells, between words; words wider than a row are broken, as in Chinese or a long path.

    The last of ``most`` rows ends with `` …`` if text is left out. Indentation of the first row is kept.
    """
    rows: list[str] = []
    row, end, text = "", 0, text.expandtabs()
    for found in _WORDS.finditer(text):
        space, word, end = found.start() - end, found[0], found.end()
        rest = row + " " * space + word if row or not rows else word
        if cells(rest) > width and (cells(word) <= width or cells(row) + space >= width):
            rows += [row] if row else []
            rest = word
        *full, row = [rest] if cells(rest) <= width else chop_cells(rest, width)
        rows += full
    rows += [row] if row else []
    return tuple(rows) if most is None or len(rows) <= most else (*rows[: most - 1], _continued(rows[most - 1], width))


def _continued(row: str, width: int) -> str:
    """A row with `` …`` after its last whole word that leaves room; a word of wide characters may be cut, too."""
    kept = row
    while kept and cells(kept) > width - 2 and cells(kept[-1]) < 2:
        kept = kept.rpartition(" ")[0].rstrip()
    if kept and cells(kept) <= width - 2:
        return f"{kept} …"
    return set_cell_size(kept or row, width - 1) + "…"


def fit_words(text: str, width: int) -> str:
    """``text`` in at most ``width`` cells, cut between words with `` …``."""
    if cells(text) <= width:
        return text
    row = next(iter(wrapped(text, width, 1)), "") if width > LEAST_TEXT else text
    return fit(row, min(width, cells(row)))


def paragraph(
    text: str,
    width: int,
    style: Style | None = None,
    indent: str = " ",
    *,
    first: Sequence[Part] = (),
    most: int | None = None,
) -> list[Strip]:
    """Wrap text to ``width`` cells, as `wrapped` does; ``first`` replaces the ``indent`` of the first line."""
    rows = wrapped(plain(text), max(LEAST_TEXT, width - len(indent)), most)
    lines = [line((indent + row, style)) for row in rows]
    return [line(*first, (rows[0], style)), *lines[1:]] if first and rows else lines


def cut_rows(rows: Sequence[Strip], most: int, width: int) -> list[Strip]:
    """The first ``most`` rows; the last one ends with `` …`` if rows are left out."""
    if len(rows) <= most:
        return list(rows)
    last = rows[most - 1]
    return [*rows[: most - 1], Strip.join([last.crop(0, min(last.cell_length, width - 3)), line((" …", DIM))])]


def rule(
    title: str, width: int, right: Sequence[Part] = (), *shorter: Sequence[Part], style: Style = STRONG, key: str = ""
) -> Strip:
    """A pane's top line: ``── key title ─────── right ──``. The title takes precedence over ``right``.

    If ``right`` does not fit, the first of ``shorter`` that fits takes its place.
    """
    key += " " if key else ""
    title = fit(title, max(0, min(cells(title), width - 4 - len(key))))
    room = width - cells(title) - len(key) - 5
    right = next((one for one in (right, *shorter) if parts_length(one) + 3 < room), ())
    tail: list[Part] = []
    if right:
        length = parts_length(right)
        tail = [" ", *right, " ", ("─", DIM)]
        room -= length + 3
    return line(("─ ", DIM), (key, KEY), (title, style), (" " + "─" * max(0, room + 2), DIM), *tail)


def title_bar(title: str, width: int, right: Sequence[Part] = ()) -> Strip:
    """The top line of a screen with framed views: its title, and ``right`` if there is room."""
    room = width - cells(title) - 2 - parts_length(right)
    return line(" ", (title, STRONG), *((" " * room, *right) if room > 0 else ()))


class TextFrame:
    """Puts lines into a frame. A line that is the same object as before keeps its row, so the row is not redrawn."""

    def __init__(self) -> None:
        self._shape: tuple[int, int, Style] | None = None
        self._rows: list[tuple[Strip, Strip]] = []
        """Each line and the row made from it."""
        self._bottom = BLANK

    def around(self, lines: Sequence[Strip], width: int, height: int, style: Style = DIM) -> list[Strip]:
        """Lines in a frame of ``width`` by ``height`` cells; the first line, a `rule`, becomes the top of the frame."""
        if width < 2 or height < 2:
            return list(lines[:height])
        if self._shape != (width, height, style):
            self._shape, self._rows = (width, height, style), []
            self._bottom = Strip([Segment(f"╰{'─' * (width - 2)}╯", style)])
        rows = []
        for at in range(height - 1):
            strip = lines[at] if at < len(lines) else BLANK
            if at < len(self._rows) and self._rows[at][0] is strip:
                rows.append(self._rows[at])
            else:
                rows.append((strip, _side_row(strip, width, style) if at else _top_row(strip, width, style)))
        self._rows = rows
        return [*[row for _, row in rows], self._bottom]


def _top_row(title: Strip, width: int, style: Style) -> Strip:
    title = title if title is not BLANK else rule("", width - 2)
    top = [Segment(text, style) if at == DIM and text.strip(" ─") == "" else Segment(text, at) for text, at, _ in title]
    return Strip([Segment("╭", style), *Strip(top).adjust_cell_length(width - 2), Segment("╮", style)], width)


def _side_row(strip: Strip, width: int, style: Style) -> Strip:
    side, room = Segment("│", style), width - 2 - strip.cell_length
    if room < 0:
        return Strip([side, *strip.adjust_cell_length(width - 2), side], width)
    blank = [Segment(" " * room, None)] if room else []
    return Strip([side, *strip, *blank, side], width)


def bar(share: float | None, width: int) -> str:
    """A horizontal bar of a share from 0 to 1, in eighths of a cell, blank-padded to ``width``."""
    if share is None or width <= 0:
        return " " * max(0, width)
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return fit("█" * full + (_EIGHTHS[rest] if rest else ""), width)


def progress_line(share: float, width: int) -> str:
    """A thin progress line: ``━━━━────``."""
    done = round(min(1.0, max(0.0, share)) * width)
    return "━" * done + "─" * (width - done)


def beside(left: Strip, left_width: int, right: Strip) -> Strip:
    """Two strips side by side, the left one in ``left_width`` cells."""
    return Strip([*left.adjust_cell_length(left_width), *right])


def side_by_side(blocks: Sequence[Sequence[Strip]], width: int, height: int) -> list[Strip]:
    """Blocks of lines in columns of ``width`` cells, separated by a blank cell; ``height`` lines in total."""
    lines = []
    for row in range(height):
        joined = line()
        for place, strips in enumerate(blocks):
            strip = strips[row] if row < len(strips) else line()
            joined = beside(joined, place * (width + 1), strip) if place else strip
        lines.append(joined)
    return lines


def shares(total: int, count: int) -> list[int]:
    """Split ``total`` cells into ``count`` parts that differ by at most one."""
    return [total // count + (1 if index < total % count else 0) for index in range(count)]


KeyHint = tuple[str, str] | tuple[str, str, str]
"""A key, a word for what it does, and the action that a click on it runs. A hint for two keys, such as ``[ ]``, has two
actions separated by ``|``."""


def keys_line(pairs: Sequence[KeyHint], width: int, tail: Sequence[KeyHint] = ()) -> Strip:
    """Keys and what they do on one line: all of ``tail``, and as many of ``pairs`` as fit before it."""
    return _keys_line(tuple(pairs), width, tuple(tail))


@lru_cache(maxsize=32)
def _keys_line(pairs: tuple[KeyHint, ...], width: int, tail: tuple[KeyHint, ...]) -> Strip:
    end = [segment for pair in tail for segment in _key(pair)]
    room = width - sum(cells(segment.text) for segment in end)
    parts: list[Segment] = []
    for pair in pairs:
        segments = _key(pair)
        length = sum(cells(segment.text) for segment in segments)
        if length > room:
            break
        room -= length
        parts.extend(segments)
    return Strip([*parts, *end])


def _key(hint: KeyHint) -> list[Segment]:
    key, text, *actions = hint
    if not actions or not actions[0]:
        return [Segment(" "), Segment(key, ACCENT), Segment(f" {text} ")]
    first, _, second = actions[0].partition("|")
    if not second:
        return [
            Segment(" "),
            Segment(key, clickable(first, ACCENT)),
            Segment(f" {text}", clickable(first)),
            Segment(" "),
        ]
    one, _, other = key.partition(" ")
    return [
        Segment(" "),
        Segment(one, clickable(first, ACCENT)),
        Segment(" "),
        Segment(other, clickable(second, ACCENT)),
        Segment(f" {text} "),
    ]

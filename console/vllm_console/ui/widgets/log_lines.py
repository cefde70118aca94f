"""How a log's lines look: colours by level, matches marked, wrapped or cut. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from vllm_console.logs.file import Level, Line, compile_pattern
from vllm_console.ui.theme import CURSOR, DIM, WARN

ERROR = Style(color="red")
MATCH = Style(color="black", bgcolor="yellow")
PLAIN = Style()

_PREFIX = re.compile(r"(?:\([\w.-]+ pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] )?|[A-Z]+: +)")


def styled(line: Line, wanted: str, current: bool) -> Strip:
    """One line, as wide as it is. ``wanted`` is marked wherever it stands; ``current`` marks the whole line."""
    text = line.text
    base = CURSOR if current else {Level.ERROR: ERROR, Level.WARNING: WARN, Level.DEBUG: DIM}.get(line.level, PLAIN)  # type: ignore[arg-type]
    prefix = _PREFIX.match(text) if line.level is Level.INFO and not current else None
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


def log_strips(
    lines: Sequence[Line],
    width: int,
    height: int,
    *,
    wanted: str = "",
    match: int | None = None,
    left: int = 0,
    wrap: bool = False,
    from_end: bool = True,
) -> list[Strip]:
    """The rows of a page. ``left`` cells are scrolled out of sight; wrapped rows that don't fit are left out above
    when ``from_end`` is true, else below."""
    rows: list[Strip] = []
    for line in lines:
        strip = styled(line, wanted, line.offset == match)
        length = strip.cell_length
        if not wrap:
            rows.append(strip.crop(left, left + width) if left or length > width else strip)
            continue
        rows += [strip.crop(at, at + width) for at in range(0, max(length, 1), width)]
    return rows[-height:] if from_end else rows[:height]

"""Fold runs of access lines: ``200 OK ×14/s (143 in 10s) POST /v1/completions`` instead of 143 lines. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache

import msgspec

from vllm_console.logs.file import Line, LogLevel
from vllm_console.logs.prefix import PROCESSES
from vllm_console.logs.times import stamp_of
from vllm_console.text import duration
from vllm_launchers.patterns import lazy_pattern

STAMP_LINES = 20
"""How many lines above a run are searched for its start time."""

MOST_REQUESTS = 3
"""Maximum number of request kinds that are named."""

_CLIENT = lazy_pattern(PROCESSES + r"INFO: +\S+")
_REQUEST = lazy_pattern(r"(?P<method>[A-Z]+) (?P<path>[^\s?\"]*)[^\"]*\" (?P<status>\d{3}(?: [A-Za-z' -]+)?)\s*")


class AccessLine(msgspec.Struct, frozen=True):
    """An access line's content: the status (``200 OK``) and the request (``GET /health``)."""

    status: str
    request: str


class _Fold:
    """Access lines of one status within a run, newest first."""

    def __init__(self, line: Line) -> None:
        self.newest = self.oldest = line
        self.count = 0
        self.requests: Counter[str] = Counter()

    def add(self, line: Line, request: str) -> None:
        """Add one more line above those so far."""
        self.oldest = line
        self.count += 1
        self.requests[request] += 1


@lru_cache(maxsize=1024)
def parse_access_line(text: str) -> AccessLine | None:
    """Parse an access line; None for any other line."""
    client, between, request = text.partition(' - "')
    if not between or _CLIENT.fullmatch(client) is None:
        return None
    return _request(request)


@lru_cache(maxsize=512)
def _request(text: str) -> AccessLine | None:
    """Parse what follows the client's address; cached, because a busy server repeats the same few requests."""
    found = _REQUEST.fullmatch(text)
    if found is None:
        return None
    return AccessLine(found["status"].strip(), f"{found['method']} {found['path']}")


def fold(lines: Sequence[Line], *, whole: bool, above: int = 0) -> list[Line]:
    """These lines from ``above`` on, with runs of access lines folded into a row per status.

    ``whole`` means that nothing is above the first line; otherwise a run that begins there is counted as "or more".
    """
    shown: list[Line] = []  # newest first
    run: dict[str, _Fold] = {}
    after: datetime | None = None
    for index in range(len(lines) - 1, above - 1, -1):
        line = lines[index]
        access = parse_access_line(line.text)
        if access is not None:
            run.setdefault(access.status, _Fold(line)).add(line, access.request)
            continue
        if run:
            shown += _rows(run, _stamp_above(lines, index), after)
            run = {}
        after = stamp_of(line.text) or after
        shown.append(line)
    before = _stamp_above(lines, above - 1) if above else None
    shown += _rows(run, before, after, "" if whole or above else "+")
    return shown[::-1]


class Folding:
    """Folds a moving window of lines repeatedly, processing each line about once.

    Rows between two lines with a time that are not access lines do not depend on anything above or below them.
    """

    def __init__(self) -> None:
        self._rows: list[Line] = []
        """Rows down to the newest line with a time."""
        self._of: tuple[int, int, bool] | None = None
        """The file's epoch, the offset where the window began, and whether the log begins there."""
        self._end = 0
        """Where that newest line ends."""

    def fold(self, lines: Sequence[Line], epoch: int, *, whole: bool) -> list[Line]:
        """Like the function `fold`. ``epoch`` changes with the file's content."""
        count = _above_newest_run(lines)
        if not count:
            self._of = None
            return fold(lines, whole=whole)
        of = (epoch, lines[0].offset, whole)
        if not (self._drop_above(lines, of) and self._add_below(lines, count, whole=whole)):
            self._rows = fold(lines[:count], whole=whole)
        self._of, self._end = of, lines[count - 1].end
        return self._rows + fold(lines, whole=whole, above=count)

    def _drop_above(self, lines: Sequence[Line], of: tuple[int, int, bool]) -> bool:
        """Drop the rows of lines that left the window; return whether the rows can be kept."""
        if self._of is None or of[0] != self._of[0] or of[1] < self._of[1]:
            return False
        if of == self._of:
            return True
        first = next(at for at, line in enumerate(lines) if _has_time(line))
        if lines[first].end > self._end:
            return False
        below = bisect_right(self._rows, lines[first].offset, key=lambda row: row.offset)
        self._rows = fold(lines[: first + 1], whole=of[2]) + self._rows[below:]
        return True

    def _add_below(self, lines: Sequence[Line], count: int, *, whole: bool) -> bool:
        """Add the rows down to the newest line with a time; return whether they continue the known rows."""
        known = bisect_left(lines, self._end, key=lambda line: line.end) + 1
        if known > count or lines[known - 1].end != self._end:
            return False
        if known < count:
            self._rows += fold(lines[:count], whole=whole, above=known)
        return True


def _has_time(line: Line) -> bool:
    """Whether the line has a time and is not an access line."""
    return parse_access_line(line.text) is None and stamp_of(line.text) is not None


def _above_newest_run(lines: Sequence[Line]) -> int:
    """Number of lines up to the newest one with a time that is not an access line; 0 without one."""
    return next((count for count in range(len(lines), 0, -1) if _has_time(lines[count - 1])), 0)


def _stamp_above(lines: Sequence[Line], index: int) -> datetime | None:
    """The time of the line at ``index``, or of one of a few above it: some startup lines have none."""
    near = lines[max(0, index - STAMP_LINES) : index + 1]
    return next((stamp for line in reversed(near) if (stamp := stamp_of(line.text)) is not None), None)


def _rows(run: dict[str, _Fold], before: datetime | None, after: datetime | None, more: str = "") -> list[Line]:
    """A run's rows, newest first. ``before`` and ``after`` are the times of the surrounding lines."""
    rows = []
    for status, folded in sorted(run.items(), key=lambda item: -item[1].newest.offset):
        if folded.count == 1 and not more:
            rows.append(folded.newest)
            continue
        level = {"4": LogLevel.WARNING, "5": LogLevel.ERROR}.get(status[0], LogLevel.INFO)
        text = f"{status} ×{_often(folded.count, before, after, more)}  {_requests(folded.requests)}"
        rows.append(Line(folded.oldest.offset, folded.newest.end, text, level))
    return rows


def _often(count: int, before: datetime | None, after: datetime | None, more: str) -> str:
    """``14/s (143 in 10s)``; without the surrounding times, the count and since when."""
    if before is not None and after is not None and (seconds := (after - before).total_seconds()) > 0:
        rate = count / seconds
        if rate >= 1:
            return f"{rate:.0f}/s ({count:,} in {duration(seconds)})"
        return f"{count:,} in {duration(seconds)}"
    since = f" since {before:%H:%M:%S}" if before is not None else ""
    return f"{count:,}{more}{since}"


def _requests(requests: Counter[str]) -> str:
    if len(requests) == 1:
        return next(iter(requests))
    named = [f"{request} {number:,}" for request, number in requests.most_common(MOST_REQUESTS)]
    left = len(requests) - len(named)
    return ", ".join([*named, *([f"{left} more"] if left else [])])

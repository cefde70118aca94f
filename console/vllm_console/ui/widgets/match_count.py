"""How many lines of a log match a search, and which of them one is. Counted in steps; no screen."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable

from vllm_console.logs.file import Line, LogFile

MOST_MATCHES = 100_000
"""More matches than these are not counted."""


class MatchCount:
    """Counts the lines of ``log`` that hold ``text`` and ``passes``; goes on when the log has grown."""

    def __init__(self, log: LogFile, text: str, passes: Callable[[Line], bool]) -> None:
        self._log, self._text, self._passes = log, text, passes
        self._offsets = array("q")
        self._at = log.start
        self._stuck_at = -1
        """The log's end when a step found nothing to read: its last line is not finished."""

    @property
    def total(self) -> int:
        """How many were found so far."""
        return len(self._offsets)

    @property
    def full(self) -> bool:
        """Whether there may be more than are counted."""
        return len(self._offsets) >= MOST_MATCHES

    @property
    def done(self) -> bool:
        """Whether all that is written so far is counted."""
        return self.full or self._at >= self._log.end or self._stuck_at == self._log.end

    def step(self) -> None:
        """Count some more."""
        found, after = self._log.matches(self._text, self._at)
        self._offsets.extend(line.offset for line in found if self._passes(line))
        self._stuck_at = self._log.end if after == self._at else -1
        self._at = after

    def number_of(self, offset: int | None) -> int | None:
        """Which match the line at this offset is, from 1; None where it is none, or is not counted yet."""
        if offset is None:
            return None
        index = bisect_right(self._offsets, offset)
        return index if index and self._offsets[index - 1] == offset else None

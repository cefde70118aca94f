"""How many rows the servers table gets. Pure."""

from __future__ import annotations

SHRINK_SECONDS = 60.0
"""The table shrinks after it has needed fewer rows for this long, so that a restart moves nothing."""


class TableHeight:
    """Grows at once, and shrinks after `SHRINK_SECONDS`, or to what is needed after `reset`."""

    def __init__(self) -> None:
        self._rows = 0
        self._fewer_since: float | None = None
        self._most_since = 0

    def reset(self) -> None:
        """Start anew: everything else moves, too."""
        self._rows, self._fewer_since = 0, None

    def rows(self, needed: int, now: float) -> int:
        """The table's rows at ``now`` (Unix seconds) if it needs ``needed``."""
        if needed >= self._rows:
            self._rows, self._fewer_since = needed, None
        elif self._fewer_since is None:
            self._fewer_since, self._most_since = now, needed
        else:
            self._most_since = max(self._most_since, needed)
            if now - self._fewer_since >= SHRINK_SECONDS:
                self._rows, self._fewer_since = self._most_since, None
        return self._rows

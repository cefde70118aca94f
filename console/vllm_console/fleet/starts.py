"""Has what starts tell remembered, their memory and their stages, once for each start."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import ServerRecord, State


class Starts:
    """Looks which servers have become ready. ``since`` (Unix seconds): earlier ones have been remembered already."""

    def __init__(self, state: Path, since: float) -> None:
        self._state, self._since = state, since
        self._seen: set[tuple[str, int, int]] = set()

    def look(self, records: Iterable[ServerRecord]) -> None:
        """Take note of each that is ready and was not seen so before."""
        for record in records:
            ready_at = record.current.ready_at
            key = (record.name, record.current.number, record.attempt)
            if record.state is not State.READY or ready_at is None or ready_at < self._since or key in self._seen:
                continue
            self._seen.add(key)
            # Seldom needed:
            from vllm_console.fleet.remembering import remember_start, remember_times, report_book, times_book

            folder = client.folder(self._state, record.name)
            remember_start(report_book(self._state), folder, record)
            remember_times(times_book(self._state), folder, record)

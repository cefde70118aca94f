"""What the recorder writes of a run into the ledger: its minutes, also when no console is open."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllm_console.telemetry.ledger_file import LedgerError, write
from vllm_console.telemetry.model import Sample
from vllm_console.telemetry.run_windows import FIGURES, WINDOW_SECONDS, RunWindow, Windows

_WAITING_AT_MOST = 1440
_THIN_EVERY = 60

MOST_WINDOWS = 200_000
"""Windows kept in all, some 60 MB; from then on the oldest runs are thinned."""

FEWEST_KEPT = 240
"""Windows that thinning leaves of a run."""

MOST_RUNS = 5000


@dataclass(frozen=True, slots=True)
class RunName:
    """Which run: the ``key`` that its launch was given, its server and generation."""

    key: str
    server: str
    generation: int


class RunLog:
    """Sums up samples in windows and stores each. Nothing that happens to the disk is raised: windows wait in memory
    (a day of them), ``trouble`` says why in a sentence, and with the next window it is tried again. ``notice`` tells of
    a damaged file that was set aside.
    """

    def __init__(self, path: Path, run: RunName, seconds: float = WINDOW_SECONDS) -> None:
        self.trouble = ""
        self.notice = ""
        self._path, self._run = path, run
        self._windows = Windows(seconds)
        self._waiting: deque[RunWindow] = deque(maxlen=_WAITING_AT_MOST)
        self._stored = 0

    def append(self, sample: Sample) -> None:
        """Take in the next look."""
        window = self._windows.append(sample)
        if window is not None:
            self._waiting.append(window)
            self.flush()

    def flush(self) -> None:
        """Store what waits."""
        if not self._waiting:
            return
        try:
            self.notice = write(self._path, self._store) or self.notice
        except LedgerError as error:
            self.trouble = str(error)
            return
        self._stored += len(self._waiting)
        self._waiting.clear()
        self.trouble = ""

    def _store(self, connection: sqlite3.Connection) -> None:
        run = run_id(connection, self._run, self._waiting[0].at)
        store_windows(connection, run, self._waiting)
        if self._stored % _THIN_EVERY == 0:
            thin(connection)


def run_id(connection: sqlite3.Connection, run: RunName, at: float) -> int:
    """The number of a run; one that no console has entered yet gets its row, begun at ``at`` as far as is known."""
    known = connection.execute("SELECT id FROM runs WHERE key = ?", (run.key,)).fetchone()
    if known is not None:
        return int(known[0])
    row = (run.key, run.server, run.generation, at)
    insert = "INSERT INTO runs (key, server, generation, started_at, document) VALUES (?, ?, ?, ?, '{}')"
    return connection.execute(insert, row).lastrowid or 0


def store_windows(connection: sqlite3.Connection, run: int, windows: Iterable[RunWindow]) -> None:
    """Store windows of a run."""
    marks = ", ".join("?" * (len(FIGURES) + 3))
    rows = [(run, window.at, window.seconds, *map(window.figures.get, FIGURES)) for window in windows]
    names = ", ".join(("run", "at", "seconds", *FIGURES))
    connection.executemany(f"INSERT OR REPLACE INTO windows ({names}) VALUES ({marks})", rows)


def thin(connection: sqlite3.Connection) -> None:
    """Keep within bounds: the oldest runs keep `FEWEST_KEPT` windows, evenly spread, then none; then they are dropped.

    A thinned run is still good for a comparison, which needs windows and not all of them.
    """
    _drop_oldest_runs(connection)
    total = int(connection.execute("SELECT count(*) FROM windows").fetchone()[0])
    if total <= MOST_WINDOWS:
        return
    wanted = int(MOST_WINDOWS * 0.9)
    query = (
        "SELECT run, count(*) FROM windows JOIN runs ON runs.id = run GROUP BY run ORDER BY runs.started_at, runs.id"
    )
    for keep in (FEWEST_KEPT, 0):
        for run, count in connection.execute(query).fetchall():
            if total <= wanted:
                return
            if count > keep:
                connection.execute(
                    "DELETE FROM windows WHERE run = ? AND at IN (SELECT at FROM (SELECT at, row_number() OVER"
                    " (ORDER BY at DESC) - 1 AS place FROM windows WHERE run = ?) WHERE ? = 0 OR place % ? != 0)",
                    (run, run, keep, -(-count // max(keep, 1))),
                )
                left = connection.execute("SELECT count(*) FROM windows WHERE run = ?", (run,)).fetchone()[0]
                total -= count - int(left)


def _drop_oldest_runs(connection: sqlite3.Connection) -> None:
    old = "SELECT id FROM runs ORDER BY started_at DESC, id DESC LIMIT -1 OFFSET ?"
    if not connection.execute(old, (MOST_RUNS,)).fetchone():
        return
    for table, column in (("windows", "run"), ("conditions", "run"), ("runs", "id")):
        connection.execute(f"DELETE FROM {table} WHERE {column} IN ({old})", (MOST_RUNS,))

"""A server's history on disk: written by its recorder, read by any console, bounded in size.

Counters are totals, so a coarser row is simply the last one of its step; gauges keep the highest of the step, so that a
short peak is still seen. The generation is stored with each row: a restart is a boundary that can be seen.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_console.telemetry.encoding import (
    Base,
    EncodingError,
    decode_base,
    decode_row,
    encode_base,
    encode_row,
    numbers_of,
    shape_of,
)
from vllm_console.telemetry.history_file import (
    NUMBERS_LIMIT,
    TIERS,
    Entry,
    HistoryBusyError,
    HistoryCorruptError,
    HistoryError,
    HistoryForeignError,
    HistoryMissingError,
    HistoryVersionError,
    Tier,
    explained,
    move_aside,
    open_for_reading,
    open_for_writing,
    reduced,
    with_highest,
)
from vllm_console.telemetry.model import Sample

_Answer = TypeVar("_Answer")

RETRY_SECONDS = 5.0
_PRUNE_EVERY = 60
_TIDY_EVERY = 1800
_ROWS_PER_BASE = 60
_BASES_KNOWN = 64


class _Waiting(NamedTuple):
    """A row that is not on disk yet."""

    tier: int
    at: float
    generation: int
    base: Base
    data: bytes


class Writer:
    """Appends samples to a history file. One at a time per file: the recorder holds a lock for that.

    Nothing that happens to the disk is raised by `append`: rows wait in memory (an hour of them), ``trouble`` says why
    in a sentence, and every few seconds it is tried again. A file that is damaged, foreign or of a newer version is
    moved aside and a new one begun; ``notice`` says so.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""
        self.notice = ""
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._sequence = 0
        self._bases: dict[int, Base] = {}
        self._waiting: deque[_Waiting] = deque(maxlen=4000)
        self._steps: dict[int, tuple[int, int, Sample]] = {}
        self._tried_at = float("-inf")
        self._appended = 0
        self._flush(float("inf"))

    def append(self, sample: Sample, generation: int = 1) -> None:
        """Store a sample; others can see it when this returns, unless there is ``trouble``."""
        for tier in range(1, len(TIERS)):
            self._accumulate(tier, sample, generation)  # first, so that a step's row is older than the next step's rows
        self._wait(0, sample, generation)
        self._appended += 1
        self._flush(sample.at)

    def close(self) -> None:
        """Store what is left of the coarser steps too, and let go of the file."""
        for tier, (_, generation, sample) in sorted(self._steps.items()):
            self._wait(tier, sample, generation)
        self._steps.clear()
        self._flush(float("inf"))
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _wait(self, tier: int, sample: Sample, generation: int) -> None:
        numbers = numbers_of(sample)
        if len(numbers) > NUMBERS_LIMIT:
            sample = reduced(sample)
            numbers = numbers_of(sample)
        shape = shape_of(sample)
        base = self._bases.get(tier)
        if base is None or base.rows >= _ROWS_PER_BASE or base.shape != shape:
            base = self._bases[tier] = Base(shape, numbers)
        base.rows += 1
        self._waiting.append(_Waiting(tier, sample.at, generation, base, encode_row(base, numbers)))

    def _accumulate(self, tier: int, sample: Sample, generation: int) -> None:
        step = int(sample.at // TIERS[tier].step)
        known = self._steps.get(tier)
        if known is not None:
            if known[:2] == (step, generation):
                sample = with_highest(sample, known[2])
            else:
                self._wait(tier, known[2], known[1])
        self._steps[tier] = (step, generation, sample)

    def _flush(self, at: float) -> None:
        if self.trouble and 0 <= at - self._tried_at < RETRY_SECONDS:
            return
        self._tried_at = at
        for attempt in (1, 2):
            try:
                self._store()
            except (sqlite3.Error, HistoryError, OSError) as error:
                fault = explained(error, self.path)
                self._disconnect()
                self.trouble = str(fault)
                useless = isinstance(fault, (HistoryCorruptError, HistoryForeignError, HistoryVersionError))
                if attempt == 1 and useless and self._moved_aside():
                    continue
                return
            self.trouble = ""
            return

    def _moved_aside(self) -> bool:
        try:
            aside = move_aside(self.path)
        except OSError:
            return False
        self.notice = f"{self.trouble.split(':')[0]}: it was moved to {aside.name} and a new history begun."
        return True

    def _disconnect(self) -> None:
        for base in (*self._bases.values(), *(row.base for row in self._waiting)):
            base.id = None  # whether it reached the disk is not known: it is stored again
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _store(self) -> None:
        if self._connection is not None and not self._same_file():
            self._disconnect()
        connection = self._connection or self._connect()
        if not self._waiting:
            return
        sequence = self._sequence
        connection.execute("BEGIN IMMEDIATE")
        for row in self._waiting:
            sequence = sequence + 1 if sequence else int(row.at * 1000)
            values = (sequence, row.at, row.generation, self._base_id(connection, row.base), row.data)
            connection.execute(f"INSERT INTO {TIERS[row.tier].table} VALUES (?, ?, ?, ?, ?)", values)
        if self._appended % _PRUNE_EVERY == 0:
            self._prune(connection)
        connection.execute("COMMIT")
        self._sequence = sequence
        self._waiting.clear()

    def _connect(self) -> sqlite3.Connection:
        connection = open_for_writing(self.path)
        self._connection = connection
        self._inode = self.path.stat().st_ino
        tables = " UNION ALL ".join(f"SELECT max(sequence) AS last FROM {tier.table}" for tier in TIERS)
        self._sequence = connection.execute(f"SELECT max(last) FROM ({tables})").fetchone()[0] or 0
        if not self._steps:
            self._resume(connection)
        return connection

    def _resume(self, connection: sqlite3.Connection) -> None:
        """Take up the coarser steps where a recorder that was killed left them."""
        bases: dict[int, Base] = {}
        for index, tier in enumerate(TIERS[1:], start=1):
            last = connection.execute(f"SELECT max(at) FROM {tier.table}").fetchone()[0] or 0.0
            query = f"SELECT * FROM {TIERS[0].table} WHERE at > ? ORDER BY sequence"
            for row in connection.execute(query, (last,)).fetchall():
                try:
                    entry = _entry(connection, bases, row)
                except EncodingError:
                    continue
                self._accumulate(index, entry.sample, entry.generation)

    def _same_file(self) -> bool:
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def _base_id(self, connection: sqlite3.Connection, base: Base) -> int:
        if base.id is None:
            base.id = connection.execute("INSERT INTO bases (data) VALUES (?)", (encode_base(base),)).lastrowid
        return base.id or 0

    def _prune(self, connection: sqlite3.Connection) -> None:
        """Keep each table's last rows. By number, not by time, so that no clock can make the file grow."""
        for tier in TIERS:
            query = f"SELECT count(*), coalesce(sum(length(data)), 0) FROM {tier.table}"
            count, size = connection.execute(query).fetchone()
            keep = tier.rows if size <= tier.bytes else min(tier.rows, int(count * tier.bytes / size))
            connection.execute(
                f"DELETE FROM {tier.table} WHERE sequence <= (SELECT sequence FROM {tier.table}"
                " ORDER BY sequence DESC LIMIT 1 OFFSET ?)",
                (keep,),
            )
        if self._appended % _TIDY_EVERY == 0:
            used = " UNION ".join(f"SELECT base FROM {tier.table}" for tier in TIERS)
            connection.execute(f"DELETE FROM bases WHERE id NOT IN ({used})")


class Reader:
    """Reads a history while it is written. Safe to use from several threads.

    Every method raises a `HistoryError` of the right class when the file cannot be read, never an SQLite error, and
    finds a file that came or was replaced in the meantime.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        self._bases: dict[int, Base] = {}

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._disconnect()

    def latest(self) -> Entry | None:
        """The newest row, or None when there is none."""
        query = f"SELECT * FROM {TIERS[0].table} ORDER BY sequence DESC LIMIT 1"
        rows = self._ask(lambda connection: self._entries(connection, query, ()))
        return rows[0] if rows else None

    def since(self, at: float) -> list[Entry]:
        """Rows by the second newer than ``at`` (Unix seconds), oldest first: at most the last half hour."""
        query = f"SELECT * FROM {TIERS[0].table} WHERE at > ? ORDER BY sequence"
        return self._ask(lambda connection: self._entries(connection, query, (at,)))

    def after(self, sequence: int) -> list[Entry]:
        """Rows by the second that came after the one of that number; right also when the clock was set back."""
        query = f"SELECT * FROM {TIERS[0].table} WHERE sequence > ? ORDER BY sequence"
        return self._ask(lambda connection: self._entries(connection, query, (sequence,)))

    def range(self, start: float, end: float, max_points: int = 1000) -> list[Entry]:
        """Rows from ``start`` to ``end`` (Unix seconds), oldest first, ``max_points`` at most.

        They come from the finest table that reaches back far enough; where there are still too many, each is the last
        of a few, with the highest gauges of them.
        """
        return self._ask(lambda connection: self._range(connection, start, end, max(1, max_points)))

    def _range(self, connection: sqlite3.Connection, start: float, end: float, max_points: int) -> list[Entry]:
        tier = self._tier_for(connection, start, end, max_points)
        between = "WHERE at BETWEEN ? AND ? ORDER BY sequence"
        entries = self._entries(connection, f"SELECT * FROM {tier.table} {between}", (start, end))
        if tier is not TIERS[0]:
            # The coarser step of just now is not written yet: its rows by the second stand for it.
            last = entries[-1].sequence if entries else 0
            query = f"SELECT * FROM {TIERS[0].table} WHERE sequence > ? AND at BETWEEN ? AND ? ORDER BY sequence"
            entries += _thinned(self._entries(connection, query, (last, start, end)), tier.step)
        forward: list[Entry] = []
        for entry in reversed(entries):
            # Where the clock was set back, the later rows count.
            if not forward or entry.at < forward[-1].at:
                forward.append(entry)
        forward.reverse()
        return _at_most(forward, max_points)

    def _tier_for(self, connection: sqlite3.Connection, start: float, end: float, max_points: int) -> Tier:
        first = [connection.execute(f"SELECT min(at) FROM {tier.table}").fetchone()[0] for tier in TIERS]
        reach = max(start, min((at for at in first if at is not None), default=start) + TIERS[-1].step)
        for tier, at in zip(TIERS[:-1], first, strict=False):
            if at is not None and at <= reach and (end - max(start, at)) / tier.step <= max_points * 1.5:
                return tier
        return TIERS[-1]

    def _entries(self, connection: sqlite3.Connection, query: str, values: tuple[float, ...]) -> list[Entry]:
        entries = []
        for row in connection.execute(query, values):
            try:
                entries.append(_entry(connection, self._bases, row))
            except EncodingError:
                continue  # one bad row hides no others
        return entries

    def _ask(self, question: Callable[[sqlite3.Connection], _Answer]) -> _Answer:
        with self._lock:
            try:
                return question(self._connected())
            except (sqlite3.Error, OSError) as error:
                self._disconnect()
                raise explained(error, self.path) from None

    def _connected(self) -> sqlite3.Connection:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._disconnect()
            raise HistoryMissingError(f"{self.path} does not exist: nothing was recorded yet.") from None
        identity = (status.st_dev, status.st_ino)
        if self._connection is not None and identity == self._identity:
            return self._connection
        self._disconnect()
        self._connection = open_for_reading(self.path)
        self._identity = identity
        return self._connection

    def _disconnect(self) -> None:
        self._bases.clear()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _entry(connection: sqlite3.Connection, bases: dict[int, Base], row: tuple[int, float, int, int, bytes]) -> Entry:
    sequence, at, generation, base_id, data = row
    base = bases.get(base_id)
    if base is None:
        found = connection.execute("SELECT data FROM bases WHERE id = ?", (base_id,)).fetchone()
        if found is None:
            raise EncodingError("a row without a base")
        if len(bases) >= _BASES_KNOWN:
            bases.clear()
        base = bases[base_id] = decode_base(found[0])
    return Entry(sequence, at, generation, decode_row(base, at, data))


def _thinned(entries: list[Entry], step: float) -> list[Entry]:
    """One entry for each ``step`` seconds and generation: the last, with the highest gauges."""
    kept: list[Entry] = []
    for entry in entries:
        last = kept[-1] if kept else None
        if last is not None and (last.at // step, last.generation) == (entry.at // step, entry.generation):
            kept[-1] = entry._replace(sample=with_highest(entry.sample, last.sample))
        else:
            kept.append(entry)
    return kept


def _at_most(entries: list[Entry], count: int) -> list[Entry]:
    """At most ``count`` entries: the last of each group of neighbours, with the highest gauges of the group."""
    group = -(-len(entries) // count) if entries else 1
    if group <= 1:
        return entries
    kept: list[Entry] = []
    # Groups are counted from the newest end, so that the newest row is always among them.
    for end in range(len(entries), 0, -group):
        members = entries[max(0, end - group) : end]
        last = members[-1]
        for member in members[:-1]:
            last = last._replace(sample=with_highest(last.sample, member.sample))
        kept.append(last)
    kept.reverse()
    return kept


__all__ = [
    "TIERS",
    "Entry",
    "HistoryBusyError",
    "HistoryCorruptError",
    "HistoryError",
    "HistoryForeignError",
    "HistoryMissingError",
    "HistoryVersionError",
    "Reader",
    "Tier",
    "Writer",
]

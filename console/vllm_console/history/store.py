"""A server's history on disk: written by its recorder, read by any console, bounded in size.

SQLite with a write-ahead log: one writer, any number of readers, and a SIGKILL at any moment loses nothing that was
committed. Three tables hold the same kind of rows, each at its own step and with a fixed number of rows. Counters are
totals, so a coarser row is simply the last one of its step; gauges keep the maximum of the step, so that short peaks
remain visible. Each row has its generation, which makes restarts visible. If counters are reset or engines come or go
within a generation, a step has another row, so that nothing counted before is lost.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from vllm_console import sqlite_files
from vllm_console.history.encoding import (
    Base,
    EncodingError,
    Shape,
    decode_base,
    decode_row,
    decode_scalars,
    encode_base,
    encode_row,
    numbers_of,
    same_shape,
    shape_of,
)
from vllm_console.metrics.sample import GAUGES, Sample
from vllm_console.metrics.window import combine, highest, restarted_engines
from vllm_launchers.errors import OperationError

_Answer = TypeVar("_Answer")

APPLICATION_ID = 0x764C4C68
SCHEMA_VERSION = 1
HISTORY = "history.sqlite"
"""Name of this file in a server's folder."""


class Tier(NamedTuple):
    """A table: its name, seconds between rows, and the maximum number of rows and of their bytes."""

    table: str
    step: float
    rows: int
    bytes: int


TIERS = (
    Tier("seconds", 1.0, 30 * 60, 3_000_000),
    Tier("tens", 10.0, 24 * 360, 8_000_000),
    Tier("minutes", 60.0, 30 * 24 * 60, 80_000_000),
)
"""Half an hour by the second, a day by ten seconds, thirty days by the minute; less if many engines need more space."""

MOST_ROWS = 400
"""Maximum number of rows read for the figures of one moment."""

NUMBERS_LIMIT = 5000
"""Maximum numbers per row, enough for about 25 engines; a larger sample is stored with its engines merged."""


class Stretch(NamedTuple):
    """Part of a time span (Unix seconds), and the table to read its rows from."""

    tier: Tier
    start: float
    end: float


_Row = tuple[int, float, int, int, bytes]
"""A stored row: sequence number, Unix seconds, generation, base id, data."""


class HistoryEntry(NamedTuple):
    """One row: its sequence number (newer is higher), Unix seconds, the server's generation, and its sample."""

    sequence: int
    at: float
    generation: int
    sample: Sample


RETRY_SECONDS = 5.0
_PRUNE_EVERY = 60
_TIDY_EVERY = 1800
_ROWS_PER_BASE = 60
_BASES_KNOWN = 8
"""Number of decoded bases a reader keeps, about 8 KiB each; rows are read in order, so older ones are not reused."""


class Format(NamedTuple):
    """A kind of history file: its application id, current version, and tables."""

    application_id: int
    version: int
    schema: tuple[str, ...]

    @property
    def statements(self) -> tuple[str, ...]:
        """SQL statements that turn an empty file into one of this kind."""
        return (
            *self.schema,
            f"PRAGMA application_id = {self.application_id}",
            f"PRAGMA user_version = {self.version}",
        )


_SCHEMA = (
    "CREATE TABLE bases (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    *(
        f"CREATE TABLE {tier.table} (sequence INTEGER PRIMARY KEY, at REAL NOT NULL, generation INTEGER NOT NULL,"
        " base INTEGER NOT NULL, data BLOB NOT NULL)"
        for tier in TIERS
    ),
)
FORMAT = Format(APPLICATION_ID, SCHEMA_VERSION, _SCHEMA)
"""The format of a server's history."""


class HistoryError(OperationError):
    """A history cannot be used. The message is one sentence with the reason."""


class HistoryMissingError(HistoryError):
    """There is no history (yet)."""


class HistoryUnusableError(HistoryError):
    """The file is damaged, another program's, or from a newer vllm-console; with other errors, try again."""


class _Waiting(NamedTuple):
    """A row that has not been written to disk yet."""

    tier: int
    at: float
    generation: int
    base: Base
    data: bytes


class HistoryWriter:
    """Appends samples to a history file. Only one writer per file: the recorder holds a lock for that.

    `append` never raises disk errors: rows wait in memory (an hour of them), ``trouble`` gives the reason in a
    sentence, and writing is retried every few seconds. A file that is damaged, foreign or of a newer version is moved
    aside and a new one is started; ``notice`` reports that.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""
        self.notice = ""
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._sequence = 0
        self._bases: dict[int, Base] = {}
        self._shaped: tuple[Sample, Shape] | None = None
        self._waiting: deque[_Waiting] = deque(maxlen=4000)
        self._steps: dict[int, tuple[int, int, Sample]] = {}
        self._tried_at = float("-inf")
        self._appended = 0
        self._flush(float("inf"))

    def append(self, sample: Sample, generation: int = 1) -> None:
        """Store a sample; when this returns, readers can see it, unless there is ``trouble``."""
        for tier in range(1, len(TIERS)):
            self._accumulate(tier, sample, generation)  # first, so that a step's row is older than the next step's rows
        self._wait(0, sample, generation)
        self._appended += 1
        self._flush(sample.at)

    def close(self) -> None:
        """Store the unfinished coarser steps too, and close the file."""
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
        shape = self._shape_of(sample)
        base = self._bases.get(tier)
        if base is None or base.rows >= _ROWS_PER_BASE or not (base.shape is shape or base.shape == shape):
            base = self._bases[tier] = Base(shape, numbers)
        base.rows += 1
        self._waiting.append(_Waiting(tier, sample.at, generation, base, encode_row(base, numbers)))

    def _shape_of(self, sample: Sample) -> Shape:
        """The sample's shape, usually that of the previous sample, which saves comparing hundreds of bounds."""
        if self._shaped is None or not same_shape(self._shaped[0], sample):
            self._shaped = sample, shape_of(sample)
        return self._shaped[1]

    def _accumulate(self, tier: int, sample: Sample, generation: int) -> None:
        step = int(sample.at // TIERS[tier].step)
        known = self._steps.get(tier)
        if known is not None:
            if known[:2] == (step, generation) and not _began_anew(known[2], sample):
                sample = with_highest(sample, known[2])
            else:
                self._wait(tier, known[2], known[1])
        self._steps[tier] = (step, generation, sample)

    def _flush(self, at: float) -> None:
        if self.trouble and 0 <= at - self._tried_at < RETRY_SECONDS:
            return
        self._tried_at = at
        self.trouble, notice = store_or_start_anew(self.path, self._store, self._disconnect)
        self.notice = notice or self.notice

    def _disconnect(self) -> None:
        for base in (*self._bases.values(), *(row.base for row in self._waiting)):
            base.id = None  # unknown whether it reached the disk, so it is stored again
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _store(self) -> None:
        if self._connection is not None and not sqlite_files.is_at(self.path, self._inode):
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
        """Resume the coarser steps that a killed recorder left unfinished."""
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

    def _base_id(self, connection: sqlite3.Connection, base: Base) -> int:
        if base.id is None:
            base.id = connection.execute("INSERT INTO bases (data) VALUES (?)", (encode_base(base),)).lastrowid
        return base.id or 0

    def _prune(self, connection: sqlite3.Connection) -> None:
        prune(connection, TIERS)
        if self._appended % _TIDY_EVERY == 0:
            used = " UNION ".join(f"SELECT base FROM {tier.table}" for tier in TIERS)
            connection.execute(f"DELETE FROM bases WHERE id NOT IN ({used})")


class HistoryFile:
    """A history that can be read while it is being written. Thread-safe.

    Detects when the file appears or is replaced. ``replaced`` is called when a different file is opened, or none: what
    was cached from the previous one is outdated.
    """

    def __init__(self, path: Path, form: Format = FORMAT, replaced: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self._format, self._replaced = form, replaced
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._disconnect()

    def ask(self, question: Callable[[sqlite3.Connection], _Answer]) -> _Answer:
        """Run ``question`` on the open file and return its result. Raises `HistoryError`."""
        with self._lock:
            try:
                return question(self._connected())
            except (*sqlite_files.ERRORS, OSError) as error:
                self._disconnect()
                raise history_error(error, self.path) from None

    def _connected(self) -> sqlite3.Connection:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._disconnect()
            raise HistoryMissingError(f"{self.path} does not exist: nothing recorded yet.") from None
        identity = (status.st_dev, status.st_ino)
        if self._connection is not None and identity == self._identity:
            return self._connection
        self._disconnect()
        self._connection = open_for_reading(self.path, self._format)
        self._identity = identity
        return self._connection

    def _disconnect(self) -> None:
        self._replaced()
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class HistoryReader:
    """Reads a history while it is being written. Thread-safe.

    Every method raises a suitable `HistoryError` if the file cannot be read, never an SQLite error, and detects when
    the file appears or is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bases: dict[int, Base] = {}
        self._newest: tuple[int, bytes, Sample] | None = None
        """The last decoded row; the next one of an idle server has the same numbers."""
        self._file = HistoryFile(path, replaced=self._forget)
        self._ask = self._file.ask

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def latest(self) -> HistoryEntry | None:
        """The newest row, or None when there is none."""
        query = f"SELECT * FROM {TIERS[0].table} ORDER BY sequence DESC LIMIT 1"
        rows = self._ask(lambda connection: self._entries(connection, query, ()))
        return rows[0] if rows else None

    def since(self, at: float) -> list[HistoryEntry]:
        """Rows by the second newer than ``at`` (Unix seconds), oldest first: at most the last half hour."""
        query = f"SELECT * FROM {TIERS[0].table} WHERE at > ? ORDER BY sequence"
        return self._ask(lambda connection: self._entries(connection, query, (at,)))

    def after(self, sequence: int) -> list[HistoryEntry]:
        """Rows by the second after the one with this number; correct even if the clock was set back."""
        query = f"SELECT * FROM {TIERS[0].table} WHERE sequence > ? ORDER BY sequence"
        return self._ask(lambda connection: self._entries(connection, query, (sequence,)))

    def range(self, start: float, end: float, step: float = 0.0) -> list[HistoryEntry]:
        """Rows from ``start`` (excluded) to ``end`` (Unix seconds), oldest first, at most one for each ``step`` seconds
        and engine run.

        They come from `stretches`, merged as by `read`. If the clock was set back, the later rows win.
        """
        forward: list[HistoryEntry] = []
        parts = self.stretches(start, end, step)
        for entry in reversed([entry for part in parts for entry in self.read(part, step=step)]):
            if not forward or entry.at < forward[-1].at:
                forward.append(entry)
        forward.reverse()
        return forward

    def first_at(self) -> float | None:
        """When the oldest row was taken (Unix seconds), or None when there is none."""

        return self._ask(lambda connection: first_row_at(connection, TIERS))

    def stretches(self, start: float, end: float, step: float) -> list[Stretch]:
        """Where to read the rows from ``start`` to ``end`` (Unix seconds) for points of ``step`` seconds.

        This is the coarsest table with two rows per point; before its first row a coarser one, and after its last row,
        which is written when its step ends, the table by the second.
        """
        return self._ask(lambda connection: stretches_of(connection, TIERS, start, end, step))

    def read(self, part: Stretch, most: int = -1, step: float = 0.0) -> list[HistoryEntry]:
        """The first ``most`` rows of a stretch (-1: all), oldest first; its start is excluded, its end included.

        Rows within ``step`` seconds are merged into one: the last of them, with their highest gauges. Counters are
        totals, so nothing is lost.
        """
        return self._ask(lambda connection: self._read(connection, part, most, step))

    def _read(self, connection: sqlite3.Connection, part: Stretch, most: int, step: float) -> list[HistoryEntry]:
        first = _sequence_after(connection, part.tier, part.start)
        if first is None:
            return []
        query = f"SELECT * FROM {part.tier.table} WHERE sequence >= ? AND {_TIMED} ORDER BY sequence LIMIT ?"
        rows = (row for row in connection.execute(query, (first, most)) if part.start < row[1] <= part.end)
        if step < 2 * part.tier.step:
            return self._decoded(connection, rows)
        return self._joined(connection, rows, step)

    def _joined(self, connection: sqlite3.Connection, rows: Iterable[_Row], step: float) -> list[HistoryEntry]:
        """One entry per step and engine run; histograms, the bulk of a row, are decoded only for its last row."""
        joined: list[HistoryEntry] = []
        row: _Row | None = None
        seen: Sample | None = None
        for later in chain(rows, (None,)):
            try:
                sample = self._scalars(connection, later) if later is not None else None
            except EncodingError:
                continue
            if row is not None and seen is not None:
                if (
                    later is not None
                    and sample is not None
                    and _same_step(row, later, step)
                    and not _began_anew(seen, sample)
                ):
                    sample = with_highest(sample, seen)
                else:
                    joined += [entry._replace(sample=with_highest(entry.sample, seen))
                               for entry in self._decoded(connection, [row])]  # fmt: skip
            row, seen = later, sample
        return joined

    def _scalars(self, connection: sqlite3.Connection, row: _Row) -> Sample:
        return decode_scalars(_base(connection, self._bases, row[3]), row[1], row[4])

    def _entries(self, connection: sqlite3.Connection, query: str, values: tuple[float, ...]) -> list[HistoryEntry]:
        return self._decoded(connection, connection.execute(query, values))

    def _decoded(self, connection: sqlite3.Connection, rows: Iterable[_Row]) -> list[HistoryEntry]:
        entries = []
        for row in rows:
            sequence, at, generation, base, data = row
            if self._newest is not None and self._newest[:2] == (base, data):
                entries.append(HistoryEntry(sequence, at, generation, replace(self._newest[2], at=at)))
                continue
            try:
                entry = _entry(connection, self._bases, row)
            except EncodingError:
                continue  # skip one bad row, not the others
            self._newest = (base, data, entry.sample)
            entries.append(entry)
        return entries

    def _forget(self) -> None:
        self._bases.clear()
        self._newest = None


_TIMED = "typeof(at) = 'real'"
"""Selects rows with a time: in a damaged file it may be missing."""


def _end_of(connection: sqlite3.Connection, tier: Tier, order: str) -> float | None:
    """When a table's first row was taken, or its last one if ``order`` is ``DESC``."""
    query = f"SELECT at FROM {tier.table} WHERE {_TIMED} ORDER BY sequence {order} LIMIT 1"
    row = connection.execute(query).fetchone()
    return float(row[0]) if row else None


def first_row_at(connection: sqlite3.Connection, tiers: Sequence[Tier]) -> float | None:
    """When the oldest row of all tables was taken (Unix seconds), or None if there is none."""
    return min((first for tier in tiers if (first := _end_of(connection, tier, "")) is not None), default=None)


def stretches_of(
    connection: sqlite3.Connection, tiers: Sequence[Tier], start: float, end: float, step: float
) -> list[Stretch]:
    """Where to read the rows of a span for points of ``step`` seconds; ``tiers`` are ordered from the finest."""
    wanted = max([0, *(index for index, tier in enumerate(tiers) if 2 * tier.step <= step)])
    parts: list[Stretch] = []
    tier = tiers[wanted]
    last = _end_of(connection, tier, "DESC")
    if wanted and (last is None or last < end):
        parts.append(Stretch(tiers[0], max(start, last or start), end))
        end = parts[0].start
    for tier in tiers[wanted:]:
        if end <= start:
            break
        first, last = _end_of(connection, tier, ""), _end_of(connection, tier, "DESC")
        if first is None or last is None:
            continue
        begin = max(start, first - tier.step) if first <= last else start  # else the clock was set back
        if begin < end:
            parts.insert(0, Stretch(tier, begin, end))
            end = begin
    return parts


def prune(connection: sqlite3.Connection, tiers: Sequence[Tier]) -> None:
    """Keep each table's last rows. By number, not by time, so that a wrong clock cannot make the file grow."""
    for tier in tiers:
        query = f"SELECT count(*), coalesce(sum(length(data)), 0) FROM {tier.table}"
        count, size = connection.execute(query).fetchone()
        keep = tier.rows if size <= tier.bytes else min(tier.rows, int(count * tier.bytes / size))
        connection.execute(
            f"DELETE FROM {tier.table} WHERE sequence <= (SELECT sequence FROM {tier.table}"
            " ORDER BY sequence DESC LIMIT 1 OFFSET ?)",
            (keep,),
        )


def _sequence_after(connection: sqlite3.Connection, tier: Tier, at: float) -> int | None:
    """The number of a table's first row newer than ``at``, by bisection: rows have no time index."""
    low, high = connection.execute(f"SELECT min(sequence), max(sequence) FROM {tier.table}").fetchone()
    if low is None:
        return None
    query = f"SELECT sequence, at FROM {tier.table} WHERE sequence >= ? AND {_TIMED} ORDER BY sequence LIMIT 1"
    while low < high:
        found = connection.execute(query, ((low + high) // 2,)).fetchone()
        if found is None or found[1] > at:
            high = (low + high) // 2
        else:
            low = found[0] + 1
    return int(low)


def _same_step(one: _Row, other: _Row, step: float) -> bool:
    return (one[1] // step, one[2]) == (other[1] // step, other[2])


def _began_anew(before: Sample, after: Sample) -> bool:
    """Whether an engine's counters decreased between two rows, or the engines differ."""
    return before.engines.keys() != after.engines.keys() or bool(restarted_engines(before, after))


def _entry(connection: sqlite3.Connection, bases: dict[int, Base], row: _Row) -> HistoryEntry:
    sequence, at, generation, base_id, data = row
    return HistoryEntry(sequence, at, generation, decode_row(_base(connection, bases, base_id), at, data))


def _base(connection: sqlite3.Connection, bases: dict[int, Base], base_id: int) -> Base:
    base = bases.get(base_id)
    if base is None:
        found = connection.execute("SELECT data FROM bases WHERE id = ?", (base_id,)).fetchone()
        if found is None:
            raise EncodingError("a row without a base")
        while len(bases) >= _BASES_KNOWN:
            del bases[next(iter(bases))]  # the least recently read one: rows are read in order
        base = bases[base_id] = decode_base(found[0])
    return base


def history_error(error: Exception, path: Path) -> HistoryError:
    """Convert an SQLite or file system error to the matching `HistoryError`."""
    if isinstance(error, HistoryError):
        return error
    if isinstance(error, OSError):
        return HistoryError(f"{path} can't be used ({error.strerror}); retrying.")
    if sqlite_files.is_damaged(error):
        return HistoryUnusableError(f"{path} is damaged: its history can't be read. The recorder starts a new one.")
    if sqlite_files.is_missing(error, path):
        return HistoryMissingError(f"{path} does not exist: nothing recorded yet.")
    return HistoryError(f"{path} can't be used right now ({error}); retrying.")


def store_or_start_anew(path: Path, store: Callable[[], None], close: Callable[[], None]) -> tuple[str, str]:
    """Call ``store``; if it fails, ``close``. An unusable file is moved aside, and ``store`` is called once more.

    Returns why nothing was stored, and a notice that the file was moved aside; each is a sentence, or empty.
    """
    notice = ""
    while True:
        try:
            store()
        except (*sqlite_files.ERRORS, HistoryError, OSError) as error:
            fault = history_error(error, path)
            close()
            if notice or not isinstance(fault, HistoryUnusableError):
                return str(fault), notice
            try:
                aside = sqlite_files.move_aside(path, keep_earlier=False)
            except OSError:
                return str(fault), ""
            notice = f"{str(fault).split(':')[0]}: it was moved to {aside.name}, and a new history was started."
        else:
            return "", notice


def _has_schema(connection: sqlite3.Connection, path: Path, form: Format) -> bool:
    """Whether the file holds a history; False for an empty one. Raises `HistoryError` for a foreign or newer file."""
    try:
        version = sqlite_files.version_of(connection, form.application_id)
    except sqlite_files.ForeignFileError:
        raise HistoryUnusableError(f"{path} is not a history of vllm-console: give another file.") from None
    if version > form.version:
        raise HistoryUnusableError(
            f"{path} was written by a newer vllm-console (format {version}): update vllm-console."
        )
    return version > 0


def open_for_writing(path: Path, form: Format = FORMAT, timeout: float = 1.0) -> sqlite3.Connection:
    """Open or create a history. Raises `HistoryError` or `sqlite3.Error`."""
    connection = sqlite_files.open_database(path, timeout=timeout, follow_links=True)
    try:
        has_schema = _has_schema(connection, path, form)
        # NORMAL: commits survive a killed process; a power failure may lose the last ones but does not damage the file.
        sqlite_files.apply_pragmas(connection, "NORMAL", "wal_autocheckpoint = 250")
        if not has_schema:
            connection.execute("BEGIN IMMEDIATE")
            sqlite_files.execute_all(connection, form.statements)
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path, form: Format = FORMAT) -> sqlite3.Connection:
    """Open an existing history. Raises `HistoryError` or `sqlite3.Error`."""
    if not path.exists():
        raise HistoryMissingError(f"{path} does not exist: nothing recorded yet.")
    if not path.is_file():  # SQLite would wait forever for the other end of a pipe
        raise HistoryUnusableError(f"{path} is not a regular file: give another one.")
    connection = sqlite_files.connect_read_only(path, timeout=0.25)
    try:
        if not _has_schema(connection, path, form):
            raise HistoryMissingError(f"{path} is empty: nothing recorded yet.")
    except BaseException:
        connection.close()
        raise
    return connection


def reduced(sample: Sample) -> Sample:
    """A sample too large to store, with its engines merged as ``all`` and without its largest histograms."""
    whole = combine(sample.engines.values())
    small = {key: histogram for key, histogram in whole.histograms.items() if len(histogram.bounds) < 100}
    return replace(sample, engines={"all": replace(whole, histograms=small)})


def with_highest(sample: Sample, other: Sample) -> Sample:
    """``sample`` with its gauges raised to those of ``other``, which has the same engines, where these are higher."""
    engines = {
        label: replace(
            engine, **{name: highest(getattr(engine, name), getattr(other.engines[label], name)) for name in GAUGES}
        )
        for label, engine in sample.engines.items()
    }
    return replace(sample, engines=engines)

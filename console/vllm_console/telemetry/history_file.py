"""The history file itself: what it looks like, how it is opened, and its faults in plain words.

SQLite with a write-ahead log: one writer, any number of readers, and a SIGKILL at any moment loses nothing that was
committed. Three tables hold the same kind of rows, each at a step of its own, and each keeps a fixed number of them.
"""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from pathlib import Path
from typing import NamedTuple

from vllm_console.telemetry.model import Sample
from vllm_console.telemetry.window import combine, highest
from vllm_launchers.private import open_file

APPLICATION_ID = 0x764C4C68
SCHEMA_VERSION = 1


class Tier(NamedTuple):
    """One table: its name, seconds between rows, and how many rows and bytes of them are kept at most."""

    table: str
    step: float
    rows: int
    bytes: int


TIERS = (
    Tier("seconds", 1.0, 30 * 60, 3_000_000),
    Tier("tens", 10.0, 24 * 360, 8_000_000),
    Tier("minutes", 60.0, 30 * 24 * 60, 80_000_000),
)
"""Half an hour by the second, a day by ten seconds, thirty days by the minute; less where many engines fill more."""

NUMBERS_LIMIT = 5000
"""Numbers that a row may hold, some 25 engines: a larger sample is stored with its engines as one."""


class Entry(NamedTuple):
    """One row: its number (newer is higher), Unix seconds, the server's generation, and what was seen."""

    sequence: int
    at: float
    generation: int
    sample: Sample


class HistoryError(Exception):
    """A history cannot be used. The message is one sentence that says why."""


class HistoryMissingError(HistoryError):
    """There is no history (yet)."""


class HistoryBusyError(HistoryError):
    """The file is locked for the moment, or cannot be read for the moment; try again."""


class HistoryCorruptError(HistoryError):
    """The file is damaged."""


class HistoryForeignError(HistoryError):
    """The file is a database of something else."""


class HistoryVersionError(HistoryError):
    """A newer vllm-console wrote the file."""


_CORRUPT, _NOT_A_DATABASE, _CANNOT_OPEN = 11, 26, 14
_SCHEMA = (
    "CREATE TABLE bases (id INTEGER PRIMARY KEY, data BLOB NOT NULL)",
    *(
        f"CREATE TABLE {tier.table} (sequence INTEGER PRIMARY KEY, at REAL NOT NULL, generation INTEGER NOT NULL,"
        " base INTEGER NOT NULL, data BLOB NOT NULL)"
        for tier in TIERS
    ),
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)


def explained(error: Exception, path: Path) -> HistoryError:
    """A fault of SQLite or of the file system in plain words and the right class."""
    if isinstance(error, HistoryError):
        return error
    if isinstance(error, OSError):
        return HistoryBusyError(f"{path} cannot be used ({error.strerror}); it is tried again.")
    code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
    if code in (_CORRUPT, _NOT_A_DATABASE):
        return HistoryCorruptError(f"{path} is damaged: its history cannot be read. The recorder begins a new one.")
    if code == _CANNOT_OPEN and not path.exists():
        return HistoryMissingError(f"{path} does not exist: nothing was recorded yet.")
    return HistoryBusyError(f"{path} cannot be used for the moment ({error}); it is tried again.")


def check(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file holds a history (False: it is still empty). Raises `HistoryError` for what is none of ours."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application == APPLICATION_ID:
        if version > SCHEMA_VERSION:
            raise HistoryVersionError(
                f"{path} was written by a newer vllm-console (format {version}): update this one."
            )
        return True
    if application or version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise HistoryForeignError(f"{path} is not a history of vllm-console: give another file.")
    return False


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open or create a history. Raises `HistoryError` or `sqlite3.Error`."""
    os.close(open_file(path, os.O_RDWR))
    connection = sqlite3.connect(path, timeout=1.0, isolation_level=None)
    try:
        has_schema = check(connection, path)
        # NORMAL: a commit is safe from a killed process, and a power cut may lose the last ones but not the file.
        for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "wal_autocheckpoint = 250",
                       "journal_size_limit = 1048576", "cache_size = -512"):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}")
        if not has_schema:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a history that exists. Raises `HistoryError` or `sqlite3.Error`."""
    if not path.exists():
        raise HistoryMissingError(f"{path} does not exist: nothing was recorded yet.")
    if not path.is_file():  # SQLite would wait for ever for the other end of a pipe
        raise HistoryForeignError(f"{path} is not a regular file: give another one.")
    # A file in a folder that one may not write to has no room for SQLite's shared memory: read it as it stands.
    alone = "" if os.access(path.parent, os.W_OK) else "&immutable=1"
    uri = f"{path.resolve().as_uri()}?mode=ro{alone}"
    connection = sqlite3.connect(uri, uri=True, timeout=0.25, isolation_level=None, check_same_thread=False)
    try:
        if not check(connection, path):
            raise HistoryMissingError(f"{path} is still empty: nothing was recorded yet.")
    except BaseException:
        connection.close()
        raise
    return connection


def move_aside(path: Path) -> Path:
    """Rename a file that cannot be used, with what SQLite keeps beside it; the one moved before is replaced."""
    aside = path.with_name(path.name + ".broken")
    for suffix in ("", "-wal", "-shm"):
        source = path.with_name(path.name + suffix)
        if source.exists():
            source.replace(aside.with_name(aside.name + suffix))
    return aside


def reduced(sample: Sample) -> Sample:
    """A sample too large to be stored, with its engines as one, labelled ``all``; without its largest histograms."""
    whole = combine(sample.engines.values())
    small = {key: histogram for key, histogram in whole.histograms.items() if len(histogram.bounds) < 100}
    return dataclasses.replace(sample, engines={"all": dataclasses.replace(whole, histograms=small)})


def with_highest(sample: Sample, other: Sample) -> Sample:
    """``sample`` with each engine's gauges raised to those of ``other`` where they were higher."""
    engines = dict(sample.engines)
    for label, engine in sample.engines.items():
        before = other.engines.get(label)
        if before is not None:
            engines[label] = dataclasses.replace(
                engine,
                requests_running=highest(engine.requests_running, before.requests_running),
                requests_waiting=highest(engine.requests_waiting, before.requests_waiting),
                kv_cache_usage=highest(engine.kv_cache_usage, before.kv_cache_usage),
            )
    return dataclasses.replace(sample, engines=engines)

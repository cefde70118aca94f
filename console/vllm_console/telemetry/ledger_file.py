"""The ledger's file: its schema, how it is opened, and its faults in plain words.

SQLite with a write-ahead log, opened for each act anew: writers (recorders, consoles, commands) come seldom and take
turns. Whatever happens to the disk, what was committed before stays.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from vllm_console.telemetry.run_windows import FIGURES
from vllm_launchers.private import lock, open_file, own_folder

_Answer = TypeVar("_Answer")

FILE_NAME = "runs.sqlite"
APPLICATION_ID = 0x764C4C72
PATIENCE_SECONDS = 2.0
"""How long another writer is waited for."""

_CORRUPT, _FULL, _READ_ONLY, _CANNOT_OPEN, _NOT_A_DATABASE = 11, 13, 8, 14, 26

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        "CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, server TEXT NOT NULL,"
        " generation INTEGER NOT NULL, started_at REAL NOT NULL, document TEXT NOT NULL)",
        "CREATE INDEX runs_by_server ON runs (server, started_at)",
        f"CREATE TABLE windows (run INTEGER NOT NULL, at REAL NOT NULL, seconds REAL NOT NULL,"
        f" {', '.join(f'{name} REAL' for name in FIGURES)}, PRIMARY KEY (run, at)) WITHOUT ROWID",
        "CREATE TABLE conditions (run INTEGER NOT NULL, code TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL,"
        " PRIMARY KEY (run, code, since)) WITHOUT ROWID",
    ),
)
"""What leads from each version of the schema to the next; a file's version is how many of them it has had."""


class LedgerError(Exception):
    """The ledger cannot be used. The message is one sentence that says why and what becomes of it."""


class LedgerMissingError(LedgerError):
    """There is no ledger yet."""


class LedgerDamagedError(LedgerError):
    """The file is damaged, or is no ledger."""


class LedgerNewerError(LedgerError):
    """A newer vllm-console wrote the file."""


def explained(error: Exception, path: Path) -> LedgerError:
    """A fault of SQLite or of the file system in plain words and the right class."""
    if isinstance(error, LedgerError):
        return error
    if isinstance(error, OSError):
        return LedgerError(f"{path} cannot be used ({error.strerror}): runs are not recorded meanwhile.")
    code = (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF
    if code in (_CORRUPT, _NOT_A_DATABASE):
        return LedgerDamagedError(f"{path} is damaged: the runs in it cannot be read.")
    if code == _FULL:
        return LedgerError(f"{path} cannot grow, the disk is full: what was recorded before is kept.")
    if code == _CANNOT_OPEN and not path.exists():
        return LedgerMissingError(f"{path} does not exist: no run was recorded yet.")
    return LedgerError(f"{path} cannot be used for the moment ({error}).")


def read(path: Path, question: Callable[[sqlite3.Connection], _Answer]) -> _Answer:
    """Ask the ledger something. Raises `LedgerError` of the right class, never an error of SQLite."""
    if not path.exists():
        raise LedgerMissingError(f"{path} does not exist: no run was recorded yet.")
    # A file in a folder that one may not write to has no room for SQLite's shared memory: read it as it stands.
    alone = "" if os.access(path.parent, os.W_OK) else "&immutable=1"
    try:
        connection = sqlite3.connect(
            f"{path.resolve().as_uri()}?mode=ro{alone}", uri=True, timeout=PATIENCE_SECONDS, isolation_level=None
        )
        with contextlib.closing(connection):
            if _version(connection, path) == 0:
                raise LedgerMissingError(f"{path} is still empty: no run was recorded yet.")
            return question(connection)
    except (sqlite3.Error, OSError) as error:
        raise explained(error, path) from None


def write(path: Path, act: Callable[[sqlite3.Connection], object]) -> str:
    """Change the ledger in one transaction: all of it or nothing, on disk when this returns.

    A damaged file is set aside and a new one begun; the answer says so, and is empty otherwise.

    Raises:
        LedgerError: it could not be written; nothing changed.
    """
    try:
        _write(path, act)
    except LedgerDamagedError as error:
        aside = set_aside(path)
        _write(path, act)
        return f"{error} It was moved to {aside.name} and a new one begun." if aside else ""
    return ""


def set_aside(path: Path) -> Path | None:
    """Rename a damaged ledger, with what SQLite keeps beside it; None when somebody else has done so already.

    Raises:
        LedgerError: it cannot be renamed.
    """
    try:
        with _turn(path):
            if _sound(path):
                return None
            number, aside = 1, path.with_name(path.name + ".broken")
            while aside.exists():
                number += 1
                aside = path.with_name(f"{path.name}.broken-{number}")
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
            return aside
    except OSError as error:
        raise explained(error, path) from None


def _write(path: Path, act: Callable[[sqlite3.Connection], object]) -> None:
    try:
        with contextlib.closing(_open(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                _migrate(connection, path)
                act(connection)
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
    except (sqlite3.Error, OSError) as error:
        raise explained(error, path) from None


def _open(path: Path) -> sqlite3.Connection:
    own_folder(path.parent)
    os.close(open_file(path, os.O_RDWR | os.O_NOFOLLOW))
    connection = sqlite3.connect(path, timeout=PATIENCE_SECONDS, isolation_level=None)
    try:
        _version(connection, path)
        # FULL: what a launch was is written once and seldom, and must survive a power cut.
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "journal_size_limit = 1048576", "cache_size = -512"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema's version, 0 for an empty file. Raises `LedgerError` for what is none of ours."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application == APPLICATION_ID:
        if version > len(MIGRATIONS):
            raise LedgerNewerError(
                f"{path} was written by a newer vllm-console (format {version}): update this one. It is left as it is."
            )
        return version
    if application or version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise LedgerDamagedError(f"{path} is no ledger of vllm-console.")
    return 0


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Bring the schema up to date, within the writer's transaction: another may have done so meanwhile."""
    version = _version(connection, path)
    if version == len(MIGRATIONS):
        return
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")


def _sound(path: Path) -> bool:
    try:
        return bool(read(path, lambda connection: connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok"))
    except LedgerMissingError:
        return True
    except LedgerDamagedError:
        return False


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    descriptor = open_file(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_NOFOLLOW)
    try:
        lock(descriptor, PATIENCE_SECONDS)
        yield
    finally:
        os.close(descriptor)

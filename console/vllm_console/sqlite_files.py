"""Our SQLite files: identified by application id and version, opened for reading or writing, and moved aside."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from vllm_launchers.private import open_file

_CORRUPT, _FULL, _CANNOT_OPEN, _NOT_A_DATABASE = 11, 13, 14, 26
_NO_SHARED_MEMORY = 4874
"""Extended code for a full disk: the shared-memory file next to a write-ahead log can't be extended."""


ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""Errors raised by `sqlite3`; the second if an error message includes a damaged name that is not valid text."""


class ForeignFileError(Exception):
    """The file is another program's database."""


def _code(error: Exception) -> int:
    return (getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


def is_damaged(error: Exception) -> bool:
    """Whether SQLite reports that the file is damaged, or not a database."""
    return isinstance(error, UnicodeDecodeError) or _code(error) in (_CORRUPT, _NOT_A_DATABASE)


def is_full(error: Exception) -> bool:
    """Whether SQLite reports that the disk is full."""
    return _code(error) == _FULL or getattr(error, "sqlite_errorcode", 0) == _NO_SHARED_MEMORY


def is_missing(error: Exception, path: Path) -> bool:
    """Whether SQLite could not open the file because it does not exist."""
    return _code(error) == _CANNOT_OPEN and not path.exists()


def version_of(connection: sqlite3.Connection, application_id: int) -> int:
    """The version of one of our files; 0 for an empty one.

    Raises:
        ForeignFileError: the file has a different application id, or tables but no id.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if application == application_id:
        return version
    if application or version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise ForeignFileError
    return 0


def is_at(path: Path, inode: int) -> bool:
    """Whether an opened file is still at its path, not deleted or replaced."""
    try:
        return path.stat().st_ino == inode
    except OSError:
        return False


def open_database(path: Path, timeout: float, *, follow_links: bool = False) -> sqlite3.Connection:
    """Open a file for writing, from one thread at a time; create it with mode 0600 if it does not exist."""
    os.close(open_file(path, os.O_RDWR | (0 if follow_links else os.O_NOFOLLOW)))
    return sqlite3.connect(path, timeout=timeout, isolation_level=None, check_same_thread=False)


def connect_read_only(path: Path, timeout: float) -> sqlite3.Connection:
    """Open an existing file for reading, from any thread."""
    # In a read-only folder, SQLite cannot create its shared memory: read the file as is, unless it has a log to read.
    real = path.resolve()
    shared = os.access(real.parent, os.W_OK) or real.with_name(f"{real.name}-wal").exists()
    uri = f"{real.as_uri()}?mode=ro{'' if shared else '&immutable=1'}"
    return sqlite3.connect(uri, uri=True, timeout=timeout, isolation_level=None, check_same_thread=False)


def apply_pragmas(connection: sqlite3.Connection, synchronous: str, *more: str) -> None:
    """Set a write-ahead log, small caches and the durability of commits (``NORMAL``, ``FULL``)."""
    shared = ("journal_mode = WAL", f"synchronous = {synchronous}", "journal_size_limit = 1048576", "cache_size = -512")
    for pragma in (*shared, *more):
        connection.execute(f"PRAGMA {pragma}")


def execute_all(connection: sqlite3.Connection, statements: Iterable[str]) -> None:
    """Execute statements one after another."""
    for statement in statements:
        connection.execute(statement)


def move_aside(path: Path, *, keep_earlier: bool) -> Path:
    """Rename a file, with SQLite's side files, to ``NAME.broken``.

    With ``keep_earlier``, an earlier one stays, and this one becomes ``NAME.broken-2`` and so on.
    """
    aside, number = path.with_name(f"{path.name}.broken"), 1
    while keep_earlier and aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.broken-{number}")
    for suffix in ("-shm", "-wal", ""):  # the file last: a new one at its path may already have side files of its own
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).replace(aside.with_name(aside.name + suffix))
    return aside

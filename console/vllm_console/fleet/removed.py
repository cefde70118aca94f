"""Histories of removed servers, kept so that their runs can be replayed.

``removed/NAME@CREATED-REMOVED/`` (Unix seconds; mode 0700) in the state folder holds ``history.sqlite`` and
``loads.jsonl``, and nothing else: no record, no log. The run database, which outlives servers, has the runs and their
flags.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from vllm_console import sqlite_files
from vllm_console.history.store import HISTORY, HistoryError, HistoryReader
from vllm_console.load.spans import FILE_NAME as LOADS
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import REMOVED, locked, make_folder, not_ours, open_file, own_folder

if TYPE_CHECKING:
    from vllm_console.runs.store import Run
    from vllm_launchers.keeper.records import ServerRecord

KEPT_SECONDS = 30 * 86_400.0
"""How long a history is kept after its server was removed: as long as the recorder keeps one."""

MOST_BYTES = 512 << 20
"""Maximum total size; beyond that, the oldest are deleted."""

LOCK_SECONDS = 5.0
"""How long a recorder may take to end after its server."""

_SIDE_FILES = (HISTORY + "-shm", HISTORY + "-wal")
_FILES = (LOADS, *_SIDE_FILES, HISTORY)
"""The files to move, in this order: a folder without a history counts as empty."""

_NAME = lazy_pattern(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62})@(?P<created>\d{1,12})-(?P<removed>\d{1,12})")

EARLY_SECONDS = 2.0
"""A server's first run may begin this much before its record was created, because times are rounded."""


class RemovedServer(NamedTuple):
    """The history of one removed server: its folder, and when the server was created and removed (Unix seconds)."""

    folder: Path
    name: str
    created_at: float
    removed_at: float


def _is_empty(history: Path) -> bool:
    """Whether the history certainly has no sample, because its server ended before the first one."""
    try:
        with contextlib.closing(HistoryReader(history)) as reader:
            return reader.latest() is None
    except HistoryError:
        return False


class RemovedServers:
    """The histories of removed servers in one state folder."""

    def __init__(self, state: Path) -> None:
        self._folder = state / REMOVED

    def keep(self, home: Path, name: str, created_at: float) -> bool:
        """Move the history out of a server's folder before that is deleted; False if nothing was recorded.

        Raises:
            KeeperError: it can't be moved; the folder is unchanged.
        """
        if not (home / HISTORY).is_file():
            return False
        try:
            own_folder(self._folder)
            with locked(home / (HISTORY + ".lock"), LOCK_SECONDS):  # waits until its recorder has written everything
                kept = self._new(name, created_at)
                _move(home, kept)
        except OSError as error:
            raise KeeperError(
                f"{name} was not removed: its history can't be kept in {self._folder} ({error.strerror}); "
                f"'vllm-console remove {name} --purge' deletes that, too"
            ) from error
        _settle(kept / HISTORY)
        if empty := _is_empty(kept / HISTORY):
            _delete(kept)
        self.prune()
        return not empty

    def all(self) -> Sequence[RemovedServer]:
        """All histories, the oldest first."""
        return sorted(self._found(), key=lambda kept: kept.removed_at)

    def find(self, name: str, at: float) -> RemovedServer | None:
        """The history of the server that had this name at a moment (Unix seconds)."""
        return _of(self.all(), name, at)

    def marked(self, runs: Iterable[Run], records: Iterable[ServerRecord]) -> list[Run]:
        """Mark runs whose servers were removed, and those with a history to replay."""
        present, kept, now = {record.name: record for record in records}, self.all(), time.time()
        found = []
        for run in runs:
            removed = not began_with(run, present.get(run.server))
            there = not removed or _of(kept, run.server, run.started_at) is not None
            ended = run.ended_at is not None and now - run.ended_at <= KEPT_SECONDS
            found.append(replace(run, removed=removed, replayable=there and ended and run.served))
        return found

    def delete(self, name: str) -> bool:
        """Delete all histories of servers with this name; return whether there were any."""
        found = [kept for kept in self.all() if kept.name == name]
        for kept in found:
            _delete(kept.folder)
        return bool(found)

    def prune(self) -> None:
        """Delete histories that are too old or exceed the maximum size (oldest first), and unfinished folders."""
        try:
            if not_ours(self._folder.parent):
                return  # root could delete there anyway
        except OSError:
            return  # nothing is kept
        now, total = time.time(), 0
        for kept in reversed(self.all()):
            total += _size(kept.folder)
            if now - kept.removed_at > KEPT_SECONDS or total > MOST_BYTES:
                _delete(kept.folder)
            elif any((kept.folder / name).exists() for name in _SIDE_FILES):
                _settle(kept.folder / HISTORY)
        for folder in self._folders():
            if _NAME.fullmatch(folder.name) and not (folder / HISTORY).exists():
                _delete(folder)

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self._folder) as entries:
                return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return []

    def _found(self) -> Iterator[RemovedServer]:
        for folder in self._folders():
            if (parts := _NAME.fullmatch(folder.name)) and (folder / HISTORY).exists():
                yield RemovedServer(folder, parts["name"], float(parts["created"]), float(parts["removed"]))

    def _new(self, name: str, created_at: float) -> Path:
        """A new folder, named after the current second, or the next free one. Raises OSError."""
        removed_at = int(time.time())
        while (folder := self._folder / f"{name}@{max(0, int(created_at))}-{removed_at}").exists():
            removed_at += 1
        make_folder(folder)
        return folder


def began_with(run: Run, present: ServerRecord | None) -> bool:
    """Whether a run belongs to the existing server, not to an earlier one with its name."""
    return present is not None and present.created_at - EARLY_SECONDS <= run.started_at


def _of(kept: Iterable[RemovedServer], name: str, at: float) -> RemovedServer | None:
    """The history of the server that had this name at a moment."""
    then = [one for one in kept if one.name == name and one.created_at - EARLY_SECONDS <= at]
    latest = max(then, key=lambda one: one.created_at, default=None)
    return latest if latest is not None and at <= latest.removed_at + EARLY_SECONDS else None


def _move(home: Path, kept: Path) -> None:
    """Move all files or none. Raises OSError."""
    moved: list[str] = []
    try:
        for name in _FILES:
            with contextlib.suppress(FileNotFoundError):
                (home / name).rename(kept / name)
                moved.append(name)
                os.close(open_file(kept / name, os.O_RDWR))  # sets its mode to 0600
    except OSError:
        for name in reversed(moved):
            (kept / name).rename(home / name)
        kept.rmdir()
        raise


def _settle(history: Path) -> None:
    """Make SQLite store everything in one file. While a console still reads it, this is left to a later call."""
    with contextlib.suppress(OSError, *sqlite_files.ERRORS):
        with contextlib.closing(sqlite_files.open_database(history, timeout=0.25, follow_links=True)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")


def _size(folder: Path) -> int:
    total = 0
    for name in _FILES:
        with contextlib.suppress(OSError):
            total += (folder / name).stat().st_size
    return total


def _delete(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)

"""A server's output on its way to the log, buffered in a file so that the server's writes never block.

The server writes to ``server.output``, a plain file opened for appending. The keeper reads it, writes the log, and
punches holes in the file where it has read, so that the file takes up little more space than the unread part. A stopped
or dead keeper delays nothing: whatever the server writes in the meantime, including its last lines, is there for the
next keeper. ``log.position`` records how far keepers have read.

`RESERVE` bytes are preallocated ahead of the server, so that its writes do not fail as soon as the disk is full.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.files import MOST_UNREAD, OUTPUT
from vllm_launchers.values import Value

CHUNK = 1 << 18
TRIM_BYTES = 1 << 19
"""How much output that was already read may take up space; freeing it in smaller pieces would cost more disk writes."""
RESERVE = 1 << 20
_LARGEST_BLOCK = 1 << 16
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_IN_MODIFY, _IN_NONBLOCK, _IN_CLOEXEC = 2, os.O_NONBLOCK, os.O_CLOEXEC


class OutputPosition(Value):
    """How far keepers have read and written: inode and offset in the log, and in the server's output."""

    log_inode: int
    log_offset: int
    output_inode: int
    output_offset: int


class Position:
    """``log.position``: an `OutputPosition`, written in one call, so a killed keeper leaves the old or the new one.

    Log text after that position was written by a keeper that died before it could record it. Never raises.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "log.position"
        self._fd = -1
        self._written: OutputPosition | None = None
        self._mutex = threading.Lock()

    def read(self) -> OutputPosition | None:
        """The last position written; None if there is none."""
        with self._mutex:
            self._open()
        with contextlib.suppress(OSError, ValueError, TypeError):
            return OutputPosition(*map(int, os.pread(self._fd, 200, 0).split()[:4]))
        return None

    def write(self, place: OutputPosition) -> None:
        """Write the position. If that fails (disk full), the next keeper compares log and output."""
        with self._mutex:
            if self._fd < 0:
                self._open()
            self._put(place)

    def restore(self) -> bool:
        """Rewrite the file if it was deleted or replaced; returns whether it was."""
        with self._mutex:
            before = self._fd
            if self._written is None or before < 0 or not self._replaced():
                return False
            self._open()
            if self._fd == before:
                return False
            os.close(before)
            self._put(self._written)
            return True

    def _replaced(self) -> bool:
        """Whether the path leads to no file or another file than the open one; anything but a file is left alone."""
        try:
            found = os.lstat(self.path)
            return stat.S_ISREG(found.st_mode) and not os.path.samestat(found, os.fstat(self._fd))
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _put(self, place: OutputPosition) -> None:
        self._written = place
        numbers = (place.log_inode, place.log_offset, place.output_inode, place.output_offset)
        with contextlib.suppress(OSError):
            os.pwrite(self._fd, b"%020d %020d %020d %020d\n" % numbers, 0)

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def open_for_server(folder: Path) -> int:
    """The descriptor for a server's standard output and error; it identifies the server's processes (`process_group`).

    It stays locked as long as any process of the server has it, which is visible from everywhere (`location`). Raises
    OSError, and `KeeperError` if something other than a file is in its place.
    """
    fd = _open_file(folder / OUTPUT, os.O_APPEND)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


@contextlib.contextmanager
def server_output(folder: Path) -> Iterator[int]:
    """`open_for_server` as a context manager."""
    fd = open_for_server(folder)
    try:
        yield fd
    finally:
        os.close(fd)


def bound(folder: Path) -> int:
    """Drop a server's oldest unread output beyond `MOST_UNREAD` bytes; returns how many bytes were dropped.

    For use while no keeper reads. The next keeper notes the missing amount in the log. Raises OSError.
    """
    try:
        fd = os.open(folder / OUTPUT, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        found = os.fstat(fd)
        room = found.st_blocks * 512
        if not stat.S_ISREG(found.st_mode) or room <= MOST_UNREAD + RESERVE:
            return 0
        end = (found.st_size - MOST_UNREAD // 2) // _LARGEST_BLOCK * _LARGEST_BLOCK  # punch whole blocks only
        begin = _data_from(fd, 0)
        return end - begin if end > begin and _punch(fd, begin, end - begin) else 0
    finally:
        os.close(fd)


class OutputFile:
    """``server.output`` from where the previous keeper stopped: `peek` reads it, `take` drops it. Neither blocks.

    If that position is unknown, reading starts at the first data: as far as can be known, keepers read and freed what
    precedes it.
    """

    def __init__(self, folder: Path, place: OutputPosition | None = None) -> None:
        self._fd = _open_file(folder / OUTPUT, os.O_APPEND)
        found = os.fstat(self._fd)
        self._inode = found.st_ino
        known = place is not None and place.output_inode == self._inode and place.output_offset <= found.st_size
        self._at = place.output_offset if place is not None and known else _first_data(self._fd)
        self._trimmed = 0 if known else self._at
        self._reserved = 0
        self._holes = True
        self.missing = 0
        """Bytes that were dropped before they were read; the reader counts and resets them."""
        self.event_fd = _watch(self._fd)
        """Readable if there may be new output; -1 if the file has to be polled."""
        if found.st_size:
            self._reserve(found.st_size)

    def waiting(self) -> int:
        """Number of available bytes."""
        size = os.fstat(self._fd).st_size
        if size < self._at:  # something else emptied it
            self._at = self._trimmed = 0
        return size - self._at

    def peek(self) -> bytes:
        """The first available bytes, at most `CHUNK`; dropped bytes are skipped. Raises OSError."""
        data = os.pread(self._fd, CHUNK, self._at)
        if data.startswith(b"\0") and (start := _data_from(self._fd, self._at)) > self._at:
            self.missing += start - self._at
            self._at = start
            data = os.pread(self._fd, CHUNK, self._at)
        return data

    def take(self, count: int) -> None:
        """Drop the first ``count`` bytes."""
        self._at += count

    def place(self) -> tuple[int, int]:
        """Inode and offset of the first available byte."""
        return self._inode, self._at

    def trim(self, *, now: bool) -> None:
        """Free the space of taken bytes and preallocate for new output. ``now``: all of it; else only if worthwhile."""
        size = os.fstat(self._fd).st_size
        if self._at - self._trimmed >= (1 if now else TRIM_BYTES):
            if self._holes and (_punch(self._fd, self._trimmed, self._at - self._trimmed)):
                self._trimmed = self._at
            else:
                self._holes = False
                self._empty()
        if size > self._reserved - RESERVE // 2:
            self._reserve(size)

    def empty(self) -> None:
        """Empty the file and start over. Only while no process writes to it."""
        os.ftruncate(self._fd, 0)
        self._at = self._trimmed = self._reserved = 0

    def acknowledge(self) -> None:
        """Reset ``event_fd``, so that it waits for new output."""
        with contextlib.suppress(OSError):
            os.read(self.event_fd, 4096)

    def close(self) -> None:
        """Close the file."""
        for fd in (self._fd, self.event_fd):
            if fd >= 0:
                os.close(fd)

    def _empty(self) -> None:
        """Empty the file once all of it was read, for file systems that have no holes (some network file systems).

        A line that arrives at this very moment is lost.
        """
        if os.fstat(self._fd).st_size == self._at:
            os.ftruncate(self._fd, 0)
            self._at = self._trimmed = 0

    def _reserve(self, size: int) -> None:
        for room in (RESERVE, RESERVE // 16):
            if _fallocate(self._fd, _KEEP_SIZE, size, room):
                break
        self._reserved = size + RESERVE


def _open_file(path: Path, flags: int) -> int:
    """Open a regular file of this user, created if missing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise KeeperError(f"{path} is not a plain file; move it away") from error
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(fd)
        raise KeeperError(f"{path} is not a plain file of this user; move it away")
    return fd


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return libc


def _fallocate(fd: int, mode: int, offset: int, length: int) -> bool:
    with contextlib.suppress(AttributeError):  # a C library without it
        return bool(_libc().fallocate(fd, mode, offset, length) == 0)
    return False


def _punch(fd: int, offset: int, length: int) -> bool:
    """Punch a hole in a file; False if the file system has no holes."""
    return _fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length)


def _data_from(fd: int, offset: int) -> int:
    """Offset of the next data at or after ``offset``; the end of the file if there is none."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(fd).st_size if error.errno == errno.ENXIO else offset


def _first_data(fd: int) -> int:
    """Offset of the first data in a file whose beginning has holes.

    Only whole blocks become holes: freed bytes between and after them have become zeros.
    """
    at = 0
    while block := os.pread(fd, _LARGEST_BLOCK, start := _data_from(fd, at)):
        if data := block.lstrip(b"\0"):
            return start + len(block) - len(data)
        at = start + len(block)
    return start


def _watch(fd: int) -> int:
    """A descriptor that becomes readable when an open file is written to; -1 if none is available."""
    with contextlib.suppress(AttributeError):
        watch = int(_libc().inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC))
        if watch >= 0 and _libc().inotify_add_watch(watch, b"/proc/self/fd/%d" % fd, _IN_MODIFY) >= 0:
            return watch
        if watch >= 0:
            os.close(watch)
    return -1

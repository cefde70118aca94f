"""The server's log: bytes from a named pipe into files that rotate by size.

The server writes into ``server.pipe``, which server and keeper both hold open for reading *and* writing. So a keeper
that dies gives the server no SIGPIPE, and what the server writes meanwhile (up to the pipe's 1 MiB; then its writes
wait) is there for the next keeper. What nobody had read when the last holder ended is lost with the pipe.

A full disk never stops the reading: bytes that cannot be written are counted, and the log says how many once it can
be written again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_launchers.keeper.blanking import Blanking
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.events import HelperFailed, LogLost, LogMended, Post

PIPE_BYTES = 1 << 20
CHUNK = 1 << 18
GATHER_SECONDS = 0.01
"""How long to let output gather between two reads: a flood costs 100 wake-ups a second instead of one per line."""
LONGEST_LINE = 1 << 16
"""A line may overrun a file's size by this much before it is cut in two."""


def open_pipe(folder: Path, blocking: bool) -> int:
    """Open (and make, if need be) the server's log pipe for reading and writing."""
    path = folder / "server.pipe"
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | (0 if blocking else os.O_NONBLOCK))
    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
        os.close(fd)
        raise KeeperError(f"{path} is no pipe; move it away")
    with contextlib.suppress(OSError):  # the user's allowance for pipes may be used up: a smaller one works too
        fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return fd


class RotatingLog:
    """``server.log`` and its older files ``.1``, ``.2``, …, ``files`` in all, each at most ``limit`` bytes.

    Files end at the end of a line, except under a line longer than 64 KiB. Only a ``limit`` under 256 KiB may be
    overrun, by the rest of a line of at most 64 KiB. Never raises on a full disk.
    """

    def __init__(self, path: Path, limit: int, files: int, write: Callable[[int, bytes], int] = os.write) -> None:
        self.path = path
        self.lost = 0
        """Bytes that could not be written since the last line that says so."""
        self.trouble = ""
        self._limit = _end_at(limit)
        self._files = max(files, 1)
        self._write = write
        self._mutex = threading.Lock()
        self._fd = -1
        self._size = 0
        self._at_line_start = True
        self._open()

    def resize(self, limit: int, files: int) -> None:
        """Change the bounds."""
        with self._mutex:
            self._limit, self._files = _end_at(limit), max(files, 1)

    def position(self) -> tuple[int | None, int]:
        """Inode and size of the file that is written now: where the next byte goes."""
        with self._mutex:
            return (os.fstat(self._fd).st_ino if self._fd >= 0 else None, self._size)

    def append(self, data: bytes) -> None:
        """Write bytes, rotating on the way."""
        with self._mutex:
            if self.lost and not self._confess():
                self._lose(data, self.trouble)
                return
            while data:
                head, data = self._fitting(data)
                if not self._put(head):
                    self._lose(data, self.trouble)
                    return
                if data or self._size >= self._limit + LONGEST_LINE:
                    self._rotate()

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _fitting(self, data: bytes) -> tuple[bytes, bytes]:
        """Split where this file should end: after the last line that fits, else after the line that does not."""
        room = self._limit - self._size
        if len(data) <= room:
            return data, b""
        cut = data.rfind(b"\n", 0, max(room, 0)) + 1
        if cut == 0 and (not self._at_line_start or self._size == 0):
            first = data.find(b"\n") + 1
            overrun = max(room + LONGEST_LINE, 0)
            cut = first if 0 < first <= overrun else min(len(data), overrun)
        return data[:cut], data[cut:]

    def _put(self, data: bytes) -> bool:
        """Write all of it, or count what could not be written and return False."""
        while data:
            try:
                if self._fd < 0:
                    self._open()
                written = self._write(self._fd, data)
            except OSError as error:
                self._lose(data, error.strerror or str(error))
                return False
            self._at_line_start = data[written - 1 : written] == b"\n"
            self._size += written
            data = data[written:]
        return True

    def _lose(self, data: bytes, why: str) -> None:
        self.lost += len(data)
        self.trouble = why

    def _confess(self) -> bool:
        """Say in the log how much was lost; False while it still cannot be written."""
        text = f"[keeper] {self.lost} bytes of log were lost here: {self.trouble}\n".encode()
        try:
            if self._fd < 0:
                self._open()
            line = text if self._at_line_start else b"\n" + text
            written = self._write(self._fd, line)
        except OSError as error:
            self.trouble = error.strerror or str(error)
            return False
        self._size += written
        self._at_line_start = written == len(line)
        self.lost, self.trouble = 0, ""
        return True

    def _rotate(self) -> None:
        """``server.log`` becomes ``.1``, ``.1`` becomes ``.2``; the oldest goes. Goes on in the old file if it must."""
        try:
            for number in range(self._files - 1, 0, -1):
                source = self._numbered(number - 1)
                if source.exists():
                    source.replace(self._numbered(number))
            if self._files == 1:
                self.path.unlink(missing_ok=True)
            old = self._fd
            self._open()
            if old >= 0:
                os.close(old)
        except OSError as error:
            self.trouble = error.strerror or str(error)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._at_line_start = True


def _end_at(limit: int) -> int:
    """The size from which on a file ends with the next line, so that it stays within ``limit`` with that line."""
    return limit - LONGEST_LINE if limit >= 4 * LONGEST_LINE else max(limit, 4096)


class LogPump(threading.Thread):
    """Reads the pipe and writes the log; says when the log cannot be written, and when it can again."""

    def __init__(self, pipe_fd: int, log: RotatingLog, post: Post, blanking: Blanking | None = None) -> None:
        super().__init__(name="log", daemon=True)
        self.log = log
        self.blanking = blanking or Blanking()
        self._pipe = pipe_fd
        self._post = post
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._drained = threading.Event()
        self._asked_to_drain = False
        self._told_at = 0.0
        self._lost = 0

    def run(self) -> None:
        """Pump for as long as the keeper lives."""
        poller = select.poll()
        poller.register(self._pipe, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            try:
                poller.poll()
                self._pump()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and the pumping goes on
                self._post(HelperFailed("log", repr(error)))
                time.sleep(1.0)

    def drain(self, seconds: float) -> bool:
        """Wait until everything that is in the pipe now has been read; False where that took too long."""
        self._drained.clear()
        self._asked_to_drain = True
        os.eventfd_write(self._wake, 1)
        return self._drained.wait(seconds)

    def _pump(self) -> None:
        asked = self._asked_to_drain  # looked at before reading: what is in the pipe by then is read below
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while data := self._read():
            self.log.append(self.blanking.clean(data))
            self._tell()
            if len(data) < CHUNK and not asked:
                time.sleep(GATHER_SECONDS)
        if asked:
            self.log.append(self.blanking.rest())
            self._asked_to_drain = False
            self._drained.set()

    def _read(self) -> bytes:
        try:
            return os.read(self._pipe, CHUNK)
        except BlockingIOError:
            return b""

    def _tell(self) -> None:
        """Post news about losses: the first at once, then at most every five seconds."""
        if self.log.lost:
            self._lost = self.log.lost
            now = time.monotonic()
            if not self._told_at or now - self._told_at >= 5.0:
                self._told_at = now
                self._post(LogLost(self._lost, self.log.trouble))
        elif self._told_at:
            self._told_at = 0.0
            self._post(LogMended(self._lost))

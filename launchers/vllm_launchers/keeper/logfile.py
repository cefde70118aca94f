"""The server's log: bytes from a named pipe into files that rotate by size.

A keeper may be killed at any moment: no byte is lost and none is doubled by that. Bytes leave the pipe only once they
stand in the log; a file beside it says up to where, so that the next keeper knows what it finds in both.

A full disk never stops the reading: bytes that cannot be written are counted, and the log says how many once it can
be written again.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path

from vllm_launchers.keeper.blanking import Blanking
from vllm_launchers.keeper.events import HelperFailed, LogLost, LogMended, Post
from vllm_launchers.keeper.logpipe import CHUNK, LogPipe, Position

GATHER_SECONDS = 0.01
"""How long to let output gather between two reads: a flood costs 100 wake-ups a second instead of one per line."""
HELD_SECONDS = 0.1
"""How long at most until the beginning of a line that may hold a secret is looked at again, for its end."""
LONGEST_LINE = 1 << 16
"""A file ends so far below its size, or a quarter of it where that is less: a line that long stays whole."""
SMALLEST_FILE = 4096
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
MOST_OF_A_CHUNK = 4 * CHUNK
"""More than one chunk can become when short secrets in it are hidden."""


class RotatingLog:
    """``server.log`` and its older files ``.1``, ``.2``, …, ``files`` in all, each at most ``limit`` bytes (4,096 at
    least).

    Files end at the end of a line, except under a line longer than 64 KiB, or than a quarter of the limit where that
    is less. Never raises on a full disk.
    """

    def __init__(self, path: Path, limit: int, files: int, write: Callable[[int, bytes], int] = os.write) -> None:
        self.path = path
        self.lost = 0
        """Bytes that could not be written since the last line that says so."""
        self.trouble = ""
        self._limit = max(limit, SMALLEST_FILE)
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
            self._limit, self._files = max(limit, SMALLEST_FILE), max(files, 1)

    def position(self) -> tuple[int | None, int]:
        """Inode and size of the file that is written now: where the next byte goes."""
        with self._mutex:
            return (os.fstat(self._fd).st_ino if self._fd >= 0 else None, self._size)

    def since(self, inode: int, offset: int) -> bytes:
        """What was written after a position, over rotated files; nothing where that cannot have been one chunk."""
        found: list[bytes] = []
        for number in range(self._files):
            with contextlib.suppress(OSError), self._numbered(number).open("rb") as file:
                status = os.fstat(file.fileno())
                start = offset if status.st_ino == inode else 0
                if sum(map(len, found)) + status.st_size - start > MOST_OF_A_CHUNK:
                    break
                file.seek(start)
                found.append(file.read() if start <= status.st_size else b"")
                if status.st_ino == inode:
                    return b"".join(reversed(found))
        return b""

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
                if data and not self._rotate():
                    self._put(data)
                    return

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _fitting(self, data: bytes) -> tuple[bytes, bytes]:
        """Split where this file should end: after the last line that fits, else after the line that does not."""
        most = self._limit - self._size
        room = most - min(LONGEST_LINE, self._limit // 4)
        if len(data) <= room:
            return data, b""
        cut = data.rfind(b"\n", 0, max(room, 0)) + 1
        if cut == 0 and (not self._at_line_start or self._size == 0):
            cut = data.find(b"\n", 0, max(most, 0)) + 1 or min(len(data), max(most, 0))
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
            if self._size + len(text) >= self._limit:
                self._rotate()  # where it cannot, the old file grows by this line: nothing more is lost for it
            line = text if self._at_line_start else b"\n" + text
            written = self._write(self._fd, line)
        except OSError as error:
            self.trouble = error.strerror or str(error)
            return False
        self._size += written
        self._at_line_start = written == len(line)
        self.lost, self.trouble = 0, ""
        return True

    def _rotate(self) -> bool:
        """``server.log`` becomes ``.1``, ``.1`` becomes ``.2``; the oldest goes. Else the old file grows.

        The new file is there before any other moves, and a gap (left by a move that failed) takes up what is before
        it: so trying again and again costs no older file.
        """
        fresh = self.path.with_name(f".{self.path.name}.new")
        fd = -1
        try:
            fd = os.open(fresh, _FLAGS | os.O_TRUNC, 0o600)
            gap = next((n for n in range(self._files) if not self._numbered(n).exists()), self._files - 1)
            for number in range(gap, 0, -1):
                self._numbered(number - 1).replace(self._numbered(number))
            fresh.replace(self.path)
        except OSError as error:
            self.trouble = error.strerror or str(error)
            if fd >= 0:
                os.close(fd)
            return False
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._size, self._at_line_start = fd, 0, True
        return True

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _open(self) -> None:
        self._fd = os.open(self.path, _FLAGS, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._at_line_start = True


class LogPump(threading.Thread):
    """Reads the pipe and writes the log; says when the log cannot be written, and when it can again."""

    def __init__(self, pipe_fd: int, log: RotatingLog, post: Post, blanking: Blanking | None = None) -> None:
        super().__init__(name="log", daemon=True)
        self.log = log
        self.blanking = blanking or Blanking()
        self._pipe = LogPipe(pipe_fd)
        self._position = Position(log.path.parent)
        self._post = post
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._drained = threading.Event()
        self._asked_to_drain = False
        self._held = 0.0
        """Seconds until what waits in the pipe for the end of its line is looked at again; 0 where nothing does."""
        self._told_at = 0.0
        self._lost = 0
        self._written = self._written_before()

    def run(self) -> None:
        """Pump for as long as the keeper lives."""
        woken, either = select.poll(), select.poll()
        for poller, fd in ((woken, self._wake), (either, self._wake), (either, self._pipe.fd)):
            poller.register(fd, select.POLLIN)
        while True:
            try:
                if self._held:
                    woken.poll(self._held * 1000)
                else:
                    either.poll()
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
        while waiting := self._pipe.waiting():
            data = self._pipe.peek()
            more = len(data) < waiting
            if more:  # the end of its last line is there already
                data = data[: data.rfind(b"\n") + 1] or data
            text, used = self.blanking.clean(data, whole=asked and not more)
            if not used and (more or self._pipe.full):
                text, used = self.blanking.clean(data, whole=True)
            if not used:
                self._held = min(2 * self._held or GATHER_SECONDS, HELD_SECONDS)
                break
            self._held = 0.0
            self._write(text, used)
            if not more and not asked:
                time.sleep(GATHER_SECONDS)
        if asked:
            self._asked_to_drain = False
            self._drained.set()

    def _write(self, text: bytes, used: int) -> None:
        """Write what ``used`` bytes of the pipe came to, and only then take them out."""
        again = min(len(self._written), len(text))
        self._written, text = self._written[again:], text[again:]
        self.log.append(text)
        self._pipe.take(used)
        self._position.write(*self.log.position())
        self._tell()

    def _written_before(self) -> bytes:
        """What is in the log already of what is in the pipe: its writer was killed before it could take it out.

        Only the microseconds between that and the note of it leave a doubt: it is settled by whether log and pipe say
        the same.
        """
        position, data = self._position.read(), self._pipe.peek()
        written = self.log.since(*position) if position is not None and data else b""
        if written and self.blanking.clean(data, whole=True)[0].startswith(written):
            return written
        self._position.write(*self.log.position())
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

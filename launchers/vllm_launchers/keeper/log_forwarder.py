"""The server's log: copies the server's output into files that rotate by size.

A keeper may be killed at any moment without losing or repeating a byte: bytes are dropped from the output only once
they are in the log, and a file beside it records the position, so that the next keeper knows what both contain.

A full disk never stops reading: bytes that can't be written are counted, and once the log is writable again, it says
how many were lost.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vllm_launchers.keeper.lifecycle import HelperFailed, LogLost, LogRecovered, Post
from vllm_launchers.keeper.output import CHUNK, OutputFile, OutputPosition, Position
from vllm_launchers.secrets import HIDDEN, is_secret_name, may_hold_secret, redact, redact_values

SHORTEST_OWN = 4
"""Shorter secrets of the server are not redacted: redacting every ``1`` would spoil the log and reveal the secret."""
SHORTEST_INHERITED = 8
"""The same for other environment variables: ``MY_KEY=enabled`` is hardly a secret."""


def values_of(secrets: Mapping[str, str], environment: Mapping[str, str]) -> set[str]:
    """The values to redact: the server's secrets, and inherited values whose name suggests a secret."""
    own = {value for value in secrets.values() if len(value) >= SHORTEST_OWN}
    return own | {
        value for name, value in environment.items() if len(value) >= SHORTEST_INHERITED and is_secret_name(name)
    }


class Redaction:
    """Removes secrets from bytes. One thread calls `clean`; others may add secrets."""

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._values: tuple[bytes, ...] = ()
        self.know(values)

    def know(self, values: Iterable[str]) -> None:
        """Redact these values, too, from now on. Earlier ones stay: the server that had them may still be writing."""
        parts = {part for value in values for part in value.encode(errors="surrogateescape").splitlines()}
        known = {part for part in parts if len(part) >= SHORTEST_OWN} | set(self._values)
        self._values = tuple(sorted(known, key=len, reverse=True))

    def clean(self, data: bytes, *, whole: bool = False) -> tuple[bytes, int]:
        """Redact output; returns what may be written, and how many bytes of ``data`` that covers.

        The rest may be the beginning of a secret: pass it again with what follows. ``whole``: nothing follows.
        """
        used = len(data) if whole else self._settled(data)
        shown = redact_values(data[:used], self._values, HIDDEN.encode())
        # Latin-1, one character per byte, because the text is only searched.
        if not may_hold_secret(shown.decode("latin-1")):
            return shown, used
        lines = shown.splitlines(keepends=True)
        last = lines[-1]
        if (
            not whole
            and not last.endswith((b"\n", b"\r"))
            and len(last) < LONGEST_LINE
            and may_hold_secret(last.decode("latin-1"))
        ):
            lines.pop()
            used = max(data.rfind(b"\n", 0, used), data.rfind(b"\r", 0, used)) + 1
        return b"".join(map(_redacted, lines)), used

    def _settled(self, data: bytes) -> int:
        """Number of bytes at the start before the beginning of a known secret at the end, and of those it overlaps."""
        settled = len(data) - self._begun(data)
        while True:
            found = (data.find(one, max(0, settled - len(one) + 1), settled + len(one) - 1) for one in self._values)
            divided = [at for at in found if at >= 0]
            if not divided:
                return settled
            settled = min(divided)

    def _begun(self, data: bytes) -> int:
        """Number of bytes at the end that may be the beginning of a known secret."""
        longest = 0
        for value in self._values:
            tail = data[-(len(value) - 1) :]
            at = tail.find(value[:1])
            while at >= 0 and not value.startswith(tail[at:]):
                at = tail.find(value[:1], at + 1)
            if at >= 0:
                longest = max(longest, len(tail) - at)
        return longest


def _redacted(line: bytes) -> bytes:
    text = line.decode(errors="surrogateescape")
    shown = redact(text)
    return line if shown == text else shown.encode(errors="surrogateescape")


GATHER_SECONDS = 0.01
"""Pause between two reads: a flood of output causes 100 wake-ups a second instead of one per line."""
HELD_SECONDS = 0.1
"""Longest pause before re-reading an incomplete line that may contain a secret."""
LONGEST_LINE = 1 << 16
"""How far below its limit a file ends (at most a quarter of it): a line of this length is not split."""
SMALLEST_FILE = 4096
POLL_SECONDS, IDLE_SECONDS = 0.2, 5.0
"""Poll intervals for output where the kernel does not report it, and where it does (as a safeguard)."""
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
MOST_OF_A_CHUNK = 4 * CHUNK
"""Maximum size of a chunk after redaction, which can make it longer."""


class RotatingLog:
    """``server.log`` and its older files ``.1``, ``.2``, …: ``files`` in all, each at most ``limit`` bytes (at least
    4,096).

    Files end at the end of a line, unless it is longer than 64 KiB (or a quarter of the limit if that is less). Never
    raises on a full disk.
    """

    def __init__(self, path: Path, limit: int, files: int, write: Callable[[int, bytes], int] = os.write) -> None:
        self.path = path
        self.lost = 0
        """Bytes lost since the last line that reported losses."""
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
        """Change the limits."""
        with self._mutex:
            self._limit, self._files = max(limit, SMALLEST_FILE), max(files, 1)

    def position(self) -> tuple[int | None, int]:
        """Inode and size of the current file, which is where the next byte goes."""
        with self._mutex:
            return (os.fstat(self._fd).st_ino if self._fd >= 0 else None, self._size)

    def restore(self) -> bool:
        """Begin a new file if the current one was deleted or replaced; returns whether it was."""
        with self._mutex:
            try:
                found: os.stat_result | None = os.lstat(self.path)
            except FileNotFoundError:
                found = None
            except OSError:
                return False
            if self._fd < 0 or (found is not None and os.path.samestat(found, os.fstat(self._fd))):
                return False
            if found is not None and not stat.S_ISREG(found.st_mode):
                return False  # not a file to write to
            before = self._fd
            try:
                self._open()
            except OSError as error:
                self.trouble = error.strerror or str(error)
                return False
            os.close(before)
            return True

    def lose(self, count: int, why: str) -> None:
        """Note in the log, before the next bytes, that ``count`` bytes are missing."""
        with self._mutex:
            self.lost += count
            self.trouble = why

    def since(self, inode: int, offset: int) -> bytes:
        """The log after a position, across rotated files; empty if it is too long to be a single chunk."""
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
            if self.lost and not self._write_loss():
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
        """Split where this file should end: after the last line that fits, or else after the line that does not."""
        most = self._limit - self._size
        room = most - min(LONGEST_LINE, self._limit // 4)
        if len(data) <= room:
            return data, b""
        cut = data.rfind(b"\n", 0, max(room, 0)) + 1
        if cut == 0 and (not self._at_line_start or self._size == 0):
            cut = data.find(b"\n", 0, max(most, 0)) + 1 or min(len(data), max(most, 0))
        return data[:cut], data[cut:]

    def _put(self, data: bytes) -> bool:
        """Write everything, or count the bytes that could not be written and return False."""
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

    def _write_loss(self) -> bool:
        """Note the loss in the log; False if it is not writable."""
        text = f"[keeper] {self.lost} bytes of log were lost here: {self.trouble}\n".encode()
        try:
            if self._fd < 0:
                self._open()
            if self._size + len(text) >= self._limit:
                self._rotate()  # if that fails, the old file grows by this line, so that nothing more is lost
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
        """``server.log`` becomes ``.1``, ``.1`` becomes ``.2``; the oldest is deleted. On failure, the old file grows.

        The new file exists before any other is moved, and a gap left by a failed move absorbs the files before it, so a
        retry costs no older file.
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


class _Request:
    """Asks the log's thread to read everything and then, if ``renew``, to empty the output."""

    def __init__(self, *, renew: bool) -> None:
        self.renew = renew
        self.done = threading.Event()


class LogForwarder(threading.Thread):
    """Reads the output and writes the log; posts an event when the log becomes unwritable, and when it recovers."""

    def __init__(self, folder: Path, log: RotatingLog, post: Post, redaction: Redaction | None = None) -> None:
        super().__init__(name="log", daemon=True)
        self.log = log
        self.redaction = redaction or Redaction()
        self.position = Position(folder)
        place = self.position.read()
        self._output = OutputFile(folder, place)
        self._post = post
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._request: _Request | None = None
        """What is waited for; a request that is no longer here was withdrawn or is done."""
        self._ending_request = threading.Lock()
        self._held = 0.0
        """Seconds until an incomplete line is read again; 0 if there is none."""
        self._posted_at = 0.0
        self._lost = 0
        self._written = self._written_before(place)

    def run(self) -> None:
        """Forward output as long as the keeper lives."""
        while True:
            try:
                self._wait_for_output()
                self._forward()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and forwarding continues
                self._post(HelperFailed("log", repr(error)))
                time.sleep(1.0)

    def drain(self, seconds: float) -> bool:
        """Wait until all output available now has been read; False if that took too long."""
        return self._send(_Request(renew=False), seconds)

    def begin_anew(self, seconds: float) -> bool:
        """Read the available output, then empty the file for the next server. Only while no process writes to it.

        Returns False if that took too long; then the file is not emptied, and processes may write to it again.
        """
        return self._send(_Request(renew=True), seconds)

    def _send(self, request: _Request, seconds: float) -> bool:
        """Wait for a request, and withdraw it after ``seconds``; returns whether it is done. For one thread only."""
        self._request = request
        os.eventfd_write(self._wake, 1)
        if not request.done.wait(seconds):
            with self._ending_request:
                self._request = None
        return request.done.is_set()

    def _wait_for_output(self) -> None:
        poller, wait = select.poll(), POLL_SECONDS
        poller.register(self._wake, select.POLLIN)
        if self._held:
            wait = self._held
        elif self._output.event_fd >= 0:
            poller.register(self._output.event_fd, select.POLLIN)
            wait = IDLE_SECONDS
        poller.poll(wait * 1000)

    def _forward(self) -> None:
        request = self._request  # before reading, so that everything already in the output is covered
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        self._output.acknowledge()
        while waiting := self._output.waiting():
            data = self._output.peek()
            if self._request is not request:  # withdrawn: the next server may already have written some of this
                request = None
            self._count_missing()
            more = len(data) < min(waiting, self._output.waiting())
            if more:  # the end of its last line is already available
                data = data[: data.rfind(b"\n") + 1] or data
            text, used = self.redaction.clean(data, whole=request is not None and not more)
            if not used and more:
                text, used = self.redaction.clean(data, whole=True)
            if not used:
                self._held = min(2 * self._held or GATHER_SECONDS, HELD_SECONDS)
                break
            self._held = 0.0
            self._write(text, used, hidden=text != data[:used])
            if not more and request is None:
                time.sleep(GATHER_SECONDS)
        with self._ending_request:
            if request is None or self._request is not request:
                return
            self._output.trim(now=True)
            if request.renew:
                self._output.empty()
                self._save_position()
            self._request = None
            request.done.set()

    def _write(self, text: bytes, used: int, *, hidden: bool) -> None:
        """Write the log text for ``used`` bytes of the output, and only then drop them.

        ``hidden``: they contained a secret, which must not stay in the output.
        """
        again = min(len(self._written), len(text))
        self._written, text = self._written[again:], text[again:]
        self.log.append(text)
        self._output.take(used)
        self._save_position()
        self._output.trim(now=hidden)
        self._post_losses()

    def _save_position(self) -> None:
        inode, offset = self.log.position()
        self.position.write(OutputPosition(inode or 0, offset, *self._output.place()))

    def _written_before(self, place: OutputPosition | None) -> bytes:
        """Output that is already in the log because its writer was killed before it could record that.

        In that case, the unread output begins with the part of the log after the recorded position.
        """
        data = self._output.peek()
        written = self.log.since(place.log_inode, place.log_offset) if place is not None and data else b""
        if written and self.redaction.clean(data, whole=True)[0].startswith(written):
            return written
        self._save_position()
        return b""

    def _count_missing(self) -> None:
        if self._output.missing:
            self.log.lose(self._output.missing, "the backlog for the keeper was too large")
            self._output.missing = 0

    def _post_losses(self) -> None:
        """Post losses: the first at once, then at most every five seconds."""
        if self.log.lost:
            self._lost = self.log.lost
            now = time.monotonic()
            if not self._posted_at or now - self._posted_at >= 5.0:
                self._posted_at = now
                self._post(LogLost(self._lost, self.log.trouble))
        elif self._posted_at:
            self._posted_at = 0.0
            self._post(LogRecovered(self._lost))

"""A log and its rotated predecessors as one stream of bytes with offsets that stay valid while it rotates."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

MAX_SEGMENTS = 64
"""More rotated files than this are not read back into."""

_STABLE_TRIES = 4


@dataclass(slots=True)
class _Segment:
    """One file of the log. ``size`` is None for the newest one, which still grows."""

    fd: int
    key: tuple[int, int]
    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


class LogStream:
    """The bytes of ``path``, preceded by those of ``path.1``, ``path.2``, … as far as these exist.

    An offset names the same byte for as long as the stream is open: the file that is the newest at first begins at 0,
    what was rotated away before lies at negative offsets, and what comes after a rotation goes on where the old file
    ended. Files are held open, so nothing is missed between a rename and the next look. ``epoch`` counts the times
    at which what had been read before was taken away (truncation).

    Not safe for several threads at once; `LogFile` locks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        self.problem = ""
        self._segments: list[_Segment] = []
        self._resume = 0
        self._before_opening = True
        self.refresh()
        self._before_opening = False

    @property
    def start(self) -> int:
        """Offset of the first byte there is."""
        return self._segments[0].base if self._segments else self._resume

    @property
    def end(self) -> int:
        """Offset after the last byte, as of the last `refresh`."""
        return self._segments[-1].end if self._segments else self._resume

    @property
    def live_start(self) -> int:
        """Offset at which the newest file begins."""
        return self._segments[-1].base if self._segments else self._resume

    def refresh(self, keep_from: int | None = None) -> None:
        """Look how far the log has grown, and whether it was rotated, truncated, deleted or created anew.

        Deleted files are let go, but none that holds bytes from ``keep_from`` on.
        """
        if not self._is_live_in_place():
            found = self._open_chain()
            if found is not None:
                self._take_over(found)
        if self._segments:
            live = self._segments[-1]
            size = os.fstat(live.fd).st_size
            if size < live.size:
                self._truncated(size)
            else:
                live.size = size
        self._drop_deleted(keep_from)

    def read(self, low: int, high: int) -> bytes:
        """The bytes from ``low`` to ``high``, over the borders of files; NUL where a file shrank meanwhile."""
        parts = []
        for segment in self._segments:
            first, last = max(low, segment.base), min(high, segment.end)
            if first < last:
                parts.append(_read_exactly(segment.fd, first - segment.base, last - first))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Let go of all files."""
        while self._segments:
            os.close(self._segments.pop().fd)

    def _open_chain(self) -> list[_Segment] | None:
        """Open the log's files, oldest first; None while a rotation is going on or none can be read."""
        for _ in range(_STABLE_TRIES):
            names = self._names()
            chain = [segment for name in names if (segment := self._open(name))]
            keys = [segment.key for segment in chain]
            if keys == self._keys_at(names) and names == self._names():
                break
            _close(chain)
        else:
            return None
        return chain or None

    def _names(self) -> list[Path]:
        """The log's files by name, oldest first."""
        prefix = self.path.name + "."
        try:
            with os.scandir(self.path.parent) as entries:
                numbers = [int(e.name[len(prefix) :]) for e in entries if _is_rotated(e.name, prefix)]
                present = self.path.exists()
        except FileNotFoundError:
            return []  # not there yet
        except OSError as error:
            self.problem = f"{self.path.parent} cannot be read: {os.strerror(error.errno or 0)}"
            return []
        rotated = [self.path.with_name(f"{prefix}{number}") for number in sorted(numbers)[:MAX_SEGMENTS]]
        return [*reversed(rotated), *([self.path] if present else [])]

    def _open(self, path: Path) -> _Segment | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = f"{path} cannot be read: {os.strerror(error.errno or 0)}"
            return None
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            os.close(fd)
            self.problem = f"{path} is not a regular file"
            return None
        if path == self.path:
            self.problem = ""
        return _Segment(fd, (about.st_dev, about.st_ino), 0, about.st_size)

    def _keys_at(self, names: list[Path]) -> list[tuple[int, int]]:
        """What stands at these names now, to see whether a rotation happened while they were opened."""
        keys = []
        for name in names:
            try:
                about = name.stat()
            except OSError:
                continue
            if stat.S_ISREG(about.st_mode) and os.access(name, os.R_OK):
                keys.append((about.st_dev, about.st_ino))
        return keys

    def _take_over(self, chain: list[_Segment]) -> None:
        """Put the opened files into the stream: known ones are known by inode, new ones follow the newest known."""
        known = {segment.key for segment in self._segments}
        if not known:
            self._lay_out(chain)
            return
        positions = [index for index, segment in enumerate(chain) if segment.key in known]
        fresh = chain[positions[-1] + 1 :] if positions else chain
        # The newest file known so far was finished before its successor appeared: its size is final now.
        if fresh:
            last = self._segments[-1]
            last.size = max(last.size, os.fstat(last.fd).st_size)
        kept = []
        for segment in fresh:
            segment.base = self._segments[-1].end
            self._segments.append(segment)
            kept.append(segment.key)
        _close([segment for segment in chain if segment.key not in kept])

    def _lay_out(self, chain: list[_Segment]) -> None:
        """Give the first files seen their offsets: the newest begins at 0, but all is new if there was none before."""
        base = self._resume
        if self._before_opening:
            base -= sum(segment.size for segment in chain[:-1])
        for segment in chain:
            segment.base = base
            base = segment.end
        self._segments = chain

    def _truncated(self, size: int) -> None:
        """Start over behind what was there: offsets known to others must not come to mean other bytes."""
        live = self._segments[-1]
        self.epoch += 1
        moved = live.size
        for segment in self._segments:
            segment.base += moved
        live.size = size
        self._resume = live.base

    def _drop_deleted(self, keep_from: int | None) -> None:
        """Forget rotated files that were deleted since, oldest first; the one before the newest may be unread yet."""
        while len(self._segments) > 2:
            oldest = self._segments[0]
            wanted = os.fstat(oldest.fd).st_nlink or (keep_from is not None and oldest.end > keep_from)
            if wanted and len(self._segments) <= 2 * MAX_SEGMENTS:
                return
            os.close(self._segments.pop(0).fd)

    def _is_live_in_place(self) -> bool:
        """Whether the newest file known still stands under the log's name, so that no rotation happened."""
        try:
            about = self.path.stat()
        except OSError:
            return False
        return bool(self._segments) and self._segments[-1].key == (about.st_dev, about.st_ino)


def _is_rotated(name: str, prefix: str) -> bool:
    number = name[len(prefix) :]
    return name.startswith(prefix) and number.isascii() and number.isdigit() and len(number) < 7


def _close(chain: list[_Segment]) -> None:
    for segment in chain:
        os.close(segment.fd)


def _read_exactly(fd: int, offset: int, length: int) -> bytes:
    parts = []
    while length:
        part = os.pread(fd, length, offset)
        if not part:
            parts.append(bytes(length))
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)

"""A server's log at any size: opened at once, read from any offset, followed over rotation. No UI code."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from vllm_console.logs.prefix import PROCESSES
from vllm_console.text import plain, size
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import open_regular

BLOCK = 64 * 1024
"""Bytes per read."""

WINDOW = 16 * 1024 * 1024
"""If this many bytes between two multiples of it hold no newline, a line is broken there: see `LogFile`."""

READ_BYTES = 32 * 1024 * 1024
"""Maximum bytes read per call."""

SEARCH_BYTES = 4 * 1024 * 1024
"""Default size of one search step: some tens of milliseconds, at worst some tenths of a second."""

_SPECIAL = lazy_pattern(rb"[\x1b\r\t\x00]")
"""Bytes that change how a line is displayed."""

Pattern = str | re.Pattern[str]


class Found(msgspec.Struct, frozen=True):
    """One search step: the line if found, and where the next step continues."""

    line: Line | None
    next_offset: int
    done: bool
    """Whether the end (or start) of the log was reached, so there is nothing more to search."""


def compile_pattern(pattern: Pattern) -> re.Pattern[str]:
    """A search pattern: text is taken literally, and is case-sensitive only if it has capitals."""
    if isinstance(pattern, str):
        return re.compile(re.escape(pattern), 0 if pattern != pattern.lower() else re.IGNORECASE)
    return pattern


class LogFile:
    """Random access to a log and the files rotated away from it, by offsets as in `LogStream`.

    Nothing is read on opening, and the file need not exist yet. ``clean`` redacts secrets in each line. Offsets passed
    to methods must come from them (`Line.offset`, `Line.end`, `start`, `end`). A line longer than `WINDOW` is returned
    in pieces, so a file without newlines costs no more than another. All methods may be called from any thread; each
    reads a bounded amount, and an unreadable log is an empty one with `problem` set.
    """

    def __init__(self, path: Path | str, clean: Callable[[str], str] = str) -> None:
        self.path = Path(path)
        self._clean = clean
        self._lock = threading.RLock()
        self._stream = LogStream(self.path)
        self._polled = False
        self._position = self._line_start(self._stream.end)

    @property
    def start(self) -> int:
        """Offset of the oldest available byte."""
        return self._stream.start

    @property
    def end(self) -> int:
        """Offset after the newest byte, as of the last `refresh`, `tail` or `poll`."""
        return self._stream.end

    @property
    def epoch(self) -> int:
        """Changes when the log was truncated: earlier offsets are then invalid."""
        return self._stream.epoch

    @property
    def problem(self) -> str:
        """Why the log cannot be read, as a sentence; empty if it can, or does not exist yet."""
        return self._stream.problem

    def refresh(self) -> int:
        """Check how far the log has grown; return the new `end`."""
        with self._lock:
            epoch = self._stream.epoch
            self._stream.refresh(self._position if self._polled else None)
            if epoch != self._stream.epoch:
                self._position = self._stream.live_start
            return self._stream.end

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            self._stream.close()

    def tail(self, n: int) -> list[Line]:
        """The last ``n`` lines, including an unfinished last one. `poll` continues after the last finished one."""
        with self._lock:
            lines = self.before(self.refresh(), n)
            self._position = self._line_start(self._stream.end)
            return lines

    def poll(self, max_bytes: int = READ_BYTES) -> list[Line]:
        """The lines finished since the last `poll` or `tail` (or since opening), each exactly once."""
        with self._lock:
            self._polled = True
            self.refresh()
            lines = []
            for offset, raw in self._forward(self._position, max_bytes):
                line = make_line(offset, raw, self._clean)
                if not line.complete and line.end == self._stream.end:
                    break
                lines.append(line)
                self._position = line.end
            return mark_tracebacks(lines)

    def before(self, offset: int, n: int, max_bytes: int = READ_BYTES) -> list[Line]:
        """Up to ``n`` lines that end at or before ``offset``, oldest first. Fewer when they are very long."""
        with self._lock:
            found = islice(self._backward(min(offset, self._stream.end), max_bytes), max(0, n))
            lines = [make_line(start, raw, self._clean) for start, raw in found]
        return mark_tracebacks(lines[::-1])

    def after(self, offset: int, n: int, max_bytes: int = READ_BYTES) -> list[Line]:
        """Up to ``n`` lines from ``offset`` on. Fewer when they are very long."""
        with self._lock:
            found = islice(self._forward(max(offset, self._stream.start), max_bytes), max(0, n))
            return mark_tracebacks([make_line(start, raw, self._clean) for start, raw in found])

    def count(self, low: int, high: int, max_bytes: int = READ_BYTES) -> tuple[int, int]:
        """How many lines end between two offsets, and how far was counted."""
        with self._lock:
            low = max(low, self._stream.start)
            high = min(high, self._stream.end, low + max_bytes)
            total, at = 0, low
            while at < high:
                block = self._stream.read(at, min(at + 16 * BLOCK, high))
                if not block:
                    break
                total += block.count(b"\n")
                at += len(block)
            return total, max(at, low)

    def search(
        self, pattern: Pattern, from_offset: int, backwards: bool = False, max_bytes: int = SEARCH_BYTES
    ) -> Found:
        """One search step over the displayed text: forward from, or backward before, ``from_offset``.

        Searches about ``max_bytes`` and returns where to continue, so a caller can show progress and stop.
        """
        wanted = compile_pattern(pattern)
        with self._lock:
            walk = self._backward if backwards else self._forward
            edge = self._stream.start if backwards else self._stream.end
            at = self._skip(pattern, from_offset, backwards, max_bytes) if isinstance(pattern, str) else from_offset
            left = max_bytes - abs(at - from_offset)
            for offset, raw in walk(at, left) if left > 0 else ():
                at = offset if backwards else offset + len(raw)
                if _may_match(wanted, raw):
                    line = make_line(offset, raw, self._clean)
                    if wanted.search(line.text):
                        return Found(line, at, False)
            return Found(None, at, at <= edge if backwards else at >= edge)

    def matches(self, pattern: Pattern, from_offset: int, max_bytes: int = SEARCH_BYTES) -> tuple[list[Line], int]:
        """One counting step: the finished lines that match, forward from ``from_offset``, and where to continue.

        A step without a match skips about ``max_bytes``; one with matches reads a few blocks.
        """
        wanted = compile_pattern(pattern)
        found: list[Line] = []
        with self._lock:
            at = max(from_offset, self._stream.start)
            if isinstance(pattern, str):
                at = self._skip(pattern, at, False, max_bytes)
            for offset, raw in self._forward(at, 4 * BLOCK):
                if not raw.endswith(b"\n") and offset + len(raw) >= self._stream.end:
                    break
                at = offset + len(raw)
                if _may_match(wanted, raw):
                    line = make_line(offset, raw, self._clean)
                    if wanted.search(line.text):
                        found.append(line)
            return found, at

    def _skip(self, text: str, offset: int, backwards: bool, max_bytes: int) -> int:
        """Offset up to which whole blocks surely hold no match; ten times as fast as testing each line."""
        if not text.isascii():
            return offset
        needle, at = text.lower().encode(), offset
        size = min(4 * BLOCK, max_bytes)
        while abs(at - offset) < max_bytes:
            low, high = (at - size, at) if backwards else (at, at + size)
            block = self._stream.read(max(low, self._stream.start), min(high, self._stream.end))
            edge = block.find(b"\n") if backwards else block.rfind(b"\n")
            whole = block[edge + 1 :] if backwards else block[: edge + 1]
            if edge < 0 or not whole or needle in whole.lower() or _SPECIAL.search(whole):
                break
            at += -len(whole) if backwards else len(whole)
        return at

    def _line_start(self, offset: int) -> int:
        """Where the unfinished line before ``offset`` begins; ``offset`` itself if there is none."""
        for start, raw in self._backward(offset, WINDOW):
            return offset if raw.endswith(b"\n") else start
        return offset

    def _forward(self, offset: int, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Lines as (offset, bytes) from ``offset`` on; the last may lack its newline."""
        low = at = max(offset, self._stream.start)
        parts: list[bytes] = []
        stop = at + max_bytes
        while at < self._stream.end and (at < stop or parts):
            block = self._stream.read(at, min((at // BLOCK + 1) * BLOCK, self._stream.end))
            done = 0
            while (newline := block.find(b"\n", done)) >= 0:
                parts.append(block[done : newline + 1])
                yield low, b"".join(parts)
                parts, done = [], newline + 1
                low = at + done
                if low >= stop:
                    return
            if done < len(block):
                parts.append(block[done:])
            at += len(block)
            if at % WINDOW == 0 and at - low >= WINDOW:
                yield low, b"".join(parts)
                parts, low = [], at
                if at >= stop:
                    return
        if parts:
            yield low, b"".join(parts)

    def _backward(self, offset: int, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """Lines as (offset, bytes) that end at ``offset`` and before, newest first, split as `_forward` does."""
        at = offset
        stop = at - max_bytes
        parts: list[bytes] = []  # of the line being assembled, its end first
        while at > self._stream.start and (at > stop or parts):
            low = max((at - 1) // BLOCK * BLOCK, self._stream.start)
            block = self._stream.read(low, at)
            cut = len(block)
            look = cut if parts else cut - 1  # the last byte may be the newline of the first line itself
            while (newline := block.rfind(b"\n", 0, look)) >= 0:
                parts.append(block[newline + 1 : cut])
                yield low + newline + 1, b"".join(reversed(parts))
                parts, cut, look = [], newline + 1, newline
                if low + cut <= stop:
                    return
            parts.append(block[:cut])
            at = low
            size = sum(map(len, parts)) if at % WINDOW == 0 else 0
            if size > WINDOW:
                whole = b"".join(reversed(parts))
                if b"\n" not in whole[:WINDOW]:
                    yield at + WINDOW, whole[WINDOW:]
                    parts = [whole[:WINDOW]]
                    if at <= stop:
                        return
        if parts:
            yield at, b"".join(reversed(parts))


def _may_match(pattern: re.Pattern[str], raw: bytes) -> bool:
    """Whether a line might match once sanitized: a cheap test, true if unsure."""
    if len(raw) > BLOCK or b"\x1b" in raw or b"\r" in raw or b"\t" in raw:
        return True
    return pattern.search(raw.decode("utf-8", "replace")) is not None


# -- one line of a vLLM server's log ----------------------------------------------------------------------------------


LINE_CHARACTERS = 2000
"""Longer lines are truncated for display, and marked."""

_KEPT_BYTES = 8 * LINE_CHARACTERS
"""Maximum number of bytes decoded of a longer line."""


class LogLevel(IntEnum):
    """A line's severity. The numbers are those of `logging`."""

    DEBUG = 10
    INFO = 20
    WARNING = 30
    ERROR = 40


class Line(msgspec.Struct, frozen=True):
    """One line of a log, sanitized for display: no escape codes, no secrets, bounded length.

    ``offset`` and ``end`` are where it begins and where the next one does. ``level`` is None if the line has none.
    ``complete`` is False for the last line while its newline is not written yet.
    """

    offset: int
    end: int
    text: str
    level: LogLevel | None = None
    complete: bool = True


_LEVELS = {
    "DEBUG": LogLevel.DEBUG,
    "INFO": LogLevel.INFO,
    "WARNING": LogLevel.WARNING,
    "WARN": LogLevel.WARNING,
    "ERROR": LogLevel.ERROR,
    "CRITICAL": LogLevel.ERROR,
}

# vLLM's own records come with "(EngineCore pid=7) " in front or without; uvicorn writes "INFO:     "; torch's glog form
# is "W1120 10:02:46"; JSON records have "levelname".
_LEVEL = lazy_pattern(
    rf"{PROCESSES}(?:(?P<name>DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL)(?=[\s:])"
    r"|\[?(?P<glog>[IWEF])\d{4} \d\d:\d\d:\d\d"
    r'|\{.*"levelname": ?"(?P<json>[A-Z]+)")'
)
_GLOG = {"I": LogLevel.INFO, "W": LogLevel.WARNING, "E": LogLevel.ERROR, "F": LogLevel.ERROR}

_TRACEBACK = lazy_pattern(
    rf"{PROCESSES}(?:Traceback \(most recent call last\):"
    r'|\s+File "[^"]*", line \d+'
    r"|(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::|$)"
    r"|vllm(?: \w+)?: error: "
    r"|terminate called |Segmentation fault|!!!!!!! Segfault)"
)
_WARNINGS = lazy_pattern(r"\S+:\d+: \w*Warning: ")
_INDENTED = lazy_pattern(rf"{PROCESSES}\s+\S")


def log_level_of(text: str) -> LogLevel | None:
    """The level that a line states, or ERROR if it is part of a traceback; None otherwise."""
    match = _LEVEL.match(text)
    if match:
        name, glog, json = match.group("name", "glog", "json")
        return _GLOG[glog] if glog else _LEVELS.get(name or json)
    if _TRACEBACK.match(text):
        return LogLevel.ERROR
    return LogLevel.WARNING if _WARNINGS.match(text) else None


def mark_tracebacks(lines: Sequence[Line]) -> list[Line]:
    """Give the source lines inside tracebacks, which have no level, the level of the traceback."""
    marked = list(lines)
    # Backwards first: a page may begin in the middle of a traceback, before one of its ``File`` lines.
    inside = False
    for index in range(len(marked) - 1, -1, -1):
        inside = _spread(marked, index, inside) and "Traceback (" not in marked[index].text
    inside = False
    for index in range(len(marked)):
        inside = _spread(marked, index, inside)
    return marked


def _spread(lines: list[Line], index: int, inside: bool) -> bool:
    line = lines[index]
    if line.level is None and inside and _INDENTED.match(line.text):
        lines[index] = replace(line, level=LogLevel.ERROR)
        return True
    return line.level is LogLevel.ERROR and _TRACEBACK.match(line.text) is not None


def make_line(offset: int, raw: bytes, clean: Callable[[str], str]) -> Line:
    """Make a `Line` of the bytes at ``offset``, its newline included; ``clean`` redacts secrets."""
    end = offset + len(raw)
    body = raw.rstrip(b"\r\n")
    body = body[body.rfind(b"\r") + 1 :]  # what a terminal would show of a line redrawn with carriage returns
    decoded = body[:_KEPT_BYTES].decode("utf-8", "replace")
    text = clean(plain(decoded, LINE_CHARACTERS))
    if len(body) > _KEPT_BYTES or (len(decoded) > LINE_CHARACTERS and len(text) >= LINE_CHARACTERS):
        text = f"{text} … [cut: a line of {size(end - offset)}]"
    return Line(offset, end, text, log_level_of(text), raw.endswith(b"\n"))


# -- a log and its rotated predecessors as one byte stream, with offsets that stay valid during rotation --------------


MAX_SEGMENTS = 64
"""At most this many rotated files are read."""

_STABLE_TRIES = 4


class _Segment(msgspec.Struct):
    """One file of the log; the newest one still grows."""

    fd: int
    key: tuple[int, int]
    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size


class LogStream:
    """The bytes of ``path``, preceded by those of ``path.1``, ``path.2``, … as far as these exist.

    An offset refers to the same byte for as long as the stream is open: the file that is the newest at first begins at
    0, earlier rotated files have negative offsets, and a new file continues where the rotated one ended. Files are held
    open, so nothing is missed between a rename and the next poll. ``epoch`` counts truncations, which invalidate what
    was read before.

    Not thread-safe; `LogFile` locks.
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
        """Offset of the first available byte."""
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
        """Check how far the log has grown, and whether it was rotated, truncated, deleted or recreated.

        Deleted files are closed, except those with bytes from ``keep_from`` on.
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
        """The bytes from ``low`` to ``high``, across files; NUL where a file has shrunk meanwhile."""
        parts = []
        for segment in self._segments:
            first, last = max(low, segment.base), min(high, segment.end)
            if first < last:
                parts.append(_read_exactly(segment.fd, first - segment.base, last - first))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Close all files."""
        while self._segments:
            os.close(self._segments.pop().fd)

    def _open_chain(self) -> list[_Segment] | None:
        """Open the log's files, oldest first; None during a rotation or if none can be read."""
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
            return []  # does not exist yet
        except OSError as error:
            self.problem = f"{self.path.parent} can't be read: {os.strerror(error.errno or 0)}"
            return []
        rotated = [self.path.with_name(f"{prefix}{number}") for number in sorted(numbers)[:MAX_SEGMENTS]]
        return [*reversed(rotated), *([self.path] if present else [])]

    def _open(self, path: Path) -> _Segment | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = f"{path} can't be read: {os.strerror(error.errno or 0)}"
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
        """The inodes at these names now, to detect a rotation while they were opened."""
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
        """Add newly opened files to the stream: known ones match by inode, new ones follow the newest known."""
        known = {segment.key for segment in self._segments}
        if not known:
            self._lay_out(chain)
            return
        positions = [index for index, segment in enumerate(chain) if segment.key in known]
        fresh = chain[positions[-1] + 1 :] if positions else chain
        # The newest known file was finished before its successor appeared: its size is final now.
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
        """Assign offsets to the first files seen: the newest begins at 0; all are new if there was no log before."""
        base = self._resume
        if self._before_opening:
            base -= sum(segment.size for segment in chain[:-1])
        for segment in chain:
            segment.base = base
            base = segment.end
        self._segments = chain

    def _truncated(self, size: int) -> None:
        """Start over after the existing offsets, so that known offsets never refer to other bytes."""
        live = self._segments[-1]
        self.epoch += 1
        moved = live.size
        for segment in self._segments:
            segment.base += moved
        live.size = size
        self._resume = live.base

    def _drop_deleted(self, keep_from: int | None) -> None:
        """Drop rotated files that were deleted since, oldest first; the one before the newest may still be unread."""
        while len(self._segments) > 2:
            oldest = self._segments[0]
            wanted = os.fstat(oldest.fd).st_nlink or (keep_from is not None and oldest.end > keep_from)
            if wanted and len(self._segments) <= 2 * MAX_SEGMENTS:
                return
            os.close(self._segments.pop(0).fd)

    def _is_live_in_place(self) -> bool:
        """Whether the newest known file still has the log's name, so that no rotation happened."""
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


def lines_before(file: BinaryIO, offset: int) -> int:
    """Advance the file by ``offset`` bytes and count the newlines read."""
    lines = 0
    while offset > 0 and (part := file.read(min(offset, 1 << 20))):
        lines += part.count(b"\n")
        offset -= len(part)
    return lines


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


END_BYTES = 512 << 10
"""Bytes of a failed server's log, from the end, that are searched for the cause."""


def last_lines(path: Path, inode: int | None, begin: int, end: int | None = None) -> tuple[int, list[str]]:
    """The last lines of one generation's part of a server's log, and how many lines of the file precede them.

    The part is from ``begin`` to ``end`` (bytes; None: the end of the file) if the file still has this inode; otherwise
    it starts at the file's beginning.
    """
    try:
        with open_regular(path) as file:
            same = inode in (None, os.fstat(file.fileno()).st_ino)
            size = file.seek(0, os.SEEK_END)
            end = min(size, end) if end is not None and same else size
            start = max(begin if same else 0, end - END_BYTES)
            file.seek(0)
            before = lines_before(file, start)
            file.seek(start)
            data = file.read(end - start)
    except OSError:
        return 0, []
    return before, data.decode(errors="replace").removesuffix("\n").split("\n") if data else []

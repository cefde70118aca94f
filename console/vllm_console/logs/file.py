"""A server's log at any size: opened at once, read from any place, followed over rotation. No screen in here."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_console.logs.lines import Level, Line, level_of, make_line, mark_tracebacks
from vllm_console.logs.stream import LogStream

BLOCK = 64 * 1024
"""Bytes per read."""

WINDOW = 16 * 1024 * 1024
"""Where so many bytes between two multiples of it hold no newline, a line is broken there: see `LogFile`."""

READ_BYTES = 32 * 1024 * 1024
"""What one call reads at most."""

SEARCH_BYTES = 4 * 1024 * 1024
"""What one step of a search looks at by default: some tens of milliseconds, at worst some tenths of a second."""

_SPECIAL = re.compile(rb"[\x1b\r\t\x00]")
"""Bytes that make a line look different from what is written."""

Pattern = str | re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Found:
    """One step of a search: the line if there was one, and where the next step goes on."""

    line: Line | None
    next_offset: int
    done: bool
    """Whether the end (or start) of the log was reached, so that there is nothing more to look at."""


def compile_pattern(pattern: Pattern) -> re.Pattern[str]:
    """A pattern to search with: text is taken literally, and its case matters only if it has capitals."""
    if isinstance(pattern, str):
        return re.compile(re.escape(pattern), 0 if pattern != pattern.lower() else re.IGNORECASE)
    return pattern


class LogFile:
    """Random access to a log and the files rotated away from it, by offsets as in `LogStream`.

    Nothing is read on opening, and the file need not exist yet. ``clean`` takes secrets out of each line. Offsets that
    methods take must be ones they gave (`Line.offset`, `Line.end`, `start`, `end`). A line longer than `WINDOW` is
    given in pieces, so that a file without newlines costs no more than another. All methods may be called from any
    thread; each reads a bounded amount, and an unreadable log is an empty one with `problem` set.
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
        """Offset of the oldest byte there is."""
        return self._stream.start

    @property
    def end(self) -> int:
        """Offset after the newest byte, as of the last `refresh`, `tail` or `poll`."""
        return self._stream.end

    @property
    def epoch(self) -> int:
        """Changes when the log was truncated: what was read before no longer is where it was."""
        return self._stream.epoch

    @property
    def problem(self) -> str:
        """Why the log cannot be read, as a sentence; empty when all is well or it is just not there yet."""
        return self._stream.problem

    def refresh(self) -> int:
        """Look how far the log has grown; returns the new `end`."""
        with self._lock:
            epoch = self._stream.epoch
            self._stream.refresh(self._position if self._polled else None)
            if epoch != self._stream.epoch:
                self._position = self._stream.live_start
            return self._stream.end

    def close(self) -> None:
        """Let go of the files."""
        with self._lock:
            self._stream.close()

    def tail(self, n: int) -> list[Line]:
        """The last ``n`` lines, an unfinished last one included. `poll` goes on behind the last finished one."""
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
        if n <= 0:
            return []
        lines: list[Line] = []
        with self._lock:
            for start, raw in self._backward(min(offset, self._stream.end), max_bytes):
                lines.append(make_line(start, raw, self._clean))
                if len(lines) == n:
                    break
        lines.reverse()
        return mark_tracebacks(lines)

    def after(self, offset: int, n: int, max_bytes: int = READ_BYTES) -> list[Line]:
        """Up to ``n`` lines from ``offset`` on. Fewer when they are very long."""
        if n <= 0:
            return []
        lines: list[Line] = []
        with self._lock:
            for start, raw in self._forward(max(offset, self._stream.start), max_bytes):
                lines.append(make_line(start, raw, self._clean))
                if len(lines) == n:
                    break
        return mark_tracebacks(lines)

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
        """One step of a search over the text as it is shown: forwards from, or backwards before, ``from_offset``.

        Looks at about ``max_bytes`` and says where to go on, so that a caller can show progress and give up.
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

    def _skip(self, text: str, offset: int, backwards: bool, max_bytes: int) -> int:
        """How far whole blocks certainly hold no match: looking at them at once is ten times as fast as by lines."""
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
        """Where the unfinished line before ``offset`` begins; ``offset`` itself when there is none."""
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
        """Lines as (offset, bytes) that end at ``offset`` and before, newest first, broken as `_forward` does."""
        at = offset
        stop = at - max_bytes
        parts: list[bytes] = []  # of the line being put together, its end first
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
    """Whether a line might match once it is made fit to show: cheap to ask, true when only making it can tell."""
    if len(raw) > BLOCK or b"\x1b" in raw or b"\r" in raw or b"\t" in raw:
        return True
    return pattern.search(raw.decode("utf-8", "replace")) is not None


__all__ = ["Found", "Level", "Line", "LogFile", "Pattern", "compile_pattern", "level_of"]

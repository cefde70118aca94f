"""Count requests that vLLM refuses for their API key: these are in no metric, only in the log's access lines."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import BinaryIO

from vllm_console.metrics.parse import GENERATING
from vllm_launchers.patterns import lazy_pattern
from vllm_launchers.private import open_regular

MOST_BYTES = 1024 * 1024
"""Maximum bytes per read: if a server writes more than this between two reads, only the newest part is counted."""

LONGEST_LINE = 4096

_REFUSED = b'" 401 '
_LINE = lazy_pattern(rb'^(?:\([^()\n]{1,60}\) ?)?INFO: +\S+ - "POST ([^ ?"]+)[^" ]* HTTP/[0-9.]+" 401 ', re.MULTILINE)
_ROUTES = frozenset(route.encode() for route in GENERATING)


class UnauthorizedCounter:
    """Counts refusals from its creation on. A rotated log is read to its end, its successor from the start."""

    def __init__(self, log: Path) -> None:
        self._path = log
        self._file: BinaryIO | None = None
        self._at = 0
        self._rest = b""
        self._total = 0
        self._open()
        if self._file is not None:
            self._at = os.fstat(self._file.fileno()).st_size

    def count(self) -> int:
        """Number of refusals so far; those in an unreadable log are not counted."""
        with contextlib.suppress(OSError):
            while self._file is not None and not self._read(self._file):
                self.close()
                self._open()
        if self._file is None:
            self._open()
        return self._total

    def close(self) -> None:
        """Close the log."""
        if self._file is not None:
            self._file.close()
        self._file, self._at, self._rest = None, 0, b""

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._file = open_regular(self._path)

    def _read(self, file: BinaryIO) -> bool:
        """Count what was appended; return whether the file is still the current log. Raises OSError."""
        found = os.fstat(file.fileno())
        try:
            now = self._path.stat()
            current = (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino)
        except FileNotFoundError:
            current = True  # in the middle of a rotation: its successor follows
        found = os.fstat(file.fileno())  # its size while it was, or just after it ceased to be, the log
        if found.st_size < self._at:
            self._at, self._rest = 0, b""
        if found.st_size > self._at:
            low = max(self._at, found.st_size - MOST_BYTES)
            rest = self._rest if low == self._at else b""
            lines, _, last = (rest + os.pread(file.fileno(), found.st_size - low, low)).rpartition(b"\n")
            self._at, self._rest = found.st_size, last[:LONGEST_LINE]
            if _REFUSED in lines:
                self._total += sum(route in _ROUTES for route in _LINE.findall(lines))
        return current

"""The log of findings: JSON lines in the state folder, for oneself alone, bounded in size."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.private import open_file, own_folder

NAME, OLDER, LOCK = "findings.log", "findings.log.1", "findings.lock"
MOST_BYTES = 1 << 20
"""At this size the log becomes the older one, and that one goes."""
MOST_READ = 2 * MOST_BYTES
"""Of a file that is longer all the same."""


class FindingsLog:
    """Appends to the log. Of several consoles and ``watch`` commands one writes it: whoever holds the lock.

    Nothing that happens to the disk is raised: ``trouble`` says it in a sentence.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / NAME
        self._older, self._lock_path = state / OLDER, state / LOCK
        self._lock: int | None = None
        self.trouble = ""

    def mine(self) -> bool:
        """Whether this process is the one that writes and sends; it becomes that when nobody else is."""
        if self._lock is not None:
            return True
        try:
            own_folder(self.path.parent)
            lock = open_file(self._lock_path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            self._say(self._lock_path, error)
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._lock = lock
        return True

    def append(self, document: Mapping[str, Any]) -> None:
        """Write one line."""
        line = (json.dumps(document, ensure_ascii=True) + "\n").encode()
        try:
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_size + len(line) > MOST_BYTES:
                    self.path.replace(self._older)
            descriptor = open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            try:
                _write(descriptor, line)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._say(self.path, error)
        else:
            self.trouble = ""

    def read(self) -> Iterator[Mapping[str, Any]]:
        """All that is there, oldest first; lines that are none are passed over."""
        for path in (self._older, self.path):
            try:
                with path.open("rb") as file:
                    lines = file.read(MOST_READ).splitlines()
            except OSError:
                continue
            for line in lines:
                try:
                    document = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(document, dict):
                    yield document

    def close(self) -> None:
        """Let another console write."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _say(self, path: Path, error: OSError) -> None:
        self.trouble = f"{path}: cannot be written: {error.strerror}"


def _write(descriptor: int, line: bytes) -> None:
    """All of a line or nothing: what a full disk cuts short is taken back. Raises OSError."""
    before = os.fstat(descriptor).st_size
    left = line
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)  # nobody else writes: the lock is held
        raise

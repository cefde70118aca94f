"""A recording of a terminal as an asciicast (version 2): a header, then one line of JSON per event."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path


class Cast:
    """Records the output to a terminal of the given size. Thread-safe; raises nothing once it is open.

    ``trouble`` says in a sentence why the recording is incomplete.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, path: Path, columns: int, rows: int, title: str) -> None:
        self.trouble = ""
        self._path, self._size = path, (columns, rows)
        self._file = path.open("w", encoding="utf-8")
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        terminal = {name: os.environ[name] for name in ("TERM",) if name in os.environ}
        head = {"version": 2, "width": columns, "height": rows, "timestamp": int(time.time()), "title": title}
        self._line({**head, "env": terminal})

    def output(self, text: str) -> None:
        """Record text written to the terminal."""
        self._event("o", text)

    def resize(self, columns: int, rows: int) -> None:
        """Record a new terminal size."""
        if (columns, rows) != self._size:
            self._size = columns, rows
            self._event("r", f"{columns}x{rows}")

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                self._lost(error)

    def _event(self, kind: str, data: str) -> None:
        with self._lock:
            if not self._file.closed and not self.trouble:
                self._line([round(time.monotonic() - self._begun, 6), kind, data])

    def _line(self, value: object) -> None:
        try:
            self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        self.trouble = f"{self._path}: the recording is incomplete: {error.strerror}"

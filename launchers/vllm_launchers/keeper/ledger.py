"""What a keeper writes: its server's record, changed one transition at a time, and notes about its own troubles."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import store
from vllm_launchers.keeper.lifecycle import Transition, next_state
from vllm_launchers.keeper.records import Generation, ServerRecord

NOTES_BYTES = 256 * 1024


class Notes:
    """``keeper.log``: one line per note, at most two files of 256 KiB. Never raises."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "keeper.log"

    def __call__(self, text: str) -> None:
        """Write a note."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{os.getpid()}] {text}\n"
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size > NOTES_BYTES:
                self._path.replace(self._path.with_name("keeper.log.1"))
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, line.encode())
            finally:
                os.close(fd)


class Ledger:
    """The record of one server in memory and on disk. A write that fails is made up for later."""

    def __init__(self, folder: Path, record: ServerRecord, note: Notes) -> None:
        self.record = record
        self._folder = folder
        self._note = note
        self.behind = False
        """Whether the file lags behind because it could not be written."""

    def change(self, **fields: Any) -> None:
        """Change fields of the record and write it."""
        self.record = replace(self.record, **fields)
        self.write()

    def move(self, transition: Transition, reason: str, generation: Generation | None = None, **fields: Any) -> None:
        """Change the state by a transition, and in the same write the present generation and other fields."""
        state = next_state(transition, self.record.state)
        if generation is not None:
            fields["generations"] = (*self.record.generations[:-1], generation)
        self._note(f"{transition}: {self.record.state} → {state}" + (f" ({reason})" if reason else ""))
        self.change(state=state, state_since=time.time(), reason=reason, **fields)

    def write(self) -> None:
        """Write the record; on failure (disk full) note it once and stay `behind`."""
        try:
            store.write_record(self._folder, self.record)
        except OSError as error:
            if not self.behind:
                self._note(f"record.json cannot be written: {error}")
            self.behind = True
        else:
            if self.behind:
                self._note("record.json is written again")
            self.behind = False

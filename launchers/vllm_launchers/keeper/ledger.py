"""What a keeper writes: its server's record, changed one transition at a time, and notes about its own troubles."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import store
from vllm_launchers.keeper.errors import UnwrittenError
from vllm_launchers.keeper.lifecycle import Transition, next_state
from vllm_launchers.keeper.records import Generation, ServerRecord

NOTES_BYTES = 256 * 1024
CATCH_UP_SECONDS = 1.0


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
                os.write(fd, line.encode(errors="backslashreplace"))
            finally:
                os.close(fd)


class Ledger:
    """The record of one server in memory and on disk. A write that fails is made up for later.

    Until then the file is marked as lagging, so that readers ask the keeper in its place.
    """

    def __init__(self, folder: Path, record: ServerRecord, note: Notes) -> None:
        self._record = record
        self._folder = folder
        self._note = note
        self._mark: int | None = None
        self._tried_at = 0.0
        self.trouble = ""
        """Why the file lags behind; empty while it does not."""

    @property
    def record(self) -> ServerRecord:
        """The record as it is now."""
        return self._record

    def change(self, *, insist: bool = False, **fields: Any) -> None:
        """Change fields of the record and write it; ``insist``: not at all where it cannot be written.

        Raises `UnwrittenError` in that case only. After any error all is as before.
        """
        before = self._record
        self._record = replace(before, **fields)
        try:
            self.write()
            if insist and self.trouble:
                raise UnwrittenError(self.trouble)
        except BaseException:
            self._record = before
            raise

    def replace(self, record: ServerRecord) -> None:
        """Write another record in the place of this one."""
        self._record = record
        self.write()

    def move(
        self,
        transition: Transition,
        reason: str,
        generation: Generation | None = None,
        *,
        insist: bool = False,
        **fields: Any,
    ) -> None:
        """Change the state by a transition, and in the same write the present generation and other fields.

        Raises `UnwrittenError` like `change`.
        """
        before = self._record.state
        state = next_state(transition, before)
        if generation is not None:
            fields["generations"] = (*fields.get("generations", self._record.generations)[:-1], generation)
        self.change(insist=insist, state=state, state_since=time.time(), reason=reason, **fields)
        self._note(f"{transition}: {before} → {state}" + (f" ({reason})" if reason else ""))

    def write(self) -> None:
        """Write the record; on failure (disk full) note it once, say so in `trouble` and mark the file."""
        self._tried_at = time.monotonic()
        try:
            store.write_record(self._folder, self._record)
        except OSError as error:
            trouble = f"the record {self._folder / store.RECORD} cannot be written: {error.strerror or error}"
            if self.trouble != trouble:
                self._note(trouble)
            self.trouble = trouble
            if self._mark is None:
                self._mark = store.mark_lagging(self._folder)
        else:
            if self.trouble:
                self._note(f"{store.RECORD} is written again")
            self.trouble = ""
            self._unmark()

    def catch_up(self) -> None:
        """Try again to write what could not be written, about once a second."""
        if self.trouble and (self._mark is None or time.monotonic() - self._tried_at >= CATCH_UP_SECONDS):
            self.write()

    def told(self) -> ServerRecord:
        """The record as a console is to be told it: with why it cannot be written."""
        return replace(self._record, unwritten=self.trouble)

    @property
    def homeless(self) -> bool:
        """Whether there is nothing left to write to: the folder is gone."""
        return not self._folder.is_dir()

    def _unmark(self) -> None:
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None

"""What a keeper writes: its server's record, one transition at a time, and notes about its own problems."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import folders
from vllm_launchers.keeper.errors import (
    NewerRecordError,
    NoSuchServerError,
    NotOursError,
    RecordError,
    UnwrittenError,
)
from vllm_launchers.keeper.files import KEEPER_LOG, RECORD
from vllm_launchers.keeper.lifecycle import Transition, next_state
from vllm_launchers.keeper.records import Generation, ServerRecord
from vllm_launchers.values import replace

NOTES_BYTES = 256 * 1024
NOTE_LENGTH = 4096
"""Maximum characters of a note."""
CATCH_UP_SECONDS = 1.0
RESTORED = "was deleted; restored"
"""Suffix of a note about a deleted file."""
OVERWRITTEN = "was overwritten; restored"
"""Suffix of a note about a record that had become unreadable."""


class Notes:
    """``keeper.log``: one line per note, at most two files of 256 KiB. Never raises."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / KEEPER_LOG

    def __call__(self, text: str) -> None:
        """Write a note."""
        if len(text) > NOTE_LENGTH:
            text = f"{text[:NOTE_LENGTH]} … ({len(text)} characters)"
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} [{os.getpid()}] {text}\n"
        self.bound()
        with contextlib.suppress(OSError):
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                os.write(fd, line.encode(errors="backslashreplace"))
            finally:
                os.close(fd)

    def recent(self, seconds: float) -> list[str]:
        """The notes of the last ``seconds``, oldest first."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() - seconds))
        lines: list[str] = []
        for path in (self._path.with_name(f"{KEEPER_LOG}.1"), self._path):
            with contextlib.suppress(OSError):
                lines += path.read_text(errors="replace").splitlines()
        return [line for line in lines if line >= since and line[:1].isdigit()]

    def bound(self) -> None:
        """Start a new file when this one is full.

        Python's own messages (standard error) are redirected to the new file, too: otherwise they would keep growing
        the old one, and after the next rotation an unnamed one.
        """
        with contextlib.suppress(OSError):
            full = self._path.stat(follow_symlinks=False)
            if full.st_size <= NOTES_BYTES:
                return
            self._path.replace(self._path.with_name(f"{KEEPER_LOG}.1"))
            error = os.fstat(2)
            if (error.st_dev, error.st_ino) == (full.st_dev, full.st_ino):
                fresh = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                os.dup2(fresh, 2)
                os.close(fresh)


class RecordWriter:
    """The record of one server in memory and on disk. A write that fails is retried.

    Until it succeeds the file is marked as stale, so that readers ask the keeper instead.
    """

    def __init__(self, folder: Path, record: ServerRecord, note: Notes) -> None:
        self._record = record
        self._folder = folder
        self._note = note
        self._mark: int | None = None
        self._tried_at = 0.0
        self._readable: tuple[int, int, int] | None = None
        """Inode, modification time and size of the file when it was last readable."""
        self.trouble = ""
        """Why the file is stale; empty if it is not."""
        self._errno = 0

    @property
    def record(self) -> ServerRecord:
        """The current record."""
        return self._record

    def change(self, *, insist: bool = False, **fields: Any) -> None:
        """Change fields of the record and write it. ``insist``: change nothing if it can't be written.

        Raises `UnwrittenError`, only if ``insist``. After any error nothing has changed.
        """
        before = self._record
        self._record = replace(before, **fields)
        try:
            self.write()
            if insist and self.trouble:
                raise UnwrittenError(self.trouble, self._errno)
        except BaseException:
            self._record = before
            raise

    def replace(self, record: ServerRecord) -> None:
        """Write another record instead of this one."""
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
        """Change the state by a transition, and the current generation and other fields in the same write.

        Raises `UnwrittenError` like `change`.
        """
        before = self._record.state
        state = next_state(transition, before)
        if generation is not None:
            fields["generations"] = (*fields.get("generations", self._record.generations)[:-1], generation)
        self.change(insist=insist, state=state, state_since=time.time(), reason=reason, **fields)
        self._note(f"{transition}: {before} → {state}" + (f" ({reason})" if reason else ""))

    def write(self) -> None:
        """Write the record. On failure (disk full), note that once, set `trouble` and mark the file."""
        self._tried_at = time.monotonic()
        try:
            folders.write_record(self._folder, self._record)
        except OSError as error:
            trouble = f"can't write the record {self._folder / RECORD}: {error.strerror or error}"
            if self.trouble != trouble:
                self._note(trouble)
            self.trouble, self._errno = trouble, error.errno or 0
            if self._mark is None:
                self._mark = folders.mark_stale(self._folder)
        else:
            if self.trouble:
                self._note(f"{RECORD} is written again")
            self.trouble = ""
            self._unmark()

    def catch_up(self) -> None:
        """Retry a failed write about once a second; keep ``keeper.log`` bounded."""
        self._note.bound()
        if self.trouble and (self._mark is None or time.monotonic() - self._tried_at >= CATCH_UP_SECONDS):
            self.write()

    def restore(self) -> str:
        """Rewrite the record if it was deleted or overwritten with something unreadable; returns which, if so.

        A record of a newer version is left alone, because its writer knows more.
        """
        if self.trouble or not (happened := self._lost()):
            return ""
        self.write()
        return "" if self.trouble else happened

    def _lost(self) -> str:
        """`RESTORED` or `OVERWRITTEN`; empty if the file is readable."""
        try:
            status = os.lstat(self._folder / RECORD)
        except FileNotFoundError:
            return RESTORED
        except OSError:
            return ""
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen == self._readable:
            return ""
        try:
            folders.read_record(self._folder)
        except (NewerRecordError, NotOursError):
            return ""
        except NoSuchServerError:
            return RESTORED
        except RecordError:
            return OVERWRITTEN
        self._readable = seen
        return ""

    def reported(self) -> ServerRecord:
        """The record for an answer to a console, including why it can't be written."""
        return replace(self._record, unwritten=self.trouble)

    @property
    def folder_gone(self) -> bool:
        """Whether the folder is gone, so that there is nothing left to write to."""
        return not self._folder.is_dir()

    def _unmark(self) -> None:
        if self._mark is not None:
            os.close(self._mark)
            self._mark = None

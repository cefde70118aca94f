"""The command that runs beside a server (the keeper knows nothing of what it does): started, restarted, ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_launchers.keeper import evidence, processes, spawn
from vllm_launchers.keeper.records import ProcessIdentity

BACKOFF_SECONDS = 1.0
BACKOFF_CAP_SECONDS = 60.0
STEADY_SECONDS = 60.0
"""Having run this long, it starts again at the first back-off."""
TERMINATE_SECONDS = 5.0
LOG_BYTES = 1 << 20

Changed = Callable[[ProcessIdentity | None], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to run: the words, placeholders already filled in."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str
    umask: int


def fill(words: tuple[str, ...], server: ProcessIdentity, generation: int) -> tuple[str, ...]:
    """Put the server's pid, start time and generation into the companion's words."""
    values = {"{pid}": server.pid, "{start_time}": server.start_time, "{generation}": generation}
    filled = []
    for word in words:
        for name, value in values.items():
            word = word.replace(name, str(value))
        filled.append(word)
    return tuple(filled)


class Companion:
    """Keeps one command running while it is wanted. Driven by `tick`; never waits."""

    def __init__(self, folder: Path, changed: Changed, note: Callable[[str], None]) -> None:
        self.process: ProcessIdentity | None = None
        self._log = folder.resolve() / evidence.COMPANION_LOG
        self._changed = changed
        self._note = note
        self._wanted: Wanted | None = None
        self._fresh = False
        self._started_at = 0.0
        self._next_start = 0.0
        self._backoff = BACKOFF_SECONDS
        self._asked_at: float | None = None

    @property
    def gone(self) -> bool:
        """Whether none runs."""
        return self.process is None

    @property
    def busy(self) -> bool:
        """Whether it is on its way: to be started, or to end."""
        return self.process is None if self._wanted else self.process is not None

    def want(self, wanted: Wanted | None) -> None:
        """Run this from now on, in the place of what runs; None: let nothing run."""
        self._wanted = wanted if wanted and wanted.argv else None
        self._fresh = True
        self._backoff = BACKOFF_SECONDS
        self._next_start = 0.0

    def is_mine(self, process: ProcessIdentity) -> bool:
        """Whether one that a record points to runs, and writes this companion's log: else it is somebody else."""
        return processes.alive(process) and evidence.is_companion(process.pid, self._log)

    def adopt(self, process: ProcessIdentity, wanted: Wanted | None) -> None:
        """Take over one that another keeper started."""
        self.process = process
        self._wanted = wanted
        self._fresh = False

    def tick(self, now: float) -> None:
        """Look at it and do what is due."""
        if self.process is not None and not processes.alive(self.process):
            self._ended(now)
        if self.process is not None and (self._wanted is None or self._fresh):
            self._end(now)
        elif self.process is None and self._wanted is not None and now >= self._next_start:
            self._start(self._wanted, now)
        self._bound_log()

    def _ended(self, now: float) -> None:
        expected = self._asked_at is not None
        self.process = self._asked_at = None
        if not expected and self._wanted is not None:
            if now - self._started_at >= STEADY_SECONDS:
                self._backoff = BACKOFF_SECONDS
            self._note(f"the companion ended by itself; starting it again in {self._backoff:g} s")
            self._next_start = now + self._backoff
            self._backoff = min(self._backoff * 2, BACKOFF_CAP_SECONDS)
        self._changed(None)

    def _end(self, now: float) -> None:
        if self.process is None:
            return
        if self._asked_at is None:
            self._asked_at = now
            processes.send(self.process, signal.SIGTERM)
        elif now - self._asked_at >= TERMINATE_SECONDS:
            processes.send(self.process, signal.SIGKILL)

    def _start(self, wanted: Wanted, now: float) -> None:
        self._fresh = False
        try:
            log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                command = spawn.Command(wanted.argv, wanted.environment, wanted.cwd, log, wanted.umask)
                self.process = spawn.start(command, self._changed)
            finally:
                os.close(log)
            self._started_at = now
        except (OSError, spawn.SpawnError) as error:
            self._note(f"the companion cannot be started: {error}; trying again in {self._backoff:g} s")
            self._changed(None)
            self._next_start = now + self._backoff
            self._backoff = min(self._backoff * 2, BACKOFF_CAP_SECONDS)

    def _bound_log(self) -> None:
        """Empty its log when it grows too large (it is opened for appending, so writing just goes on)."""
        try:
            if self._log.stat(follow_symlinks=False).st_size <= LOG_BYTES:
                return
            log = os.open(self._log, os.O_WRONLY | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            os.ftruncate(log, 0)
        except OSError:
            return
        finally:
            os.close(log)

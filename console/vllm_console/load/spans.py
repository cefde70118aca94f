"""A log of load sent to one of our servers, and of tuner activity, in a file in the server's folder.

It has a line per start and end, and one per step of a tuner. Charts mark them. Load is sent even if the file cannot be
written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_console.load.tuner_progress import TunerProgress
from vllm_launchers.keeper import processes
from vllm_launchers.private import lock, open_file, open_regular, replace_file
from vllm_launchers.procfs import stat
from vllm_launchers.typed_decoding import decode_json

FILE_NAME = "loads.jsonl"
MOST_BYTES = 64 << 10
"""Beyond this size, the file is replaced by its newest half."""
LOCK_SECONDS = 10.0
"""The lock is held for milliseconds only, but its holder may wait for a CPU."""


class LoadSpan(msgspec.Struct, frozen=True):
    """When a load began and ended (Unix seconds; None: not yet), and its rate in requests per second, if it has one.

    ``tuner`` is the newest note of the tuner, if one sent the load.
    """

    began_at: float
    ended_at: float | None
    rate: float | None
    tuner: TunerProgress | None = None


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """The start or end of a load, or a step of a tuner. ``until`` is the latest possible end, for a process that was
    killed.

    ``process`` is the sender: pid, start time and boot, as in a `ProcessIdentity`.
    """

    id: str
    began_at: float | None = None
    until: float = 0.0
    rate: float | None = None
    process: tuple[int, int, str] | None = None
    ended_at: float | None = None
    tuner: TunerProgress | None = None


class LoadNote:
    """Notes one load in a file; does nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._id = f"{os.getpid()}-{time.time():.6f}"

    def begin(self, rate: float | None, seconds: float) -> None:
        """Note that the load begins now and lasts at most ``seconds``."""
        now, own = time.time(), stat(os.getpid())
        process = (own.pid, own.start_time, processes.boot_id()) if own is not None else None
        self._append(_Line(self._id, began_at=now, until=now + seconds, rate=rate, process=process))

    def tuner(self, progress: TunerProgress) -> None:
        """Note the progress of the tuner that sends the load."""
        self._append(_Line(self._id, tuner=replace(progress, pid=os.getpid())))

    def end(self) -> None:
        """Note that the load has ended."""
        self._append(_Line(self._id, ended_at=time.time()))

    def _append(self, line: _Line) -> None:
        if self._path is not None:
            _append(self._path, line)


@contextlib.contextmanager
def noted(folder: Path | None, rate: float | None, seconds: float) -> Iterator[LoadNote]:
    """Note that load is sent while this context lasts, at most ``seconds``; without a folder, nothing is noted."""
    note = LoadNote(folder / FILE_NAME if folder is not None else None)
    note.begin(rate, seconds)
    try:
        yield note
    finally:
        note.end()


def read_spans(folder: Path, now: float) -> tuple[LoadSpan, ...]:
    """The loads noted in a folder, oldest first, as of ``now`` (Unix seconds); unreadable lines are skipped.

    A killed process notes no end: its load counts as ended at its beginning (a tuner's at its last step), or at its
    latest possible end.
    """
    return LoadWatch(folder).spans(now)


class LoadWatch:
    """The loads sent to a server. The file is reread only when it has changed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._read_at: tuple[int, int, int] | None = None
        self._begun: tuple[_Load, ...] = ()
        self._open: tuple[_Load, ...] = ()
        """Loads that were running when the file was read."""
        self._newest: _Load | None = None
        """The newest load of a tuner."""

    def spans(self, now: float) -> tuple[LoadSpan, ...]:
        """As `read_spans`."""
        self._read_again(now)
        return tuple(LoadSpan(one.began_at, one.end(now), one.begin.rate, one.tuner) for one in self._begun)

    def progress(self, now: float) -> TunerProgress | None:
        """The running tuner's progress at ``now`` (Unix seconds); None if there is none, or it was killed."""
        tuners = [one.tuner for one in self._running(now) if one.tuner is not None]
        return tuners[-1] if tuners else None

    def load_test(self, now: float) -> int | None:
        """The pid of the newest command, other than a tuner, that sends load at ``now`` (Unix seconds); else None."""
        tests = [one.begin.process for one in self._running(now) if one.tuner is None]
        return tests[-1][0] if tests and tests[-1] is not None else None

    def killed_tuner(self, now: float) -> TunerProgress | None:
        """The last note of the newest tuner, if it was killed: its process is gone, and it noted no end."""
        self._read_again(now)
        one = self._newest
        if one is None or one.ended_at is not None or _runs(one.begin.process):
            return None
        return one.tuner

    def _running(self, now: float) -> list[_Load]:
        self._read_again(now)
        return [one for one in self._open if one.end(now) is None]

    def _read_again(self, now: float) -> None:
        """Read the file if it has changed; if it can't be read, there are no known loads."""
        try:
            found = self._path.stat()
            read_at = (found.st_ino, found.st_size, found.st_mtime_ns)
            if read_at != self._read_at:
                self._begun = tuple(one for one in _read(self._path).values() if one.begun)
                self._open = tuple(one for one in self._begun if one.end(now) is None)
                self._newest = next((one for one in reversed(self._begun) if one.tuner), None)
                self._read_at = read_at
        except OSError:
            self._begun, self._open, self._newest, self._read_at = (), (), None, None


class _Load:
    def __init__(self) -> None:
        self.begin = _Line("")
        self.ended_at: float | None = None
        self.tuner: TunerProgress | None = None

    @property
    def begun(self) -> bool:
        return self.begin.began_at is not None

    @property
    def began_at(self) -> float:
        """When it began (Unix seconds)."""
        return self.begin.began_at or 0.0

    def add(self, line: _Line) -> None:
        if line.ended_at is not None:
            self.ended_at = line.ended_at
        elif line.began_at is not None:
            self.begin = line
        elif line.tuner is not None:
            self.tuner = line.tuner

    def end(self, now: float) -> float | None:
        """When it ended, as far as known; None while its process runs."""
        if self.ended_at is not None:
            return self.ended_at
        if self.begin.until < now:
            return self.begin.until
        return None if _runs(self.begin.process) else self.tuner.since if self.tuner is not None else self.began_at


def _runs(process: tuple[int, int, str] | None) -> bool:
    """Whether this same process runs: its pid may have been reused."""
    if process is None or process[2] != processes.boot_id():
        return False
    found = stat(process[0])
    return found is not None and found.running and found.start_time == process[1]


def _read(path: Path) -> dict[str, _Load]:
    """The loads in a file, by id. Raises OSError if it cannot be read."""
    with open_regular(path) as file:
        return _loads(file.read(2 * MOST_BYTES).splitlines())


def _loads(lines: Iterable[bytes]) -> dict[str, _Load]:
    """The loads described by some lines, by id."""
    found: dict[str, _Load] = {}
    for text in lines:
        with contextlib.suppress(msgspec.DecodeError):
            line = decode_json(text, _Line)
            found.setdefault(line.id, _Load()).add(line)
    return found


def _append(path: Path, line: _Line) -> None:
    """Add a line. A file that is too large is replaced by its newest half and the lines of running loads."""
    text = msgspec.json.encode(line) + b"\n"
    with contextlib.suppress(OSError):
        descriptor = _opened(path)
        try:
            if os.fstat(descriptor).st_size > MOST_BYTES:
                replace_file(path, b"".join(_worth_keeping(path.read_bytes().splitlines(keepends=True))) + text)
            else:
                os.write(descriptor, text)
        finally:
            os.close(descriptor)


def _opened(path: Path) -> int:
    """Open the file for appending, locked because another load may be about to replace it."""
    while True:
        descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):  # some file systems have no locks
            lock(descriptor, LOCK_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # it was replaced while this waited for the lock


def _worth_keeping(lines: Sequence[bytes]) -> list[bytes]:
    """The lines of loads that are running or have a line in the newest half; only the newest of a tuner's steps."""
    now = time.time()
    kept = {name for name, load in _loads(lines).items() if load.begun and load.end(now) is None}
    recent, size = list[bytes](), 0
    for text in reversed(lines):
        size += len(text)
        if size > MOST_BYTES // 2:
            break
        recent.append(text)
    kept |= _loads(recent).keys()
    found, stepped = list[bytes](), set[str]()
    for text in reversed(lines):
        for name, load in _loads([text]).items():
            if name in kept and not (load.tuner is not None and name in stepped):
                found.append(text)
            if load.tuner is not None:
                stepped.add(name)
    return found[::-1]

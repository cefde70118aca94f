"""When load was sent to one of our servers: a line per beginning and end, in a file in the server's folder.

Charts mark them. A file that cannot be written does not keep a load from being sent.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from vllm_launchers.keeper.folders import replace_file
from vllm_launchers.private import lock, open_file, open_regular
from vllm_launchers.procfs import started_at, stat
from vllm_launchers.typed_decoding import decode_json

FILE_NAME = "loads.jsonl"
MOST_BYTES = 64 << 10
"""From this size on the file is replaced by the newest half of it."""
LOCK_SECONDS = 10.0
"""A holder needs it for milliseconds, but may wait for a processor."""
CLOCK_SECONDS = 60.0
"""By how much the clock may have been set since a load began."""


class LoadSpan(msgspec.Struct, frozen=True):
    """When a load began and ended (Unix seconds; None: not yet), and its rate in requests per second, if it has one."""

    began_at: float
    ended_at: float | None
    rate: float | None


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """``id`` begins with the pid of the process that sends it, ``until`` is when it ends at the latest. A killed one
    records no end.
    """

    id: str
    began_at: float | None = None
    until: float = 0.0
    rate: float | None = None
    ended_at: float | None = None


@contextlib.contextmanager
def noted(folder: Path | None, rate: float | None, seconds: float) -> Iterator[None]:
    """Note that load is sent while this lasts, ``seconds`` at most; without a folder, nothing is noted."""
    if folder is None:
        yield
        return
    now = time.time()
    name = f"{os.getpid()}-{now:.6f}"
    _append(folder / FILE_NAME, _Line(name, began_at=now, until=now + seconds, rate=rate))
    try:
        yield
    finally:
        _append(folder / FILE_NAME, _Line(name, ended_at=time.time()))


def read_spans(folder: Path, now: float) -> tuple[LoadSpan, ...]:
    """The loads noted there, oldest first, as of ``now`` (Unix seconds); unreadable lines are skipped.

    When a killed one ended is not known: it counts as ended at its beginning, or when it would have at the latest.
    """
    try:
        with open_regular(folder / FILE_NAME) as file:
            lines = file.read(2 * MOST_BYTES).splitlines()
    except OSError:
        return ()
    found, ends = _loads(lines)
    return tuple(
        LoadSpan(line.began_at, ends[name] if name in ends else _end_of(line, line.began_at, now), line.rate)
        for name, line in found.items()
        if line.began_at is not None
    )


def _loads(lines: Iterable[bytes]) -> tuple[dict[str, _Line], dict[str, float]]:
    """The beginnings of loads, and when some ended, by their ids."""
    found: dict[str, _Line] = {}
    ends: dict[str, float] = {}
    for text in lines:
        try:
            line = decode_json(text, _Line)
        except msgspec.DecodeError:
            continue
        if line.ended_at is not None:
            ends[line.id] = line.ended_at
        elif line.began_at is not None:
            found[line.id] = line
    return found, ends


def _end_of(line: _Line, began_at: float, now: float) -> float | None:
    """When a load without a recorded end ended; None while its process runs."""
    if line.until < now:
        return line.until
    pid = line.id.partition("-")[0]
    process = stat(int(pid)) if pid.isdecimal() else None
    runs = process is not None and process.running and started_at(process.start_time) < began_at + CLOCK_SECONDS
    return None if runs else began_at


def _append(path: Path, line: _Line) -> None:
    """Add a line. A file that has become too large is replaced by its newest half and what of it still runs."""
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
    """The file to append to, locked: another load may be about to replace it."""
    while True:
        descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):  # some file systems have no locks
            lock(descriptor, LOCK_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # it was replaced while this waited for the lock


def _worth_keeping(lines: Sequence[bytes]) -> list[bytes]:
    """The lines of those loads that still run, or have a line in the newest half."""
    begun, ends = _loads(lines)
    now = time.time()
    kept = {
        name for name, line in begun.items() if name not in ends and _end_of(line, line.began_at or now, now) is None
    }
    recent, size = list[bytes](), 0
    for text in reversed(lines):
        size += len(text)
        if size > MOST_BYTES // 2:
            break
        recent.append(text)
    of_recent, ended = _loads(recent)
    kept |= of_recent.keys() | ended.keys()
    return [text for text in lines if any(kept.intersection(found) for found in _loads([text]))]

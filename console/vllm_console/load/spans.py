"""When load was sent to one of our servers: a line per beginning and end, in a file in the server's folder.

Charts mark them. A file that cannot be written does not keep a load from being sent.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from vllm_launchers.private import open_file, open_regular
from vllm_launchers.procfs import started_at, stat
from vllm_launchers.typed_decoding import decode_json

FILE_NAME = "loads.jsonl"
MOST_BYTES = 64 << 10
"""At this size the file is started over."""
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
    name = f"{os.getpid()}-{now:.3f}"
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
    return tuple(
        LoadSpan(line.began_at, ends[name] if name in ends else _end_of(line, line.began_at, now), line.rate)
        for name, line in found.items()
        if line.began_at is not None
    )


def _end_of(line: _Line, began_at: float, now: float) -> float | None:
    """When a load without a recorded end ended; None while its process runs."""
    if line.until < now:
        return line.until
    pid = line.id.partition("-")[0]
    process = stat(int(pid)) if pid.isdecimal() else None
    runs = process is not None and process.running and started_at(process.start_time) < began_at + CLOCK_SECONDS
    return None if runs else began_at


def _append(path: Path, line: _Line) -> None:
    with contextlib.suppress(OSError):
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.unlink()
        descriptor = open_file(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            os.write(descriptor, msgspec.json.encode(line) + b"\n")
        finally:
            os.close(descriptor)

"""Read what a server's probe recorded: engine steps, first tokens, finished requests, resumed requests.

The format is defined by the plugin. Records of a segment are in order of time, so a span of time is found without
reading what is before it. Anything left by a killed writer or a full disk (half a header, half a record, zeros) is
skipped, and so are segments of an unknown format.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from vllm_launchers.private import open_regular
from vllm_launchers.probe.plugin.vllm_console_probe import CLOCK_SECONDS, FORMAT, HEADER_BYTES, LAYOUTS, SEGMENT_BYTES

LONGEST_RECORD = 4096
"""Maximum record size in bytes; a header with a larger one is not a probe's."""

SETTLED_SECONDS = 1.0
"""Records are on disk this long after their time: the probe writes four times a second, one kind after the other."""

ORDERED_BY = {"steps": 0, "intervals": 0, "first_tokens": 0, "requests": struct.calcsize("<64sd"), "resumed": 0}
"""Offset of the time by which records are ordered, in a record of each kind."""

_TIME = struct.Struct("<d")


class EngineStep(NamedTuple):
    """One engine step; None means unknown. ``at`` is in Unix seconds, with the precision of the monotonic clock."""

    at: float
    engine: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    evictions: int | None
    cache_queries: int | None
    cache_hits: int | None
    prompt_tokens: int | None
    generation_tokens: int | None
    preempted: int | None
    intervals: int
    shortest_interval: float | None
    longest_interval: float | None
    context_requests: int | None
    context_tokens: int | None
    generation_requests: int | None
    dropped: int
    """Number of records that the writing process had lost so far."""


class FirstToken(NamedTuple):
    """A request's first token: when it was generated (Unix seconds), and the seconds since the request's arrival."""

    at: float
    engine: int
    seconds: float
    dropped: int


class Interval(NamedTuple):
    """A distinct inter-token interval (seconds) of a step whose intervals differ, and how often it occurred."""

    at: float
    engine: int
    seconds: float
    times: int
    dropped: int


class Resumed(NamedTuple):
    """Requests admitted again after preemption in a step, the tokens they looked up, and those still cached."""

    at: float
    engine: int
    requests: int
    tokens: int
    cached_tokens: int
    dropped: int


class FinishedRequest(NamedTuple):
    """One finished request; None means unknown or never reached. Durations in seconds, moments in Unix seconds."""

    id: str
    arrived_at: float
    finished_at: float
    engine: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    e2e_seconds: float | None
    preemptions: int | None
    finish_reason: str
    dropped: int

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token: end-to-end time minus decode. None if there was no token."""
        if self.e2e_seconds is None or self.decode_seconds is None:
            return None
        return max(0.0, self.e2e_seconds - self.decode_seconds)


class _Clocks:
    """Converts each process's times to Unix time, consistently over all of its segments."""

    def __init__(self) -> None:
        self._offsets: dict[int, list[float]] = {}

    def offset(self, pid: int, measured: float) -> float:
        """The offset of a process's segment: that of an earlier segment, unless the clock was set since."""
        known = self._offsets.setdefault(pid, [])
        same = next((one for one in known if abs(one - measured) < CLOCK_SECONDS), None)
        if same is None:
            known.append(measured)
        return measured if same is None else same


class _Segment:
    """One segment, and how far it was read."""

    def __init__(self, path: Path, kind: str, clocks: _Clocks) -> None:
        self._clocks = clocks
        self.pid = 0
        """The process that wrote the segment."""
        self.oldest = self.newest = -math.inf
        """Times of its first record, and of its newest so far (Unix seconds)."""
        self.full = False
        """Whether its process had begun another segment when this one was last read."""
        self._path, self._layout, self._time_at = path, LAYOUTS[kind], ORDERED_BY[kind]
        self._next: int | None = None
        """The next record to read; None before the first."""
        self._record_bytes = 0
        self._offset = 0.0

    def added(self, since: float | None, until: float | None, most: int | None) -> Iterator[tuple[Any, ...]]:
        """Fields of the records that were added since the last call, within a span of time (Unix seconds).

        The first call returns at most the newest ``most``.

        Raises:
            OSError: the segment cannot be read, or was deleted.
        """
        with open_regular(self._path) as file:
            if not self._ready(file):
                return
            end = count = self._count(file)
            if until is not None:
                end = self._place(file, until, count)
            if self._next is None:
                self._next = self._place(file, since, count) if since is not None else 0
                self._next = max(self._next, end - most) if most is not None else self._next
            data = self._read(file, self._next, end)
            self._next = max(self._next, end)
            self._note_times(file, count)
        yield from self._fields(data)

    def after(self, at: float, until: float, most: int) -> list[tuple[Any, ...]]:
        """Fields of the first ``most`` records after ``at`` and up to ``until`` (Unix seconds). Raises OSError."""
        with open_regular(self._path) as file:
            if not self._ready(file):
                return []
            count = self._count(file)
            first = self._place(file, math.nextafter(at, math.inf), count)
            data = self._read(file, first, min(first + most, self._place(file, math.nextafter(until, math.inf), count)))
            self._note_times(file, count)
        return list(self._fields(data))

    def first_at(self) -> float | None:
        """Time of the first record (Unix seconds); None without records. Raises OSError."""
        with open_regular(self._path) as file:
            if not self._ready(file):
                return None
            at = self._at(file, 0)
        return at if math.isfinite(at) else None

    def unix(self, monotonic: float) -> float:
        """Convert a record's time to Unix seconds."""
        return monotonic + self._offset

    def _count(self, file: BinaryIO) -> int:
        return max(0, os.fstat(file.fileno()).st_size - HEADER_BYTES) // self._record_bytes

    def _read(self, file: BinaryIO, first: int, end: int) -> bytes:
        size = max(0, end - first) * self._record_bytes
        data = os.pread(file.fileno(), min(size, SEGMENT_BYTES), HEADER_BYTES + first * self._record_bytes)
        return data[: len(data) - len(data) % self._record_bytes]

    def _fields(self, data: bytes) -> Iterator[tuple[Any, ...]]:
        if self._record_bytes == self._layout.size:
            yield from self._layout.iter_unpack(data)
            return
        for start in range(0, len(data), self._record_bytes):
            yield self._layout.unpack_from(data, start)

    def _at(self, file: BinaryIO, number: int) -> float:
        """Time of a record (Unix seconds); infinity for an invalid one."""
        place = HEADER_BYTES + number * self._record_bytes + self._time_at
        data = os.pread(file.fileno(), _TIME.size, place)
        at = _TIME.unpack(data)[0] if len(data) == _TIME.size else 0.0
        return self.unix(at) if at else math.inf

    def _place(self, file: BinaryIO, at: float, count: int) -> int:
        """Index of the first of ``count`` records at or after ``at`` (Unix seconds)."""
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._at(file, middle) < at else (low, middle)
        return low

    def _note_times(self, file: BinaryIO, count: int) -> None:
        if not count:
            return
        if not math.isfinite(self.oldest) and math.isfinite(first := self._at(file, 0)):
            self.oldest = first
        if math.isfinite(last := self._at(file, count - 1)):
            self.newest = last

    def _ready(self, file: BinaryIO) -> bool:
        """Whether this is a readable segment; if its header is incomplete, it may become one later."""
        return self._record_bytes > 0 or self._read_header(os.pread(file.fileno(), HEADER_BYTES, 0))

    def _read_header(self, data: bytes) -> bool:
        try:
            header = json.loads(data)
            format_, size, pid = header["format"], header["record_bytes"], header.get("pid", 0)
            offset = float(header["wall"]) - float(header["monotonic"])
        except (ValueError, TypeError, LookupError, AttributeError):
            return False
        if len(data) < HEADER_BYTES or format_ != FORMAT or not isinstance(size, int) or not isinstance(pid, int):
            return False
        if not self._layout.size <= size <= LONGEST_RECORD:
            return False
        self._record_bytes, self._offset, self.pid = size, self._clocks.offset(pid, offset), pid
        return True


class _Segments:
    def __init__(self, folder: Path) -> None:
        self._folder, self._clocks = folder, _Clocks()
        self._known: dict[str, dict[str, _Segment]] = {kind: {} for kind in LAYOUTS}
        self._listed: list[str] | None = None

    def look(self) -> None:
        """Update the known segments from the folder. Raises OSError if it cannot be read."""
        try:
            listed = os.listdir(self._folder)  # noqa: PTH208 (every second; a path for each costs more than the list)
        except FileNotFoundError:
            listed = []
        if listed != self._listed:
            self._take(listed)

    def known(self, kind: str) -> Sequence[_Segment]:
        """Segments of one kind as of the last look, oldest first."""
        return tuple(self._known[kind].values())

    def _take(self, listed: list[str]) -> None:
        self._listed = listed
        for kind, known in self._known.items():
            names = sorted(name for name in listed if name.startswith(f"{kind}-") and name.endswith(".bin"))
            self._known[kind] = {
                name: known.get(name) or _Segment(self._folder / name, kind, self._clocks) for name in names
            }


class Added(NamedTuple):
    """Records that were added, each kind in order of time."""

    steps: list[EngineStep]
    intervals: list[Interval]
    first_tokens: list[FirstToken]
    requests: list[FinishedRequest]


class ProbeReader:
    """Reads the records in a server's folder ``probe``. Each call returns what was added since the last one.

    With ``since`` and ``until`` (Unix seconds) only records of that span are read; with ``most`` at most that many of
    the newest records per segment.
    """

    def __init__(
        self, folder: Path, since: float | None = None, until: float | None = None, most: int | None = None
    ) -> None:
        self._segments = _Segments(folder)
        self._since, self._until, self._most = since, until, most

    def steps(self) -> list[EngineStep]:
        """New steps in order of time. Raises OSError if the folder cannot be read."""
        self._segments.look()
        return self._steps()

    def requests(self) -> list[FinishedRequest]:
        """New requests in order of their end. Raises OSError if the folder cannot be read."""
        self._segments.look()
        return self._requests()

    def added(self) -> Added:
        """New records of all kinds that latencies are computed from, with one folder listing. Raises OSError."""
        self._segments.look()
        first_tokens = (_first_token(segment, row) for segment, row in self._rows("first_tokens") if row[0])
        intervals = (_interval(segment, row) for segment, row in self._rows("intervals") if row[0])
        return Added(self._steps(), sorted(intervals, key=_at), sorted(first_tokens, key=_at), self._requests())

    def resumed(self) -> list[Resumed]:
        """New records of resumed requests in order of time. Raises OSError if the folder can't be read."""
        self._segments.look()
        found = (Resumed(segment.unix(row[0]), *row[1:]) for segment, row in self._rows("resumed") if row[0])
        return sorted(found, key=_at)

    def writers(self, start: float, end: float) -> int:
        """Number of processes that wrote steps in a span of time, as far as they were read."""
        found = self._segments.known("steps")
        return len({one.pid for one in found if one.newest >= start and one.oldest <= end})

    def _steps(self) -> list[EngineStep]:
        return sorted((_step(segment, row) for segment, row in self._rows("steps") if row[0]), key=_at)

    def _requests(self) -> list[FinishedRequest]:
        return sorted(self._finished(), key=lambda request: request.finished_at)

    def _finished(self) -> Iterator[FinishedRequest]:
        for segment, (name, arrived, finished, engine, *known, reason, dropped) in self._rows("requests"):
            if finished:
                moments = segment.unix(arrived), segment.unix(finished)
                figures = (None if value < 0 else value for value in known)
                request = FinishedRequest._make((_text(name), *moments, engine, *figures, _text(reason), dropped))
                began = bool(request.output_tokens)
                yield request if began else request._replace(prefill_seconds=None, decode_seconds=None)

    def _rows(self, kind: str) -> Iterator[tuple[_Segment, tuple[Any, ...]]]:
        for segment in self._segments.known(kind):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                for row in segment.added(self._since, self._until, self._most):
                    yield segment, row


class ProbeSpans:
    """Reads steps, first tokens and intervals of any span of time, in order of time; a step comes first."""

    def __init__(self, folder: Path) -> None:
        self._segments = _Segments(folder)

    def first_at(self) -> float | None:
        """Time of the oldest step (Unix seconds); None without steps. Raises OSError."""
        found = []
        self._segments.look()
        for segment in self._segments.known("steps"):
            with contextlib.suppress(FileNotFoundError):
                found.append(segment.first_at())
        return min((at for at in found if at is not None), default=None)

    def after(self, at: float, until: float, most: int) -> list[Timed]:
        """The first records after ``at`` up to ``until`` (Unix seconds), about ``most`` per segment. Raises OSError."""
        found: list[Timed] = []
        complete = until
        self._segments.look()
        for kind, record in _TIMED:
            segments = self._segments.known(kind)
            for number, segment in enumerate(segments):
                if segment.oldest > complete or (segment.full and segment.newest <= at):
                    continue
                full = any(later.pid == segment.pid for later in segments[number + 1 :])
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    rows = segment.after(at, complete, most)
                    segment.full = full
                    found += [record(segment, row) for row in rows]
                    if len(rows) == most:  # the next ones may have the same time as the last
                        complete = math.nextafter(segment.unix(rows[-1][0]), -math.inf)
        return sorted((one for one in found if one.at <= complete), key=_at)


def _step(segment: _Segment, row: Sequence[Any]) -> EngineStep:
    at, engine, *known, dropped = row
    if -1 in known:
        known = [None if value == -1 else value for value in known]
    return EngineStep._make((segment.unix(at), engine, *known, dropped))


def _first_token(segment: _Segment, row: Sequence[Any]) -> FirstToken:
    at, engine, seconds, dropped = row
    return FirstToken(segment.unix(at), engine, seconds, dropped)


def _interval(segment: _Segment, row: Sequence[Any]) -> Interval:
    at, engine, seconds, times, dropped = row
    return Interval(segment.unix(at), engine, seconds, times, dropped)


_at = attrgetter("at")

Timed = EngineStep | Interval | FirstToken
_TIMED: Sequence[tuple[str, Callable[[_Segment, Sequence[Any]], Timed]]] = (
    ("steps", _step),
    ("intervals", _interval),
    ("first_tokens", _first_token),
)


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="ignore")

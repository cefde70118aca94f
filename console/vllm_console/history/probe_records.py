"""Reads what a server's probe has recorded: engine steps and finished requests. The format is the plugin's.

A folder is read a piece at a time, from where the last call ended. Whatever a killed writer or a full disk has left
(half a header, half a record, zeros) is left out, and so are segments of an unknown format.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vllm_launchers.private import open_regular
from vllm_launchers.probe.plugin.vllm_console_probe import FORMAT, HEADER_BYTES, LAYOUTS, SEGMENT_BYTES

LONGEST_RECORD = 4096
"""Bytes; a header that names more is none of a probe's."""


class Step(NamedTuple):
    """One engine step; None is unknown. ``at`` is in Unix seconds, to the precision of the monotonic clock."""

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
    """Records that the writing process had lost by then."""


class FinishedRequest(NamedTuple):
    """One finished request; None is unknown, or was never reached. Times in seconds, moments in Unix seconds."""

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
        """Time to the first token: all of it but decode. None if there was no token."""
        if self.e2e_seconds is None or self.decode_seconds is None:
            return None
        return max(0.0, self.e2e_seconds - self.decode_seconds)


class _Segment:
    """One segment, and how far it has been read."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path, self._layout = path, LAYOUTS[kind]
        self._position = 0
        self._record_bytes = 0
        self._offset = 0.0

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """The fields of the records that were added since, and what turns their times into Unix time.

        Raises:
            OSError: it cannot be read, or was deleted.
        """
        with open_regular(self._path) as file:
            if not self._position and not self._read_header(file.read(HEADER_BYTES)):
                return
            file.seek(self._position)
            data = file.read(SEGMENT_BYTES + HEADER_BYTES)
        size, used = self._record_bytes, self._layout.size
        whole = len(data) - len(data) % size
        self._position += whole
        for start in range(0, whole, size):
            yield self._layout.unpack_from(data[start : start + used])

    def unix(self, monotonic: float) -> float:
        """A record's time in Unix seconds."""
        return monotonic + self._offset

    def _read_header(self, data: bytes) -> bool:
        """Whether it is a segment to read; it may be one later if its header is not complete yet."""
        try:
            header = json.loads(data)
            format_, size = header["format"], header["record_bytes"]
            offset = float(header["wall"]) - float(header["monotonic"])
        except (ValueError, TypeError, LookupError):
            return False
        if len(data) < HEADER_BYTES or format_ != FORMAT or not isinstance(size, int):
            return False
        if not self._layout.size <= size <= LONGEST_RECORD:
            return False
        self._record_bytes, self._offset, self._position = size, offset, HEADER_BYTES
        return True


class ProbeReader:
    """Reads the records in a server's folder ``probe``. Each call returns what was added since the last one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._segments: dict[str, dict[str, _Segment]] = {kind: {} for kind in LAYOUTS}

    def steps(self) -> list[Step]:
        """New steps, in the order of their time. Raises OSError if the folder cannot be read."""
        return sorted(self._steps(), key=lambda step: step.at)

    def requests(self) -> list[FinishedRequest]:
        """New requests, in the order of their end. Raises OSError if the folder cannot be read."""
        return sorted(self._requests(), key=lambda request: request.finished_at)

    def _steps(self) -> Iterator[Step]:
        for segment, (at, engine, *known, dropped) in self._rows("steps"):
            if at:
                figures = (None if value == -1 else value for value in known)
                yield Step._make((segment.unix(at), engine, *figures, dropped))

    def _requests(self) -> Iterator[FinishedRequest]:
        for segment, (name, arrived, finished, engine, *known, reason, dropped) in self._rows("requests"):
            if finished:
                moments = segment.unix(arrived), segment.unix(finished)
                figures = (None if value < 0 else value for value in known)
                request = FinishedRequest._make((_text(name), *moments, engine, *figures, _text(reason), dropped))
                began = bool(request.output_tokens)
                yield request if began else request._replace(prefill_seconds=None, decode_seconds=None)

    def _rows(self, kind: str) -> Iterator[tuple[_Segment, tuple[Any, ...]]]:
        """The records of one kind that were added, segment by segment."""
        segments = self._segments[kind]
        try:
            names = {path.name for path in self._folder.iterdir() if path.match(f"{kind}-*.bin")}
        except FileNotFoundError:
            names = set()
        for gone in segments.keys() - names:
            del segments[gone]
        for name in sorted(names):
            segment = segments.setdefault(name, _Segment(self._folder / name, kind))
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                for row in segment.rows():
                    yield segment, row


def _text(value: bytes) -> str:
    return value.rstrip(b"\0").decode(errors="ignore")

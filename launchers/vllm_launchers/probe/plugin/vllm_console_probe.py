"""Records each engine step, first token and finished request of a vLLM server: numbers only, no text or tokens.

vLLM itself loads `StatLogger`, through the entry point in the folder beside this file, into the process that serves the
API. This file needs only the standard library (Python 3.9 or later) and nothing else of this program.

What vLLM calls does almost nothing: it appends a tuple to a bounded queue, and counts what does not fit. Every quarter
of a second, a thread writes the queue to the folder named by the variable `FOLDER`. No error here reaches vLLM; fields
that a release lacks are recorded as unknown.

The folder holds *segments* of one kind each (`LAYOUTS`): a JSON header, then records of a fixed size, whose fields are
named in the console's `probe_records`. A full segment is followed by a new one, and the oldest are deleted, so the
folder is bounded (`KEPT`). Each process has its own segments; a restart therefore continues in new ones. Readers ignore
anything after the last whole record. Times are seconds of the monotonic clock: add ``wall`` minus ``monotonic`` from
the header to get Unix time. When somebody sets the machine's clock, a new segment begins.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import errno
import importlib
import json
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "VLLMCONSOLE_PROBE"
"""Variable that names the folder to write to; if unset, nothing is recorded."""

FORMAT = 1
HEADER_BYTES = 512
SEGMENT_BYTES = 4 << 20
KEPT = {"steps": 28 << 20, "intervals": 8 << 20, "first_tokens": 8 << 20, "requests": 16 << 20, "resumed": 4 << 20}
"""Maximum bytes of each kind in a folder."""
MOST_SEGMENTS = 200
"""Maximum segments of each kind: a server that restarts often begins many."""

STEP = struct.Struct("<dhiifiqqiiiiffiiiq")
"""One engine step; -1 means unknown. ``intervals``: number of inter-token intervals that ended in it. ``dropped``:
number of records that this process has lost so far."""

REQUEST = struct.Struct("<64sddhiiiddddi12sq")
"""One finished request, with the times reported by vLLM."""

FIRST_TOKEN = struct.Struct("<dhdq")
"""Time of one request's first token, and seconds since its arrival; recorded early, because a request may run long."""

INTERVAL = struct.Struct("<dhfiq")
"""An inter-token interval of a step whose intervals differ, and its count: requests of a batch get their tokens
together, but a preempted one waited longer. Not recorded for a step with more than `MOST_DISTINCT` different ones."""

MOST_DISTINCT = 16

RESUMED = struct.Struct("<dhiqqq")
"""Previously preempted requests that a step resumed: of the ``tokens`` that they looked up in the prefix cache (prompt
and output so far), ``cached_tokens`` were still there. Not recorded for a step without such requests."""

LAYOUTS = {"steps": STEP, "intervals": INTERVAL, "first_tokens": FIRST_TOKEN, "requests": REQUEST, "resumed": RESUMED}

FLUSH_SECONDS = 0.25
RETRY_SECONDS = 1.0
"""Wait after an error before beginning another segment."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors after which writing continues in the same segment."""
CLOCK_SECONDS = 0.1
"""The clock was set if it has moved by more than this relative to the monotonic one."""
MOST_WAITING = 20_000
"""Maximum records in memory: more than a minute at full load."""

Row = tuple[Any, ...]
"""The fields of a record, without ``dropped``."""


class Segments:
    """This process's segments of one kind. Never raises: records that can't be written are lost and counted."""

    def __init__(self, folder: Path, kind: str, about: dict[str, Any]) -> None:
        self._folder, self._kind, self._about = folder, kind, about
        self._size = LAYOUTS[kind].size
        self._file = -1
        self._end = 0
        self._offset = 0.0
        self._retry_at = 0.0

    def write(self, records: Sequence[bytes]) -> int:
        """Append records; returns how many were written."""
        written = 0
        try:
            while written < len(records):
                if not self._usable() and not self._open():
                    break
                room = max(1, (SEGMENT_BYTES - self._end) // self._size)
                part = b"".join(records[written : written + room])
                # Write at a position, to overwrite half a record that a full disk left behind.
                whole = os.pwrite(self._file, part, self._end) // self._size
                self._end += whole * self._size
                written += whole
                if whole * self._size < len(part):
                    self._fail()
                    break
        except OSError as error:
            self._fail()
            if error.errno not in FULL:
                self.close()
        return written

    def close(self) -> None:
        """Close the segment."""
        if self._file >= 0:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._file = -1

    def _usable(self) -> bool:
        """Whether the open segment has room, is still in the folder, and was begun with the current clock."""
        if self._file < 0 or self._end + self._size > SEGMENT_BYTES:
            return False
        moved = abs(time.time() - time.monotonic() - self._offset)
        return moved < CLOCK_SECONDS and os.fstat(self._file).st_nlink > 0

    def _fail(self) -> None:
        self._retry_at = time.monotonic() + RETRY_SECONDS

    def _open(self) -> bool:
        """Begin a segment and delete the oldest excess ones; False if it is too early to retry."""
        if time.monotonic() < self._retry_at:
            return False
        self.close()
        if not self._folder.is_dir():
            self._folder.mkdir(mode=0o700)  # in its server's folder: if that is gone, nothing is recorded any more
            self._folder.chmod(0o700)  # regardless of the umask
        self._prune()
        path = self._folder / f"{self._kind}-{time.time_ns():020d}-{os.getpid()}.bin"
        wall, monotonic = time.time(), time.monotonic()
        header = {
            "format": FORMAT, "kind": self._kind, "record_bytes": self._size, "pid": os.getpid(), "wall": wall,
            "monotonic": monotonic, **self._about,
        }  # fmt: skip
        text = json.dumps(header).encode()[: HEADER_BYTES - 1].ljust(HEADER_BYTES - 1) + b"\n"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(file, 0o600)
            complete = os.pwrite(file, text, 0) == len(text)
        except OSError:
            complete = False
        if not complete:
            os.close(file)
            path.unlink()
            self._fail()
            return False
        self._file, self._end, self._offset = file, HEADER_BYTES, wall - monotonic
        return True

    def _prune(self) -> None:
        """Make room for one more segment by deleting the least recently written ones."""
        found = []
        for path in self._folder.glob(self._kind + "-*.bin"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime_ns, path.name, status.st_size, path))
        room = KEPT[self._kind] - SEGMENT_BYTES
        for number, (_, _, size, path) in enumerate(sorted(found, reverse=True), 1):
            room -= size
            if room < 0 or number >= MOST_SEGMENTS:
                with contextlib.suppress(OSError):
                    path.unlink()


class Recorder:
    """A bounded queue of records, and the thread that writes them. `add` may be called from one thread only."""

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        self._waiting: collections.deque[tuple[str, Row]] = collections.deque()
        self._segments = {kind: Segments(folder, kind, about) for kind in LAYOUTS}
        self._refused = 0
        self._lost = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Number of lost records: the queue or disk was full, or a value did not fit."""
        return self._refused + self._lost

    def drop(self) -> None:
        """Count a record that could not be created."""
        self._refused += 1

    def add(self, kind: str, row: Row) -> None:
        """Queue the fields of a record, without ``dropped``."""
        if len(self._waiting) >= MOST_WAITING:
            self._refused += 1
            return
        self._waiting.append((kind, row))
        if self._thread is None and not self._end.is_set():
            thread = threading.Thread(target=self._run, name="vllm-console-probe", daemon=True)
            thread.start()
            self._thread = thread
            atexit.register(self.close)

    def close(self) -> None:
        """Write the queue and end the thread."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while True:
            ended = self._end.wait(FLUSH_SECONDS)
            try:
                self.flush()
            except Exception:  # noqa: BLE001 - a thread that ended would never write again
                self._lost += 1
            if ended:
                for segments in self._segments.values():
                    segments.close()
                return

    def flush(self) -> None:
        """Write the queue; called by the thread."""
        records: dict[str, list[bytes]] = {kind: [] for kind in LAYOUTS}
        for _ in range(len(self._waiting)):
            kind, row = self._waiting.popleft()
            try:
                records[kind].append(LAYOUTS[kind].pack(*row, self.dropped))
            except (struct.error, TypeError, ValueError, OverflowError):
                self._lost += 1
        for kind, packed in records.items():
            if packed:
                self._lost += len(packed) - self._segments[kind].write(packed)


class Probe:
    """Turns vLLM's reports about one engine into records."""

    def __init__(self, recorder: Recorder, engine: int = 0, *, evictions: bool = False) -> None:
        self._recorder, self._engine, self._evictions = recorder, engine, evictions

    def record(self, scheduler: Any, iteration: Any) -> None:
        """Queue a step, and the requests that got their first token or finished in it. Never raises."""
        try:
            now = time.monotonic()
            self._recorder.add("steps", self._step(now, scheduler, iteration))
            self._add_resumed(now, scheduler)
            self._add_intervals(now, iteration)
            for seconds in getattr(iteration, "time_to_first_tokens_iter", None) or ():
                self._recorder.add("first_tokens", (now, self._engine, seconds))
            if finished := getattr(iteration, "finished_requests", None):
                delay = time.time() - getattr(iteration, "iteration_timestamp", time.time())
                for request in finished:
                    self._recorder.add("requests", self._request(now - delay, request))
        except Exception:  # noqa: BLE001 - nothing that goes wrong here may reach vLLM
            self._recorder.drop()

    def _step(self, now: float, scheduler: Any, iteration: Any) -> Row:
        waiting = getattr(scheduler, "num_waiting_reqs", -1)
        cache = getattr(scheduler, "prefix_cache_stats", None)
        details = getattr(scheduler, "iteration_details", None)
        intervals = getattr(iteration, "inter_token_latencies_iter", None) or ()
        return (
            now,
            self._engine,
            getattr(scheduler, "num_running_reqs", -1),
            waiting + getattr(scheduler, "num_skipped_waiting_reqs", 0),
            getattr(scheduler, "kv_cache_usage", -1.0),
            len(getattr(scheduler, "kv_cache_eviction_events", ())) if self._evictions else -1,
            getattr(cache, "queries", -1),
            getattr(cache, "hits", -1),
            # None means a step without output, such as one that only prefills.
            0 if iteration is None else getattr(iteration, "num_prompt_tokens", -1),
            0 if iteration is None else getattr(iteration, "num_generation_tokens", -1),
            0 if iteration is None else getattr(iteration, "num_preempted_reqs", -1),
            len(intervals),
            min(intervals) if intervals else -1.0,
            max(intervals) if intervals else -1.0,
            getattr(details, "num_ctx_requests", -1),
            getattr(details, "num_ctx_tokens", -1),
            getattr(details, "num_generation_requests", -1),
        )

    def _add_resumed(self, now: float, scheduler: Any) -> None:
        """Queue what resumed requests found in the prefix cache."""
        cache: Any = getattr(scheduler, "prefix_cache_stats", None)
        requests = getattr(cache, "preempted_requests", 0)
        if requests > 0:
            row = (now, self._engine, requests, cache.preempted_queries, cache.preempted_hits)
            self._recorder.add("resumed", row)

    def _add_intervals(self, now: float, iteration: Any) -> None:
        """Queue the intervals that `STEP` does not contain: those of a step with more than two, if they differ."""
        intervals: Sequence[float] = getattr(iteration, "inter_token_latencies_iter", None) or ()
        if len(intervals) > 2 and intervals.count(intervals[0]) < len(intervals):
            counted = collections.Counter(intervals)
            for seconds, times in counted.items() if len(counted) <= MOST_DISTINCT else ():
                self._recorder.add("intervals", (now, self._engine, seconds, times))

    def _request(self, finished: float, request: Any) -> Row:
        e2e, reason = getattr(request, "e2e_latency", -1.0), getattr(request, "finish_reason", None)
        return (
            (getattr(request, "request_id", None) or "").encode("utf-8", "replace")[:64],
            finished - max(0.0, e2e),
            finished,
            self._engine,
            getattr(request, "num_prompt_tokens", -1),
            getattr(request, "num_generation_tokens", -1),
            getattr(request, "num_cached_tokens", -1),
            getattr(request, "queued_time", -1.0),
            getattr(request, "prefill_time", -1.0),
            getattr(request, "decode_time", -1.0),
            e2e,
            getattr(request, "num_preemptions", -1),
            b"" if reason is None else str(reason).encode("ascii", "replace")[:12],
        )


_recorders: dict[str, Recorder] = {}


def recorder_for(folder: str, version: str) -> Recorder:
    """This process's recorder for a folder; several engines share it, so that the folder stays bounded."""
    if folder not in _recorders:
        _recorders[folder] = Recorder(Path(folder), {"vllm": version})
    return _recorders[folder]


def _probe(config: Any, engine: Any) -> Probe | None:
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    version = str(getattr(importlib.import_module("vllm"), "__version__", ""))[:40]
    sampled = bool(getattr(getattr(config, "observability_config", None), "kv_cache_metrics", False))
    return Probe(recorder_for(folder, version), engine if isinstance(engine, int) else 0, evictions=sampled)


def _made_for(base: type) -> type:
    """Create the class that vLLM asks for: vLLM does not start unless it is a subclass of its own."""

    class StatLogger(base):  # type: ignore[misc]
        """Called by vLLM after each step of an engine."""

        def __init__(self, vllm_config: Any = None, engine_index: Any = 0, *_: Any, **__: Any) -> None:
            self._probe: Probe | None = None
            try:
                self._probe = _probe(vllm_config, engine_index)
            except Exception:  # noqa: BLE001 - nothing that goes wrong here may reach vLLM
                return

        def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **__: Any) -> None:
            if self._probe is not None:
                self._probe.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self, *_: Any, **__: Any) -> None:
            """Nothing to do."""

    StatLogger.__abstractmethods__ = frozenset()  # methods that a later release requires are not needed here
    return StatLogger


def __getattr__(name: str) -> Any:
    """Create `StatLogger` when vLLM asks for it, because importing this file must not import vLLM."""
    if name == "StatLogger":
        made = globals()[name] = _made_for(importlib.import_module("vllm.v1.metrics.loggers").StatLoggerBase)
        return made
    raise AttributeError(name)

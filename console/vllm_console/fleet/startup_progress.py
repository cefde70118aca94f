"""A server's startup progress, from its log and its model's cache, measured against an earlier start."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding
from vllm_console.diagnosis.live.startup import LastStart, disturbed_start, slow_startup
from vllm_console.logs.startup import (
    Durations,
    FactReader,
    Progress,
    Startup,
    StartupWatch,
    durations,
    stages,
    startup_progress,
    too_quiet,
)
from vllm_console.logs.startup_facts import Stage
from vllm_console.text import percent, size
from vllm_launchers.host.hub_folders import cache_folder
from vllm_launchers.keeper.files import LOG
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.launch.earlier_starts import START_LOG_BYTES, launch_settings, start_of_log
from vllm_launchers.plan.flags import BLOCKS, BYTES
from vllm_launchers.private import open_regular
from vllm_launchers.units import GIB
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.fast_loaders import FastLoader, fast_loaders
from vllm_launchers.vllm.flags.cache import FlagCache
from vllm_launchers.vllm.flags.changes import whole_number
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError, FlagTable
from vllm_launchers.vllm.flags.releases import release_table
from vllm_launchers.vllm.startup_reports import StartupReportStore, remembered

DOWNLOAD_BYTES = 8 << 20
"""Cache growth from which it counts as a download, not just a tokenizer."""

RATE_SAMPLES = 15
"""The download rate is averaged over this many samples of the cache's size."""


class StartupProgress:
    """Reads a generation's log from its beginning, each byte once, until it is ready.

    ``earlier`` holds the stage durations of an earlier start, empty if unknown.
    """

    def __init__(self, path: Path, record: ServerRecord, details: Details, earlier: Durations) -> None:
        self._path = path
        self._inode = record.log_inode
        self._offset = record.log_offset
        self._left = START_LOG_BYTES
        self._watch = StartupWatch(record.current.started_at)
        self._cache = _ModelCache(details)
        self._limited = BLOCKS in details.flags
        self._earlier = earlier
        self._grown_at = record.current.started_at
        self._share = 0.0
        self._complete: tuple[tuple[Stage, ...], Startup] | None = None

    def update(self, record: ServerRecord, now: float) -> tuple[tuple[Stage, ...], Startup]:
        """The stages and the progress so far; nothing more is read once the server is ready."""
        if self._complete is not None:
            return self._complete
        self._feed()
        current = record.current
        ended = current.ended_at is not None
        if current.warm_up is not None:
            self._watch.first_request(current.warm_up.at)
        if record.state is State.STARTING and (detail := self._cache.growing(now)):
            self._grown_at = now
            self._watch.downloaded(now, detail)
        stages = self._watch.stages(current.ended_at or now, ready_at=current.ready_at, ended=ended)
        over = current.ready_at is not None or ended
        report = self._watch.memory.report
        # With a fixed number of blocks, vLLM logs the memory that would have been available for the KV cache.
        shown = replace(report, kv_gib=None) if self._limited else report
        startup = Startup(report=shown, facts=self._watch.facts.facts)
        if over:
            self._complete = stages, startup
            return self._complete
        quiet = too_quiet(stages, self._earlier, now - self._grown_at)
        return stages, replace(startup, progress=self._progress(stages, now), quiet_seconds=quiet)

    def _progress(self, stages: tuple[Stage, ...], now: float) -> Progress | None:
        """The progress, which never decreases."""
        found = startup_progress(stages, self._earlier, now)
        if found is None:
            return None
        self._share = max(self._share, found.share)
        return replace(found, share=self._share)

    def _feed(self) -> None:
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                if self._inode is None or status.st_ino == self._inode:
                    file.seek(self._offset)
                    data = file.read(self._left)
                    self._grown_at = max(self._grown_at, status.st_mtime)
                else:
                    # Rotated in the meantime: the startup is in an older file, which is not searched.
                    data = b""
        except OSError:
            return
        self._offset += len(data)
        self._left -= len(data)
        self._watch.feed(data)


class _ModelCache:
    """Tracks how much of a model is on disk while it downloads."""

    def __init__(self, details: Details) -> None:
        self._model = details.model
        folder = details.flags.get("download-dir")
        self._folder = Path(folder) if isinstance(folder, str) else cache_folder({**os.environ, **details.environment})
        self._local = not self._model or self._model.startswith(("/", ".", "~"))
        self._samples: deque[tuple[float, int]] = deque(maxlen=RATE_SAMPLES)
        self._first: int | None = None
        self._expected = _weights_gib(details)

    def growing(self, now: float) -> str:
        """The download's progress text if the cache has grown since the last sample; else empty."""
        if self._local:
            return ""
        from vllm_launchers.vllm.modelfacts.read import stored_bytes

        stored = stored_bytes(self._model, self._folder) or 0
        before = self._samples[-1][1] if self._samples else stored
        self._samples.append((now, stored))
        if self._first is None:
            self._first = stored
        if stored <= before or stored - self._first < DOWNLOAD_BYTES:
            return ""
        at, first = self._samples[0]
        rate = f"{size((stored - first) / (now - at))}/s" if now - at >= 1 else ""
        if self._expected is not None and stored < self._expected * GIB:
            message = f"{size(stored)} of about {size(self._expected * GIB)}"
            return ", ".join(filter(None, (message, rate, percent(stored / (self._expected * GIB)))))
        return ", ".join(filter(None, (size(stored), rate)))


def _weights_gib(details: Details) -> float | None:
    """Estimated size of the weights on all GPUs: about the size of the download."""
    per_gpu = details.predicted.get("weights_gib")
    if not per_gpu:
        return None
    tensor, pipeline = (whole_number(details.flags, f"{kind}-parallel-size") for kind in ("tensor", "pipeline"))
    return per_gpu * tensor * pipeline


def times_store(state: Path) -> StartupReportStore:
    """Startup durations, in seconds by stage: the newest start per model, engine and flags."""
    return StartupReportStore(state / "start-times.json")


def remember_times(times: StartupReportStore, folder: Path, record: ServerRecord) -> bool:
    """Store the durations of a server that is ready; return whether there was anything to store."""
    details, ready_at = unpack(record.current.spec.details), record.current.ready_at
    lines = start_of_log(folder / LOG, record)
    if details.engine is None or ready_at is None or not lines:
        return False
    warm_up = record.current.warm_up
    first = warm_up.at if warm_up is not None else None
    done = stages(lines, record.current.started_at, ready_at, ready_at, ended=False, first_request_at=first)
    reader = FactReader()
    for text in lines:
        reader.line("", text, record.current.started_at)
    took = durations(done, reader.facts.prepared_seconds)
    settings = launch_settings(details.flags, details.environment)
    start = remembered(details.model, _place(details), details.engine.label, settings, reported=took, predicted={})
    return times.remember(start)


def earlier_times(state: Path, details: Details) -> Durations:
    """The durations of an earlier start of this model, preferring the same flags; empty without any."""
    if details.engine is None:
        return {}
    settings = launch_settings(details.flags, details.environment)
    found = times_store(state).find(details.model, _place(details), details.engine.label, settings)
    return found.reported if found is not None and found.engine == details.engine.label else {}


def _place(details: Details) -> str:
    return details.gpu_kind or (str(details.engine.kind) if details.engine is not None else "")


# -- shortening the next start ----------------------------------------------------------------------------------------


def startup_finding(details: Details, stages: Sequence[Stage], startup: Startup, ready_at: float) -> Finding | None:
    """A finding about the start of a server that became ready at ``ready_at`` (Unix seconds). Reads vLLM's files."""
    engine = details.engine
    if engine is None:
        return None
    table = _flags(engine)
    disturbed = startup.report.disturbed(details.gpu_kind, details.flags, details.environment)
    if disturbed and not {BLOCKS, BYTES} & details.flags.keys():
        return disturbed_start(startup.report, details.predicted.get("kv_tokens"), ready_at)
    pins = table is not None and "kv-cache-memory-bytes" in table.flags and engine.build not in (None, "cpu")
    start = LastStart(
        ready_at=ready_at,
        stages=stages,
        facts=startup.facts,
        flags=details.flags,
        release=engine.release,
        pin_bytes=startup.report.kv_pin_bytes if pins else None,
        loaders=_loaders(engine, table, details),
        cache_off=details.environment.get("VLLM_DISABLE_COMPILE_CACHE", "0") not in ("", "0"),
    )
    return slow_startup(start)


def _flags(engine: Engine) -> FlagTable | None:
    """Its flags as learned, else those of its release."""
    if engine.kind is EngineKind.VLLM and (known := FlagCache().get(engine)) is not None:
        return known
    return release_table(engine.version)


def _loaders(engine: Engine, table: FlagTable | None, details: Details) -> tuple[FastLoader, ...]:
    spec = table.flags.get("load-format") if table is not None else None
    try:
        return fast_loaders(engine, spec, details.model, details.flags, {**os.environ, **details.environment})
    except (FlagsUnknownError, OSError):
        return ()

"""A server's way up as a console follows it, from its log and its model's cache, measured by an earlier start."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import replace
from pathlib import Path

from vllm_console.fleet.details import Details
from vllm_console.fleet.watched import open_log
from vllm_console.telemetry.model import Stage
from vllm_console.telemetry.progress import Durations, Progress, Startup, progress, too_quiet
from vllm_console.telemetry.startup import StartupWatch
from vllm_launchers.keeper.records import ServerRecord, State

START_LOG_BYTES = 4 << 20
"""How much of a generation's log is read for its way up."""

DOWNLOAD_BYTES = 8 << 20
"""Growth of the cache from which on it is a download, and not a tokenizer."""

RATE_LOOKS = 15
"""Over so many looks at the cache the rate of a download is taken."""


class WayUp:
    """Reads a generation's log from its beginning, as far as its way up goes, each byte once.

    ``earlier`` are the stages' durations at an earlier start, empty where none is known.
    """

    def __init__(self, path: Path, record: ServerRecord, details: Details, earlier: Durations) -> None:
        self._path = path
        self._inode = record.log_inode
        self._offset = record.log_offset
        self._left = START_LOG_BYTES
        self._watch = StartupWatch(record.current.started_at)
        self._cache = _ModelCache(details)
        self._earlier = earlier
        self._grown_at = record.current.started_at
        self._share = 0.0
        self._complete: tuple[tuple[Stage, ...], Startup] | None = None

    def look(self, record: ServerRecord, now: float) -> tuple[tuple[Stage, ...], Startup]:
        """The stages so far and what is to be said of them; nothing is read any more once the server is ready."""
        if self._complete is not None:
            return self._complete
        self._feed()
        current = record.current
        ended = current.ended_at is not None
        if record.state is State.STARTING and (detail := self._cache.growing(now)):
            self._grown_at = now
            self._watch.downloaded(now, detail)
        stages = self._watch.stages(current.ended_at or now, ready_at=current.ready_at, ended=ended)
        over = current.ready_at is not None or ended
        startup = Startup(report=self._watch.memory.report)
        if over:
            self._complete = stages, startup
            return self._complete
        quiet = too_quiet(stages, self._earlier, now - self._grown_at)
        return stages, replace(startup, progress=self._progress(stages, now), quiet_seconds=quiet)

    def _progress(self, stages: tuple[Stage, ...], now: float) -> Progress | None:
        """How far it is, which never goes back."""
        found = progress(stages, self._earlier, now)
        if found is None:
            return None
        self._share = max(self._share, found.share)
        return replace(found, share=self._share)

    def _feed(self) -> None:
        try:
            with open_log(self._path) as file:
                status = os.fstat(file.fileno())
                if self._inode is None or status.st_ino == self._inode:
                    file.seek(self._offset)
                    data = file.read(self._left)
                    self._grown_at = max(self._grown_at, status.st_mtime)
                else:
                    # Rotated away meanwhile: the way up stands in an older file, and is not worth the search.
                    data = b""
        except OSError:
            return
        self._offset += len(data)
        self._left -= len(data)
        self._watch.feed(data)


class _ModelCache:
    """How much of a model there is on the disk while it is downloaded."""

    def __init__(self, details: Details) -> None:
        from vllm_launchers.machine.modelfacts.cache import cache_folder

        self._model = details.model
        folder = details.flags.get("download-dir")
        self._folder = Path(folder) if isinstance(folder, str) else cache_folder({**os.environ, **details.environment})
        self._local = not self._model or self._model.startswith(("/", ".", "~"))
        self._looks: deque[tuple[float, int]] = deque(maxlen=RATE_LOOKS)
        self._first: int | None = None
        self._expected = _weights_gib(details)

    def growing(self, now: float) -> str:
        """What to say of the download, where the cache has grown since the last look; else nothing."""
        if self._local:
            return ""
        from vllm_launchers.machine.modelfacts.cache import stored_bytes

        size = stored_bytes(self._model, self._folder) or 0
        before = self._looks[-1][1] if self._looks else size
        self._looks.append((now, size))
        if self._first is None:
            self._first = size
        if size <= before or size - self._first < DOWNLOAD_BYTES:
            return ""
        at, first = self._looks[0]
        rate = f"{(size - first) / 2**20 / (now - at):.0f} MiB/s" if now - at >= 1 else ""
        gib = size / 2**30
        if self._expected is not None and gib < self._expected:
            told = f"{_amount(gib)} of about {_amount(self._expected)}"
            return ", ".join(filter(None, (told, rate, f"{gib / self._expected * 100:.0f} %")))
        return ", ".join(filter(None, (_amount(gib), rate)))


def _amount(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * 1024:.0f} MiB"


def _weights_gib(details: Details) -> float | None:
    """What the weights on all GPUs come to as estimated before the start: about what there is to download."""
    per_gpu = details.predicted.get("weights_gib")
    if not per_gpu:
        return None
    count = 1
    for name in ("tensor-parallel-size", "pipeline-parallel-size"):
        value = details.flags.get(name)
        count *= value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 1
    return per_gpu * count

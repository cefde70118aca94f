"""Samples of the machine's GPUs, kept for half an hour, so that all consoles and commands use the same data.

One recorder samples for all: the one that holds the lock. When it ends, another takes over. It also writes the GPU
history.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_launchers.private import open_file, open_regular, replace_file
from vllm_launchers.secrets import redact
from vllm_launchers.typed_decoding import decode_json

if TYPE_CHECKING:
    from vllm_console.history.gpu_history import GpuHistoryWriter
    from vllm_launchers.host.gpu.host import Gpu, Host, Link
    from vllm_launchers.host.gpu.monitor import GpuMonitor

GPU_SAMPLES = "gpu-samples.jsonl"
"""The file's name in the state folder: one host document per line, with what varies about its GPUs."""

STEP_SECONDS = 5.0
KEPT_SECONDS = 1800.0
TIDY_EVERY = 60
"""Number of samples between removals of old ones."""

MOST_BYTES = 32 << 20

_GPU = (
    "index", "name", "memory_gib", "free_gib", "used_gib", "utilization", "memory_utilization", "temperature_c",
    "power_w", "power_limit_w", "energy_mj", "mig_mode", "clock_mhz", "clock_max_mhz", "throttle",
    "compute_capability", "pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max",
)  # fmt: skip
_HOLDER = ("pid", "user", "gib", "command", "kind", "ancestors")
_LONGEST_COMMAND = 200


class GpuSampleStore:
    """Writes GPU samples. `record` never blocks: the driver is queried in a separate thread.

    ``trouble`` gives the reason why samples are lost; the next one is tried again. ``notice`` reports a damaged history
    that was moved aside.
    """

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        self.notice = ""
        self._path = path
        self._lock: int | None = None
        self._watch: GpuMonitor | None = None
        self._newest: float | None = None
        self._vain = False
        """Whether there is no driver; none will appear during this process's lifetime."""
        self._written = 0
        self._history: GpuHistoryWriter | None = None

    def record(self) -> None:
        """Write what was sampled since the last call, unless another recorder does."""
        try:
            if self._vain or (self._watch is None and not self._begin()):
                return
            host = self._watch.latest() if self._watch is not None else None
            if host is None or host.problem or not host.gpus or host.at in (None, self._newest):
                return
            self._newest = host.at
            if self._history is not None:
                self._history.append(host, host.at or 0.0)
                self.trouble, self.notice = self._history.trouble, self._history.notice
            self._append(host)
        except OSError as error:
            self.trouble = f"GPU samples are lost ({error.strerror}): {self._path}"

    def close(self) -> None:
        """Stop sampling and release the lock."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._history is not None:
            self._history.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _begin(self) -> bool:
        """Become the sampling recorder if there is none."""
        if self._lock is None:
            self._lock = open_file(self._path.with_name(self._path.name + ".lock"), os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Import only now: the driver's library costs memory, which only one process per user should pay.
        from vllm_console.history.gpu_history import GPU_HISTORY, GpuHistoryWriter
        from vllm_launchers.host.gpu.host import has_driver
        from vllm_launchers.host.gpu.monitor import GpuMonitor

        if not has_driver():
            self._vain = True
            return False
        self._history = GpuHistoryWriter(self._path.with_name(GPU_HISTORY))
        self._watch = GpuMonitor(interval=STEP_SECONDS)
        self._watch.start()
        return True

    def _append(self, host: Host) -> None:
        data = (json.dumps(_document(host), separators=(",", ":")) + "\n").encode()
        opened = open_file(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            # Start on a new line: a line cut off by a full disk stays separate, and readers skip it.
            os.write(opened, b"\n" + data)
        finally:
            os.close(opened)
        if self._written % TIDY_EVERY == 0:
            self._tidy(host.at or 0.0)
        self._written += 1

    def _tidy(self, now: float) -> None:
        kept = [line for line in _lines(self._path) if _at(line) >= now - KEPT_SECONDS]
        replace_file(self._path, b"".join(line + b"\n" for line in kept))


def read_gpu_samples(path: Path, since: float) -> list[Host]:
    """Undamaged samples after ``since`` (Unix seconds), oldest first; empty without a readable file."""
    from vllm_launchers.host.gpu.host import Host

    found = []
    for line in _lines(path):
        if _at(line) > since:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(decode_json(line, Host))
    return found


def _lines(path: Path) -> list[bytes]:
    """The lines of a file, or of its last `MOST_BYTES`."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                file.seek(-MOST_BYTES, os.SEEK_END)
                file.readline()  # the rest of a line
            return [line for line in file.read(MOST_BYTES).split(b"\n") if line]
    except OSError:
        return []


def _at(line: bytes) -> float:
    """The time that a line starts with; negative infinity for an invalid line."""
    head, _, _ = line.removeprefix(b'{"at":').partition(b",")
    try:
        return float(head)
    except ValueError:
        return float("-inf")


def _document(host: Host) -> dict[str, Any]:
    return {"at": host.at, "gpus": [_gpu(gpu) for gpu in host.gpus], "links": [_link(link) for link in host.links]}


def _gpu(gpu: Gpu) -> dict[str, Any]:
    found = {name: value for name in _GPU if (value := getattr(gpu, name)) is not None}
    if gpu.used_by is not None:
        found["used_by"] = [{name: getattr(holder, name) for name in _HOLDER} for holder in gpu.used_by]
        for holder in found["used_by"]:
            holder["command"] = redact(holder["command"])[:_LONGEST_COMMAND] if holder["command"] else None
    return found


def _link(link: Link) -> dict[str, Any]:
    return {"a": link.a, "b": link.b, "kind": link.kind}

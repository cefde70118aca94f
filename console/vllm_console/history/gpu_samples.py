"""Samples of the machine's GPUs, kept for half an hour, so that every console and every command judges by the same.

One recorder samples for all: the one that holds the lock. When it ends, another takes its place. It writes the history
of the GPUs, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_launchers.private import open_file, open_regular
from vllm_launchers.secrets import redact
from vllm_launchers.typed_decoding import decode_json

if TYPE_CHECKING:
    from vllm_console.history.gpu_history import GpuHistoryWriter
    from vllm_launchers.host.gpu.host import Gpu, Host, Link
    from vllm_launchers.host.gpu.monitor import GpuMonitor

GPU_SAMPLES = "gpu-samples.jsonl"
"""The file's name in the state folder: a host document per line, with what changes of its GPUs."""

STEP_SECONDS = 5.0
KEPT_SECONDS = 1800.0
TIDY_EVERY = 60
"""Samples between two removals of what is older."""

MOST_BYTES = 32 << 20

_GPU = (
    "index", "name", "memory_gib", "free_gib", "used_gib", "utilization", "memory_utilization", "temperature_c",
    "power_w", "power_limit_w", "energy_mj", "mig_mode", "clock_mhz", "clock_max_mhz", "throttle",
    "compute_capability", "pcie_generation", "pcie_generation_max", "pcie_width", "pcie_width_max",
)  # fmt: skip
_HOLDER = ("pid", "user", "gib", "command", "kind", "ancestors")
_LONGEST_COMMAND = 200


class GpuSampleStore:
    """Writes samples of the GPUs. `record` never blocks: the driver is asked in a thread of its own.

    ``trouble`` is why samples are lost, in a sentence; the next one is tried again. ``notice`` tells of a damaged
    history that was set aside.
    """

    def __init__(self, path: Path) -> None:
        self.trouble = ""
        self.notice = ""
        self._path = path
        self._lock: int | None = None
        self._watch: GpuMonitor | None = None
        self._newest: float | None = None
        self._vain = False
        """There is no driver, and none will come while this process lives."""
        self._written = 0
        self._history: GpuHistoryWriter | None = None

    def record(self) -> None:
        """Write what was sampled since the last call, where no other recorder does."""
        try:
            if self._vain or (self._watch is None and not self._begin()):
                return
            host = self._watch.latest().host if self._watch is not None else None
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
        """Leave it to another."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._history is not None:
            self._history.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _begin(self) -> bool:
        """Become the one that samples, if nobody is."""
        if self._lock is None:
            self._lock = open_file(self._path.with_name(self._path.name + ".lock"), os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        # Only now: the driver's library costs memory, and one process of a person pays it for all servers.
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
            # What a full disk cut off stays a line of its own, which readers skip.
            os.write(opened, b"\n" + data)
        finally:
            os.close(opened)
        if self._written % TIDY_EVERY == 0:
            self._tidy(host.at or 0.0)
        self._written += 1

    def _tidy(self, now: float) -> None:
        kept = [line for line in _lines(self._path) if _at(line) >= now - KEPT_SECONDS]
        new = self._path.with_name(self._path.name + ".new")
        opened = open_file(new, os.O_WRONLY | os.O_TRUNC)
        with open(opened, "wb") as file:  # noqa: PTH123 - a descriptor
            file.writelines(line + b"\n" for line in kept)
        new.replace(self._path)


def read_gpu_samples(path: Path, since: float) -> list[Host]:
    """The samples after ``since`` (Unix seconds), oldest first; none where there are none, and without damaged ones."""
    import msgspec

    from vllm_launchers.host.gpu.host import Host

    found = []
    for line in _lines(path):
        if _at(line) > since:
            with contextlib.suppress(msgspec.DecodeError):
                found.append(decode_json(line, Host))
    return found


def _lines(path: Path) -> list[bytes]:
    try:
        with open_regular(path) as file:
            return [line for line in file.read(MOST_BYTES).split(b"\n") if line]
    except OSError:
        return []


def _at(line: bytes) -> float:
    """When a line was seen: it begins with that; long ago for one that is none."""
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

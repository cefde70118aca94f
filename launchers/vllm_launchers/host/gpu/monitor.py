"""Samples the GPUs in its own thread, so that a hanging driver blocks nothing else.

NVML can be in uninterruptible sleep for minutes, or forever. At most one call is pending at any time; meanwhile the
last sample stays, marked with the time since which the driver has not answered.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import DriverError, Gpu, Host
from vllm_launchers.host.gpu.reader import GpuReader, SystemReader
from vllm_launchers.host.gpu.sharing import holder_user

DEADLINE_SECONDS = 5.0
FREED_POLL_SECONDS = 0.25
MOST_BACKOFF_SECONDS = 60.0


class HostReader(Protocol):
    """The monitor's source: `vllm_launchers.host.gpu.reader.GpuReader`, or a fake."""

    def open(self) -> None:
        """Open the driver; raises `DriverError`."""

    def sample(self, at: float) -> Host:
        """The host now; raises `DriverError`."""

    def close(self) -> None:
        """Release the driver."""


class GpuMonitor:
    """After `start`, samples once per ``interval`` seconds. `latest` never blocks and is thread-safe."""

    def __init__(
        self,
        servers: Callable[[], Mapping[int, str]] | None = None,
        *,
        interval: float = 1.0,
        deadline: float = DEADLINE_SECONDS,
        open_reader: Callable[[], HostReader] | None = None,
    ) -> None:
        self._open_reader = open_reader or (lambda: GpuReader(servers))
        self._interval = interval
        self._deadline = deadline
        self._system = SystemReader()
        self._latest = Host(hostname=socket.gethostname())
        self._call: tuple[float, float] | None = None
        """Start of the pending call, on the monotonic clock and the wall clock."""
        self._sampled = threading.Event()
        self._ended = threading.Event()
        self._reader: HostReader | None = None
        self._backoff = interval

    def start(self) -> None:
        """Start sampling."""
        self._call = (time.monotonic(), time.time())
        threading.Thread(target=self._run, name="gpu-watch", daemon=True).start()

    def close(self) -> None:
        """Stop after the pending call, without waiting for it."""
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the first result, good or bad; returns whether it arrived."""
        return self._sampled.wait(seconds)

    def latest(self) -> Host:
        """The latest sample; ``problem`` says why it is not fresh. Never blocks."""
        latest, call = self._latest, self._call
        if call is not None and time.monotonic() - call[0] > self._deadline:
            text = f"driver not answering since {time.strftime('%H:%M:%S', time.localtime(call[1]))}"
            return replace(latest, problem=text)
        return latest

    def _run(self) -> None:
        # CPU and memory are known even if the driver never answers.
        self._latest = self._system.host(time.time())
        while not self._ended.is_set():
            self._call = (time.monotonic(), time.time())
            delay = self._sample()
            taken = time.monotonic() - self._call[0]
            self._call = None
            self._sampled.set()
            # After a call that hung, pause for as long as the call took.
            self._ended.wait(delay if taken <= self._deadline else min(max(delay, taken), MOST_BACKOFF_SECONDS))
        self._drop_reader()

    def _sample(self) -> float:
        """Take one sample; returns how long to wait for the next."""
        at = time.time()
        try:
            if self._reader is None:
                self._reader = self._open_reader()
                self._reader.open()
            self._latest = self._reader.sample(at)
        except DriverError as error:
            return self._failed(str(error), at)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and tried again
            return self._failed(f"can't read the GPUs ({type(error).__name__}: {error}); trying again", at)
        self._backoff = self._interval
        return self._interval

    def _failed(self, problem: str, at: float) -> float:
        self._latest = replace(self._system.host(at), problem=problem)
        self._drop_reader()
        self._backoff = min(self._backoff * 2, MOST_BACKOFF_SECONDS)
        return self._backoff

    def _drop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(DriverError):
                reader.close()


def read_once(servers: Callable[[], Mapping[int, str]] | None = None, deadline: float = 20.0) -> Host:
    """The current host; without GPUs and with a ``problem`` if there is no driver or it does not answer.

    (Without persistence mode, the driver wakes up its GPUs first, which takes a second or two each.)
    """
    watch = GpuMonitor(servers, deadline=min(deadline, DEADLINE_SECONDS))
    watch.start()
    if not watch.wait(deadline):
        watch.close()
        found = watch.latest()
        return replace(found, problem=found.problem or "the NVIDIA driver does not answer")
    watch.close()
    return watch.latest()


# -- after a stop: whether the memory was really freed, and if not, who holds it --------------------------------------


class Release(msgspec.Struct, frozen=True):
    """Whether memory was freed after a stop; if not, ``reason`` names the holder in a sentence."""

    freed: bool
    reason: str = ""


def wait_until_freed(
    latest: Callable[[], Host],
    wanted: Mapping[int, float],
    ours: Collection[int] = (),
    *,
    timeout: float = 30.0,
) -> Release:
    """Poll until each GPU has as many GiB free as in ``wanted``, or name who holds the rest.

    GPUs that share their memory with the CPU are left out: any process may take it.

    ``latest`` returns the newest host, such as ``watch.latest``. ``ours``: pids of the stopped server;
    if given, only these are named, because what others hold is theirs.
    """
    deadline = time.monotonic() + timeout
    while True:
        host = latest()
        own = [gpu for gpu in host.gpus if gpu.used_gib is not None]
        short = [gpu for gpu in own if gpu.free_gib is not None and gpu.free_gib < wanted.get(gpu.index, 0.0)]
        if not short and not host.problem:
            return Release(True)
        if time.monotonic() >= deadline:
            return Release(False, host.problem or "; ".join(_held(gpu, wanted[gpu.index], ours) for gpu in short))
        time.sleep(FREED_POLL_SECONDS)


def _held(gpu: Gpu, wanted: float, ours: Collection[int]) -> str:
    free = gpu.free_gib or 0.0
    holders = sorted(gpu.holders, key=lambda holder: -(holder.gib or 0.0))
    holders = [holder for holder in holders if not ours or holder.pid in ours]
    if not holders:
        return f"GPU {gpu.index}: {wanted - free:.1f} GiB were not freed, and no visible process holds them"
    holder = holders[0]
    size = f"{holder.gib:.1f} GiB" if holder.gib is not None else "memory"
    return (
        f"GPU {gpu.index}: {wanted - free:.1f} GiB were not freed; pid {holder.pid} of {holder_user(holder)} still "
        f"holds {size}"
    )

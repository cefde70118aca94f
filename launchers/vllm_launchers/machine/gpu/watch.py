"""Keeps looking at the GPUs from a thread of its own, so that a driver that hangs stalls nothing else.

NVML can sit in uninterruptible sleep for minutes, or for ever. At most one call is out at any time: while it is, the
last picture stays, marked with since when the driver does not answer. When it comes back, so does the picture.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from vllm_launchers.machine.gpu.errors import DriverError
from vllm_launchers.machine.gpu.host import Host, with_servers
from vllm_launchers.machine.gpu.machine import MachineReader

DEADLINE_SECONDS = 5.0
MOST_BACKOFF_SECONDS = 60.0


class Reader(Protocol):
    """What a watch looks through: `vllm_launchers.machine.gpu.reader.GpuReader`, or a fake."""

    def open(self) -> None:
        """Open the driver; raises `DriverError`."""

    def sample(self, at: float) -> Host:
        """The host now; raises `DriverError`."""

    def close(self) -> None:
        """Let go of the driver."""


class RecordedReader:
    """A recorded host in place of a driver: ``GpuWatch(open_reader=lambda: RecordedReader(host))``.

    It stays as it was recorded, its ``at`` too, so that ages of processes are those of then.
    """

    def __init__(self, host: Host, servers: Callable[[], Mapping[int, str]] | None = None) -> None:
        self._host = host
        self._servers = servers

    def open(self) -> None:
        """Nothing to open."""

    def sample(self, at: float) -> Host:  # noqa: ARG002 - a recording knows its own time
        """The recorded host."""
        return with_servers(self._host, self._servers()) if self._servers is not None else self._host

    def close(self) -> None:
        """Nothing to let go of."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known now. ``problem`` says why it is not fresh, ``since`` (Unix seconds) since when."""

    host: Host
    problem: str = ""
    since: float | None = None


@dataclass(frozen=True, slots=True)
class _State:
    """What the thread hands over, replaced whole."""

    host: Host
    problem: str = ""
    since: float | None = None


class GpuWatch:
    """Samples once per ``interval`` seconds after `start`. `latest` never blocks and may be called by any thread."""

    def __init__(
        self,
        servers: Callable[[], Mapping[int, str]] | None = None,
        *,
        interval: float = 1.0,
        deadline: float = DEADLINE_SECONDS,
        open_reader: Callable[[], Reader] | None = None,
    ) -> None:
        self._open_reader = open_reader or (lambda: _nvml_reader(servers))
        self._interval = interval
        self._deadline = deadline
        self._machine = MachineReader()
        self._state = _State(Host(hostname=socket.gethostname()))
        self._call: tuple[float, float] | None = None
        """When the present call went out: by the monotonic clock and by the wall's."""
        self._looked = threading.Event()
        self._ended = threading.Event()
        self._reader: Reader | None = None
        self._backoff = interval

    def start(self) -> None:
        """Begin looking."""
        self._call = (time.monotonic(), time.time())
        threading.Thread(target=self._run, name="gpu-watch", daemon=True).start()

    def close(self) -> None:
        """End looking after the present call, without waiting for it."""
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the first answer (also a bad one), at most so long; whether it came."""
        return self._looked.wait(seconds)

    def latest(self) -> Watched:
        """What is known now; never blocks."""
        state, call = self._state, self._call
        if call is not None and time.monotonic() - call[0] > self._deadline:
            text = f"driver not answering since {time.strftime('%H:%M:%S', time.localtime(call[1]))}"
            return Watched(replace(state.host, problem=state.host.problem or text), text, call[1])
        return Watched(state.host, state.problem, state.since)

    def _run(self) -> None:
        # What is around the GPUs is known even if the driver never answers.
        self._state = _State(self._machine.host(time.time()))
        while not self._ended.is_set():
            self._call = (time.monotonic(), time.time())
            delay = self._look()
            taken = time.monotonic() - self._call[0]
            self._call = None
            self._looked.set()
            # After a call that hung the driver gets as long to breathe as it took.
            self._ended.wait(delay if taken <= self._deadline else min(max(delay, taken), MOST_BACKOFF_SECONDS))
        self._drop_reader()

    def _look(self) -> float:
        """One sample; how long to wait for the next."""
        at = time.time()
        try:
            if self._reader is None:
                self._reader = self._open_reader()
                self._reader.open()
            self._state = _State(self._reader.sample(at))
        except DriverError as error:
            return self._failed(str(error), at)
        except Exception as error:  # noqa: BLE001 - the thread's boundary: reported, and tried again
            return self._failed(f"GPUs could not be read ({type(error).__name__}: {error}); trying again", at)
        self._backoff = self._interval
        return self._interval

    def _failed(self, problem: str, at: float) -> float:
        since = self._state.since if self._state.problem == problem else at
        self._state = _State(replace(self._machine.host(at), problem=problem), problem, since)
        self._drop_reader()
        self._backoff = min(self._backoff * 2, MOST_BACKOFF_SECONDS)
        return self._backoff

    def _drop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            with contextlib.suppress(DriverError):
                reader.close()


def _nvml_reader(servers: Callable[[], Mapping[int, str]] | None) -> Reader:
    from vllm_launchers.machine.gpu.reader import GpuReader

    return GpuReader(servers)


def read_once(servers: Callable[[], Mapping[int, str]] | None = None, deadline: float = 20.0) -> Host:
    """The host now, or without GPUs and with its ``problem`` said when there is no driver or it does not answer.

    (Without persistence mode a driver wakes its GPUs first, which takes a second or two for each.)
    """
    watch = GpuWatch(servers, deadline=min(deadline, DEADLINE_SECONDS))
    watch.start()
    if not watch.wait(deadline):
        watch.close()
        found = watch.latest()
        return replace(found.host, problem=found.problem or "the NVIDIA driver does not answer")
    watch.close()
    return watch.latest().host

"""After a stop: whether the GPU memory was really freed, and if not, who holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Host

TOLERANCE_GIB = 0.5
"""A driver keeps a little for itself; less than this does not count as missing."""

TIMEOUT_SECONDS = 30.0
"""How long memory may take to be freed after the server's end; 80 GiB takes a second or two."""

POLL_SECONDS = 0.25


def still_held(name: str, before: Host, read: Callable[[], Host], timeout: float = TIMEOUT_SECONDS) -> str:
    """Wait until an ended server's memory is free; returns who holds it after ``timeout`` seconds, or nothing.

    ``before`` is the host before the stop, ``read`` returns the newest.
    """
    from vllm_launchers.host.gpu.monitor import wait_until_freed  # loads psutil and pynvml, which a start need not

    seen = _Before.of(before, name)
    if not seen.wanted:
        return ""
    release = wait_until_freed(lambda: seen.less_growth(read()), seen.wanted, seen.ours, timeout=timeout)
    return "" if release.freed else f"ended, but {release.reason}"


class Releases:
    """Checks, in a thread per stop, that a server's memory is freed. `notice` never blocks.

    ``latest`` returns the newest host without blocking.
    """

    def __init__(self, latest: Callable[[], Host | None], timeout: float = TIMEOUT_SECONDS) -> None:
        self._latest = latest
        self._timeout = timeout
        self._notices: dict[str, str] = {}
        self._watched: dict[str, threading.Event] = {}

    def watch(self, name: str, ended: Callable[[], bool]) -> None:
        """Begin when a server is asked to stop; ``ended`` returns whether it has."""
        host = self._latest()
        before = _Before.of(host, name) if host is not None else None
        if before is None or not before.wanted:
            return
        self.forget(name)
        over = self._watched[name] = threading.Event()
        args = (name, ended, before, over)
        threading.Thread(target=self._run, args=args, name=f"release-{name}", daemon=True).start()

    def notice(self, name: str) -> str:
        """Who still holds a stopped server's memory, in a sentence; empty if no one does."""
        return self._notices.get(name, "")

    def forget(self, name: str) -> None:
        """The server is restarted, or its record is gone: its old memory no longer matters."""
        if (over := self._watched.pop(name, None)) is not None:
            over.set()
        self._notices.pop(name, None)

    def close(self) -> None:
        """Stop watching, without waiting."""
        for over in self._watched.values():
            over.set()

    def _run(self, name: str, ended: Callable[[], bool], before: _Before, over: threading.Event) -> None:
        from vllm_launchers.host.gpu.monitor import wait_until_freed

        def read() -> Host:
            return before.less_growth(self._latest() or Host())

        while not ended():
            if over.wait(POLL_SECONDS):
                return
        timeout = self._timeout
        while not over.is_set():
            release = wait_until_freed(read, before.wanted, before.ours, timeout=timeout)
            if release.freed:
                self._notices.pop(name, None)
                return
            self._notices[name] = f"ended, but {release.reason}"
            if over.is_set():  # forgotten meanwhile
                self._notices.pop(name, None)
                return
            timeout = 0.0
            over.wait(POLL_SECONDS * 4)


class _Before(msgspec.Struct, frozen=True):
    """State before the stop: GiB that will be free, by GPU, once the server is gone; what others held."""

    wanted: Mapping[int, float]
    ours: frozenset[int]
    """The server's own processes."""
    others: Mapping[tuple[int, int], float]
    """GiB by GPU and pid."""

    @classmethod
    def of(cls, host: Host, name: str) -> _Before:
        wanted, ours, others = {}, set(), {}
        for gpu in host.gpus:
            held = 0.0
            for holder in gpu.holders:
                if holder.server == name:
                    held += holder.gib or 0.0
                    ours.add(holder.pid)
                else:
                    others[gpu.index, holder.pid] = holder.gib or 0.0
            if held > TOLERANCE_GIB and gpu.free_gib is not None:
                wanted[gpu.index] = gpu.free_gib + held - TOLERANCE_GIB
        return cls(wanted, frozenset(ours), others)

    def less_growth(self, host: Host) -> Host:
        """The host as if others had neither appeared nor grown since: the memory they took was freed by the server."""

        def grown(gpu: Gpu) -> float:
            others = (holder for holder in gpu.holders if holder.pid not in self.ours)
            before = self.others
            return sum(max(0.0, (one.gib or 0.0) - before.get((gpu.index, one.pid), 0.0)) for one in others)

        gpus = (gpu if gpu.free_gib is None else replace(gpu, free_gib=gpu.free_gib + grown(gpu)) for gpu in host.gpus)
        return replace(host, gpus=tuple(gpus))

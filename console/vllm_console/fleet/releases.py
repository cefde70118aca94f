"""After a stop: whether the GPU memory really came back, and if not, who holds it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping

from vllm_launchers.machine.gpu.host import Gpu, Host
from vllm_launchers.machine.gpu.release import wait_until_freed

TOLERANCE_GIB = 0.5
"""A driver keeps a little for itself; less than this is not missed."""

PATIENCE_SECONDS = 30.0
"""How long memory may take to come back after the server's end; freeing 80 GiB takes a second or two."""

POLL_SECONDS = 0.25


def still_held(name: str, before: Host, look: Callable[[], Host], patience: float = PATIENCE_SECONDS) -> str:
    """Wait until a server that has ended gave its memory back; who holds it after ``patience`` seconds, or nothing.

    ``before`` is the host as it was before the stop, ``look`` gives the newest.
    """
    wanted, pids = _held(before, name), _pids(before)
    if not wanted:
        return ""
    release = wait_until_freed(look, wanted, pids, timeout=patience)
    return "" if release.freed or _taken_by_others(look(), wanted, pids) else f"it has ended, but {release.reason}"


class Releases:
    """Watches, in a thread per stop, that a server's memory comes back. `notice` never blocks.

    ``look`` gives the newest host without blocking.
    """

    def __init__(self, look: Callable[[], Host | None], patience: float = PATIENCE_SECONDS) -> None:
        self._look = look
        self._patience = patience
        self._notices: dict[str, str] = {}
        self._watched: dict[str, threading.Event] = {}

    def watch(self, name: str, ended: Callable[[], bool]) -> None:
        """Begin when a server is asked to stop; ``ended`` says whether it has."""
        host = self._look()
        held = _held(host, name) if host is not None else {}
        if host is None or not held:
            return
        self.forget(name)
        over = self._watched[name] = threading.Event()
        args = (name, ended, held, _pids(host), over)
        threading.Thread(target=self._run, args=args, name=f"release-{name}", daemon=True).start()

    def notice(self, name: str) -> str:
        """Who still holds a stopped server's memory, in a sentence; empty when nobody does."""
        return self._notices.get(name, "")

    def forget(self, name: str) -> None:
        """The server is started anew, or its record is gone: its old memory is no matter any more."""
        if (over := self._watched.pop(name, None)) is not None:
            over.set()
        self._notices.pop(name, None)

    def close(self) -> None:
        """Stop watching, without waiting."""
        for over in self._watched.values():
            over.set()

    def _run(
        self,
        name: str,
        ended: Callable[[], bool],
        wanted: Mapping[int, float],
        before: Collection[int],
        over: threading.Event,
    ) -> None:
        while not ended():
            if over.wait(POLL_SECONDS):
                return
        patience = self._patience
        while not over.is_set():
            release = wait_until_freed(lambda: self._look() or Host(), wanted, before, timeout=patience)
            if release.freed or _taken_by_others(self._look() or Host(), wanted, before):
                self._notices.pop(name, None)
                return
            self._notices[name] = f"it has ended, but {release.reason}"
            if over.is_set():  # forgotten meanwhile
                self._notices.pop(name, None)
                return
            patience = 0.0
            over.wait(POLL_SECONDS * 4)


def _held(host: Host, name: str) -> dict[int, float]:
    """GiB that will be free, by GPU, once a server of ours is gone."""
    found = {}
    for gpu in host.gpus:
        gib = sum(holder.gib or 0.0 for holder in gpu.holders if holder.server == name)
        if gib > TOLERANCE_GIB and gpu.free_gib is not None:
            found[gpu.index] = gpu.free_gib + gib - TOLERANCE_GIB
    return found


def _pids(host: Host) -> frozenset[int]:
    return frozenset(holder.pid for gpu in host.gpus for holder in gpu.holders)


def _taken_by_others(host: Host, wanted: Mapping[int, float], before: Collection[int]) -> bool:
    """Whether all that is missing went to processes that came since: then it did come back."""

    def explained(gpu: Gpu) -> bool:
        new = sum(holder.gib or 0.0 for holder in gpu.holders if holder.pid not in before)
        return gpu.free_gib is not None and gpu.free_gib + new >= wanted[gpu.index]

    return not host.problem and all(explained(gpu) for gpu in host.gpus if gpu.index in wanted)

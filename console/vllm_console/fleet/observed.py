"""Servers that this person's keepers did not start: looked at from outside, in memory, never signalled.

Every such server gets a thread of its own, so that one that hangs delays nothing but itself.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from vllm_console.fleet.model import ServerView
from vllm_launchers.machine.processes import ProcessScanner

if TYPE_CHECKING:
    from vllm_console.fleet.observing import ObservedWatch

SCAN_SECONDS = 5.0
"""How often the process table is searched."""

FIRST_LOOK_SECONDS = 0.5
"""How long the first snapshot waits for the first answers."""


class Observer:
    """Finds others' servers and keeps looking at them."""

    def __init__(self, interval: float = 1.0) -> None:
        self._interval = interval
        self._scanner = ProcessScanner()
        self._scanned_at = float("-inf")
        self._watches: dict[tuple[int, int], ObservedWatch] = {}

    def views(self, own_pids: Collection[int], names: Collection[str], selected: str | None) -> list[ServerView]:
        """A view of each, named ``vllm@PORT`` (or ``vllm@pid-PID``); ``names`` are taken by servers of ours."""
        if time.monotonic() - self._scanned_at >= SCAN_SECONDS:
            self._scan(own_pids)
        views = []
        taken = set(names)
        for watch in self._watches.values():
            if watch.server.pid in own_pids:
                continue
            view = watch.view(selected, taken)
            taken.add(view.name)
            views.append(view)
        return sorted(views, key=lambda view: view.name)

    def _scan(self, own_pids: Collection[int]) -> None:
        self._scanned_at = time.monotonic()
        if not (servers := self._scanner.scan(own_pids)) and not self._watches:
            return
        # What it takes to look at servers is imported when there is one to look at.
        from vllm_console.fleet.observing import ObservedWatch

        found = {(server.pid, server.start_time): server for server in servers}
        for key in [key for key in self._watches if key not in found]:
            self._watches.pop(key).close()
        new = [ObservedWatch(server, self._interval) for key, server in found.items() if key not in self._watches]
        self._watches.update({(watch.server.pid, watch.server.start_time): watch for watch in new})
        deadline = time.monotonic() + FIRST_LOOK_SECONDS
        for watch in new:
            watch.looked.wait(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Stop looking."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

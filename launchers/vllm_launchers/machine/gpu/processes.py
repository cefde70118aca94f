"""Who the processes on a GPU are. A pid that cannot be seen here, as from a container, stays a bare pid."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

import psutil

from vllm_launchers.machine.gpu.host import Holder
from vllm_launchers.secrets import redact_argv

MOST_COMMAND = 300


class ProcessDetails:
    """Remembers what was found out; looks again only when the set of pids has changed."""

    def __init__(self) -> None:
        self._known: dict[int, Holder] = {}

    def look(self, pids: Collection[int]) -> None:
        """Find out about these processes."""
        wanted = set(pids)
        if wanted == self._known.keys():
            return
        self._known = {pid: self._known.get(pid) or describe(pid) for pid in wanted}

    def complete(self, holder: Holder) -> Holder:
        """The same holder with user, command and age."""
        known = self._known.get(holder.pid)
        if known is None:
            return holder
        return replace(
            known, pid=holder.pid, gib=holder.gib, kind=holder.kind, instance=holder.instance, server=holder.server
        )


def describe(pid: int) -> Holder:
    """What can be learned of a process; what cannot is None."""
    try:
        process = psutil.Process(pid)
        started = process.create_time()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return Holder(pid)
    user = command = None
    try:
        with process.oneshot():
            user = process.username()
            command = " ".join(redact_argv(tuple(process.cmdline())))[:MOST_COMMAND] or process.name()
    except (psutil.Error, OSError):
        pass  # another user's process may hide either
    return Holder(pid, user=user, command=command, started_at=started, ancestors=_ancestors(process))


def _ancestors(process: psutil.Process) -> tuple[int, ...]:
    """The pids above it, the nearest first, and the leader of its session."""
    pids: list[int] = []
    try:
        pids = [parent.pid for parent in process.parents() if parent.pid > 1]
        leader = os.getsid(process.pid)
    except (psutil.Error, OSError):
        return tuple(pids)
    return tuple(pids) if leader in (0, 1, process.pid) or leader in pids else (*pids, leader)

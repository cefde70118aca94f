"""One keeper per server: its lock, and a check for other living keepers.

The lock alone is not enough: its file can be deleted under a living keeper, and some file systems grant every lock.
Every keeper has the server's output open, so a new keeper opens the output and then looks for other keepers that have
it open. If two do so at once, at least one sees the other and gives way.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from vllm_launchers.keeper import folders, location, process_group, processes, wire
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.files import LOCK, LOG, OUTPUT, RECORD
from vllm_launchers.keeper.record_writer import RESTORED
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import pids, title

NEEDED = (RECORD, LOCK, wire.SOCKET, OUTPUT, LOG)
"""Files that exist while a keeper is alive."""


def keepers_of(folder: Path) -> list[ProcessIdentity]:
    """The living keepers of a server's folder in this PID namespace, except this process."""
    output, found = folder.resolve() / OUTPUT, []
    for pid in pids():
        if pid != os.getpid() and title(pid) == processes.KEEPER_TITLE and process_group.has_output(pid, output):
            who = processes.identity(pid)
            if who is not None and processes.alive(who):
                found.append(who)
    return found


class FolderClaim:
    """A keeper's claim to its folder. ``lock``: descriptor of the lock that its starter took."""

    def __init__(self, folder: Path, lock: int, note: Callable[[str], None]) -> None:
        self._folder, self._lock, self._note = folder, lock, note
        self._own_record = (0, 0)

    def refuse_second(self) -> None:
        """Raise `KeeperError` if this folder has another living keeper; the output must already be open."""
        if others := keepers_of(self._folder):
            raise KeeperError(f"{self._folder.name} already has a keeper (pid {others[0].pid})")

    def lost(self) -> bool:
        """Whether another keeper has taken over this server, so that this one must release it at once.

        Also locks the lock file again if it was deleted or replaced.
        """
        path = self._folder / LOCK
        if not folders.leads_to(path, self._lock):
            with contextlib.suppress(OSError):
                fresh = folders.take_lock(self._folder, timeout=0.0)
                if fresh is not None:
                    os.close(self._lock)
                    self._lock = fresh
                    self._note(f"{path.name} {RESTORED} and locked")
        other = self._other_in_record()
        return other is not None and other in keepers_of(self._folder)

    def _other_in_record(self) -> ProcessIdentity | None:
        """The keeper in the record, if it is another one. Reads each version of a record only once."""
        try:
            status = (self._folder / RECORD).lstat()
            which = (status.st_ino, status.st_mtime_ns)
            if which == self._own_record:
                return None
            record = folders.read_record(self._folder)
        except (KeeperError, OSError):
            return None
        if record.keeper is None or not location.is_here(record):
            return None
        if record.keeper.pid != os.getpid():
            return record.keeper
        self._own_record = which
        return None

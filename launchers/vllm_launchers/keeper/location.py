"""Where a server runs: pids and start times are valid only within one boot and one PID namespace.

Containers on one machine, or several machines, may share a home folder. A server that runs elsewhere is shown here but
never declared dead, adopted, restarted or removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from functools import cache
from pathlib import Path

from vllm_launchers.keeper import folders, processes
from vllm_launchers.keeper.files import OUTPUT
from vllm_launchers.keeper.records import Location, ServerRecord
from vllm_launchers.procfs import PROC

MACHINE_ID = "/etc/machine-id"


@cache
def here() -> Location:
    """Where this process runs."""
    try:
        namespace = os.stat(f"{PROC}/self/ns/pid").st_ino  # noqa: PTH116 - not a file's path
    except OSError:
        namespace = 0
    try:
        machine = Path(MACHINE_ID).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        machine = ""
    return Location(os.uname().nodename, machine, processes.boot_id(), namespace)


def is_here(record: ServerRecord) -> bool:
    """Whether the pids in a record are valid here. An attached endpoint has none."""
    there, now = record.location, here()
    return there is None or (there.boot_id == now.boot_id and there.pid_namespace == now.pid_namespace)


def elsewhere(folder: Path, record: ServerRecord) -> str:
    """Where a server runs that can't be judged from here, as a clause; empty if it can.

    For another container on this machine, locks show whether anything of the server is left, because they work across
    namespaces. For another machine the record is trusted, unless it is this machine before a reboot.
    """
    there, now = record.location, here()
    if there is None or not record.needs_keeper or is_here(record):
        return ""
    if there.boot_id == now.boot_id:
        if folders.lock_is_held(folder) or _output_is_held(folder) is not False:
            return f"on {there.hostname}, in another container (PID namespace)"
        return ""
    if (there.machine_id, there.hostname) == (now.machine_id, now.hostname):
        return ""
    return f"on {there.hostname}, another machine"


def ended_with(record: ServerRecord) -> str:
    """What ended a server along with its machine or container, as a clause; empty if those still exist."""
    boots = [one.boot_id for one in (record.server, record.keeper) if one is not None]
    if any(boot != processes.boot_id() for boot in boots):
        return "the machine was rebooted since"
    return "" if is_here(record) else "its container has ended since"


def _output_is_held(folder: Path) -> bool | None:
    """Whether a process has a server's output open the way keepers hand it out; None if locks don't work.

    Some network file systems grant every lock, and others refuse all.
    """
    opened: list[int] = []
    try:
        for _ in range(2):
            opened.append(_open_to_lock(folder / OUTPUT))
            try:
                fcntl.flock(opened[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                    return None
                return len(opened) == 1  # otherwise our own first lock refused the second
        return None
    except OSError:
        return False
    finally:
        for fd in opened:
            os.close(fd)


def _open_to_lock(output: Path) -> int:
    """Open a server's output without creating it. Raises OSError.

    For writing, because NFS refuses an exclusive lock on a file open only for reading. Not for both, because a process
    that has it open that way counts as one of the server's (`process_group`), if only for this moment.
    """
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(output, os.O_WRONLY | flags)
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        return os.open(output, os.O_RDONLY | flags)

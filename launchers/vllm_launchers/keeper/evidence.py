"""What shows that a process is a server's own: it holds a file open that only keepers hand out.

A keeper gives its server the log pipe, open for reading *and* writing, as standard output. Nobody opens a pipe that
way by accident: who reads it along (``cat server.pipe``) has it for reading, who writes into it for writing. A pid and
a start time in a record prove nothing by themselves: records are copied, restored from backups and edited.
"""

from __future__ import annotations

import os
from pathlib import Path

from vllm_launchers.keeper import processes
from vllm_launchers.procfs import PROC, access_mode, descriptors

PIPE = "server.pipe"
COMPANION_LOG = "companion.log"
DELETED = " (deleted)"
"""What the kernel adds to the name of an open file that has been removed."""


def is_servers(pid: int, pipe: Path) -> bool:
    """Whether a process was born from the server whose log pipe this is, and is this user's.

    A keeper has the pipe too: whoever asks leaves keepers out.
    """
    return processes.owner(pid) == os.getuid() and holds(pid, pipe, os.O_RDWR)


def is_companion(pid: int, log: Path) -> bool:
    """Whether a process is the companion that writes this log, and is this user's."""
    return processes.owner(pid) == os.getuid() and holds(pid, log, os.O_WRONLY, os.O_RDWR)


def holds(pid: int, path: Path, *access: int) -> bool:
    """Whether a process has this very file open in one of these ways (``os.O_RDWR``, …); False where that is unseen."""
    try:
        wanted = path.stat(follow_symlinks=False)
    except OSError:
        wanted = None
    for number, link in (descriptors(pid) or {}).items():
        # By name before the stat: a file on a network server that is gone would make that wait.
        if os.path.basename(link).removesuffix(DELETED) != path.name:  # noqa: PTH119 - processes have many files
            continue
        if _leads_to(pid, number, link, path, wanted) and access_mode(pid, number) in access:
            return True
    return False


def _leads_to(pid: int, number: int, link: str, path: Path, wanted: os.stat_result | None) -> bool:
    if link == f"{path}{DELETED}":
        return True
    try:
        return wanted is not None and os.path.samestat(os.stat(f"{PROC}/{pid}/fd/{number}"), wanted)  # noqa: PTH116
    except OSError:
        return False

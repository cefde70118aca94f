"""``members.json``: who belonged to a server when its keeper last looked, and which shared memory they had.

The keeper that comes after goes by it where nothing else helps: for a process with a session and an output of its own
(Ray has such) whose keeper and parent died together. It counts for the very server and the very log pipe that it was
written beside, so that a copied folder names nobody. A process in it is one pid with one start time, a file of shared
memory one name with one inode.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import evidence, store
from vllm_launchers.keeper.records import ProcessIdentity

FILE = "members.json"
LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """What is written down: the server, everybody that belonged to it, and shared memory (name to inode)."""

    server: ProcessIdentity | None = None
    members: frozenset[ProcessIdentity] = frozenset()
    shared_memory: Mapping[str, int] = field(default_factory=dict)


def write(
    pipe: Path, server: ProcessIdentity, members: Iterable[ProcessIdentity], shared_memory: Mapping[str, int]
) -> None:
    """Write down who there is. Where that fails (disk full) it is done when somebody new is found."""
    with contextlib.suppress(OSError):
        document = {
            "pipe": _which(pipe),
            "server": [server.pid, server.start_time, server.boot_id],
            "members": [[member.pid, member.start_time] for member in members],
            "shared_memory": dict(shared_memory),
        }
        store.replace_file(pipe.with_name(FILE), json.dumps(document).encode())


def read(folder: Path) -> Memory:
    """What was written down in a server's folder; nothing where it is a copy, or cannot be read."""
    path = folder / FILE
    try:
        if path.is_symlink() or path.stat().st_size > LONGEST:
            return Memory()
        document = json.loads(path.read_bytes())
        if document["pipe"] != _which(folder / evidence.PIPE):
            return Memory()
        return _memory(document)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Memory()


def sweep(folder: Path) -> None:
    """Delete what a writer left that died in the middle; only for the holder of the lock."""
    for torn in folder.glob(f".{FILE}.*"):
        torn.unlink(missing_ok=True)


def _memory(document: Mapping[str, Any]) -> Memory:
    pid, start, boot = document["server"]
    members = frozenset(ProcessIdentity(int(pid), int(start), str(boot)) for pid, start in document["members"])
    shared = {str(name): int(inode) for name, inode in document["shared_memory"].items()}
    return Memory(ProcessIdentity(int(pid), int(start), str(boot)), members, shared)


def _which(pipe: Path) -> list[int]:
    """Device and inode: a copy has others. Raises OSError."""
    status = pipe.stat(follow_symlinks=False)
    return [status.st_dev, status.st_ino]

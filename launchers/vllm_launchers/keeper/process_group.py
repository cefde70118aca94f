"""Which processes belong to a server, and how a keeper can tell.

There are five criteria. None is an environment variable, because vLLM's process titles wipe ``/proc/PID/environ``:

- *Descent.* Every descendant of the server. A keeper is a subreaper, so the server's orphans descend from the keeper:
  everything below the keeper except the sidecar and a prepared process belongs to the server.
- *Session.* While the server itself is alive, every process in the session that it leads.
- *The output file.* A keeper gives its server the file ``server.output``, open for reading *and* writing, as standard
  output. No process opens it that way by accident: a reader (``tail -f``) opens it for reading, a writer for writing. A
  keeper that did not start the server relies on this. A pid and a start time in a record prove nothing by themselves,
  because records are copied, restored from backups and edited. The file is also checked once the leader is gone,
  because then the number of its session alone proves little.
- *The recorded group.* ``members.json``: the processes at the last poll and their shared memory, recorded for the next
  keeper. It covers a process with its own session and output whose keeper and parent died together. It counts only for
  the very server and output file that it was written for, so in a copied folder it names nobody.
- *The message queue*, for a server whose workers Ray runs. They are children of the raylet, like the workers of other
  jobs. A worker is the server's if it belongs to this user and has mapped a queue (``/dev/shm/psm_…``) that a process
  below the server has mapped: vLLM's executor gives the random name only to its own workers. A worker has the queue
  before it loads weights. It is found while both are alive; after that, the recorded group covers it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_launchers import procfs
from vllm_launchers.keeper import processes
from vllm_launchers.keeper.files import OUTPUT
from vllm_launchers.keeper.processes import Table
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.private import replace_file
from vllm_launchers.procfs import PROC, SHARED_MEMORY, MappedFile, ProcessStat, access_mode, descriptors, mapped_files
from vllm_launchers.values import NOTHING, Value

FILE = "members.json"
LONGEST_FILE = 1 << 20
POLL_STARTING_SECONDS, POLL_SECONDS = 1.0, 15.0
"""Intervals between polls of the group: processes appear while a server starts, and rarely later."""
STARTING_POLLS = 60
"""Number of polls at the first interval."""
SHARED_MEMORY_POLL = 5
"""Every fifth poll also reads which shared memory the processes have mapped, which takes longer."""
DELETED = " (deleted)"
"""The suffix that the kernel adds to the name of an open file that has been removed."""
RAYLET = "raylet"
"""Process name of Ray's own process on each machine, the parent of its workers."""
QUEUE = "psm_"
"""Name prefix of shared memory from Python's ``multiprocessing``, such as vLLM's message queues."""


class RecordedGroup(Value):
    """A keeper's notes: the server, its process group, and their shared memory (name to inode)."""

    server: ProcessIdentity | None = None
    members: frozenset[ProcessIdentity] = frozenset()
    shared_memory: Mapping[str, int] = NOTHING


class ProcessGroup:
    """The processes of one server, as its keeper knows them.

    ``keeper_pid`` is set if this keeper started the server, so that its orphans are reparented to the keeper.
    ``shared_memory``: files in ``/dev/shm`` that its processes have mapped (name to inode). ``ray``: Ray runs its
    workers.
    """

    def __init__(
        self,
        output: Path,
        server: ProcessIdentity,
        keeper_pid: int | None = None,
        known: Iterable[ProcessIdentity] = (),
        shared_memory: Mapping[str, int] = NOTHING,
        *,
        ray: bool = False,
    ) -> None:
        self.output = output
        self.server = server
        self.keeper_pid = keeper_pid
        self.known = set(known)
        self.shared_memory = dict(shared_memory)
        self._ray = ray
        self._raylets: set[ProcessIdentity] = set()
        """Raylets that were seen to run a worker of the server."""
        self._has_output: dict[ProcessIdentity, bool] = {}
        """Whether each process has the output open. Cached, because a process can't acquire it later."""
        self._polls = 0
        self._polled_at = float("-inf")

    @cached_property
    def proven(self) -> bool:
        """Whether the process with the server's pid and start time is the server: this keeper started it, or it has the
        output open. Checked only once, because a server may close its output later."""
        return self.keeper_pid is not None or has_output(self.server.pid, self.output)

    @property
    def server_lives(self) -> bool:
        """Whether the server's own process runs."""
        return processes.alive(self.server) and self.proven

    @property
    def dead_raylet(self) -> ProcessIdentity | None:
        """A raylet that ran a worker of the server and has ended."""
        return next((one for one in self._raylets if not processes.alive(one)), None)

    @classmethod
    def born(cls, folder: Path, server: ProcessIdentity, *, ray: bool) -> ProcessGroup:
        """The group of a server that this keeper has just started."""
        shared = dict(recorded(folder).shared_memory)
        return cls(folder.resolve() / OUTPUT, server, os.getpid(), shared_memory=shared, ray=ray)

    @classmethod
    def adopted(cls, folder: Path, server: ProcessIdentity | None, *, ray: bool) -> ProcessGroup | None:
        """The group of a server that another keeper started, with what it recorded; None if it never started."""
        if server is None:
            return None
        for torn in folder.glob(f".{FILE}.*"):  # left by a keeper that died while writing
            torn.unlink(missing_ok=True)
        before, output = recorded(folder), folder.resolve() / OUTPUT
        known = set(before.members) if before.server == server else set()
        return cls(output, server, known=known, shared_memory=dict(before.shared_memory), ray=ray)

    @property
    def foreign(self) -> bool:
        """Whether a process with the server's pid and start time runs but is not the server.

        A recorded server of which only threads are left shows no open files.
        """
        return processes.alive(self.server) and not self.proven and self.server not in self.known

    def poll(self, now: float, apart: Sequence[int] = ()) -> None:
        """Refresh the group if a poll is due, so that it stays known if this keeper dies; ``now`` is monotonic.

        ``apart``: pids of the keeper's other children, such as the sidecar.
        """
        wait = POLL_STARTING_SECONDS if self._polls < STARTING_POLLS else POLL_SECONDS
        if now - self._polled_at < wait:
            return
        self._polls, self._polled_at = self._polls + 1, now
        members = self.refresh(apart)
        if self._polls % SHARED_MEMORY_POLL == 0:
            mapped = {name: inode for member in members for name, inode in shared_memory(member.pid).items()}
            if not mapped.items() <= self.shared_memory.items():
                there = {
                    name: inode for name, inode in self.shared_memory.items() if Path(SHARED_MEMORY, name).exists()
                }
                self.shared_memory = there | mapped
                _write(self, members)

    def poll_soon(self) -> None:
        """Make the next poll due now, with shared memory: a server has mapped all of it once it is ready."""
        self._polled_at = float("-inf")
        self._polls += -self._polls % SHARED_MEMORY_POLL + SHARED_MEMORY_POLL - 1

    def refresh(self, apart: Sequence[int] = ()) -> list[ProcessIdentity]:
        """All remaining processes, the server first; also records them."""
        if self.server.boot_id != processes.boot_id():
            return []
        table = processes.table()
        found = self._by_descent(table, apart) | self._by_session(table, apart)
        if self._ray:
            found |= self._by_queue(table, found)
        found |= {member.pid for member in self.known if self._is(table, member)}
        members = [processes.identity_of(table[pid]) for pid in sorted(found) if table[pid].running]
        if not self.known.issuperset(members):
            _write(self, members)
        self.known = set(members)
        return sorted(members, key=lambda member: member != self.server)

    def _by_descent(self, table: Table, apart: Sequence[int]) -> set[int]:
        found = set()
        if self._is(table, self.server) and self.proven:
            found = {self.server.pid} | processes.descendants(table, [self.server.pid])
        found |= processes.descendants(table, [member.pid for member in self.known if self._is(table, member)])
        if self.keeper_pid is not None:
            found |= processes.descendants(table, [self.keeper_pid])
        return found - _others(table, apart)

    def _by_session(self, table: Table, apart: Sequence[int]) -> set[int]:
        leader = table.get(self.server.pid)
        if leader is not None and (leader.start_time != self.server.start_time or not self.proven):
            leader = None
        others = _others(table, apart) | {os.getpid()}
        candidates = [
            process
            for process in table.values()
            if process.start_time >= self.server.start_time and process.pid not in others
        ]
        found = {process.pid for process in candidates if self._holds_output(process)}
        here = {processes.identity_of(process) for process in candidates}
        self._has_output = {who: has for who, has in self._has_output.items() if who in here}
        if leader is not None:
            found |= {process.pid for process in candidates if self._in_session(process)}
        return found

    def _by_queue(self, table: Table, found: set[int]) -> set[int]:
        """Workers that Ray runs for the server; ``found``: the processes known from other criteria."""
        parents = {one.parent for one in table.values()}
        raylets = [pid for pid in parents if procfs.title(pid) == RAYLET]
        below = processes.descendants(table, raylets)
        known = {member.pid for member in self.known if self._is(table, member)}
        new = [pid for pid in below - found - known if processes.owner(pid) == os.getuid()]
        holders = self._with_own_queues(table, found, raylets) if new else ()
        own = {inode for pid in holders for inode in _queues(pid)}
        workers = {pid for pid in new if not own.isdisjoint(_queues(pid))}
        running = {table[pid].parent for pid in workers | known} & set(raylets)
        self._raylets |= {processes.identity_of(table[pid]) for pid in running}
        return workers

    def _with_own_queues(self, table: Table, found: set[int], raylets: Sequence[int]) -> set[int]:
        """Those of ``found`` whose queues are all the server's: not a raylet's children, nor their descendants.

        If a Ray job started this program, the server itself descends from a raylet. Then only descendants of the server
        count.
        """
        root = self.server.pid if self.keeper_pid is None else self.keeper_pid
        below = {raylet: processes.descendants(table, [raylet]) for raylet in raylets}
        if any(root in pids for pids in below.values()):
            found = found & ({root} | processes.descendants(table, [root]))
        return found.difference(*(pids for pids in below.values() if root not in pids))

    def _in_session(self, process: ProcessStat) -> bool:
        return process.session == self.server.pid and processes.owner(process.pid) == os.getuid()

    def _holds_output(self, process: ProcessStat) -> bool:
        if self.keeper_pid is not None:
            return False  # then it is a descendant of the keeper
        who = processes.identity_of(process)
        if who not in self._has_output:
            self._has_output[who] = has_output(process.pid, self.output)
        return self._has_output[who]

    @staticmethod
    def _is(table: Table, member: ProcessIdentity) -> bool:
        process = table.get(member.pid)
        return process is not None and process.start_time == member.start_time


def _others(table: Table, apart: Sequence[int]) -> set[int]:
    """Processes that are not the server's: ``apart``, their descendants, and the sessions they lead."""
    if not apart:
        return set()
    below = processes.descendants(table, apart)
    return {*apart} | below | {pid for pid, process in table.items() if process.session in apart}


def shared_memory(pid: int) -> dict[str, int]:
    """The existing shared memory files that a process has mapped: name to inode.

    Only files in this process's own ``/dev/shm``: a container may have another, with the same inode numbers.
    """
    inodes = {file.inode for file in _mapped_shared_memory(pid)}
    if not inodes:
        return {}
    # By inode: a semaphore is mapped under its original temporary name.
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.inode() in inodes}
    return {}


def _queues(pid: int) -> list[int]:
    """Inodes of the message queues that a process has mapped."""
    return [file.inode for file in _mapped_shared_memory(pid) if file.path.startswith(f"{SHARED_MEMORY}/{QUEUE}")]


def _mapped_shared_memory(pid: int) -> list[MappedFile]:
    """A process's mapped files in our own ``/dev/shm``, including removed ones."""
    try:
        device = os.stat(SHARED_MEMORY).st_dev  # noqa: PTH116 - as below
    except OSError:
        return []
    mapped = mapped_files(pid) or ()
    return [file for file in mapped if file.device == device and file.path.startswith(f"{SHARED_MEMORY}/")]


def recorded(folder: Path) -> RecordedGroup:
    """What a keeper recorded in a server's folder; empty if the folder is a copy or the file can't be read."""
    path = folder / FILE
    try:
        if path.is_symlink() or path.stat().st_size > LONGEST_FILE:
            return RecordedGroup()
        document = json.loads(path.read_bytes())
        return _decoded(document) if document["output"] == _file_identity(folder / OUTPUT) else RecordedGroup()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return RecordedGroup()


def _write(group: ProcessGroup, members: Sequence[ProcessIdentity]) -> None:
    """Record the group. If that fails (disk full), it is retried when a new process is found."""
    with contextlib.suppress(OSError):
        server = group.server
        document = {
            "output": _file_identity(group.output),
            "server": [server.pid, server.start_time, server.boot_id],
            "members": [[member.pid, member.start_time] for member in members],
            "shared_memory": group.shared_memory,
        }
        replace_file(group.output.with_name(FILE), json.dumps(document).encode())


def _decoded(document: Mapping[str, Any]) -> RecordedGroup:
    pid, start, boot = document["server"]
    members = frozenset(ProcessIdentity(int(pid), int(start), str(boot)) for pid, start in document["members"])
    shared = {str(name): int(inode) for name, inode in document["shared_memory"].items()}
    return RecordedGroup(ProcessIdentity(int(pid), int(start), str(boot)), members, shared)


def _file_identity(path: Path) -> list[int]:
    """Device and inode, which differ in a copy. Raises OSError."""
    status = path.stat(follow_symlinks=False)
    return [status.st_dev, status.st_ino]


def has_output(pid: int, output: Path) -> bool:
    """Whether a process of this user has a server's output open the way only keepers hand it out.

    Keepers have it open too: callers exclude them.
    """
    return processes.owner(pid) == os.getuid() and holds_open(pid, output, os.O_RDWR)


def is_sidecar(pid: int, log: Path) -> bool:
    """Whether a process of this user is the sidecar that writes this log."""
    return processes.owner(pid) == os.getuid() and holds_open(pid, log, os.O_WRONLY, os.O_RDWR)


def holds_open(pid: int, path: Path, *access: int) -> bool:
    """Whether a process has this exact file open in one of these modes (``os.O_RDWR``, …); False if that is hidden."""
    try:
        wanted = path.stat(follow_symlinks=False)
    except OSError:
        wanted = None
    for number, link in (descriptors(pid) or {}).items():
        # Compare names before calling stat, which could hang for a file on an unreachable network server.
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

"""Which processes are a server's: its tree, its session, and what it left behind.

Four kinds of evidence, none of them an environment variable (vLLM's process titles wipe ``/proc/PID/environ``):

- *Descent.* All that descends from the server. A keeper is a sub-reaper, so what its server orphans descends from
  the keeper: everything below the keeper but the companion is the server's.
- *Session.* While the server itself lives, every process of the session it leads.
- *The log pipe.* Whoever has it open for reading and writing was born from the server (`evidence`). It is what a
  keeper goes by that did not start the server: a process to which merely a record points is left alone. It is asked
  for once the leader is gone too: the number of its session alone proves little then.
- *Memory.* Identities that were members when last looked at, written down for the next keeper (`memory`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from vllm_launchers.keeper import evidence, memory, processes
from vllm_launchers.keeper.processes import Table
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import SHARED_MEMORY, ProcessStat, mapped_files, open_files, tcp_sockets

GLANCE_STARTING, GLANCE_LATER = 1.0, 15.0
"""Seconds between two looks at who there is: processes come while a server starts, and seldom after."""
FEW_LOOKS = 60
"""So many looks are taken at the first rate."""
EVERY = 5
"""At one look in so many it is also looked which shared memory they have: that takes longer."""


@dataclass
class Household:
    """The processes of one server as its keeper sees them."""

    pipe: Path
    server: ProcessIdentity
    keeper_pid: int | None = None
    """Set when the server was started by this keeper, so that orphans come to it."""
    known: set[ProcessIdentity] = field(default_factory=set)
    shared_memory: dict[str, int] = field(default_factory=dict)
    """Files of shared memory that its processes had mapped: name and inode."""
    _judged: dict[ProcessIdentity, bool] = field(default_factory=dict)
    """Who was found to have the pipe, or not to: nobody comes by it later in life."""
    _glances: int = 0
    _glanced_at: float = float("-inf")

    @cached_property
    def proven(self) -> bool:
        """Whether the process that has the server's pid and start time is the server: started by this keeper, or
        with its log pipe. Judged once: a server may close its output later."""
        return self.keeper_pid is not None or evidence.is_servers(self.server.pid, self.pipe)

    @property
    def server_lives(self) -> bool:
        """Whether the server itself runs."""
        return processes.alive(self.server) and self.proven

    @classmethod
    def born(cls, folder: Path, server: ProcessIdentity) -> Household:
        """Of a server that this keeper has just started."""
        shared = dict(memory.read(folder).shared_memory)
        return cls(folder.resolve() / evidence.PIPE, server, os.getpid(), shared_memory=shared)

    @classmethod
    def adopted(cls, folder: Path, server: ProcessIdentity | None) -> Household | None:
        """Of a server that another keeper started, with whom that one wrote down; None where it was never started."""
        if server is None:
            return None
        memory.sweep(folder)
        before, pipe = memory.read(folder), folder.resolve() / evidence.PIPE
        known = set(before.members) if before.server == server else set()
        return cls(pipe, server, known=known, shared_memory=dict(before.shared_memory))

    @property
    def stranger(self) -> bool:
        """Whether a process runs that has the server's pid and start time and is not the server."""
        return processes.alive(self.server) and not self.proven

    def glance(self, now: float, companion_pid: int | None = None) -> None:
        """Look now and then, so that who there is stays known when this keeper dies; ``now`` is monotonic."""
        wait = GLANCE_STARTING if self._glances < FEW_LOOKS else GLANCE_LATER
        if now - self._glanced_at < wait:
            return
        self._glances, self._glanced_at = self._glances + 1, now
        members = self.look(companion_pid)
        if self._glances % EVERY == 0:
            mapped = {name: inode for member in members for name, inode in shared_memory(member.pid).items()}
            if not mapped.items() <= self.shared_memory.items():
                there = {
                    name: inode for name, inode in self.shared_memory.items() if Path(SHARED_MEMORY, name).exists()
                }
                self.shared_memory = there | mapped
                memory.write(self.pipe, self.server, members, self.shared_memory)

    def look_closely(self) -> None:
        """Have the next glance be at once, and at shared memory too: a server has all of its own once it is ready."""
        self._glanced_at = float("-inf")
        self._glances += -self._glances % EVERY + EVERY - 1

    def look(self, companion_pid: int | None = None) -> list[ProcessIdentity]:
        """Everybody who is left, the server first; also remembers them."""
        if self.server.boot_id != processes.boot_id():
            return []
        table = processes.table()
        found = self._by_descent(table, companion_pid) | self._by_session(table, companion_pid)
        found |= {member.pid for member in self.known if self._is(table, member)}
        members = [processes.identity_of(table[pid]) for pid in sorted(found) if table[pid].running]
        if not self.known.issuperset(members):
            memory.write(self.pipe, self.server, members, self.shared_memory)
        self.known = set(members)
        return sorted(members, key=lambda member: member != self.server)

    def _by_descent(self, table: Table, companion_pid: int | None) -> set[int]:
        found = set()
        if self._is(table, self.server) and self.proven:
            found = {self.server.pid} | processes.descendants(table, [self.server.pid])
        found |= processes.descendants(table, [member.pid for member in self.known if self._is(table, member)])
        if self.keeper_pid is not None:
            found |= processes.descendants(table, [self.keeper_pid])
        return found - _companions(table, companion_pid)

    def _by_session(self, table: Table, companion_pid: int | None) -> set[int]:
        leader = table.get(self.server.pid)
        if leader is not None and (leader.start_time != self.server.start_time or not self.proven):
            leader = None
        others = _companions(table, companion_pid) | {os.getpid()}
        candidates = [
            process
            for process in table.values()
            if process.start_time >= self.server.start_time and process.pid not in others
        ]
        found = {process.pid for process in candidates if self._has_pipe(process)}
        here = {processes.identity_of(process) for process in candidates}
        self._judged = {who: had for who, had in self._judged.items() if who in here}
        if leader is not None:
            found |= {process.pid for process in candidates if self._in_session(process)}
        return found

    def _in_session(self, process: ProcessStat) -> bool:
        return process.session == self.server.pid and processes.owner(process.pid) == os.getuid()

    def _has_pipe(self, process: ProcessStat) -> bool:
        if self.keeper_pid is not None:
            return False  # then it descends from the keeper
        who = processes.identity_of(process)
        if who not in self._judged:
            self._judged[who] = evidence.is_servers(process.pid, self.pipe)
        return self._judged[who]

    @staticmethod
    def _is(table: Table, member: ProcessIdentity) -> bool:
        process = table.get(member.pid)
        return process is not None and process.start_time == member.start_time


def _companions(table: Table, companion_pid: int | None) -> set[int]:
    """The companion, what descends from it, and its session."""
    if companion_pid is None:
        return set()
    below = processes.descendants(table, [companion_pid])
    return {companion_pid} | below | {pid for pid, process in table.items() if process.session == companion_pid}


def shared_memory(pid: int) -> dict[str, int]:
    """The files of shared memory that a process has mapped and that are there now: name to inode."""
    inodes = {file.inode for file in mapped_files(pid) or () if file.path.startswith(f"{SHARED_MEMORY}/")}
    if not inodes:
        return {}
    # By inode: a semaphore is mapped under the name that it had before it was given its own.
    with contextlib.suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.inode() in inodes}
    return {}


def port_is_theirs(port: int, members: Iterable[ProcessIdentity]) -> bool | None:
    """Whether one of these processes listens on a TCP port; None where that cannot be seen."""
    sockets = listening_sockets(port)
    if not sockets:
        return None
    seen_all = True
    for member in members:
        files = open_files(member.pid)
        seen_all = seen_all and files is not None
        if sockets.intersection(files or ()):
            return True
    return False if seen_all else None


def listening_sockets(port: int) -> set[str]:
    """The sockets that listen on a TCP port here, in the form that ``/proc/PID/fd`` links have."""
    return {socket.link for socket in tcp_sockets() if socket.listening and socket.port == port}

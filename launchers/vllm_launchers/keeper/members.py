"""Which processes are a server's: its tree, its session, and what it left behind.

Three kinds of evidence, none of them an environment variable (vLLM's process titles wipe ``/proc/PID/environ``):

- *Descent.* All that descends from the server. A keeper is a sub-reaper, so what its server orphans descends from
  the keeper: everything below the keeper but the companion is the server's.
- *Session.* While the server itself lives, every process of the session it leads. Once it is gone, a number alone
  proves little: then a process must also have this server's own log pipe open, be of this user, and have started
  after the server. (Linux gives a pid out again only when no session has its number any more; so if the number has
  a new owner, nothing of the old session is left.)
- *Memory.* Identities that were members when last looked at.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_launchers.keeper import processes
from vllm_launchers.keeper.processes import Table
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import ProcessStat, open_files, tcp_sockets


@dataclass
class Household:
    """The processes of one server as its keeper sees them."""

    pipe: Path
    server: ProcessIdentity
    keeper_pid: int | None = None
    """Set when the server was started by this keeper, so that orphans come to it."""
    known: set[ProcessIdentity] = field(default_factory=set)

    def look(self, companion_pid: int | None = None) -> list[ProcessIdentity]:
        """Everybody who is left, the server first; also remembers them."""
        if self.server.boot_id != processes.boot_id():
            return []
        table = processes.table()
        found = self._by_descent(table, companion_pid) | self._by_session(table)
        found |= {member.pid for member in self.known if self._is(table, member)}
        members = [processes.identity_of(table[pid]) for pid in sorted(found) if table[pid].running]
        self.known = set(members)
        return sorted(members, key=lambda member: member != self.server)

    def _by_descent(self, table: Table, companion_pid: int | None) -> set[int]:
        found = set()
        if self._is(table, self.server):
            found = {self.server.pid} | processes.descendants(table, [self.server.pid])
        found |= processes.descendants(table, [member.pid for member in self.known if self._is(table, member)])
        if self.keeper_pid is not None:
            below = processes.descendants(table, [self.keeper_pid])
            if companion_pid is not None:
                below -= processes.descendants(table, [companion_pid]) | {companion_pid}
                below = {pid for pid in below if table[pid].session != companion_pid}
            found |= below
        return found

    def _by_session(self, table: Table) -> set[int]:
        leader = table.get(self.server.pid)
        if leader is not None and leader.start_time != self.server.start_time:
            return set()
        candidates = (process for process in table.values() if self._may_be(process))
        if leader is not None:
            return {process.pid for process in candidates}
        return {process.pid for process in candidates if self._has_pipe(process.pid)}

    def _may_be(self, process: ProcessStat) -> bool:
        return (
            process.session == self.server.pid
            and process.start_time >= self.server.start_time
            and processes.owner(process.pid) == os.getuid()
        )

    def _has_pipe(self, pid: int) -> bool:
        return str(self.pipe) in (open_files(pid) or ())

    @staticmethod
    def _is(table: Table, member: ProcessIdentity) -> bool:
        process = table.get(member.pid)
        return process is not None and process.start_time == member.start_time


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

"""A stop on its way: climbs the ladder, signals each process once per rung, and says when nothing is left."""

from __future__ import annotations

import signal
from collections.abc import Callable

from vllm_launchers.keeper import processes
from vllm_launchers.keeper.ladder import Ladder
from vllm_launchers.keeper.members import Household
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity

LOOK_SECONDS, STUCK_LOOK_SECONDS = 0.1, 2.0
"""Between two looks, each of which reads all of ``/proc``. What SIGKILL does not end may stay for days."""
CLEAN_LOOKS = 2
"""Looks in a row that must find nothing: one may miss a process whose parent ends while the table is read."""


class Stop:
    """``requested``: somebody asked for it. ``then``: what to start afterwards. ``retry``: the policy may restart."""

    def __init__(
        self,
        ladder: Ladder,
        note: Callable[[str], None],
        *,
        requested: bool,
        then: LaunchSpec | None = None,
        retry: bool = False,
    ) -> None:
        self.ladder = ladder
        self.requested = requested
        self.then = then
        self.retry = retry
        self.stuck: tuple[int, ...] = ()
        """Pids that did not end even by SIGKILL."""
        self._note = note
        self._clean_looks = 0
        self._sent: set[tuple[ProcessIdentity, int]] = set()

    @property
    def pause(self) -> float:
        """Seconds until it is to look again."""
        return STUCK_LOOK_SECONDS if self.stuck else LOOK_SECONDS

    def advance(self, household: Household | None, companion_pid: int | None, server_ended: bool, now: float) -> bool:
        """Look once and do what is due; True when the server has ended and nothing of it is left."""
        if household is None:
            return server_ended
        rung = self.ladder.rung(now)
        if not rung.everybody:
            if household.proven:
                self._send(household.server, rung.number)
            return False
        left = household.look(companion_pid)
        for member in left:
            self._send(member, rung.number)
        self.stuck = tuple(member.pid for member in left) if self.ladder.stuck(now) else ()
        self._clean_looks = 0 if left or not server_ended else self._clean_looks + 1
        return self._clean_looks >= CLEAN_LOOKS

    def _send(self, process: ProcessIdentity, number: int) -> None:
        """Signal a process once per rung; one that is stopped (SIGSTOP) is let go on, or it would never notice."""
        if (process, self.ladder.step) not in self._sent:
            sent = processes.send(process, number)
            self._sent.add((process, self.ladder.step))
            if sent:
                self._note(f"sent {processes.signal_name(number)} to pid {process.pid}")
        found = processes.stat(process.pid)
        if found is not None and found.state == "T":  # looked at every time: a stop may take effect late
            processes.send(process, signal.SIGCONT)

"""How a server is stopped: a sequence of signals, each with a timeout, until all its processes are gone.

Measured on vLLM 0.32:

- While a server *starts*, SIGTERM may never end it once its engine process exists. During imports, SIGINT ends it
  within 0.2 to 6 s (10 of 10 starts). While the engine comes up, asyncio delays the first SIGINT until the engine is
  up: 3 to 13 s with one worker (11 of 11); a second SIGINT 8 s later ends it within 3 s (4 of 4). With two workers that
  are still importing, one SIGINT takes a minute or more (4 of 4) and two take 17 to 55 s (3 of 3), so the steps for the
  whole group follow.
- A process that inherited an ignored SIGINT ignores it until it serves (2 of 2): `spawn` resets that.
- While it *serves*, SIGTERM ends it within 0.3 to 2.5 s, or after its drain time.
- With a hung engine and an open connection, SIGTERM never ends it.
- Engine processes that lost their API server end 3 to 4 s after SIGTERM, but leave shared memory behind after SIGKILL,
  so they get SIGTERM first.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from vllm_launchers.keeper import processes
from vllm_launchers.keeper.context import StopTimeouts
from vllm_launchers.keeper.process_group import ProcessGroup
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.values import Value

POLL_SECONDS, STUCK_POLL_SECONDS = 0.1, 2.0
"""Intervals between checks, each of which reads all of ``/proc``. A process that survives SIGKILL may stay for days."""
EMPTY_POLLS = 2
"""Consecutive checks that must find nothing: one check may miss a process whose parent ends while it reads."""


class StopStep(Value):
    """One step: the signal, whether the whole process group or only the server gets it, and the timeout."""

    number: signal.Signals
    whole_group: bool
    timeout: float


class StopSequence:
    """The steps of a stop; `server_ended` skips to the steps for the whole group. Pure: the time is an argument."""

    def __init__(self, steps: tuple[StopStep, ...], now: float) -> None:
        self._steps = steps
        self._at = 0
        self._since = now

    @classmethod
    def starting(cls, now: float, timeouts: StopTimeouts) -> StopSequence:
        """For a server that was never ready."""
        first = StopStep(signal.SIGINT, whole_group=False, timeout=timeouts.interrupt)
        return cls((first, first, *_rest(timeouts)), now)

    @classmethod
    def serving(cls, now: float, timeouts: StopTimeouts, drain_seconds: float) -> StopSequence:
        """For a server that was ready."""
        first = StopStep(signal.SIGTERM, whole_group=False, timeout=timeouts.terminate + drain_seconds)
        return cls((first, *_rest(timeouts)), now)

    @classmethod
    def leftover(cls, now: float, timeouts: StopTimeouts) -> StopSequence:
        """For processes that a server left behind when it ended."""
        return cls(_rest(timeouts), now)

    def current(self, now: float) -> StopStep:
        """The current step; advances after a timeout. The last step stays."""
        while self._at + 1 < len(self._steps) and now - self._since >= self._steps[self._at].timeout:
            self._advance(now)
        return self._steps[self._at]

    def server_ended(self, now: float) -> None:
        """The server itself has ended: go straight to the steps for the rest of its group."""
        while not self._steps[self._at].whole_group:
            self._advance(now)

    @property
    def index(self) -> int:
        """Index of the current step."""
        return self._at

    @property
    def killing(self) -> bool:
        """Whether the sequence has reached SIGKILL."""
        return self._steps[self._at].number is signal.SIGKILL

    def stuck(self, now: float) -> bool:
        """Whether even SIGKILL has timed out."""
        return self.killing and now - self._since >= self._steps[self._at].timeout

    def _advance(self, now: float) -> None:
        self._at += 1
        self._since = now


def _rest(timeouts: StopTimeouts) -> tuple[StopStep, ...]:
    return (
        StopStep(signal.SIGTERM, whole_group=True, timeout=timeouts.rest),
        StopStep(signal.SIGKILL, whole_group=True, timeout=timeouts.kill),
    )


class Stop:
    """A stop in progress.

    ``requested``: a console requested it. ``retry``: the policy may restart. The record says what to start afterwards.
    """

    def __init__(
        self,
        sequence: StopSequence,
        note: Callable[[str], None],
        *,
        requested: bool,
        retry: bool = False,
    ) -> None:
        self.sequence = sequence
        self.requested = requested
        self.retry = retry
        self.restart_reason = ""
        """Why the current generation is started again; empty if it is not, or if that is a pending start."""
        self.stuck: tuple[int, ...] = ()
        """Pids of processes that survived SIGKILL."""
        self._note = note
        self._empty_polls = 0
        self._sent: set[tuple[ProcessIdentity, int]] = set()

    @property
    def pause(self) -> float:
        """Seconds until the next check."""
        return STUCK_POLL_SECONDS if self.stuck else POLL_SECONDS

    def advance(self, group: ProcessGroup | None, apart: Sequence[int], server_ended: bool, now: float) -> bool:
        """Check once and send any signal that is due; True when the server has ended and its group is empty."""
        if group is None:
            return server_ended
        step = self.sequence.current(now)
        if not step.whole_group:
            if group.proven:
                self._send(group.server, step.number)
            return False
        left = group.refresh(apart)
        for member in left:
            self._send(member, step.number)
        self.stuck = tuple(member.pid for member in left) if self.sequence.stuck(now) else ()
        self._empty_polls = 0 if left or not server_ended else self._empty_polls + 1
        return self._empty_polls >= EMPTY_POLLS

    def _send(self, process: ProcessIdentity, number: int) -> None:
        """Signal a process once per step. A stopped one (SIGSTOP) also gets SIGCONT, or it would never react."""
        if (process, self.sequence.index) not in self._sent:
            sent = processes.send(process, number)
            self._sent.add((process, self.sequence.index))
            if sent:
                self._note(f"sent {processes.signal_name(number)} to pid {process.pid}")
        found = processes.stat(process.pid)
        if found is not None and found.state == "T":  # checked every time: SIGSTOP may take effect late
            processes.send(process, signal.SIGCONT)

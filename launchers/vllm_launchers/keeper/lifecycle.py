"""The states of a server and what leads from one to the next. Every change of state is one of these.

::

    LAUNCHED       (nothing, stopped, failed, stopping) → starting   a process is started
    ANSWERED       starting → ready                                  /health answered 200, from our process
    FELL_SILENT    ready → unresponsive                              some probes in a row failed
    SPOKE_AGAIN    unresponsive → ready
    STOP_ASKED     starting, ready, unresponsive → stopping          a console asked for a stop or a restart
    ENDED          starting, ready, unresponsive → stopping          it ended by itself; what it left is being ended
    GONE           stopping → stopped                                nothing is left, as asked
    LOST           starting, stopping → failed                       nothing is left, and nobody had asked for that
    CANCELLED      failed → stopped                                  a stop while it waited to be started again

Races between what can happen at once, and what settles them (all in `Keeper`, which alone changes the state):

- *An answer or a death of an earlier process arrives late.* Every start has a number (epoch); events carry it.
- *The process dies while a stop begins.* The exit counts as requested if the stop was accepted first.
- *A restart is asked during a stop, or a stop during a restart.* The last word counts; one ladder serves both.
- *A keeper dies during a restart, or while it waits to start again.* The record says what was to be started next, how
  often it was tried and until when it waits; the keeper that adopts goes on from there.
- *A request comes while the keeper ends.* It is answered "gone"; the console takes the lock and starts a new keeper.
- *A pid is given to somebody else.* Own children keep their pid until reaped; all others are signalled by pidfd.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_launchers.keeper.ladder import Patience
from vllm_launchers.keeper.processes import signal_name
from vllm_launchers.keeper.records import Exit, RestartMode, RestartPolicy, State

LIVE = frozenset({State.STARTING, State.READY, State.UNRESPONSIVE})
KEPT_GENERATIONS = 20


class Transition(StrEnum):
    """What leads from one state to the next."""

    LAUNCHED = "launched"
    ANSWERED = "answered"
    FELL_SILENT = "fell silent"
    SPOKE_AGAIN = "spoke again"
    STOP_ASKED = "stop asked"
    ENDED = "ended"
    GONE = "gone"
    LOST = "lost"
    CANCELLED = "cancelled"


TRANSITIONS: dict[Transition, tuple[frozenset[State], State]] = {
    Transition.LAUNCHED: (frozenset({State.STOPPED, State.FAILED, State.STOPPING}), State.STARTING),
    Transition.ANSWERED: (frozenset({State.STARTING}), State.READY),
    Transition.FELL_SILENT: (frozenset({State.READY}), State.UNRESPONSIVE),
    Transition.SPOKE_AGAIN: (frozenset({State.UNRESPONSIVE}), State.READY),
    Transition.STOP_ASKED: (LIVE, State.STOPPING),
    Transition.ENDED: (LIVE, State.STOPPING),
    Transition.GONE: (frozenset({State.STOPPING}), State.STOPPED),
    Transition.LOST: (frozenset({State.STARTING, State.STOPPING}), State.FAILED),
    Transition.CANCELLED: (frozenset({State.FAILED}), State.STOPPED),
}


@dataclass(frozen=True, slots=True)
class Tuning:
    """How patient a keeper is, in seconds; a console leaves it alone, a test shortens it."""

    patience: Patience = field(default_factory=Patience)
    probe_starting: float = 0.3
    probe_ready: float = 2.0
    silent_probes: int = 3
    """Failed probes in a row until a ready server is called unresponsive."""
    steady: float = 600.0
    """Ready for this long, its automatic restarts count from zero again."""


def next_state(transition: Transition, state: State) -> State:
    """Where a transition leads. Raises ValueError where it cannot happen, which would be a fault of the keeper."""
    allowed, target = TRANSITIONS[transition]
    if state not in allowed:
        raise ValueError(f"{transition!r} cannot happen to a server that is {state}")
    return target


def exit_of(status: int, requested: bool, killed: bool, at: float) -> Exit:
    """How a process ended, from its wait status; ``killed`` says that the stop ladder came to SIGKILL."""
    code = os.waitstatus_to_exitcode(status)
    how = f"exit code {code}" if code >= 0 else signal_name(-code)
    if requested:
        reason = f"stopped as asked, {how}" + ("; it had to be killed" if killed else "")
    elif code >= 0:
        reason = f"ended by itself with exit code {code}"
    else:
        reason = f"killed by signal {how}, not by this console"
    return Exit(
        at=at,
        code=code if code >= 0 else None,
        signal=signal_name(-code).split(" ", 1)[0] if code < 0 else None,
        requested=requested,
        reason=reason,
    )


def exit_unknown(requested: bool, why: str, at: float) -> Exit:
    """The exit of a process that was nobody's child any more."""
    begin = "stopped as asked" if requested else "ended by itself"
    return Exit(at=at, code=None, signal=None, requested=requested, reason=f"{begin}, exit code unknown: {why}")


def retry_delay(policy: RestartPolicy, attempt: int) -> float | None:
    """Seconds until the next automatic start, when ``attempt`` were made in a row; None: no more."""
    if policy.mode is RestartMode.NEVER or attempt >= policy.limit:
        return None
    return min(policy.backoff_seconds * 2.0 ** min(attempt, 32), policy.backoff_cap_seconds)

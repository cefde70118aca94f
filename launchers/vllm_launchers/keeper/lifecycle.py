"""The states of a server and the transitions between them. Every change of state is one of these.

::

    LAUNCHED       (nothing, stopped, failed, stopping) → starting   a process is started
    ANSWERED       starting → ready                                  /health answered 200, from our process, and the
                                                                     warm-up request, if there is one, is done
    UNFIT          starting → stopping                               /health answers, but no request can be served
    NODE_LOST      starting, ready, unresponsive, asleep → stopping  another node of the same server is gone
    UNANSWERED     ready → unresponsive                              several health checks in a row failed
    RECOVERED      unresponsive → ready                              /health answers again
    SUSPENDED      ready, unresponsive → asleep                      it is put to sleep; no request is left
    WOKEN          asleep → ready                                    it is awake and answers as before
    STOP_REQUESTED starting, ready, unresponsive, asleep → stopping  a console requested a stop or a restart
    ENDED          starting, ready, unresponsive, asleep → stopping  it exited on its own; its leftovers are ended
    GONE           stopping → stopped                                nothing is left, as requested
    LOST           starting, stopping → failed                       nothing is left, and nobody requested that
    CANCELED       failed → stopped                                  a stop while it waited for a restart

Races, and how they are resolved (all in `Supervisor`, which alone changes the state):

- *A health check or an exit of an earlier process arrives late.* Every start has a number (epoch); events carry it.
- *The process dies while a stop begins.* The exit counts as requested if the stop was accepted first.
- *A restart is requested during a stop, or a stop during a restart.* The last request counts; one stop sequence serves
  both.
- *A keeper dies during a restart, or while it waits to start again.* The record says what to start next, how many
  attempts were made and how long to wait; the keeper that adopts the server continues from there.
- *Another program binds the port between two generations.* The keeper holds the port (`Reservation`) from the moment
  the old process releases it.
- *A request arrives while the keeper ends.* It is answered "gone"; the console takes the lock and starts a new keeper.
- *A pid is reused.* Children keep their pid until they are reaped; all other processes are signaled by pidfd.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from vllm_launchers.keeper.processes import signal_name
from vllm_launchers.keeper.records import Exit, GoldenAnswer, SleepStep, State, WarmUpReport
from vllm_launchers.values import Value

LIVE = frozenset({State.STARTING, State.READY, State.UNRESPONSIVE, State.ASLEEP})
KEPT_GENERATIONS = 20


class Transition(StrEnum):
    """A change from one state to the next."""

    LAUNCHED = "launched"
    ANSWERED = "answered"
    UNFIT = "unfit"
    NODE_LOST = "node lost"
    UNANSWERED = "unanswered"
    RECOVERED = "recovered"
    SUSPENDED = "suspended"
    WOKEN = "woken"
    STOP_REQUESTED = "stop requested"
    ENDED = "ended"
    GONE = "gone"
    LOST = "lost"
    CANCELED = "canceled"


TRANSITIONS: dict[Transition, tuple[frozenset[State], State]] = {
    Transition.LAUNCHED: (frozenset({State.STOPPED, State.FAILED, State.STOPPING}), State.STARTING),
    Transition.ANSWERED: (frozenset({State.STARTING}), State.READY),
    Transition.UNFIT: (frozenset({State.STARTING}), State.STOPPING),
    Transition.NODE_LOST: (LIVE, State.STOPPING),
    Transition.UNANSWERED: (frozenset({State.READY}), State.UNRESPONSIVE),
    Transition.RECOVERED: (frozenset({State.UNRESPONSIVE}), State.READY),
    Transition.SUSPENDED: (frozenset({State.READY, State.UNRESPONSIVE}), State.ASLEEP),
    Transition.WOKEN: (frozenset({State.ASLEEP}), State.READY),
    Transition.STOP_REQUESTED: (LIVE, State.STOPPING),
    Transition.ENDED: (LIVE, State.STOPPING),
    Transition.GONE: (frozenset({State.STOPPING}), State.STOPPED),
    Transition.LOST: (frozenset({State.STARTING, State.STOPPING}), State.FAILED),
    Transition.CANCELED: (frozenset({State.FAILED}), State.STOPPED),
}


def next_state(transition: Transition, state: State) -> State:
    """The state after a transition. Raises ValueError if it is not allowed, which would be a bug in the keeper."""
    allowed, target = TRANSITIONS[transition]
    if state not in allowed:
        raise ValueError(f"{transition!r} can't happen to a server that is {state}")
    return target


def exit_of(status: int, requested: bool, killed: bool, at: float, overdue: str = "") -> Exit:
    """The exit that a wait status describes, at ``at`` (Unix seconds).

    ``killed``: the stop sequence reached SIGKILL. ``overdue``: why the keeper killed it without a stop, as a clause.
    """
    code = os.waitstatus_to_exitcode(status)
    how = f"exit code {code}" if code >= 0 else signal_name(-code)
    if requested:
        reason = f"stopped as requested, {how}" + ("; it had to be killed" if killed else "")
    elif code >= 0:
        reason = f"exited with code {code}"
    else:
        reason = f"killed by signal {how}, " + (f"by its keeper: {overdue}" if overdue else "not by this console")
    return Exit(
        at=at,
        code=code if code >= 0 else None,
        signal=signal_name(-code).split(" ", 1)[0] if code < 0 else None,
        requested=requested,
        reason=reason,
    )


def exit_unknown(requested: bool, why: str, at: float) -> Exit:
    """The exit of a process whose parent, an earlier keeper, is gone."""
    begin = "stopped as requested" if requested else "ended"
    return Exit(at=at, code=None, signal=None, requested=requested, reason=f"{begin}, exit code unknown: {why}")


# -- events that the keeper's helper threads post ---------------------------------------------------------------------


Reply = Callable[[Mapping[str, Any]], None]


class HealthChecked(Value):
    """What ``/health`` of the process with start number ``epoch`` answered; ``detail`` says what went wrong."""

    epoch: int
    healthy: bool
    detail: str = ""
    foreign: bool = False
    """Whether it was not sent because a foreign process listens on the port."""


class WarmedUp(Value):
    """The end of the warm-up of the process with start number ``epoch``; ``golden``: its golden answers."""

    epoch: int
    report: WarmUpReport
    golden: tuple[GoldenAnswer, ...] = ()


class SleepProgress(Value):
    """Progress of sleep or wake-up of the process with start number ``epoch``; fields as in `Sleep`."""

    epoch: int
    step: SleepStep
    message: str = ""
    checked: int = 0
    differing: tuple[str, ...] = ()


class NodeStep(StrEnum):
    """What the link to the other nodes reports."""

    WAITING = "waiting"
    """Not all others have joined yet; the message names the missing ones, or says why one was refused."""
    JOINED = "joined"
    """All have joined and match: each starts its process."""
    MISSING = "missing"
    """Some did not join in time, or the link can't be made."""
    DIFFERS = "differs"
    """Node 0 refuses this node; the message says why."""
    READY = "ready"
    """Node 0 has completed a request, which involved all nodes."""
    ENDED = "ended"
    """Another node is gone or was stopped."""


class NodeNews(Value):
    """News about the other nodes, for the process with start number ``epoch``; ``message`` is a clause for users.

    ``requested``: a person stopped the other node.
    """

    epoch: int
    step: NodeStep
    message: str = ""
    requested: bool = False


class PreparedStep(Value):
    """A message from prepared process number ``epoch``; None: it has closed its end of the socket."""

    epoch: int
    message: Mapping[str, Any] | None


class LaunchRequested(Value):
    """A console launches what was prepared for it; ``lock``: the server folder's lock, or -1 if it never will."""

    request: Mapping[str, Any]
    lock: int


class ChildEnded(Value):
    """A child has ended (SIGCHLD); reap to see which."""


class AdoptedEnded(Value):
    """A server that is not this keeper's child has ended (reported by its pidfd)."""

    epoch: int


class LogLost(Value):
    """The log is not writable; ``lost``: bytes lost so far."""

    lost: int
    why: str

    @property
    def sentence(self) -> str:
        """The text for a note and for the record."""
        return f"log not writable ({self.why}); {self.lost} bytes lost so far"


class LogRecovered(Value):
    """The log is writable again; ``lost``: bytes that were lost."""

    lost: int

    @property
    def sentence(self) -> str:
        """The text for a note and for the record."""
        return f"log writable again; {self.lost} bytes were lost"


class ConsoleRequest(Value):
    """A console's request, verified to come from this user; ``reply`` must be called once.

    ``abandoned`` is set once the client is gone; a request still in the queue is then not executed.
    """

    request: Mapping[str, Any]
    reply: Reply
    abandoned: threading.Event


class Released(Value):
    """The keeper itself got SIGTERM, for example at a shutdown: the server keeps running."""


class HelperFailed(Value):
    """A helper thread had an unexpected error; it continues."""

    who: str
    what: str


Event = (
    HealthChecked
    | WarmedUp
    | SleepProgress
    | NodeNews
    | PreparedStep
    | LaunchRequested
    | ChildEnded
    | AdoptedEnded
    | LogLost
    | LogRecovered
    | ConsoleRequest
    | Released
    | HelperFailed
)
Post = Callable[[Event], None]

"""How a server is stopped: rung by rung, each with its patience. Pure: the clock is handed in.

As measured on vLLM 0.32:

- While it *starts*, SIGTERM once its engine process exists may never end it; SIGINT ends it in 4 to 11 s,
  and where the first one does not (workers still importing), a second one does.
- When it *serves*, SIGTERM ends it in 0.3 to 2.5 s, or after the drain time it was given.
- With a hung engine and an open connection SIGTERM never ends it.
- Engine processes that lost their API server end in 3 to 4 s after SIGTERM, and leave shared memory behind after
  SIGKILL: they are asked first.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait on each rung before the next."""

    interrupt: float = 8.0
    """After each of two SIGINTs to a server that starts."""
    terminate: float = 10.0
    """After SIGTERM to a server that serves, on top of its drain time."""
    rest: float = 5.0
    """After SIGTERM to everything that is left."""
    kill: float = 10.0
    """After SIGKILL, before it is said that something does not end."""


@dataclass(frozen=True, slots=True)
class Rung:
    """One step: the signal, whether all of the server's processes get it or only the server itself, how long it has."""

    number: signal.Signals
    everybody: bool
    patience: float


class Ladder:
    """Where a stop stands. Ask `rung` what is in force now; `server_ended` skips to what is for everybody."""

    def __init__(self, rungs: tuple[Rung, ...], now: float) -> None:
        self._rungs = rungs
        self._at = 0
        self._since = now

    @classmethod
    def starting(cls, now: float, patience: Patience) -> Ladder:
        """For a server that was never ready."""
        first = Rung(signal.SIGINT, everybody=False, patience=patience.interrupt)
        return cls((first, first, *_rest(patience)), now)

    @classmethod
    def serving(cls, now: float, patience: Patience, drain_seconds: float) -> Ladder:
        """For a server that was ready."""
        first = Rung(signal.SIGTERM, everybody=False, patience=patience.terminate + drain_seconds)
        return cls((first, *_rest(patience)), now)

    @classmethod
    def left_over(cls, now: float, patience: Patience) -> Ladder:
        """For what a server left behind when it ended."""
        return cls(_rest(patience), now)

    def rung(self, now: float) -> Rung:
        """The rung in force; climbs when the patience of one is used up. The last one stays."""
        while self._at + 1 < len(self._rungs) and now - self._since >= self._rungs[self._at].patience:
            self._climb(now)
        return self._rungs[self._at]

    def server_ended(self, now: float) -> None:
        """The server itself is gone: what is left of it is asked at once."""
        while not self._rungs[self._at].everybody:
            self._climb(now)

    @property
    def step(self) -> int:
        """The number of the rung in force, counted from 0."""
        return self._at

    @property
    def killing(self) -> bool:
        """Whether it has come to SIGKILL."""
        return self._rungs[self._at].number is signal.SIGKILL

    def stuck(self, now: float) -> bool:
        """Whether even SIGKILL had its time."""
        return self.killing and now - self._since >= self._rungs[self._at].patience

    def _climb(self, now: float) -> None:
        self._at += 1
        self._since = now


def _rest(patience: Patience) -> tuple[Rung, ...]:
    return (
        Rung(signal.SIGTERM, everybody=True, patience=patience.rest),
        Rung(signal.SIGKILL, everybody=True, patience=patience.kill),
    )

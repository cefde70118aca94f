"""Actions of a soak with times and results, kept in memory for checks and in a file for reading."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from soak.schedule import Action

RUN, STOP, REMOVE = "running", "stopped", "absent"
"""Possible outcomes for a server."""
DONE, REFUSED, UNSURE = "done", "refused", "unsure"


@dataclass(frozen=True)
class Order:
    """A request: ``wanted`` are its possible results; times are Unix seconds."""

    server: str
    wanted: frozenset[str]
    began: float
    ended: float
    outcome: str


@dataclass(frozen=True)
class Injury:
    """A killed part of a server, and when it was killed."""

    server: str
    part: str
    at: float


@dataclass
class Journal:
    """Thread-safe."""

    path: Path
    orders: list[Order] = field(default_factory=list)
    injuries: list[Injury] = field(default_factory=list)
    killed: set[int] = field(default_factory=set)
    """Process ids that were sent SIGKILL: what such a process was writing may be left."""
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    """Violations; a soak passes when there are none."""
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Write a line to the file."""
        with self._mutex, self.path.open("a") as file:
            file.write(f"{time.monotonic() - self._began:8.2f} {text}\n")

    def acted(self, action: Action, outcome: str) -> None:
        with self._mutex:
            self.counts[action.kind] += 1
        self.say(f"{action} → {outcome}")

    def happened(self, what: str) -> None:
        """Record an event that must occur for the soak to be meaningful."""
        with self._mutex:
            self.counts[f"({what})"] += 1

    def blame(self, text: str) -> None:
        """Record a violation, once."""
        with self._mutex:
            known = text in self.wrong
            if not known:
                self.wrong.append(text)
        if not known:
            self.say(f"WRONG {text}")

    def order(self, order: Order) -> None:
        with self._mutex:
            self.orders.append(order)

    def injure(self, server: str, part: str) -> None:
        """Record an injury just before the signal."""
        with self._mutex:
            self.injuries.append(Injury(server, part, time.time()))

    def kill(self, pid: int) -> None:
        """Record a process just before it is killed."""
        with self._mutex:
            self.killed.add(pid)

    def injured(self, server: str, since: float, until: float, *parts: str) -> bool:
        """Whether one of these parts (any part, if none is given) was killed in that time."""
        return any(
            one.server == server and since - 1.0 <= one.at <= until and (not parts or one.part in parts)
            for one in self.injuries
        )

    def expected(self, server: str) -> frozenset[str]:
        """Possible states of a server according to its orders, except those followed by a later one that was completed.

        Initially, the server does not exist.
        """
        orders = [one for one in self.orders if one.server == server and one.outcome != REFUSED]
        done = [one for one in orders if one.outcome == DONE]
        last = [one for one in orders if not any(later.began > one.ended for later in done)]
        return frozenset().union(*(one.wanted for one in last), () if done else (REMOVE,))

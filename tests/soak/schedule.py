"""The schedule of a soak, derived only from its seed: actions, servers, order and delays.

Actions are dealt like cards: each round has every kind as often as `DECK` says, shuffled. So every kind occurs early,
and the order depends only on the seed, not on the speed of the machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

SERVERS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot", "golf", "hotel")
"""The first half have vLLM's process tree; the others are only the simulated engine."""
TREES = SERVERS[: len(SERVERS) // 2]
PRESETS = ("chatbot", "code-generation", "batch")
SEQUENCES = (16, 32, 64, 128, 256)

DECK = {
    # user actions
    "start": 2, "stop": 3, "restart": 6, "previous": 1, "switch": 2, "renew": 2, "at once": 3,
    # faults
    "kill keeper": 3, "kill api": 2, "kill engine": 1, "kill worker": 1, "kill recorder": 1, "kill two": 2,
    "end keeper": 1, "freeze server": 1, "freeze keeper": 1,
    # consoles, and how they exit
    "console quit": 1, "console killed": 1, "console hung up": 1, "console closed": 1, "console ended": 1,
    "console read-only": 1, "console acting": 1, "look": 8,
    # server activity
    "load": 4, "flood": 4,
}  # fmt: skip
"""Actions of each kind per round."""
LOOKS = ("list", "status", "runs", "check", "doctor", "leftovers", "logs", "host")
TWICE = (("restart", "restart"), ("restart", "stop"), ("stop", "stop"), ("stop", "remove"), ("start", "start"),
         ("restart", "switch"))  # fmt: skip
PAIRS = (("keeper", "api"), ("api", "keeper"), ("keeper", "engine"), ("engine", "keeper"), ("keeper", "recorder"))
LOOKING_KEYS = ("j", "k", "d", "\x1b", "l", "\x1b", "i", "\x1b", "c", "\x1b", "G", "\x1b", "?", "\x1b", "1", "3", "4",
                "5", "6", "\t", "+", "-", " ", " ", "[", "]", "p", "\x7f", "/", "\x1b", "\x1b[B", "\x1b[A")  # fmt: skip
"""Keys that change no server; staged changes are discarded with the console."""
ALL_KEYS = (*LOOKING_KEYS, "r", "s", "x", "X", "w", "b", "n", "y", "\r", "e", "f", "t", "z", "C", "\x13", "v", "P")


@dataclass(frozen=True)
class Action:
    """One card: ``pause`` is its delay after the previous one in seconds, ``chance`` a seed for its details."""

    number: int
    kind: str
    server: str
    pause: float
    chance: int
    words: tuple[str, ...] = ()
    """Arguments of the action: flags, a preset, parts of a server, keys."""

    def __str__(self) -> str:
        return " ".join([f"{self.number:>4} {self.kind} {self.server}", *map(repr, self.words)])


def schedule(seed: int, pace: float = 1.0) -> Iterator[Action]:
    """An endless sequence of actions for a seed; ``pace`` is the mean pause in seconds."""
    chance = random.Random(f"soak {seed}")
    number = 0
    while True:
        cards = [kind for kind, count in DECK.items() for _ in range(count)]
        chance.shuffle(cards)
        for kind in cards:
            number += 1
            own = chance.randrange(1 << 32)
            pause = round(chance.uniform(0.4, 1.6) * pace, 2)
            yield Action(number, kind, chance.choice(SERVERS), pause, own, _words(kind, random.Random(own)))


def _words(kind: str, chance: random.Random) -> tuple[str, ...]:  # noqa: C901 (one branch per action)
    match kind:
        case "restart":
            return ("max-num-seqs", str(chance.choice(SEQUENCES)))
        case "switch":
            return (chance.choice(PRESETS),)
        case "at once":
            return chance.choice(TWICE)
        case "kill two":
            return chance.choice(PAIRS)
        case "freeze server" | "freeze keeper":
            return (f"{chance.uniform(1.0, 8.0):.1f}",)
        case "look":
            return (chance.choice(LOOKS),)
        case "load":
            return (str(chance.choice((2, 4, 8))), str(chance.choice((2, 4, 6))))
        case "console acting":
            return (chance.choice(("[r", "]r", "r", "s")),)
        case "console read-only":
            return tuple(chance.choices(ALL_KEYS, k=30))
    if kind.startswith("console"):
        return tuple(chance.choices(LOOKING_KEYS, k=12))
    return ()

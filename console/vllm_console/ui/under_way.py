"""Which verb is under way on which server: from the key that asked for it until a look shows what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_console.fleet.model import ServerView, State


class Verb(StrEnum):
    """What is being done to a server, in words."""

    RESTART = "restarted"
    STOP = "stopped"
    SWITCH = "switched to another preset"
    FORGET = "forgotten"


@dataclass(slots=True)
class _Held:
    verb: Verb
    before: tuple[int, State, float]
    answered: bool = False


class UnderWay:
    """Servers by name that a verb of this console is under way on. A second one would take away what the first set."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def begin(self, server: ServerView, verb: Verb) -> None:
        """A verb was asked for, of the server as it was shown."""
        self._held[server.name] = _Held(verb, _standing(server))

    def answered(self, name: str) -> None:
        """The verb was taken; it is under way until a look shows that."""
        if name in self._held:
            self._held[name].answered = True

    def drop(self, name: str) -> None:
        """It was refused, or its server is another one now."""
        self._held.pop(name, None)

    def on(self, server: ServerView, *, to_stop: bool = False) -> Verb | None:
        """What is under way on a server. ``to_stop``: a restart that has it stop already may be made a mere stop."""
        held = self._held.get(server.name)
        if held is None or (to_stop and _stopping_to_start(held, server)):
            return None
        return held.verb

    def seen(self, servers: Sequence[ServerView]) -> None:
        """Let go of what a look shows: a newer generation, another state, or no server of that name any more."""
        present = {server.name: server for server in servers}
        for name, held in list(self._held.items()):
            server = present.get(name)
            if not held.answered or (server is not None and _stopping_to_start(held, server)):
                continue
            if server is None or _standing(server) != held.before:
                self.drop(name)


def _standing(server: ServerView) -> tuple[int, State, float]:
    return server.generation, server.state, server.state_since


def _stopping_to_start(held: _Held, server: ServerView) -> bool:
    """Whether the old generation is still being stopped, for the new one to start."""
    starts = held.verb in (Verb.RESTART, Verb.SWITCH)
    return starts and held.answered and server.state is State.STOPPING and server.generation == held.before[0]

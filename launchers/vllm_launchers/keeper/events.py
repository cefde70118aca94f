"""What the keeper's helpers tell it. They only post; the one owner of the server's state acts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Reply = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Probed:
    """The prober asked ``/health`` of the process started as number ``epoch``; ``detail`` says what went wrong."""

    epoch: int
    healthy: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """Some child has ended (SIGCHLD); reap to see which."""


@dataclass(frozen=True, slots=True)
class AdoptedEnded:
    """A server that is not this keeper's child has ended (its pidfd said so)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LogLost:
    """The log cannot be written: bytes lost so far, and why."""

    lost: int
    why: str


@dataclass(frozen=True, slots=True)
class LogMended:
    """The log can be written again: bytes that were lost."""

    lost: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A console's request, already checked to come from this user; ``reply`` is to be called once."""

    request: Mapping[str, Any]
    reply: Reply


@dataclass(frozen=True, slots=True)
class LetGo:
    """The keeper itself is asked to end (SIGTERM, as at a shutdown): the server stays."""


@dataclass(frozen=True, slots=True)
class HelperFailed:
    """A helper thread met an error it did not expect; it goes on."""

    who: str
    what: str


Event = Probed | ChildEnded | AdoptedEnded | LogLost | LogMended | Asked | LetGo | HelperFailed
Post = Callable[[Event], None]

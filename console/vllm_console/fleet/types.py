"""Types that actions of the fleet take, return or raise. Actions block: screens call them in a worker thread."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from vllm_launchers.errors import OperationError
from vllm_launchers.vllm.flags.changes import Changes, Flags, same_value

DRAIN_SECONDS = 60.0
"""How long requests may take to end before a server goes to sleep."""

HOSTS = "hosts.json"
"""The file that lists the attached machines."""

Say = Callable[[str], None]
"""Receives each step of a slow action, as a sentence."""


def silently(_: str) -> None:
    """Say nothing."""


class NothingToCompareError(OperationError):
    """A run has no earlier one to compare with."""


class PresetProblem(msgspec.Struct, frozen=True):
    """A preset file that could not be used: its path, and one sentence on what is wrong and what was expected."""

    path: str
    message: str


class Replay(msgspec.Struct, frozen=True):
    """An ended run that can be replayed: its number, ``NAME@GENERATION``, and when it ran (Unix seconds).

    ``at`` is the moment to begin with. ``removed`` is whether its server was removed.
    """

    run: int
    name: str
    started_at: float
    ended_at: float
    at: float
    removed: bool = False


def flag_difference(before: Flags, after: Flags) -> Changes:
    """The flag change from ``before`` to ``after``."""
    changed = {name: value for name, value in after.items() if not same_value(before.get(name), value)}
    return Changes(set=changed, unset=tuple(sorted(before.keys() - after.keys())))

"""What a retired flag, value or variable is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from vllm_launchers.plan.model import Changes, Flags

Release = tuple[int, int, int]
"""Major, minor and patch number."""

NEVER: Release = (0, 0, 0)
"""As ``since``: no release from 0.8.5 on knows it."""


class Fate(StrEnum):
    """What a vLLM does with something that it no longer knows."""

    REFUSED = "refused"
    """It ends at once."""
    IGNORED = "ignored"
    """It goes on as if it had not been said, without a word."""
    WARNED = "warned"
    """It goes on as if it had not been said, with a warning in the log."""


@dataclass(frozen=True, slots=True)
class RetiredFlag:
    """A flag that guides still name. ``since`` is the first release that refuses it, as far as minor releases tell.

    ``ignored_since`` is the first release that takes it and does nothing with it, where that came before.
    ``instead`` is the way out, one clause in words. ``carry`` makes the change to the new spelling from all flags that
    are set, or None where their meaning does not carry over.
    """

    name: str
    since: Release
    instead: str
    carry: Callable[[Flags], Changes | None]
    ignored_since: Release | None = None

    def fate(self, release: Release) -> Fate | None:
        """What a release does with it; None where it still works."""
        if release >= self.since:
            return Fate.REFUSED
        return Fate.IGNORED if self.ignored_since is not None and release >= self.ignored_since else None


@dataclass(frozen=True, slots=True)
class RetiredVariable:
    """An environment variable that vLLM reads no more. ``since`` is the first release that does not."""

    name: str
    since: Release
    instead: str
    carry: Callable[[str, Flags], Changes | None] | None = None
    """Makes a change of flags with the same meaning out of its value and the flags that are set."""

    def fate(self, release: Release) -> Fate | None:
        """What a release does with it; None where it still works."""
        return unread_fate(release) if release >= self.since else None


@dataclass(frozen=True, slots=True)
class RetiredValue:
    """A value that a flag does not take any more."""

    flag: str
    value: str
    since: Release
    instead: str
    new_value: str | None = None
    """The same under its present name."""


_WARNS_SINCE: Release = (0, 17, 0)


def unread_fate(release: Release) -> Fate:
    """What a release does with a ``VLLM_*`` variable that it does not read: since 0.17 it says so in its log."""
    return Fate.WARNED if release >= _WARNS_SINCE else Fate.IGNORED

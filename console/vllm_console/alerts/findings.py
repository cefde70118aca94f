"""What is the matter with all servers, told once when it begins and once when it ends. Pure: time is what looks say.

A condition that goes and comes back within `ENDS_AFTER_SECONDS`, or over a restart, is the same one: nothing is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_console.diagnosis.document import condition_document
from vllm_console.diagnosis.model import Condition, Severity
from vllm_console.diagnosis.titles import title_of_code
from vllm_console.fleet.model import ServerView, State

ENDS_AFTER_SECONDS = 60.0
"""A condition must be gone for so long, on a server that can be judged, before it is over."""

JUDGED_AFTER_SECONDS = 60.0
"""A server that became ready is not judged for its first minute: that nothing holds says nothing yet."""

UNRESPONSIVE_AFTER_SECONDS = 15.0
"""A server that does not answer for less is only busy."""

FAILED, UNRESPONSIVE = "failed", "unresponsive"
"""Codes of findings about a server's state, beside those of conditions."""

_LIFE = (FAILED, UNRESPONSIVE)
_ORDER = (Severity.CRITICAL, Severity.WARNING, Severity.NOTE, Severity.GOOD)


class Event(StrEnum):
    """What is told of a finding."""

    BEGAN = "began"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Finding:
    """A condition of one server. ``last_at`` is when it was seen last (Unix seconds)."""

    server: str
    preset: str
    condition: Condition
    last_at: float

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same finding at the next look."""
        return self.server, self.condition.code


@dataclass(frozen=True, slots=True)
class Told:
    """A finding that began or ended, at ``at`` (Unix seconds): when it began to hold, or was seen last."""

    event: Event
    finding: Finding
    at: float

    @property
    def sentence(self) -> str:
        """For people, in one line: the server, the finding, and what is seen of it."""
        condition = self.finding.condition
        title = f"{self.finding.server}: {title_of_code(condition.code)}"
        return f"{title}: {condition.symptom}" if self.event is Event.BEGAN else f"{title}: over"


def document(told: Told) -> dict[str, Any]:
    """As the log and the webhook have it (a contract)."""
    finding = told.finding
    return {
        "event": str(told.event),
        "at": told.at,
        "server": finding.server,
        "preset": finding.preset or None,
        **condition_document(finding.condition),
    }


def at_least(condition: Condition, least: Severity) -> bool:
    """Whether a condition is as bad as ``least`` or worse."""
    return _ORDER.index(condition.severity) <= _ORDER.index(least)


class Book:
    """The findings that are open. ``known`` were told before, by whoever looked then: they are not told again."""

    def __init__(self, known: Mapping[tuple[str, str], Finding] | None = None) -> None:
        self._open: dict[tuple[str, str], Finding] = dict(known or {})
        self._gone_since: dict[tuple[str, str], float] = {}

    @property
    def open(self) -> tuple[Finding, ...]:
        """All that hold, as far as is known."""
        return tuple(self._open.values())

    def look(self, servers: Iterable[ServerView], now: float) -> tuple[Told, ...]:
        """What began and what ended since the last look, ends first."""
        ours = {server.name: server for server in servers if server.ours}
        found = {
            (server.name, condition.code): Finding(server.name, server.preset, condition, now)
            for server in ours.values()
            for condition in _conditions(server, now)
        }
        began = [Told(Event.BEGAN, one, one.condition.since) for key, one in found.items() if key not in self._open]
        self._open.update(found)
        ended = []
        for key, finding in list(self._open.items()):
            if key in found or not self._over(key, ours.get(finding.server), now):
                continue
            del self._open[key]
            ended.append(Told(Event.ENDED, finding, finding.last_at))
        self._gone_since = {key: at for key, at in self._gone_since.items() if key in self._open and key not in found}
        return (*ended, *began)

    def _over(self, key: tuple[str, str], server: ServerView | None, now: float) -> bool:
        if server is None or server.state is State.STOPPED:
            return True
        if key[1] in _LIFE:
            return server.state is State.READY
        if server.state is not State.READY:
            # A server that failed has that to tell; one that starts or does not answer says nothing of the rest.
            return server.state is State.FAILED and server.next_attempt_at is None
        if now - server.state_since < JUDGED_AFTER_SECONDS:
            return False
        return now - self._gone_since.setdefault(key, now) >= ENDS_AFTER_SECONDS


def _conditions(server: ServerView, now: float) -> list[Condition]:
    """What holds of a server, its state included; that all is well is no finding."""
    held = [one for one in server.conditions if one.severity is not Severity.GOOD]
    if server.state is State.FAILED:
        cause = server.diagnosis.explanation if server.diagnosis is not None else ""
        remedies = server.diagnosis.remedies if server.diagnosis is not None else ()
        symptom = server.reason or "It has failed."
        held.append(Condition(FAILED, Severity.CRITICAL, server.state_since, symptom, cause, remedies=remedies))
    quiet = now - server.state_since >= UNRESPONSIVE_AFTER_SECONDS
    if server.state is State.UNRESPONSIVE and quiet and not held:
        symptom = server.reason or "It does not answer."
        held.append(Condition(UNRESPONSIVE, Severity.CRITICAL, server.state_since, symptom, ""))
    return held


def replayed(documents: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Finding]:
    """The findings that are open after these documents, oldest first; what is none of ours is passed over."""
    left: dict[tuple[str, str], Finding] = {}
    for one in documents:
        finding = _finding(one)
        if finding is None:
            continue
        if one.get("event") == Event.BEGAN:
            left[finding.key] = finding
        elif one.get("event") == Event.ENDED:
            left.pop(finding.key, None)
    return left


def _finding(one: Mapping[str, Any]) -> Finding | None:
    texts = [one.get(key) for key in ("server", "code", "symptom", "cause")]
    since, at = one.get("since"), one.get("at")
    if not all(isinstance(text, str) for text in texts) or not isinstance(since, int | float):
        return None
    if not isinstance(at, int | float) or one.get("severity") not in tuple(Severity):
        return None
    server, code, symptom, cause = map(str, texts)
    condition = Condition(code, Severity(one["severity"]), float(since), symptom, cause)
    return Finding(server, str(one.get("preset") or ""), condition, float(at))


def gravest(told: Iterable[Told]) -> Told | None:
    """The one to name where there is room for one: what began before what ended, then the worst."""
    return min(
        told,
        key=lambda one: (one.event is Event.ENDED, _ORDER.index(one.finding.condition.severity)),
        default=None,
    )

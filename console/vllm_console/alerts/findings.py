"""Tracks the findings of all servers: reports each once when it begins and once when it ends.

Pure: times come from the snapshots. A finding that disappears and returns within `ENDS_AFTER_SECONDS`, or across a
restart, is the same one and is not reported again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_console.diagnosis.finding import OF_THE_NEXT_START, Finding, Severity, finding_document, title_of_code
from vllm_console.fleet.snapshot import ServerView
from vllm_launchers.keeper.records import State

ENDS_AFTER_SECONDS = 60.0
"""A finding ends after it has been gone for this long on a server with valid findings."""

JUDGED_AFTER_SECONDS = 60.0
"""Findings in a server's first minute of readiness are not evaluated: no findings means nothing yet."""

UNRESPONSIVE_AFTER_SECONDS = 15.0
"""A server that is unresponsive for less than this is just busy."""

FAILED, UNRESPONSIVE = "failed", "unresponsive"
"""Codes of findings about a server's state, in addition to those of the diagnosis."""

_LIFE = (FAILED, UNRESPONSIVE)
_ORDER = (Severity.CRITICAL, Severity.WARNING, Severity.NOTE, Severity.GOOD)


class Event(StrEnum):
    """The event that an alert reports about a finding."""

    BEGAN = "began"
    ENDED = "ended"


class OpenFinding(msgspec.Struct, frozen=True):
    """A finding of one server. ``last_at`` is when it was last seen (Unix seconds)."""

    server: str
    preset: str
    finding: Finding
    last_at: float

    @property
    def key(self) -> tuple[str, str]:
        """The identity of the finding across snapshots."""
        return self.server, self.finding.code


class Alert(msgspec.Struct, frozen=True):
    """A finding that began or ended. ``at`` (Unix seconds) is when it began, or when it was last seen."""

    event: Event
    finding: OpenFinding
    at: float

    @property
    def sentence(self) -> str:
        """One line of text: the server, the finding, and its figures."""
        finding = self.finding.finding
        title = f"{self.finding.server}: {title_of_code(finding.code)}"
        return f"{title}: {finding.symptom}" if self.event is Event.BEGAN else f"{title}: ended"


def document(alert: Alert) -> dict[str, Any]:
    """The JSON of the log and the webhook (a contract)."""
    finding = alert.finding
    return {
        "event": str(alert.event),
        "at": alert.at,
        "server": finding.server,
        "preset": finding.preset or None,
        **finding_document(finding.finding),
    }


def at_least(finding: Finding, least: Severity) -> bool:
    """Whether a finding is at least as severe as ``least``."""
    return _ORDER.index(finding.severity) <= _ORDER.index(least)


class FindingTracker:
    """The open findings. ``known`` ones were already reported by an earlier process and are not reported again."""

    def __init__(self, known: Mapping[tuple[str, str], OpenFinding] | None = None) -> None:
        self._open: dict[tuple[str, str], OpenFinding] = dict(known or {})
        self._gone_since: dict[tuple[str, str], float] = {}

    def update(self, servers: Iterable[ServerView], now: float) -> tuple[Alert, ...]:
        """The findings that began and ended since the last snapshot, ends first."""
        ours = {server.name: server for server in servers if server.recorded}
        found = {
            (server.name, finding.code): OpenFinding(server.name, server.preset, finding, now)
            for server in ours.values()
            for finding in _findings(server, now)
        }
        began = [Alert(Event.BEGAN, one, one.finding.since) for key, one in found.items() if key not in self._open]
        self._open.update(found)
        ended = []
        for key, finding in list(self._open.items()):
            if key in found or not self._over(key, ours.get(finding.server), now):
                continue
            del self._open[key]
            ended.append(Alert(Event.ENDED, finding, finding.last_at))
        self._gone_since = {key: at for key, at in self._gone_since.items() if key in self._open and key not in found}
        return (*ended, *began)

    def _over(self, key: tuple[str, str], server: ServerView | None, now: float) -> bool:
        if server is None:  # removed, or its record was temporarily unreadable
            return now - self._gone_since.setdefault(key, now) >= ENDS_AFTER_SECONDS
        if server.state in (State.STOPPED, State.ASLEEP):
            return True
        if key[1] in _LIFE:
            return server.state is State.READY
        if server.state is not State.READY:
            # A failed server reports its failure; while one starts or does not answer, other findings are unknown.
            return server.state is State.FAILED and server.next_attempt_at is None
        if now - server.state_since < JUDGED_AFTER_SECONDS:
            return False
        return now - self._gone_since.setdefault(key, now) >= ENDS_AFTER_SECONDS


def _findings(server: ServerView, now: float) -> list[Finding]:
    """A server's findings, including its state; being healthy is not a finding."""
    found = [_with_load(server, one) for one in server.findings if one.code != OF_THE_NEXT_START]
    held = [one for one in found if one.severity is not Severity.GOOD]
    if server.state is State.FAILED:
        cause = server.diagnosis.explanation if server.diagnosis is not None else ""
        fixes = server.diagnosis.fixes if server.diagnosis is not None else ()
        symptom = server.reason or "Server failed."
        held.append(Finding(FAILED, Severity.CRITICAL, server.state_since, symptom, cause, fixes=fixes))
    quiet = now - server.state_since >= UNRESPONSIVE_AFTER_SECONDS
    if server.state is State.UNRESPONSIVE and quiet and not held:
        symptom = server.reason or "Server does not respond."
        held.append(Finding(UNRESPONSIVE, Severity.CRITICAL, server.state_since, symptom, ""))
    return held


def _with_load(server: ServerView, finding: Finding) -> Finding:
    """The finding, with a note on our own load at that time."""
    if (load := server.load_behind(finding.code)) is None:
        return finding
    return replace(finding, symptom=f"{finding.symptom} {load[0].capitalize()} (pid {load[1]}).")


def replayed(documents: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], OpenFinding]:
    """The findings still open after these documents (oldest first); invalid documents are skipped."""
    left: dict[tuple[str, str], OpenFinding] = {}
    for one in documents:
        finding = _finding(one)
        if finding is None:
            continue
        if one.get("event") == Event.BEGAN:
            left[finding.key] = finding
        elif one.get("event") == Event.ENDED:
            left.pop(finding.key, None)
    return left


def _finding(one: Mapping[str, Any]) -> OpenFinding | None:
    texts = [one.get(key) for key in ("server", "code", "symptom", "cause")]
    since, at = one.get("since"), one.get("at")
    if not all(isinstance(text, str) for text in texts) or not isinstance(since, int | float):
        return None
    if not isinstance(at, int | float) or one.get("severity") not in tuple(Severity):
        return None
    server, code, symptom, cause = map(str, texts)
    finding = Finding(code, Severity(one["severity"]), float(since), symptom, cause)
    return OpenFinding(server, str(one.get("preset") or ""), finding, float(at))


def gravest(alerts: Iterable[Alert]) -> Alert:
    """The alert to show if there is room for only one: beginnings before ends, then the most severe."""
    return min(alerts, key=lambda one: (one.event is Event.ENDED, _ORDER.index(one.finding.finding.severity)))

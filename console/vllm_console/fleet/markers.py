"""Events of a server as marks on the time axis of its charts.

Starts with the changed flags, stops, crashes, findings, load. Pure, except that `ServerMarkers` reads the run database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.text import plain, rate
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.secrets import redact
from vllm_launchers.vllm.flags.changes import FlagValue, change_text

if TYPE_CHECKING:
    from vllm_console.diagnosis.finding import Finding
    from vllm_console.load.spans import LoadSpan
    from vllm_console.runs.store import PastRun
    from vllm_launchers.keeper.records import Generation, ServerRecord

REFRESH_SECONDS = 15.0
"""Interval between two reads of the run database."""

SAME_SECONDS = 120.0
"""A stored finding that ended within this time is the open one, if it has the same name."""

STOP_SECONDS = 5.0
"""A requested stop and a start within this time are one restart."""


class MarkerKind(StrEnum):
    """The kind of event."""

    START = "start"
    STOP = "stop"
    CRASH = "crash"
    FINDING = "finding"
    FINDING_END = "finding end"
    LOAD = "load"


class Marker(msgspec.Struct, frozen=True):
    """One event: when (Unix seconds), its mark on an axis (``r3``: generation 3 started), and its description."""

    at: float
    kind: MarkerKind
    label: str
    text: str


def replay_markers(run: PastRun, generation: Generation, loads: Sequence[LoadSpan]) -> tuple[Marker, ...]:
    """All events of a run that has ended, oldest first."""
    end = generation.ended_at if generation.ended_at is not None else generation.started_at
    start = start_marker(run.started_at, run.generation, ", ".join(flag_change(*change) for change in run.changed))
    found = [
        *started_by_tuners((start,), loads),
        *_end(generation, None),
        *finding_markers((run,), (), run.started_at),
        *load_markers(loads),
    ]
    within = (marker for marker in found if run.started_at <= marker.at <= end)
    return tuple(sorted(within, key=lambda marker: marker.at))


def record_markers(record: ServerRecord) -> list[Marker]:
    """Starts, stops and crashes of the generations still in the record."""
    markers: list[Marker] = []
    before: Details | None = None
    for index, generation in enumerate(record.generations):
        details = unpack(generation.spec.details)
        first = index == 0 and generation.number > 1
        what = "" if first else _changed(before, details)
        markers.append(start_marker(generation.started_at, generation.number, what))
        following = record.generations[index + 1] if index + 1 < len(record.generations) else None
        markers += _end(generation, following)
        before = details
    return markers


def start_marker(at: float, generation: int, changed: str) -> Marker:
    """The start of a generation, with its changes."""
    text = "Started" if generation == 1 else f"Restarted: run {generation}"
    return Marker(at, MarkerKind.START, f"r{generation}", f"{text}: {changed}" if changed else text)


def _end(generation: Generation, following: Generation | None) -> Iterator[Marker]:
    end = generation.exit
    if end is None:
        return
    if not end.requested:
        yield Marker(end.at, MarkerKind.CRASH, "✗", f"Exited unexpectedly: {redact(plain(end.reason))}")
    elif following is None or following.started_at - end.at > STOP_SECONDS:
        yield Marker(end.at, MarkerKind.STOP, "s", "Stopped on request")


def _changed(before: Details | None, after: Details) -> str:
    """The changes of a restart: ``--max-num-seqs 256 → 128``; empty for a first start."""
    if before is None:
        return ""
    parts = [
        f"{name} {plain(one) or '–'} → {plain(other) or '–'}"
        for name, one, other in (("preset", before.preset, after.preset), ("model", before.model, after.model))
        if one != other
    ]
    names = sorted({*before.flags, *after.flags})
    parts += [
        flag_change(name, before.flags.get(name), after.flags.get(name))
        for name in names
        if before.flags.get(name) != after.flags.get(name)
    ]
    return ", ".join(parts) or "same flags"


def flag_change(name: str, before: FlagValue | None, after: FlagValue | None) -> str:
    """A changed flag, for display: ``--max-num-seqs 256 → 128``."""
    return redact(plain(f"--{change_text(name, before, after)}"))


def run_markers(runs: Iterable[PastRun], record: ServerRecord) -> list[Marker]:
    """Starts that are no longer in the record, from the run database."""
    known = record.generations[0]
    return [
        start_marker(run.started_at, run.generation, ", ".join(flag_change(*change) for change in run.changed))
        for run in runs
        if run.generation <= known.number
        and record.created_at - STOP_SECONDS <= run.started_at < known.started_at - STOP_SECONDS
    ]


def finding_markers(runs: Iterable[PastRun], holding: Sequence[Finding], created_at: float) -> list[Marker]:
    """When findings began and ended: those in the run database, and the open ones."""
    from vllm_console.diagnosis.finding import title_of_code

    now = {one.code: one for one in holding if one.severity != "good"}
    markers = [_began(one.since, title_of_code(code)) for code, one in now.items()]
    for code, since, until in (stretch for run in runs for stretch in run.findings):
        if since < created_at - STOP_SECONDS:
            continue  # belongs to an earlier server with this name
        holds = now.get(code)
        if holds is not None and until >= holds.since - SAME_SECONDS:
            continue
        title = title_of_code(code)
        markers += [_began(since, title), Marker(until, MarkerKind.FINDING_END, "✓", f"Finding ended: {title}")]
    return markers


def _began(at: float, title: str) -> Marker:
    return Marker(at, MarkerKind.FINDING, "!", f"Finding began: {title}")


def load_markers(spans: Iterable[LoadSpan]) -> list[Marker]:
    """Start and end of each load."""
    markers = []
    for span in spans:
        who = "Load" if span.tuner is None else "Tuner"
        what = f": {rate(span.rate, 'req')}" if span.rate is not None else ""
        markers.append(Marker(span.began_at, MarkerKind.LOAD, "b", f"{who} began{what}"))
        if span.ended_at is not None:
            markers.append(Marker(span.ended_at, MarkerKind.LOAD, "b", f"{who} ended"))
    return markers


def started_by_tuners(markers: Iterable[Marker], spans: Sequence[LoadSpan]) -> list[Marker]:
    """The markers, with restarts by a tuner labeled as such."""
    tuners = [(span.began_at, span.tuner) for span in spans if span.tuner is not None]

    def by_tuner(marker: Marker) -> bool:
        run = marker.label.removeprefix("r")
        return run.isdecimal() and any(at <= marker.at and tuner.started(int(run)) for at, tuner in tuners)

    found = []
    for marker in markers:
        tuned = marker.kind is MarkerKind.START and by_tuner(marker)
        text = marker.text.replace("Restarted", "Restarted by a tuner", 1) if tuned else marker.text
        found.append(replace(marker, text=text) if tuned else marker)
    return found


class ServerMarkers:
    """The markers of one server, recomputed only when its inputs change."""

    def __init__(self, runs_file: Path) -> None:
        self._runs_file = runs_file
        self._of_record: tuple[object, list[Marker]] = (None, [])
        self._runs: tuple[float, Sequence[PastRun]] = (float("-inf"), ())
        self._made: tuple[object, tuple[Marker, ...]] = (None, ())
        """The markers, and their inputs."""

    def markers(
        self, record: ServerRecord, holding: Sequence[Finding], loads: Sequence[LoadSpan], now: float
    ) -> tuple[Marker, ...]:
        """All markers, oldest first."""
        if self._of_record[0] is not record.generations:
            self._of_record = (record.generations, record_markers(record))
        if not 0 <= now - self._runs[0] < REFRESH_SECONDS:  # negative if the clock was set back
            self._runs = (now, self._read(record.name))
        holds = tuple((one.code, one.since) for one in holding if one.severity != "good")
        made_of = (self._of_record[1], self._runs[1], holds, tuple(loads))
        if self._made[0] != made_of:
            self._made = (made_of, self._make(record, holding, loads))
        return self._made[1]

    def _make(self, record: ServerRecord, holding: Sequence[Finding], loads: Sequence[LoadSpan]) -> tuple[Marker, ...]:
        runs = self._runs[1]
        starts = (*self._of_record[1], *run_markers(runs, record))
        found = [
            *started_by_tuners(starts, loads),
            *finding_markers(runs, holding, record.created_at),
            *load_markers(loads),
        ]
        return tuple(sorted(found, key=lambda marker: marker.at))

    def _read(self, name: str) -> Sequence[PastRun]:
        from vllm_console.runs.store import RunStore, RunStoreError

        try:
            return RunStore(self._runs_file, read_only=True).past(name)
        except RunStoreError:
            return ()  # the fleet reports the problem when it records a run

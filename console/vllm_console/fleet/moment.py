"""A server at an earlier moment: the metrics of the preceding minute, and the findings of that time.

One-second rows reach back half an hour, ten-second rows a day, one-minute rows a month. Findings need ten-second rows:
for earlier moments, no findings does not mean that there were none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Fix
from vllm_console.diagnosis.live.engine import EngineHung
from vllm_console.diagnosis.objectives import Judged, agreed, judge_window
from vllm_console.fleet.judge import Judge
from vllm_console.fleet.probe import exact_window
from vllm_console.fleet.snapshot import StateThen
from vllm_console.history.store import MOST_ROWS, TIERS, HistoryReader
from vllm_console.history.timeline import Timeline
from vllm_console.metrics.sample import Window
from vllm_console.metrics.window import traffic
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.plan.flags import BLOCKS, BYTES
from vllm_launchers.presets.model import Objectives
from vllm_launchers.values import replace as replaced

if TYPE_CHECKING:
    from vllm_console.fleet.watched_server import JudgeContext

WINDOW_SECONDS = 60.0
JUDGED_SECONDS = 1800.0
"""How much history before a moment its findings are based on."""

_FINE, _TENS = TIERS[0].step, TIERS[1].step


class Moment(msgspec.Struct, frozen=True):
    """A server at moment ``at``; ``window`` is the minute before it (Unix seconds), None if nothing was recorded.

    ``preset`` and ``objectives`` are those of the run that served then; ``preset`` is None if no run did.
    """

    at: float
    window: Window | None = None
    findings: tuple[Finding, ...] = ()
    judged: tuple[Judged, ...] = ()
    no_findings: str = ""
    """A clause explaining why findings are unknown; empty if they are known."""
    preset: str | None = None
    objectives: Objectives | None = None


def read_moment(
    history: HistoryReader, record: ServerRecord, at: float, context: JudgeContext, probe: Path | None = None
) -> Moment:
    """The server at that moment. ``context`` has no past data: no GPUs, no test requests.

    ``probe`` is the folder in which its probe may have recorded.

    Raises:
        HistoryError: the history cannot be read.
    """
    window, timeline = _window(history, at)
    if window is not None and probe is not None:
        window = exact_window(probe, window, timeline.recent)
    index = _generation(record, at)
    if window is None or index is None:
        why = "nothing was recorded then" if window is None else "it was not ready then"
        return Moment(at, window, no_findings=why)
    details = unpack(record.generations[index].spec.details)
    current = index == len(record.generations) - 1
    findings = _findings(history, at_work(record, index), at, context, window, probe)
    judged: tuple[Judged, ...] = ()
    samples = timeline.recent
    if traffic(samples) and len(traffic(samples)) == len(samples):
        judged = judge_window(window, samples, details.objectives, details.preset)
    found = tuple(replace(one, fixes=_fixes_still(one, details) if current else ()) for one in agreed(findings, judged))
    unknown = _no_findings(history, at, judged)
    return Moment(at, window, found, judged, unknown, details.preset, details.objectives)


def _no_findings(history: HistoryReader, at: float, judged: tuple[Judged, ...]) -> str:
    """Why the findings of a moment are unknown; empty if they are known."""
    if all(part.tier.step > _TENS for part in history.stretches(at - WINDOW_SECONDS, at, 2 * _TENS)):
        return "only one-minute samples are left, too coarse for findings"
    return "" if any(one.ok is not None for one in judged) else "too little traffic at that time"


def _fixes_still(finding: Finding, details: Details) -> tuple[Fix, ...]:
    """The fixes, without those that take more GPU memory: who held the rest at that time is unknown."""
    return tuple(fix for fix in finding.fixes if not (details.gpus and {BLOCKS, BYTES}.intersection(fix.changes.unset)))


def at_work(record: ServerRecord, index: int) -> ServerRecord:
    """The record as it was while the given generation was ready."""
    generation = record.generations[index]
    return replaced(
        record,
        generations=record.generations[: index + 1],
        state=State.READY,
        state_since=generation.ready_at or generation.started_at,
    )


def _window(history: HistoryReader, at: float) -> tuple[Window | None, Timeline]:
    """The preceding minute; a row of a coarse table covers its whole interval."""
    timeline = Timeline(5.0, 1, window_seconds=WINDOW_SECONDS)
    coarsest = newest_row = TIERS[-1].step
    for part in history.stretches(at - WINDOW_SECONDS - 2 * coarsest, at, _FINE):
        for entry in history.read(part, MOST_ROWS):
            if entry.at > at - WINDOW_SECONDS - 2 * part.tier.step:
                timeline.append(entry.sample, entry.generation)
                newest_row = part.tier.step
    latest = timeline.latest
    if latest is None or at - latest.at > max(15.0, 1.5 * newest_row):
        return None, timeline
    return timeline.window(), timeline


def state_at(record: ServerRecord, at: float) -> StateThen:
    """The state at a moment, from the times of the generations still in the record."""
    if at < record.created_at:
        return StateThen(before=True)
    for generation in reversed(record.generations):
        if generation.started_at > at:
            continue
        number, ended, ready = generation.number, generation.ended_at, generation.ready_at
        if ended is not None and ended < at:
            crashed = generation.exit is not None and not generation.exit.requested
            return StateThen(State.FAILED if crashed else State.STOPPED, ended, number)
        if ready is not None and ready <= at:
            return StateThen(State.READY, ready, number)
        return StateThen(State.STARTING, generation.started_at, number)
    return StateThen()


def _generation(record: ServerRecord, at: float) -> int | None:
    """The index of the generation that served then; None if the record has none."""
    for index, generation in reversed(list(enumerate(record.generations))):
        if (generation.ready_at or generation.started_at) <= at:
            return index if generation.ended_at is None or at <= generation.ended_at else None
    return None


def _findings(
    history: HistoryReader,
    then: ServerRecord,
    at: float,
    context: JudgeContext,
    minute: Window,
    probe: Path | None,
) -> tuple[Finding, ...]:
    """The findings of that time, from rows of ten seconds or less."""
    judge = Judge(then.name, probe=probe)
    for part in history.stretches(at - JUDGED_SECONDS, at, 2 * _TENS):
        if part.tier.step <= _TENS:
            for entry in history.read(part, MOST_ROWS):
                judge.append(entry.sample, entry.generation)
    found = judge.findings(then, unpack(then.current.spec.details), context, at, minute=minute)
    return tuple(one for one in found if one.code != EngineHung.code)

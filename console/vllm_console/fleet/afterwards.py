"""Conditions of the minutes in which no console was open, judged from the stored history when somebody next looks.

What history does not hold is not judged: GPUs, and whether a silent engine would have answered a request. Rows by ten
seconds reach back a day; what is older cannot be judged any more. They hold the longest queue of their step and not the
shortest, so that a queue that grows cannot be told from bursts that are worked off at once: of queues nothing is said
but for the last half hour, which is there by the second. What came of an earlier one is found by the TTFT.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vllm_console.diagnosis.conditions.engine import EngineHung
from vllm_console.fleet.details import unpack
from vllm_console.fleet.judging import HISTORY_SECONDS, Judge
from vllm_console.fleet.watched import HISTORY, Around
from vllm_console.telemetry.history import TIERS, Entry, HistoryMissingError, Reader
from vllm_launchers.keeper.records import ServerRecord, State

LOOK_SECONDS = 60.0
"""Between two judgements, as in a console."""

DAY_SECONDS = TIERS[1].step * TIERS[1].rows - 600.0
FINE_SECONDS = TIERS[0].step * TIERS[0].rows - 60.0
"""How far back rows by the second surely reach."""

_CHUNK_SECONDS = 3600.0
_POINTS = 600
"""Rows at most for a chunk: more than it has by ten seconds, and too few for those by the second."""

Stretches = dict[str, list[tuple[float, float]]]


def judge_past(folder: Path, record: ServerRecord, index: int, since: float, until: float) -> Stretches:
    """Which conditions held in a generation of a server, by code, from ``since`` to ``until`` (Unix seconds).

    ``index`` is the generation's place in the record. Where nothing was recorded nothing held.

    Raises:
        HistoryError: the history cannot be read.
    """
    generation = record.generations[index]
    at_work = replace(
        record,
        generations=record.generations[: index + 1],
        state=State.READY,
        state_since=generation.ready_at or generation.started_at,
    )
    judge, details, found = Judge(record.name), unpack(generation.spec.details), Stretches()
    due = since
    for entry in _rows(folder, max(since, until - DAY_SECONDS) - HISTORY_SECONDS, until):
        if entry.generation > generation.number:
            break
        judge.append(entry.sample, entry.generation)
        if entry.at < due or entry.generation != generation.number:
            continue
        due = entry.at + LOOK_SECONDS
        for condition in judge.conditions(at_work, details, Around(may_ask=False), entry.at):
            if condition.severity != "good" and condition.code != EngineHung.code:
                found.setdefault(condition.code, []).append((max(since, min(condition.since, entry.at)), entry.at))
    return found


def _rows(folder: Path, start: float, end: float) -> Iterator[Entry]:
    """An hour at a time, for a day of histograms would fill the memory; the last half hour by the second."""
    reader, fine = Reader(folder / HISTORY), end - FINE_SECONDS
    try:
        while start < end:
            stop = min(start + _CHUNK_SECONDS, fine if start < fine else end)
            points = _POINTS if start < fine else TIERS[0].rows
            yield from (entry for entry in reader.range(start, stop, points) if entry.at < stop or stop == end)
            start = stop
    except HistoryMissingError:
        return
    finally:
        reader.close()

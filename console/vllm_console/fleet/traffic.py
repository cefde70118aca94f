"""What a server of one's own served: its past traffic as a workload to plan for, its finished requests, engine steps,
and what the prefix cache did for them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vllm_console.diagnosis.live.rule import DEFAULT_OBJECTIVES
from vllm_console.fleet.probe import no_probe_message
from vllm_console.fleet.verbs import FleetError
from vllm_console.history.prefix_use import PrefixUse, prefix_use
from vllm_console.history.probe_records import FinishedRequest, ProbeReader, Step
from vllm_console.history.store import HISTORY, HistoryError, HistoryMissingError, Reader
from vllm_console.history.workload import WINDOW_SECONDS, SeenWorkload, seen_workload
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.launch.details import unpack
from vllm_launchers.plan.flags import token_count
from vllm_launchers.probe.environment import PROBE

MOST_SAMPLES = 720
"""Samples read per hour: one in five seconds is enough for counters that only grow."""


def seen_traffic(folder: Path, record: ServerRecord, now: float) -> SeenWorkload | None:
    """The traffic of the last hour before ``now`` (Unix seconds); None if the record has too little data."""
    details = unpack(record.current.spec.details)
    if details.workload is None:
        return None
    longest = token_count(details.flags.get("max-model-len"))
    objectives = details.objectives or DEFAULT_OBJECTIVES
    reader = Reader(folder / HISTORY)
    try:
        samples = reader.range(now - WINDOW_SECONDS, now, MOST_SAMPLES)
        return seen_workload(samples, details.workload, longest=longest, goal=objectives.kv_cache_usage)
    except HistoryMissingError:
        return seen_workload((), details.workload, longest=longest)
    except HistoryError as error:
        return SeenWorkload(None, 0, 0.0, str(error))
    finally:
        reader.close()


# -- what its probe recorded -------------------------------------------------------------------------------------------

T = TypeVar("T", FinishedRequest, Step)


def finished_requests(state: Path, record: ServerRecord, since: float | None) -> tuple[FinishedRequest, ...]:
    """Those of its present or last run since it was ready, or of all runs ``since`` then (Unix seconds), oldest first.

    Raises:
        FleetError: it has no probe and nothing was recorded; the records cannot be read.
    """
    begin = _begin(record, since)
    found = _recorded(record, ProbeReader(_folder(state, record), begin).requests)
    return tuple(request for request in found if request.finished_at >= begin)


def engine_steps(state: Path, record: ServerRecord, since: float | None, most: int) -> tuple[Step, ...]:
    """The newest ``most`` steps of that time, oldest first; else as `finished_requests`."""
    begin = _begin(record, since)
    found = _recorded(record, ProbeReader(_folder(state, record), begin, most=most).steps)
    newest = heapq.nlargest(most, (step for step in found if step.at >= begin), key=lambda step: step.at)
    return tuple(newest[::-1])


def cached_prefixes(state: Path, record: ServerRecord, since: float | None) -> PrefixUse:
    """What the prefix cache did for the requests of that time; else as `finished_requests`."""
    begin = _begin(record, since)
    reader = ProbeReader(_folder(state, record), begin)
    requests = [one for one in _recorded(record, reader.requests) if one.finished_at >= begin]
    try:
        resumed = reader.resumed()
    except OSError as error:
        raise _unreadable(record, error) from error
    return prefix_use(requests, [one for one in resumed if one.at >= begin])


def _folder(state: Path, record: ServerRecord) -> Path:
    return client.folder(state, record.name) / PROBE


def _begin(record: ServerRecord, since: float | None) -> float:
    """Since when records count (Unix seconds)."""
    return (record.current.ready_at or record.current.started_at) if since is None else since


def _recorded(record: ServerRecord, read: Callable[[], list[T]]) -> list[T]:
    """What is read. Raises FleetError."""
    try:
        found = read()
    except OSError as error:
        raise _unreadable(record, error) from error
    if not found and not record.current.spec.probe:
        raise FleetError(no_probe_message(record.name, unpack(record.current.spec.details)))
    return found


def _unreadable(record: ServerRecord, error: OSError) -> FleetError:
    return FleetError(f"the requests of {record.name} can't be read: {error.strerror}")

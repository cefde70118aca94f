"""What a server of one's own served: its past traffic as a workload to plan for, and its finished requests."""

from __future__ import annotations

from pathlib import Path

from vllm_console.diagnosis.live.rule import DEFAULT_OBJECTIVES
from vllm_console.fleet.probe import no_probe_message
from vllm_console.fleet.verbs import FleetError
from vllm_console.history.probe_records import FinishedRequest, ProbeReader
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


# -- finished requests, as its probe recorded them --------------------------------------------------------------------


def finished_requests(state: Path, record: ServerRecord, since: float | None) -> tuple[FinishedRequest, ...]:
    """Those of its present or last run since it was ready, or of all runs ``since`` then (Unix seconds), oldest first.

    Raises:
        FleetError: it has no probe and nothing was recorded; the records cannot be read.
    """
    current = record.current
    begin = (current.ready_at or current.started_at) if since is None else since
    try:
        found = ProbeReader(client.folder(state, record.name) / PROBE, begin).requests()
    except OSError as error:
        raise FleetError(f"the requests of {record.name} can't be read: {error.strerror}") from error
    wanted = tuple(request for request in found if request.finished_at >= begin)
    if not wanted and not current.spec.probe:
        raise FleetError(no_probe_message(record.name, unpack(current.spec.details)))
    return wanted

"""A server's past traffic, from its history on disk, as a workload to plan for."""

from __future__ import annotations

from pathlib import Path

from vllm_console.diagnosis.live.rule import DEFAULT_OBJECTIVES
from vllm_console.history.store import HISTORY, HistoryError, HistoryMissingError, Reader
from vllm_console.history.workload import WINDOW_SECONDS, SeenWorkload, seen_workload
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.launch.details import unpack
from vllm_launchers.plan.flags import token_count

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

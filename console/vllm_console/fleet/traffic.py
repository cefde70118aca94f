"""The traffic that a server has had, from its history on disk, as a workload to plan for."""

from __future__ import annotations

from pathlib import Path

from vllm_console.fleet.details import unpack
from vllm_console.fleet.watched import HISTORY
from vllm_console.telemetry.history import HistoryError, HistoryMissingError, Reader
from vllm_console.telemetry.workload import WINDOW_SECONDS, SeenWorkload, seen_workload
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.plan.flags import token_count

MOST_LOOKS = 720
"""Looks of an hour that are read: one in five seconds is enough for counters that only grow."""


def seen_traffic(folder: Path, record: ServerRecord, now: float) -> SeenWorkload | None:
    """What was seen of it in the last hour before ``now`` (Unix seconds); None where its record says too little."""
    details = unpack(record.current.spec.details)
    if details.workload is None:
        return None
    longest = token_count(details.flags.get("max-model-len"))
    reader = Reader(folder / HISTORY)
    try:
        looks = reader.range(now - WINDOW_SECONDS, now, MOST_LOOKS)
        return seen_workload(looks, details.workload, longest=longest)
    except HistoryMissingError:
        return seen_workload((), details.workload, longest=longest)
    except HistoryError as error:
        return SeenWorkload(None, 0, 0.0, str(error))
    finally:
        reader.close()

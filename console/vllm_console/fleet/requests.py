"""The finished requests of a server of one's own, as its probe recorded them."""

from __future__ import annotations

from pathlib import Path

from vllm_console.fleet.verbs import FleetError
from vllm_console.history.probe_records import FinishedRequest, ProbeReader
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.launch.details import unpack
from vllm_launchers.probe.environment import PROBE


def finished_requests(state: Path, record: ServerRecord, since: float | None) -> tuple[FinishedRequest, ...]:
    """Those of its present or last run since it was ready, or of all runs ``since`` then (Unix seconds), oldest first.

    Raises:
        FleetError: it has no probe and nothing was recorded; the records cannot be read.
    """
    current = record.current
    begin = (current.ready_at or current.started_at) if since is None else since
    try:
        found = ProbeReader(client.folder(state, record.name) / PROBE).requests()
    except OSError as error:
        raise FleetError(f"the requests of {record.name} can't be read: {error.strerror}") from error
    wanted = tuple(request for request in found if request.finished_at >= begin)
    if not wanted and not current.spec.probe:
        why = unpack(current.spec.details).no_probe
        raise FleetError(f"{record.name} has no probe, so its requests are not recorded: {why}")
    return wanted

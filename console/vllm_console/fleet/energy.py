"""The energy that one of our servers takes, by what recorders have kept of the last half hour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_console.history.energy import Energy, newest_energy, totals_of
from vllm_console.history.gpu_samples import GPU_SAMPLES, KEPT_SECONDS, read_gpu_samples
from vllm_console.history.store import HISTORY, HistoryError, Reader
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import ServerRecord

STALE_SECONDS = 30.0
"""What ended longer ago is not the present."""


def recent_energy(state: Path, record: ServerRecord, gpus: Sequence[int], now: float) -> Energy | None:
    """The energy of a server since it was ready, of the half hour before ``now`` (Unix seconds) at most; None where it
    is not known. ``gpus`` are those that it was given.
    """
    ready_at = record.current.ready_at
    if record.server is None or not record.state.alive or ready_at is None:
        return None
    since = max(now - KEPT_SECONDS, ready_at)
    hosts = read_gpu_samples(state / GPU_SAMPLES, since)
    if not any(gpu.energy_mj is not None for host in hosts for gpu in host.gpus):
        return None
    reader = Reader(client.folder(state, record.name) / HISTORY)
    try:
        entries = reader.since(since)
    except HistoryError:
        return None  # the snapshot says what is wrong with it
    finally:
        reader.close()
    totals = [totals_of(entry.sample) for entry in entries if entry.generation == record.current.number]
    found = newest_energy(hosts, record.server.pid, totals)
    if found is None or set(found.gpus) != set(gpus):
        return None
    return found if now - found.end <= STALE_SECONDS else None

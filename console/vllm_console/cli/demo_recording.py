"""The demo's recording: what its simulated servers did in the minutes before the demo opens.

`tests/tools/record_demo.py` creates it from the simulated engine in virtual time, with its own metrics and log. This
module enters it through the recorder's own stores, with times that end now, together with what the servers' probes
recorded: steps and finished requests.
"""

from __future__ import annotations

import json
import lzma
import os
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import structs

from vllm_console.cli.demo_servers import WINDOW_SECONDS
from vllm_console.fleet.gpu_charts import history_path
from vllm_console.fleet.gpus import occupied
from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.gpu_history import FIVES, GpuHistoryWriter
from vllm_console.history.store import HISTORY, HistoryWriter
from vllm_console.metrics.sample import Sample, Window
from vllm_console.recorder import WindowRecorder
from vllm_console.runs.keys import run_key
from vllm_console.runs.store import FILE_NAME, RunName
from vllm_launchers import values
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.keeper.files import LOG
from vllm_launchers.keeper.lifecycle import exit_of
from vllm_launchers.keeper.records import Generation, LaunchSpec, Recording, ServerRecord, State
from vllm_launchers.private import open_file
from vllm_launchers.probe.environment import PROBE
from vllm_launchers.probe.plugin.vllm_console_probe import FORMAT, HEADER_BYTES, LAYOUTS, SEGMENT_BYTES
from vllm_launchers.vllm.flags.changes import FlagValue

FILE = Path(__file__).with_suffix(".xz")
STAMP = "\0"
"""Placeholder for the time of a log line."""
TOTALS = "recorded-totals.txt"
"""File in a server's folder: the ``/metrics`` body from which its counters continue."""


class RecordedRun(msgspec.Struct, frozen=True):
    """One run. Times are in seconds, with 0 at the end of the recording; ``log`` has the time of each line."""

    flags: Mapping[str, FlagValue]
    started_at: float
    ready_at: float
    ended_at: float | None
    log: Sequence[tuple[float, str]]
    samples: Sequence[Sample]


class RecordedServer(msgspec.Struct, frozen=True):
    """A server's runs, oldest first, and its ``/metrics`` body at the end."""

    runs: Sequence[RecordedRun]
    totals: str

    @property
    def in_flight(self) -> int:
        """Requests in flight at the end."""
        engines = self.runs[-1].samples[-1].engines.values()
        return int(sum((one.requests_running or 0) + (one.requests_waiting or 0) for one in engines))

    def running(self, at: float) -> float | None:
        """Requests running at that time; None if no run was ready."""
        for run in self.runs:
            if run.ready_at <= at and (run.ended_at is None or at < run.ended_at):
                place = bisect_right(run.samples, at, key=lambda one: one.at)
                engines = run.samples[max(0, place - 1)].engines.values()
                return sum(one.requests_running or 0.0 for one in engines)
        return None


def read() -> Mapping[str, RecordedServer]:
    """The recorded servers by name."""
    return msgspec.msgpack.decode(lzma.decompress(FILE.read_bytes()), type=dict[str, RecordedServer])


def enter(
    server: RecordedServer, folder: Path, specs: Sequence[LaunchSpec], now: float
) -> tuple[LaunchSpec, Recording]:
    """Enter a server's history and log; the last run continues after ``now``.

    ``specs`` belong to its runs. Returns what to launch, and the recording for its keeper.
    """
    _write(folder / LOG, b"".join(_log_of(server.runs, now)))
    writer = HistoryWriter(folder / HISTORY)
    for number, run in enumerate(server.runs, 1):
        for recorded in run.samples:
            writer.append(structs.replace(recorded, at=now + recorded.at), number)
    writer.close()
    _write(folder / TOTALS, server.totals.encode())
    last = specs[-1]
    environment = {**last.environment, "SIMULATED_TOTALS": str(folder / TOTALS)}
    present = server.runs[-1]
    recording = Recording(
        generations=tuple(
            _ended(number, run, spec, now)
            for number, (run, spec) in enumerate(zip(server.runs[:-1], specs[:-1], strict=True), 1)
        ),
        started_at=now + present.started_at,
        ready_at=now + present.ready_at,
        log_offset=sum(len(text) for text in _log_of(server.runs[:-1], now)),
    )
    return values.replace(last, environment=environment, warm_up=None), recording


def enter_windows(server: RecordedServer, state: Path, folder: Path, record: ServerRecord, now: float) -> None:
    """Enter the windows of a server's runs, exact if ``folder`` has the records of its probe."""
    for run, generation in zip(server.runs, record.generations, strict=False):
        name = RunName(run_key(record, generation), record.name, generation.number)
        windows = WindowRecorder(state / FILE_NAME, name, WINDOW_SECONDS, folder / PROBE)
        for recorded in run.samples:
            windows.append(structs.replace(recorded, at=now + recorded.at))


def enter_gpus(
    servers: Mapping[str, RecordedServer], views: Sequence[ServerView], host_file: Path, state: Path, now: float
) -> None:
    """Enter what the host's GPUs did in that time, derived from the number of running requests per server.

    ``views`` are the current servers on their current GPUs.
    """
    host = read_host(host_file)
    writer = GpuHistoryWriter(history_path(state, host))
    began = min(server.runs[0].started_at for server in servers.values())
    for step in range(int(began // FIVES.step), 0):
        at = step * FIVES.step
        there = [(view, servers[view.name].running(at)) for view in views if view.name in servers]
        working = [
            structs.replace(view, state=State.READY, window=Window(at, at, requests_running=running))
            for view, running in there
            if running is not None
        ]
        writer.append(occupied(host, working), now + at)
    writer.close()


def _ended(number: int, run: RecordedRun, spec: LaunchSpec, now: float) -> Generation:
    ended_at = now + (run.ended_at or 0.0)
    ended = exit_of(0, requested=True, killed=False, at=ended_at)
    return Generation(number, spec, now + run.started_at, now + run.ready_at, ended_at, ended)


def _write(path: Path, data: bytes) -> None:
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(data)


def _log_of(runs: Sequence[RecordedRun], now: float) -> list[bytes]:
    """The log lines as bytes, with current times."""
    return [
        line.replace(STAMP, time.strftime("%m-%d %H:%M:%S", time.localtime(now + at))).encode()
        for run in runs
        for at, line in run.log
    ]


PROBES_FILE = Path(__file__).with_name("demo_records.xz")
"""Separate from `FILE` because they are larger and are written while the servers start."""

RecordedProbe = Mapping[str, bytes]
"""The records of one run by kind, in columns (`untransposed`). Times are in seconds; 0 is the end of the recording."""


def read_probes() -> Mapping[str, Sequence[RecordedProbe]]:
    """The records of each run of each server, oldest first."""
    return msgspec.msgpack.decode(lzma.decompress(PROBES_FILE.read_bytes()), type=dict[str, list[dict[str, bytes]]])


def enter_probes(runs: Sequence[RecordedProbe], folder: Path, now: float) -> None:
    """Write segments to a server's ``folder``, like a probe that ended at ``now`` (Unix seconds)."""
    place = folder / PROBE
    place.mkdir(mode=0o700, exist_ok=True)
    for number, run in enumerate(runs):
        for kind, columns in run.items():
            size = LAYOUTS[kind].size
            records = untransposed(columns, size)
            room = (SEGMENT_BYTES - HEADER_BYTES) // size * size
            for part, start in enumerate(range(0, len(records), room)):
                # Segment names sort by time: before those of the server that continues.
                path = place / f"{kind}-{number:010d}{part:010d}-{os.getpid()}.bin"
                with os.fdopen(open_file(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
                    file.write(_segment_header(kind, now) + records[start : start + room])


def _segment_header(kind: str, now: float) -> bytes:
    """The header of a process whose clock was 0 at ``now``."""
    header = {
        "format": FORMAT, "kind": kind, "record_bytes": LAYOUTS[kind].size, "pid": os.getpid(), "wall": now,
        "monotonic": 0.0,
    }  # fmt: skip
    return json.dumps(header).encode().ljust(HEADER_BYTES - 1) + b"\n"


def untransposed(columns: bytes, size: int) -> bytes:
    """Records from their columns: the first byte of each record, then the second byte of each, and so on."""
    count = len(columns) // size
    records = bytearray(len(columns))
    for place in range(size):
        records[place::size] = columns[place * count : (place + 1) * count]
    return bytes(records)

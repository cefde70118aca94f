"""Records the demo's history with the simulated engine in virtual time. Takes about a minute.

    python tests/tools/record_demo.py

Writes `console/vllm_console/cli/demo_recording.xz`. Run it again when presets, plans or the engine model change the
flags of the demo's servers; `tests/unit/cli/test_demo_recording.py` detects that.
"""

from __future__ import annotations

import asyncio
import heapq
import lzma
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from vllm_console.cli import demo
from vllm_console.cli.demo_recording import (
    FILE,
    PROBES_FILE,
    STAMP,
    RecordedProbe,
    RecordedRun,
    RecordedServer,
)
from vllm_console.cli.demo_servers import MOST_IN_FLIGHT, SERVERS
from vllm_console.fleet.local import LocalFleet
from vllm_console.history.probe_records import EngineStep, FinishedRequest, FirstToken, Interval, Resumed
from vllm_console.load.run import Phase
from vllm_console.load.shape import TrafficShape
from vllm_console.metrics.parse import Parser
from vllm_console.metrics.sample import Sample
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.plan.model import Plan
from vllm_launchers.probe.plugin.vllm_console_probe import LAYOUTS, Probe, Recorder, Row
from vllm_launchers.simulated.engine import Engines, SimulatedEngine, record_step
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import MemoryPlan
from vllm_launchers.simulated.metrics import Metrics
from vllm_launchers.simulated.server import STATS_INTERVAL, _shut_down, build_core, stats_line
from vllm_launchers.simulated.settings import EngineSettings, Simulated, resolve_settings
from vllm_launchers.simulated.startup import Log, Process, SimulatedStartup, announce

DOWN_SECONDS = 1.2
"""Seconds between two runs."""

UVICORN = ("Started server process [{pid}]", "Waiting for application startup.", "Application startup complete.")


RECORDED_SECONDS = 900.0
"""Seconds at the end whose steps and requests are recorded: what the console shows at first, and all that a prediction
uses. 25 minutes have a hundred thousand steps."""

TIMES = {
    "steps": ("at", "shortest_interval", "longest_interval"),
    "requests": ("arrived_at", "finished_at", "queue_seconds", "prefill_seconds", "decode_seconds", "e2e_seconds"),
    "first_tokens": ("at", "seconds"),
    "intervals": ("at", "seconds"),
    "resumed": ("at",),
}
FIELDS = {
    "steps": EngineStep._fields, "requests": FinishedRequest._fields, "first_tokens": FirstToken._fields,
    "intervals": Interval._fields, "resumed": Resumed._fields,
}  # fmt: skip
FRACTION = 1 << 15
"""Times are rounded to this fraction of a second (31 µs), so that the records can be compressed."""


def transposed(records: bytes, size: int) -> bytes:
    """The first byte of each record, then the second byte of each, and so on, which compresses far better."""
    return b"".join(records[place::size] for place in range(size))


class KeptRecords:
    """Replaces the probe's recorder: keeps the records of a virtual engine with virtual times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._rows: list[tuple[str, Row]] = []
        self._calm = 0

    def add(self, kind: str, row: Row) -> None:
        """Keep a record, with its times converted to virtual time."""
        named = dict(zip(FIELDS[kind], row, strict=False))
        if kind == "requests":
            named |= {"arrived_at": self.now - named["e2e_seconds"], "finished_at": self.now}
        else:
            named["at"] = self.now
        self._rows.append((kind, tuple(named.values())))

    def drop(self) -> None:
        """Called when the probe loses a record."""
        raise RuntimeError("a step could not be recorded")

    def calm(self) -> None:
        """Note that no request is in flight."""
        self._calm = len(self._rows)

    def until_calm(self, began: float, since: float) -> RecordedProbe:
        """The records up to the last moment without a request in flight, for a start at ``began``.

        Requests in flight at the end have no record, but a replay from records must contain the whole traffic.
        """
        packed: dict[str, list[bytes]] = {kind: [] for kind in LAYOUTS}
        for kind, row in self._rows[: self._calm]:
            moved = self._moved(kind, row, began)
            if moved["finished_at" if kind == "requests" else "at"] >= since:
                packed[kind].append(LAYOUTS[kind].pack(*moved.values(), 0))
        return {kind: transposed(b"".join(rows), LAYOUTS[kind].size) for kind, rows in packed.items() if rows}

    @staticmethod
    def _moved(kind: str, row: Row, by: float) -> dict[str, Any]:
        named = dict(zip(FIELDS[kind], row, strict=False))
        for name in TIMES[kind]:
            if named[name] != -1.0:  # unknown
                moved = named[name] + by if name in ("at", "arrived_at", "finished_at") else named[name]
                named[name] = round(moved * FRACTION) / FRACTION
        return named


class KeptLog(Log):
    """Keeps log lines with their times."""

    def __init__(self) -> None:
        super().__init__("INFO")
        self.lines: list[tuple[float, str]] = []
        self.begun = time.monotonic()
        self.at: float | None = None
        """The virtual time, once there is one."""

    def keep(self, text: str) -> None:
        self.lines.append((self.at if self.at is not None else time.monotonic() - self.begun, text))

    def write(self, process: Process | str, level: str, where: str, message: str) -> None:
        """Like vLLM's log line, except for the time."""
        for line in message.split("\n"):
            self.keep(f"({process} pid={self._pid}) {level} {STAMP} [{where}] {line}\n")

    def progress(self, text: str) -> None:
        """Keep a line unchanged."""
        self.keep(text)

    def uvicorn(self, text: str) -> None:
        self.keep(f"INFO:     {text.format(pid=self._pid)}\n")


def requests_of(phases: Sequence[Phase], longest: int) -> Iterator[tuple[float, int, Request]]:
    """The traffic as sent by `vllm_console.load`: arrival time and number of each request."""
    begun, number = 0.0, 0
    shapes: dict[Phase, TrafficShape] = {}
    for phase in phases:
        shape = shapes.setdefault(phase, TrafficShape(phase.workload, exact=phase.exact, max_model_len=longest))
        for one in shape.stream(phase.rate, phase.seconds):
            number, at = number + 1, begun + one.at
            tokens, name = one.output_tokens, f"0_cmpl-{number:016x}-0-{number:08x}"  # the server's name for it
            yield at, number, Request(name, list(one.prompt), tokens, tokens, arrival=at, seed=number)
        begun += phase.seconds


class Virtual:
    """A simulated engine in virtual time, which is 0 when it is ready."""

    def __init__(self, settings: EngineSettings, memory: MemoryPlan, log: KeptLog) -> None:
        core = build_core(settings, memory)
        self.metrics, self.log = Metrics(settings, memory), log
        self.engine = SimulatedEngine(core, self.metrics.engines[0])
        self.samples: list[Sample] = []
        self.records = KeptRecords()
        self._probe = Probe(cast(Recorder, self.records))
        self._parser = Parser()
        self._up = log.lines[-1][0]

    def run(self, traffic: Iterator[tuple[float, int, Request]], seconds: float) -> None:
        """Serve for that many seconds."""
        core, engine = self.engine.core, self.metrics.engines[0]
        coming = list(traffic)
        heapq.heapify(coming)
        now = next_at = 0.0
        while next_at <= seconds:
            if not core.busy:
                self.records.calm()
                now = max(now, min([next_at, *(at for at, _, _ in coming[:1])]))
            while coming and coming[0][0] <= now and self._in_flight < MOST_IN_FLIGHT:
                request = heapq.heappop(coming)[2]
                request.arrival = now
                core.scheduler.add(request)
            took = core.begin(now) if core.busy else 0.0
            while next_at <= min(now + took, seconds):
                self._second(next_at)
                next_at += 1.0
            now += took
            if took:
                self.log.at = self._up + now
                report = core.finish(took, now)
                engine.step(report)
                self.engine.throughput.take(report)
                self.records.now = now
                record_step(self._probe, core, report)
                for request in report.finished:
                    port = 40000 + request.seed * 7 % 20000
                    self.log.uvicorn(f'127.0.0.1:{port} - "POST /v1/completions HTTP/1.1" 200 OK')

    @property
    def _in_flight(self) -> int:
        scheduler = self.engine.core.scheduler
        return len(scheduler.running) + len(scheduler.waiting)

    def _second(self, at: float) -> None:
        self.metrics.engines[0].state(self.engine.core)
        self.samples.append(self._parser.parse(self.body(), at))
        if at and at % STATS_INTERVAL == 0 and (line := stats_line(0, self.engine, STATS_INTERVAL)):
            self.log.at = self._up + at
            self.log.api("loggers.py:335", line)

    def body(self) -> str:
        return self.metrics.render().decode()

    def end(self) -> None:
        """Shut down as after SIGTERM."""
        asyncio.run(_shut_down(Engines([self.engine]), self.log, 0))
        self.log.api("launcher.py:304", "[shutdown] API server: shut down")


def record(plan: Plan, phases: Sequence[Phase], began: float, *, goes_on: bool) -> tuple[RecordedRun, str, KeptRecords]:
    """Record one run whose startup begins at ``began``; returns the run, its final ``/metrics``, and its probe
    records."""
    args = parse_flags(plan.argv[plan.argv.index("serve") :])
    simulated = Simulated.from_environment(plan.environment)
    settings, log = resolve_settings(args, simulated), KeptLog()
    announce(log, args, simulated.gpu.name)
    memory = SimulatedStartup(log, settings, simulated.startup_seconds).run()
    for text in UVICORN:
        log.uvicorn(text)
    up, seconds = log.lines[-1][0], sum(phase.seconds for phase in phases)
    virtual = Virtual(settings, memory, log)
    virtual.run(requests_of(phases, memory.max_model_len), seconds)
    if not goes_on:
        virtual.end()
    run = RecordedRun(
        flags=dict(plan.flags),
        started_at=began,
        ready_at=began + up,
        ended_at=None if goes_on else began + up + seconds,
        log=[(began + at, text) for at, text in log.lines],
        samples=[_moved(sample, began + up) for sample in virtual.samples],
    )
    return run, virtual.body(), virtual.records


def _moved(sample: Sample, by: float) -> Sample:
    return Sample(round(sample.at + by, 3), sample.engines, sample.kv_cache_tokens, sample.model_name)


def totals(body: str) -> str:
    """vLLM's part of a body of ``/metrics``."""
    return "".join(line for line in body.splitlines(keepends=True) if "vllm:" in line)


def main() -> None:
    servers, records = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        fleet = LocalFleet(Path(folder), observe=False, interactive=True, host_file=demo.HOST, own_presets=demo.PRESETS)
        for server in SERVERS:
            plans = [fleet.plan(request) for request in demo.runs_of(server, fleet.snapshot().host, server.place)]
            began, body = 0.0, ""
            runs: list[RecordedRun] = []
            kept: list[KeptRecords] = []
            for number, plan in enumerate(plans, 1):
                run, body, probed = record(plan, server.recorded[number - 1], began, goes_on=number == len(plans))
                runs.append(run)
                kept.append(probed)
                began = (run.ended_at or 0.0) + DOWN_SECONDS
            ended = [_ending_at_0(run, runs[-1]) for run in runs]
            servers[server.name] = RecordedServer(ended, totals(body))
            records[server.name] = [
                one.until_calm(run.ready_at, -RECORDED_SECONDS) for one, run in zip(kept, ended, strict=True)
            ]
        fleet.close()
    for file, recorded in ((FILE, servers), (PROBES_FILE, records)):
        file.write_bytes(lzma.compress(msgspec.msgpack.encode(recorded), preset=9))
        print(f"{file}: {file.stat().st_size:,} bytes")


def _ending_at_0(run: RecordedRun, last: RecordedRun) -> RecordedRun:
    end = last.samples[-1].at
    return RecordedRun(
        flags=run.flags,
        started_at=run.started_at - end,
        ready_at=run.ready_at - end,
        ended_at=run.ended_at - end if run.ended_at is not None else None,
        log=[(round(at - end, 2), text) for at, text in run.log],
        samples=[_moved(sample, -end) for sample in run.samples],
    )


if __name__ == "__main__":
    main()

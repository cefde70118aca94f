"""A simulated server in virtual time, observed through its metrics, and the findings about it.

Requests are known by length, and iterations that only decode one token per request are batched: ten minutes of traffic
take seconds.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry
from prometheus_client.utils import floatToGoString

from fakes.virtual_records import known_by_length
from vllm_console.diagnosis.finding import Finding
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.history.frames import Frames
from vllm_console.load.shape import TrafficShape
from vllm_console.metrics.parse import Parser
from vllm_launchers.engine_model.core import Core, StepReport
from vllm_launchers.engine_model.roofline import Work
from vllm_launchers.engine_model.scheduler import Batch, Request
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.presets.model import Workload
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import plan_memory
from vllm_launchers.simulated.metrics import EngineMetrics, Metrics
from vllm_launchers.simulated.server import build_core
from vllm_launchers.simulated.settings import Simulated, resolve_settings
from vllm_launchers.vllm.flags.changes import Changes, Flags

BEGAN = 1_000_000.0
"""Unix seconds at which the virtual server became ready."""

SAMPLE_SECONDS = 2.5
"""Four samples per frame: enough for its highest and lowest gauges, and cheap."""

MOST_TOGETHER = 4096


@dataclass
class Served:
    """The result of serving: the frames, and the context at the end."""

    frames: Frames
    ctx: Evidence
    history: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """At every new frame: seconds since the start, and the codes of the findings."""

    @property
    def found(self) -> tuple[Finding, ...]:
        return findings(self.ctx)

    @property
    def codes(self) -> set[str]:
        return {finding.code for finding in self.found}

    @property
    def ever(self) -> set[str]:
        """Every code found at any time."""
        return {code for _, codes in self.history for code in codes}

    def finding(self, code: str) -> Finding:
        return next(finding for finding in self.found if finding.code == code)


@dataclass(frozen=True)
class Server:
    """Flags, model and GPU of a simulated server, and what else its console knows."""

    flags: Flags
    model: str = "Qwen/Qwen3-8B-AWQ"
    gpu: str = "RTX A6000"
    known: Mapping[str, Any] = field(default_factory=dict)
    together: bool = True
    """Whether equal iterations are batched."""

    def changed(self, changes: Changes) -> Server:
        flags = {name: value for name, value in self.flags.items() if name not in changes.unset}
        return dataclasses.replace(self, flags={**flags, **changes.set})

    def serve(self, requests: Iterable[Request], seconds: float) -> Served:
        """Serve requests for that many virtual seconds, and evaluate findings at each new frame."""
        args = parse_flags(["serve", self.model, *flag_words(self.flags)])
        settings = resolve_settings(args, Simulated.from_environment({"SIMULATED_GPU": self.gpu}))
        plan = plan_memory(settings)
        core, metrics = build_core(settings, plan), Metrics(settings, plan)
        parser, frames = Parser(), Frames()
        base = Evidence(
            now=BEGAN,
            ready_at=BEGAN,
            frames=(),
            flags=self.flags,
            max_model_len=plan.max_model_len,
            **self.known,
        )
        served = Served(frames, base)
        queue = [(request.arrival, index, request) for index, request in enumerate(requests)]
        heapq.heapify(queue)
        (engine,) = metrics.engines
        now, next_sample = 0.0, 0.0
        while next_sample <= seconds:
            until = min(next_sample, queue[0][0]) if queue and not core.busy else next_sample
            if not core.busy:
                now = max(now, until)
            while queue and queue[0][0] <= now:
                core.scheduler.add(heapq.heappop(queue)[2])
            if self.together:
                now = _decoded(core, engine, now, next_sample, queue[0][0] if queue else math.inf)
                while queue and queue[0][0] <= now:
                    core.scheduler.add(heapq.heappop(queue)[2])
            if core.busy:
                took = core.begin(now)
                while next_sample <= min(now + took, seconds):
                    self._sample(served, metrics, core, parser, next_sample)
                    next_sample += SAMPLE_SECONDS
                now += took
                engine.step(core.finish(took, now))
            elif now >= next_sample:
                self._sample(served, metrics, core, parser, next_sample)
                next_sample += SAMPLE_SECONDS
        return served

    @staticmethod
    def _sample(served: Served, metrics: Metrics, core: Any, parser: Parser, at: float) -> None:
        metrics.engines[0].state(core)
        served.frames.append(parser.parse(_exposition(metrics.registry), BEGAN + at))
        frames = served.frames.since(0.0)
        if len(frames) > len(served.ctx.frames):
            served.ctx = replace(served.ctx, now=BEGAN + at, frames=frames)
            served.history.append((at, tuple(finding.code for finding in served.found)))


def _exposition(registry: CollectorRegistry) -> str:
    """Like `prometheus_client.generate_latest`, without comments. That function formats each series' labels every time,
    which would take half of the time of a scenario."""
    return "".join(
        f"{_series(sample.name, tuple(sample.labels.items()))} {floatToGoString(sample.value)}\n"
        for family in registry.collect()
        for sample in family.samples
    )


@cache
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    texts = [f'{label}="{value}"' for label, value in labels]
    return f"{name}{{{','.join(texts)}}}" if texts else name


def _decoded(core: Core, engine: EngineMetrics, now: float, next_sample: float, next_arrival: float) -> float:
    """Run the next iterations that only decode one token per request; returns when they end.

    They end before the next sample, and as soon as an arriving request may join them.
    """
    scheduler = core.scheduler
    running, most = scheduler.running, scheduler.decode_steps(MOST_TOGETHER)
    if not most or any(request.last_token_at != now for request in running):
        return now
    joined = math.inf if scheduler.full or scheduler.waiting else next_arrival
    count, reads = len(running), sum(request.computed for request in running)
    reports: list[StepReport] = []
    while len(reports) < most and now < joined:
        reads += count
        took = now + core.roofline.interval(Work(count, count, reads, reads)) - now
        if now + took >= next_sample:
            break
        reports.append(StepReport(took, Batch(), itls=[now + took - now] * count, advanced=running))
        now += took
    if reports:
        scheduler.decode(len(reports), now)
        reports[-1].finished = [request for request in running if request.finished is not None]
    for report in reports:
        engine.step(report)
    return now


def requests_of(workload: Workload, *, rate: float, seconds: float, longest: int, seed: int = 0) -> list[Request]:
    """A preset's workload as the console's load generator sends it."""
    drawn = TrafficShape(workload, seed=seed, max_model_len=longest).stream(rate, seconds)
    return [
        known_by_length(str(index), one.prompt, one.output_tokens, one.at, index) for index, one in enumerate(drawn)
    ]


@pytest.fixture
def server() -> Callable[..., Server]:
    """``server(flags, model, gpu=…, **known)``: ``known`` goes into the context unchanged."""

    def build(flags: Flags, model: str = "Qwen/Qwen3-8B-AWQ", *, gpu: str = "RTX A6000", **known: Any) -> Server:
        return Server(flags, model, gpu, known)

    return build


@pytest.fixture
def workload_requests() -> Callable[..., list[Request]]:
    return requests_of

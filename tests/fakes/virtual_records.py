"""Probe and recorder records of a simulated engine under traffic, in virtual time."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_console.history.probe_records import EngineStep, FinishedRequest
from vllm_console.metrics.parse import Parser
from vllm_console.metrics.sample import Sample
from vllm_launchers.engine_model.core import Core, StepReport
from vllm_launchers.engine_model.scheduler import Request, SchedulerLimits, extend_chain
from vllm_launchers.engine_model.traffic_replay import EngineLimits
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import plan_memory
from vllm_launchers.simulated.metrics import Metrics
from vllm_launchers.simulated.server import build_core
from vllm_launchers.simulated.settings import Simulated, resolve_settings

MODEL = "Qwen/Qwen3-8B-AWQ"
BEGAN = 1_000_000.0
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Recorded:
    """A run's records, its engine's limits, and optionally its ``/metrics`` at each second."""

    requests: Sequence[FinishedRequest]
    steps: Sequence[EngineStep]
    limits: EngineLimits
    samples: Sequence[Sample] = ()


class _Recorder:
    """Samples an engine's ``/metrics`` at each full second: the state after the last step that has ended by then."""

    def __init__(self, metrics: Metrics) -> None:
        self.samples: list[Sample] = []
        self._metrics, self._parser = metrics, Parser()
        self._second = 0

    def until(self, now: float) -> None:
        while self._second <= now:
            self.samples.append(self._parser.parse(self._metrics.render().decode(), BEGAN + self._second))
            self._second += 1

    def step(self, core: Core, report: StepReport, now: float) -> None:
        self.until(now)
        self._metrics.engines[0].step(report)
        self._metrics.engines[0].state(core)


def record(
    line: str, requests: Iterable[Request], *, model: str = MODEL, speed: float = 1.0, sampled: bool = False
) -> Recorded:
    """Run ``requests`` to completion on an engine with the flags of ``line``; with ``sampled``, also sample its
    metrics."""
    settings = resolve_settings(parse_flags(["serve", model, *line.split()]), Simulated.from_environment({}))
    memory = plan_memory(settings)
    core = build_core(settings, memory)
    core.speed = speed
    recorder = _Recorder(Metrics(settings, memory)) if sampled else None
    pool, limits = core.scheduler.pool, core.scheduler.limits
    finished, steps = _run(core, deque(sorted(requests, key=lambda one: one.arrival)), recorder)
    kept = SchedulerLimits(
        limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, limits.block_size,
        limits.chunked_prefill,
    )  # fmt: skip
    samples = recorder.samples if recorder is not None else ()
    return Recorded(finished, steps, EngineLimits(kept, pool.total, pool.caching), samples)


def _run(
    core: Core, queue: deque[Request], recorder: _Recorder | None
) -> tuple[list[FinishedRequest], list[EngineStep]]:
    finished: list[FinishedRequest] = []
    steps: list[EngineStep] = []
    now = 0.0
    while queue or core.busy:
        if not core.busy:
            now = max(now, queue[0].arrival)
        while queue and queue[0].arrival <= now:
            core.scheduler.add(queue.popleft())
        seconds = core.begin(now)
        now += seconds
        report = core.finish(seconds, now)
        if recorder is not None:
            recorder.step(core, report, now)
        prompts = sum(request.prompt_length for request in report.prefilled)
        finished += [finished_request(request) for request in report.finished]
        scheduler, batch = core.scheduler, report.batch
        steps.append(
            EngineStep(
                BEGAN + now, 0, len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage, None,
                batch.cache_queries, batch.cache_hits, prompts, len(report.advanced), batch.preempted, len(report.itls),
                min(report.itls, default=None), max(report.itls, default=None), None, None, None, 0,
            )
        )  # fmt: skip
    if recorder is not None:
        recorder.until(now + 2)
    return finished, steps


def finished_request(request: Request) -> FinishedRequest:
    scheduled, first, last = (
        one or 0.0 for one in (request.scheduled_at, request.first_token_at, request.last_token_at)
    )
    return FinishedRequest(
        request.id, BEGAN + request.arrival, BEGAN + last, 0, request.prompt_length, request.generated,
        request.cached or 0, scheduled - request.arrival, first - scheduled, last - first, last - request.arrival,
        request.preemptions, str(request.finished), 0,
    )  # fmt: skip


def traffic(
    count: int,
    rate: float,
    *,
    prompt: tuple[int, int] = (100, 900),
    output: tuple[int, int] = (50, 350),
    shared: int = 0,
    burst: float = 1.0,
    seed: int = 1,
) -> list[Request]:
    """Poisson arrivals of requests with uniformly distributed lengths; the first ``shared`` tokens of all prompts are
    the same.

    With ``burst`` above 1, the rate alternates every ten seconds between ``burst`` times ``rate`` and a lower rate.
    """
    dice = random.Random(seed)
    common = [dice.randrange(50_000) for _ in range(shared)]
    at, found = 0.0, []
    for index in range(count):
        high = burst > 1 and int(at / 10) % 2 == 0
        factor = burst if high else (2 - burst if 1 < burst < 2 else 1.0 if burst == 1 else 0.1)
        at += dice.expovariate(rate * factor)
        length = dice.randint(*prompt)
        tokens = common + [dice.randrange(50_000) for _ in range(length)]
        made = dice.randint(*output)
        found.append(Request(str(index), tokens, made, made, arrival=at, seed=index))
    return found


def known_by_length(id: str, tokens: Sequence[int], output: int, arrival: float, seed: int) -> Request:
    """A request with only the hashes of its prompt's blocks, which are equal for equal prefixes."""
    hashes: list[int] = []
    for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
        hashes.append(extend_chain(hashes[-1] if hashes else 0, tokens[end - BLOCK_SIZE : end]))
    return Request(
        id, [], output, output, arrival=arrival, seed=seed, sample=None, prompt_length=len(tokens), hashes=hashes
    )

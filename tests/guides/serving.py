"""A simulated server in virtual time for a guide's claim, and metrics of its traffic."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count

import msgspec

from vllm_launchers.engine_model.core import Core, StepReport
from vllm_launchers.engine_model.gpu_models import Interconnect
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.plan.flags import flag_words
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import MemoryPlan, plan_memory
from vllm_launchers.simulated.server import build_core
from vllm_launchers.simulated.settings import Simulated, resolve_settings
from vllm_launchers.vllm.flags.changes import Flags


class Server(msgspec.Struct, frozen=True):
    """A model on GPUs of one kind with vLLM's flags; ``link`` connects the GPUs, None means the typical one."""

    model: str
    gpu: str
    flags: Flags
    link: Interconnect | None = None

    def memory(self) -> MemoryPlan:
        """Memory per GPU. Raises MemoryBudgetError if the model does not fit, ValidationError like vLLM."""
        return self._start()[1]

    def core(self) -> Core:
        """An idle engine. Raises like :meth:`memory`."""
        return self._start()[0]

    def with_flags(self, **flags: object) -> Server:
        """The same server with other flags; underscores in names stand for dashes, and None removes a flag."""
        named = {name.replace("_", "-"): value for name, value in flags.items()}
        merged = {name: value for name, value in {**self.flags, **named}.items() if value is not None}
        return msgspec.structs.replace(self, flags=merged)

    def _start(self) -> tuple[Core, MemoryPlan]:
        args = parse_flags(["serve", self.model, *flag_words(self.flags)])
        settings = resolve_settings(args, Simulated.from_environment({"SIMULATED_GPU": self.gpu}))
        plan = plan_memory(settings)
        core = build_core(settings, plan)
        if self.link is not None:
            core.roofline = msgspec.structs.replace(core.roofline, tensor_link=self.link)
        return core, plan


class Traffic(msgspec.Struct, frozen=True):
    """Requests of one kind.

    ``groups`` prefixes of ``shared`` tokens are used in turn, each at the start of one request's prompt. Every
    ``every``-th request (none if 0) has a prompt of ``long_prompt`` tokens instead.
    """

    prompt: int
    output: int
    shared: int = 0
    groups: int = 1
    every: int = 0
    long_prompt: int = 0

    def request(self, number: int, *, arrival: float = 0.0, output: int | None = None) -> Request:
        """The request with this number; ``output`` replaces its number of output tokens."""
        length = self.long_prompt if self.every and number % self.every == 0 else self.prompt
        group = number % self.groups
        # Tokens are numbers: those of a prefix are negative, and all others are unique.
        shared = min(self.shared, length)
        start = number * 1_000_000
        tokens = [
            *range(-(group + 1) * 1_000_000, -(group + 1) * 1_000_000 + shared),
            *range(start, start + length - shared),
        ]
        answer = self.output if output is None else output
        return Request(str(number), tokens, answer, answer, arrival, seed=number)


class Served(msgspec.Struct, frozen=True):
    """Metrics of the measured part. Times are in seconds; ``reused`` is a share of the prompt tokens.

    ``sequences`` is the mean number of running sequences, ``preempted`` the preemptions per finished request,
    ``kv_usage`` the mean KV cache usage.
    """

    sequences: float
    tokens_per_second: float
    requests_per_second: float
    itl_p50: float
    itl_p99: float
    itl_max: float
    ttft_p50: float
    ttft_p99: float
    preempted: float
    kv_usage: float
    reused: float


class _Measured:
    """Sums over the measured part of a run."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.running = self.usage = 0.0
        self.tokens = self.finished = self.preempted = self.hits = self.queries = 0
        self.itls: list[float] = []
        self.ttfts: list[float] = []

    def add(self, core: Core, report: StepReport, running: int) -> None:
        self.seconds += report.seconds
        self.running += running * report.seconds
        self.usage += core.scheduler.pool.usage * report.seconds
        self.tokens += len(report.advanced)
        self.finished += len(report.finished)
        self.preempted += report.batch.preempted
        self.hits += report.batch.cache_hits
        self.queries += report.batch.cache_queries
        self.itls += report.itls
        self.ttfts += report.ttfts

    def result(self) -> Served:
        return Served(
            sequences=self.running / self.seconds,
            tokens_per_second=self.tokens / self.seconds,
            requests_per_second=self.finished / self.seconds,
            itl_p50=quantile(self.itls, 0.5),
            itl_p99=quantile(self.itls, 0.99),
            itl_max=max(self.itls, default=math.nan),
            ttft_p50=quantile(self.ttfts, 0.5),
            ttft_p99=quantile(self.ttfts, 0.99),
            preempted=self.preempted / max(1, self.finished),
            kv_usage=self.usage / self.seconds,
            reused=self.hits / max(1, self.queries),
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def closed_loop(server: Server, traffic: Traffic, clients: int, *, rounds: float = 1.0) -> Served:
    """``clients`` each send a request, and the next one when it is answered.

    The first responses have all lengths up to ``traffic.output``, so that load is even from the start. The measurement
    starts after as many finished requests as clients, and lasts for ``rounds`` times as many.
    """
    core, measured = server.core(), _Measured()
    numbers = count(1)
    for place in range(clients):
        core.scheduler.add(traffic.request(next(numbers), output=max(1, traffic.output * (place + 1) // clients)))
    now, answered = 0.0, 0
    while answered < clients * (1 + rounds):
        took = core.begin(now)
        running = len(core.scheduler.running)
        now += took
        report = core.finish(took, now)
        if answered >= clients:
            measured.add(core, report, running)
        answered += len(report.finished)
        for _ in report.finished:
            core.scheduler.add(traffic.request(next(numbers), arrival=now))
    return measured.result()


def open_loop(server: Server, requests: Iterable[Request], *, accept: Callable[[Request], bool] = bool) -> Served:
    """Serve requests at their arrival times until all are finished; only those that ``accept`` accepts are sent."""
    core, measured = server.core(), _Measured()
    queue = [(request.arrival, number, request) for number, request in enumerate(requests)]
    heapq.heapify(queue)
    now = 0.0
    while queue or core.busy:
        if not core.busy:
            now = max(now, queue[0][0])
        while queue and queue[0][0] <= now:
            core.scheduler.add(heapq.heappop(queue)[2])
        took = core.begin(now)
        running = len(core.scheduler.running)
        now += took
        measured.add(core, core.finish(took, now), running)
    return measured.result()


def arrivals(traffic: Traffic, rate: float, number: int, *, seed: int = 1) -> list[Request]:
    """``number`` requests with Poisson arrivals at ``rate`` per second."""
    rng, at, made = random.Random(seed), 0.0, []
    for index in range(1, number + 1):
        at += rng.expovariate(rate)
        made.append(traffic.request(index, arrival=at))
    return made

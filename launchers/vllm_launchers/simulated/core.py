"""One engine: scheduler and roofline put together, stepping through time that somebody else keeps.

Pure, so that a test simulates minutes of traffic in milliseconds: :func:`simulate` runs a list of requests in virtual
time. The real process runs the same :class:`Core` against the clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_launchers.simulated.blocks import BlockPool
from vllm_launchers.simulated.roofline import Roofline
from vllm_launchers.simulated.scheduler import Batch, Request, Scheduler, SchedulerLimits


@dataclass(slots=True)
class StepReport:
    """What one iteration did, in the terms of vLLM's own iteration statistics.

    ``ttfts`` are in seconds from arrival, ``itls`` seconds since a request's previous token; ``prefilled`` are the
    requests whose first token came out, ``advanced`` all that got a token and ``finished`` those of them that ended.
    """

    seconds: float
    tokens: int
    preempted: int
    cache_queries: int
    cache_hits: int
    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)
    advanced: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)


class Core:
    """One data-parallel rank. Call :meth:`begin`, let its seconds pass, then :meth:`finish`."""

    def __init__(self, limits: SchedulerLimits, blocks: int, roofline: Roofline, *, prefix_caching: bool) -> None:
        self.scheduler = Scheduler(limits, BlockPool(blocks, caching=prefix_caching))
        self.roofline = roofline
        self._batch: Batch | None = None

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return self.scheduler.busy

    def begin(self, now: float) -> float:
        """Put the next iteration together; return how many seconds it takes."""
        self._batch = self.scheduler.schedule(now)
        return self.roofline.seconds(self._batch)

    def finish(self, seconds: float, now: float) -> StepReport:
        """End the iteration that :meth:`begin` started and say what came of it."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("no iteration is under way")
        self._batch = None
        report = StepReport(seconds, batch.token_count, batch.preempted, batch.cache_queries, batch.cache_hits)
        before = {share.request.id: share.request.last_token_at for share in batch.shares}
        report.advanced = self.scheduler.complete(batch, now)
        for request in report.advanced:
            previous = before[request.id]
            if previous is None:
                report.ttfts.append(now - request.arrival)
                report.prefilled.append(request)
            else:
                report.itls.append(now - previous)
            if request.finished is not None:
                report.finished.append(request)
        return report


@dataclass(slots=True)
class Simulation:
    """What :func:`simulate` measured: all iterations' reports added up, and the highest share of the pool in use."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    generated: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    peak_usage: float = 0.0
    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def add(self, report: StepReport, usage: float) -> None:
        """Take in one iteration."""
        self.steps += 1
        self.tokens += report.tokens
        self.generated += len(report.advanced)
        self.preemptions += report.preempted
        self.cache_queries += report.cache_queries
        self.cache_hits += report.cache_hits
        self.peak_usage = max(self.peak_usage, usage)
        self.ttfts += report.ttfts
        self.itls += report.itls
        self.finished += report.finished


def simulate(core: Core, requests: Iterable[Request]) -> Simulation:
    """Run ``requests`` (each at its ``arrival``, in seconds) to their ends in virtual time."""
    queue = [(request.arrival, index, request) for index, request in enumerate(requests)]
    heapq.heapify(queue)
    result = Simulation()
    now = 0.0
    while queue or core.busy:
        if not core.busy:
            now = max(now, queue[0][0])
        while queue and queue[0][0] <= now:
            core.scheduler.add(heapq.heappop(queue)[2])
        seconds = core.begin(now)
        usage = core.scheduler.pool.usage
        now += seconds
        result.add(core.finish(seconds, now), usage)
    result.seconds = now
    return result

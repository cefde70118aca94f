"""One engine's core: scheduler and step-time model, without a clock, so that tests can run minutes in milliseconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from vllm_launchers.engine_model.roofline import Roofline, Work
from vllm_launchers.engine_model.scheduler import Batch, BlockPool, Request, Scheduler, SchedulerLimits


@dataclass(slots=True)
class StepReport:
    """Results of one iteration, in terms of vLLM's iteration statistics: what ``batch`` did in ``seconds``.

    ``ttfts`` are seconds since arrival, ``itls`` seconds since a request's previous token; ``prefilled`` are the
    requests that got their first token, ``advanced`` all that got a token, and ``finished`` those of them that ended.
    """

    seconds: float
    batch: Batch
    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    prefilled: list[Request] = field(default_factory=list)
    advanced: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class _InFlight:
    """An iteration in the pipeline, and when its tokens are ready."""

    batch: Batch
    due: float


class Core:
    """One data-parallel rank. Call :meth:`begin`, let the returned seconds pass, then call :meth:`finish`.

    With pipeline stages, as many iterations are in flight at once, as in vLLM's batch queue: the next one consists of
    requests that are not in the pipeline yet, and enters a stage when the previous one has left it. ``speed`` 2 halves
    every duration.
    """

    def __init__(self, limits: SchedulerLimits, blocks: int, roofline: Roofline, *, prefix_caching: bool) -> None:
        self.scheduler = Scheduler(limits, BlockPool(blocks, caching=prefix_caching))
        self.roofline = roofline
        self.speed = 1.0
        self._pipeline: deque[_InFlight] = deque()
        self._entry_free = 0.0
        self._last_due = 0.0

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return self.scheduler.busy

    def begin(self, now: float) -> float:
        """Fill the pipeline; return the remaining seconds of its oldest iteration."""
        while len(self._pipeline) < self.roofline.pipeline_parallel:
            batch = self.scheduler.schedule(now)
            if self._pipeline and not batch.shares:
                # Everything is already in the pipeline; report preemptions with the oldest iteration.
                self._pipeline[0].batch.preempted += batch.preempted
                break
            self._enter(batch, now)
        return max(0.0, self._pipeline[0].due - now)

    def _enter(self, batch: Batch, now: float) -> None:
        """Put an iteration into the pipeline: a stage works on one at a time, and none overtakes another."""
        work = Work.of(batch)
        stage = self.roofline.interval(work) / self.speed
        whole = self.roofline.latency(work) / self.speed if self.roofline.pipeline_parallel > 1 else stage
        entry = max(now, self._entry_free)
        self._entry_free = entry + stage
        due = entry + whole
        if self._pipeline:
            due = max(due, self._last_due + stage)
        self._last_due = due
        self._pipeline.append(_InFlight(batch, due))

    def finish(self, seconds: float, now: float) -> StepReport:
        """End the oldest iteration and report it. Raises RuntimeError if none is in flight."""
        if not self._pipeline:
            raise RuntimeError("no iteration is in flight")
        batch = self._pipeline.popleft().batch
        report = StepReport(seconds, batch)
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

"""The engine in real time: paces a `Core`'s iterations and delivers tokens to waiting streams.

Each step and request is also recorded by the probe's plugin, under vLLM's names.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm_launchers.engine_model.core import Core, StepReport
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.probe.plugin.vllm_console_probe import FOLDER, Probe, recorder_for
from vllm_launchers.simulated.metrics import EngineMetrics, request_values
from vllm_launchers.simulated.settings import REPORTED_VERSION

CACHE_WINDOW = 1000
"""The hit rate in the log covers this many requests."""


class Stream:
    """The output of one sequence. Tokens that were not fetched in time arrive together; none is lost.

    ``news`` is set when there are new tokens or the sequence ends; several sequences may share it.
    """

    __slots__ = ("_sent", "news", "request")

    def __init__(self, request: Request, news: asyncio.Event) -> None:
        self.request = request
        self.news = news
        self._sent = 0

    def take(self) -> tuple[int, int]:
        """Start and end positions of the tokens since the last call."""
        start, self._sent = self._sent, self.request.generated
        return start, self._sent


@dataclass(slots=True)
class Throughput:
    """Counts since the last log line."""

    prompt_tokens: int = 0
    generated: int = 0
    was_idle: bool = True
    cache: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=CACHE_WINDOW))

    def take(self, report: StepReport) -> None:
        """Count one iteration."""
        self.generated += len(report.advanced)
        for request in report.prefilled:
            cached = request.cached or 0
            self.prompt_tokens += request.prompt_length - cached
            self.cache.append((request.prompt_length, cached))

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, 0 to 1."""
        queries = sum(queried for queried, _hits in self.cache)
        return sum(hits for _queried, hits in self.cache) / queries if queries else 0.0


class SimulatedEngine:
    """One data-parallel rank in real time. ``speed`` 2 halves the duration of every iteration."""

    def __init__(
        self, core: Core, metrics: EngineMetrics | None, *, speed: float = 1.0, probe: Probe | None = None
    ) -> None:
        self.core = core
        self._probe = probe
        self.throughput = Throughput()
        self._metrics = metrics
        core.speed = speed
        self._streams: dict[str, Stream] = {}
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._going = asyncio.Event()
        self._going.set()

    @property
    def load(self) -> int:
        """The load by which vLLM balances data-parallel ranks: waiting requests count four times."""
        return 4 * len(self.core.scheduler.waiting) + len(self.core.scheduler.running)

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests."""
        return len(self._streams)

    def submit(self, request: Request, news: asyncio.Event) -> Stream:
        """Queue a sequence; ``news`` is set whenever it has new tokens or ends."""
        request.arrival = asyncio.get_running_loop().time()
        self.core.scheduler.add(request)
        stream = self._streams[request.id] = Stream(request, news)
        self._drained.clear()
        self._wake.set()
        self._publish()
        return stream

    def abort(self, stream: Stream) -> bool:
        """Abort a sequence and free its blocks; False if it has already ended.

        vLLM does not count requests whose client disconnects as finished.
        """
        if self._streams.pop(stream.request.id, None) is None:
            return False
        self.core.scheduler.abort(stream.request)
        stream.news.set()
        self._publish()
        return True

    def abort_all(self) -> int:
        """Abort and count all sequences, as the engine itself does; returns how many there were."""
        streams = list(self._streams.values())
        for stream in streams:
            if self.abort(stream) and self._metrics is not None:
                self._metrics.aborted()
        return len(streams)

    def pause(self) -> None:
        """Start no more iterations: running requests freeze, and new ones wait."""
        self._going.clear()

    def resume(self) -> None:
        """Resume after a pause."""
        self._going.set()

    async def drained(self) -> None:
        """Wait until no requests are left."""
        await self._drained.wait()

    async def run(self) -> None:
        """Run iterations forever; sleep when there is nothing to do."""
        clock: Callable[[], float] = asyncio.get_running_loop().time
        start = clock()
        while True:
            if not self.core.busy:
                self._wake.clear()
                await self._wake.wait()
                start = clock()
            if not self._going.is_set():
                await self._going.wait()
                start = clock()
                continue  # its work may have been aborted during the pause
            seconds = self.core.begin(start)
            due = start + seconds
            # If this process can't keep up, it slows down; normal timer delays do not accumulate.
            await asyncio.sleep(max(0.0, due - clock()))
            now = clock()
            report = self.core.finish(seconds, now)
            self._deliver(report)
            start = due if now - due < seconds / 2 else now

    def _deliver(self, report: StepReport) -> None:
        for request in report.advanced:
            stream = self._streams.get(request.id)
            if stream is not None:
                stream.news.set()
                if request.finished is not None:
                    del self._streams[request.id]
        self.throughput.take(report)
        if self._metrics is not None:
            self._metrics.step(report)
        if self._probe is not None:
            record_step(self._probe, self.core, report)
        self._publish()

    def _publish(self) -> None:
        if not self._streams:
            self._drained.set()
        if self._metrics is not None:
            self._metrics.state(self.core)


class Engines:
    """All data-parallel ranks of a server."""

    def __init__(self, engines: list[SimulatedEngine]) -> None:
        self.ranks = engines
        self.closing = False
        """Set once the server is shutting down, so that no new requests are accepted."""

    @property
    def in_flight(self) -> int:
        """Number of unfinished requests on all ranks."""
        return sum(engine.in_flight for engine in self.ranks)

    def submit(self, request: Request, news: asyncio.Event) -> tuple[SimulatedEngine, Stream]:
        """Submit a sequence to the least loaded rank."""
        engine = min(self.ranks, key=lambda rank: rank.load)
        return engine, engine.submit(request, news)

    def abort_all(self) -> int:
        """Abort all requests; returns how many there were."""
        return sum(engine.abort_all() for engine in self.ranks)

    async def drained(self) -> None:
        """Wait until no rank has requests left."""
        for engine in self.ranks:
            await engine.drained()


def probe_of(rank: int) -> Probe | None:
    """The probe of one data-parallel rank; None if the server was started without it."""
    folder = os.environ.get(FOLDER)
    return Probe(recorder_for(folder, REPORTED_VERSION), rank) if folder else None


def record_step(probe: Probe, core: Core, report: StepReport) -> None:
    """Record an iteration and the requests that ended in it, as objects with vLLM's names."""
    scheduler = core.scheduler
    stats = SimpleNamespace(
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=len(scheduler.waiting),
        kv_cache_usage=scheduler.pool.usage,
        prefix_cache_stats=SimpleNamespace(
            queries=report.batch.cache_queries,
            hits=report.batch.cache_hits,
            preempted_requests=report.batch.resumed,
            preempted_queries=report.batch.resumed_queries,
            preempted_hits=report.batch.resumed_hits,
        ),
    )
    if not report.advanced and not report.batch.preempted:
        probe.record(stats, None)  # prefill alone has no output
        return
    iteration = SimpleNamespace(
        num_prompt_tokens=sum(request.prompt_length for request in report.prefilled),
        num_generation_tokens=len(report.advanced),
        num_preempted_reqs=report.batch.preempted,
        time_to_first_tokens_iter=report.ttfts,
        inter_token_latencies_iter=report.itls,
        finished_requests=[_finished(request) for request in report.finished],
        iteration_timestamp=time.time(),
    )
    probe.record(stats, iteration)


def _finished(request: Request) -> SimpleNamespace:
    # An iteration can begin slightly before a request in it arrives, because the engine catches up on late timers.
    values = {name: max(0.0, value) for name, value in request_values(request).items()}
    return SimpleNamespace(
        finish_reason=str(request.finished or ""),
        request_id=request.id.partition("_")[2].rpartition("-")[0],  # as the client got it
        e2e_latency=values["e2e_request_latency_seconds"],
        num_prompt_tokens=request.prompt_length,
        num_preemptions=request.preemptions,
        num_generation_tokens=request.generated,
        queued_time=values["request_queue_time_seconds"],
        prefill_time=values["request_prefill_time_seconds"],
        decode_time=values["request_decode_time_seconds"],
        num_cached_tokens=request.cached or 0,
    )

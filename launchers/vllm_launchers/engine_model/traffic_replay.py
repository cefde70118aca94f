"""Replay request arrivals through vLLM's scheduler in virtual time, to see what a server with given limits would do.

Only lengths are known, no tokens. Iterations in which every running request gets one token and nothing else happens are
processed together, and while no request is preempted, requests and blocks are only counted (`counted_engine`). So
minutes of traffic take some hundredths of a second. Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec
from msgspec.structs import replace

from vllm_launchers.engine_model.counted_engine import CountedEngine, Iteration, WouldPreemptError
from vllm_launchers.engine_model.roofline import MAX_GRAPH_BATCH
from vllm_launchers.engine_model.scheduler import Batch, BlockPool, Request, Scheduler, SchedulerLimits
from vllm_launchers.engine_model.step_cost import NO_NOISE, STALLED, StepCost, StepNoise

_MOST_STEPS_TOGETHER = 4096


class Arrival(msgspec.Struct, frozen=True):
    """The relevant facts of a request: when it arrives (seconds), its lengths in tokens, and which prefix it shares.

    ``prefix`` holds the hashes of its first full blocks that other requests have too; equal hashes mean equal content.
    """

    at: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


class EngineLimits(msgspec.Struct, frozen=True):
    """A server's limits: those of its scheduler, the blocks of its KV cache, and whether prefixes are cached.

    ``ahead`` means that a step is scheduled when the previous one begins (vLLM's asynchronous scheduling). So a request
    that arrives during a step waits for one more, and so does one that takes the place or blocks of a request that ends
    in that step. ``graphs`` is the maximum number of tokens per step for which there are CUDA graphs.
    """

    scheduler: SchedulerLimits
    blocks: int
    prefix_caching: bool
    ahead: bool = False
    graphs: int = MAX_GRAPH_BATCH


class ReplayedRequest(msgspec.Struct, frozen=True):
    """The outcome of one arrival, in seconds since its arrival."""

    queue_seconds: float
    ttft_seconds: float
    e2e_seconds: float
    preemptions: int
    cached_tokens: int


class Replayed(msgspec.Struct, frozen=True):
    """The result of a replay.

    ``requests`` are in the order of arrivals, None for one that could never be served. ``intervals`` are times between
    tokens in seconds, each with its count. These and the following figures are of the iterations that began in the
    requested time: ``tokens`` generated, seconds ``busy``, request-seconds ``waiting``. ``kv_usage`` is the integral of
    KV cache usage (0 to 1) over that time in seconds. ``batches`` are busy seconds by number of running requests.
    ``prefill_tokens`` is the maximum number of prompt tokens in any iteration. ``seconds`` is from the first arrival to
    the last token, and ``steps`` counts all iterations.
    """

    requests: tuple[ReplayedRequest | None, ...]
    intervals: tuple[tuple[float, int], ...]
    steps: int
    seconds: float
    tokens: int
    busy: float
    waiting: float
    kv_usage: float
    batches: dict[int, float]
    prefill_tokens: int
    preemptions: int


def replay_traffic(
    arrivals: Sequence[Arrival],
    limits: EngineLimits,
    cost: StepCost,
    noise: StepNoise = NO_NOISE,
    *,
    since: float = 0.0,
    until: float = math.inf,
) -> Replayed:
    """Replay ``arrivals``, in order of time, until the last one ends; sum up from ``since`` to ``until``."""
    # Without shared prefixes, only a preempted request finds something in the cache: what it computed itself.
    caching = limits.prefix_caching and any(one.prefix for one in arrivals)
    counted = CountedEngine(limits.scheduler, limits.blocks, caching=caching, ahead=limits.ahead)
    try:
        return _Replay(arrivals, limits, counted, cost, noise, since, until).run()
    except WouldPreemptError:
        return _Replay(arrivals, limits, _ScheduledEngine(limits), cost, noise, since, until).run()


class _ScheduledEngine:
    """An engine that schedules every iteration request by request, block by block."""

    def __init__(self, limits: EngineLimits) -> None:
        pool = BlockPool(limits.blocks, caching=limits.prefix_caching)
        self._scheduler = Scheduler(limits.scheduler, pool, ahead=limits.ahead)
        self.waiting = self._scheduler.waiting
        self.add = self._scheduler.add
        self._completed_at = math.nan
        self._batch = Batch()
        self._before: list[tuple[Request, float | None]] = []

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def full(self) -> bool:
        return self._scheduler.full

    @property
    def context(self) -> int:
        return sum([request.computed for request in self._scheduler.running])

    @property
    def usage(self) -> float:
        return self._scheduler.pool.usage

    def decode_steps(self, most: int) -> int:
        steps, last = self._scheduler.decode_steps(most), self._completed_at
        # A request whose prompt ends with this token, or that skipped a step, has a different interval.
        return steps if steps and all(request.last_token_at == last for request in self._scheduler.running) else 0

    def decode(self, steps: int, now: float) -> float:
        self._completed_at = now
        return self._scheduler.decode(steps, now)

    def schedule(self, now: float) -> Iteration:
        batch = self._batch = self._scheduler.schedule(now)
        self._before = [(share.request, share.request.last_token_at) for share in batch.shares]
        tokens, reads, prefill, pairs = 0, 0, 0, 0.0
        for share in batch.shares:
            tokens += share.count
            reads += share.context + share.count
            pairs += share.count * (share.context + (share.count + 1) / 2)
            prefill += share.count if share.count > 1 else 0
        return Iteration(len(batch.shares), tokens, reads, pairs, prefill, batch.preempted)

    def complete(self, now: float) -> tuple[int, list[tuple[float, int]]]:
        self._completed_at = now
        advanced = self._scheduler.complete(self._batch, now)
        intervals = [
            (now - last, 1) for request, last in self._before if last is not None and request.last_token_at == now
        ]
        return len(advanced), intervals


_Engine = CountedEngine | _ScheduledEngine


class _Replay:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        limits: EngineLimits,
        engine: _Engine,
        cost: StepCost,
        noise: StepNoise,
        since: float,
        until: float,
    ) -> None:
        self._engine, self._since, self._until = engine, since, until
        self._cost = replace(cost, graphs=limits.graphs)
        self._decode_noise = _Slowness(noise.decode, noise)
        self._prefill_noise = _Slowness(noise.prefill, noise)
        self._requests = [
            Request(
                "", [], one.output_tokens, one.output_tokens, arrival=one.at, seed=index, sample=None,
                prompt_length=one.prompt_tokens, hashes=list(one.prefix) if limits.prefix_caching else [],
            )
            for index, one in enumerate(arrivals)
        ]  # fmt: skip
        self._queue = deque(self._requests)
        self._refused: set[int] = set()
        self._now = self._requests[0].arrival if self._requests else 0.0
        self._ahead = limits.ahead
        self._scheduled = self._now
        """Requests that arrive until then can be in the next step."""
        self._intervals: list[tuple[float, int]] = []
        self._batches: dict[int, float] = {}
        self._steps = self._prefill = self._preempted = 0
        self._tokens = 0
        self._busy = self._waiting = self._usage = 0.0

    def run(self) -> Replayed:
        engine = self._engine
        while True:
            self._admit()
            if not engine.running and not engine.waiting:
                if not self._queue:
                    break
                self._now = self._scheduled = max(self._now, self._queue[0].arrival)
                continue
            if steps := engine.decode_steps(_MOST_STEPS_TOGETHER):
                self._decode(steps)
            else:
                self._step()
        return Replayed(
            requests=tuple([self._outcome(request) for request in self._requests]),
            intervals=tuple(self._intervals),
            steps=self._steps,
            seconds=self._now - self._requests[0].arrival if self._requests else 0.0,
            tokens=self._tokens,
            busy=self._busy,
            waiting=self._waiting,
            kv_usage=self._usage,
            batches=self._batches,
            prefill_tokens=self._prefill,
            preemptions=self._preempted,
        )

    def _admit(self) -> None:
        """Queue the requests that arrived in time for the next step."""
        while self._queue and self._queue[0].arrival <= self._scheduled:
            request = self._queue.popleft()
            try:
                self._engine.add(request)
            except ValueError:
                self._refused.add(request.seed)

    def _decode(self, steps: int) -> None:
        """Run at most ``steps`` iterations of one token for each running request, until an arrival may join them."""
        engine, waiting = self._engine, self._engine.waiting
        count, full = engine.running, engine.full
        reads = float(engine.context + count)
        usage, began = engine.usage, self._now
        noise, since, until = self._decode_noise, self._since, self._until
        now, scheduled, counted, busy, done = began, began, 0, 0.0, 0
        due = self._queue[0].arrival if self._queue else math.inf
        for took in islice(self._cost.decode_seconds(count, reads), steps):
            if noise.any:
                took = noise.slowed(took, now)
            counts = since <= now < until
            scheduled = now if self._ahead else now + took
            now += took
            done += 1
            came = due <= scheduled
            if came:
                self._now, self._scheduled = now, scheduled
                self._admit()
                due = self._queue[0].arrival if self._queue else math.inf
            if counts:
                counted += 1
                busy += took
                self._waiting += took * len(waiting)
                self._intervals.append((took, count))
            if came and not full:
                break
        self._now = now
        self._scheduled = scheduled
        self._steps += done
        if counted:
            self._tokens += counted * count
            self._busy += busy
            self._batches[count] = self._batches.get(count, 0.0) + busy
        usage_then = engine.decode(done, now)
        self._use(usage, usage_then, began)

    def _step(self) -> None:
        engine, began = self._engine, self._now
        work = engine.schedule(began)
        took = self._cost.seconds(work.sequences, work.tokens, float(work.reads), work.pairs)
        usage = engine.usage
        self._prefill = max(self._prefill, work.prefill)
        took = (self._prefill_noise if work.prefill else self._decode_noise).slowed(took, began)
        self._now += took
        self._scheduled = began if self._ahead else self._now
        self._steps += 1
        advanced, intervals = engine.complete(self._now)
        self._admit()
        if self._since <= began < self._until:
            self._tokens += advanced
            self._busy += took
            # Requests that arrived meanwhile wait at its end, as in vLLM's statistics.
            self._waiting += took * len(engine.waiting)
            self._batches[work.sequences] = self._batches.get(work.sequences, 0.0) + took
            self._preempted += work.preempted
            self._intervals += intervals
        self._use(usage, usage, began)

    def _use(self, first: float, last: float, began: float) -> None:
        """Add the usage of the requested part of the time from ``began`` until now, assuming that it grew evenly."""
        low, high = max(began, self._since), min(self._now, self._until)
        if low < high:
            share = ((low + high) / 2 - began) / (self._now - began)
            self._usage += (first + (last - first) * share) * (high - low)

    def _outcome(self, request: Request) -> ReplayedRequest | None:
        if request.seed in self._refused or request.first_token_at is None or request.last_token_at is None:
            return None
        return ReplayedRequest(
            queue_seconds=(request.scheduled_at or request.arrival) - request.arrival,
            ttft_seconds=request.first_token_at - request.arrival,
            e2e_seconds=request.last_token_at - request.arrival,
            preemptions=request.preemptions,
            cached_tokens=request.cached or 0,
        )


class _Slowness:
    """The slowdown of one kind of step over time; times passed to it must not decrease."""

    def __init__(self, points: Sequence[tuple[float, float, float]], noise: StepNoise) -> None:
        self._points, self._span = points, noise.span
        self._place, self._begin = 0, -noise.shift
        self.any = bool(points)

    def slowed(self, took: float, now: float) -> float:
        """Seconds that a step of ``took`` seconds takes at ``now``, slowed or stalled like the last recorded one."""
        if not self.any:
            return took
        points = self._points
        if now - self._begin >= self._span > 0:
            self._begin += (now - self._begin) // self._span * self._span
            self._place = 0
        at, place = now - self._begin, self._place
        while place + 1 < len(points) and points[place + 1][0] <= at:
            place += 1
        self._place = place
        _, factor, longer = points[place]
        return min(took * factor, took * STALLED + longer)

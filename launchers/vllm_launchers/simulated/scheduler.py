"""vLLM's V1 scheduler, iteration by iteration: token budget, chunked prefill, prefix cache, preemption by recompute.

Pure: no clock of its own and no I/O. Times are seconds on whatever clock the caller has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_launchers.simulated.blocks import BlockPool, extend_chain
from vllm_launchers.simulated.words import output_token


class FinishReason(StrEnum):
    """Why a request ended, as in the API and in ``vllm:request_success_total``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Request:
    """A request and how far it has come. ``tokens`` grows by each generated token.

    ``output_length`` is how many tokens it will generate; it ends with ``LENGTH`` when that is ``max_tokens``.
    """

    id: str
    tokens: list[int]
    max_tokens: int
    output_length: int
    arrival: float = 0.0
    seed: int = 0
    prompt_length: int = 0
    computed: int = 0
    generated: int = 0
    cached: int | None = None
    preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    remembered: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed before the next token comes out."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of one iteration: ``count`` tokens computed behind ``context`` ones already in the cache."""

    request: Request
    count: int
    context: int


@dataclass(slots=True)
class Batch:
    """One iteration's work, and what happened while it was put together."""

    shares: list[Share] = field(default_factory=list)
    preempted: int = 0
    cache_queries: int = 0
    cache_hits: int = 0

    @property
    def token_count(self) -> int:
        """Tokens computed in this iteration."""
        return sum(share.count for share in self.shares)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the flags come to. ``max_num_batched_tokens`` is the budget of one iteration."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    chunked_prefill: bool = True


class Scheduler:
    """First come, first served over a block pool."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()

    @property
    def busy(self) -> bool:
        """Whether there is any request, running or waiting."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Put a request at the end of the queue. Raises ValueError when it could never fit."""
        length = request.prompt_length + request.output_length
        if request.prompt_length < 1 or request.output_length < 1 or length > self.limits.max_model_len:
            raise ValueError(f"request of {length} tokens does not fit in {self.limits.max_model_len}")
        if self._blocks_for(length) > self.pool.capacity:
            raise ValueError(f"request of {length} tokens needs more than the whole KV cache")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is, and free its blocks. A finished one is left alone."""
        if request.finished is not None:
            return
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._end(request, FinishReason.ABORT)

    def schedule(self, now: float) -> Batch:
        """Choose the next iteration's work: running requests first, then waiting ones while the budget lasts."""
        batch = Batch()
        budget = self._schedule_running(batch)
        if not batch.preempted:
            self._admit(batch, budget, now)
        return batch

    def complete(self, batch: Batch, now: float) -> list[Request]:
        """Account for an iteration that has run; return the requests that got a token, finished ones included."""
        advanced: list[Request] = []
        for share in batch.shares:
            request = share.request
            if request.finished is not None:
                continue  # aborted while the iteration ran
            request.computed += share.count
            self._remember(request)
            if request.remaining:
                continue
            self._emit(request, now)
            advanced.append(request)
        if any(request.finished for request in advanced):
            self.running = [request for request in self.running if request.finished is None]
        return advanced

    def _schedule_running(self, batch: Batch) -> int:
        budget = self.limits.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.remaining, budget)
            while not self._grow(request, count):
                victim = self.running.pop()
                self._preempt(victim, batch)
                if victim is request:
                    return budget
            batch.shares.append(Share(request, count, request.computed))
            budget -= count
            index += 1
        return budget

    def _admit(self, batch: Batch, budget: int, now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            reused = self._find_prefix(request)
            start = len(reused) * self.limits.block_size
            count = len(request.tokens) - start
            if count > budget:
                if not self.limits.chunked_prefill:
                    return
                count = budget
            # The whole input must fit before any of it is computed, else it would be preempted half-way.
            needed = self._blocks_for(len(request.tokens)) - len(reused)
            if needed > self.pool.free - self.pool.free_among(reused):
                return
            self.waiting.popleft()
            self.pool.share(reused)
            request.blocks = reused
            request.computed = start
            request.remembered = len(reused)
            if request.cached is None:
                request.cached = start
                batch.cache_queries += request.prompt_length
                batch.cache_hits += start
            if request.scheduled_at is None:
                request.scheduled_at = now
            self._grow(request, count)
            self.running.append(request)
            batch.shares.append(Share(request, count, start))
            budget -= count

    def _find_prefix(self, request: Request) -> list[int]:
        if not self.pool.caching:
            return []
        self._hash(request, len(request.tokens))
        # The last token is always computed: it is what the next one comes from.
        usable = (len(request.tokens) - 1) // self.limits.block_size
        return self.pool.match(request.hashes[:usable])

    def _grow(self, request: Request, count: int) -> bool:
        missing = self._blocks_for(request.computed + count) - len(request.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            request.blocks.extend(self.pool.allocate(missing))
        return True

    def _remember(self, request: Request) -> None:
        if not self.pool.caching:
            return
        full = request.computed // self.limits.block_size
        if full > request.remembered:
            self._hash(request, full * self.limits.block_size)
            for index in range(request.remembered, full):
                self.pool.remember(request.blocks[index], request.hashes[index])
            request.remembered = full

    def _hash(self, request: Request, length: int) -> None:
        size = self.limits.block_size
        hashes = request.hashes
        for index in range(len(hashes), length // size):
            parent = hashes[-1] if hashes else 0
            hashes.append(extend_chain(parent, request.tokens[index * size : (index + 1) * size]))

    def _emit(self, request: Request, now: float) -> None:
        request.tokens.append(output_token(request.seed, request.generated))
        request.generated += 1
        if request.first_token_at is None:
            request.first_token_at = now
        request.last_token_at = now
        if request.generated >= request.output_length:
            hit_limit = request.generated >= request.max_tokens
            self._end(request, FinishReason.LENGTH if hit_limit else FinishReason.STOP)

    def _preempt(self, request: Request, batch: Batch) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = 0
        request.remembered = 0
        request.preemptions += 1
        batch.preempted += 1
        self.waiting.appendleft(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        request.finished = reason
        self.pool.release(request.blocks)
        request.blocks = []

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)


def held_blocks(requests: Sequence[Request]) -> list[int]:
    """Every block that ``requests`` hold, once per holder."""
    return [block for request in requests for block in request.blocks]

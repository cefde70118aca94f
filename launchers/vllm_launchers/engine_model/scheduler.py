"""vLLM's V1 scheduler, iteration by iteration: token budget, chunked prefill, prefix cache, preemption by recompute.

Pure: no clock and no I/O. Times are seconds on the caller's clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class NoFreeBlocksError(Exception):
    """More blocks were requested than are free."""


def extend_chain(parent: int, tokens: Sequence[int]) -> int:
    """Hash a full block of ``tokens`` that follows the chain ``parent``, so that equal hashes mean equal prefixes."""
    return hash((parent, tuple(tokens)))


def any_token(seed: int, position: int) -> int:
    """A token for when no text is needed; practically unique for each ``seed`` and ``position``."""
    return hash((seed, position))


class BlockPool:
    """Blocks of one KV cache, each free, held by one request, or shared by several through a common prefix.

    ``total`` counts blocks as vLLM reports them; one of them is its null block and is never allocated. A freed block
    with a hash can still be found until it is reused. Blocks without a hash are reused first, then the least recently
    freed ones.
    """

    def __init__(self, total: int, *, caching: bool) -> None:
        if total < 2:
            raise ValueError(f"a block pool needs at least 2 blocks, got {total}")
        self.total = total
        self.capacity = total - 1
        """Number of blocks that can be allocated."""
        self.caching = caching
        self.used = 0
        """Number of blocks held by requests."""
        self._fresh = 0
        self._free: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._by_hash: dict[int, dict[int, None]] = {}
        """Requests that run at the same time can compute the same block; one copy is found until all are reused."""

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated now, including cached ones."""
        return self.capacity - self.used

    @property
    def usage(self) -> float:
        """Fraction of the pool in use, 0 to 1, like ``vllm:kv_cache_usage_perc``."""
        return self.used / self.capacity

    def match(self, hashes: Iterable[int]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``hashes``, without taking them."""
        found: list[int] = []
        if not self.caching:
            return found
        for value in hashes:
            blocks = self._by_hash.get(value)
            if blocks is None:
                break
            found.append(next(iter(blocks)))
        return found

    def free_among(self, blocks: Iterable[int]) -> int:
        """Number of free blocks among ``blocks``, which :meth:`share` would take off the free list."""
        return sum(1 for block in blocks if block not in self._references)

    def share(self, blocks: Iterable[int]) -> None:
        """Take another reference to each of ``blocks``, which :meth:`match` returned."""
        for block in blocks:
            held = self._references.get(block, 0)
            if not held:
                del self._free[block]
                self.used += 1
            self._references[block] = held + 1

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks, dropping their cached content, or raise :class:`NoFreeBlocksError` and take none."""
        if count > self.free:
            raise NoFreeBlocksError(f"{count} blocks wanted, {self.free} free")
        self.used += count
        if not self.caching:
            return [0] * count
        fresh = min(count, self.capacity - self._fresh)
        taken = list(range(self._fresh, self._fresh + fresh))
        self._fresh += fresh
        for _ in range(count - fresh):
            block, _nothing = self._free.popitem(last=False)
            self._forget(block)
            taken.append(block)
        for block in taken:
            self._references[block] = 1
        return taken

    def remember(self, blocks: Iterable[int], hashes: Iterable[int]) -> None:
        """Make held ``blocks`` findable by their chain hashes."""
        if not self.caching:
            return
        hash_of, by_hash = self._hash_of, self._by_hash
        for block, value in zip(blocks, hashes, strict=False):
            if block in hash_of:
                continue
            hash_of[block] = value
            same = by_hash.get(value)
            if same is None:
                by_hash[value] = {block: None}
            else:
                same[block] = None

    def forget(self) -> bool:
        """Empty the prefix cache; return False and do nothing while blocks are held."""
        if self.used:
            return False
        self._hash_of.clear()
        self._by_hash.clear()
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """Release one reference to each block, tails first, so that the ends of prefixes are evicted first.

        Blocks without a hash can't be found again: they are reused before all others.
        """
        if not self.caching:
            self.used -= len(blocks)
            return
        references, free, hash_of = self._references, self._free, self._hash_of
        for block in reversed(blocks):
            held = references[block]
            if held > 1:
                references[block] = held - 1
                continue
            del references[block]
            self.used -= 1
            free[block] = None
            if block not in hash_of:
                free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        value = self._hash_of.pop(block, None)
        if value is None:
            return
        del self._by_hash[value][block]
        if not self._by_hash[value]:
            del self._by_hash[value]


class FinishReason(StrEnum):
    """Why a request ended, as in the API and in ``vllm:request_success_total``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Parent:
    """Shared by the sequences of one request with ``n`` choices: their number, and how many have not ended."""

    n: int
    left: int
    most_generated: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request and its progress. ``tokens`` grows by each generated token, which is ``sample`` of ``seed`` and the
    position in the output. Without ``sample`` only lengths are known: ``prompt_length`` is given instead of tokens, and
    blocks are shared only through the first ``hashes``, if these are given.

    ``output_length`` is the number of tokens it will generate. It ends with ``LENGTH`` if that is ``max_tokens``,
    unless it is ``stopped`` there by a stop string or token. A request for several choices has one object for each,
    with a common ``parent``.
    """

    id: str
    tokens: list[int]
    max_tokens: int
    output_length: int
    arrival: float = 0.0
    seed: int = 0
    sample: Callable[[int, int], int] | None = any_token
    stopped: bool = False
    parent: Parent | None = None
    prompt_length: int = 0
    computed: int = 0
    under_way: int = 0
    """Tokens of iterations in flight, of which a pipeline may hold several."""
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
        self.prompt_length = self.prompt_length or len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of its prompt and its output so far."""
        return self.prompt_length + self.generated


class Share(msgspec.Struct, frozen=True):
    """A request's part of one iteration: ``count`` tokens computed after ``context`` cached ones.

    ``preemptions`` is how often the request had been preempted when this was scheduled: a stale share is ignored.
    """

    request: Request
    count: int
    context: int
    preemptions: int = 0


@dataclass(slots=True)
class Batch:
    """One iteration's work, and what happened when it was scheduled.

    ``cache_queries`` and ``cache_hits`` are tokens of requests that are admitted for the first time. ``resumed``
    requests had been preempted before; their tokens are ``resumed_queries`` and ``resumed_hits``, as in vLLM.
    """

    shares: list[Share] = field(default_factory=list)
    preempted: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    resumed: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0


class SchedulerLimits(msgspec.Struct, frozen=True):
    """The scheduler's settings from the flags. ``max_num_batched_tokens`` is the token budget of one iteration."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    chunked_prefill: bool = True


def refuse_unfit(request: Request, limits: SchedulerLimits, blocks: int) -> None:
    """Raise ValueError if a request could never be served with these limits and a KV cache of ``blocks`` blocks."""
    length = request.prompt_length + request.output_length
    if request.prompt_length < 1 or request.output_length < 1 or length > limits.max_model_len:
        raise ValueError(f"request of {length} tokens does not fit in {limits.max_model_len}")
    if not limits.chunked_prefill and length > limits.max_num_batched_tokens:
        raise ValueError(f"request of {length} tokens does not fit in a step of {limits.max_num_batched_tokens}")
    if -(-length // limits.block_size) > blocks:
        raise ValueError(f"request of {length} tokens needs more than the whole KV cache")


class Scheduler:
    """First come, first served over a block pool.

    ``ahead`` means that an iteration is scheduled while the previous one runs (vLLM's asynchronous scheduling), so it
    can't use the places and blocks of requests that end in that one.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, *, ahead: bool = False) -> None:
        self.limits = limits
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._leaving: list[Request] = []
        """Requests that have ended, whose places and blocks the next iteration can't use."""
        self._ahead = ahead

    @property
    def busy(self) -> bool:
        """Whether there is any request, running or waiting."""
        return bool(self.running or self.waiting)

    @property
    def full(self) -> bool:
        """Whether the next iteration has no place for another request."""
        return len(self.running) + len(self._leaving) >= self.limits.max_num_seqs

    def add(self, request: Request) -> None:
        """Append a request to the queue. Raises ValueError if it could never fit."""
        refuse_unfit(request, self.limits, self.pool.capacity)
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is, and free its blocks. A finished one is left alone."""
        if request.finished is not None:
            return
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.finished = FinishReason.ABORT
        self._release(request)

    def schedule(self, now: float) -> Batch:
        """Choose the next iteration's work: running requests first, then waiting ones while the budget lasts."""
        batch = Batch()
        budget = self._schedule_running(batch)
        if not batch.preempted:
            self._admit(batch, budget, now)
        self._release_ended()
        return batch

    def complete(self, batch: Batch, now: float) -> list[Request]:
        """Account for a completed iteration; return the requests that got a token, including finished ones."""
        advanced: list[Request] = []
        any_ended = False
        for share in batch.shares:
            request, count = share.request, share.count
            if request.finished is not None or share.preemptions != request.preemptions:
                continue  # aborted, or preempted by an iteration behind this one
            request.computed += count
            request.under_way -= count
            if request.computed < request.prompt_length + request.generated:
                continue
            if request.sample is not None:
                request.tokens.append(request.sample(request.seed, request.generated))
            request.generated += 1
            if request.first_token_at is None:
                request.first_token_at = now
            request.last_token_at = now
            if request.generated >= request.output_length:
                hit_limit = request.generated >= request.max_tokens and not request.stopped
                request.finished = FinishReason.LENGTH if hit_limit else FinishReason.STOP
                any_ended = True
            advanced.append(request)
        if any_ended:
            self._leave()
        return advanced

    def decode_steps(self, most: int) -> int:
        """Number of next iterations, up to ``most``, that consist of one token for each running request and nothing
        else.

        The last of them may end requests. 0 if the next iteration admits, preempts, or computes prompts, or if requests
        have ended that it can't replace.
        """
        running, count = self.running, len(self.running)
        if not running or self._leaving or count > self.limits.max_num_batched_tokens:
            return 0
        if self.waiting and not self.full:
            first = self.waiting[0]
            reused = self._find_prefix(first)
            if self._fits(first, reused):
                return 0
            most = self._before_shared(first, len(reused), most)
        for request in running:
            if request.prompt_length + request.generated - request.computed != 1 or request.under_way:
                return 0
            if request.output_length - request.generated < most:
                most = request.output_length - request.generated
        size, free = self.limits.block_size, self.pool.free
        if count * -(-most // size) <= free:
            return most  # none needs more than that in addition to its blocks
        room = free + sum([len(request.blocks) for request in running])
        while most and sum([-(-(request.computed + most) // size) for request in running]) > room:
            most //= 2
        return most

    def decode(self, steps: int, now: float) -> float:
        """Account for ``steps`` iterations allowed by `decode_steps`; return KV cache usage before requests end."""
        size, caching = self.limits.block_size, self.pool.caching
        any_ended = False
        filled: list[Request] = []
        for request in self.running:
            tokens = request.computed + steps
            if tokens > len(request.blocks) * size:
                self._grow(request, steps)
            request.computed = tokens
            if caching and tokens // size > request.remembered:
                filled.append(request)
            request.generated += steps
            request.last_token_at = now
            if request.generated >= request.output_length:
                request.finished = FinishReason.LENGTH
                any_ended = True
        if filled:
            self._remember_in_order(filled)
        usage = self.pool.usage
        if any_ended:
            self._leave()
        return usage

    def _before_shared(self, waiting: Request, found: int, most: int) -> int:
        """Number of next iterations, up to ``most``, before one completes the block that would extend the ``found``
        cached blocks of a waiting request, so that it might fit."""
        size = self.limits.block_size
        if found < min(len(waiting.hashes), (waiting.length - 1) // size):
            wanted = waiting.hashes[found]
            for request in self.running:
                if len(request.hashes) > found and request.hashes[found] == wanted:
                    most = min(most, max(0, (found + 1) * size - request.computed - 1))
        return most

    def _schedule_running(self, batch: Batch) -> int:
        budget, size, caching = self.limits.max_num_batched_tokens, self.limits.block_size, self.pool.caching
        running, shares = self.running, batch.shares
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            context = request.computed + request.under_way
            count = request.prompt_length + request.generated - context
            if count > budget:
                count = budget
            if not count:
                index += 1  # its token is still in the pipeline
                continue
            tokens = context + count
            if tokens > len(request.blocks) * size:
                while not self._grow(request, count):
                    victim = running.pop()
                    self._preempt(victim, batch)
                    if victim is request:
                        return budget
            shares.append(Share(request, count, context, request.preemptions))
            request.under_way += count
            if caching and tokens // size > request.remembered:
                self._remember(request)
            budget -= count
            index += 1
        return budget

    def _admit(self, batch: Batch, budget: int, now: float) -> None:
        while self.waiting and budget > 0 and not self.full:
            request = self.waiting[0]
            reused = self._find_prefix(request)
            start = len(reused) * self.limits.block_size
            count = request.length - start
            if count > budget:
                if not self.limits.chunked_prefill:
                    return
                count = budget
            # The whole input must fit before any of it is computed; otherwise it would be preempted halfway.
            if not self._fits(request, reused):
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
            elif self.pool.caching:
                batch.resumed += 1
                batch.resumed_queries += request.length
                batch.resumed_hits += start
            if request.scheduled_at is None:
                request.scheduled_at = now
            self._grow(request, count)
            self.running.append(request)
            batch.shares.append(Share(request, count, start, request.preemptions))
            request.under_way = count
            self._remember(request)
            budget -= count

    def _fits(self, request: Request, reused: Sequence[int]) -> bool:
        """Whether the blocks for its tokens so far are free, including ``reused``."""
        needed = self._blocks_for(request.length) - len(reused)
        return needed <= self.pool.free - self.pool.free_among(reused)

    def _find_prefix(self, request: Request) -> list[int]:
        if not self.pool.caching:
            return []
        self._hash(request, request.length)
        # The last token is always computed: the next one is sampled from it.
        usable = (request.length - 1) // self.limits.block_size
        return self.pool.match(request.hashes[:usable])

    def _grow(self, request: Request, count: int) -> bool:
        tokens, size, pool = request.computed + request.under_way + count, self.limits.block_size, self.pool
        missing = -(-tokens // size) - len(request.blocks)
        if missing <= 0:
            return True
        if missing > pool.capacity - pool.used:
            return False
        request.blocks += pool.allocate(missing)
        return True

    def _remember(self, request: Request) -> None:
        """Make its full blocks findable as soon as they are scheduled, also for requests of the same iteration."""
        if not self.pool.caching:
            return
        size, since = self.limits.block_size, request.remembered
        full = (request.computed + request.under_way) // size
        if full > since:
            self._hash(request, full * size)
            self.pool.remember(request.blocks[since:full], request.hashes[since:full])
            request.remembered = full

    def _remember_in_order(self, requests: Sequence[Request]) -> None:
        """Make blocks that were filled in several iterations findable in the order in which they were full.

        If requests compute the same block, the first one is found.
        """
        if len(requests) == 1:
            self._remember(requests[0])
            return
        size, blocks = self.limits.block_size, list[tuple[int, int, int, int]]()
        for order, request in enumerate(requests):
            since, full = request.remembered, request.computed // size
            self._hash(request, full * size)
            for index in range(since, full):
                left = request.computed - (index + 1) * size  # tokens computed since it was full
                blocks.append((-left, order, request.blocks[index], request.hashes[index]))
            request.remembered = full
        blocks.sort()
        self.pool.remember([block for _, _, block, _ in blocks], [value for _, _, _, value in blocks])

    def _hash(self, request: Request, length: int) -> None:
        size, hashes = self.limits.block_size, request.hashes
        parent = hashes[-1] if hashes else 0
        for index in range(len(hashes), length // size):
            if request.sample is None:
                parent = hash((parent, request.seed, index))
            else:
                parent = extend_chain(parent, request.tokens[index * size : (index + 1) * size])
            hashes.append(parent)

    def _preempt(self, request: Request, batch: Batch) -> None:
        self._release(request)
        request.computed = request.under_way = 0
        request.remembered = 0
        request.preemptions += 1
        batch.preempted += 1
        self.waiting.appendleft(request)

    def _leave(self) -> None:
        """Take ended requests out of the batch. If none is left, no iteration was scheduled ahead."""
        ended = [request for request in self.running if request.finished is not None]
        if not ended:
            return
        self.running = [request for request in self.running if request.finished is None]
        self._leaving += ended
        if not self._ahead or not self.running:
            self._release_ended()

    def _release_ended(self) -> None:
        """Release ended requests after an iteration was scheduled: the one after it can use their places and blocks."""
        for request in self._leaving:
            self._release(request)
        self._leaving = []

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

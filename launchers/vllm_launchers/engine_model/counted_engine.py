"""vLLM's V1 scheduler while no request is preempted: decoding requests and KV cache blocks are only counted.

Every running request whose prompt is computed then gets one token per iteration. The iteration in which it ends is
known from its first token on, so unlike in `scheduler`, the work per iteration does not grow with the number of running
requests. Blocks are distinguished only if requests share them. Pure.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from vllm_launchers.engine_model.scheduler import Request, SchedulerLimits, refuse_unfit


class WouldPreemptError(Exception):
    """The next iteration would preempt a request, or would not contain all running ones."""


class Iteration(NamedTuple):
    """One iteration's work, counted as in `roofline.Work`. ``prefill`` is the number of its prompt tokens, of requests
    with more than one token in it; ``preempted`` is a number of requests."""

    sequences: int
    tokens: int
    reads: int
    pairs: float
    prefill: int
    preempted: int = 0


class CountedEngine:
    """First come, first served over a pool of counted blocks; the counterpart of `scheduler.Scheduler`.

    ``total`` counts blocks as vLLM reports them, including its null block. Requests are known by their lengths, and by
    the ``hashes`` of their first blocks, of prompt and output, which others may share.
    """

    def __init__(self, limits: SchedulerLimits, total: int, *, caching: bool, ahead: bool = False) -> None:
        self.waiting: deque[Request] = deque()
        self._limits, self._ahead = limits, ahead
        self._size = limits.block_size
        self._pool = _Blocks(total, caching=caching)
        self._iteration = 0
        """Number of completed iterations."""
        self._ends: list[tuple[int, int, Request]] = []
        """Heap of decoding requests: the iteration of the last token, the order of admission, and the request."""
        self._places = [0] * self._size
        """Number of decoding requests by (computed tokens - completed iterations) modulo the block size."""
        self.context = 0
        """Number of tokens that the decoding requests have computed."""
        self._prompt: Request | None = None
        """The request whose prompt is partly computed: the last one admitted."""
        self._batch: list[tuple[Request, int]] = []
        """The prompts in the current iteration, each with the number of tokens computed in it."""
        self._unnamed: list[tuple[int, Request]] = []
        """Requests that decode blocks shared with others, each with the iteration of its last token."""
        self._began = 0.0
        self._admitted = 0
        self._leaving: list[Request] = []
        """Requests that have ended, whose places and blocks the next iteration can't use."""

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._ends) + (self._prompt is not None)

    @property
    def full(self) -> bool:
        """Whether the next iteration has no place for another request."""
        return self.running + len(self._leaving) >= self._limits.max_num_seqs

    @property
    def usage(self) -> float:
        """Fraction of the KV cache in use, 0 to 1."""
        return self._pool.used / self._pool.capacity

    def add(self, request: Request) -> None:
        """Append a request to the queue. Raises ValueError if it could never fit."""
        refuse_unfit(request, self._limits, self._pool.capacity)
        self.waiting.append(request)

    def decode_steps(self, most: int) -> int:
        """Number of next iterations, up to ``most``, that consist of one token for each running request and nothing
        else.

        The last of them may end requests. 0 if the next iteration admits or computes prompts, or if requests have ended
        that it can't replace.
        """
        count = len(self._ends)
        if not count or self._prompt or self._leaving or count > self._limits.max_num_batched_tokens:
            return 0
        most = self._before_admission(min(most, self._ends[0][0] - self._iteration))
        free = self._pool.free
        if count * -(-most // self._size) > free:
            while most and self._growth(most) > free:
                most //= 2
        return most

    def decode(self, steps: int, now: float) -> float:
        """Account for ``steps`` iterations allowed by `decode_steps`; return KV cache usage before requests end."""
        self._pool.take(self._growth(steps))
        self._iteration += steps
        self.context += steps * len(self._ends)
        if self._unnamed:
            self._name_decoded(self._iteration)
        usage = self.usage
        self._end(now)
        return usage

    def schedule(self, now: float) -> Iteration:
        """Choose the next iteration's work: running requests first, then waiting ones while the budget lasts.

        Raises:
            WouldPreemptError: there are too few blocks, or tokens per iteration, for all running requests.
        """
        self._began = now
        decoding = len(self._ends)
        budget = self._limits.max_num_batched_tokens - decoding
        grown = self._growth(1)
        if budget < 0 or grown > self._pool.free:
            raise WouldPreemptError
        self._pool.take(grown)
        if self._unnamed:
            self._name_decoded(self._iteration + 1)
        batch = self._batch = []
        if (request := self._prompt) is not None and budget > 0:
            count = min(budget, request.prompt_length - request.computed)
            if self._blocks_for(request.computed + count) - self._blocks_for(request.computed) > self._pool.free:
                raise WouldPreemptError
            self._compute(request, count)
            budget -= count
        self._admit(budget, now)
        self._release_ended()
        tokens, reads, pairs, prefill = decoding, self.context + decoding, float(self.context + decoding), 0
        for request, count in batch:
            tokens += count
            reads += request.computed + count
            pairs += count * (request.computed + (count + 1) / 2)
            prefill += count if count > 1 else 0
        return Iteration(decoding + len(batch), tokens, reads, pairs, prefill)

    def complete(self, now: float) -> tuple[int, list[tuple[float, int]]]:
        """Account for the scheduled iteration; return its number of tokens, and decode intervals with counts."""
        decoding = len(self._ends)
        self._iteration += 1
        self.context += decoding
        advanced, at_once = decoding, []
        for request, count in self._batch:
            request.computed += count
            if request.computed < request.prompt_length:
                self._prompt = request
                continue
            if request is self._prompt:
                self._prompt = None
            advanced += 1
            request.first_token_at = now
            if request.output_length == 1:
                at_once.append(request)
                continue
            last = self._iteration + request.output_length - 1
            heapq.heappush(self._ends, (last, self._admitted, request))
            self._admitted += 1
            self._places[(request.prompt_length - self._iteration) % self._size] += 1
            self.context += request.prompt_length
            if len(request.blocks) < len(request.hashes):
                self._unnamed.append((last, request))
        self._end(now, at_once)
        return advanced, [(now - self._began, decoding)] if decoding else []

    def _end(self, now: float, at_once: Sequence[Request] = ()) -> None:
        """Take out the requests whose last token came ``now``; ``at_once`` are those that never decoded."""
        ended: list[Request] = []
        while self._ends and self._ends[0][0] == self._iteration:
            _, _, request = heapq.heappop(self._ends)
            request.computed = request.prompt_length + request.output_length - 1
            self.context -= request.computed
            self._places[(request.computed - self._iteration) % self._size] -= 1
            ended.append(request)
        ended += at_once
        for request in ended:
            request.last_token_at = now
        self._leaving += ended
        # If none is left, no iteration was scheduled ahead.
        if ended and (not self._ahead or not self.running):
            self._release_ended()

    def _release_ended(self) -> None:
        """Release ended requests after an iteration was scheduled: the one after it can use their places and blocks."""
        for request in self._leaving:
            self._pool.release(request.blocks, *divmod(request.computed, self._size))
            request.blocks = []
        self._leaving = []

    def _before_admission(self, most: int) -> int:
        """Number of next iterations, up to ``most``, before one might admit a request although none has ended."""
        if not self.waiting or self.full:
            return most
        request = self.waiting[0]
        if self._blocks_for(request.prompt_length) <= self._pool.free:
            return 0  # regardless of how much of it is cached
        reused = self._find_prefix(request)
        return 0 if self._fits(request, reused) else self._before_shared(request, len(reused), most)

    def _before_shared(self, waiting: Request, found: int, most: int) -> int:
        """Number of next iterations, up to ``most``, before one completes the block that would extend the ``found``
        cached blocks of a waiting request, so that it might fit."""
        if found < min(len(waiting.hashes), (waiting.prompt_length - 1) // self._size):
            for last, request in self._unnamed:
                if len(request.hashes) > found and request.hashes[found] == waiting.hashes[found]:
                    computed = request.prompt_length + request.output_length - 1 - (last - self._iteration)
                    most = min(most, max(0, (found + 1) * self._size - computed - 1))
        return most

    def _admit(self, budget: int, now: float) -> None:
        places = self._limits.max_num_seqs - self.running - len(self._leaving)
        while self.waiting and budget > 0 and places > 0:
            request = self.waiting[0]
            reused = self._find_prefix(request)
            start = len(reused) * self._size
            count = request.prompt_length - start
            if count > budget:
                if not self._limits.chunked_prefill:
                    return
                count = budget
            # The whole prompt must fit before any of it is computed; otherwise it would be preempted halfway.
            if not self._fits(request, reused):
                return
            self.waiting.popleft()
            self._pool.share(reused)
            request.blocks = reused
            request.computed = request.cached = start
            request.scheduled_at = now
            self._compute(request, count)
            budget -= count
            places -= 1

    def _compute(self, request: Request, count: int) -> None:
        """Take the blocks for ``count`` more prompt tokens; blocks that others may share can be found at once."""
        self._batch.append((request, count))
        tokens = request.computed + count
        self._pool.take(self._blocks_for(tokens) - self._blocks_for(request.computed))
        if len(request.blocks) < len(request.hashes):
            self._pool.name(request.blocks, request.hashes[: tokens // self._size])

    def _name_decoded(self, iteration: int) -> None:
        """Make shared blocks of generated tokens findable if they are full after ``iteration``."""
        full = []
        for order, (last, request) in enumerate(self._unnamed):
            computed = request.prompt_length + request.output_length - 1 - (last - iteration)
            for count in range(len(request.blocks) + 1, min(computed // self._size, len(request.hashes)) + 1):
                full.append((count * self._size - computed, order, count, request))
        full.sort()  # by when they were full: if requests compute the same block, the first one is found
        for _, _, count, request in full:
            self._pool.name(request.blocks, request.hashes[:count])
        self._unnamed = [
            (last, request)
            for last, request in self._unnamed
            if len(request.blocks) < len(request.hashes) and last > iteration
        ]

    def _fits(self, request: Request, reused: Sequence[int]) -> bool:
        """Whether the blocks for its prompt are free, including ``reused``."""
        needed = self._blocks_for(request.prompt_length) - len(reused)
        return needed <= self._pool.free - self._pool.free_among(reused)

    def _find_prefix(self, request: Request) -> list[int]:
        # The last token is always computed: the next one is sampled from it.
        usable = (request.prompt_length - 1) // self._size
        return self._pool.match(request.hashes[:usable]) if request.hashes else []

    def _growth(self, steps: int) -> int:
        """Number of additional blocks that ``steps`` iterations need."""
        size, done = self._size, self._iteration
        grown = 0
        for place, count in enumerate(self._places):
            if count:
                held = (place + done) % size
                grown += count * (-(-(held + steps) // size) - (held > 0))
        return grown

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._size)


class _Blocks:
    """Blocks of one KV cache, like `scheduler.BlockPool`, but only named blocks are distinguished.

    A named block can be found by its hash, held or free, until it is reused. Blocks that were freed first are reused
    first; blocks that are not full can't be found and are reused before those.
    """

    def __init__(self, total: int, *, caching: bool) -> None:
        if total < 2:
            raise ValueError(f"a block pool needs at least 2 blocks, got {total}")
        self.capacity = total - 1
        self._caching = caching
        self.used = 0
        self._fresh = self.capacity
        self._not_full = 0
        self._free: OrderedDict[int, int] = OrderedDict()
        """Numbers of free blocks by name, or by a negative number for unnamed ones, in the order of reuse."""
        self._names = self._numbers = 0
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._found: dict[int, int] = {}
        """By hash, the name of the first block that has it."""
        self._more: dict[int, list[int]] = {}
        """Names of further blocks with that hash: requests that run at the same time can compute the same block."""

    @property
    def free(self) -> int:
        """Number of blocks that can be taken now, including cached ones."""
        return self.capacity - self.used

    def match(self, hashes: Sequence[int]) -> list[int]:
        """The names of the longest cached prefix of ``hashes``."""
        found: list[int] = []
        for name in map(self._found.get, hashes):
            if name is None:
                break
            found.append(name)
        return found

    def free_among(self, names: Sequence[int]) -> int:
        """Number of free blocks among ``names``."""
        return sum([name not in self._references for name in names]) if names else 0

    def share(self, names: Sequence[int]) -> None:
        """Take another reference to each name, which `match` returned."""
        for name in names:
            held = self._references.get(name, 0)
            if not held:
                del self._free[name]
                self.used += 1
            self._references[name] = held + 1

    def take(self, count: int) -> None:
        """Hold ``count`` more blocks, at most as many as are free. Named ones among them are forgotten."""
        self.used += count
        if not self._caching:
            return
        taken = min(count, self._fresh)
        self._fresh -= taken
        count -= taken
        taken = min(count, self._not_full)
        self._not_full -= taken
        count -= taken
        while count:
            name, blocks = self._free.popitem(last=False)
            if blocks > count:
                self._free[name] = blocks - count
                self._free.move_to_end(name, last=False)
                return
            count -= blocks
            if name >= 0:
                self._forget(name)

    def name(self, names: list[int], hashes: Sequence[int]) -> None:
        """Name held blocks of a request: extend ``names`` to one for each of ``hashes``."""
        for value in hashes[len(names) :]:
            name = self._names
            self._names += 1
            names.append(name)
            self._references[name] = 1
            self._hash_of[name] = value
            if self._found.setdefault(value, name) != name:
                self._more.setdefault(value, []).append(name)

    def release(self, names: Sequence[int], full: int, rest: int) -> None:
        """Release a request's ``full`` full blocks, the first ones named, and one more if there are ``rest`` tokens."""
        others = full - len(names)
        self.used -= others + (rest > 0)
        if not self._caching:
            return
        self._not_full += rest > 0
        if others:
            self._numbers -= 1
            self._free[self._numbers] = others
        for name in reversed(names):
            held = self._references[name]
            if held > 1:
                self._references[name] = held - 1
                continue
            del self._references[name]
            self.used -= 1
            self._free[name] = 1

    def _forget(self, name: int) -> None:
        value = self._hash_of.pop(name)
        more = self._more.get(value, [])
        if self._found[value] != name:
            more.remove(name)
        elif more:
            self._found[value] = more.pop(0)
        else:
            del self._found[value]
        if not more:
            self._more.pop(value, None)

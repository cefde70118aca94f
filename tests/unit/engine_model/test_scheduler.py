from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.engine_model.scheduler import Batch, BlockPool, FinishReason, Request, Scheduler, SchedulerLimits


def scheduler(
    blocks: int = 65, *, seqs: int = 8, budget: int = 64, length: int = 256, caching: bool = True, chunked: bool = True
) -> Scheduler:
    return Scheduler(SchedulerLimits(seqs, budget, length, 4, chunked), BlockPool(blocks, caching=caching))


def request(name: str, prompt: int, output: int, *, start: int = 0) -> Request:
    return Request(name, list(range(start, start + prompt)), output, output)


def token_count(batch: Batch) -> int:
    return sum(share.count for share in batch.shares)


def run_to_the_end(target: Scheduler, limit: int = 20_000) -> list[Request]:
    done: list[Request] = []
    now = 0.0
    while target.busy:
        batch = target.schedule(now)
        now += 1
        assert now < limit, "it never ends"
        done += [item for item in target.complete(batch, now) if item.finished]
    return done


def test_prompt_longer_than_the_budget_is_chunked() -> None:
    target = scheduler(budget=10)
    target.add(request("a", 25, 1))
    counts = []
    while target.busy:
        batch = target.schedule(0.0)
        counts.append(token_count(batch))
        target.complete(batch, 0.0)
    assert counts == [10, 10, 5]


def test_without_chunking_a_prompt_waits_for_a_whole_budget() -> None:
    target = scheduler(budget=32, chunked=False)
    target.add(request("a", 20, 2))
    target.add(request("b", 20, 2, start=100))
    first = target.schedule(0.0)
    assert [share.request.id for share in first.shares] == ["a"]
    target.complete(first, 0.0)
    second = target.schedule(0.0)
    assert [(share.request.id, share.count) for share in second.shares] == [("a", 1), ("b", 20)]


def test_running_requests_come_before_waiting_ones_in_order() -> None:
    target = scheduler(seqs=2)
    for name in "abc":
        target.add(request(name, 4, 3, start=ord(name) * 100))
    target.complete(target.schedule(0.0), 0.0)
    assert [item.id for item in target.running] == ["a", "b"]
    assert [item.id for item in target.waiting] == ["c"]


def test_last_admitted_request_is_preempted_and_resumed_first() -> None:
    target = scheduler(blocks=9, caching=False)
    target.add(request("old", 15, 12))
    target.add(request("new", 15, 12, start=100))
    preempted = 0
    while not preempted:
        batch = target.schedule(0.0)
        preempted = batch.preempted
        target.complete(batch, 0.0)
    assert [item.id for item in target.running] == ["old"]
    assert target.waiting[0].id == "new"
    assert target.waiting[0].preemptions == 1
    assert target.waiting[0].computed == 0
    generated = target.waiting[0].generated
    assert generated > 0, "generated tokens are kept"
    done = run_to_the_end(target)
    assert {item.id: item.generated for item in done} == {"old": 12, "new": 12}


def test_shared_prefix_is_not_computed_again() -> None:
    target = scheduler()
    target.add(request("a", 20, 1))
    run_to_the_end(target)
    again = request("b", 20, 1)
    target.add(again)
    batch = target.schedule(0.0)
    assert (batch.cache_queries, batch.cache_hits) == (20, 16), "the last token is always computed"
    assert token_count(batch) == 4
    assert again.cached == 16


def test_generated_tokens_are_cached() -> None:
    target = scheduler()
    first = request("a", 10, 10)
    target.add(first)
    run_to_the_end(target)
    target.add(Request("b", [*first.tokens, 1, 2, 3], 1, 1))
    assert target.schedule(0.0).cache_hits == 16


def test_aborted_request_frees_its_blocks_and_ends() -> None:
    target = scheduler()
    running, waiting = request("a", 20, 50), request("b", 20, 50, start=100)
    target.limits = SchedulerLimits(1, 64, 256, 4)
    target.add(running)
    target.add(waiting)
    batch = target.schedule(0.0)
    target.abort(waiting)
    target.abort(running)
    assert target.complete(batch, 0.0) == []
    assert running.finished is waiting.finished is FinishReason.ABORT
    assert target.pool.used == 0
    assert not target.busy


def test_request_that_could_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        scheduler(length=16).add(request("a", 10, 10))
    with pytest.raises(ValueError, match="whole KV cache"):
        scheduler(blocks=4).add(request("a", 10, 10))


SHAPES = st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(0, 3), st.integers(0, 30))


@settings(max_examples=80, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=25),
    blocks=st.integers(27, 80),
    seqs=st.integers(1, 10),
    budget=st.integers(10, 120),
    caching=st.booleans(),
    chunked=st.booleans(),
    aborts=st.sets(st.integers(0, 24), max_size=5),
)
def test_every_request_finishes_within_budget_without_block_leaks(
    shapes: list[tuple[int, int, int, int]],
    blocks: int,
    seqs: int,
    budget: int,
    caching: bool,
    chunked: bool,
    aborts: set[int],
) -> None:
    budget = budget if chunked else max(budget, 100)
    target = scheduler(blocks, seqs=seqs, budget=max(budget, seqs), length=100, caching=caching, chunked=chunked)
    waiting = [
        (arrival, request(str(index), prompt, output, start=family * 1000))
        for index, (prompt, output, family, arrival) in enumerate(shapes)
    ]
    everyone = [item for _arrival, item in waiting]
    step = 0
    while target.busy or waiting:
        for arrival, item in list(waiting):
            if arrival <= step:
                target.add(item)
                waiting.remove((arrival, item))
        if step in aborts and target.running:
            target.abort(target.running[-1])
        batch = target.schedule(float(step))
        assert token_count(batch) <= target.limits.max_num_batched_tokens
        assert len(target.running) <= seqs
        check_blocks(target, caching)
        target.complete(batch, float(step))
        check_blocks(target, caching)
        step += 1
        assert step < 20_000, "it never ends"
    assert all(item.finished for item in everyone)
    assert all(item.generated == item.output_length for item in everyone if item.finished is not FinishReason.ABORT)
    assert target.pool.used == 0


def check_blocks(target: Scheduler, caching: bool) -> None:
    assert all(not item.blocks for item in target.waiting)
    holders = Counter(block for request in target.running for block in request.blocks)
    if not caching:  # they are only counted
        assert target.pool.used == holders.total()
        return
    assert target.pool.used == len(holders)
    for block, count in holders.items():
        assert target.pool._references[block] == count
    # A block in two places holds the same prefix in both.
    size = target.limits.block_size
    seen: dict[int, tuple[int, ...]] = {}
    for item in target.running:
        for index, block in enumerate(item.blocks):
            if holders[block] > 1:
                prefix = tuple(item.tokens[: (index + 1) * size])
                assert seen.setdefault(block, prefix) == prefix

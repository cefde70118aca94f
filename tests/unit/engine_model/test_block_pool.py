from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_launchers.engine_model.scheduler import BlockPool, NoFreeBlocksError, extend_chain


def test_one_block_is_the_null_block() -> None:
    pool = BlockPool(40, caching=True)
    pool.allocate(35)
    assert pool.capacity == 39
    assert pool.usage == 35 / 39


def test_too_many_blocks_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(5, caching=True)
    with pytest.raises(NoFreeBlocksError):
        pool.allocate(5)
    assert pool.free == 4


def test_equal_blocks_with_different_prefixes_have_different_chains() -> None:
    first, other = extend_chain(0, [1, 2]), extend_chain(0, [3, 4])
    assert extend_chain(first, [5, 6]) != extend_chain(other, [5, 6])
    assert extend_chain(first, [5, 6]) == extend_chain(extend_chain(0, [1, 2]), [5, 6])


def test_freed_block_is_found_until_reused_oldest_first() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.allocate(3)
    pool.remember(blocks, (11, 22, 33))
    pool.release(blocks)
    assert pool.match([11, 22, 33]) == blocks
    taken = pool.allocate(1)
    assert taken == [blocks[2]], "the end of a prefix is evicted before its beginning"
    assert pool.match([11, 22, 33]) == blocks[:2]


def test_shared_block_outlives_its_first_holder() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.allocate(1)
    pool.remember(blocks, [7])
    pool.share(pool.match([7]))
    pool.release(blocks)
    assert pool._references[blocks[0]] == 1
    assert pool.used == 1


def test_nothing_is_found_without_caching() -> None:
    pool = BlockPool(4, caching=False)
    blocks = pool.allocate(1)
    pool.remember(blocks, [7])
    assert pool.match([7]) == []


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(2, 24),
    steps=st.lists(st.tuples(st.sampled_from(["take", "give", "share"]), st.integers(0, 6)), max_size=60),
)
def test_blocks_never_leak_or_get_allocated_twice(total: int, steps: list[tuple[str, int]]) -> None:
    pool = BlockPool(total, caching=True)
    holders: list[list[int]] = []
    known: list[int] = []
    for what, number in steps:
        if what == "take" and number <= pool.free:
            blocks = pool.allocate(number)
            held = {block for holder in holders for block in holder}
            assert not held & set(blocks)
            made = range(len(known) + 1, len(known) + 1 + number)
            known += made
            pool.remember(blocks, made)
            holders.append(blocks)
        elif what == "give" and holders:
            pool.release(holders.pop(number % len(holders)))
        elif what == "share" and known:
            found = pool.match([known[number % len(known)]])
            pool.share(found)
            holders.append(found)
        held = {block for holder in holders for block in holder}
        assert pool.used == len(held)
        assert pool.free == pool.capacity - len(held)
        for block in held:
            assert pool._references[block] == sum(holder.count(block) for holder in holders)
    for holder in holders:
        pool.release(holder)
    assert pool.free == pool.capacity
    assert len(set(pool.allocate(pool.capacity))) == pool.capacity


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4, caching=True)
    blocks = pool.allocate(3)
    pool.remember(blocks[:1], [11])
    pool.release(blocks[:1])
    pool.release(blocks[1:])
    assert set(pool.allocate(2)) == set(blocks[1:])
    assert pool.match([11]) == blocks[:1]

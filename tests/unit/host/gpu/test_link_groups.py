"""Links in one line if groups of GPUs are linked equally, and as a matrix otherwise."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Host, Link
from vllm_launchers.host.gpu.topology import link_groups, links_summary

KINDS = ("NV18", "NV4", "PIX", "NODE", "SYS")


def host_of(kinds: dict[tuple[int, int], str], count: int) -> Host:
    return Host(
        gpus=tuple(Gpu(index) for index in range(count)),
        links=tuple(Link(a, b, kind) for (a, b), kind in kinds.items()),
    )


@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("1xrtx4090", ""),
        ("2xrtx3090", "all-to-all NV4"),
        ("8xh100", "all-to-all NV18"),
        ("4xa6000", "NV4 within 0,1 | 2,3 · SYS between them"),
        ("8xl40s", "PIX within 0,1 | 2,3 | 4,5 | 6,7 · NODE within 0-3 | 4-7 · SYS between them"),
    ],
)
def test_regular_hosts_need_no_matrix(name: str, summary: str) -> None:
    assert links_summary(read_host(Path(name))) == summary


def test_partially_linked_mesh_needs_a_matrix() -> None:
    ring = {(0, 1): "NV2", (1, 2): "NV2", (2, 3): "NV2", (0, 3): "NV2", (0, 2): "SYS", (1, 3): "SYS"}
    assert links_summary(host_of(ring, 4)) is None


def test_unknown_link_is_not_guessed() -> None:
    assert links_summary(host_of({(0, 1): "NV4", (1, 2): "NV4"}, 3)) is None


@given(st.integers(2, 6).flatmap(lambda count: st.tuples(st.just(count), st.lists(
    st.sampled_from(KINDS), min_size=count * (count - 1) // 2, max_size=count * (count - 1) // 2))))  # fmt: skip
def test_groups_give_the_kind_of_every_pair(case: tuple[int, list[str]]) -> None:
    count, drawn = case
    kinds = dict(zip(combinations(range(count), 2), drawn, strict=True))
    found = link_groups(host_of(kinds, count))
    if found is None:
        return
    for (a, b), kind in kinds.items():
        assert next(one for one, groups in found if any(a in group and b in group for group in groups)) == kind


@given(st.lists(st.sampled_from((0, 1, 2, 3)), min_size=2, max_size=8))
def test_nested_groups_are_always_found(places: list[int]) -> None:
    """GPUs below switches below nodes: the distance of two GPUs follows from where their paths separate."""
    kinds = {
        (a, b): "PIX" if places[a] == places[b] else "NODE" if places[a] // 2 == places[b] // 2 else "SYS"
        for a, b in combinations(range(len(places)), 2)
    }
    assert link_groups(host_of(kinds, len(places))) is not None

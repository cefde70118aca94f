"""An expert's ranking on every recorded host, set by set, with the reason and warnings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.document import recorded_hosts
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, Link
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.host.gpu.topology import islands_of
from vllm_launchers.plan.placement import PlacementRanking, rank_placements

RANKED: dict[tuple[str, int], tuple[str, ...]] = {
    # One GPU with a desktop on it.
    ("1xrtx4090", 1): ("0: idle, 22.7 GiB free",),
    # Bridged: both over NVLink; a single GPU leaves the one with the desktop for later.
    ("2xrtx3090", 1): ("1: idle, 23.6 GiB free", "0: idle, 23.4 GiB free"),
    ("2xrtx3090", 2): ("0,1: NVLink ×4, 112 GB/s, both idle",),
    # 0,1 and 2,3 are bridged, anna uses 0: a single GPU takes the rest of the broken pair.
    ("4xa6000", 1): ("1: idle, 47.6 GiB free", "2: idle, 47.6 GiB free", "- 0: 27.1 GiB free"),
    ("4xa6000", 2): (
        "2,3: NVLink ×4, 112 GB/s, both idle",
        "1,2: across the CPU interconnect (SYS), 63 GB/s, both idle",
        "1,3: across the CPU interconnect (SYS), 63 GB/s, both idle",
        "- 0,1: NVLink ×4, 112 GB/s, at least 27.1 GiB free",
    ),
    ("4xa6000", 4): ("- 0-3: across the CPU interconnect (SYS), 63 GB/s, at least 27.1 GiB free",),
    # NVSwitch: all are equally close; 0 to 3 are in use.
    ("8xh100", 1): ("4: idle, 79.2 GiB free", "5: idle, 79.2 GiB free", "- 0: 18.0 GiB free"),
    ("8xh100", 2): (
        "4,5: NVSwitch ×18, 900 GB/s, both idle",
        "4,6: NVSwitch ×18, 900 GB/s, both idle",
        "- 0,4: NVSwitch ×18, 900 GB/s, at least 18.0 GiB free",
    ),
    ("8xh100", 4): (
        "4-7: NVSwitch ×18, 900 GB/s, all idle",
        "- 0,4,5,6: NVSwitch ×18, 900 GB/s, at least 18.0 GiB free",
    ),
    ("8xh100", 8): ("- 0-7: NVSwitch ×18, 900 GB/s, at least 8.2 GiB free",),
    # PCIe only, 2 and 6 are in use: a single GPU leaves the free pairs behind a switch intact.
    ("8xl40s", 1): ("3: idle, 44.6 GiB free", "7: idle, 44.6 GiB free", "- 6: 32.2 GiB free", "- 2: 13.7 GiB free"),
    ("8xl40s", 2): (
        "0,1: one PCIe switch (PIX), 63 GB/s, both idle",
        "4,5: one PCIe switch (PIX), 63 GB/s, both idle",
        "0,3: one NUMA node, across host bridges (NODE), 63 GB/s, both idle",
    ),
    ("8xl40s", 4): ("0,1,4,5: across the CPU interconnect (SYS), 63 GB/s, all idle",),
    ("1xh100", 1): ("0: idle, 79.2 GiB free",),
    ("1xh200", 1): ("0: idle, 139.8 GiB free",),
    # Slices serve servers on one GPU: the largest unused one.
    ("1xa100-mig", 1): (
        "0: MIG slice 2g.10gb, 9.7 GiB free",
        "0: MIG slice 1g.5gb, 4.7 GiB free",
        "- 0: MIG slice 3g.20gb, 6.1 GiB free",
    ),
}
"""The first sets for a number of GPUs, best first; those marked with a dash are offered but never taken by default."""

WARNINGS: dict[tuple[str, int], tuple[str, ...]] = {
    ("4xa6000", 4): (
        "GPU 0: anna holds 20.5 GiB",
        "tensor parallelism over 0-3 crosses the CPU interconnect at every layer; use --tensor-parallel-size 2 "
        "--pipeline-parallel-size 2, or 2 servers on 0,1 and 2,3 if the model fits",
    ),
    ("8xl40s", 4): (
        "tensor parallelism over 0,1,4,5 crosses the CPU interconnect at every layer; use --tensor-parallel-size 2 "
        "--pipeline-parallel-size 2, or 2 servers on 0,1 and 4,5 if the model fits",
    ),
    ("8xh100", 8): (
        "GPU 0: anna holds 61.2 GiB",
        "GPU 1: anna holds 61.2 GiB",
        "GPU 2: chat (yours) holds 71.0 GiB",
        "GPU 3: chat (yours) holds 71.0 GiB",
    ),
}
"""The warnings of the first set; the others have none."""


def ranking_lines(ranking: PlacementRanking) -> list[str]:
    return [found.reason if found.fits else f"- {found.reason}" for found in ranking.placements]


@pytest.mark.parametrize(("name", "size"), RANKED)
def test_sets_are_ranked_like_an_expert_would(name: str, size: int, recorded: Callable[[str], Host]) -> None:
    ranking = rank_placements(recorded(name), size)
    expected = RANKED[name, size]
    assert tuple(ranking_lines(ranking)[: len(expected)]) == expected
    assert ranking.placements[0].warnings == WARNINGS.get((name, size), ())
    assert (ranking.best is None) == expected[0].startswith("- ")


def test_every_recorded_host_is_ranked() -> None:
    assert {name for name, _ in RANKED} == set(recorded_hosts())


def mixed() -> Host:
    """Two 24 GiB GPUs and two 80 GiB GPUs behind one host bridge; anna holds 10 GiB of the last one."""
    sizes = (24.0, 24.0, 80.0, 80.0)
    held = {3: (Holder(7, user="anna", gib=10.0),)}
    gpus = tuple(
        Gpu(i, f"GPU-{i}", "L4" if size < 80 else "A100", size, size - 0.4 - (10 if i == 3 else 0), held.get(i, ()))
        for i, size in enumerate(sizes)
    )
    links = tuple(Link(a, b, "PHB", 60.0) for a, b in combinations(range(4), 2))
    return Host(gpus=gpus, links=links, islands=islands_of(range(4), links))


def share_of(fraction: float) -> Callable[[Gpu], float | None]:
    return lambda gpu: None if gpu.memory_gib is None else fraction * gpu.memory_gib


def test_required_memory_may_depend_on_the_gpu_size() -> None:
    ranking = rank_placements(mixed(), 1, need_gib=share_of(0.9))
    assert [(found.gpus, found.fits) for found in ranking.placements] == [
        ((2,), True), ((0,), True), ((1,), True), ((3,), False),
    ]  # fmt: skip
    assert ranking.placements[0].needs_gib == (72.0,)
    # With a smaller share, anna's GPU has room too, but ranks after the unused ones.
    shared = rank_placements(mixed(), 1, need_gib=share_of(0.8))
    assert [found.gpus for found in shared.placements if found.fits] == [(2,), (0,), (1,), (3,)]
    assert shared.placements[3].warnings == ("GPU 3: anna holds 10.0 GiB",)


def test_equal_gpus_are_grouped_and_mixed_ones_reported() -> None:
    pairs = rank_placements(mixed(), 2, need_gib=share_of(0.9))
    assert pairs.best is not None
    assert pairs.best.gpus == (0, 1)
    every = rank_placements(mixed(), 4, need_gib=share_of(0.9))
    assert every.best is None
    assert every.placements[0].needs_gib == (21.6, 21.6, 72.0, 72.0)
    assert every.problem.startswith(
        "the server needs 4 GPUs, each with 21.6 to 72 GiB free; GPU 0-3 come closest with at least "
    )
    assert "GPU 3: anna holds 10.0 GiB" in every.problem


def test_unknown_need_of_a_gpu_falls_back_to_its_idleness() -> None:
    host = mixed()
    host = replace(host, gpus=(replace(host.gpus[0], memory_gib=None, free_gib=None), *host.gpus[1:]))
    ranking = rank_placements(host, 1, need_gib=share_of(0.9))
    assert ranking.best is not None
    unknown = next(found for found in rank_placements(host, 3, need_gib=share_of(0.9)).placements if 0 in found.gpus)
    assert unknown.needs_gib == ()
    assert unknown.reason.endswith("free memory unknown")


def test_slice_needs_as_much_as_a_gpu_of_its_size(recorded: Callable[[str], Host]) -> None:
    ranking = rank_placements(recorded("1xa100-mig"), 1, need_gib=share_of(0.9))
    assert [found.fits for found in ranking.placements] == [True, True, False]
    sizes = [found.mig.memory_gib or 0.0 for found in ranking.placements if found.mig is not None]
    assert [found.needs_gib[0] for found in ranking.placements] == pytest.approx([0.9 * size for size in sizes])


def test_gpu_with_a_share_of_zero_is_never_chosen() -> None:
    shares = tuple(GpuShare(index, gib=0.0) for index in (1, 2, 3))
    ranking = rank_placements(mixed(), 1, shares=shares)
    assert [found.gpus for found in ranking.placements if found.fits] == [(0,)]
    assert rank_placements(mixed(), 2, shares=shares).best is None


def test_more_nvlinks_come_first_even_at_unknown_speed() -> None:
    links = (Link(0, 1, "NV1"), Link(0, 2, "NV2"), Link(1, 2, "SYS"))
    host = Host(gpus=tuple(map(Gpu, range(3))), links=links, islands=islands_of(range(3), links))
    assert [found.gpus for found in rank_placements(host, 2).placements] == [(0, 2), (0, 1), (1, 2)]

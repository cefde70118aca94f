"""Which GPUs are offered, in what order, and with which messages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu, Holder, Host, Link
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.host.gpu.topology import LinkLevel, islands_of, link_level
from vllm_launchers.plan import placement
from vllm_launchers.plan.placement import rank_placements, set_level, takes_uuids

GIB = 48.0


def box(kinds: dict[tuple[int, int], str], count: int, used: dict[int, tuple[Holder, ...]] | None = None) -> Host:
    """A host of 48 GiB GPUs; unnamed pairs are SYS."""
    gpus = []
    for index in range(count):
        holders = (used or {}).get(index, ())
        free = GIB - 0.4 - sum(holder.gib or 0.0 for holder in holders)
        gpus.append(Gpu(index, f"GPU-{index}", "X", GIB, free, holders, utilization=0, used_gib=GIB - free))
    links = [Link(a, b, kinds.get((a, b), "SYS"), 10.0) for a, b in combinations(range(count), 2)]
    return Host(gpus=tuple(gpus), links=tuple(links), islands=islands_of(range(count), links))


ANNA = Holder(11, user="anna", gib=40.0)
CHAT = Holder(12, user="me", gib=40.0, server="chat")


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("4xa6000", 2, "2,3: NVLink ×4, 112 GB/s, both idle"),
        ("2xrtx3090", 2, "0,1: NVLink ×4, 112 GB/s, both idle"),
        ("8xh100", 4, "4-7: NVSwitch ×18, 900 GB/s, all idle"),
        ("8xh100", 2, "4,5: NVSwitch ×18, 900 GB/s, both idle"),
        ("8xl40s", 2, "0,1: one PCIe switch (PIX), 63 GB/s, both idle"),
        ("8xl40s", 4, "0,1,4,5: across the CPU interconnect (SYS), 63 GB/s, all idle"),
        ("4xa6000", 1, "1: idle, 47.6 GiB free"),
        ("1xrtx4090", 1, "0: idle, 22.7 GiB free"),
        ("1xa100-mig", 1, "0: MIG slice 2g.10gb, 9.7 GiB free"),
    ],
)
def test_best_set_of_a_recorded_host_matches_an_experts(
    name: str, size: int, reason: str, recorded: Callable[[str], Host]
) -> None:
    best = rank_placements(recorded(name), size).best
    assert best is not None
    assert best.reason == reason


@pytest.mark.parametrize(("name", "size"), [("4xa6000", 8), ("1xrtx4090", 2), ("1xa100-mig", 2)])
def test_too_few_gpus_are_reported(name: str, size: int, recorded: Callable[[str], Host]) -> None:
    ranking = rank_placements(recorded(name), size)
    assert ranking.best is None
    assert str(size) in ranking.problem


def test_closer_sets_come_first() -> None:
    kinds = {(0, 1): "NODE", (2, 3): "PIX", (4, 5): "NV4", (6, 7): "PHB"}
    order = [found.gpus for found in rank_placements(box(kinds, 8), 2).placements[:4]]
    assert order == [(4, 5), (2, 3), (6, 7), (0, 1)]


def test_free_memory_precedes_closeness() -> None:
    host = box({(0, 1): "NV4"}, 4, {0: (ANNA,)})
    ranking = rank_placements(host, 2)
    assert ranking.best is not None
    assert 0 not in ranking.best.gpus
    assert all(
        not any("anna" in text for text in found.warnings) for found in ranking.placements if 0 not in found.gpus
    )


def test_occupied_gpu_is_never_chosen_silently() -> None:
    ranking = rank_placements(box({(0, 1): "NV4"}, 2, {0: (ANNA,)}), 2)
    assert ranking.best is None
    assert (
        ranking.problem
        == "the server needs 2 GPUs, each with enough free memory; GPU 0,1 come closest with at least 7.6 GiB "
        "available (GPU 0: anna holds 40.0 GiB)"
    )
    with_room = rank_placements(box({(0, 1): "NV4"}, 2, {0: (ANNA,)}), 2, need_gib=6.0)
    assert with_room.best is not None
    assert "GPU 0: anna holds 40.0 GiB" in with_room.best.warnings
    assert "idle" not in with_room.best.reason


def test_the_problem_names_who_holds_the_gpu_that_lacks_the_most() -> None:
    """Stopping the processes on the other GPU would not help."""
    bob = Holder(13, user="bob", gib=44.0)
    ranking = rank_placements(box({(0, 1): "NV4"}, 2, {0: (ANNA,), 1: (bob,)}), 2, need_gib=40.0)
    assert ranking.best is None
    assert ranking.problem.endswith("(GPU 1: bob holds 44.0 GiB)")


def test_required_memory_decides_what_fits() -> None:
    host = box({}, 2, {0: (CHAT,)})
    assert rank_placements(host, 1, need_gib=7.0).best is not None
    found = rank_placements(host, 2, need_gib=20.0)
    assert found.best is None
    assert "each with 20 GiB free" in found.problem
    assert "chat (yours) holds 40.0 GiB" in found.problem


def test_memory_of_hidden_processes_counts_as_held() -> None:
    gpu = Gpu(0, memory_gib=24.0, free_gib=4.0, used_gib=20.0, used_by=())
    found = rank_placements(Host(gpus=(gpu,)), 1).placements[0]
    assert found.tier == 1
    assert found.warnings == ("GPU 0: hidden processes hold 20.0 GiB",)


def test_free_island_is_kept_whole_for_the_next_server() -> None:
    host = box({(0, 1): "NV4", (2, 3): "NV4"}, 4, {2: (ANNA,)})
    best = rank_placements(host, 1).best
    assert best is not None
    assert best.gpus == (3,)


def test_set_across_the_cpu_interconnect_names_alternatives() -> None:
    best = rank_placements(box({(0, 3): "NV4", (1, 2): "NV4"}, 4), 4).best
    assert best is not None
    assert best.gpus == (0, 3, 1, 2)
    assert best.visible_devices() == "0,3,1,2"
    (warning,) = best.warnings
    assert "--tensor-parallel-size 2 --pipeline-parallel-size 2" in warning
    assert "2 servers on 0,3 and 1,2" in warning


def test_partial_nvlink_mesh_stays_on_nvlink() -> None:
    kinds = {(0, 1): "NV2", (1, 2): "NV1", (2, 3): "NV2", (0, 3): "NV1"}
    best = rank_placements(box(kinds, 4), 4).best
    assert best is not None
    assert best.level is LinkLevel.MESH
    assert best.warnings == ()


def test_unknown_links_are_reported() -> None:
    best = rank_placements(Host(gpus=(Gpu(0), Gpu(1))), 2).best
    assert best is not None
    assert best.level is LinkLevel.UNKNOWN
    assert "unknown" in best.warnings[0]


def test_lost_gpus_are_excluded() -> None:
    host = box({(0, 1): "NV4"}, 3)
    host = replace(host, gpus=(replace(host.gpus[0], lost="fell off the bus"), *host.gpus[1:]))
    assert [found.gpus for found in rank_placements(host, 2).placements] == [(1, 2)]
    assert "GPU 0 lost" in rank_placements(host, 3).problem


def test_mixed_gpus_come_last_and_are_reported() -> None:
    host = box({(0, 1): "PIX"}, 3)
    host = replace(host, gpus=(replace(host.gpus[0], name="Y"), *host.gpus[1:]))
    ranked = rank_placements(host, 2).placements
    assert ranked[0].gpus == (1, 2)
    assert any("mixed GPUs" in text for text in ranked[1].warnings)


def test_share_limits_available_memory() -> None:
    host = box({(0, 1): "NV4"}, 2, {0: (replace(CHAT, gib=10.0),)})
    shares = (GpuShare(0, gib=24.0), GpuShare(1, fraction=0.5))
    best = rank_placements(host, 1, need_gib=20.0, shares=shares).best
    assert best is not None
    assert (best.gpus, best.free_gib) == ((1,), 24.0)
    both = rank_placements(host, 2, need_gib=14.0, shares=shares).best
    assert both is not None
    assert both.free_gib == 14.0
    assert "GPU 0: your share is 24.0 GiB, 10.0 of them taken" in both.warnings
    assert "GPU 1: your share is 24.0 GiB" in both.warnings
    assert rank_placements(host, 2, need_gib=14.1, shares=shares).best is None


def test_gpu_is_idle_within_a_share() -> None:
    best = rank_placements(box({}, 1), 1, shares=(GpuShare(0, gib=24.0),)).best
    assert best is not None
    assert best.free_gib == 24.0


def test_slice_held_by_hidden_processes_is_not_free(recorded: Callable[[str], Host]) -> None:
    host = recorded("1xa100-mig")
    # The driver hides processes from users without permission; 13.5 of the largest slice's 19.6 GiB are still held.
    unseen = replace(host, gpus=(replace(host.gpus[0], used_by=None),))
    found = rank_placements(unseen, 1, need_gib=5.0).placements
    tiers = {one.mig.profile: one.tier for one in found if one.mig is not None}
    assert tiers == {"2g.10gb": 0, "3g.20gb": 1, "1g.5gb": 2}
    (held,) = [one for one in found if one.mig is not None and one.mig.profile == "3g.20gb"]
    assert held.warnings == ("GPU 0: hidden processes hold 13.5 GiB",)


def test_share_of_a_gpu_applies_to_its_slices_together(recorded: Callable[[str], Host]) -> None:
    host, share = recorded("1xa100-mig"), (GpuShare(0, gib=5.0),)
    assert rank_placements(host, 1, need_gib=4.5, shares=share).best is not None
    ours = Holder(1, gib=1.0, server="chat", instance=2)
    taken = replace(host, gpus=(replace(host.gpus[0], used_by=(*host.gpus[0].holders, ours)),))
    ranking = rank_placements(taken, 1, need_gib=4.5, shares=share)
    assert ranking.best is None
    assert "(MIG slice" in ranking.problem
    assert "4.0 GiB available" in ranking.problem
    assert "your share is 5.0 GiB, 1.0 of them taken" in ranking.problem


def test_slice_with_more_free_memory_than_a_gpu_is_first(recorded: Callable[[str], Host]) -> None:
    host = recorded("1xa100-mig")
    small = Gpu(1, "GPU-1", "X", 8.0, 7.9, (), utilization=0, used_gib=0.1)
    best = rank_placements(replace(host, gpus=(*host.gpus, small)), 1, need_gib=5.0).best
    assert best is not None
    assert best.mig is not None
    assert best.mig.profile == "2g.10gb"


def test_devices_are_given_by_index_or_uuid(recorded: Callable[[str], Host]) -> None:
    best = rank_placements(recorded("4xa6000"), 2).best
    assert best is not None
    assert best.environment() == {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    gpus = recorded("4xa6000").gpus
    assert best.visible_devices(by_uuid=True) == f"{gpus[2].uuid},{gpus[3].uuid}"
    part = rank_placements(recorded("1xa100-mig"), 1).best
    assert part is not None
    assert part.visible_devices().startswith("MIG-")


def test_old_vllm_releases_get_no_uuids() -> None:
    assert [takes_uuids(release) for release in (None, (0, 20, 1), (0, 32, 0), (1, 0, 0))] == [False, False, True, True]


def test_twenty_four_gpus_are_ranked_without_trying_every_set() -> None:
    kinds = {(a, b): "NV6" for a, b in combinations(range(24), 2) if a // 8 == b // 8}
    best = rank_placements(box(kinds, 24, dict.fromkeys(range(8), (ANNA,))), 8).best
    assert best is not None
    assert best.gpus == tuple(range(8, 16))


KINDS = ("NV4", "NV2", "PIX", "PXB", "PHB", "NODE", "SYS")


@st.composite
def hosts(draw: st.DrawFn) -> Host:
    count = draw(st.integers(1, 6))
    kinds = {pair: draw(st.sampled_from(KINDS)) for pair in combinations(range(count), 2)}
    users, servers = st.sampled_from(["anna", "ben", None]), st.sampled_from([None, "chat"])
    holder = st.builds(Holder, st.integers(2, 99), users, st.floats(0.0, 20.0), servers)
    holders = st.lists(holder, max_size=2).map(tuple)
    return box(kinds, count, {index: draw(holders) for index in range(count)})


@given(hosts(), st.integers(1, 4), st.one_of(st.none(), st.floats(0.0, 48.0)))
def test_ranking_invariants(host: Host, size: int, need: float | None) -> None:
    with patch.object(placement, "MOST_OFFERED", 1000):
        ranking = rank_placements(host, size, need_gib=need)
    assert bool(ranking.problem) == (ranking.best is None)
    by_index = {gpu.index: gpu for gpu in host.gpus}
    tiers = [found.tier for found in ranking.placements]
    assert tiers == sorted(tiers)
    for found in ranking.placements:
        assert len(set(found.gpus)) == size
        gpus = [by_index[index] for index in found.gpus]
        assert found.free_gib == min(gpu.free_gib or 0.0 for gpu in gpus)
        if found.fits and need is not None:
            assert (found.free_gib or 0.0) >= need
        for gpu in gpus:
            for holder in gpu.holders:
                assert any(text.startswith(f"GPU {gpu.index}: ") for text in found.warnings), holder
        assert "\n" not in found.reason
        assert ("idle" not in found.reason) or not any(gpu.holders for gpu in gpus)
        crosses = any(link_level(kind_of(host, a, b)) is LinkLevel.SYS for a, b in combinations(found.gpus, 2))
        if crosses and found.level is not LinkLevel.MESH:
            assert any("CPU interconnect" in text for text in found.warnings)


@given(hosts(), st.integers(2, 4))
def test_no_free_set_is_closer_than_the_best(host: Host, size: int) -> None:
    free = replace(host, gpus=tuple(replace(g, used_by=(), used_gib=0.4, free_gib=GIB - 0.4) for g in host.gpus))
    best = rank_placements(free, size).best
    if best is None:
        assert len(free.gpus) < size
        return

    def level(a: int, b: int) -> LinkLevel:
        return link_level(kind_of(free, a, b))

    every = [set_level(level, chosen) for chosen in combinations([gpu.index for gpu in free.gpus], size)]
    assert best.level == min(every, key=lambda found: found if found is not None else -1)


@given(hosts(), st.integers(1, 3), st.randoms())
def test_ranking_does_not_depend_on_the_document_order(host: Host, size: int, random: object) -> None:
    gpus, links = list(host.gpus), list(host.links)
    random.shuffle(gpus)  # type: ignore[attr-defined]
    random.shuffle(links)  # type: ignore[attr-defined]
    shuffled = replace(host, gpus=tuple(gpus), links=tuple(links))
    assert rank_placements(shuffled, size) == rank_placements(host, size)


def kind_of(host: Host, a: int, b: int) -> str:
    link = host.link(a, b)
    assert link is not None
    return link.kind

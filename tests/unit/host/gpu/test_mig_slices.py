"""Which MIG slice counts: placement, choices, memory and findings must agree on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, MigInstance
from vllm_launchers.host.gpu.sharing import GpuShare, best_slice, on_slice, slice_gpu
from vllm_launchers.plan.choices.pool import pool_of
from vllm_launchers.plan.placement import rank_placements

HELD = MigInstance("MIG-held", "3g.20gb", 19.6, 6.1, 1, 0)
MIDDLE = MigInstance("MIG-middle", "2g.10gb", 9.8, 9.7, 3, 0)
SMALL = MigInstance("MIG-small", "1g.5gb", 4.8, 4.7, 9, 0)
ERIK = Holder(30441, user="erik", gib=13.5, instance=1)
GPU = Gpu(0, "GPU-0", "NVIDIA A100-SXM4-40GB", 39.5, 24.9, (ERIK,), mig_mode=True, mig=(HELD, SMALL, MIDDLE))


@pytest.fixture
def host() -> Host:
    return Host(gpus=(GPU,), islands=((0,),))


def test_counted_slice_is_the_slice_placed_on(host):
    best = rank_placements(host, 1, need_gib=lambda gpu: 0.9 * (gpu.memory_gib or 0.0)).placements[0]
    pool, seen = pool_of(host), on_slice(host, None)
    assert best.mig == MIDDLE
    assert pool is not None
    assert seen is not None
    assert pool.memory_gib == seen.gpus[0].memory_gib == 9.8


def test_recorded_host_agrees_on_the_slice():
    host = read_host(Path("1xa100-mig"))
    best = rank_placements(host, 1, need_gib=lambda gpu: 0.9 * (gpu.memory_gib or 0.0)).placements[0]
    seen, pool = on_slice(host, None), pool_of(host)
    assert best.mig is not None
    assert seen is not None
    assert pool is not None
    assert seen.gpus[0].mig == (best.mig,)
    assert pool.memory_gib == best.mig.memory_gib


def test_named_slice_is_its_servers_only_gpu(host):
    seen = on_slice(host, "MIG-held")
    assert seen is not None
    (gpu,) = seen.gpus
    assert (gpu.memory_gib, gpu.free_gib, gpu.mig_mode, gpu.holders) == (19.6, 6.1, False, (ERIK,))
    assert gpu.used_gib == pytest.approx(13.5)


@pytest.mark.parametrize("devices", ["MIG-nobody", "0", "MIG-"])
def test_other_devices_leave_the_host_unchanged(host, devices):
    assert on_slice(host, devices) is host


def test_mixed_hosts_are_not_reduced_to_a_slice(host):
    whole = replace(GPU, index=1, mig_mode=False, mig=())
    both = Host(gpus=(GPU, whole))
    assert on_slice(both, None) is both
    assert on_slice(None, "MIG-held") is None


def test_fullest_free_slice_counts_when_none_is_idle():
    full = [replace(part, free_gib=free) for part, free in ((HELD, 6.1), (MIDDLE, 1.0), (SMALL, 0.5))]
    best = best_slice([replace(GPU, mig=tuple(full))])
    assert best is not None
    assert best.mig[0].uuid == "MIG-held"
    assert best_slice([replace(GPU, mig=())]) is None


def test_share_applies_to_all_slices_together():
    best = best_slice([GPU], [GpuShare(0, gib=5.0)])
    assert best is not None
    assert best.mig[0].uuid == "MIG-small"


def test_unknown_free_memory_gives_no_used_memory():
    unknown = replace(MIDDLE, free_gib=None)
    assert slice_gpu(GPU, unknown).used_gib is None

"""Bandwidths of links, memory holders, shares, and reported problems."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import vllm_launchers.host.gpu
from vllm_launchers.host.gpu.hardware_warnings import hardware_warnings
from vllm_launchers.host.gpu.host import Gpu, Holder, Host, HostError, Link, NvLink
from vllm_launchers.host.gpu.reader import bits_of, ranges
from vllm_launchers.host.gpu.sharing import GpuShare, available_gib, holdings, is_held, parse_share
from vllm_launchers.host.gpu.topology import LinkLevel, bandwidth, link_level, nvlinks_in


@pytest.mark.parametrize(
    ("name", "kind", "gbs"),
    [
        ("NVIDIA GeForce RTX 3090", "NV4", 112.5),
        ("NVIDIA RTX A6000", "NV4", 112.5),
        ("NVIDIA A100-SXM4-80GB", "NV12", 600.0),
        ("NVIDIA H100 80GB HBM3", "NV18", 900.0),
        ("NVIDIA B200", "NV18", 1800.0),
        ("Tesla V100-SXM2-16GB", "NV2", 100.0),
        ("Tesla P100-SXM2-16GB", "NV4", 160.0),
        ("NVIDIA GeForce RTX 4090", "NV4", None),
    ],
)
def test_nvlink_bandwidth_matches_the_data_sheet(name: str, kind: str, gbs: float | None) -> None:
    assert bandwidth(kind, Gpu(0, name=name), Gpu(1, name=name)) == gbs


@pytest.mark.parametrize(
    ("stated", "gbs"), [(14062, 112.5), (25781, 200.0), (26562, 200.0), (53125, 400.0), (9000, 72.0)]
)
def test_rate_reported_by_the_driver_excludes_overhead(stated: float, gbs: float) -> None:
    gpu = Gpu(0, nvlink_speed_mbs=stated)
    assert bandwidth("NV4", gpu, gpu) == gbs


def test_pcie_bandwidth_is_that_of_the_narrower_slot() -> None:
    wide = Gpu(0, pcie_generation=1, pcie_generation_max=4, pcie_width=16, pcie_width_max=16)
    narrow = replace(wide, index=1, pcie_width=8)
    assert bandwidth("PHB", wide, wide) == 63.0
    assert bandwidth("PHB", wide, narrow) == 31.5
    assert bandwidth("PHB", wide, Gpu(2)) is None


@pytest.mark.parametrize(
    ("kind", "level", "count"),
    [("NV12", LinkLevel.NVLINK, 12), ("pix", LinkLevel.PIX, 0), ("SOC", LinkLevel.SYS, 0), ("PSB", LinkLevel.PIX, 0),
     ("NV0", LinkLevel.UNKNOWN, 0), ("", LinkLevel.UNKNOWN, 0), ("NV", LinkLevel.UNKNOWN, 0),
     ("XGMI", LinkLevel.UNKNOWN, 0)],
)  # fmt: skip
def test_kinds_are_parsed_like_nvidia_smi(kind: str, level: LinkLevel, count: int) -> None:
    assert (link_level(kind), nvlinks_in(kind)) == (level, count)


def test_memory_is_reported_by_server_user_and_unseen() -> None:
    anna = (Holder(2, user="anna", gib=5.0), Holder(3, user="anna", gib=1.0))
    holders = (Holder(1, user="me", gib=10.0, server="chat"), *anna, Holder(4, gib=2.0))
    found = holdings(Gpu(0, memory_gib=48.0, free_gib=20.0, used_gib=28.0, used_by=holders))
    assert found.ours == {"chat": 10.0}
    assert found.others == {"anna": 6.0, "pid 4 (not seen from here)": 2.0}
    assert found.unseen == 10.0
    assert found.others_gib == 18.0


def test_unaccounted_memory_belongs_to_the_unreported_process() -> None:
    gpu = Gpu(0, memory_gib=24.0, free_gib=4.0, used_gib=20.0, used_by=(Holder(7, user="wsl"),))
    assert holdings(gpu).others == {"wsl": 20.0}
    assert holdings(gpu).unseen == 0.0


def test_desktop_leaves_a_gpu_free_and_a_game_does_not() -> None:
    gpu = Gpu(
        0, memory_gib=24.0, free_gib=23.0, used_gib=1.0, used_by=(Holder(1, user="me", gib=0.6, kind="graphics"),)
    )
    assert not is_held(gpu)
    assert is_held(replace(gpu, used_gib=7.0, used_by=(Holder(1, user="me", gib=6.0, kind="graphics"),)))
    assert is_held(replace(gpu, used_by=(Holder(1, user="me", gib=0.6),)))


@pytest.mark.parametrize(
    ("value", "share"),
    [
        ("24 GiB", GpuShare(0, gib=24.0)),
        (24, GpuShare(0, gib=24.0)),
        ("50 %", GpuShare(0, fraction=0.5)),
        (0.5, GpuShare(0, fraction=0.5)),
        ("0.5", GpuShare(0, fraction=0.5)),
        ("1 GiB", GpuShare(0, gib=1.0)),
        (1, GpuShare(0, fraction=1.0)),
        ("12.5g", GpuShare(0, gib=12.5)),
    ],
)
def test_share_formats_are_parsed(value: str | float, share: GpuShare) -> None:
    assert parse_share(0, value) == share


@pytest.mark.parametrize(
    "value",
    [
        "half",
        "",
        "-1 GiB",
        "120 %",
        -0.1,
        True,
        None,
        float("nan"),
        "1e400",
        [1],
        10**400,
        pytest.param(-(16**5000), id="long"),
    ],
)
def test_invalid_share_is_reported(value: object) -> None:
    with pytest.raises(HostError, match=r"GPU 0: .* is not a valid share of its memory") as caught:
        parse_share(0, value)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_share_includes_own_servers_and_is_limited_to_free_memory() -> None:
    gpu = Gpu(0, memory_gib=48.0, free_gib=20.0, used_gib=28.0, used_by=(Holder(1, gib=8.0, server="chat"),))
    assert available_gib(gpu, [GpuShare(0, gib=24.0)]) == 16.0
    assert available_gib(gpu, [GpuShare(0, gib=40.0)]) == 20.0
    assert available_gib(gpu, [GpuShare(0, gib=4.0)]) == 0.0
    assert available_gib(gpu, [GpuShare(1, gib=4.0)]) == 20.0


PORT = NvLink(0, active=True, version="3.1", remote=1, errors={"replay": 0, "crc": 0})


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        (Gpu(0, lost="fell off the bus"), "fell off the bus"),
        (Gpu(0, xid=48), "Xid 48"),
        (Gpu(0, ecc_uncorrected=2), "2 uncorrectable"),
        (Gpu(0, nvlinks=(PORT, replace(PORT, number=1, active=False))), "NVLink 1 of 2 is down"),
        (Gpu(0, nvlinks=(replace(PORT, errors={"crc": 9}),)), "9 CRC errors"),
        (Gpu(0, pcie_width=4, pcie_width_max=16), "×4 of ×16"),
        (Gpu(0, pcie_generation=1, pcie_generation_max=4, utilization=90), "gen 1 of gen 4"),
        (Gpu(0, throttle=("too hot (hardware)",)), "too hot"),
        (Gpu(0, pcie_replays=5000), "5000 PCIe replays"),
    ],
)
def test_gpu_problems_are_reported(gpu: Gpu, message: str) -> None:
    (text,) = hardware_warnings(Host(gpus=(gpu,)))
    assert message in text


def test_normal_gpus_are_not_reported(recorded: Callable[[str], Host]) -> None:
    for name in ("8xh100", "4xa6000", "8xl40s", "1xrtx4090", "1xa100-mig"):
        assert hardware_warnings(recorded(name)) == []
    # An idle GPU's PCIe link drops to generation 1, and a missing bridge is not a broken one.
    down = tuple(NvLink(number, active=False) for number in range(4))
    assert (
        hardware_warnings(Host(gpus=(Gpu(0, pcie_generation=1, pcie_generation_max=4, utilization=0, nvlinks=down),)))
        == []
    )


def test_unreachable_peers_are_reported() -> None:
    gpus = (Gpu(0), Gpu(1))
    over_nvlink = Host(gpus=gpus, links=(Link(0, 1, "NV4", p2p="not supported"),), islands=((0, 1),))
    assert "have NVLink" in hardware_warnings(over_nvlink)[0]
    over_pcie = Host(gpus=gpus, links=(Link(0, 1, "PHB", p2p="not supported"),), islands=((0,), (1,)))
    assert "copies go through the CPU" in hardware_warnings(over_pcie)[0]


def test_masks_become_ranges() -> None:
    assert bits_of([0b1011, 1]) == [0, 1, 3, 64]
    assert ranges([0, 1, 2, 3, 8]) == "0-3,8"
    assert ranges([]) is None


def test_nvml_is_called_in_one_place_only() -> None:
    folder = Path(vllm_launchers.host.gpu.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name) and called.value.id == "pynvml":
                assert path.name == "nvml.py"

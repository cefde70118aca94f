"""Warnings about a machine's GPUs: slow slots, dead links, errors. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from vllm_launchers.host.gpu.host import Gpu, Host
from vllm_launchers.host.gpu.topology import LinkLevel, link_level

BUSY_PERCENT = 50
MANY_REPLAYS = 1000
IDLE = "idle"
"""Low clocks because nothing is computed, which is not throttling."""

HOT = ("too hot (driver)", "too hot (hardware)")
_SLOWED = ("hardware slowdown", *HOT, "power brake")
ERROR_NAMES = {"replay": "replays", "recovery": "recoveries", "crc": "CRC errors"}


def hardware_warnings(host: Host) -> list[str]:
    """One sentence per warning, the most severe first."""
    found = [text for gpu in host.gpus for text in _lost(gpu)]
    found += [text for gpu in host.gpus for text in _errors(gpu)]
    found += [text for gpu in host.gpus for text in _links(gpu)]
    found += [text for gpu in host.gpus for text in _slow(gpu)]
    found += list(_peers(host))
    return found


def _lost(gpu: Gpu) -> Iterator[str]:
    if gpu.lost:
        yield f"{gpu.label} {gpu.lost}"
    elif gpu.xid is not None:
        yield f"{gpu.label}: the driver reported Xid {gpu.xid}; see dmesg"


def _errors(gpu: Gpu) -> Iterator[str]:
    if gpu.ecc_uncorrected:
        yield (
            f"{gpu.label}: {gpu.ecc_uncorrected} uncorrectable memory errors since the driver was loaded; "
            "its results can't be trusted until it is reset"
        )
    for link in gpu.nvlinks:
        named = [f"{count} {ERROR_NAMES.get(name, name)}" for name, count in link.errors.items() if count]
        if named:
            yield f"{gpu.label}: NVLink {link.number} has {', '.join(named)}; if they grow, reseat the bridge"
    if gpu.pcie_replays is not None and gpu.pcie_replays >= MANY_REPLAYS:
        yield f"{gpu.label}: {gpu.pcie_replays} PCIe replays; the slot or riser may be loose"


def _links(gpu: Gpu) -> Iterator[str]:
    down = [link.number for link in gpu.nvlinks if link.active is False]
    if down and len(down) < len(gpu.nvlinks):
        numbers = ", ".join(map(str, down))
        yield f"{gpu.label}: NVLink {numbers} of {len(gpu.nvlinks)} {'is' if len(down) == 1 else 'are'} down"


def _slow(gpu: Gpu) -> Iterator[str]:
    slowed = [word for word in gpu.throttle or () if word in _SLOWED]
    if slowed:
        yield f"{gpu.label}: clocks throttled: {' and '.join(slowed)}"
    if gpu.pcie_width and gpu.pcie_width_max and gpu.pcie_width < gpu.pcie_width_max:
        yield f"{gpu.label}: PCIe ×{gpu.pcie_width} of ×{gpu.pcie_width_max}; limited by slot, riser or lane sharing"
    working = gpu.utilization is not None and gpu.utilization >= BUSY_PERCENT
    now, best = gpu.pcie_generation, gpu.pcie_generation_max
    if working and now and best and now < best:
        yield f"{gpu.label}: PCIe gen {now} of gen {best} under load"


def _peers(host: Host) -> Iterator[str]:
    for link in host.links:
        if link_level(link.kind) is LinkLevel.NVLINK and link.p2p not in (None, "ok"):
            yield f"GPU {link.a} and {link.b} have NVLink, but peer-to-peer access fails: {link.p2p}"
    blocked = {link.p2p for link in host.links if link_level(link.kind) is not LinkLevel.NVLINK} - {None, "ok"}
    if blocked and not host.islands_linked:
        yield f"no peer-to-peer access over PCIe: {sorted(map(str, blocked))[0]}; copies go through the CPU"
    for a, b in combinations(host.gpus, 2):
        if a.name and b.name and a.name != b.name:
            yield f"mixed GPUs ({a.name}, {b.name}): tensor parallelism runs at the slower one's speed"
            return

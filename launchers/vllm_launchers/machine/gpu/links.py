"""Links between GPUs: how near two of them are, what a link carries, which GPUs form an island. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import IntEnum

from vllm_launchers.machine.gpu.host import Gpu, Link, connected

_NVLINK = re.compile(r"NV(?:B)?(\d{1,3})")


class Level(IntEnum):
    """How near two GPUs are, the nearest first. ``UNKNOWN`` is taken for the farthest."""

    NVLINK = 0
    MESH = 1
    """Of a set: NVLinks connect all, though not every pair directly."""
    PIX = 2
    PXB = 3
    PHB = 4
    NODE = 5
    SYS = 6
    UNKNOWN = 7

    @property
    def words(self) -> str:
        """For people."""
        return LEVEL_WORDS[self]


LEVEL_WORDS = {
    Level.NVLINK: "NVLink",
    Level.MESH: "NVLink mesh, some pairs by a neighbour",
    Level.PIX: "one PCIe switch",
    Level.PXB: "several PCIe switches",
    Level.PHB: "one PCIe host bridge",
    Level.NODE: "one NUMA node, across host bridges",
    Level.SYS: "across the CPU interconnect",
    Level.UNKNOWN: "links unknown",
}

_OLD_NAMES = {"PSB": Level.PIX, "SOC": Level.SYS, "CPU": Level.NODE, "INTERNAL": Level.PIX}
"""What earlier releases of nvidia-smi called them; a board's own bridge (PSB) is a PCIe switch."""

NVLINK_MBS = (14062.5, 20000.0, 25000.0, 50000.0, 100000.0)
"""Data rates of one link in one direction, MB/s: GA10x (3.1), NVLink 1, 2 to 4, 5, 6."""

VERSION_MBS = {"1.0": 20000.0, "2.0": 25000.0, "2.2": 25000.0, "3.0": 25000.0, "3.1": 14062.5, "4.0": 25000.0}
VERSION_MBS |= {"5.0": 50000.0, "6.0": 100000.0}

NAME_VERSIONS = (
    (re.compile(r"\b(B[1-3]00|GB[1-3]00)\b"), "5.0"),
    (re.compile(r"\b(H100|H200|H800|H20|GH200)\b"), "4.0"),
    (re.compile(r"\b(A100|A800|A30)\b"), "3.0"),
    (re.compile(r"\b(A6000|A5500|A5000|A4500|A40|3090)\b"), "3.1"),
    (re.compile(r"\b(V100|RTX 8000|RTX 6000|RTX 5000|2080|TITAN RTX)\b"), "2.0"),
    (re.compile(r"\bP100\b"), "1.0"),
)
"""NVLink's version by the GPU's name, for a host whose driver was not asked."""

PCIE_LANE_GBS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one PCIe lane in one direction, after line coding (8b/10b, 128b/130b, FLIT)."""


def level_of(kind: str) -> Level:
    """The level that a kind such as ``NV4`` or ``PHB`` stands for."""
    word = kind.strip().upper()
    if _NVLINK.fullmatch(word) and nvlinks_in(word):
        return Level.NVLINK
    if word in ("PIX", "PXB", "PHB", "NODE", "SYS"):
        return Level[word]
    return _OLD_NAMES.get(word, Level.UNKNOWN)


def nvlinks_in(kind: str) -> int:
    """How many NVLinks a kind bonds: 4 for ``NV4``, 0 for all that is no NVLink."""
    found = _NVLINK.fullmatch(kind.strip().upper())
    return int(found[1]) if found else 0


def nvlink_mbs(gpu: Gpu) -> float | None:
    """What one of its NVLinks carries in one direction, MB/s: by the driver, by version, by name; None if unknown.

    The driver states the raw rate (26,562 where data sheets say 25,000); the nearest rate within 8 % is meant.
    """
    stated = gpu.nvlink_speed_mbs
    if stated:
        nearest = min(NVLINK_MBS, key=lambda rate: abs(rate - stated))
        return nearest if abs(nearest - stated) <= 0.08 * nearest else stated
    version = next((link.version for link in gpu.nvlinks if link.version), None)
    if version is None and gpu.name:
        version = next((version for pattern, version in NAME_VERSIONS if pattern.search(gpu.name)), None)
    return VERSION_MBS.get(version) if version else None


def pcie_gbs(gpu: Gpu) -> float | None:
    """What its PCIe slot carries, GB/s in both directions together: the fastest generation at the present width.

    (An idle GPU falls back to generation 1; its width stays.)
    """
    lane = PCIE_LANE_GBS.get(gpu.pcie_generation_max or gpu.pcie_generation or 0)
    width = gpu.pcie_width or gpu.pcie_width_max
    return round(2 * lane * width, 1) if lane and width else None


def bandwidth(kind: str, a: Gpu, b: Gpu) -> float | None:
    """What a pair exchanges at best, GB/s in both directions together; None if unknown."""
    count = nvlinks_in(kind)
    if count:
        rates = [rate for rate in (nvlink_mbs(a), nvlink_mbs(b)) if rate]
        return round(2 * count * min(rates) / 1000, 1) if rates else None
    ends = [pcie_gbs(a), pcie_gbs(b)]
    return min(end for end in ends if end is not None) if None not in ends else None


def islands_of(indices: Iterable[int], links: Sequence[Link]) -> tuple[tuple[int, ...], ...]:
    """Groups of GPUs that NVLinks connect, directly or by neighbours."""
    return connected(indices, [(link.a, link.b) for link in links if level_of(link.kind) is Level.NVLINK])


def pcie_groups(indices: Sequence[int], links: Sequence[Link]) -> tuple[tuple[int, ...], ...]:
    """Groups of GPUs that reach each other without crossing the CPU interconnect."""
    wanted = set(indices)
    return connected(
        indices,
        [(k.a, k.b) for k in links if k.a in wanted and k.b in wanted and level_of(k.kind) <= Level.NODE],
    )

"""The topology as text: a matrix grouped by island, or a list of pairs if the matrix does not fit. Pure.

Cells have a role and their GPUs; the caller chooses colors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import combinations

import msgspec

from vllm_launchers.engine_model.gpu_models import PCIE_LANE_GBS
from vllm_launchers.host.gpu.host import Gpu, Host, Link, connected
from vllm_launchers.host.gpu.sharing import holdings
from vllm_launchers.patterns import lazy_pattern

_NVLINK = lazy_pattern(r"NV(?:B)?(\d{1,3})")


class LinkLevel(IntEnum):
    """How close two GPUs are, closest first. ``UNKNOWN`` counts as the farthest."""

    NVLINK = 0
    MESH = 1
    """For a set of GPUs: NVLinks connect all, but not every pair directly."""
    PIX = 2
    PXB = 3
    PHB = 4
    NODE = 5
    SYS = 6
    UNKNOWN = 7

    @property
    def words(self) -> str:
        """The level as text for users."""
        return LEVEL_WORDS[self]


LEVEL_WORDS = {
    LinkLevel.NVLINK: "NVLink",
    LinkLevel.MESH: "NVLink mesh, some pairs via a neighbor",
    LinkLevel.PIX: "one PCIe switch",
    LinkLevel.PXB: "several PCIe switches",
    LinkLevel.PHB: "one PCIe host bridge",
    LinkLevel.NODE: "one NUMA node, across host bridges",
    LinkLevel.SYS: "across the CPU interconnect",
    LinkLevel.UNKNOWN: "links unknown",
}

_OLD_NAMES = {"PSB": LinkLevel.PIX, "SOC": LinkLevel.SYS, "CPU": LinkLevel.NODE, "INTERNAL": LinkLevel.PIX}
"""Names in earlier releases of nvidia-smi; PSB, a board's own bridge, is a PCIe switch."""

NVLINK_MBS = (14062.5, 20000.0, 25000.0, 50000.0, 100000.0)
"""Data rates of one link in one direction, in MB/s: GA10x (3.1), then NVLink 1, 2 to 4, 5, 6."""

VERSION_MBS = {"1.0": 20000.0, "2.0": 25000.0, "2.2": 25000.0, "3.0": 25000.0, "3.1": 14062.5, "4.0": 25000.0}
VERSION_MBS |= {"5.0": 50000.0, "6.0": 100000.0}

NAME_VERSIONS = (
    (r"\b(B[1-3]00|GB[1-3]00)\b", "5.0"),
    (r"\b(H100|H200|H800|H20|GH200)\b", "4.0"),
    (r"\b(A100|A800|A30)\b", "3.0"),
    (r"\b(A6000|A5500|A5000|A4500|A40|3090)\b", "3.1"),
    (r"\b(V100|RTX 8000|RTX 6000|RTX 5000|2080|TITAN RTX)\b", "2.0"),
    (r"\bP100\b", "1.0"),
)
"""NVLink version by GPU name, for a host whose driver was not queried."""


def link_level(kind: str) -> LinkLevel:
    """The level of a link kind such as ``NV4`` or ``PHB``."""
    word = kind.strip().upper()
    if _NVLINK.fullmatch(word) and nvlinks_in(word):
        return LinkLevel.NVLINK
    if word in ("PIX", "PXB", "PHB", "NODE", "SYS"):
        return LinkLevel[word]
    return _OLD_NAMES.get(word, LinkLevel.UNKNOWN)


def nvlinks_in(kind: str) -> int:
    """Number of NVLinks that a kind bonds: 4 for ``NV4``, 0 for any other kind."""
    found = _NVLINK.fullmatch(kind.strip().upper())
    return int(found[1]) if found else 0


def nvlink_mbs(gpu: Gpu) -> float | None:
    """Bandwidth of one NVLink in one direction, in MB/s, by driver, version or name; None if unknown.

    The driver reports the raw rate (26,562 where data sheets say 25,000), so the nearest known rate within 8% is used.
    """
    stated = gpu.nvlink_speed_mbs
    if stated:
        nearest = min(NVLINK_MBS, key=lambda rate: abs(rate - stated))
        return nearest if abs(nearest - stated) <= 0.08 * nearest else stated
    version = next((link.version for link in gpu.nvlinks if link.version), None)
    if version is None and gpu.name:
        version = next((version for pattern, version in NAME_VERSIONS if re.search(pattern, gpu.name)), None)
    return VERSION_MBS.get(version) if version else None


def pcie_gbs(gpu: Gpu) -> float | None:
    """Bandwidth of the PCIe slot in GB/s, sum of both directions: the fastest generation at the current width.

    (An idle GPU drops to generation 1, but keeps its width.)
    """
    lane = PCIE_LANE_GBS.get(gpu.pcie_generation_max or gpu.pcie_generation or 0)
    width = gpu.pcie_width or gpu.pcie_width_max
    return round(2 * lane * width, 1) if lane and width else None


def bandwidth(kind: str, a: Gpu, b: Gpu) -> float | None:
    """Peak bandwidth of a pair in GB/s, sum of both directions; None if unknown."""
    count = nvlinks_in(kind)
    if count:
        rates = [rate for rate in (nvlink_mbs(a), nvlink_mbs(b)) if rate]
        return round(2 * count * min(rates) / 1000, 1) if rates else None
    ends = [pcie_gbs(a), pcie_gbs(b)]
    return min(end for end in ends if end is not None) if None not in ends else None


def islands_of(indices: Iterable[int], links: Sequence[Link]) -> tuple[tuple[int, ...], ...]:
    """Groups of GPUs connected by NVLink, directly or through neighbors."""
    return connected(indices, [(link.a, link.b) for link in links if link_level(link.kind) is LinkLevel.NVLINK])


def pcie_groups(indices: Sequence[int], links: Sequence[Link]) -> tuple[tuple[int, ...], ...]:
    """Groups of GPUs that reach each other without crossing the CPU interconnect."""
    wanted = set(indices)
    return connected(
        indices, [(k.a, k.b) for k in links if k.a in wanted and k.b in wanted and link_level(k.kind) <= LinkLevel.NODE]
    )


def pair_level(host: Host, a: int, b: int, link: Link | None) -> LinkLevel:
    """The level of two GPUs: that of their ``link``, or if that is unknown, NVLink if they are in the same island."""
    if link is not None:
        return link_level(link.kind)
    together = any(a in island and b in island for island in host.islands)
    return LinkLevel.NVLINK if together else LinkLevel.UNKNOWN


def near_groups(
    indices: Sequence[int], level: Callable[[int, int], LinkLevel], links: Sequence[Link]
) -> tuple[tuple[int, ...], ...]:
    """Groups within a set that do not cross the CPU interconnect, or its NVLink islands if it has any."""
    nvlink = connected(indices, [pair for pair in combinations(indices, 2) if level(*pair) is LinkLevel.NVLINK])
    return pcie_groups(indices, links) if len(nvlink) == len(indices) else nvlink


CELL = 5
"""Width of a cell: four columns for the longest kinds (``NODE``, ``NV18``) and one space."""

LABEL = 3
_ROLES = {
    LinkLevel.NVLINK: "nvlink",
    LinkLevel.PIX: "switch",
    LinkLevel.PXB: "switch",
    LinkLevel.PHB: "bridge",
    LinkLevel.NODE: "node",
}
_ROLES |= {LinkLevel.SYS: "sys"}


class Cell(msgspec.Struct, frozen=True):
    """A piece of a row. ``role`` is ``head``, ``self``, ``nvlink``, ``switch``, ``bridge``, ``node``, ``sys``,
    ``unknown``, ``fact``, ``lost`` or ``space``; ``gpu`` and ``other`` are its GPUs.
    """

    text: str
    role: str = "space"
    gpu: int | None = None
    other: int | None = None


Row = tuple[Cell, ...]
Facts = Callable[[Gpu | None], str]
"""Text to the right of a GPU's row; for None, its heading."""


def topology_rows(host: Host, width: int) -> list[Row]:
    """The matrix, at most ``width`` columns wide; a list of groups and pairs if it does not fit."""
    if not host.gpus:
        return []
    choices: tuple[Facts | None, ...] = (_all_facts, _facts, _short_facts, None)
    for fact_of in choices:
        rows = matrix_rows(host, fact_of)
        if all(row_width(row) <= width for row in rows):
            return rows
    return list_rows(host)


def matrix_rows(host: Host, fact_of: Facts | None = None) -> list[Row]:
    """A heading and a row per GPU, with a gap between islands; ``fact_of`` returns the text to the right of a row."""
    order = island_order(host)
    heading: list[Cell] = [Cell(" " * LABEL)]
    for index, first in order:
        heading += [*_gap(first, index != order[0][0]), Cell(f"{index:>{CELL}}", "head", index)]
    rows: list[Row] = [(*heading, Cell("  " + fact_of(None), "head")) if fact_of else tuple(heading)]
    for position, (index, first) in enumerate(order):
        gpu = host.gpu(index)
        assert gpu is not None
        if first and position:
            rows.append((Cell(""),))
        rows.append(tuple(_row(host, gpu, order, fact_of)))
    return rows


def island_order(host: Host) -> list[tuple[int, bool]]:
    """GPUs in drawing order, and whether each one begins a group.

    Groups are NVLink islands, or without NVLink, GPUs that share a NUMA node or PCIe root.
    """
    groups = _groups(host)
    return [(index, index == group[0]) for group in groups for index in group]


def _groups(host: Host) -> list[tuple[int, ...]]:
    indices = sorted(gpu.index for gpu in host.gpus)
    if any(len(island) > 1 for island in host.islands):
        return [tuple(island) for island in host.islands]
    return list(pcie_groups(indices, host.links))


def _gap(first: bool, inside: bool) -> list[Cell]:
    return [Cell(" ")] if first and inside else []


def _row(host: Host, gpu: Gpu, order: Sequence[tuple[int, bool]], fact_of: Facts | None) -> Iterator[Cell]:
    yield Cell(f"{gpu.index:>{LABEL}}", "lost" if gpu.lost else "head", gpu.index)
    for index, first in order:
        yield from _gap(first, index != order[0][0])
        yield pair_cell(host, gpu.index, index)
    if fact_of is not None:
        yield Cell("  " + fact_of(gpu), "lost" if gpu.lost else "fact", gpu.index)


def pair_cell(host: Host, a: int, b: int) -> Cell:
    """The cell for a pair: ``NV4``, ``SYS``, a dot for a GPU and itself, a dash if unknown."""
    if a == b:
        return Cell(f"{'·':>{CELL}}", "self", a, b)
    link = host.link(a, b)
    if link is None:
        return Cell(f"{'–':>{CELL}}", "unknown", a, b)
    return Cell(f"{link.kind[: CELL - 1]:>{CELL}}", _ROLES.get(link_level(link.kind), "unknown"), a, b)


def _all_facts(gpu: Gpu | None) -> str:
    if gpu is None:
        return f"{_short_facts(None)}  {'GPU':<24} HELD BY"
    return f"{_short_facts(gpu)}  {_name(gpu):<24} {held_summary(gpu, 28)}"


def _facts(gpu: Gpu | None) -> str:
    return f"{_short_facts(gpu)}  " + ("HELD BY" if gpu is None else held_summary(gpu, 16))


def _short_facts(gpu: Gpu | None) -> str:
    return f"{'NUMA':>4} {'FREE':>9}" if gpu is None else f"{_number(gpu.numa_node):>4} {_free(gpu):>9}"


def held_summary(gpu: Gpu, width: int) -> str:
    """Who holds how many GiB: ``chat 43.1  anna 2.0``; holders that do not fit are counted."""
    held = holdings(gpu)
    named = sorted([*held.ours.items(), *held.others.items()], key=lambda pair: -pair[1])
    named += [("unseen", held.unseen)] if held.unseen else []
    parts = [f"{name.partition(' (')[0]} {gib:.1f}" for name, gib in named]
    for shown in range(len(parts), 0, -1):
        text = "  ".join(parts[:shown]) + (f" +{len(parts) - shown}" if shown < len(parts) else "")
        if len(text) <= width or shown == 1:
            return text if len(text) <= width else f"{text[: width - 1]}…"
    return ""


def _free(gpu: Gpu) -> str:
    return "lost" if gpu.lost else ("–" if gpu.free_gib is None else f"{gpu.free_gib:.1f} GiB")


def _name(gpu: Gpu) -> str:
    return (gpu.name or "–").removeprefix("NVIDIA ").removeprefix("GeForce ")[:24]


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def list_rows(host: Host) -> list[Row]:
    """One line per group of GPUs with uniform links, then the links between groups."""
    rows: list[Row] = []
    groups = _groups(host)
    for group in groups:
        rows.append((Cell(f"GPU {spans(group)}", "head", group[0]), Cell(_inside(host, group), "fact")))
    for position, one in enumerate(groups):
        for other in groups[position + 1 :]:
            kinds = sorted({link.kind for a in one for b in other if (link := host.link(a, b))}, key=link_level)
            text = "/".join(kinds) or "–"
            rows.append((Cell(f"{spans(one)} – {spans(other)}", "head"), Cell(f"  {text}", "fact")))
    return rows


def _inside(host: Host, group: Sequence[int]) -> str:
    kinds = {link.kind for link in host.links if link.a in group and link.b in group}
    if len(group) == 1:
        return "  alone"
    return "  " + ("/".join(sorted(kinds, key=lambda kind: (link_level(kind), -nvlinks_in(kind)))) or "–")


LinkGroups = tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]


def link_groups(host: Host) -> LinkGroups | None:
    """Link kinds, closest first, each with the groups of GPUs that it connects; None if that is ambiguous.

    It is unambiguous if all GPUs connected by a kind, or by closer ones, reach each other at least that closely: then
    ``NV4`` within 0,1 and 2,3 and ``SYS`` within 0-3 give the kind of every pair.
    """
    return _link_groups(tuple(sorted(gpu.index for gpu in host.gpus)), host.links)


@lru_cache(maxsize=8)
def _link_groups(indices: tuple[int, ...], links: tuple[Link, ...]) -> LinkGroups | None:
    kinds = {frozenset((link.a, link.b)): link.kind for link in links}
    pairs = [frozenset(pair) for pair in combinations(indices, 2)]
    if any(pair not in kinds for pair in pairs):
        return None
    group_of: dict[int, tuple[int, ...]] = {index: (index,) for index in indices}
    found = []
    for kind in sorted({kinds[pair] for pair in pairs}, key=lambda kind: (link_level(kind), -nvlinks_in(kind), kind)):
        joined = _joined(group_of, [pair for pair in pairs if kinds[pair] == kind])
        for group in set(joined.values()):
            if any(kinds[frozenset((a, b))] != kind and group_of[a] != group_of[b] for a, b in combinations(group, 2)):
                return None
        found.append((kind, tuple(sorted(set(joined.values()) - set(group_of.values())))))
        group_of = joined
    return tuple(found)


def _joined(group_of: Mapping[int, tuple[int, ...]], pairs: Sequence[frozenset[int]]) -> dict[int, tuple[int, ...]]:
    """Each GPU's group after also joining these pairs."""
    joined = dict(group_of)
    for pair in pairs:
        one, other = (joined[index] for index in pair)
        if one != other:
            whole = tuple(sorted((*one, *other)))
            joined |= dict.fromkeys(whole, whole)
    return joined


def links_summary(host: Host) -> str | None:
    """All links in a few words: ``all-to-all NV18``, ``NV4 within 0,1 | 2,3 · SYS between them``.

    None if a matrix is needed, empty for a single GPU.
    """
    found = link_groups(host)
    if found is None:
        return None
    if not found:
        return ""
    if len(found) == 1:
        return f"all-to-all {found[0][0]}"
    words = [f"{kind} within {' | '.join(map(spans, groups))}" for kind, groups in found[:-1]]
    return " · ".join([*words, *(f"{kind} between them" for kind, _ in found[-1:])])


def spans(indices: Sequence[int]) -> str:
    """``0-3`` for 0, 1, 2, 3; ``0,2`` for 0 and 2."""
    ordered = list(indices)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def row_width(row: Row) -> int:
    """The width of a row in columns."""
    return sum(len(cell.text) for cell in row)


def row_text(row: Row) -> str:
    """A row as plain text."""
    return "".join(cell.text for cell in row).rstrip()


LEGEND = (
    ("NV#", "that many NVLinks"),
    ("PIX", "one PCIe switch"),
    ("PXB", "several PCIe switches"),
    ("PHB", "one PCIe host bridge"),
    ("NODE", "one NUMA node"),
    ("SYS", "across the CPU interconnect"),
)


def legend(host: Host) -> list[str]:
    """The meaning of the link kinds in this host's matrix."""
    shown = {"NV#" if nvlinks_in(link.kind) else link.kind for link in host.links}
    return [f"{kind} {words}" for kind, words in LEGEND if kind in shown]

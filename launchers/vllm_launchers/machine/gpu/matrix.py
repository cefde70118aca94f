"""The topology as text: a matrix grouped by island, or a list of pairs where the matrix does not fit. Pure.

Cells carry a role and the GPUs they speak of; who draws them gives the colours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from vllm_launchers.machine.gpu.host import Gpu, Host
from vllm_launchers.machine.gpu.links import Level, level_of, nvlinks_in, pcie_groups
from vllm_launchers.machine.gpu.sharing import holdings

CELL = 5
"""Columns of a cell: four for the longest kinds (``NODE``, ``NV18``) and one between."""

LABEL = 3
_ROLES = {Level.NVLINK: "nvlink", Level.PIX: "switch", Level.PXB: "switch", Level.PHB: "bridge", Level.NODE: "node"}
_ROLES |= {Level.SYS: "sys"}


@dataclass(frozen=True, slots=True)
class Cell:
    """A piece of a row. ``role`` is ``head``, ``self``, ``nvlink``, ``switch``, ``bridge``, ``node``, ``sys``,
    ``unknown``, ``fact``, ``lost`` or ``space``; ``gpu`` and ``other`` are the GPUs that it speaks of.
    """

    text: str
    role: str = "space"
    gpu: int | None = None
    other: int | None = None


Row = tuple[Cell, ...]
Facts = Callable[[Gpu | None], str]
"""What stands right of a GPU's row; for None, its heading."""


def topology_rows(host: Host, width: int) -> list[Row]:
    """The matrix, at most ``width`` columns wide; a list of groups and pairs where it does not fit."""
    if not host.gpus:
        return []
    choices: tuple[Facts | None, ...] = (_all_facts, _facts, _short_facts, None)
    for tell in choices:
        rows = matrix_rows(host, tell)
        if all(row_width(row) <= width for row in rows):
            return rows
    return list_rows(host)


def matrix_rows(host: Host, tell: Facts | None = None) -> list[Row]:
    """A row per GPU under a heading, islands set apart by a gap; ``tell`` gives what stands right of each row."""
    order = island_order(host)
    heading: list[Cell] = [Cell(" " * LABEL)]
    for index, first in order:
        heading += [*_gap(first, index != order[0][0]), Cell(f"{index:>{CELL}}", "head", index)]
    rows: list[Row] = [(*heading, Cell("  " + tell(None), "head")) if tell else tuple(heading)]
    for position, (index, first) in enumerate(order):
        gpu = host.gpu(index)
        assert gpu is not None
        if first and position:
            rows.append((Cell(""),))
        rows.append(tuple(_row(host, gpu, order, tell)))
    return rows


def island_order(host: Host) -> list[tuple[int, bool]]:
    """GPUs in the order they are drawn, and whether each begins a group.

    Groups are NVLink islands; where no NVLink is, the GPUs that share a NUMA node or a PCIe root.
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


def _row(host: Host, gpu: Gpu, order: Sequence[tuple[int, bool]], tell: Facts | None) -> Iterator[Cell]:
    yield Cell(f"{gpu.index:>{LABEL}}", "lost" if gpu.lost else "head", gpu.index)
    for index, first in order:
        yield from _gap(first, index != order[0][0])
        yield pair_cell(host, gpu.index, index)
    if tell is not None:
        yield Cell("  " + tell(gpu), "lost" if gpu.lost else "fact", gpu.index)


def pair_cell(host: Host, a: int, b: int) -> Cell:
    """The cell for a pair: ``NV4``, ``SYS``, a dot for a GPU and itself, a dash where nothing is known."""
    if a == b:
        return Cell(f"{'·':>{CELL}}", "self", a, b)
    link = host.link(a, b)
    if link is None:
        return Cell(f"{'–':>{CELL}}", "unknown", a, b)
    return Cell(f"{link.kind[: CELL - 1]:>{CELL}}", _ROLES.get(level_of(link.kind), "unknown"), a, b)


def _all_facts(gpu: Gpu | None) -> str:
    if gpu is None:
        return f"{_short_facts(None)}  {'GPU':<24} HELD BY"
    return f"{_short_facts(gpu)}  {_name(gpu):<24} {held_summary(gpu, 28)}"


def _facts(gpu: Gpu | None) -> str:
    return f"{_short_facts(gpu)}  " + ("HELD BY" if gpu is None else held_summary(gpu, 16))


def _short_facts(gpu: Gpu | None) -> str:
    return f"{'NUMA':>4} {'FREE':>9}" if gpu is None else f"{_number(gpu.numa_node):>4} {_free(gpu):>9}"


def held_summary(gpu: Gpu, width: int) -> str:
    """Who holds how many GiB: ``chat 43.1  anna 2.0``; what does not fit is counted."""
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
    """One line per group of GPUs that are all linked alike, then the links between groups."""
    rows: list[Row] = []
    groups = _groups(host)
    for group in groups:
        rows.append((Cell(f"GPU {spans(group)}", "head", group[0]), Cell(_inside(host, group), "fact")))
    for position, one in enumerate(groups):
        for other in groups[position + 1 :]:
            kinds = sorted({link.kind for a in one for b in other if (link := host.link(a, b))}, key=level_of)
            text = "/".join(kinds) or "–"
            rows.append((Cell(f"{spans(one)} – {spans(other)}", "head"), Cell(f"  {text}", "fact")))
    return rows


def _inside(host: Host, group: Sequence[int]) -> str:
    kinds = {link.kind for link in host.links if link.a in group and link.b in group}
    if len(group) == 1:
        return "  alone"
    return "  " + ("/".join(sorted(kinds, key=lambda kind: (level_of(kind), -nvlinks_in(kind)))) or "–")


def spans(indices: Sequence[int]) -> str:
    """``0-3`` for 0, 1, 2, 3; ``0,2`` for 0 and 2."""
    ordered = list(indices)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}-{ordered[-1]}"
    return ",".join(map(str, ordered))


def row_width(row: Row) -> int:
    """How many columns a row takes."""
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
    """What the kinds in this host's matrix mean."""
    shown = {"NV#" if nvlinks_in(link.kind) else link.kind for link in host.links}
    return [f"{kind} {words}" for kind, words in LEGEND if kind in shown]

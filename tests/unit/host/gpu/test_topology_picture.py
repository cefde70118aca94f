"""The matrix of every recorded host as drawn at 80×24 and 120×40, and how it is made to fit."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from vllm_launchers.host.gpu.document import recorded_hosts
from vllm_launchers.host.gpu.host import Gpu, Host, Link
from vllm_launchers.host.gpu.topology import (
    island_order,
    islands_of,
    legend,
    pair_cell,
    row_text,
    row_width,
    topology_rows,
)

PICTURES = Path(__file__).parent / "pictures"
SIZES = ((80, 24), (120, 40))


def switched(count: int, kind: str = "NV18") -> Host:
    links = tuple(Link(a, b, kind) for a, b in combinations(range(count), 2))
    gpus = tuple(Gpu(index, name="NVIDIA H100", free_gib=79.0) for index in range(count))
    return Host(gpus=gpus, links=links, islands=islands_of(range(count), links))


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", recorded_hosts())
def test_recorded_host_drawing_is_unchanged(
    name: str, width: int, height: int, recorded: Callable[[str], Host]
) -> None:
    host = recorded(name)
    rows = topology_rows(host, width)
    assert all(row_width(row) <= width for row in rows)
    drawn = "\n".join([*map(row_text, rows), "", " · ".join(legend(host))]) + "\n"
    assert len(drawn.splitlines()) <= height
    path = PICTURES / f"{name}-{width}x{height}.txt"
    if os.environ.get("UPDATE_PICTURES"):
        path.write_text(drawn)
    assert drawn == path.read_text()


def test_eight_gpus_fit_eighty_columns() -> None:
    rows = topology_rows(switched(8), 80)
    assert len(rows) == 9
    assert "79.0 GiB" in row_text(rows[1])


def test_matrix_that_does_not_fit_becomes_a_list() -> None:
    rows = [row_text(row) for row in topology_rows(switched(16), 60)]
    assert rows == ["GPU 0-15  NV18"]
    pairs = dict.fromkeys(((0, 3), (1, 2)), "NV4")
    links = tuple(Link(a, b, pairs.get((a, b), "SYS")) for a, b in combinations(range(4), 2))
    host = Host(gpus=tuple(map(Gpu, range(4))), links=links, islands=islands_of(range(4), links))
    assert [row_text(row) for row in topology_rows(host, 20)] == ["GPU 0,3  NV4", "GPU 1,2  NV4", "0,3 – 1,2  SYS"]


def test_islands_are_grouped() -> None:
    links = (Link(0, 3, "NV4"), Link(1, 2, "NV4"), Link(0, 1, "SYS"))
    host = Host(gpus=tuple(map(Gpu, range(4))), links=links, islands=islands_of(range(4), links))
    assert [index for index, _ in island_order(host)] == [0, 3, 1, 2]
    rows = [row_text(row) for row in topology_rows(host, 80)]
    assert rows[3] == ""
    assert rows[1].split()[:5] == ["0", "·", "NV4", "SYS", "–"]


def test_cells_identify_their_gpus() -> None:
    host = switched(2, "NV4")
    assert (pair_cell(host, 0, 1).role, pair_cell(host, 0, 1).gpu, pair_cell(host, 0, 1).other) == ("nvlink", 0, 1)
    assert pair_cell(host, 1, 1).role == "self"
    assert pair_cell(Host(), 0, 1).role == "unknown"
    roles = {
        kind: pair_cell(Host(links=(Link(0, 1, kind),)), 0, 1).role for kind in ("PIX", "PXB", "PHB", "NODE", "SYS")
    }
    assert roles == {"PIX": "switch", "PXB": "switch", "PHB": "bridge", "NODE": "node", "SYS": "sys"}


def test_machine_without_gpus_has_no_picture() -> None:
    assert topology_rows(Host(), 80) == []
    assert legend(Host()) == []

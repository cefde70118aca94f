"""The GPU pane's lines: memory holders and their colors, within the available space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.ui.panes.gpu_lines import FREE, OTHERS, OURS, colors_of, gpus_lines
from vllm_console.ui.panes.gpus import format_host
from vllm_launchers.host.gpu.document import read_host, recorded_hosts
from vllm_launchers.host.gpu.host import Holder, Host


def snapshot(host: Host | None, *servers: Any, problem: str = "", recorded: bool = False) -> FleetSnapshot:
    return FleetSnapshot(0.0, "gpubox", servers, host=host, host_problem=problem, host_recorded=recorded)


def text(found: FleetSnapshot, width: int = 120, height: int = 30) -> str:
    return "\n".join(strip.text for strip in gpus_lines(found, width, height))


@pytest.mark.parametrize("name", recorded_hosts())
@pytest.mark.parametrize("size", [(80, 10), (80, 16), (120, 34), (40, 12), (200, 50)])
def test_pane_keeps_its_size_on_every_host(name: str, size: tuple[int, int]) -> None:
    lines = gpus_lines(snapshot(read_host(Path(name))), *size)
    assert len(lines) <= size[1]
    assert all(strip.cell_length <= size[0] for strip in lines)


def test_eight_gpus_with_all_facts_fit_into_80_columns() -> None:
    drawn = text(snapshot(read_host(Path("8xh100"))), 80, 16)
    assert "all-to-all NV18" in drawn
    assert "FREE GiB UTIL" in drawn
    assert drawn.count("/700") == 8
    assert drawn.count("63°C") == 2
    assert "python train.py" in drawn
    assert "VLLM::Worker_TP1" in drawn
    assert "anna 61.2" in drawn
    assert "chat 71.0" in drawn


def test_own_and_foreign_memory_differ_without_colors() -> None:
    host = read_host(Path("4xa6000"))
    ours = Holder(pid=1, server="chat", gib=20.0)
    gpus = (replace(host.gpus[0], used_by=(*host.gpus[0].holders, ours), free_gib=7.0), *host.gpus[1:])
    row = next(line for line in text(snapshot(replace(host, gpus=gpus))).splitlines() if line.startswith("  0"))
    assert row.index(OURS) < row.index(OTHERS) < row.index(FREE)
    assert "anna 20.5" in row
    assert "chat 20.0" in row


def test_irregular_links_stay_a_matrix_with_the_servers_in_color(fakes: Any) -> None:
    host = read_host(Path("4xa6000"))
    links = tuple(replace(link, kind="PHB") if (link.a, link.b) == (0, 2) else link for link in host.links)
    found = snapshot(replace(host, links=links), fakes.docs(0.0), fakes.chat(0.0))
    colours = colors_of(found)
    assert len({str(colour) for colour in colours.values()}) == 2
    strip = next(strip for strip in gpus_lines(found, 120, 20) if strip.text.startswith("  2"))
    in_colour = [segment.text.strip() for segment in strip if segment.style == colours["docs"]]
    assert in_colour == ["2", "·", "NV4"]
    assert "NV# that many NVLinks" in text(found)


def test_unreported_is_a_dash_and_a_lost_gpu_says_why() -> None:
    host = read_host(Path("4xa6000"))
    bare = replace(host.gpus[0], utilization=None, temperature_c=None, power_w=None, power_limit_w=None, free_gib=None)
    lost = replace(host.gpus[1], lost="fell off the bus (Xid 79)")
    lines = text(snapshot(replace(host, gpus=(bare, lost, *host.gpus[2:])))).splitlines()
    row = next(line for line in lines if line.startswith("  0"))
    assert row.count("–") == 5
    assert "0%" not in row
    assert any(line.startswith("  1") and "fell off the bus (Xid 79)" in line for line in lines)


def test_reported_traffic_is_shown() -> None:
    host = read_host(Path("4xa6000"))
    assert "NVLink GB/s" not in text(snapshot(host))
    gpus = (replace(host.gpus[0], nvlink_sent_gbs=12.34, nvlink_received_gbs=0.0), *host.gpus[1:])
    assert "NVLink GB/s  GPU 0 ↑12.3 ↓0.0  GPU 1-3 not reported" in text(snapshot(replace(host, gpus=gpus)))


def test_without_gpus_one_sentence_says_why() -> None:
    assert text(snapshot(None, problem="no NVIDIA driver was found")).splitlines()[1:] == [
        " no NVIDIA driver was found"
    ]
    assert "looking for GPUs" in text(snapshot(None))


def test_outside_names_bring_no_escape_codes() -> None:
    host = read_host(Path("1xrtx4090"))
    evil = Holder(pid=1, user="\x1b[31mmallory", gib=5.0)
    gpus = (replace(host.gpus[0], name="\x1b]0;x\x07RTX", used_by=(evil,), free_gib=10.0),)
    found = snapshot(replace(host, gpus=gpus))
    assert "\x1b" not in text(found) + "".join(format_host(found))


def test_header_names_gpus_and_driver() -> None:
    assert format_host(snapshot(read_host(Path("4xa6000")))) == ["4× RTX A6000", "driver 580.95"]
    assert format_host(snapshot(read_host(Path("4xa6000")), recorded=True))[0] == "4× RTX A6000 (recorded)"
    assert format_host(snapshot(None)) == []

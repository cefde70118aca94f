"""A GPU's charts in the GPUs pane: values, time range, and what is red."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.events import MouseScrollUp

from vllm_console.fleet.markers import Marker, MarkerKind
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.ui.panes.gpu_charts import GpuHistoryView, gpu_chart_lines, page_count
from vllm_console.ui.theme import BAD
from vllm_console.ui.widgets.chart import ChartView
from vllm_launchers.host.gpu.document import read_host, recorded_hosts

HOST = read_host(Path("4xa6000"))
FIRST = GpuHistoryView()


def snapshot(fakes: Any, **changes: Any) -> FleetSnapshot:
    chart = replace(fakes.gpu_chart_at(HOST.gpus[0], fakes.NOW), **changes)
    return FleetSnapshot(fakes.NOW, "gpubox", host=HOST, gpu_chart=chart)


def text(found: FleetSnapshot, view: GpuHistoryView = FIRST, width: int = 120, height: int = 30) -> str:
    return "\n".join(strip.text for strip in gpu_chart_lines(found, view, width, height))


@pytest.mark.parametrize("name", recorded_hosts())
@pytest.mark.parametrize("size", [(80, 10), (80, 16), (120, 34), (40, 12), (200, 50), (20, 4)])
def test_the_charts_keep_to_their_size_on_every_host(fakes: Any, name: str, size: tuple[int, int]) -> None:
    host = read_host(Path(name))
    found = FleetSnapshot(fakes.NOW, "gpubox", host=host, gpu_chart=fakes.gpu_chart_at(host.gpus[0], fakes.NOW))
    for page in range(page_count(found.gpu_chart, *size)):  # type: ignore[arg-type]
        lines = gpu_chart_lines(found, GpuHistoryView(page), *size)
        assert len(lines) <= size[1]
        assert all(strip.cell_length <= size[0] for strip in lines)


def test_every_figure_and_every_link_is_on_one_of_the_pages(fakes: Any) -> None:
    found = snapshot(fakes)
    pages = [text(found, GpuHistoryView(page), 80, 12) for page in range(page_count(found.gpu_chart, 80, 12))]  # type: ignore[arg-type]
    for title in ("utilization GPU", "memory GiB", "power W", "temperature °C", "clocks MHz", "PCIe GB/s",
                  *(f"link {number} → GPU 1 GB/s" for number in range(4))):  # fmt: skip
        assert sum(title in page for page in pages) == 1, title
    assert "NVLink GB/s" not in "".join(pages), "nobody reported a total"


@pytest.mark.parametrize("width", [80, 120, 160])
def test_both_figures_of_a_link_are_whole_beside_its_name(fakes: Any, width: int) -> None:
    chart = snapshot(fakes).gpu_chart
    assert chart is not None
    values = dict(chart.series.values)
    for link in chart.card.links:
        values[link.key("received_gbs")] = values[link.key("sent_gbs")]
    found = snapshot(fakes)
    found = replace(found, gpu_chart=replace(chart, series=replace(chart.series, values=values)))
    pages = [text(found, GpuHistoryView(page), width, 30) for page in range(page_count(found.gpu_chart, width, 30))]  # type: ignore[arg-type]
    link = next(line for page in pages for line in page.splitlines() if "link 0 → GPU 1 GB/s" in line)
    assert re.search(r"link 0 → GPU 1 GB/s (?:sent [\d.]+ · recv|↑[\d.]+ ↓)[ \d.]+", link), link


def test_only_what_is_above_a_limit_is_red(fakes: Any) -> None:
    red = {
        segment.text
        for strip in gpu_chart_lines(snapshot(fakes), GpuHistoryView(), 120, 30)
        for segment in strip
        if segment.style == BAD
    }
    assert {"324 !", "99 !"} <= red
    assert any(ord(character) > 0x2800 for text in red for character in text), "the curve, too"
    calm = snapshot(fakes)
    card = replace(calm.gpu_chart.card, power_limit_w=400, temperature_slowdown_c=None)  # type: ignore[union-attr]
    drawn = gpu_chart_lines(snapshot(fakes, card=card), GpuHistoryView(), 120, 30)
    assert not [segment for strip in drawn for segment in strip if segment.style == BAD]
    words = "\n".join(strip.text for strip in drawn)
    assert "limit 400" in words
    assert "slowdown" not in words, "a limit that is not known is not drawn"


def test_figures_are_those_under_the_cursor_and_markers_are_drawn(fakes: Any) -> None:
    found = snapshot(fakes)
    at = fakes.NOW - 600
    marker = Marker(fakes.NOW - 300, MarkerKind.START, "r2", "Restart")
    drawn = text(found, GpuHistoryView(0, ChartView(cursor=at), (marker,)))
    assert "power W 30 limit 300" in drawn
    assert "12:31:07" in drawn
    assert "r2" in drawn
    assert "power W 324 ! limit 300" in text(found)


async def test_keys_show_charts_and_lead_through_gpus(console: Any, fakes: Any) -> None:
    fleet = fakes.FakeFleet(fakes.coder)
    fleet.gpus = {"host": HOST, "host_recorded": True}
    fleet.gpu_charts = {gpu.index: fakes.gpu_chart_at(gpu, fakes.NOW) for gpu in HOST.gpus}
    async with console(fleet=fleet, size=(80, 30)) as c:
        await c.press("J")
        await c.sees("No charts of GPUs are shown: H shows them.")
        assert {view.gpu for view in fleet.times} == {None}, "what nobody looks at is not read"
        await c.press("H")
        await c.sees("6 GPUs · GPU 1 RTX A6000")
        await c.sees("temperature °C")
        await c.press("left")
        await c.until(lambda: fleet.times[-1].at is not None)
        while "link 3 → GPU 0" not in c.text:
            before = c.text
            await c.press("J")
            await c.until(lambda before=before: c.text != before)
        await c.press("J")
        await c.sees("6 GPUs · GPU 2 RTX A6000")
        await c.press("K")
        await c.sees("6 GPUs · GPU 1 RTX A6000")
        await c.sees("link 3 → GPU 0")
        await c.press("J")
        await c.sees("6 GPUs · GPU 2 RTX A6000")
        await c.press("end", "H")
        await c.sees("FREE")
        await c.until(lambda: fleet.times[-1].gpu is None)


async def test_time_can_be_moved_without_a_server(console: Any, fakes: Any) -> None:
    fleet = fakes.FakeFleet()
    fleet.gpus = {"host": HOST}
    fleet.gpu_charts = {0: fakes.gpu_chart_at(HOST.gpus[0], fakes.NOW)}
    async with console(fleet=fleet) as c:
        await c.press("H")
        await c.sees("6 GPUs · GPU 0 RTX A6000")
        await c.press("left")
        await c.until(lambda: fleet.times[-1].at is not None)
        await c.press("end")
        await c.until(lambda: fleet.times[-1].at is None)
        pane = c.app.operations.query_one("#gpus")
        y = next(y for y, strip in enumerate(pane.lines) if "┤" in strip.text)
        await c.pilot._post_mouse_events([MouseScrollUp], widget=pane, offset=(20, y))
        await c.until(lambda: fleet.times[-1].at is not None, "the wheel moves the cursor, too")

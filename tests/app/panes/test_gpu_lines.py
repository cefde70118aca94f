"""Lines of the GPU pane: single processes and their owners, and NVLink traffic and state, in any size."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.host_text import describe_host
from vllm_console.ui.panes.gpu_lines import colors_of, gpus_lines, wanted_height
from vllm_console.ui.screens.gpu_details import details_lines
from vllm_console.ui.theme import DIM, WARN
from vllm_launchers.host.gpu.document import read_host, recorded_hosts
from vllm_launchers.host.gpu.host import Holder, Host, NvLink

AT = 1_000_000.0


def seen(host: Host) -> FleetSnapshot:
    return FleetSnapshot(AT, "box", host=host)


def shown(host: Host, width: int = 120, height: int = 40) -> list[str]:
    return [strip.text.rstrip() for strip in gpus_lines(seen(host), width, height)]


def crowded(count: int) -> Host:
    host = replace(read_host(Path("4xa6000")), at=AT)
    holders = tuple(
        Holder(100 + n, user="anna", gib=1.0 + n, command=f"job {n}", started_at=AT - 60.0 * n) for n in range(count)
    )
    return replace(host, gpus=(replace(host.gpus[0], used_by=holders), *host.gpus[1:]))


def test_each_process_has_its_line_with_owner_memory_age_and_command() -> None:
    host = replace(read_host(Path("4xa6000")), at=AT)
    ours = Holder(4242, user="ben", gib=43.1, server="chat", command="VLLM::Worker", started_at=AT - 7800)
    hidden = Holder(99, gib=None)
    host = replace(host, gpus=(host.gpus[0], replace(host.gpus[1], used_by=(hidden, ours)), *host.gpus[2:]))
    lines = shown(host)
    start = next(i for i, text in enumerate(lines) if text.split()[:2] == ["GPU", "PID"])
    assert [text.split() for text in lines[start + 1 : start + 4]] == [
        ["0", "2210", "anna", "20.5", *lines[start + 1].split()[4:]],
        ["1", "4242", "chat", "(yours)", "43.1", "2h10m", "VLLM::Worker"],
        ["1", "99", "unseen", "–", "–", "in", "a", "container,", "or", "ended"],
    ]
    strip = gpus_lines(seen(host), 120, 40)[start + 2]
    assert any(part.style == colors_of(seen(host))["chat"] for part in strip if "chat" in part.text)


@pytest.mark.parametrize("name", recorded_hosts())
def test_the_lines_fit_whatever_room_there_is(name: str) -> None:
    for width, height in product((40, 60, 80, 120, 200), (3, 8, 12, 16, 30)):
        lines = gpus_lines(seen(read_host(Path(name))), width, height)
        assert len(lines) <= height
        assert max(strip.cell_length for strip in lines) <= width, (width, height)


def test_processes_take_only_the_room_that_the_rest_leaves_and_say_how_many_are_left_out() -> None:
    host = crowded(9)
    whole = shown(host, 100, wanted_height(host, 100))
    assert sum("anna" in text and "job" in text for text in whole) == 9
    assert not any("more process" in text for text in whole)
    few = shown(host, 100, wanted_height(host, 100) - 5)
    assert next(text for text in few if "job" in text).split()[1] == "108"
    assert sum("job" in text for text in few) + int(next(t for t in few if "more process" in t).split()[0]) == 9
    assert not any(text.startswith(" NV#") for text in whole), "no matrix has an NV# in it"
    assert any(" AGE COMMAND" in text for text in whole)
    least = shown(host, 100, 8)
    assert not any("PID" in text for text in least)


def test_nvlinks_that_are_down_or_have_errors_are_counted_and_traffic_is_live() -> None:
    host = read_host(Path("2xrtx3090"))
    ports = [replace(port, sent_gbs=1.5, received_gbs=1.25) for port in host.gpus[0].nvlinks]
    bad = NvLink(3, active=True, errors={"crc": 7, "replay": 0})
    broken = replace(host.gpus[0], nvlinks=(*ports[:2], NvLink(2, active=False), bad), nvlink_sent_gbs=4.5)
    host = replace(host, gpus=(broken, host.gpus[1]))
    lines = shown(host)
    assert " NVLink GB/s  GPU 0 ↑4.5 ↓–  GPU 1 not reported" in lines
    assert " NVLinks      3 of 4 up on 0, 4 of 4 up on 1, 7 errors" in lines
    told = " ".join(strip.text for strip in details_lines(seen(host), 120))
    row = next(strip.text for strip in details_lines(seen(host), 120) if "3 of 4" in strip.text)
    assert row.split()[:8] == ["0", "3", "of", "4", "3.1", "GPU", "1", "4.5"]
    assert "0 ↑1.5 ↓1.2 · 1 ↑1.5 ↓1.2 · 2 down · 3 7 CRC errors" in " ".join(told.split())


def test_what_the_system_counts_of_a_cpu_are_threads() -> None:
    host = replace(read_host(Path("4xa6000")), cpu="AMD EPYC 7302 16-Core Processor", cpu_cores=64)
    assert any("16-Core Processor, 64 threads" in strip.text for strip in details_lines(seen(host), 120))
    assert any("16-Core Processor, 64 threads" in text for text in describe_host(host))


def test_clocks_that_are_low_since_nothing_is_computed_are_no_warning() -> None:
    host = read_host(Path("2xrtx3090"))
    idle, hot = (replace(host.gpus[n], throttle=("idle",) if not n else ("too hot (driver)",)) for n in (0, 1))
    rows = [segment for strip in details_lines(seen(replace(host, gpus=(idle, hot))), 120) for segment in strip]
    styles = {segment.text.strip(): segment.style for segment in rows}
    assert styles["idle"] == DIM
    assert styles["too hot (driver)"] == WARN


def test_the_tables_name_every_process_and_keep_to_any_width() -> None:
    host = crowded(12)
    for width in (40, 80, 200):
        lines = [strip.text for strip in details_lines(seen(host), width)]
        assert max(map(len, lines)) <= width
        assert all(any(f" {100 + n} anna" in text for text in lines) for n in range(12))
    assert [strip.text for strip in details_lines(FleetSnapshot(AT, "box"), 80)] == [" no GPU found yet"]


async def test_a_machine_without_gpus_reports_it_in_place_of_their_description(console: Any) -> None:
    async with console() as c:
        c.fleet.gpus = {"host_problem": "no NVIDIA driver was found on this machine"}
        await c.press("6")
        await c.sees("no NVIDIA driver")
        await c.press("D")
        await c.until(lambda: c.app.operations is c.app.screen)
        await c.sees("no NVIDIA driver was found")
        c.fleet.gpus = {"host": read_host(Path("4xa6000"))}
        await c.sees("anna 20.5")
        await c.press("D")
        await c.sees("NVIDIA RTX A6000  Ampere")


def test_what_is_wrong_stands_before_all_that_is_good_to_know() -> None:
    host = read_host(Path("4xa6000"))
    hot = replace(host.gpus[3], throttle=("too hot (hardware)",), utilization=90.0, pcie_width=4, pcie_generation=3)
    host = replace(host, gpus=(*host.gpus[:3], hot))
    short = shown(host, 80, 9)
    assert short[-3:] == [
        " ! GPU 3: clocks throttled: too hot (hardware)",
        " ! GPU 3: PCIe ×4 of ×16; limited by slot, riser or lane sharing",
        " ! GPU 3: PCIe gen 3 of gen 4 under load",
    ]
    assert shown(host, 80, 8)[-1] == " ! more problems: D shows all"
    long = shown(host, 80, 40)
    assert long.index(short[-1]) < next(at for at, text in enumerate(long) if text.startswith(" NVLink"))
    told = [strip.text for strip in details_lines(seen(host), 100)]
    assert next(at for at, text in enumerate(told) if "clocks throttled" in text) < 10, "without scrolling"


async def test_the_description_of_the_gpus_goes_with_the_time(console: Any) -> None:
    async with console() as c:
        host = read_host(Path("4xa6000"))
        c.fleet.gpus = {"host": host}
        await c.press("6")
        await c.sees("anna 20.5")
        await c.press("D")
        await c.sees("NVIDIA RTX A6000  Ampere")
        hot = replace(host.gpus[0], temperature_c=97.0, throttle=("too hot (hardware)",))
        c.fleet.gpus = {"host": replace(host, gpus=(hot, *host.gpus[1:]))}
        await c.sees("clocks throttled: too hot")
        await c.sees("97°C")


@pytest.mark.parametrize("width", [58, 80, 100, 118])
@pytest.mark.parametrize("name", recorded_hosts())
def test_the_title_has_the_key_for_charts_at_any_width(name: str, width: int) -> None:
    found = replace(seen(read_host(Path(name))), host_recorded=True)
    assert gpus_lines(found, width, 20)[0].text.rstrip(" ─").endswith("H charts")


def test_a_wide_pane_has_processes_beside_the_gpus() -> None:
    host = crowded(3)
    lines = shown(host, 200, wanted_height(host, 200))
    assert "GPU      PID" in lines[1], "their heading stands beside that of the GPUs"
    assert sum("job " in text for text in lines) == 3
    assert wanted_height(host, 200) < wanted_height(host, 100)


def test_only_servers_on_this_hosts_gpus_have_a_color(fakes: Any) -> None:
    real, simulated = fakes.chat(fakes.NOW), fakes.coder(fakes.NOW)
    for host, recorded, names in (
        ("4xa6000", False, {"chat"}),
        ("4xa6000", True, {"coder"}),
        ("2xrtx3090", True, set()),
    ):
        found = replace(seen(read_host(Path(host))), servers=(real, simulated), host_recorded=recorded)
        assert set(colors_of(found)) == names

"""The launch screen's choice of GPUs, on a recorded host."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.ui.screens.launch import LaunchScreen
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.launch.place import GpuRequest, find_place
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.findings import Level, PlanFinding

TALL = (160, 50)
TO_GPUS = ("tab", "down", "down", "down", "down", "down")


@pytest.fixture
def fleet(fakes):
    class Fleet(fakes.FakeFleet):
        name = "4xa6000"
        size = 2

        def plan(self, request: LaunchRequest):
            flags = {"tensor-parallel-size": self.size, "gpu-memory-utilization": 0.9}
            found = find_place(
                GpuRequest(flags, fakes.VLLM), read_host(Path(self.name)), request.place, request.gpus
            )  # fmt: skip
            told = tuple(PlanFinding("gpus", Level.WARNING, text) for text in found.warnings)
            return replace(
                super().plan(request), gpus=found.gpus, findings=told, placement=found.reason, sets=found.sets
            )

    return Fleet()


async def test_the_best_set_stands_chosen_with_its_reason_and_uuids(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "auto → 2,3: NVLink ×4, 112 GB/s, both idle" in app.text())
        await pilot.press(*TO_GPUS)
        uuids = [gpu.uuid for gpu in read_host(Path("4xa6000")).gpus]
        await wait_until(pilot, lambda: f"GPU 2 is {uuids[2]}" in " ".join(app.text().split()))
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.results)
    assert fleet.calls[-1][1].place == "offered"


async def test_space_takes_the_next_set_and_what_is_wrong_with_it_is_seen(host, wait_until, fleet):
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "auto → 2,3" in app.text())
        await pilot.press(*TO_GPUS, "space", "space")
        await wait_until(pilot, lambda: "crosses the CPU interconnect" in " ".join(app.text().split()))
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: "ctrl+s again launches anyway" in app.text())
        await pilot.press("ctrl+s")
        await wait_until(pilot, lambda: app.results)
    request = fleet.calls[-1][1]
    assert (request.gpus, request.place) == ((1, 2), "")


async def test_where_nothing_fits_the_reason_is_reported_and_another_choice_can_be_made(host, wait_until, fleet):
    fleet.size = 4
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "needs 4 GPUs, each with 43.2 GiB free" in " ".join(app.text().split()))
        await pilot.press(*TO_GPUS, "space")
        await wait_until(pilot, lambda: "vLLM will not start" in " ".join(app.text().split()))
        await pilot.press("space")
        await wait_until(pilot, lambda: "none: vLLM chooses" in app.text())
        await pilot.press("u")
        await wait_until(pilot, lambda: "needs 4 GPUs" in " ".join(app.text().split()))


async def test_a_mig_slice_is_asked_for_by_its_uuid(host, wait_until, fleet):
    fleet.name, fleet.size = "1xa100-mig", 1
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "auto → 0: MIG slice" in app.text())
        await pilot.press(*TO_GPUS, "space", "ctrl+s")
        await wait_until(pilot, lambda: app.results)
    request = fleet.calls[-1][1]
    assert request.place.startswith("MIG-")


async def test_without_gpus_there_is_no_such_field(host, wait_until, fakes):
    fleet = fakes.FakeFleet()
    app = host(lambda: LaunchScreen(fleet))
    async with app.run_test(size=TALL) as pilot:
        await wait_until(pilot, lambda: "vllm serve" in app.text())
        await app.lacks("gpus")

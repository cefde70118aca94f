"""Pictures of the GPU pane on every recorded host, alone and beside others, and of what stands there without GPUs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from vllm_console.ui.app import ConsoleApp
from vllm_launchers.machine.gpu.document import read_host, recorded_hosts
from vllm_launchers.machine.gpu.host import Holder
from vllm_launchers.machine.gpu.sharing import Share

SIZES = [(80, 24), (120, 40)]


def pressing(*keys: str) -> Any:
    """Wait for the first look, press keys, wait until all is drawn."""

    async def run(pilot: Pilot[Any]) -> None:
        app = pilot.app
        assert isinstance(app, ConsoleApp)
        for _ in range(500):
            await pilot.pause()
            server = app.operations.selected
            if app.snapshot is not None and (server is None or server.series is not None):
                break
            await asyncio.sleep(0.01)
        await pilot.press(*keys)
        app.operations.redraw()
        await pilot.pause()

    return run


@pytest.fixture
def app(fakes: ModuleType) -> Any:
    def make(*servers: Any, **gpus: Any) -> ConsoleApp:
        fleet = fakes.FakeFleet(*(servers or (fakes.chat, fakes.coder)))
        fleet.gpus = gpus
        return ConsoleApp(fleet, refresh=0.25)

    return make


def recorded(name: str) -> dict[str, Any]:
    return {"host": read_host(Path(name)), "host_recorded": True}


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", recorded_hosts())
def test_gpus_alone(snap_compare, app, name, size):
    assert snap_compare(app(**recorded(name)), terminal_size=size, run_before=pressing("g"))


def test_gpus_beside_the_other_panes(snap_compare, app):
    gpus = recorded("4xa6000") | {"gpu_shares": (Share(1, gib=24.0),)}
    assert snap_compare(app(**gpus), terminal_size=(200, 60), run_before=pressing())


def test_a_tensor_parallel_server_with_its_traffic(snap_compare, app, fakes):
    host = read_host(Path("4xa6000"))
    held = (Holder(pid=4242, server="docs", gib=43.1),)
    busy = tuple(
        replace(gpu, used_by=held, free_gib=4.5, nvlink_sent_gbs=12.3, nvlink_received_gbs=11.9)
        if gpu.index in (2, 3)
        else gpu
        for gpu in host.gpus
    )
    gpus = {"host": replace(host, gpus=busy), "host_problem": "driver not answering since 12:40:58"}
    assert snap_compare(app(fakes.chat, fakes.docs, **gpus), terminal_size=(80, 24), run_before=pressing("6"))


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_everything_about_the_gpus(snap_compare, app, size):
    assert snap_compare(app(**recorded("8xl40s")), terminal_size=size, run_before=pressing("G"))


def test_no_driver(snap_compare, app):
    from vllm_launchers.machine.gpu.errors import NO_DRIVER

    assert snap_compare(app(host_problem=NO_DRIVER), terminal_size=(80, 24), run_before=pressing("g"))

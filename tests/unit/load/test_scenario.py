"""A scenario runs its phases, survives a restart of its server, and stops on request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import pytest

from vllm_console.load.client import LoadError
from vllm_console.load.run import Phase, run_scenario
from vllm_console.load.shape import Exact
from vllm_launchers.presets.model import Workload

if TYPE_CHECKING:
    from conftest import Stub
else:
    Stub = Any


def phases(workload: Workload) -> tuple[Phase, ...]:
    long = Workload(input_tokens_p95=400, output_tokens_p95=16, prefix_reuse=0.5, concurrency=4)
    return Phase("calm", 0.2, 10, workload), Phase("rush", 0.2, 50, long)


async def test_scenario_repeats_until_it_is_stopped(stub: Stub, workload: Workload) -> None:
    """Each phase has a unique prompt length that identifies its requests."""
    begin, calm, rush = (Phase("", 0.2, 20, workload, Exact(tokens, 4)) for tokens in (100, 200, 300))
    stop = asyncio.Event()
    story = asyncio.create_task(run_scenario(stub.url, (calm, rush), first=(begin,), stop=stop))

    def seen() -> list[int]:
        return [length for length, _ in groupby(len(body["prompt"]) for body in stub.bodies)]

    async with asyncio.timeout(20):
        while len(seen()) < 6:
            await asyncio.sleep(0.01)
        stop.set()
        report = await story
    assert seen()[:6] == [100, 200, 300, 200, 300, 200]
    assert report.sent == report.completed + report.failed


async def test_scenario_waits_for_the_server(new_stub: Callable[[], Stub], workload: Workload, free_port: int) -> None:
    stop = asyncio.Event()
    story = asyncio.create_task(run_scenario(f"http://127.0.0.1:{free_port}", phases(workload), stop=stop))
    await asyncio.sleep(0)
    async with asyncio.timeout(20):
        for _ in range(2):
            with new_stub().listen(free_port) as stub:
                while not stub.bodies:
                    await asyncio.sleep(0.01)
        stop.set()
        report = await story
    assert report.completed >= 1


async def test_stop_while_waiting_for_the_server_ends_the_scenario(workload: Workload, free_port: int) -> None:
    stop = asyncio.Event()
    story = asyncio.create_task(run_scenario(f"http://127.0.0.1:{free_port}", phases(workload), stop=stop))
    await asyncio.sleep(0)
    stop.set()
    report = await asyncio.wait_for(story, 10)
    assert report.sent == 0


async def test_empty_scenario_and_other_machines_are_refused(workload: Workload) -> None:
    with pytest.raises(LoadError, match="at least one phase"):
        await run_scenario("http://127.0.0.1:1", ())
    with pytest.raises(LoadError, match="not this machine"):
        await run_scenario("http://192.0.2.1:1", phases(workload))

"""Real vLLM accepts a keeper's sleep requests. Sleep on a CPU moves no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from vllm_launchers.keeper import golden, processes
from vllm_launchers.keeper.health import HealthTarget
from vllm_launchers.keeper.lifecycle import Event, SleepProgress
from vllm_launchers.keeper.records import SleepStep
from vllm_launchers.keeper.server_client import ServerClient
from vllm_launchers.keeper.sleeper import SleepOrder, SleepRun
from vllm_launchers.listeners import Owner

if TYPE_CHECKING:
    from conftest import RealServer, StartServer
else:
    RealServer = StartServer = Any

pytestmark = pytest.mark.real

ASLEEP = [SleepStep.SUSPENDING, SleepStep.ASLEEP]
AWAKE = [SleepStep.WAKING, SleepStep.CHECKING, SleepStep.AWAKE]


def test_vllm_answers_the_same_after_sleep(start_server: StartServer) -> None:
    server: RealServer = start_server(env={"VLLM_SERVER_DEV_MODE": "1"})
    server.wait_ready()
    process = processes.identity(server.process.pid)
    assert process is not None
    owner = Owner(process.pid, process.start_time)
    recorded = golden.record(ServerClient(owner, "127.0.0.1", server.port), 60.0)
    assert len(recorded) == len(golden.PROMPTS)
    assert all(len(answer.tokens) == golden.TOKENS for answer in recorded)
    target = HealthTarget(1, owner, "127.0.0.1", server.port, 0.0)

    def steps(order: SleepOrder) -> list[SleepStep]:
        posted: list[Event] = []
        SleepRun(target, "", order, recorded, posted.append).run()
        found = [event for event in posted if isinstance(event, SleepProgress)]
        assert len(found) == len(posted)
        return [event.step for event in found]

    for level in (1, 2):
        assert steps(SleepOrder(wake=False, level=level, drain_seconds=30.0)) == ASLEEP
        assert steps(SleepOrder(wake=True, level=level)) == AWAKE
    assert any("Reloading weights inplace" in line for line in server.log_lines())

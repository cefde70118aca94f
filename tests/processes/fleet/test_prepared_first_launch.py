"""A launch that was prepared while its plan was read, through the console's façade."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import ports
from fakes.keeper_bench import end_servers
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import State
from vllm_launchers.launch import planner
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.engine_verdict import EngineAnswer
from vllm_launchers.vllm.flags.changes import Changes

REQUEST = LaunchRequest("chatbot", engine="simulated", place="none")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFleet]:
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    monkeypatch.setattr(planner, "FIRST_PORT", ports.free_port())  # a port range that no other test's server uses
    fleet = LocalFleet(tmp_path, observe=False, gpus=False)
    yield fleet
    fleet.close()
    end_servers(tmp_path)


def prepared_pid(fleet: LocalFleet) -> int:
    judged = fleet.judged_plan(REQUEST)
    assert judged is not None
    assert judged.verdict is not None
    assert judged.verdict.answer is EngineAnswer.ACCEPTED
    (pid,) = fleet.engine_check.pids
    return pid


def test_plan_is_unchanged_and_its_process_becomes_the_server(fleet: LocalFleet, tmp_path: Path) -> None:
    before = fleet.plan(REQUEST)
    pid = prepared_pid(fleet)
    assert fleet.plan(REQUEST).argv == before.argv, "its port counts as free although its prepared process exists"
    view = fleet.start(REQUEST)
    assert not fleet.engine_check.unused
    record = client.wait_for(tmp_path, view.name, lambda record: record.state is not State.STARTING, 60.0)
    assert record.state is State.READY
    assert record.server is not None
    assert record.server.pid == pid


def test_other_launch_ends_prepared_process_with_reason(fleet: LocalFleet) -> None:
    pid = prepared_pid(fleet)
    view = fleet.start(LaunchRequest("chatbot", engine="simulated", place="none", changes=Changes(set={"seed": 7})))
    assert view.pid != pid
    assert fleet.engine_check.unused == "its flags have changed"

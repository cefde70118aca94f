"""Plans for servers that simulate GPUs of a recorded host: with that host, another one, or this machine's GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_launchers.errors import RefusedError
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.host.gpu.host import Gpu, Holder, Host
from vllm_launchers.keeper.records import Generation, ServerRecord, State
from vllm_launchers.launch.inputs_reader import PlanInputsReader
from vllm_launchers.launch.launch_plan import LaunchPlan
from vllm_launchers.launch.planner import Planner
from vllm_launchers.launch.request import LaunchRequest, RestartOptions
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.startup_reports import StartupReportStore

HERE = Host(
    hostname="here",
    gpus=tuple(
        Gpu(index, name="NVIDIA L40S", memory_gib=44.4, free_gib=24.4, used_by=(Holder(1, user="anna", gib=20.0),))
        for index in range(4)
    ),
)
"""This machine."""
OPTIONS = RestartOptions()
TWO_GPUS = Changes({"tensor-parallel-size": 2})


class Source:
    """GPUs that are watched: of this machine, or of a recorded host."""

    watching = has_driver = True

    def __init__(self, recorded: str | None) -> None:
        self.host = read_host(Path(recorded)) if recorded is not None else HERE
        self.recorded_host = self.host.hostname if recorded is not None else None

    def read(self) -> Host:
        return self.host


@pytest.fixture
def planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(recorded: str | None) -> Planner:
        source = Source(recorded)
        reports = StartupReportStore(tmp_path / "reports.json")
        return Planner(tmp_path, PlanInputsReader(source), reports, gpus=source)

    return make


def record_of(launch: LaunchPlan) -> ServerRecord:
    return ServerRecord("one", State.READY, 0.0, 0.0, (Generation(1, launch.spec(), 0.0),))


@pytest.fixture
def record(planner) -> ServerRecord:
    """A server on GPU 1 of the recorded host ``gpubox``."""
    return record_of(planner("4xa6000").plan(LaunchRequest("chatbot", engine="simulated"), ()))


def test_restart_without_the_recorded_host_is_not_planned_on_this_machines_gpus(planner, record) -> None:
    again = planner(None).plan_restart(record, Changes({"max-num-seqs": 8}), OPTIONS)
    assert (again.plan.gpus, again.details.recorded_host, again.details.gpu_kind) == ((1,), "gpubox", "")
    assert not [found.message for found in again.plan.findings if "anna" in found.message or "GPU 1" in found.message]
    same = planner("4xa6000").plan_restart(record_of(again), Changes(), OPTIONS)
    assert (same.plan.gpus, same.details.gpu_kind) == ((1,), "NVIDIA RTX A6000")


def test_more_gpus_of_a_recorded_host_need_that_host(planner, record) -> None:
    moved = planner("4xa6000").plan_restart(record, TWO_GPUS, OPTIONS)
    assert (moved.plan.gpus, moved.details.recorded_host) == ((2, 3), "gpubox")
    assert planner("4xa6000").plan_beside(record, Changes(), OPTIONS, ()).details.recorded_host == "gpubox"
    needed = "one simulates a GPU of the recorded host gpubox: use that host with --host"
    with pytest.raises(RefusedError, match=needed):
        planner(None).plan_restart(record, TWO_GPUS, OPTIONS)
    with pytest.raises(RefusedError, match=needed):
        planner(None).plan_beside(record, Changes(), OPTIONS, ())


def test_another_recorded_host_is_refused(planner, record) -> None:
    other = planner("2xrtx3090")
    for plan in (
        lambda: other.plan_restart(record, Changes(), OPTIONS),
        lambda: other.plan_switch(record, "batch", OPTIONS),
    ):
        with pytest.raises(RefusedError, match="host gpubox, not of workstation: omit --host"):
            plan()
    with pytest.raises(RefusedError, match="host gpubox, not of workstation: use that host with --host"):
        other.plan_beside(record, Changes(), OPTIONS, ())


def test_simulated_server_without_a_recorded_host_is_on_no_gpu_of_this_machine(planner, record) -> None:
    details = planner(None).plan(LaunchRequest("chatbot", engine="simulated", gpus=(1,)), ()).details
    assert (details.gpus, details.recorded_host, details.gpus_on(None)) == ((1,), None, ())

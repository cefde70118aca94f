"""A prepared first launch: the engine's verdict, one process at a time, launched or ended."""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from fakes.ports import free_port
from vllm_launchers.launch.engine_check import EngineCheck
from vllm_launchers.launch.inputs_reader import PlanInputsReader
from vllm_launchers.launch.launch_plan import LaunchPlan
from vllm_launchers.launch.planner import Planner
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.plan.engine_verdict import EngineAnswer, EngineVerdict
from vllm_launchers.prepared import command
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.startup_reports import StartupReportStore

HANGS = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
with open(sys.argv[1], "w") as pipe:
    print(os.getpid(), child.pid, file=pipe)
child.wait()
"""

Plan = Callable[..., LaunchPlan]


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    planner = Planner(tmp_path, PlanInputsReader(), StartupReportStore(tmp_path / "reports.json"))
    port = free_port()  # the default is the first free port, which other tests may take meanwhile

    def plan(**flags: object) -> LaunchPlan:
        request = LaunchRequest("chatbot", engine="simulated", port=port, changes=Changes(set=flags))
        return planner.plan(request, ())

    return plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "servers" / "chat"


@pytest.fixture
def hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Make the engine hang; returns a function for the pids of its process and of that process's child, once they
    run."""
    pipe = tmp_path / "pids"
    os.mkfifo(pipe)
    monkeypatch.setattr(command, "prepared_command", lambda *_: (sys.executable, "-c", HANGS, str(pipe)))
    return lambda: [int(word) for word in pipe.read_text().split()]


def gone(pids: list[int]) -> bool:
    """Whether they end, each within a minute."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        ended = poller.poll(60_000)
        os.close(descriptor)
        if not ended:
            return False
    return True


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Run it in a thread; returns a function that waits for its result."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()

    def result() -> object:
        thread.join()
        return results[0]

    return result


def test_engine_accepts_and_refuses(plan: Plan, folder: Path) -> None:
    check = EngineCheck(lambda: None)
    assert check.ask(plan(), folder) == EngineVerdict(EngineAnswer.ACCEPTED)
    assert check.memory_mib, "it waits to be launched"
    refused = check.ask(plan(**{"no-such-flag": 1}), folder)
    assert refused is not None
    assert refused.answer is EngineAnswer.REFUSED
    assert "unrecognized arguments: --no-such-flag 1" in refused.message
    assert check.memory_mib is None


def test_prepared_engine_is_launched_only_if_nothing_changed(plan: Plan, folder: Path) -> None:
    check, launch = EngineCheck(lambda: None), plan()
    assert check.take(launch, folder) is None
    assert not check.unused
    changes = {
        "its flags have changed": (plan(**{"max-num-seqs": 7}), folder),
        "its name has changed": (launch, folder.with_name("other")),
        "its environment has changed": (replace(launch, secrets={"VLLM_API_KEY": "other"}), folder),
    }
    for reason, taken in changes.items():
        check.ask(launch, folder)
        (pid,) = check.pids
        assert check.take(*taken) is None
        assert check.unused == reason
        assert gone([pid])
    check.ask(launch, folder)
    prepared = check.take(launch, folder)
    assert prepared is not None
    assert not check.unused
    check.close()
    assert prepared.usable, "it belongs to the launch now"
    prepared.end()


def test_crashed_process_gives_no_verdict(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "prepared_command", lambda *_: (sys.executable, "-c", "raise SystemExit(9)"))
    assert EngineCheck(lambda: None).ask(plan(), folder) == EngineVerdict(
        EngineAnswer.UNKNOWN, "its process ended before it answered"
    )


def test_canceling_ends_all_started_processes(plan: Plan, folder: Path, hang: Callable[[], list[int]]) -> None:
    check = EngineCheck(lambda: None)
    launch = plan()
    result = in_thread(lambda: check.ask(launch, folder))
    pids = hang()
    deadline = time.monotonic() + 60
    while check.memory_mib is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert check.memory_mib
    check.close()
    assert result() is None
    assert gone(pids)


def test_new_request_ends_the_previous_one(
    plan: Plan, folder: Path, hang: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check, launch = EngineCheck(lambda: None), plan()
    first = in_thread(lambda: check.ask(launch, folder))
    pids = hang()
    monkeypatch.undo()
    assert check.ask(launch, folder) == EngineVerdict(EngineAnswer.ACCEPTED)
    assert first() is None
    assert gone(pids)


def test_engine_that_cannot_be_asked_is_not_started(plan: Plan, tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("#!/bin/sh\nexec docker run vllm\n")
    script.chmod(0o755)
    engine = Engine(EngineKind.VLLM, (str(script),), "0.33.0", "cuda", str(script))
    launch = plan()
    wrapped = replace(launch, plan=replace(launch.plan, engine=engine, argv=(str(script), "serve", "m")))
    assert EngineCheck(lambda: None).ask(wrapped, tmp_path) == EngineVerdict(
        EngineAnswer.UNKNOWN, "the model is not on this machine"
    )
    here = replace(wrapped, model_here=True)
    assert EngineCheck(lambda: None).ask(here, tmp_path) == EngineVerdict(
        EngineAnswer.UNKNOWN, "its command may do more than run vLLM"
    )
    absent = replace(here, plan=replace(here.plan, engine=replace(engine, path="")))
    assert EngineCheck(lambda: None).ask(absent, tmp_path) == EngineVerdict(
        EngineAnswer.UNKNOWN, "it is not installed here"
    )

"""runs and compare: from a start under load to the verdict on a changed flag, with the simulated engine."""

from __future__ import annotations

import json
import time

import pytest

from fakes.commands import PATIENCE
from fakes.ports import free_port
from vllm_console.fleet.local import LocalFleet
from vllm_console.load.run import run_load_sync
from vllm_console.runs import windows
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.presets.model import Workload
from vllm_launchers.vllm.flags.changes import Changes

WINDOW = 1.0
WORK = Workload(input_tokens_p95=200, output_tokens_p95=30, prefix_reuse=0.2, concurrency=16)


def until(found, what):
    deadline = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return answer


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    monkeypatch.setenv("SIMULATED_SPEED", "4")
    monkeypatch.setattr(windows, "WINDOW_SECONDS", WINDOW)
    fleet = LocalFleet(tmp_path / "state" / "vllm-console", observe=False, gpus=False)
    yield fleet
    if fleet.snapshot().server("chat") is not None:
        end(fleet)
    fleet.close()


def end(fleet):
    fleet.stop("chat")
    until(lambda: not fleet.snapshot().server("chat").state.alive, "it does not stop")


def ready(fleet, generation):
    def look():
        server = fleet.snapshot().server("chat")
        return server if server.generation == generation and server.state is State.READY else None

    return until(look, "it does not become ready")


def serve(fleet, generation):
    """Send load until the run is long enough."""
    server = ready(fleet, generation)

    def enough():
        run_load_sync(server.url, None, WORK, 10, 2 * WINDOW, max_in_flight=500, seed=1)
        return fleet.history.runs("chat")[0][0].windows >= 7

    until(enough, "too few minutes")


def test_runs_are_compared_with_a_verdict(fleet, program, capsys):
    changes = Changes({"max-num-seqs": 64})
    fleet.start(LaunchRequest("chatbot", engine="simulated", name="chat", port=free_port(), changes=changes))
    serve(fleet, 1)
    fleet.restart("chat", Changes({"max-num-seqs": 1}))
    serve(fleet, 2)
    after, before = fleet.history.runs("chat")[0]
    assert [(c.flag, c.before, c.after) for c in after.changed] == [("max-num-seqs", 64, 1)]
    assert (before.generation, before.ended["requested"], before.cause) == (1, True, "")
    assert before.ready_at is not None
    assert before.stages
    assert before.report["kv_tokens"] > 0
    found = fleet.history.compare("chat")
    assert (found.before.run.id, found.after.run.id) == (before.id, after.id)
    assert found.verdict in ("worse", "not comparable", "no significant difference", "inconclusive"), (
        "a single sequence is not offered as a fix"
    )
    end(fleet)
    fleet.forget("chat")
    kept = fleet.history.runs()[0]
    assert [run.name for run in kept] == ["chat@2", "chat@1"], "they are kept longer than the server's record"
    assert kept[0].ended["requested"] is True
    assert_commands(program, before.id, after.id)


def assert_commands(program, before, after):
    runs = program.json("runs", "chat")
    assert [(run["id"], run["generation"]) for run in runs] == [(after, 2), (before, 1)]
    assert runs[0]["changed"] == [{"flag": "max-num-seqs", "before": 64, "after": 1}]
    assert runs[0]["figures"]["generation_tokens_per_second"] > 0
    for words in (["chat"], ["chat@1", "chat@2"], [str(before), str(after)]):
        assert program.json("compare", *words)["after"]["run"] == after
    text = program("compare", "chat").stdout
    assert "--max-num-seqs 64 → 1" in text
    assert "--max-num-seqs 64 → 1" in program("runs").stdout


def test_missing_runs_are_reported(program):
    assert json.loads(program("runs", "--json").stdout) == []
    assert "No runs yet" in program("runs").stdout
    for words, code in ((["runs", "nobody"], 3), (["compare", "nobody"], 3), (["compare", "7"], 3),
                        (["compare", "a@b"], 2)):  # fmt: skip
        answer = program(*words)
        assert answer.returncode == code, words
        assert answer.stderr.startswith("vllm-console: ")


def test_compare_requires_two_runs(program):
    program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait")
    answer = program("compare", "chat")
    assert answer.returncode == 1
    assert "no earlier run" in answer.stderr
    assert program("compare", "chat", "chat@1").returncode == 2

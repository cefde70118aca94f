"""From the run database to the verdict on a change that helps, one that harms, and one without effect."""

from __future__ import annotations

import time

import pytest

from vllm_console.fleet.local import LocalFleet
from vllm_console.runs.compare import ComparisonVerdict, TrafficMatch
from vllm_console.runs.store import RunHead, RunName, RunStore, run_id, store_windows, write
from vllm_console.runs.text import brief, notes
from vllm_launchers.errors import NotFoundError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack

FLAGS = {"max-num-seqs": 256, "max-model-len": 4096}
OTHERS = {"max-num-seqs": 64, "max-model-len": 4096}
WARM = 2


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def serve(state, made):
    """Enter runs of ``chat`` with two minutes of warm-up and ``count`` more."""
    run_store = RunStore(state / "runs.sqlite")

    def enter(generation, flags, count=10, head=True, **more):
        begins = made.BEGAN + 10_000 * generation
        windows = made.minutes(generation, count + WARM, begins=begins, **more)
        key = f"key{generation}"
        if head:
            run_store.enter(
                [RunHead(key, "chat", generation, begins - 60, "chatbot", "m", flags=flags, ready_at=begins)]
            )
        name = RunName(key, "chat", generation)
        write(run_store.path, lambda connection: store_windows(connection, run_id(connection, name, begins), windows))

    return enter


@pytest.fixture
def fleet(state):
    fleet = LocalFleet(state, observe=False, gpus=False)
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("change", "flags", "verdict", "beginning"),
    [
        ({"slower": 0.6}, OTHERS, ComparisonVerdict.BETTER, "Better: "),
        ({"slower": 1.6, "preempted": 0.05}, OTHERS, ComparisonVerdict.WORSE, "Worse: "),
        ({}, OTHERS, ComparisonVerdict.NO_DIFFERENCE, "No significant difference"),
        ({"rate": 3.4}, OTHERS, ComparisonVerdict.NOT_COMPARABLE, "Not comparable: traffic differs"),
        ({"slower": 0.6}, {"max-num-seqs": 64, "kv-cache-dtype": "fp8"}, ComparisonVerdict.BETTER, "Better: "),
    ],
    ids=["helps", "harms", "nothing", "unlike traffic", "several flags"],
)
def test_each_change_gets_its_verdict(fleet, serve, change, flags, verdict, beginning):
    serve(1, FLAGS)
    serve(2, flags, **change)
    found = fleet.history.compare("chat")
    assert found.verdict is verdict
    assert brief(found).startswith(beginning)
    assert (found.traffic is TrafficMatch.DIFFERENT) is (verdict is ComparisonVerdict.NOT_COMPARABLE)
    assert any("can't attribute" in note for note in notes(found)) is (len(found.differences) > 1)
    for figure in found.judged:
        assert figure.low <= figure.change <= figure.high
    assert fleet.history.last_change("chat") == found


def test_reverting_an_improvement_is_worse(fleet, serve):
    serve(1, FLAGS)
    serve(2, OTHERS, slower=0.6)
    serve(3, FLAGS)
    assert fleet.history.compare("chat@1", "chat@2").verdict is ComparisonVerdict.BETTER
    assert fleet.history.compare("chat").verdict is ComparisonVerdict.WORSE
    found = fleet.history.compare("chat@1", "chat@3")
    assert found.verdict is ComparisonVerdict.NO_DIFFERENCE
    assert fleet.history.compare_again(found.before.run.id, found.after.run.id) == found
    with pytest.raises(NotFoundError, match="no run 99"):
        fleet.history.compare_again(99, found.after.run.id)


def test_other_runs_are_looked_up_in_the_store_alone(fleet, serve, monkeypatch):
    """An open comparison asks every few seconds."""
    serve(1, FLAGS)
    serve(2, OTHERS)
    found = fleet.history.compare("chat")
    shown = {found.before.run.id, found.after.run.id}
    monkeypatch.setattr(fleet.history, "_snapshot", lambda: pytest.fail("a snapshot"))
    assert not fleet.history.has_others("chat", shown)
    assert fleet.history.has_others("chat", shown - {found.before.run.id})
    assert not fleet.history.has_others("nobody", shown)


def test_runs_too_short_to_compare_are_skipped_and_named(fleet, serve):
    serve(1, FLAGS)
    serve(2, {"max-num-seqs": 128}, 1)
    serve(3, OTHERS, slower=0.6)
    found = fleet.history.compare("chat")
    assert (found.before.run.generation, found.verdict) == (1, ComparisonVerdict.BETTER)
    assert notes(found)[0] == "chat@2 was skipped: too little traffic to compare with."
    named = fleet.history.compare("chat@2", "chat@3")
    assert (named.before.run.generation, named.verdict) == (2, ComparisonVerdict.TOO_LITTLE)


def test_newest_run_is_taken_if_all_before_are_short(fleet, serve):
    serve(1, FLAGS, 1)
    serve(2, FLAGS, 1)
    serve(3, OTHERS)
    assert fleet.history.compare("chat").before.run.generation == 2


def test_no_change_gives_none(fleet, serve):
    assert fleet.history.last_change("chat") is None
    serve(1, FLAGS)
    assert fleet.history.last_change("chat") is None


@pytest.fixture
def record(state):
    """The record of ``chat``; the run database may not know its second generation yet."""
    began = time.time() - 3600
    details = Details(preset="chatbot", model="m", flags=OTHERS)
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(details), sidecar=("--run", "key2"))
    generation = Generation(2, spec, began, ready_at=began + 40, ended_at=began + 1800)
    record = ServerRecord("chat", State.STOPPED, began + 1800, began, (generation,))
    folder = folders.server_folder(state, "chat")
    folder.mkdir(parents=True)
    folders.write_record(folder, record)
    return record


def test_read_only_fleet_shows_recorded_runs_and_writes_nothing(state, serve, record):
    serve(1, FLAGS)
    serve(2, OTHERS, head=False, slower=0.6)
    fleet = LocalFleet(state, observe=False, gpus=False, read_only=True)
    runs, notices = fleet.history.runs("chat")
    assert [dict(run.flags) for run in runs] == [OTHERS, FLAGS]
    assert [(change.flag, change.before, change.after) for change in runs[0].changed] == [("max-num-seqs", 256, 64)]
    assert runs[0].ended_at == record.current.ended_at
    assert any("no findings for times" in notice for notice in notices)
    assert [change.flag for change in fleet.history.compare("chat").differences] == ["max-num-seqs"]
    assert fleet.history.judge_past() == ""
    fleet.close()
    kept = RunStore(state / "runs.sqlite").runs("chat")
    assert [dict(run.flags) for run in kept] == [{}, FLAGS]
    assert all(run.judged_until is None for run in kept)


def test_past_of_the_named_server_is_judged(state, serve, record):
    serve(1, FLAGS)
    fleet = LocalFleet(state, observe=False, gpus=False)
    assert fleet.history.judge_past("nobody") == ""
    assert all(run.judged_until is None for run in RunStore(state / "runs.sqlite").runs("chat"))
    assert fleet.history.judge_past("chat") == ""
    assert RunStore(state / "runs.sqlite").runs("chat")[0].judged_until == record.current.ended_at
    fleet.close()

"""Ended runs, replayed from their records."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from vllm_console.cli.runs_text import run_lines
from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.markers import MarkerKind
from vllm_console.fleet.removed import KEPT_SECONDS
from vllm_console.fleet.replay import record_of_run
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.fleet.types import Replay
from vllm_console.history.store import HistoryWriter
from vllm_console.history.time_view import CHART_RANGES, ChartRange, TimeView
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_console.runs import store
from vllm_console.runs.store import FILE_NAME, RunHead, RunName, RunStore
from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Exit, Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack, unpack
from vllm_launchers.vllm.engines import Engine, EngineKind

NOW = int(time.time() / 3600) * 3600.0
"""On the hour, so that the steps of coarse tables begin where the tests expect."""

OBJECTIVES = {"ttft_p99_seconds": 1.0, "itl_p99_seconds": 0.1, "kv_cache_usage": 0.85, "preemption_rate": 0.02}
FIRST, SECOND = (NOW - 7000, NOW - 4000), (NOW - 4000, NOW - 1000)
"""Start and end of the server's runs."""


def head(generation: int, span: tuple[float, float | None], server: str = "chat", **more: Any) -> RunHead:
    flags = {"max-num-seqs": 256 // generation}
    known: dict[str, Any] = {
        "preset": "chatbot", "model": "m", "engine": "simulated", "version": "0.33.0", "flags": flags,
        "objectives": OBJECTIVES, "gpus": (1,), "ready_at": span[0] + 60,
        "stages": (("process", 20.0, ""), ("weights", 40.0, "15.0 GiB")), "report": {"kv_tokens": 1000.0},
    }  # fmt: skip
    if span[1] is not None:
        known |= {"ended_at": span[1], "ended": {"code": 0, "requested": True, "reason": "stopped as requested"}}
    return RunHead(f"{server}@{generation}/{span[0]:.0f}", server, generation, span[0], **{**known, **more})


def enter(state: Path, *heads: RunHead) -> RunStore:
    runs = RunStore(state / FILE_NAME)
    runs.enter(heads)
    return runs


def record(place: Path, *spans: tuple[float, float]) -> None:
    """Record the metrics of the runs: a full KV cache in the first, a calm one in the second."""
    (place / "history.sqlite").write_bytes(recorded(spans))


@cache
def recorded(spans: tuple[tuple[float, float], ...]) -> bytes:
    """The file of `record`; many tests use the same one."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "history.sqlite"
        with closing(HistoryWriter(path)) as writer:
            for number, (begin, end) in enumerate(spans, 1):
                for at in range(int(begin) + 60, int(end), 2):
                    usage = 0.95 if number == 1 else 0.3
                    engine = EngineSample(9.0, 0.0, usage, generation_tokens_total=10.0 * (at - begin))
                    writer.append(Sample(float(at), {"0": engine}), number)
        return path.read_bytes()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A server that was removed after two runs."""
    place = tmp_path / "removed" / f"chat@{FIRST[0]:.0f}-{NOW - 500:.0f}"
    place.mkdir(parents=True)
    record(place, FIRST, SECOND)
    begun = {"id": "1", "began_at": NOW - 6000, "until": NOW - 5900, "rate": 4.0}
    lines = (begun, {"id": "1", "ended_at": NOW - 5900})
    (place / "loads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = enter(tmp_path, head(1, FIRST), head(2, SECOND), head(1, (NOW - 50, None), "other"))
    runs.note_findings(RunName(head(1, FIRST).key, "chat", 1), {"preempting": [(NOW - 5500, NOW - 5000)]})
    return tmp_path


@pytest.fixture
def fleet(state: Path) -> Iterator[LocalFleet]:
    fleet = LocalFleet(state, observe=False, gpus=False)
    yield fleet
    fleet.close()


def shown(fleet: LocalFleet, replay: Replay, **time: Any) -> Any:
    view = TimeView(**{"end": replay.ended_at, "at": replay.at, "run": replay.run, **time})
    fleet.snapshot(None, view)
    for thread in threading.enumerate():
        if thread.name == "charts":
            thread.join(60)
    found = fleet.snapshot(None, view).replay
    assert found is not None
    assert found.series is None or not found.series.loading
    return found


def test_run_of_a_removed_server_is_shown_in_full(fleet):
    replay = fleet.replays.find("chat@1")
    assert (replay.name, replay.started_at, replay.ended_at, replay.removed) == ("chat@1", *FIRST, True)
    assert FIRST[1] - 60 <= replay.at <= FIRST[1], "its last figures"
    view = shown(fleet, replay)
    assert (view.name, view.state, view.replayed, view.removed) == ("chat@1", State.STOPPED, True, True)
    assert view.flags == {"max-num-seqs": 256}
    assert view.simulated
    assert view.moment == replay.at
    assert view.then.state is State.READY
    assert view.window.kv_cache_usage == 0.95
    assert view.window.generation_tokens_per_second == pytest.approx(10.0)
    assert [one.code for one in view.findings if one.code == "kv_cache_pressure"]
    assert not any(one.fixes for one in view.findings), "nothing can be staged"
    assert [stage.started_at for stage in view.stages] == [FIRST[0], FIRST[0] + 20]
    assert view.startup.report.kv_tokens == 1000
    assert view.log_path == ""
    assert view.reason == "stopped as requested"
    assert fleet.snapshot().replay is None
    assert fleet.snapshot().servers == (), "a replay is not a server"


def test_replay_markers_are_those_of_the_run(fleet):
    marks = [(mark.at, mark.kind, mark.label) for mark in shown(fleet, fleet.replays.find("chat@1")).markers]
    assert marks == [
        (FIRST[0], MarkerKind.START, "r1"), (NOW - 6000, MarkerKind.LOAD, "b"), (NOW - 5900, MarkerKind.LOAD, "b"),
        (NOW - 5500, MarkerKind.FINDING, "!"), (NOW - 5000, MarkerKind.FINDING_END, "✓"),
        (FIRST[1], MarkerKind.STOP, "s"),
    ]  # fmt: skip
    (began, ended) = shown(fleet, fleet.replays.find("chat@2")).markers
    assert "--max-num-seqs 256 → 128" in began.text
    assert ended.at == SECOND[1]


def test_replay_charts_hold_only_their_run(fleet):
    replay = fleet.replays.find("chat@2")
    whole = ChartRange("whole run", 3060.0, 20.0)
    series = shown(fleet, replay, range=whole).series
    usage = series.values["kv_cache_usage"]
    assert {round(value, 2) for value in usage if value is not None} == {0.3}, "the first run's are not in it"
    assert usage[0] is None, "it was starting"
    assert sum(value is not None for value in usage) > 0.9 * 2940 / series.step
    assert series.recorded_from == SECOND[0]
    short = shown(fleet, replay, range=CHART_RANGES[0], end=SECOND[1] - 1000, at=SECOND[1] - 1100).series
    assert (short.step, all(value == 0.3 for value in short.values["kv_cache_usage"][1:-1])) == (5.0, True)


def test_replay_shows_the_moment_at_the_cursor(fleet):
    replay = fleet.replays.find("chat@1")
    early = shown(fleet, replay, at=FIRST[0] + 30)
    assert (early.window, early.then.state) == (None, State.STARTING)
    assert shown(fleet, replay, at=FIRST[0] + 600).window.kv_cache_usage == 0.95


@pytest.mark.parametrize(
    ("word", "at", "name"),
    [
        ("chat", None, "chat@2"),
        ("1", None, "chat@1"),
        ("chat", NOW - 5000, "chat@1"),
        ("chat", NOW - 2000, "chat@2"),
        ("chat@1", NOW - 5000, "chat@1"),
    ],
)
def test_replay_is_named_like_a_run_or_by_a_time(fleet, word, at, name):
    replay = fleet.replays.find(word, at)
    assert replay.name == name
    assert at is None or replay.at == at


@pytest.mark.parametrize(
    ("word", "at", "error", "why"),
    [
        ("nobody", None, NotFoundError, "no run 'nobody' is known"),
        ("chat@7", None, NotFoundError, "no run 'chat@7' is known"),
        ("chat@x", None, UsageError, "expected a run's number"),
        ("chat", NOW - 600, NotFoundError, "no run of chat at that time has ended"),
        ("chat@1", NOW - 2000, UsageError, "chat@1 ran from"),
        ("other", None, OperationError, "other@1 has not ended"),
    ],
)
def test_run_that_cannot_be_replayed_says_why(fleet, state, word, at, error, why):
    running = (Generation(1, LaunchSpec(("vllm",), "127.0.0.1", 1), NOW - 50, NOW - 40),)
    folders.write_record(folders.prepare(state, "other"), ServerRecord("other", State.STOPPED, NOW, NOW - 50, running))
    with pytest.raises(error, match=why):
        fleet.replays.find(word, at)


def test_run_whose_history_is_gone_says_why(fleet, state):
    old = time.time() - KEPT_SECONDS - 90_000
    enter(state, head(3, (old, old + 3600)), head(1, (NOW - 900, NOW - 800), "brief"), head(9, FIRST, "purged"))
    (state / "removed" / f"brief@{NOW - 900:.0f}-{NOW - 700:.0f}").mkdir()
    record(state / "removed" / f"brief@{NOW - 900:.0f}-{NOW - 700:.0f}")
    with pytest.raises(OperationError, match="nothing is left to replay of chat@3: a history is kept for 30 days"):
        fleet.replays.find("chat@3")
    with pytest.raises(OperationError, match="purged@9: its history was deleted with its server"):
        fleet.replays.find("purged")
    with pytest.raises(OperationError, match=r"brief@1: it ended before a figure was recorded"):
        fleet.replays.find("brief")


def test_replay_history_is_cached_and_then_closed(fleet, state, monkeypatch):
    history = (next((state / "removed").iterdir()) / "history.sqlite").stat().st_ino

    def opened() -> bool:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
        return any(os.path.exists(link) and os.stat(link).st_ino == history for link in links)  # noqa: PTH110, PTH116

    shown(fleet, fleet.replays.find("chat"))
    assert opened()
    fleet.history.runs()
    assert opened(), "a verb took its own snapshot"
    now = time.time()
    monkeypatch.setattr("vllm_console.fleet.local.time.time", lambda: now + 60)
    fleet.snapshot()
    assert not opened()


def test_history_removed_during_a_replay_is_reported(fleet, state):
    replay = fleet.replays.find("chat")
    assert shown(fleet, replay).notice == ""
    (place,) = (state / "removed").iterdir()
    (place / "history.sqlite").unlink()
    gone = fleet.snapshot(None, TimeView(end=replay.ended_at, at=replay.at - 1, run=replay.run)).replay
    assert gone is not None
    assert "does not exist" in gone.notice
    assert gone.window is None
    (state / FILE_NAME).unlink()
    snapshot = fleet.snapshot(None, TimeView(run=999))
    assert snapshot.replay is None
    assert any("run 999 is gone" in notice for notice in snapshot.notices)


@pytest.fixture
def present(state: Path) -> Path:
    """Another server now has the name, and two runs."""
    spans = ((NOW - 400, NOW - 300), (NOW - 300, None))
    details = pack(Details(preset="chatbot", model="m", flags={"max-num-seqs": 7}))
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=details)
    ended = Exit(NOW - 300, 0, None, True, "stopped")
    generations = (
        Generation(1, spec, NOW - 400, NOW - 390, NOW - 300, ended),
        Generation(2, spec, NOW - 300, NOW - 290, NOW - 200, Exit(NOW - 200, 1, None, False, "exit code 1")),
    )
    now = ServerRecord("chat", State.FAILED, NOW - 200, NOW - 400, generations)
    folders.write_record(folders.prepare(state, "chat"), now)
    record(state / "servers" / "chat", (NOW - 400, NOW - 300), (NOW - 300, NOW - 200))
    assert spans
    return state


def test_name_means_the_server_that_has_it_now(fleet, present):
    replay = fleet.replays.find("chat@1")
    assert (replay.removed, replay.started_at) == (False, NOW - 400)
    view = shown(fleet, replay)
    assert view.flags == {"max-num-seqs": 7}, "from its record"
    assert view.log_path == str(present / "servers" / "chat" / "server.log")
    failed = shown(fleet, fleet.replays.find("chat"))
    assert (failed.state, failed.reason) == (State.FAILED, "exit code 1")
    assert fleet.replays.find("1").removed, "the number is the earlier server's"


def test_removed_server_is_found_by_its_name_at_a_time(fleet, present):
    then = fleet.replays.removed_at("chat", NOW - 5000)
    assert then is not None
    assert (then.name, then.removed, then.at) == ("chat@1", True, NOW - 5000)
    assert fleet.replays.removed_at("chat", NOW - 350) is None, "the present one had the name"
    assert fleet.replays.removed_at("chat", NOW - 450) is None, "no server had the name"
    assert fleet.replays.removed_at("vllm@8000", NOW) is None
    assert fleet.replays.removed_at("nobody", NOW) is None


def test_server_whose_history_cannot_be_kept_is_not_removed(fleet, present):
    place = present / "servers" / "chat"
    before = {path.name for path in place.iterdir()}
    kept = present / "removed"
    kept.rename(present / "aside")
    kept.write_text("in the way")
    with pytest.raises(OperationError, match=r"chat was not removed: .*chat --purge' deletes that, too"):
        fleet.forget("chat")
    assert before <= {path.name for path in place.iterdir()}
    assert fleet.forget("chat", purge=True) is False
    assert not place.exists()


@contextmanager
def locked_runs(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Another program writes to the run database all the time."""
    monkeypatch.setattr(store, "BUSY_TIMEOUT_SECONDS", 0.05)
    with closing(sqlite3.connect(state / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield


def test_server_whose_last_end_cannot_be_recorded_is_not_removed(fleet, present, monkeypatch):
    key = "chat@2/" + f"{NOW - 400:.0f}"
    enter(present, replace(head(2, (NOW - 300, None)), key=key))
    place = present / "servers" / "chat"
    before = {path.name for path in place.iterdir()}
    with (
        locked_runs(present, monkeypatch),
        pytest.raises(OperationError, match=r"not removed, .*end of its last run.*database is locked.*chat --purge'"),
    ):
        fleet.forget("chat")
    assert before <= {path.name for path in place.iterdir()}
    assert fleet.forget("chat")
    (last,) = [run for run in RunStore(present / FILE_NAME).runs("chat") if run.key == key]
    assert (last.ended_at, last.ended["reason"]) == (NOW - 200, "exit code 1")
    assert fleet.replays.find("chat").removed


@pytest.mark.parametrize("read_only", [False, True])
def test_run_of_a_removed_server_is_not_shown_as_running(fleet, present, monkeypatch, read_only):
    """The end of its last run is lost: it was removed with ``--purge`` while the run database was locked."""
    lost = replace(head(2, (NOW - 300, None), ready_at=NOW - 290), key="chat@2/" + f"{NOW - 400:.0f}")
    enter(present, lost)
    with locked_runs(present, monkeypatch):
        assert fleet.forget("chat", purge=True) is False
    quiet = LocalFleet(present, observe=False, gpus=False, read_only=read_only)
    (last,) = [run for run in quiet.history.runs("chat")[0] if run.key == lost.key]
    assert (last.removed, last.ended_at, last.ended) == (True, NOW - 290, {})
    assert "ended, chatbot (server removed)" in "\n".join(run_lines([last], NOW))
    with pytest.raises(OperationError, match="history was deleted with its server"):
        quiet.replays.find(str(last.id))


def test_run_of_a_server_whose_record_cannot_be_read_has_not_ended(fleet, present):
    enter(present, replace(head(2, (NOW - 300, None)), key="chat@2/" + f"{NOW - 400:.0f}"))
    (present / "servers" / "chat" / "record.json").write_text("{")
    assert fleet.history.runs("chat")[0][0].ended_at is None


def test_removed_server_is_replayed_as_before(fleet, present):
    before = shown(fleet, fleet.replays.find("chat"))
    assert fleet.forget("chat")
    assert not (present / "servers" / "chat").exists()
    after = shown(fleet, fleet.replays.find("chat"))
    assert (before.removed, after.removed) == (False, True)
    assert (after.flags, after.window) == (before.flags, before.window)
    assert to_builtins(after.series) == to_builtins(before.series)
    assert fleet.replays.find("1").started_at == FIRST[0], "the earlier server's, too"
    assert fleet.forget("chat", purge=True) is False
    assert list((present / "removed").iterdir()) == []
    with pytest.raises(NotFoundError):
        fleet.forget("chat", purge=True)


def test_replay_knows_the_recorded_host_of_its_gpus(fleet, present):
    """Otherwise none of its GPUs is known there, and the chart of another one is shown."""
    details = Details(engine=Engine(EngineKind.SIMULATED, (), None, None, ""), gpus=(4,), recorded_host="8xh100")
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(details))
    ended = Generation(1, spec, NOW - 400, NOW - 390, NOW - 300, Exit(NOW - 300, 0, None, True, "stopped"))
    folders.write_record(
        present / "servers" / "chat", ServerRecord("chat", State.STOPPED, NOW - 300, NOW - 400, (ended,))
    )
    view = shown(fleet, fleet.replays.find("chat"))
    host = Host(hostname="8xh100")
    assert FleetSnapshot(NOW, "here", host=host, host_recorded=True).gpus_of(view) == (4,)
    assert unpack(record_of_run(fleet.history.runs("chat")[0][0]).current.spec.details).recorded_host == "8xh100"


def test_expired_histories_are_deleted_when_runs_are_listed(fleet, state):
    old = state / "removed" / "old@1-2"
    old.mkdir()
    record(old)
    quiet = LocalFleet(state, observe=False, gpus=False, read_only=True)
    quiet.history.runs()
    quiet.history.judge_past()
    assert old.exists()
    fleet.history.runs()
    assert not old.exists()


def test_runs_show_whether_they_are_replayable(fleet, present):
    found = {(run.name, run.started_at): (run.removed, run.replayable) for run in fleet.history.runs()[0]}
    assert found[("chat@1", FIRST[0])] == (True, True)
    assert found[("chat@2", NOW - 300)] == (False, True)
    assert found[("other@1", NOW - 50)] == (True, False)

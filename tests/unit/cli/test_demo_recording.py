"""The demo's recording: made with today's flags, entered as a recorder enters it, with a verdict on its restart."""

from __future__ import annotations

import itertools
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_console.cli import demo, demo_recording
from vllm_console.cli.demo_traffic import first_phases
from vllm_console.fleet.local import LocalFleet
from vllm_console.history.store import Reader
from vllm_console.runs.compare import Recorded, Verdict, compare
from vllm_console.runs.store import RunStore
from vllm_launchers.keeper.records import LaunchSpec
from vllm_launchers.presets.load import find_preset, read_presets

NOW = 1_800_000_000.0


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LocalFleet]:
    made = LocalFleet(tmp_path, observe=False, interactive=True, host_file=demo.HOST)
    yield made
    made.close()


@pytest.mark.parametrize("server", demo.SERVERS, ids=lambda server: server.name)
def test_the_recording_was_made_with_the_flags_that_the_demo_runs_with(fleet: LocalFleet, server) -> None:
    """If not: python tests/tools/record_demo.py."""
    plans = [fleet.plan(request) for request in demo.runs_of(server, fleet.snapshot().host, server.place)]
    recorded = demo_recording.read()[server.name]
    assert [plan.flags for plan in plans] == [run.flags for run in recorded.runs]


def test_it_is_entered_as_25_minutes_that_end_now(tmp_path: Path) -> None:
    server = demo_recording.read()["chat"]
    folder = tmp_path / "servers" / "chat"
    folder.mkdir(parents=True)
    specs = [LaunchSpec((), "127.0.0.1", 8000, sidecar=("--run", key)) for key in ("one", "two")]
    spec, recording = demo_recording.enter(server, tmp_path, folder, specs, NOW)

    entries = Reader(folder / "history.sqlite").since(0.0)
    assert NOW - 1505 < entries[0].at < NOW - 1490
    assert entries[-1].at == pytest.approx(NOW, abs=0.1)
    assert max(later.at - one.at for one, later in itertools.pairwise(entries)) < 10
    assert [entry.generation for entry in entries] == sorted(entry.generation for entry in entries)

    (before,) = recording.generations
    assert before.number == 1
    assert before.exit is not None
    assert before.exit.requested
    assert before.started_at < before.ready_at < before.ended_at < recording.started_at < recording.ready_at < NOW

    shared = [path.name for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not shared, "readable by its user alone from the start"
    log = (folder / "server.log").read_bytes()
    assert b"\0" not in log
    first = log[recording.log_offset :].decode()
    assert "simulated engine: no GPU is used" in first
    assert time.strftime("%m-%d %H:%M", time.localtime(recording.started_at)) in first[:2000]
    assert spec.warm_up is None
    assert "vllm:num_preemptions_total" in Path(spec.environment["SIMULATED_TOTALS"]).read_text()

    store = RunStore(tmp_path / "runs.sqlite")
    after, earlier = store.runs("chat")
    one, other = (Recorded(run, store.windows(run.id), store.warm_up(run.id, 2)) for run in (earlier, after))
    assert compare(one, other).verdict is Verdict.BETTER


def test_the_live_traffic_goes_on_with_as_many_requests_as_were_in_flight() -> None:
    presets, problems = read_presets()
    workload = find_preset("chatbot", presets, problems).workload
    in_flight = demo_recording.read()["chat"].in_flight
    first, rush, _ = first_phases(workload, 0.9, in_flight)
    assert first.rate * first.seconds == in_flight > 50
    assert rush.rate > 2
    assert first_phases(workload, 0.9, 0) == ()

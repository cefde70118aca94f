"""The demo's recording: made with the current flags, entered like a recorder would, with a verdict on its restart."""

from __future__ import annotations

import itertools
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.cli import demo, demo_recording
from vllm_console.cli.demo_servers import SERVERS, WINDOW_SECONDS, DemoServer, traffic_on
from vllm_console.diagnosis.finding import Finding
from vllm_console.fleet.gpu_charts import history_path
from vllm_console.fleet.judge import Judge
from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.snapshot import ServerView
from vllm_console.fleet.watched_server import JudgeContext
from vllm_console.history.gpu_history import FIVES, GpuHistoryReader, card_of
from vllm_console.history.probe_records import ProbeReader
from vllm_console.history.store import HistoryReader
from vllm_console.prediction.evidence import gather
from vllm_console.runs.compare import FEWEST, QUANTILES, WARM_UP, ComparisonVerdict, Recorded, compare
from vllm_console.runs.store import RunStore
from vllm_console.runs.windows import exact_keys
from vllm_console.text import duration
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import find_preset, read_presets
from vllm_launchers.vllm.flags.changes import Changes

NOW = 1_800_000_000.0
ROOT = Path(__file__).parents[3]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[LocalFleet]:
    made = LocalFleet(tmp_path, observe=False, interactive=True, host_file=demo.HOST, own_presets=demo.PRESETS)
    yield made
    made.close()


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: server.name)
def test_recording_uses_the_flags_that_the_demo_runs_with(fleet: LocalFleet, server) -> None:
    """If this fails, run: python tests/tools/record_demo.py."""
    plans = [fleet.plan(request) for request in demo.runs_of(server, fleet.snapshot().host, server.place)]
    recorded = demo_recording.read()[server.name]
    assert [plan.flags for plan in plans] == [run.flags for run in recorded.runs]


def test_recording_covers_the_last_25_minutes(tmp_path: Path) -> None:
    server = demo_recording.read()["docs"]
    folder = tmp_path / "servers" / "docs"
    folder.mkdir(parents=True)
    specs = [LaunchSpec((), "127.0.0.1", 8000, sidecar=("--run", key)) for key in ("one", "two")]
    spec, recording = demo_recording.enter(server, folder, specs, NOW)

    entries = HistoryReader(folder / "history.sqlite").since(0.0)
    assert NOW - 1510 < entries[0].at < NOW - 1490
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

    present = Generation(2, specs[-1], recording.started_at, recording.ready_at)
    record = ServerRecord("docs", State.READY, NOW, NOW, (*recording.generations, present))
    demo_recording.enter_probes(demo_recording.read_probes()["docs"], folder, NOW)
    demo_recording.enter_windows(server, tmp_path, folder, record, NOW)
    store = RunStore(tmp_path / "runs.sqlite")
    after, earlier = store.runs("docs")
    one, other = (Recorded(run, store.windows(run.id), store.warm_up(run.id, 2)) for run in (earlier, after))
    found = compare(one, other)
    assert (found.verdict, found.kept) == (ComparisonVerdict.BETTER, True)
    better = {figure.key for figure in found.judged if figure.verdict is ComparisonVerdict.BETTER}
    assert {"ttft_mean", "ttft_p99"} <= better
    assert ComparisonVerdict.WORSE not in {figure.verdict for figure in found.judged}
    # Later traffic is compared with the last minutes, which the probe recorded completely.
    last = [window for window in store.windows(after.id) if window.at > NOW - 600]
    assert exact_keys(last, QUANTILES) == set(QUANTILES)


@pytest.mark.parametrize("name", ["docs", "editor"])
def test_steps_and_requests_match_the_probe_format(tmp_path: Path, name: str) -> None:
    """They cover all traffic until the last request ended, and allow a prediction."""
    demo_recording.enter_probes(demo_recording.read_probes()[name], tmp_path, NOW)
    reader = ProbeReader(tmp_path / "probe")
    requests, steps = reader.requests(), reader.steps()
    assert NOW - 901 < steps[0].at < NOW - 880
    assert NOW - 25 < steps[-1].at < NOW
    assert (steps[-1].running, steps[-1].waiting) == (0, 0)
    assert {request.finish_reason for request in requests} == {"length"}
    assert len({request.id for request in requests}) == len(requests)

    samples = [
        one for one in demo_recording.read()[name].runs[-1].samples if steps[0].at <= NOW + one.at <= steps[-1].at
    ]
    counted = [next(iter(one.engines.values())).requests_finished_total for one in (samples[0], samples[-1])]
    assert len(requests) == pytest.approx(counted[1] - counted[0], abs=5)

    evidence = gather(requests, steps, 16, 4096)
    assert not evidence.flaw
    assert evidence.requests > 100
    shared = [path for path in (tmp_path / "probe", *(tmp_path / "probe").iterdir()) if path.stat().st_mode & 0o077]
    assert not shared


def test_columns_are_transposed_back_to_records() -> None:
    assert demo_recording.untransposed(bytes([0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]), 4) == bytes(range(12))


def findings(plan: Plan, run: demo_recording.RecordedRun, number: int) -> tuple[Finding, ...]:
    """The findings at the end of a recorded run."""
    judge, started, ready = Judge("docs"), NOW + run.started_at, NOW + run.ready_at
    for sample in run.samples:
        judge.append(replace(sample, at=NOW + sample.at), number)
    generation = Generation(number, LaunchSpec((), "127.0.0.1", 8000), started, ready)
    record = ServerRecord("docs", State.READY, ready, started, (generation,))
    presets, problems = read_presets(demo.PRESETS)
    preset = find_preset(plan.preset, presets, problems)
    details = Details(
        preset=plan.preset,
        model=plan.model,
        engine=plan.engine,
        flags=plan.flags,
        environment=plan.environment,
        workload=preset.workload,
        objectives=preset.objectives,
    )
    return judge.findings(record, details, JudgeContext(may_ask=False), NOW + run.samples[-1].at)


def test_recorded_change_is_the_fix_that_the_finding_offered(fleet: LocalFleet) -> None:
    docs, recorded = SERVERS[0], demo_recording.read()["docs"]
    plans = [fleet.plan(request) for request in demo.runs_of(docs, fleet.snapshot().host, docs.place)]
    before, now = (findings(*run, at) for at, run in enumerate(zip(plans, recorded.runs, strict=True), 1))
    assert before[0].code == "oversubscribed_sequences"
    assert before[0].fixes[0].changes == Changes({"max-num-seqs": docs.changes.set["max-num-seqs"]})
    assert now[0].code == "preempting"
    offered = now[0].fixes[0].changes.set["max-num-seqs"]
    assert offered == 14, "a report grows to 1,200 tokens; the KV cache holds 19,760, and its objective is 90% of them"


def test_readme_states_when_a_verdict_appears() -> None:
    after = duration((WARM_UP + FEWEST) * WINDOW_SECONDS)
    assert f"after {after} of traffic `c` compares" in (ROOT / "README.md").read_text()


def test_live_traffic_continues_the_requests_in_flight() -> None:
    in_flight = demo_recording.read()["docs"].in_flight
    (first,), again = traffic_on(SERVERS[0], in_flight)
    assert first.rate * first.seconds == in_flight > 10
    assert again == tuple(SERVERS[0].recorded[-1][-len(again) :])
    assert traffic_on(SERVERS[0], 0)[0] == ()


def test_gpus_are_busy_while_requests_run(tmp_path: Path) -> None:
    views = [view_on(server) for server in SERVERS]
    demo_recording.enter_gpus(demo_recording.read(), views, demo.HOST, tmp_path, NOW)
    host = read_host(demo.HOST)
    reader = GpuHistoryReader(history_path(tmp_path, host), card_of(host.gpus[1]))
    (stretch,) = reader.stretches(NOW - 1500, NOW, FIVES.step)
    rows = reader.read(stretch, 1000)
    reader.close()
    assert len(rows) == pytest.approx(300, abs=3)
    used = [row.values[row.card.keys.index("utilization")] for row in rows]
    assert {0.0, 97.0} == set(used)


def view_on(server: DemoServer) -> ServerView:
    return ServerView(server.name, State.READY, NOW, gpus=(server.place,), flags=server.changes.set)

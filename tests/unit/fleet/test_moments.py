"""A server at an earlier time, and its events: metrics and findings of that moment, markers on its charts."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, Severity
from vllm_console.fleet.markers import (
    Marker,
    MarkerKind,
    ServerMarkers,
    finding_markers,
    load_markers,
    record_markers,
    started_by_tuners,
)
from vllm_console.fleet.moment import read_moment, state_at
from vllm_console.fleet.runs import RunRecorder
from vllm_console.fleet.snapshot import ServerView, StateThen
from vllm_console.fleet.watched_server import JudgeContext, WatchedServer
from vllm_console.history.store import HISTORY, HistoryReader, HistoryWriter
from vllm_console.history.time_view import CHART_RANGES, LIVE, TimeView
from vllm_console.load.spans import FILE_NAME as LOADS
from vllm_console.load.spans import LoadNote, LoadSpan, noted, read_spans
from vllm_console.load.tuner_progress import TunerProgress, TunerStep
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_console.runs.store import FILE_NAME, PastRun, RunHead, RunName, RunStore
from vllm_launchers import values
from vllm_launchers.keeper.records import Exit, Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.presets.model import Objectives

NOW = 1_790_000_000.0
THEN = JudgeContext(may_ask=False)
OBJECTIVES = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)


def generation(number: int, started: float, ended: Exit | None = None, **flags: Any) -> Generation:
    details = Details(preset="chatbot", model="m", flags=flags, objectives=OBJECTIVES)
    spec = LaunchSpec(("vllm",), "127.0.0.1", 1, details=pack(details))
    return Generation(number, spec, started, started + 10, ended.at if ended else None, ended)


def record(*generations: Generation, state: State = State.READY) -> ServerRecord:
    return ServerRecord("chat", state, NOW - 60, NOW - 90_000, generations)


def stop(at: float) -> Exit:
    return Exit(at, 0, None, True, "stopped on request")


SERVED = record(
    generation(1, NOW - 80_000, stop(NOW - 3001), max_num_seqs=256), generation(2, NOW - 3000, max_num_seqs=128)
)


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A day of history: full until generation 2 began, calm since. The last half hour has one-second rows."""
    path = tmp_path_factory.mktemp("day") / HISTORY
    with closing(HistoryWriter(path)) as writer:
        for second in range(-6000, 0, 2):
            number, usage = (1, 0.95) if second < -3000 else (2, 0.3)
            engine = EngineSample(0.0 if usage < 0.5 else 9.0, 0.0, usage, generation_tokens_total=6000.0 + second)
            writer.append(Sample(NOW + second, {"0": engine}), number)
    return path


@pytest.fixture
def folder(tmp_path: Path, day: Path) -> Path:
    folder = tmp_path / "servers" / "chat"
    folder.mkdir(parents=True)
    shutil.copyfile(day, folder / HISTORY)
    return folder


@pytest.fixture
def history(folder: Path) -> Iterator[HistoryReader]:
    reader = HistoryReader(folder / HISTORY)
    yield reader
    reader.close()


def test_values_and_findings_are_those_of_the_moment(history: HistoryReader) -> None:
    before = read_moment(history, SERVED, NOW - 3100, THEN)
    assert before.window is not None
    assert before.window.kv_cache_usage == 0.95
    assert before.window.generation_tokens_per_second == pytest.approx(1.0)
    assert [one.code for one in before.findings] == ["kv_cache_pressure"]
    assert before.findings[0].since < NOW - 3100
    assert before.findings[0].fixes == (), "fixes for other flags do not apply now"
    after = read_moment(history, SERVED, NOW - 100, THEN)
    assert after.window is not None
    assert after.window.kv_cache_usage == 0.3
    assert "kv_cache_pressure" not in [one.code for one in after.findings]


def test_nothing_is_shown_for_unrecorded_time(history: HistoryReader) -> None:
    for at in (NOW - 7000, NOW + 3600):
        found = read_moment(history, SERVED, at, THEN)
        assert (found.window, found.findings, found.judged) == (None, (), ())
        assert found.no_findings == "nothing was recorded then"


def test_moment_says_why_its_findings_are_unknown(folder: Path, history: HistoryReader) -> None:
    assert read_moment(history, SERVED, NOW - 3100, THEN).no_findings == ""
    assert read_moment(history, SERVED, NOW - 100, THEN).no_findings == "", "nothing was wrong"
    assert read_moment(history, SERVED, NOW - 2995, THEN).no_findings == "it was not ready then"
    with contextlib.closing(sqlite3.connect(folder / HISTORY)) as file, file:
        file.execute(f"DELETE FROM tens WHERE at < {NOW - 2000}")
    assert read_moment(history, SERVED, NOW - 3100, THEN).no_findings.startswith("only one-minute samples are left")


def test_state_of_a_moment_is_that_of_its_generation() -> None:
    assert state_at(SERVED, NOW - 100_000) == StateThen(before=True)
    assert state_at(SERVED, NOW - 85_000) == StateThen(), "the record has forgotten what ran"
    assert state_at(SERVED, NOW - 79_995) == StateThen(State.STARTING, NOW - 80_000, 1)
    assert state_at(SERVED, NOW - 3100) == StateThen(State.READY, NOW - 79_990, 1)
    assert state_at(SERVED, NOW - 3000.5) == StateThen(State.STOPPED, NOW - 3001, 1)
    assert state_at(SERVED, NOW) == StateThen(State.READY, NOW - 2990, 2)
    crashed = record(generation(1, NOW - 900, Exit(NOW - 600, 1, None, False, "Exited with code 1")))
    assert state_at(crashed, NOW) == StateThen(State.FAILED, NOW - 600, 1)


def test_past_view_has_its_own_values_and_current_flags(folder: Path) -> None:
    watched = WatchedServer(folder, interactive=True)
    live = watched.view(SERVED, NOW, selected=True, load="", context=JudgeContext())
    charted = watched.in_time(live, SERVED, NOW, TimeView(CHART_RANGES[1], NOW - 2500, NOW - 3100))
    past = watched.earlier(charted, SERVED, NOW - 3100)
    assert (past.moment, past.sample) == (NOW - 3100, None)
    assert past.window is not None
    assert past.window.kv_cache_usage == 0.95
    assert past.flags == live.flags
    assert past.generation == 2
    assert (past.then.generation, past.then.state) == (1, State.READY)
    assert past.series is not None
    assert past.series.end == pytest.approx(NOW - 2500, abs=5)
    back = watched.in_time(live, SERVED, NOW, LIVE)
    assert (back.moment, back.window) == (None, live.window)
    assert back.series.end >= NOW - 5
    watched.close()


def test_past_view_has_the_preset_and_objectives_of_that_time(folder: Path) -> None:
    wide = replace(OBJECTIVES, kv_cache_usage=0.98)
    first, second = SERVED.generations
    details = Details(preset="batch", model="m", objectives=wide)
    other = values.replace(second, spec=values.replace(second.spec, details=pack(details)))
    now_batch = record(first, other)
    with contextlib.closing(WatchedServer(folder, interactive=True)) as watched:
        live = watched.view(now_batch, NOW, selected=True, load="", context=JudgeContext())
        past, newest = (watched.earlier(live, now_batch, at) for at in (NOW - 3100, NOW - 60))
    assert (live.preset, live.objectives) == ("batch", wide)
    assert (past.preset, past.objectives) == ("chatbot", OBJECTIVES)
    assert (newest.preset, newest.objectives) == ("batch", wide)


def test_server_that_failed_while_serving_keeps_its_last_minute(folder: Path) -> None:
    """A server whose start failed has none, although this generation and the previous one have history."""
    served = record(*SERVED.generations, state=State.FAILED)
    again = record(SERVED.generations[0], values.replace(SERVED.current, ready_at=None), state=State.FAILED)
    later = record(SERVED.generations[0], values.replace(SERVED.current, number=3), state=State.FAILED)
    with contextlib.closing(WatchedServer(folder, interactive=True)) as watched:
        crashed = watched.view(served, NOW + 900, selected=True, load="", context=JudgeContext())
        assert crashed.window is None
        assert crashed.last_window is not None
        assert crashed.last_window.kv_cache_usage == 0.3
        assert crashed.last_window.requests_running is crashed.last_window.requests_waiting is None
        assert watched.earlier(crashed, served, NOW - 60).last_window is None, "figures of that moment are shown"
        for other in (SERVED, again, later, record(*SERVED.generations, state=State.STOPPED)):
            assert watched.view(other, NOW, selected=True, load="", context=JudgeContext()).last_window is None


def test_charts_begin_with_the_recorded_range(folder: Path) -> None:
    watched = WatchedServer(folder, interactive=True)
    live = watched.view(SERVED, NOW, selected=True, load="", context=JudgeContext())
    for chosen in CHART_RANGES:
        series = watched.in_time(live, SERVED, NOW, TimeView(chosen)).series
        assert series is not None
        recorded = min(chosen.seconds, 6000.0)
        assert recorded <= series.end - series.start <= recorded * 1.2 + 4 * series.step, chosen.name
    watched.close()


def test_restart_is_marked_with_its_changed_flags() -> None:
    found = record_markers(SERVED)
    assert [(one.label, one.text) for one in found] == [
        ("r1", "Started"),
        ("r2", "Restarted: run 2: --max_num_seqs 256 → 128"),
    ]


def test_crashes_and_stops_are_marked_except_for_restarts() -> None:
    crash = Exit(NOW - 900, 1, None, False, "Exited with code 1: out of memory")
    found = record_markers(
        record(
            generation(3, NOW - 2000, crash),
            generation(4, NOW - 800, stop(NOW - 500)),
            generation(5, NOW - 400, stop(NOW - 300)),
        )
    )
    assert [(one.kind, one.label) for one in found] == [
        (MarkerKind.START, "r3"),
        (MarkerKind.CRASH, "✗"),
        (MarkerKind.START, "r4"),
        (MarkerKind.STOP, "s"),
        (MarkerKind.START, "r5"),
        (MarkerKind.STOP, "s"),
    ]
    assert "out of memory" in found[1].text
    assert found[0].text == "Restarted: run 3", "its changes are no longer known"
    assert "same flags" in found[2].text


def test_finding_markers_have_a_beginning_and_an_end() -> None:
    runs = [
        PastRun(1, NOW - 5000, findings=(("preempting", NOW - 4000, NOW - 3800), ("preempting", NOW - 200, NOW - 50)))
    ]
    holding = (Finding("preempting", Severity.WARNING, NOW - 230, "", ""), Finding("healthy", Severity.GOOD, 0, "", ""))
    found = finding_markers(runs, holding, NOW - 6000)
    assert sorted((one.at - NOW, one.kind) for one in found) == [
        (-4000, MarkerKind.FINDING),
        (-3800, MarkerKind.FINDING_END),
        (-230, MarkerKind.FINDING),
    ]
    assert finding_markers(runs, (), NOW - 3000)[0].at == NOW - 200, "those of an earlier server are not included"


def test_load_markers_have_a_beginning_and_an_end() -> None:
    found = load_markers([LoadSpan(NOW - 60, NOW - 30, 4.0), LoadSpan(NOW - 10, None, 8.0)])
    assert [(one.at - NOW, one.text) for one in found] == [
        (-60, "Load began: 4.0 req/s"),
        (-30, "Load ended"),
        (-10, "Load began: 8.0 req/s"),
    ]


def test_run_database_keeps_starts_that_the_record_dropped(tmp_path: Path) -> None:
    store = RunStore(tmp_path / FILE_NAME)
    for number, flags in ((1, {"max-num-seqs": 256}), (2, {"max-num-seqs": 64})):
        store.enter([RunHead(f"k{number}", "chat", number, NOW - 90_000 + number * 1000, flags=flags)])
    store.note_findings(RunName("k2", "chat", 2), {"preempting": [(NOW - 80_000, NOW - 80_000)]})
    assert store.past("chat")[0].changed == (("max-num-seqs", 256, 64),)
    assert store.past("other") == []
    kept = record(generation(3, NOW - 3000))
    found = ServerMarkers(tmp_path / FILE_NAME).markers(kept, (), (), NOW)
    assert [one.label for one in found] == ["r1", "r2", "!", "✓", "r3"]
    assert "--max-num-seqs 256 → 64" in found[1].text
    assert found == tuple(sorted(found, key=lambda one: one.at))


def test_markers_contain_no_secret() -> None:
    details = Details(flags={"api-key": "sk-secret-1234567890"})
    other = values.replace(SERVED.current, spec=LaunchSpec(("vllm",), "h", 1, details=pack(details)))
    text = record_markers(record(SERVED.generations[0], other))[-1].text
    assert "sk-secret" not in text


def test_ended_finding_is_recorded_at_once(tmp_path: Path) -> None:
    """Its end on the charts was once that of the last minute in which it was noted."""
    began = time.time() - 30
    holding = (Finding("preempting", Severity.WARNING, began, "", ""),)
    view = ServerView("chat", State.UNRESPONSIVE, NOW, findings=holding)
    recorder = RunRecorder(tmp_path, 0.0, read_only=False)
    unresponsive = values.replace(SERVED, state=State.UNRESPONSIVE)
    assert recorder.update([unresponsive], [view]) == []
    assert not (tmp_path / FILE_NAME).exists(), "a console's first frame waited for work that can wait"
    assert recorder.update([unresponsive], [view]) == []
    assert recorder.update([unresponsive], [replace(view, findings=())]) == []
    noted = time.time()
    assert recorder.update([unresponsive], [replace(view, findings=())]) == []
    ((code, since, until),) = RunStore(tmp_path / FILE_NAME).past("chat")[0].findings
    assert (code, since) == ("preempting", began)
    assert began + 30 <= until <= noted


def test_finding_is_recorded_while_it_held(tmp_path: Path) -> None:
    """Not while it recovers or nothing happens, although it is still open then."""
    began = time.time() - 900
    finding = Finding("slow_tokens", Severity.WARNING, began, "", "", held=((began, began + 60),))
    view = ServerView("chat", State.READY, NOW, findings=(finding,))
    recorder = RunRecorder(tmp_path, 0.0, read_only=False)
    for _ in range(2):
        assert recorder.update([SERVED], [view]) == []
    assert RunStore(tmp_path / FILE_NAME).past("chat")[0].findings == (("slow_tokens", began, began + 60),)
    again = replace(finding, held=((began, began + 60), (began + 300, began + 310)))
    assert recorder.update([SERVED], [replace(view, findings=(again,))]) == []
    assert recorder.update([SERVED], [replace(view, findings=())]) == []
    assert RunStore(tmp_path / FILE_NAME).past("chat")[0].findings == (
        ("slow_tokens", began, began + 60),
        ("slow_tokens", began + 300, began + 310),
    ), "the end was noted from the last view with the finding"


def test_recorder_lists_runs_after_catching_up(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, 0.0, read_only=False)
    recorder.catch_up()
    assert recorder.update([SERVED], [ServerView("chat", State.READY, NOW)]) == []
    assert [run.generation for run in RunStore(tmp_path / FILE_NAME).runs("chat")] == [2, 1]


def test_snapshot_of_an_earlier_moment_changes_nothing_current(folder: Path) -> None:
    """What is recorded and reported of a server is based on its current view."""
    watched = WatchedServer(folder, interactive=True)
    live = watched.view(SERVED, NOW, selected=True, load="", context=JudgeContext())
    assert (
        watched.in_time(live, SERVED, NOW, TimeView(CHART_RANGES[1], NOW - 2500, NOW - 3100)).findings == live.findings
    )
    watched.close()


def test_markers_are_rebuilt_only_after_a_change(folder: Path, tmp_path: Path) -> None:
    server_markers = ServerMarkers(tmp_path / FILE_NAME)
    found = [Finding("preempting", Severity.WARNING, NOW - 30, "symptom", "cause")]
    first = server_markers.markers(SERVED, found, (), NOW)
    assert server_markers.markers(SERVED, list(found), (), NOW + 20) is first
    over = server_markers.markers(SERVED, (), (), NOW + 21)
    assert over is not first
    sent = server_markers.markers(SERVED, (), (LoadSpan(NOW, None, 2.0),), NOW + 22)
    assert len(sent) == len(over) + 1
    RunStore(tmp_path / FILE_NAME).enter([RunHead("k1", "chat", 1, NOW - 90_000)])
    assert server_markers.markers(SERVED, (), (), NOW + 23) == over
    assert len(server_markers.markers(SERVED, (), (), NOW - 600)) == len(over) + 1, "read again: the clock was set back"


def test_noted_loads_are_marked(folder: Path) -> None:
    lines = [
        {"id": "b", "began_at": NOW - 900, "until": NOW - 600},
        {"id": "c", "began_at": NOW - 500, "until": NOW, "rate": 8},
        {"id": "c", "ended_at": NOW - 400},
    ]
    watched = WatchedServer(folder, interactive=True)
    live = watched.view(SERVED, NOW, selected=True, load="", context=JudgeContext())
    assert not [one for one in watched.in_time(live, SERVED, NOW, LIVE).markers if one.kind is MarkerKind.LOAD]
    (folder / LOADS).write_text("nonsense\n" + "\n".join(map(json.dumps, lines)))
    found = watched.in_time(live, SERVED, NOW, LIVE).markers
    watched.close()
    loads = [(one.at - NOW, one.text) for one in found if one.kind is MarkerKind.LOAD]
    assert loads == [
        (-900, "Load began"),
        (-600, "Load ended"),
        (-500, "Load began: 8.0 req/s"),
        (-400, "Load ended"),
    ]


def test_killed_load_counts_as_ended(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from vllm_console.load.spans import noted\n"
        "with noted(pathlib.Path(sys.argv[1]), 4.0, 86400.0): os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    (span,) = read_spans(tmp_path, time.time())
    assert span.ended_at == span.began_at


def test_restarts_by_a_tuner_are_marked(tmp_path: Path) -> None:
    progress = TunerProgress("goodput", "requests/s", TunerStep.MEASURING, NOW - 100, NOW, 4, first_run=1, last_run=2)
    span = LoadSpan(NOW - 400, NOW - 50, None, progress)
    texts = ["Restarted: run 2: --max-num-seqs 4 → 16", "Started", "Restarted: run 3"]
    starts = [
        Marker(NOW - at, MarkerKind.START, label, text)
        for at, label, text in zip((300, 900, 10), ("r2", "r1", "r3"), texts, strict=True)
    ]
    found = [one.text for one in started_by_tuners(starts, (span,))]
    assert found == ["Restarted by a tuner: run 2: --max-num-seqs 4 → 16", *texts[1:]]
    earlier = [Marker(NOW - 500, MarkerKind.START, "r2", texts[0])]
    assert started_by_tuners(earlier, (span,)) == earlier, "a run of that number before the tuner began"
    assert [one.text for one in load_markers((span,))] == ["Tuner began", "Tuner ended"]
    lines = [
        {"id": "a", "began_at": NOW - 3100, "until": NOW, "process": [1, 1, "boot"]},
        {"id": "a", "tuner": to_builtins(progress)},
    ]
    (tmp_path / LOADS).write_text("\n".join(map(json.dumps, lines)))
    marked = ServerMarkers(tmp_path / FILE_NAME).markers(SERVED, (), read_spans(tmp_path, NOW), NOW)
    assert "Restarted by a tuner: run 2: --max_num_seqs 256 → 128" in [one.text for one in marked]


def test_running_tuner_is_part_of_the_server(folder: Path) -> None:
    watched = WatchedServer(folder, interactive=False)
    with contextlib.closing(watched), noted(folder, None, 60.0) as note:
        note.tuner(TunerProgress("goodput", "requests/s", TunerStep.MEASURING, NOW, NOW, 4, trial=1))
        found = watched.view(SERVED, time.time(), selected=False, load="").tuner
        assert found is not None
        assert found.place == "trial 1 of 4"


def test_killed_tuners_flags_are_named_with_what_restores_the_original_ones(folder: Path) -> None:
    number, flag = SERVED.current.number, "max_num_seqs"
    trial = TunerProgress("goodput", "requests/s", TunerStep.MEASURING, NOW, NOW, 4, trial=1, set={flag: 16},
                          was={flag: 4, "max-model-len": None}, first_run=number - 1, last_run=number)  # fmt: skip
    note = f"""
import sys
from pathlib import Path
import msgspec
from {LoadNote.__module__} import LoadNote
from {TunerProgress.__module__} import TunerProgress
note = LoadNote(Path(sys.argv[1]))
note.begin(None, 60.0)
note.tuner(msgspec.json.decode(sys.argv[2], type=TunerProgress))
"""

    def notice(progress: TunerProgress) -> str:
        written = msgspec.json.encode(progress).decode()
        subprocess.run([sys.executable, "-c", note, str(folder / LOADS), written], check=True)
        with contextlib.closing(WatchedServer(folder, interactive=False)) as watched:
            return watched.view(SERVED, time.time(), selected=False, load="").notice

    left = notice(trial)
    assert "was killed and left max_num_seqs 128; 'vllm-console restart chat --set max_num_seqs=4' restores" in left
    assert "was killed" not in notice(replace(trial, last_run=number - 1)), "somebody else's run"
    assert "was killed" not in notice(replace(trial, was={flag: 128})), "the flags are the original ones"


def test_load_records_its_beginning_and_end(tmp_path: Path) -> None:
    with noted(tmp_path, 4.0, 60.0):
        (span,) = read_spans(tmp_path, time.time())
        assert (span.ended_at, span.rate) == (None, 4.0)
    (span,) = read_spans(tmp_path, time.time())
    assert span.ended_at is not None
    with noted(tmp_path / "gone", 4.0, 60.0), noted(None, 4.0, 60.0):
        pass
    assert read_spans(tmp_path / "gone", NOW) == ()

"""The run database: stored data survives kills, a full disk, and files of other versions."""

from __future__ import annotations

import math
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import pytest
from msgspec.structs import replace

from vllm_console import sqlite_files
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_console.recorder import WindowRecorder
from vllm_console.runs import store as run_store
from vllm_console.runs.document import run_document
from vllm_console.runs.store import (
    RunHead,
    RunName,
    RunStore,
    RunStoreDamagedError,
    RunStoreError,
    query_runs,
    run_id,
    store_windows,
    thin,
    write,
)
from vllm_console.runs.windows import RunWindow
from vllm_launchers.probe.plugin import vllm_console_probe as plugin


def head(number=1, server="chat", **more):
    known = {"key": f"{server}-{number}", "server": server, "generation": number, "started_at": 1000.0 * number,
             "flags": {"max-num-seqs": 256 // (number or 1)}, "preset": "chatbot"}  # fmt: skip
    return RunHead(**{**known, **more})


def put(path, run, windows):
    write(path, lambda connection: store_windows(connection, run_id(connection, run, 0.0), windows))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "runs.sqlite"


@pytest.fixture
def store(path):
    return RunStore(path)


def test_nothing_recorded_is_an_empty_list(store):
    assert store.runs() == []
    assert store.run(1) is None
    assert store.windows(1) == []
    assert store.warm_up(1, 2) is None


def test_only_its_owner_may_read_it(store, path):
    store.enter([head()])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_run_is_stored_incrementally(store):
    store.enter([head()])
    store.enter([head(ready_at=1040.0, stages=(("weights", 21.7, "15.0 GiB"),), report={"kv_tokens": 441000.0})])
    store.enter([head(ended_at=2000.0, ended={"requested": True, "reason": "stopped as requested"})])
    (run,) = store.runs()
    assert (run.name, run.ready_at, run.ended_at) == ("chat@1", 1040.0, 2000.0)
    assert run.stages == (("weights", 21.7, "15.0 GiB"),)
    assert run.report == {"kv_tokens": 441000.0}
    assert run.ended["requested"] is True
    assert run.flags == {"max-num-seqs": 256}


def test_automatically_restarted_run_has_not_ended(store):
    store.enter([head(ended_at=1500.0, ended={"requested": False}, cause="cuda_oom_runtime")])
    store.enter([head(started_at=1510.0, attempts=1, ready_at=1550.0)])
    (run,) = store.runs()
    assert (run.started_at, run.attempts, run.ended_at, run.cause) == (1000.0, 1, None, "")


def test_run_restarted_again_after_a_steady_time_has_not_ended(store):
    """The keeper counts attempts from the start again once the server has been ready for a while."""
    store.enter([head(started_at=1510.0, attempts=1, ready_at=1550.0)])
    store.enter([head(started_at=1510.0, attempts=0, ready_at=1550.0)])
    store.enter([head(started_at=1510.0, ended_at=3000.0, ended={"requested": False}, cause="cuda_oom_runtime")])
    store.enter([head(started_at=3001.0, attempts=1, ready_at=3040.0)])
    (run,) = store.runs()
    assert (run.ended_at, run.ended, run.cause) == (None, {}, "")


def test_difference_from_the_previous_run_is_stored(store):
    store.enter([head(1), head(1, "other")])
    store.enter([head(2)])
    run = store.runs("chat")[0]
    assert run.before == store.runs("chat")[1].id
    assert [(c.flag, c.before, c.after) for c in run.changed] == [("max-num-seqs", 256, 128)]
    assert store.runs("other")[0].changed == ()


def test_minutes_of_an_unknown_run_are_kept(store, path, made):
    run = RunName("chat-1", "chat", 1)
    put(path, run, made.minutes(1, 3))
    (found,) = store.runs()
    assert (found.server, found.generation, found.windows, found.flags) == ("chat", 1, 3, {})
    assert found.served
    store.enter([head()])
    (found,) = store.runs()
    assert (found.windows, found.flags) == (3, {"max-num-seqs": 256})
    assert found.figures["ttft_p99"] == pytest.approx(0.6, rel=0.5)
    assert [window.at for window in store.windows(found.id)] == [made.BEGAN + 180 + 60 * n for n in range(3)]
    assert store.warm_up(found.id, 2) == pytest.approx(made.BEGAN + 300)
    assert store.warm_up(found.id, 4) is None


def test_findings_close_together_are_merged(store):
    run = RunName("chat-1", "chat", 1)
    for at in (0.0, 60.0, 120.0, 4000.0, 4060.0):
        store.note_findings(run, {"preempting": [(1e9 + at, 1e9 + at)]})
    store.note_findings(run, {"context_unused": [(1e9, 1e9)]})
    (found,) = store.runs()
    assert found.findings == {"preempting": pytest.approx(3.0), "context_unused": 0.0}


def test_consoles_with_different_clocks_count_each_minute_once(store, path):
    run = RunName("chat-1", "chat", 1)
    other = RunStore(path)
    for minute in range(61):
        store.note_findings(run, {"preempting": [(1000.5 + 60 * minute, 1000.5 + 60 * minute)]})
        other.note_findings(run, {"preempting": [(1000.2 + 60 * minute, 1000.2 + 60 * minute)]})
    (found,) = store.runs()
    assert found.findings == {"preempting": pytest.approx(60.0, abs=0.01)}


def test_earlier_note_does_not_move_the_end(store):
    run = RunName("chat-1", "chat", 1)
    for at in (0.0, 100.0, 200.0, 300.0, 50.0, -100.0, 310.0):
        store.note_findings(run, {"preempting": [(1e9 + at, 1e9 + at)]})
    (found,) = store.runs()
    assert found.findings == {"preempting": pytest.approx(410.0 / 60)}


def test_note_that_joins_two_intervals_counts_no_time_twice(store):
    run = RunName("chat-1", "chat", 1)
    store.note_findings(run, {"preempting": [(1000.0, 1000.0)]})
    store.note_findings(run, {"preempting": [(2000.0, 2000.0)]})
    store.note_findings(run, {"preempting": [(900.0, 2010.0)]})
    assert store.past("chat")[0].findings == (("preempting", 900.0, 2010.0),)


def test_killed_writer_loses_no_committed_data(store, path):
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from vllm_console.runs.document import run_document
from vllm_console.runs.store import RunStore, RunHead
from vllm_console.runs.store import write
path = Path({str(path)!r})
for number in range(20):
    RunStore(path).enter([RunHead(f"k{{number}}", "chat", number, float(number))])
def die(connection):
    connection.execute("DELETE FROM runs")
    os.kill(os.getpid(), signal.SIGKILL)
write(path, die)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(store.runs()) == 20
    store.enter([head(99)])
    assert len(store.runs()) == 21


def test_newest_and_oldest_windows_of_a_run(store, path, made):
    put(path, RunName("chat-1", "chat", 1), made.minutes(1, 6))
    (run,) = store.runs()
    assert [window.at for window in store.windows(run.id, 2)] == [made.BEGAN + 180 + 60 * n for n in (4, 5)]
    assert [window.at for window in store.first_windows(run.id, 2)] == [made.BEGAN + 180 + 60 * n for n in (0, 1)]


def test_many_concurrent_writers(path, made):
    stores = [RunStore(path) for _ in range(4)]

    def work(index):
        for number in range(10):
            stores[index].enter([head(number, f"server{index}")])
            put(path, RunName(f"server{index}-0", f"server{index}", 0), made.minutes(number, 1, begins=60.0 * number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(stores[0].runs()) == 40
    assert sum(run.windows for run in stores[0].runs()) == 40


def test_minute_has_exact_quantiles_once_the_probe_is_complete(path, tmp_path):
    begin = time.monotonic() - 70
    kinds = ("steps", "requests", "first_tokens")
    segments = {kind: plugin.Segments(tmp_path / "probe", kind, {}) for kind in kinds}
    offset = time.time() - time.monotonic()
    for second in range(64):
        at = begin + second + 0.5
        segments["steps"].write([plugin.STEP.pack(at, 0, 1, 0, 0.5, *[-1] * 3, 9, 4, 0, 4, 0.02, 0.02, -1, -1, -1, 0)])
        segments["first_tokens"].write([plugin.FIRST_TOKEN.pack(at, 0, 0.25, 0)])
        times = (9, 5, 0, 0.1, 0.15, 0.75, 1.0, 0)
        segments["requests"].write([plugin.REQUEST.pack(b"r", at - 1, at, 0, *times, b"stop", 0)])

    def sample(second):
        counts = {"ttft": second, "itl": 4 * second, "e2e": second, "prompt_tokens": second}
        histograms = {key: Histogram((1.0, math.inf), (count, count), count) for key, count in counts.items()}
        engine = EngineSample(requests_finished_total=second, generation_tokens_total=second, histograms=histograms)
        return Sample(begin + offset + second, {"0": engine})

    log = WindowRecorder(path, RunName("chat-1", "chat", 1), probe=tmp_path / "probe")
    for second in range(61):
        log.append(sample(second))
    assert not path.exists(), "the last records may not be written yet"
    log.append(sample(61))
    log.append(sample(62))
    (window,) = RunStore(path).windows(RunStore(path).runs()[0].id)
    assert window.figures["ttft_p99_exact"] == 0.25
    assert window.figures["itl_p50_exact"] == pytest.approx(0.02)
    assert window.figures["e2e_p99_exact"] == 1.0
    assert window.figures["prompt_length_p95_exact"] == 9


def test_full_disk_is_reported_and_loses_no_old_data(store, path, monkeypatch, made):
    store.enter([head()])
    log = WindowRecorder(path, RunName("chat-1", "chat", 1))
    log._waiting.extend(made.minutes(1, 2))
    log.flush()
    real = sqlite_files.open_database

    def full(path, timeout):
        connection = real(path, timeout)
        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
        return connection

    monkeypatch.setattr(sqlite_files, "open_database", full)
    with pytest.raises(RunStoreError, match="disk is full"):
        store.enter([head(number, flags={"x": "y" * 5000}) for number in range(2, 40)])
    log._waiting.extend(made.minutes(2, 600, begins=made.BEGAN + 10_000))
    log.flush()
    assert "disk is full" in log.trouble
    assert [run.windows for run in store.runs()] == [2]
    monkeypatch.setattr(sqlite_files, "open_database", real)
    log.flush()
    assert log.trouble == ""
    assert [run.windows for run in store.runs()] == [602]


def test_disk_full_for_sqlites_own_files_is_reported_as_full(store, monkeypatch):
    """As SQLite reports it on a small tmpfs, where its shared-memory file can't be extended."""

    def full(*_words, **_more):
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = 4874
        raise error

    monkeypatch.setattr(sqlite_files, "open_database", full)
    with pytest.raises(RunStoreError, match="disk is full"):
        store.enter([head()])


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_damaged_file_is_moved_aside_and_reported(store, path, content):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    with pytest.raises(RunStoreDamagedError):
        RunStore(path, read_only=True).runs()
    assert path.read_bytes() == content
    store.enter([head()])
    assert "moved to runs.sqlite.broken" in store.notice
    assert path.with_name("runs.sqlite.broken").read_bytes() == content
    assert len(store.runs()) == 1
    path.write_bytes(content)
    assert store.runs() == []
    assert "runs.sqlite.broken-2" in store.notice


def test_damaged_file_is_moved_aside_only_once(path):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"garbage" * 1000)
    gate = threading.Barrier(2)

    def enter(number):
        gate.wait(60)
        RunStore(path).enter([head(number)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(enter, (1, 2)))
    assert len(RunStore(path).runs()) == 2
    assert len(list(path.parent.glob("runs.sqlite.broken*"))) == 1


def test_file_of_a_newer_version_is_unchanged(store, path):
    store.enter([head()])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    for act in (lambda: store.enter([head(2)]), store.runs):
        with pytest.raises(RunStoreError, match="newer vllm-console"):
            act()
    log = WindowRecorder(path, RunName("chat-1", "chat", 1))
    log._waiting.append(object())
    log.flush()
    assert "newer" in log.trouble
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone()[0] == 1


def test_oldest_runs_are_thinned_and_stay_comparable(store, path, monkeypatch, made):
    monkeypatch.setattr(run_store, "MOST_WINDOWS", 300)
    monkeypatch.setattr(run_store, "FEWEST_KEPT", 40)
    store.enter([head(1), head(2), head(3)])
    for number in (1, 2, 3):
        put(path, RunName(f"chat-{number}", "chat", number), made.minutes(number, 150))
    write(path, thin)
    third, second, first = store.runs()
    assert (first.windows, second.windows, third.windows) == (38, 38, 150)
    newest = store.windows(first.id)[-1]
    assert newest.at == made.minutes(1, 150)[-1].at
    monkeypatch.setattr(run_store, "MOST_RUNS", 2)
    write(path, thin)
    assert [run.generation for run in store.runs()] == [3, 2]
    assert query_runs(path, lambda c: c.execute("SELECT count(DISTINCT run) FROM windows").fetchone()[0]) == 2


def test_fields_of_a_later_version_are_ignored(store, path):
    store.enter([head()])
    with sqlite3.connect(path) as connection:
        connection.execute("""UPDATE runs SET document = '{"preset": "p", "from_the_future": 1, "id": 7}'""")
    (run,) = store.runs()
    assert (run.id, run.preset) == (1, "p")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET document = 'nonsense'")
    assert store.runs()[0].preset == ""


def test_reader_does_not_wait_for_a_writer(store, path):
    store.enter([head()])
    inside, leave = threading.Event(), threading.Event()

    def slow(connection):
        inside.set()
        leave.wait(120)

    thread = threading.Thread(target=write, args=(path, slow))
    thread.start()
    try:
        assert inside.wait(60)
        assert len(store.runs()) == 1
    finally:
        leave.set()
        thread.join()


def test_unwritable_folder_is_reported(tmp_path, made):
    blocked = tmp_path / "file"
    blocked.write_text("x")
    log = WindowRecorder(blocked / "runs.sqlite", RunName("k", "chat", 1))
    log._waiting.extend(made.minutes(1, 1))
    log.flush()
    assert "can't be used" in log.trouble
    with pytest.raises(RunStoreError):
        RunStore(blocked / "runs.sqlite").enter([head()])


def test_heads_round_trip(store):
    full = head(gpus=(0, 1), gpu_kind="NVIDIA RTX A6000", engine="vllm", version="0.33.0", build="cuda",
                objectives={"ttft_p99_seconds": 1.0}, model="m", ready_at=time.time())  # fmt: skip
    store.enter([full])
    run = store.run(store.runs()[0].id)
    assert replace(full) == RunHead(**{name: getattr(run, name) for name in RunHead.__struct_fields__})


def test_quantile_bounds_are_stored_and_listed(store, path, made):
    store.enter([head()])
    bound = {"e2e_mean": 0.02, "e2e_p99_below": 0.3, "ttft_p99": 0.18, "ttft_p99_above": 0.1, "ttft_p99_below": 0.25}
    bound["prompt_length_p95_above"], bound["answer_length_p95_exact"] = 20_000.0, 321.0
    put(path, RunName("chat-1", "chat", 1), [RunWindow(60.0 * at, 60.0, bound) for at in range(3)])
    (run,) = store.runs("chat")
    assert [window.figures for window in store.windows(run.id)] == [bound] * 3
    figures = run_document(run)["figures"]
    assert (figures["e2e_p99"], figures["e2e_p99_below"], figures["e2e_mean"]) == (None, 0.3, 0.02)
    assert (figures["ttft_p99"], figures["ttft_p99_above"]) == (0.18, 0.1)
    assert "itl_p99" not in figures


def test_list_of_runs_has_exact_quantiles_where_recorded(store, path):
    store.enter([head()])
    known = {"ttft_p99": 38.0, "ttft_p99_above": 20.0, "ttft_p99_below": 40.0, "ttft_p99_exact": 25.0}
    put(path, RunName("chat-1", "chat", 1), [RunWindow(60.0 * at, 60.0, known) for at in range(3)])
    figures = run_document(store.runs("chat")[0])["figures"]
    assert {figures[f"ttft_p99{end}"] for end in ("", "_above", "_below")} == {25.0}


def test_list_of_runs_counts_requests_that_ended(store, path):
    """As panes do; the queue's growth is no throughput."""
    store.enter([head()])
    ended = {"requests": 120.0, "requests_per_second": 5.0}
    put(path, RunName("chat-1", "chat", 1), [RunWindow(60.0 * at, 60.0, ended) for at in range(3)])
    assert store.runs("chat")[0].figures["requests_per_second"] == 2.0


@pytest.mark.parametrize(
    ("minutes", "rate"),
    [({0: 76, 1: 174, 2: 34}, 2.9), ({0: 60, 1: 120}, 1.5), ({0: 60}, 1.0), ({0: 60, 5: 120, 10: 120}, 2.0),
     ({0: 60, 1: 180, 2: 180, 3: 60, 9: 60}, 3.0)],
)  # fmt: skip
def test_rates_are_of_minutes_that_traffic_filled(store, path, minutes, rate):
    """Where known: after and before other minutes with traffic. Latencies are of all of them."""
    store.enter([head()])
    known = [
        RunWindow(60.0 * at, 60.0, {"requests": count, "generation_tokens_per_second": 2.5 * count, "ttft_mean": at})
        for at, count in minutes.items()
    ]
    put(path, RunName("chat-1", "chat", 1), known)
    figures = store.runs("chat")[0].figures
    assert figures["requests_per_second"] == pytest.approx(rate)
    assert figures["generation_tokens_per_second"] == pytest.approx(150 * rate)
    assert figures["ttft_mean"] == median(minutes)


def test_newest_run_has_the_highest_generation_whatever_the_clock(store):
    store.enter([head(1), head(2, started_at=9000.0), head(3, started_at=50.0)])
    assert [run.generation for run in store.runs("chat")] == [3, 2, 1]
    assert store.runs("chat")[0].changed == store.run(3).changed
    assert store.run(3).before == 2, "changes are relative to the previous generation"


def test_reused_name_starts_at_its_first_generation(store):
    store.enter([head(1), head(2)])
    store.enter([head(1, key="again", started_at=10.0)])
    assert [(run.key, run.generation) for run in store.runs("chat")] == [("again", 1), ("chat-2", 2), ("chat-1", 1)]
    assert [run.key for run in store.runs("chat", most=1)] == ["again"]


def test_findings_that_never_held_enter_no_run(tmp_path):
    """A run without a known start was once entered as one of 1970."""
    store = RunStore(tmp_path / "runs.sqlite")
    store.note_findings(RunName("key1", "chat", 1), {"preempting": []})
    assert store.runs() == []


def test_finding_is_stored_from_its_beginning(tmp_path):
    store = RunStore(tmp_path / "runs.sqlite")
    run = RunName("k", "chat", 1)
    store.note_findings(run, {"preempting": [(1000.0, 1060.0)]})
    store.note_findings(run, {"preempting": [(1000.0, 1400.0)]})
    store.note_findings(run, {"preempting": [(1900.0, 2000.0)]})
    assert store.past("chat")[0].findings == (("preempting", 1000.0, 1400.0), ("preempting", 1900.0, 2000.0))

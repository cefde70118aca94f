"""The ledger on disk: what is entered stays, whoever is killed, however full the disk, whatever wrote the file."""

from __future__ import annotations

import sqlite3
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from vllm_console.telemetry import ledger_file, ledger_log
from vllm_console.telemetry.ledger import Ledger, RunHead
from vllm_console.telemetry.ledger_file import (
    LedgerDamagedError,
    LedgerError,
    LedgerNewerError,
    read,
    write,
)
from vllm_console.telemetry.ledger_log import RunLog, RunName, run_id, store_windows, thin


def head(number=1, server="chat", **more):
    known = {"key": f"{server}-{number}", "server": server, "generation": number, "started_at": 1000.0 * number,
             "flags": {"max-num-seqs": 256 // (number or 1)}, "preset": "chatbot"}  # fmt: skip
    return RunHead(**{**known, **more})


def store(path, run, windows):
    write(path, lambda connection: store_windows(connection, run_id(connection, run, 0.0), windows))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "runs.sqlite"


@pytest.fixture
def ledger(path):
    return Ledger(path)


def test_nothing_recorded_is_an_empty_list(ledger):
    assert ledger.runs() == []
    assert ledger.run(1) is None
    assert ledger.windows(1) == []
    assert ledger.warm_up(1, 2) is None


def test_only_its_owner_may_read_it(ledger, path):
    ledger.enter([head()])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_run_is_entered_bit_by_bit(ledger):
    ledger.enter([head()])
    ledger.enter([head(ready_at=1040.0, stages=(("weights", 21.7, "15.0 GiB"),), report={"kv_tokens": 441000.0})])
    ledger.enter([head(ended_at=2000.0, ended={"requested": True, "reason": "stopped as asked"})])
    (run,) = ledger.runs()
    assert (run.name, run.ready_at, run.ended_at) == ("chat@1", 1040.0, 2000.0)
    assert run.stages == (("weights", 21.7, "15.0 GiB"),)
    assert run.report == {"kv_tokens": 441000.0}
    assert run.ended["requested"] is True
    assert run.flags == {"max-num-seqs": 256}


def test_one_that_was_started_again_by_itself_has_not_ended(ledger):
    ledger.enter([head(ended_at=1500.0, ended={"requested": False}, cause="cuda_oom_runtime")])
    ledger.enter([head(started_at=1510.0, attempts=1, ready_at=1550.0)])
    (run,) = ledger.runs()
    assert (run.started_at, run.attempts, run.ended_at, run.cause) == (1000.0, 1, None, "")


def test_the_difference_to_the_run_before_is_kept(ledger):
    ledger.enter([head(1), head(1, "other")])
    ledger.enter([head(2)])
    run = ledger.runs("chat")[0]
    assert run.before == ledger.runs("chat")[1].id
    assert [(c.flag, c.before, c.after) for c in run.changed] == [("max-num-seqs", 256, 128)]
    assert ledger.runs("other")[0].changed == ()


def test_minutes_of_a_run_that_no_console_has_seen_are_kept(ledger, path, made):
    run = RunName("chat-1", "chat", 1)
    store(path, run, made.minutes(1, 3))
    (found,) = ledger.runs()
    assert (found.server, found.generation, found.windows, found.flags) == ("chat", 1, 3, {})
    assert found.served
    ledger.enter([head()])
    (found,) = ledger.runs()
    assert (found.windows, found.flags) == (3, {"max-num-seqs": 256})
    assert found.figures["ttft_p99"] == pytest.approx(0.6, rel=0.5)
    assert [window.at for window in ledger.windows(found.id)] == [made.BEGAN + 180 + 60 * n for n in range(3)]
    assert ledger.warm_up(found.id, 2) == pytest.approx(made.BEGAN + 300)
    assert ledger.warm_up(found.id, 4) is None


def test_conditions_close_together_are_one_stretch(ledger):
    run = RunName("chat-1", "chat", 1)
    for at in (0.0, 60.0, 120.0, 4000.0, 4060.0):
        ledger.note_conditions(run, 1e9 + at, ["preempting"])
    ledger.note_conditions(run, 1e9, ["context_unused"])
    (found,) = ledger.runs()
    assert found.conditions == {"preempting": pytest.approx(3.0), "context_unused": 0.0}


def test_two_consoles_whose_clocks_differ_count_each_minute_once(ledger, path):
    run = RunName("chat-1", "chat", 1)
    other = Ledger(path)
    for minute in range(61):
        ledger.note_conditions(run, 1000.5 + 60 * minute, ["preempting"])
        other.note_conditions(run, 1000.2 + 60 * minute, ["preempting"])
    (found,) = ledger.runs()
    assert found.conditions == {"preempting": pytest.approx(60.0)}


def test_a_note_of_before_moves_no_end_of_a_stretch(ledger):
    run = RunName("chat-1", "chat", 1)
    for at in (0.0, 100.0, 200.0, 300.0, 50.0, -100.0, 310.0):
        ledger.note_conditions(run, 1e9 + at, ["preempting"])
    (found,) = ledger.runs()
    assert found.conditions == {"preempting": pytest.approx(310.0 / 60)}


def test_a_killed_writer_loses_nothing_that_was_committed(ledger, path):
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from vllm_console.telemetry.ledger import Ledger, RunHead
from vllm_console.telemetry.ledger_file import write
path = Path({str(path)!r})
for number in range(20):
    Ledger(path).enter([RunHead(f"k{{number}}", "chat", number, float(number))])
def die(connection):
    connection.execute("DELETE FROM runs")
    os.kill(os.getpid(), signal.SIGKILL)
write(path, die)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(ledger.runs()) == 20
    ledger.enter([head(99)])
    assert len(ledger.runs()) == 21


def test_many_writers_at_once(path, made):
    ledgers = [Ledger(path) for _ in range(4)]

    def work(index):
        for number in range(10):
            ledgers[index].enter([head(number, f"server{index}")])
            store(path, RunName(f"server{index}-0", f"server{index}", 0), made.minutes(number, 1, begins=60.0 * number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(ledgers[0].runs()) == 40
    assert sum(run.windows for run in ledgers[0].runs()) == 40


def test_a_full_disk_is_told_and_loses_nothing_old(ledger, path, monkeypatch, made):
    ledger.enter([head()])
    log = RunLog(path, RunName("chat-1", "chat", 1))
    log._waiting.extend(made.minutes(1, 2))
    log.flush()
    real = ledger_file._open

    def full(path):
        connection = real(path)
        connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').fetchone()[0]}")
        return connection

    monkeypatch.setattr(ledger_file, "_open", full)
    with pytest.raises(LedgerError, match="disk is full"):
        ledger.enter([head(number, flags={"x": "y" * 5000}) for number in range(2, 40)])
    log._waiting.extend(made.minutes(2, 600, begins=made.BEGAN + 10_000))
    log.flush()
    assert "disk is full" in log.trouble
    assert [run.windows for run in ledger.runs()] == [2]
    monkeypatch.setattr(ledger_file, "_open", real)
    log.flush()
    assert log.trouble == ""
    assert [run.windows for run in ledger.runs()] == [602]


@pytest.mark.parametrize("content", [b"not a database at all" * 100, b"SQLite format 3\x00" + b"\xff" * 5000])
def test_a_damaged_file_is_set_aside_and_told(ledger, path, content):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    with pytest.raises(LedgerDamagedError):
        Ledger(path, read_only=True).runs()
    assert path.read_bytes() == content
    ledger.enter([head()])
    assert "moved to runs.sqlite.broken" in ledger.notice
    assert path.with_name("runs.sqlite.broken").read_bytes() == content
    assert len(ledger.runs()) == 1
    path.write_bytes(content)
    assert ledger.runs() == []
    assert "runs.sqlite.broken-2" in ledger.notice


def test_two_who_find_it_damaged_set_it_aside_once(path):
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"garbage" * 1000)
    gate = threading.Barrier(2)

    def enter(number):
        gate.wait(10)
        Ledger(path).enter([head(number)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(enter, (1, 2)))
    assert len(Ledger(path).runs()) == 2
    assert len(list(path.parent.glob("runs.sqlite.broken*"))) == 1


def test_a_file_of_a_newer_version_is_left_as_it_is(ledger, path):
    ledger.enter([head()])
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    for act in (lambda: ledger.enter([head(2)]), ledger.runs):
        with pytest.raises(LedgerNewerError, match="newer vllm-console"):
            act()
    log = RunLog(path, RunName("chat-1", "chat", 1))
    log._waiting.append(object())
    log.flush()
    assert "newer" in log.trouble
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone()[0] == 1


def test_a_file_of_an_older_version_is_brought_up_to_date(ledger, path, monkeypatch):
    ledger.enter([head()])
    more = (*ledger_file.MIGRATIONS, ("ALTER TABLE runs ADD COLUMN note TEXT", "UPDATE runs SET note = 'old'"))
    monkeypatch.setattr(ledger_file, "MIGRATIONS", more)
    assert len(ledger.runs()) == 1, "it can be read before it is written"
    ledger.enter([head(2)])
    assert read(path, lambda c: c.execute("SELECT note FROM runs ORDER BY id").fetchall()) == [("old",), (None,)]
    broken = (*more, ("ALTER TABLE runs ADD COLUMN further TEXT", "no SQL"))
    monkeypatch.setattr(ledger_file, "MIGRATIONS", broken)
    with pytest.raises(LedgerError):
        ledger.enter([head(3)])
    monkeypatch.setattr(ledger_file, "MIGRATIONS", more)
    assert len(ledger.runs()) == 2, "all of a migration or nothing"


def test_the_oldest_runs_are_thinned_and_stay_good_for_a_comparison(ledger, path, monkeypatch, made):
    monkeypatch.setattr(ledger_log, "MOST_WINDOWS", 300)
    monkeypatch.setattr(ledger_log, "FEWEST_KEPT", 40)
    ledger.enter([head(1), head(2), head(3)])
    for number in (1, 2, 3):
        store(path, RunName(f"chat-{number}", "chat", number), made.minutes(number, 150))
    write(path, thin)
    third, second, first = ledger.runs()
    assert (first.windows, second.windows, third.windows) == (38, 38, 150)
    newest = ledger.windows(first.id)[-1]
    assert newest.at == made.minutes(1, 150)[-1].at
    monkeypatch.setattr(ledger_log, "MOST_RUNS", 2)
    write(path, thin)
    assert [run.generation for run in ledger.runs()] == [3, 2]
    assert read(path, lambda c: c.execute("SELECT count(DISTINCT run) FROM windows").fetchone()[0]) == 2


def test_what_a_later_version_adds_to_a_run_is_passed_over(ledger, path):
    ledger.enter([head()])
    with sqlite3.connect(path) as connection:
        connection.execute("""UPDATE runs SET document = '{"preset": "p", "from_the_future": 1, "id": 7}'""")
    (run,) = ledger.runs()
    assert (run.id, run.preset) == (1, "p")
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE runs SET document = 'nonsense'")
    assert ledger.runs()[0].preset == ""


def test_a_reader_waits_for_no_writer(ledger, path):
    ledger.enter([head()])
    inside, leave = threading.Event(), threading.Event()

    def slow(connection):
        inside.set()
        leave.wait(20)

    thread = threading.Thread(target=write, args=(path, slow))
    thread.start()
    try:
        assert inside.wait(10)
        assert len(ledger.runs()) == 1
    finally:
        leave.set()
        thread.join()


def test_a_folder_that_cannot_be_written_is_told(tmp_path, made):
    blocked = tmp_path / "file"
    blocked.write_text("x")
    log = RunLog(blocked / "runs.sqlite", RunName("k", "chat", 1))
    log._waiting.extend(made.minutes(1, 1))
    log.flush()
    assert "cannot be used" in log.trouble
    with pytest.raises(LedgerError):
        Ledger(blocked / "runs.sqlite").enter([head()])


def test_heads_hold_what_they_were_given(ledger):
    full = head(gpus=(0, 1), gpu_kind="NVIDIA RTX A6000", engine="vllm", version="0.33.0", build="cuda",
                objectives={"ttft_p99_seconds": 1.0}, model="m", ready_at=time.time())  # fmt: skip
    ledger.enter([full])
    run = ledger.run(ledger.runs()[0].id)
    assert replace(full) == RunHead(**{name: getattr(run, name) for name in RunHead.__dataclass_fields__})

"""Other processes hold the locks of stored data: nothing hangs, and the lock is reported."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_console.alerts.notifier import FindingsLog
from vllm_console.fleet.local import LocalFleet
from vllm_console.history.store import HistoryWriter
from vllm_console.metrics.sample import Sample
from vllm_console.runs import store as run_store
from vllm_console.runs.store import RunHead, RunStore, RunStoreError
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import client, errors, folders, processes
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.launcher import launch_lock
from vllm_launchers.vllm import startup_reports
from vllm_launchers.vllm.startup_reports import remembered


@contextlib.contextmanager
def locked_database(path: Path) -> Iterator[None]:
    """Another process's transaction that blocks readers and never ends."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            sqlite3.connect(path, timeout=0.0).execute("SELECT count(*) FROM sqlite_master").fetchone()
        yield
    finally:
        connection.close()


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def within(seconds: float, act: Callable[[], Any]) -> Any:
    """Return the result or raise; fail if it hangs."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(act())
        except Exception as error:  # noqa: BLE001 - handed on
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


def test_locked_databases_do_not_block_sampling_or_verbs(bench, monkeypatch):
    monkeypatch.setattr(run_store, "BUSY_TIMEOUT_SECONDS", 0.1)
    ready = bench.ready(bench.spec())
    folder = folders.server_folder(bench.root, "one")
    writer = HistoryWriter(folder / "history.sqlite")
    writer.append(Sample(at=time.time(), engines={}))
    writer.close()
    RunStore(bench.root / "runs.sqlite").enter([RunHead(key="k", server="one", generation=1, started_at=1.0)])
    fleet = LocalFleet(bench.root, observe=False, interactive=True, gpus=False)
    try:
        with locked_database(folder / "history.sqlite"), locked_database(bench.root / "runs.sqlite"):
            within(20, lambda: fleet.snapshot("one"))  # the first snapshot of a console does not write runs
            seen = within(20, lambda: fleet.snapshot("one"))
            server = seen.server("one")
            assert (server.state, server.pid) == (State.READY, ready.server.pid)
            assert "locked" in server.notice
            assert "history.sqlite" in server.notice
            assert any("runs.sqlite can't be used right now" in notice for notice in seen.notices), seen.notices
            assert isinstance(within(20, lambda: RunStore(bench.root / "runs.sqlite").runs()), RunStoreError)
            assert within(20, lambda: fleet.stop("one")).state in (State.STOPPING, State.STOPPED)
            bench.wait(State.STOPPED)
            assert "locked" in within(20, lambda: fleet.snapshot("one")).server("one").notice
        assert "locked" not in fleet.snapshot("one").server("one").notice, "the lock is released, so the notice is gone"
        assert [run.key for run in RunStore(bench.root / "runs.sqlite").runs()][-1] == "k", "nothing was lost"
    finally:
        fleet.close()


def test_recorder_reports_locked_history_and_continues(tmp_path):
    path = tmp_path / "history.sqlite"
    writer = HistoryWriter(path)
    writer.append(Sample(at=1.0, engines={}))
    writer.close()
    with locked_database(path):
        other = HistoryWriter(path)
        within(20, lambda: other.append(Sample(at=2.0, engines={})))
        assert "locked" in other.trouble
        other.close()
    again = HistoryWriter(path)
    again.append(Sample(at=3.0, engines={}))
    again.close()
    assert not again.trouble


def test_lock_waits_time_out(tmp_path, monkeypatch):
    monkeypatch.setattr(startup_reports, "LOCK_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(run_store, "BUSY_TIMEOUT_SECONDS", 0.1)
    book = startup_reports.StartupReportStore(tmp_path / "reports.json")
    remember = lambda: book.remember(remembered("m", "gpu", "new", {}, reported={"gib": 1.0}, predicted={}))  # noqa: E731
    with locked_file(tmp_path / "reports.json.lock"):
        assert within(20, remember) is False
    assert remember() is True
    (tmp_path / "runs.sqlite").write_bytes(b"no database at all" * 1000)
    with locked_file(tmp_path / "runs.sqlite.lock"):
        refused = within(20, lambda: RunStore(tmp_path / "runs.sqlite").enter([]) or "done")
        assert isinstance(refused, RunStoreError) or refused == "done"
        refused = within(20, lambda: run_store.set_aside(tmp_path / "runs.sqlite"))
        assert "another process has been holding its lock" in str(refused)
    with locked_file(tmp_path / "launch.lock"):
        refused = within(20, lambda: launch_lock(tmp_path, timeout=0.1).__enter__())
        assert isinstance(refused, OperationError)
    with locked_file(tmp_path / "findings.lock"):
        assert within(20, FindingsLog(tmp_path).mine) is False


def test_foreign_holder_of_keeper_lock_is_reported(bench, monkeypatch):
    """For example a backup program or a user's script."""
    monkeypatch.setattr(client, "RETRY_SECONDS", 0.3)
    ready = bench.ready(bench.spec())
    with locked_keeper(bench, ready):
        refused = within(20, bench.stop)
        assert isinstance(refused, errors.KeeperError)
        assert "does not answer" in str(refused)
        assert client.adopt_orphans(bench.root) == []
        assert processes.alive(ready.server)
    assert bench.adopt() == ["one"]
    bench.stopped()


@contextlib.contextmanager
def locked_keeper(bench: Any, ready: Any) -> Iterator[None]:
    """The keeper dies, and another process takes its lock before this is noticed."""
    path = bench.file("keeper.lock")
    with path.open("ab") as file:
        processes.send(ready.keeper, signal.SIGKILL)
        fcntl.flock(file, fcntl.LOCK_EX)
        bench.until(lambda _: not processes.alive(ready.keeper))
        yield


def test_short_write_is_rolled_back(tmp_path, monkeypatch):
    """Of the findings log: a partial line would corrupt the next one."""
    log = FindingsLog(tmp_path)
    assert log.mine()
    log.append({"code": "old"})
    before = log.path.read_bytes()
    write, cut = os.write, []

    def short(opened: int, data: bytes) -> int:
        if cut:
            raise OSError(28, "No space left on device")
        cut.append(write(opened, data[:7]))
        return cut[0]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        log.append({"code": "lost"})
    assert cut == [7], "the fault"
    assert "No space left on device" in log.trouble
    assert log.path.read_bytes() == before
    cut.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda opened, data: write(opened, data[:5]))
        log.append({"code": "slow"})
    log.append({"code": "new"})
    log.close()
    assert [entry["code"] for entry in log.read()] == ["old", "slow", "new"]
    assert log.trouble == ""

"""What is kept of a removed server, and for how long."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from contextlib import closing
from pathlib import Path

import pytest

from fakes.made_runs import run
from vllm_console import sqlite_files
from vllm_console.fleet import removed
from vllm_console.fleet.removed import KEPT_SECONDS, RemovedServers
from vllm_console.history.store import HISTORY, HistoryReader, HistoryWriter
from vllm_console.load.spans import FILE_NAME as LOADS
from vllm_console.metrics.sample import EngineSample, Sample
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.records import ServerRecord, State

NOW = 1_790_000_000.0


@pytest.fixture(autouse=True)
def at(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The current time, which tests set."""
    now = [NOW]
    monkeypatch.setattr(removed.time, "time", lambda: now[0])
    return now


@pytest.fixture
def servers(tmp_path: Path) -> RemovedServers:
    return RemovedServers(tmp_path)


def home(state: Path, name: str = "chat", *, closed: bool = True) -> Path:
    """A server's folder with all kinds of files."""
    folder = state / "servers" / name
    folder.mkdir(parents=True, mode=0o700)
    for other in ("record.json", "server.log", "server.log.1", "keeper.lock", "keeper.log", "sidecar.log", LOADS):
        (folder / other).write_text("hf_" + "s" * 30)
    (folder / LOADS).chmod(0o644)
    writer = HistoryWriter(folder / HISTORY)
    for second in range(5):
        writer.append(Sample(NOW - 10 + second, {"0": EngineSample(1.0)}))
    if closed:
        writer.close()
    return folder


def tree(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): oct(stat.S_IMODE(path.stat().st_mode)) for path in folder.rglob("*")}


@pytest.mark.parametrize("mask", [0o000, 0o777])
def test_only_history_and_load_times_are_kept(servers, tmp_path, mask):
    folder = home(tmp_path)
    before = os.umask(mask)
    try:
        assert servers.keep(folder, "chat", NOW - 500.7)
    finally:
        os.umask(before)
    kept = f"chat@{NOW - 501:.0f}-{NOW:.0f}"
    assert tree(tmp_path / "removed") == {
        kept: "0o700", f"{kept}/{HISTORY}": "0o600", f"{kept}/{LOADS}": "0o600",
    }  # fmt: skip
    assert stat.S_IMODE((tmp_path / "removed").stat().st_mode) == 0o700
    with closing(HistoryReader(tmp_path / "removed" / kept / HISTORY)) as reader:
        assert len(reader.since(0.0)) == 5
    assert not (folder / HISTORY).exists()
    assert (folder / "record.json").exists(), "the caller deletes the rest"


def test_unwritten_wal_is_kept(servers, tmp_path):
    """A recorder that was killed leaves a write-ahead log."""
    folder = home(tmp_path, closed=False)
    assert (folder / f"{HISTORY}-wal").stat().st_size
    assert servers.keep(folder, "chat", NOW - 500)
    (kept,) = servers.all()
    with closing(HistoryReader(kept.folder / HISTORY)) as reader:
        assert len(reader.since(0.0)) == 5


def test_history_open_in_a_console_is_finished_later(servers, tmp_path):
    folder = home(tmp_path)
    with closing(HistoryReader(folder / HISTORY)) as reader:
        reader.since(0.0)
        assert servers.keep(folder, "chat", NOW - 500)
        (kept,) = servers.all()
        assert (kept.folder / f"{HISTORY}-wal").exists()
    servers.prune()
    assert sorted(path.name for path in kept.folder.iterdir()) == [HISTORY, LOADS]
    with closing(sqlite_files.connect_read_only(kept.folder / HISTORY, 1.0)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_history_without_a_sample_is_not_kept(servers, tmp_path):
    folder = home(tmp_path)
    (folder / HISTORY).unlink()
    HistoryWriter(folder / HISTORY).close()
    assert not servers.keep(folder, "broken", NOW)
    assert servers.all() == []


def test_nothing_is_kept_without_a_history(servers, tmp_path):
    folder = home(tmp_path)
    (folder / HISTORY).unlink()
    assert not servers.keep(folder, "chat", NOW)
    (folder / HISTORY).mkdir()
    assert not servers.keep(folder, "chat", NOW)
    assert not (tmp_path / "removed").exists()


def test_failed_keeping_leaves_the_server_intact(servers, tmp_path, monkeypatch):
    folder = home(tmp_path)
    before = tree(folder)
    move = Path.rename

    def full(path: Path, to: Path) -> Path:
        if path.name == HISTORY:
            raise OSError(28, "No space left on device")
        return move(path, to)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(KeeperError, match=r"chat was not removed: .*No space left.*chat --purge"):
        servers.keep(folder, "chat", NOW)
    assert {*tree(folder)} == {*before, f"{HISTORY}.lock"}
    assert tree(tmp_path / "removed") == {}
    assert servers.all() == []


def test_active_recorder_is_waited_for(servers, tmp_path, monkeypatch):
    folder = home(tmp_path)
    monkeypatch.setattr(removed, "LOCK_SECONDS", 0.0)
    descriptor = os.open(folder / f"{HISTORY}.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(KeeperError, match="another process has been holding its lock"):
        servers.keep(folder, "chat", NOW)
    os.close(descriptor)
    assert servers.keep(folder, "chat", NOW)


def test_file_in_the_way_leaves_the_server_intact(servers, tmp_path):
    folder = home(tmp_path)
    (tmp_path / "removed").write_text("in the way")
    with pytest.raises(KeeperError, match="was not removed"):
        servers.keep(folder, "chat", NOW)
    assert (folder / HISTORY).exists()


def test_removed_server_is_found_by_time(servers, tmp_path, at):
    servers.keep(home(tmp_path), "chat", NOW - 1000)
    at[0] = NOW + 500
    (tmp_path / "servers" / "chat").rename(tmp_path / "old")
    servers.keep(home(tmp_path), "chat", NOW + 100)
    first, second = servers.all()
    assert servers.find("chat", NOW - 1000.4) == first
    assert servers.find("chat", NOW) == first
    assert servers.find("chat", NOW + 50) is None, "no server existed then"
    assert servers.find("chat", NOW + 300) == second
    assert servers.find("chat", NOW + 600) is None
    assert servers.find("other", NOW) is None


def test_oldest_are_deleted_by_age_and_count(servers, tmp_path, at, monkeypatch):
    for number in range(4):
        at[0] = NOW + 86_400 * number
        servers.keep(home(tmp_path, f"s{number}"), f"s{number}", at[0] - 100)
    at[0] = NOW + KEPT_SECONDS + 10
    assert [kept.name for kept in servers.all()] == ["s0", "s1", "s2", "s3"]
    servers.prune()
    assert [kept.name for kept in servers.all()] == ["s1", "s2", "s3"]
    size = sum(path.stat().st_size for path in servers.all()[0].folder.iterdir())
    monkeypatch.setattr(removed, "MOST_BYTES", 2 * size)
    servers.prune()
    assert [kept.name for kept in servers.all()] == ["s2", "s3"]


def test_purge_deletes_all_of_a_name_and_incomplete_folders(servers, tmp_path):
    servers.keep(home(tmp_path, "a"), "a", NOW - 10)
    servers.keep(home(tmp_path, "b"), "b", NOW - 10)
    half = tmp_path / "removed" / "c@1-2"
    half.mkdir()
    (half / LOADS).write_text("{}")
    (tmp_path / "removed" / "notes").mkdir()
    servers.prune()
    assert not half.exists()
    assert (tmp_path / "removed" / "notes").exists(), "not ours"
    assert servers.delete("a")
    assert not servers.delete("a")
    assert [kept.name for kept in servers.all()] == ["b"]


def test_replayable_runs_are_marked(servers, tmp_path):
    servers.keep(home(tmp_path, "gone"), "gone", NOW - 900)
    present = ServerRecord("chat", State.READY, NOW - 50, NOW - 100, ())
    runs = [
        run(3, started_at=NOW - 50),
        run(2, started_at=NOW - 100, ended_at=NOW - 50),
        run(1, started_at=NOW - 9000, ended_at=NOW - 8000),
        run(2, server="gone", started_at=NOW - 800, ended_at=NOW - 700),
        run(1, server="gone", started_at=NOW - 899, ended_at=NOW - 850, ready_at=None, windows=0),
        run(1, server="never", started_at=NOW - 800, ended_at=NOW - 700),
    ]
    marked = [(one.removed, one.replayable) for one in servers.marked(runs, [present])]
    assert marked == [(False, False), (False, True), (True, False), (True, True), (True, False), (True, False)]
    late = run(2, started_at=NOW - 100, ended_at=time.time() - KEPT_SECONDS - 1)
    assert not servers.marked([late], [present])[0].replayable

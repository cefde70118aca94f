"""Leftovers as text: lines for those that differ only in pid or name, and notices that are current."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from vllm_console.fleet import leftovers
from vllm_console.fleet.leftovers import FleetLeftovers, Leftovers, files_by_reason, format_lost_here, process_lines
from vllm_launchers.host.shared_memory import LeftFile
from vllm_launchers.keeper import processes
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.folders import STATE_VARIABLE
from vllm_launchers.keeper.orphans import FOLDER_DELETED, Orphan
from vllm_launchers.keeper.records import ProcessIdentity


def orphan(pid: int, title: str = "VLLM::Worker", server: str = "chat") -> Orphan:
    return Orphan(ProcessIdentity(pid, 1, "boot"), title, f"/state/servers/{server}", "its server is failed")


def test_processes_that_differ_only_in_pid_share_a_line() -> None:
    found = [orphan(7), orphan(8), orphan(9, server="batch"), orphan(10)]
    assert process_lines(found) == [
        "pids 7, 8, 10 VLLM::Worker: of server chat; its server is failed",
        "pid 9 VLLM::Worker: of server batch; its server is failed",
    ]


def test_files_are_grouped_by_reason() -> None:
    files = [LeftFile(f"/dev/shm/psm_{number}", 1 << 20, number, why) for number, why in ((1, "a"), (2, "b"), (3, "a"))]
    assert files_by_reason(files) == {
        "2 files in /dev/shm: a; no process has them open": [files[0], files[2]],
        "1 file in /dev/shm: b; no process has it open": [files[1]],
    }


def test_command_that_ends_lost_servers_names_another_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = tmp_path / "servers" / "one"
    assert f"'vllm-console --state {tmp_path} leftovers --remove'" in format_lost_here(tmp_path, [lost])
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    assert "'vllm-console leftovers --remove'" in format_lost_here(tmp_path, [lost])


def test_search_goes_on_after_one_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = processes.identity(os.getpid())
    assert running is not None
    found = Leftovers([Orphan(running, "python", str(tmp_path / "servers" / "one"), FOLDER_DELETED)])
    failing = iter([KeeperError("its lock can't be checked: No locks available"), OSError("stale file handle")])

    def search(_state: Path) -> Leftovers:
        if (error := next(failing, None)) is not None:
            raise error
        return found

    monkeypatch.setattr(leftovers, "find_leftovers", search)
    monkeypatch.setattr(leftovers, "FIRST_SEARCH_SECONDS", 0.0)
    monkeypatch.setattr(leftovers, "SEARCH_SECONDS", 0.01)
    fleet = FleetLeftovers(tmp_path, lambda: None)
    while not fleet.notices([]):
        time.sleep(0.01)
    fleet.close()


def test_notice_names_servers_that_are_lost_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (tmp_path / "servers" / name for name in ("one", "two"))
    running = processes.identity(os.getpid())
    assert running is not None
    found = Leftovers([Orphan(running, "python", str(one), FOLDER_DELETED)])
    monkeypatch.setattr(leftovers, "find_leftovers", lambda _state: found)
    monkeypatch.setattr(leftovers, "FIRST_SEARCH_SECONDS", 0.0)
    fleet = FleetLeftovers(tmp_path, lambda: None)
    while not fleet.notices([]):
        time.sleep(0.01)
    assert "The folders of one, two were deleted" in fleet.notices([two])[0]
    one.mkdir(parents=True)
    assert fleet.notices([]) == [], "its keeper has written its record again"
    assert "The folder of two was deleted" in fleet.notices([two])[0]
    fleet.close()

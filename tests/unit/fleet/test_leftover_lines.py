"""Leftovers as lines of text: those that differ only in pid or name share a line."""

from __future__ import annotations

from vllm_console.fleet.leftovers import files_by_reason, process_lines
from vllm_launchers.host.shared_memory import LeftFile
from vllm_launchers.keeper.orphans import Orphan
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

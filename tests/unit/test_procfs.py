"""Parsing of ``/proc``, the real one and unusual lines."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_launchers import procfs


def test_own_process() -> None:
    found = procfs.stat(os.getpid())
    assert found is not None
    assert (found.pid, found.parent, found.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert found.running
    assert os.getpid() in procfs.pids()


def test_process_name_may_contain_brackets_and_spaces(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(["Z", "1", "2", "3", *["0"] * 13, "1", "0", "99", "0"])
    (tmp_path / "7" / "stat").write_text(f"7 (a) Z (b) c) {fields}\n")
    assert procfs.stat(7, str(tmp_path)) == procfs.ProcessStat(7, "Z", 1, 3, 99)
    assert not procfs.ProcessStat(7, "Z", 1, 3, 99).running
    assert procfs.ProcessStat(7, "Z", 1, 3, 99, 2).running, "only its main thread has ended"


def test_descendants_are_listed_nearest_first() -> None:
    parents = {9: 5, 5: 2, 3: 2, 2: 1, 7: 3, 8: 1, 4: 8}
    processes = [procfs.ProcessStat(pid, "S", parent, 1, 0) for pid, parent in parents.items()]
    assert list(procfs.descendants(processes, [2])) == [5, 3, 9, 7]
    assert procfs.descendants(processes, [3, 8]) == {7, 4}
    assert procfs.descendants(processes, [2, 3]) == {3, 5, 7, 9}, "an ancestor below another one"
    assert not procfs.descendants(processes, [9, 100])
    circle = [procfs.ProcessStat(1, "S", 2, 1, 0), procfs.ProcessStat(2, "S", 1, 1, 0)]
    assert procfs.descendants(circle, [1]) == {1, 2}, "read while pids were reused"


def test_title() -> None:
    assert procfs.title(os.getpid()) == Path("/proc/self/comm").read_text().strip()
    assert procfs.title(0) == ""


def test_command_lines() -> None:
    words = [sys.executable, "-c", "print(flush=True); input()", "a word", "é"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the kernel sets the command line after the parent continues
        found = dict(procfs.command_lines())
        child.communicate(b"\n")
    assert found[child.pid] == words
    assert 0 not in found
    assert all(found.values()), "kernel threads have none"


@pytest.mark.parametrize("text", ["", "7 (a) S 1", "7"])
def test_truncated_line_is_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text(text)
    assert procfs.stat(7, str(tmp_path)) is None
    assert procfs.stat(8, str(tmp_path)) is None


def test_process_unreadable_for_lack_of_descriptors_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    assert procfs.stat(1 << 30, sure=True) is None
    monkeypatch.setattr(procfs.os, "open", refused)
    assert procfs.stat(os.getpid()) is None
    with pytest.raises(OSError, match="Too many open files"):
        procfs.stat(os.getpid(), sure=True)

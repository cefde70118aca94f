"""Which Ray workers belong to a server: those that map one of its queues, wherever the raylet is."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from vllm_launchers import procfs
from vllm_launchers.keeper import process_group, processes
from vllm_launchers.keeper.process_group import ProcessGroup
from vllm_launchers.keeper.records import ProcessIdentity
from vllm_launchers.procfs import SHARED_MEMORY, MappedFile, ProcessStat, mapped_files

INIT, KEEPER, SERVER, ENGINE, OTHER_SERVER, RAYLET, JOB, WORKER, OTHER, CHILD = range(1, 11)
QUEUES = {ENGINE: 100, WORKER: 100, OTHER: 200, OTHER_SERVER: 200}


def group(
    monkeypatch: pytest.MonkeyPatch, parents: Mapping[int, int], queues: Mapping[int, int], *known: int
) -> set[int]:
    """The pids in a server's group in such a process tree; ``parents`` maps each pid to its parent."""
    table = {pid: ProcessStat(pid, "S", parent, pid, pid) for pid, parent in parents.items()}
    monkeypatch.setattr(processes, "table", lambda: table)
    monkeypatch.setattr(procfs, "title", lambda pid: process_group.RAYLET if pid == RAYLET else "other")
    monkeypatch.setattr(processes, "owner", lambda pid: os.getuid())
    monkeypatch.setattr(process_group, "_queues", lambda pid: [queues[pid]] if pid in queues else [])
    monkeypatch.setattr(process_group, "_write", lambda *_: None)

    def identity(pid: int) -> ProcessIdentity:
        return ProcessIdentity(pid, pid, processes.boot_id())

    it = ProcessGroup(Path("/none"), identity(SERVER), KEEPER, map(identity, known), ray=True)
    return {member.pid for member in it.refresh()}


TREE = {SERVER: KEEPER, ENGINE: SERVER, JOB: RAYLET, WORKER: RAYLET, OTHER: RAYLET, OTHER_SERVER: JOB}
BESIDE = {**TREE, KEEPER: INIT, RAYLET: INIT}
BELOW = {**TREE, KEEPER: JOB, RAYLET: INIT}


@pytest.mark.parametrize("tree", [BESIDE, BELOW], ids=["beside the raylet", "started by a job of Ray"])
def test_worker_with_a_queue_of_the_server_belongs_to_it(
    monkeypatch: pytest.MonkeyPatch, tree: Mapping[int, int]
) -> None:
    assert group(monkeypatch, tree, QUEUES) == {SERVER, ENGINE, WORKER}


@pytest.mark.parametrize("tree", [BESIDE, BELOW], ids=["beside the raylet", "started by a job of Ray"])
def test_queue_of_a_workers_child_adds_no_other_worker(
    monkeypatch: pytest.MonkeyPatch, tree: Mapping[int, int]
) -> None:
    found = group(monkeypatch, {**tree, CHILD: WORKER}, {**QUEUES, CHILD: 200}, SERVER, ENGINE, WORKER)
    assert found == {SERVER, ENGINE, WORKER, CHILD}


@pytest.fixture
def queue() -> Iterator[Path]:
    path = Path(SHARED_MEMORY, f"{process_group.QUEUE}test_{os.getpid()}")
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink(missing_ok=True)


def test_only_files_of_this_shared_memory_count(monkeypatch: pytest.MonkeyPatch, queue: Path) -> None:
    """A container's own ``/dev/shm`` has other files with the same inode numbers and paths."""
    inode = queue.stat().st_ino
    with queue.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert process_group._queues(os.getpid()) == [inode]
        assert process_group.shared_memory(os.getpid()) == {queue.name: inode}
        mapped = mapped_files(os.getpid()) or ()
        elsewhere = {MappedFile(one.device + 1, one.inode, one.path) for one in mapped}
        monkeypatch.setattr(process_group, "mapped_files", lambda pid: elsewhere)
        assert process_group._queues(os.getpid()) == []
        assert process_group.shared_memory(os.getpid()) == {}


def test_mapped_file_that_is_not_a_queue_is_ignored(monkeypatch: pytest.MonkeyPatch, queue: Path) -> None:
    status = queue.stat()
    other = MappedFile(status.st_dev, status.st_ino, f"{SHARED_MEMORY}/sem.mp-abcdefgh")
    monkeypatch.setattr(process_group, "mapped_files", lambda pid: {other})
    assert process_group._queues(os.getpid()) == []

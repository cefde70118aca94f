"""What runs on another machine or in another container is shown, and left alone."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.snapshot import Changes, LaunchRequest
from vllm_console.fleet.verbs import RefusedError
from vllm_launchers.keeper import client, errors, folders, location, orphans, process_group, processes, wire
from vllm_launchers.keeper.output import open_for_server
from vllm_launchers.keeper.records import State
from vllm_launchers.values import replace

CONTAINER = {"pid_namespace": 1}
OTHER = {"boot_id": "another", "machine_id": "another", "hostname": "gpubox-2"}


def moved(bench, monkeypatch, change):
    """From now on this process is somewhere else."""
    there = replace(location.here(), **change)
    monkeypatch.setattr(location, "here", lambda: there)


@pytest.mark.parametrize("change", [CONTAINER, OTHER])
def test_a_server_of_another_place_is_shown_there_and_left_alone(bench, monkeypatch, change):
    record = bench.ready(bench.spec())
    assert record.location == location.here()
    host = record.location.hostname
    moved(bench, monkeypatch, change)
    before = bench.file("record.json").read_bytes()
    if change is OTHER:  # its keeper's lock may not be seen from there
        monkeypatch.setattr(folders, "lock_is_held", lambda folder: False)
        monkeypatch.setattr(client.folders, "lock_is_held", lambda folder: False)
    fleet = LocalFleet(bench.root, observe=False, gpus=False)
    try:
        view = fleet.snapshot().servers[0]
        assert view.state is State.READY
        assert view.elsewhere.startswith(f"on {host}, ")
        assert f"runs on {host}" in view.notice
        for verb in (
            lambda: fleet.stop("one"),
            lambda: fleet.restart("one", Changes()),
            lambda: fleet.switch("one", "batch"),
            lambda: fleet.forget("one"),
            lambda: fleet.start(LaunchRequest("chatbot", name="one", engine="simulated")),
        ):
            with pytest.raises(RefusedError, match=f"one runs on {host}, .*: act on it there"):
                verb()
    finally:
        fleet.close()
    for refused in (client.stop, client.remove):
        with pytest.raises(errors.ElsewhereError):
            refused(bench.root, "one")
    assert bench.adopt() == []
    assert orphans.find(bench.root).found == ()
    assert bench.file("record.json").read_bytes() == before
    assert processes.alive(record.server)
    assert processes.alive(record.keeper)


def test_a_server_without_keeper_in_another_container_is_not_declared_dead(bench, monkeypatch):
    """Its output is locked for as long as any of its processes lives: that is seen from every container."""
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    with monkeypatch.context() as patched:
        moved(bench, patched, CONTAINER)
        assert "in another container" in client.elsewhere(bench.root, record)
        assert bench.adopt() == []
        assert bench.read() == record
    assert bench.adopt() == ["one"]
    assert bench.read().server == record.server


def test_a_server_whose_container_has_ended_is_found_to_have_ended(bench, monkeypatch, wait_until):
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    processes.send(record.server, 9)
    wait_until(lambda: not processes.alive(record.server), "its end")
    there = replace(record.location, pid_namespace=1)
    folders.write_record(bench.file(""), replace(record, location=there))
    # Its first thread has ended; another one may have its output open for a moment longer.
    wait_until(lambda: client.elsewhere(bench.root, bench.read()) == "", "the end of all its threads")
    assert bench.adopt() == ["one"]
    failed = bench.wait(State.FAILED)
    assert "its container has ended since" in failed.reason


def test_where_locks_mean_nothing_another_container_is_believed(bench, monkeypatch, wait_until):
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    processes.send(record.server, 9)
    wait_until(lambda: not processes.alive(record.server), "its end")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    moved(bench, monkeypatch, CONTAINER)
    assert "in another container" in client.elsewhere(bench.root, record)


@pytest.mark.parametrize("held", [True, False])
def test_on_nfs_only_a_held_output_counts_as_held(tmp_path, monkeypatch, held):
    """NFS locks byte ranges instead: exclusively only what is open for writing, shared only what is for reading."""
    flock = fcntl.flock

    def of_nfs(fd, how):
        access = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
        if access == (os.O_RDONLY if how & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    server = open_for_server(tmp_path)
    if not held:
        os.close(server)
    assert location._output_is_held(tmp_path) is held
    if held:
        os.close(server)


def test_an_output_that_is_not_there_is_not_made_and_not_held(tmp_path):
    assert location._output_is_held(tmp_path) is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_says_nothing_of_who_holds_the_output(tmp_path, monkeypatch, number):
    os.close(open_for_server(tmp_path))

    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    assert location._output_is_held(tmp_path) is None


def test_whoever_looks_whether_the_output_is_held_is_not_taken_for_a_process_of_the_server(tmp_path, monkeypatch):
    os.close(open_for_server(tmp_path))
    output, seen = tmp_path / "server.output", []
    monkeypatch.setattr(fcntl, "flock", lambda *_: seen.append(process_group.has_output(os.getpid(), output)))
    location._output_is_held(tmp_path)
    assert seen == [False, False]


def test_this_machine_before_its_restart_is_no_other_machine(bench):
    record = bench.ready(bench.spec())
    before = replace(record.location, boot_id="before", pid_namespace=7)
    assert location.elsewhere(bench.file(""), replace(record, location=before)) == ""
    clone = replace(before, hostname="node-2")
    assert location.elsewhere(bench.file(""), replace(record, location=clone)) == "on node-2, another machine"


def test_an_older_record_says_no_place_and_is_taken_for_one_of_here(bench):
    record = bench.ready(bench.spec())
    document = wire.to_plain(record)
    del document["location"]
    older = wire.record_of(document)
    assert older.location is None
    assert location.elsewhere(bench.file(""), older) == ""


def test_a_stopped_server_of_another_place_may_be_started_here(bench, monkeypatch):
    bench.ready(bench.spec())
    bench.stopped()
    moved(bench, monkeypatch, OTHER)
    bench.restart(bench.spec())
    bench.wait(State.READY, generation=2)

"""Servers on another machine or in another container are shown but not changed."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from vllm_console.fleet.local import LocalFleet
from vllm_launchers.errors import RefusedError
from vllm_launchers.keeper import client, errors, folders, location, orphans, process_group, processes, wire
from vllm_launchers.keeper.output import open_for_server
from vllm_launchers.keeper.records import State
from vllm_launchers.launch.request import LaunchRequest
from vllm_launchers.values import replace
from vllm_launchers.vllm.flags.changes import Changes

CONTAINER = {"pid_namespace": 1}
OTHER = {"boot_id": "another", "machine_id": "another", "hostname": "gpubox-2"}


def moved(bench, monkeypatch, change):
    """Make this process appear to run at another location."""
    there = replace(location.here(), **change)
    monkeypatch.setattr(location, "here", lambda: there)


@pytest.mark.parametrize("change", [CONTAINER, OTHER])
def test_server_on_another_machine_is_shown_read_only(bench, monkeypatch, change):
    record = bench.ready(bench.spec())
    assert record.location == location.here()
    host = record.location.hostname
    moved(bench, monkeypatch, change)
    before = bench.file("record.json").read_bytes()
    if change is OTHER:  # its keeper's lock may be invisible from there
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
            with pytest.raises(RefusedError, match=f"one runs on {host}, .*: control it from there"):
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


def test_keeperless_server_in_other_container_is_not_declared_dead(bench, monkeypatch):
    """Its output stays locked while any of its processes lives, and every container sees that lock."""
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    with monkeypatch.context() as patched:
        moved(bench, patched, CONTAINER)
        assert "in another container" in client.elsewhere(bench.root, record)
        assert bench.adopt() == []
        assert bench.read() == record
    assert bench.adopt() == ["one"]
    assert bench.read().server == record.server


def test_server_of_ended_container_is_found_ended(bench, monkeypatch, wait_until):
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    processes.send(record.server, 9)
    wait_until(lambda: not processes.alive(record.server), "its end")
    there = replace(record.location, pid_namespace=1)
    folders.write_record(bench.file(""), replace(record, location=there))
    # Its main thread has ended; another thread may hold its output slightly longer.
    wait_until(lambda: client.elsewhere(bench.root, bench.read()) == "", "the end of all its threads")
    assert bench.adopt() == ["one"]
    failed = bench.wait(State.FAILED)
    assert "its container has ended since" in failed.reason


def test_record_of_other_container_is_trusted_without_working_locks(bench, monkeypatch, wait_until):
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    processes.send(record.server, 9)
    wait_until(lambda: not processes.alive(record.server), "its end")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    moved(bench, monkeypatch, CONTAINER)
    assert "in another container" in client.elsewhere(bench.root, record)


@pytest.mark.parametrize("held", [True, False])
def test_nfs_output_lock_detection(tmp_path, monkeypatch, held):
    """NFS maps flock to byte-range locks: exclusive needs write access, shared needs read access."""
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


def test_missing_output_is_not_created_and_not_held(tmp_path):
    assert location._output_is_held(tmp_path) is False
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_output_holder_is_unknown_without_lock_support(tmp_path, monkeypatch, number):
    os.close(open_for_server(tmp_path))

    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    assert location._output_is_held(tmp_path) is None


def test_output_lock_check_is_not_counted_as_a_server_process(tmp_path, monkeypatch):
    os.close(open_for_server(tmp_path))
    output, seen = tmp_path / "server.output", []
    monkeypatch.setattr(fcntl, "flock", lambda *_: seen.append(process_group.has_output(os.getpid(), output)))
    location._output_is_held(tmp_path)
    assert seen == [False, False]


def test_record_from_before_reboot_is_local(bench):
    record = bench.ready(bench.spec())
    before = replace(record.location, boot_id="before", pid_namespace=7)
    assert location.elsewhere(bench.file(""), replace(record, location=before)) == ""
    clone = replace(before, hostname="node-2")
    assert location.elsewhere(bench.file(""), replace(record, location=clone)) == "on node-2, another machine"


def test_record_without_location_is_local(bench):
    record = bench.ready(bench.spec())
    document = wire.to_plain(record)
    del document["location"]
    without = wire.record_of(document)
    assert without.location is None
    assert location.elsewhere(bench.file(""), without) == ""


def test_stopped_server_of_another_machine_can_be_started_here(bench, monkeypatch):
    bench.ready(bench.spec())
    bench.stopped()
    moved(bench, monkeypatch, OTHER)
    bench.restart(bench.spec())
    bench.wait(State.READY, generation=2)

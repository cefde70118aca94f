"""A disk too full for records: before start, while serving, while stopping, and after space is freed."""

from __future__ import annotations

import json
import os
import time

import pytest

from vllm_launchers.keeper import client, errors, folders, processes
from vllm_launchers.keeper.record_writer import Notes, RecordWriter
from vllm_launchers.keeper.records import RestartMode, RestartPolicy, State
from vllm_launchers.values import replace


def on_disk(bench, name="one"):
    return folders.read_record(folders.server_folder(bench.root, name))


def test_start_on_full_disk_is_refused_with_the_path(bench, disk):
    disk.fill()
    try:
        with pytest.raises(errors.KeeperError, match=disk.error) as refused:
            bench.launch(bench.spec("--tick", "0.05"))
    finally:
        disk.free()
    assert str(bench.root) in str(refused.value)
    assert client.names(bench.root) == []
    assert bench.ready(bench.spec()).current.number == 1


def test_keeper_survives_and_reports_full_disk_while_serving(bench, disk, tmp_path, wait_until):
    quiet = tmp_path / "quiet"
    spec = bench.spec("--quiet-file", str(quiet))
    ready = bench.ready(spec)
    disk.fill(ready.keeper)
    quiet.touch()
    silent = bench.wait(State.UNRESPONSIVE)
    assert disk.error in silent.unwritten
    assert str(bench.file("record.json")) in silent.unwritten
    assert on_disk(bench).state is State.READY, "the file is stale"
    assert client.stamp(bench.root, "one") != client.stamp(bench.root, "one"), "the notice is shown on every refresh"
    with pytest.raises(errors.UnwrittenError, match=disk.error):
        bench.restart(bench.spec())
    assert processes.alive(ready.server), "refused before anything was stopped"

    disk.free(ready.keeper)
    quiet.unlink()
    again = bench.until(lambda record: record.state is State.READY and not record.unwritten)
    wait_until(lambda: on_disk(bench) == again, "a record that is true again")
    assert client.stamp(bench.root, "one") == client.stamp(bench.root, "one")
    bench.restart(spec)
    bench.wait(State.READY, generation=2)


def test_exit_on_full_disk_is_recorded_once_space_is_free(bench, disk, session_of, wait_until):
    ready = bench.ready(bench.spec("--children", "1"))
    disk.fill(ready.keeper)
    assert disk.error in bench.stop().unwritten
    stopped = bench.wait(State.STOPPED)
    assert not session_of(ready.server.pid)
    if not stopped.unwritten:  # the space reserved for its output is free now, enough for the record
        assert disk.root.is_mount(), "the limit of the keeper is still set"
        assert on_disk(bench).state is State.STOPPED
        wait_until(lambda: not client.keeper_alive(bench.root, "one"), "the keeper's end")
        return
    assert disk.error in stopped.unwritten
    assert on_disk(bench).state is State.READY, "the file is stale"
    assert client.keeper_alive(bench.root, "one"), "otherwise the exit would be lost"
    assert client.adopt_orphans(bench.root) == []
    assert bench.stop().state is State.STOPPED
    with pytest.raises(errors.UnwrittenError, match=disk.error):
        bench.restart(bench.spec())

    disk.free(ready.keeper)
    wait_until(lambda: not client.keeper_alive(bench.root, "one"), "the keeper's end")
    written = on_disk(bench)
    assert (written.state, written.unwritten) == (State.STOPPED, "")
    assert written.exit.requested


def test_ended_server_can_be_removed_from_full_disk(bench, disk):
    ready = bench.ready(bench.spec())
    disk.fill(ready.keeper)
    with pytest.raises(errors.StillAliveError, match="stop it first"):
        client.remove(bench.root, "one")
    bench.stop()
    bench.wait(State.STOPPED)
    client.remove(bench.root, "one")
    assert client.names(bench.root) == []
    assert not processes.alive(ready.keeper)


def test_automatic_restart_waits_until_record_can_be_written(bench, disk):
    """An unrecorded server would hold its GPU forever if its keeper died."""
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05)
    ready = bench.ready(bench.spec(restart=policy))
    disk.fill(ready.keeper)
    processes.send(ready.server, 9)
    waiting = bench.until(lambda record: record.next_attempt_at and time.time() > record.next_attempt_at + 0.7)
    assert (waiting.state, waiting.attempt) == (State.FAILED, 0)
    assert disk.error in waiting.unwritten
    disk.free(ready.keeper)
    again = bench.until(lambda record: record.state is State.READY and record.attempt == 1)
    assert again.server != ready.server


def test_accepted_restart_waits_for_disk_space(bench, disk, wait_until):
    first = bench.ready(bench.spec("--ignore", "TERM"))
    new = bench.spec(details={"flags": "new"})
    assert bench.restart(new).state is State.STOPPING
    disk.fill(first.keeper)
    wait_until(lambda: not processes.alive(first.server), "the old server's end")
    waiting = bench.until(lambda record: record.exit and record.unwritten)
    assert (waiting.state, waiting.next_spec, waiting.server) == (State.STOPPING, new, first.server)
    disk.free(first.keeper)
    assert bench.wait(State.READY, generation=2).current.spec == new


def test_full_disk_during_prepared_restart_does_not_stop_server(bench, disk, wait_until, tmp_path):
    gate = tmp_path / "gate"
    first = bench.ready(bench.spec())
    new = bench.spec(port=first.current.spec.port)
    script = json.dumps([{"say": {"step": "imported"}}, {"wait": str(gate)}, {"say": {"step": "accepted"}}])
    bench.restart(replace(new, prepared_argv=(*new.argv, "--prepared", script)))
    preparing = bench.until(lambda record: record.preparation and record.preparation.step == "checking").preparation
    disk.fill(first.keeper)
    gate.touch()
    failed = bench.until(lambda record: record.preparation and not record.preparation.step.under_way)
    assert failed.preparation.step == "failed"
    assert disk.error in failed.preparation.message
    assert (failed.state, failed.server) == (State.READY, first.server)
    wait_until(lambda: not processes.alive(preparing.process), "the end of the prepared process")
    disk.free(first.keeper)
    wait_until(lambda: not client.read(bench.root, "one").unwritten, "a record that is true again")
    bench.restart(new)
    bench.wait(State.READY, generation=2)


def test_keeper_killed_on_full_disk_leaves_old_record_and_no_orphan(bench, disk, session_of, tmp_path):
    quiet = tmp_path / "quiet"
    ready = bench.ready(bench.spec("--quiet-file", str(quiet), "--children", "1"))
    disk.fill(ready.keeper)
    quiet.touch()
    bench.wait(State.UNRESPONSIVE)
    bench.orphaned(ready)
    assert bench.read() == ready, "complete, and the last one that could be written"
    quiet.unlink()
    assert bench.adopt() == ["one"]
    if disk.error != "File too large":  # the limit applied only to the dead keeper
        assert disk.error in bench.until(lambda record: record.unwritten).unwritten
    bench.stop()
    stopped = bench.wait(State.STOPPED)
    assert not session_of(ready.server.pid)
    if disk.error != "File too large":
        disk.free(stopped.keeper)
    bench.until(lambda _: not client.keeper_alive(bench.root, "one"))
    assert on_disk(bench).state is State.STOPPED


@pytest.mark.parametrize(("number", "name"), [(28, "No space left"), (122, "quota exceeded"), (30, "Read-only")])
def test_each_record_write_error_is_reported_with_its_reason(bench, tmp_path, monkeypatch, number, name):
    record = replace(bench.ready(bench.spec()), name="two")
    folder = folders.prepare(tmp_path / "state", "two")
    folders.write_record(folder, record)
    record_writer = RecordWriter(folder, record, Notes(folder))

    def refuse(_fd):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", refuse)
        with pytest.raises(errors.UnwrittenError, match=name):
            record_writer.change(insist=True, reason="new")
        assert record_writer.record == record
        record_writer.change(reason="newer")
        assert name in record_writer.reported().unwritten
        assert folders.is_stale(folder)
    record_writer.write()
    assert not folders.is_stale(folder)
    assert folders.read_record(folder) == record_writer.reported() == replace(record, reason="newer")

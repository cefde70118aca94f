"""A keeper that dies at a critical point, runs with a changed clock, or is replaced from another shell."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from fakes.keeper_bench import PATIENCE, TUNING
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import client, errors, folders, processes
from vllm_launchers.keeper.records import RestartMode, RestartPolicy, State
from vllm_launchers.values import replace

WRAPPER = """
import os, runpy, signal, sys, time
ROOT, FAULT, CLOCK = {root!r}, {fault!r}, {clock!r}
sys.argv = sys.argv[3:]  # without this file's own -I -S
sys.path.append(ROOT)
from vllm_launchers.keeper import spawn, folders
start, write, now = spawn.start, folders.write_record, time.time
left = None

def die(_child=None):
    os.unlink(FAULT)
    os.kill(os.getpid(), signal.SIGKILL)

def struck(command, before):
    try:
        moment = open(FAULT).read()
    except FileNotFoundError:
        return start(command, before)
    if moment == "early":
        die()
    return start(command, lambda child: (before(child), die()))

def struck_write(folder, record):
    # dies before or after one of the writes of the record, counted from when the fault was laid
    global left
    fault = FAULT + "-" + folder.name
    try:
        when, number = open(fault).read().split()
    except FileNotFoundError:
        return write(folder, record)
    left = int(number) if left is None else left - 1
    if left == 0:
        if when == "after":
            write(folder, record)
        os.unlink(fault)
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, record)

def shifted():
    try:
        return now() + float(open(CLOCK).read() or 0)
    except FileNotFoundError:
        return now()

spawn.start, folders.write_record, time.time = struck, struck_write, shifted
runpy.run_path(sys.argv[0], run_name="__main__")
"""
POLICY = RestartPolicy(RestartMode.ON_FAILURE, limit=3, backoff_seconds=0.2, backoff_cap_seconds=0.2)


def until(condition, what):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


@pytest.fixture
def keepers(tmp_path, monkeypatch):
    """Real keepers that kill themselves at ``fault``, with a clock offset of ``clock``."""
    fault, clock = tmp_path / "fault", tmp_path / "clock"
    root = str(Path(client.__file__).parents[2])
    wrapper, python = tmp_path / "wrapper.py", tmp_path / "python"
    wrapper.write_text(WRAPPER.format(root=root, fault=str(fault), clock=str(clock)))
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {wrapper} "$@"\n')
    python.chmod(0o700)
    real = client.sys

    class Python:
        executable = str(python)

        def __getattr__(self, name):
            return getattr(real, name)

    monkeypatch.setattr(client, "sys", Python())
    return fault, clock


@pytest.fixture
def rare_probes(monkeypatch):
    """Probe rarely: with many servers, ten probes per second each would take a core while others are being
    restarted."""
    monkeypatch.setitem(TUNING, "health_check_ready", 2.0)


def died(bench, fault):
    bench.until(lambda _: not fault.exists() and not client.keeper_alive(bench.root, "one"))
    return bench.read()


@pytest.mark.parametrize("moment", ["early", "late"])
def test_accepted_restart_survives_keeper_death(bench, keepers, moment):
    """Early: the generation is recorded, no process started. Late: the process is recorded, not yet released."""
    fault, _ = keepers
    bench.ready(bench.spec())
    fault.write_text(moment)
    new = bench.spec(details={"flags": "new"})
    bench.restart(new)
    left = died(bench, fault)
    assert (left.state, left.current.number, left.start_pending) == (State.STARTING, 2, True)
    assert (left.server is None) == (moment == "early")
    assert bench.adopt() == ["one"]
    second = bench.wait(State.READY, generation=2)
    assert (second.current.spec, second.start_pending, second.adopted) == (new, False, False)


def test_restart_survives_keeper_death_at_any_record_write(bench, keepers, rare_probes):
    """The keeper dies before or after each record write between request and readiness; the restart still happens."""
    fault, _ = keepers
    faults = {
        f"{when}-{number}": fault.with_name(f"{fault.name}-{when}-{number}")
        for number in range(7)
        for when in ("before", "after")
    }
    for name in faults:
        bench.launch(bench.spec(), name)
    new = {name: bench.spec(details={"flags": f"new {name}"}) for name in faults}
    for name, path in faults.items():
        bench.wait(State.READY, name)
        path.write_text(name.replace("-", " "))
        bench.restart(new[name], name)

    def ready(name):
        record = bench.read(name)
        return record.current.number == 2 and record.state is State.READY and client.keeper_alive(bench.root, name)

    def all_ready():
        bench.adopt()
        return all(map(ready, faults))

    until(all_ready, "all that was ordered")
    for name in faults:
        record = bench.read(name)
        assert (record.current.spec, record.start_pending, record.next_spec) == (new[name], False, None), name
        assert processes.alive(record.server), name
    struck = [name for name, path in faults.items() if not path.exists()]
    assert len(struck) >= 10, "the faults did not happen"
    assert all(f"{when}-{number}" in struck for when in ("before", "after") for number in range(4))


def test_prepared_restart_survives_keeper_death_at_any_record_write(bench, keepers, rare_probes):
    """Either the old generation still serves or the new one is ready. No prepared process is left."""
    fault, _ = keepers
    faults = {
        f"{when}-{number}": fault.with_name(f"{fault.name}-{when}-{number}")
        for number in range(9)
        for when in ("before", "after")
    }
    for name in faults:
        bench.launch(bench.spec(), name)
    script = json.dumps([{"say": {"step": "imported"}}, {"say": {"step": "accepted"}}])
    for name, path in faults.items():
        port = bench.wait(State.READY, name).current.spec.port
        new = bench.spec(details={"flags": f"new {name}"}, port=port)
        path.write_text(name.replace("-", " "))
        with contextlib.suppress(errors.KeeperError):  # its keeper may die before it answers
            bench.restart(replace(new, prepared_argv=(*new.argv, "--prepared", script)), name)

    def settled(name):
        record = bench.read(name)
        under_way = record.preparation is not None and record.preparation.step.under_way
        return record.state is State.READY and not under_way and client.keeper_alive(bench.root, name)

    def all_settled():
        bench.adopt()
        return all(map(settled, faults))

    until(all_settled, "one generation of each")
    for name in faults:
        record = bench.read(name)
        assert (record.start_pending, record.next_spec) == (False, None), name
        ports = f"--port\0{record.current.spec.port}\0"
        alive = [pid for pid in processes.table() if ports in _command_line(pid)]
        assert alive == [record.server.pid], name
    assert len([name for name, path in faults.items() if not path.exists()]) >= 12, "the faults did not happen"
    numbers = {bench.read(name).current.number for name in faults}
    assert numbers == {1, 2}, "some restarts happened, some did not"


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text() + "\0"
    except OSError:
        return ""


def test_unadoptable_server_does_not_block_others(bench):
    """Both keepers are dead and one server's output is a pipe. Actions on the other server still work."""
    for name in ("a", "b"):
        bench.orphaned(bench.ready(bench.spec(), name))
    output, aside = bench.file("server.output", "b"), bench.file("aside", "b")
    output.rename(aside)
    os.mkfifo(output)
    fleet = LocalFleet(bench.root, observe=False, gpus=False)
    try:
        with pytest.raises(OperationError, match=r"server.output is not a plain file"):
            fleet.stop("b")
        assert not client.keeper_alive(bench.root, "a"), "a verb does not adopt other servers"
        fleet.stop("a")
        bench.wait(State.STOPPED, "a")
        assert [server.name for server in fleet.snapshot().servers] == ["a", "b"]
        fleet.forget("a")
    finally:
        fleet.close()
    assert client.names(bench.root) == ["b"]
    with pytest.raises(errors.KeeperError, match=r"server b could not be adopted: .* is not a plain file"):
        client.adopt_orphans(bench.root)
    until(lambda: not client.keeper_alive(bench.root, "b"), "the end of the keeper that could not begin")
    aside.rename(output)
    assert client.adopt(bench.root, client.read(bench.root, "b"))
    assert not client.adopt(bench.root, client.read(bench.root, "b")), "it has one"
    assert processes.alive(bench.wait(State.READY, "b").server)


def test_non_utf8_paths_work_for_the_whole_lifecycle(bench):
    """State folder, program, arguments and working folder have non-UTF-8 names."""
    odd = [bench.root / os.fsdecode(word) for word in (b"stat\xe9", b"p\xffthon", b"wo\xe4rk")]
    root, python, cwd = odd
    python.symlink_to(sys.executable)
    cwd.mkdir()
    there = dataclasses.replace(bench, root=root)
    spec = there.spec("--print-env", os.fsdecode(b"n\xfame"), cwd=str(cwd))
    spec = replace(spec, argv=(str(python), *spec.argv[1:]))
    first = there.ready(spec)
    assert first.current.spec == spec
    there.restart(spec)
    second = there.wait(State.READY, generation=2)
    assert Path(f"/proc/{second.server.pid}/cwd").readlink() == cwd
    there.orphaned(second)
    assert there.adopt() == ["one"]
    assert there.stopped().current.spec == spec
    there.restart(replace(spec, argv=(f"{python}-gone", "x")))
    failed = there.wait(State.FAILED)
    assert f"can't run {python}-gone" in failed.reason
    assert "p\\udcffthon-gone: no such file" in there.file("keeper.log").read_text()
    client.remove(root, "one")


def test_stale_record_of_unresponsive_keeper_is_marked_old(bench):
    ready = bench.ready(bench.spec())
    resource.prlimit(ready.keeper.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    assert bench.stop().state is State.STOPPING
    assert "File too large" in bench.wait(State.STOPPED).unwritten
    os.kill(ready.keeper.pid, signal.SIGSTOP)
    try:
        old = bench.read()
    finally:
        os.kill(ready.keeper.pid, signal.SIGCONT)
    assert (old.state, old.reason) == (State.READY, client.STALE)
    assert bench.read().state is State.STOPPED


def test_automatic_start_survives_keeper_death_and_is_counted(bench, keepers):
    fault, _ = keepers
    first = bench.ready(bench.spec(restart=POLICY))
    fault.write_text("early")
    processes.send(first.server, 9)
    left = died(bench, fault)
    assert (left.state, left.attempt, left.start_pending) == (State.STARTING, 1, True)
    bench.adopt()
    again = bench.until(lambda record: record.state is State.READY)
    assert (again.current.number, again.attempt, again.start_pending) == (1, 1, False)


def test_stop_cancels_pending_start(bench, keepers, session_of):
    fault, _ = keepers
    bench.ready(bench.spec())
    fault.write_text("early")
    bench.restart(bench.spec())
    died(bench, fault)
    bench.stop()
    ended = bench.until(lambda record: not record.state.alive)
    assert not ended.start_pending
    bench.until(lambda _: not client.keeper_alive(bench.root, "one"))
    assert bench.adopt() == []
    assert ended.server is None


def test_failed_launch_is_not_retried_later(bench, keepers):
    fault, _ = keepers
    fault.write_text("early")
    with pytest.raises(errors.KeeperError, match="ended during startup"):
        bench.launch(bench.spec())
    assert not fault.exists()
    assert bench.adopt() == ["one"]
    failed = bench.wait(State.FAILED)
    assert "its keeper died before starting it" in failed.reason
    assert failed.server is None


def test_reboot_cancels_pending_start(bench, keepers):
    fault, _ = keepers
    bench.ready(bench.spec())
    fault.write_text("early")
    bench.restart(bench.spec())
    left = died(bench, fault)
    earlier = replace(left, keeper=replace(left.keeper, boot_id="11111111-2222-3333-4444-555555555555"))
    folders.write_record(folders.server_folder(bench.root, "one"), earlier)
    bench.adopt()
    failed = bench.wait(State.FAILED)
    assert "the machine was rebooted since; its pending restart was dropped" in failed.reason
    assert not failed.start_pending


def test_clock_change_does_not_affect_restart_waits_or_attempt_count(bench, keepers):
    _, clock = keepers
    hours = -5
    bench.launch(bench.spec(restart=POLICY), steady=1.0)
    first = bench.wait(State.READY)
    clock.write_text(str(hours * 3600))
    begun = time.monotonic()
    processes.send(first.server, 9)
    again = bench.until(lambda record: record.state is State.READY and record.attempt == 1)
    ready_at = time.monotonic()
    assert abs(again.state_since - time.time() - hours * 3600) < 60, "the clock was off"
    bench.until(lambda record: record.attempt == 0)
    assert time.monotonic() - ready_at > 0.8, "attempts reset only after real time passed"

    processes.send(bench.read().server, 9)
    waiting = bench.until(lambda record: record.next_attempt_at)
    bench.orphaned(waiting)
    clock.write_text(str(-hours * 3600))
    bench.adopt()
    bench.until(lambda record: record.state is State.READY and record.attempt == 1)
    clock.write_text(str(hours * 3600))
    bench.restart(bench.spec())
    second = bench.wait(State.READY, generation=2)
    assert 0 < second.downtime_seconds < time.monotonic() - begun


def test_restart_by_adopting_keeper_uses_launch_environment(bench, monkeypatch, tmp_path):
    dump = tmp_path / "environment"
    first = {"CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/opt/a", "PLUGIN": "a", "MY_TOKEN": "tok-0123456789abc"}
    other = {"CUDA_VISIBLE_DEVICES": "7", "LD_LIBRARY_PATH": "/opt/b", "PLUGIN": "b", "OTHER_TOKEN": "x" * 20,
             "LD_PRELOAD_EXTRA": "1", "NCCL_DEBUG": "INFO", "EXTRA": "1"}  # fmt: skip
    plain = bench.spec()
    code = (
        f"import json, os, sys; open({str(dump)!r}, 'w').write(json.dumps(dict(os.environ)));"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    spec = replace(plain, argv=(sys.executable, "-S", "-c", code, *plain.argv), environment={"OURS": "1"})
    with monkeypatch.context() as shell:
        for name, value in first.items():
            shell.setenv(name, value)
        shell.setenv("HTTP_PROXY", "http://anna:hunter2hunter2@proxy:3128")
        ready = bench.ready(spec)
    launched = json.loads(dump.read_text())
    written = bench.file("record.json").read_text()
    assert "/opt/a" in written
    assert not any(secret in written for secret in (first["MY_TOKEN"], "hunter2"))

    bench.orphaned(ready)
    for name, value in other.items():
        monkeypatch.setenv(name, value)
    bench.adopt()
    bench.restart(spec)
    bench.wait(State.READY, generation=2)
    again = json.loads(dump.read_text())
    assert again != launched
    for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "PATH", "HOME", "OURS"):
        assert again[name] == launched[name]
    assert again["PLUGIN"] == "b", "the record keeps that it was set, but not its value"
    assert not {"OTHER_TOKEN", "LD_PRELOAD_EXTRA", "NCCL_DEBUG", "EXTRA", "MY_TOKEN"} & again.keys()

"""A keeper dies without affecting its server; the next keeper adopts the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_launchers.keeper import client, errors, folders, processes
from vllm_launchers.keeper.records import Exit, ProcessIdentity, RestartMode, RestartPolicy, State
from vllm_launchers.values import replace


def test_server_survives_keeper_death_without_losing_log_lines(bench):
    first = bench.ready(bench.spec("--tick", "0.002"))
    bench.orphaned(first)
    assert processes.alive(first.server)
    assert bench.read().state is State.READY
    written = bench.log().count("\n")
    time.sleep(0.3)
    assert bench.log().count("\n") == written, "no log lines can be written without a keeper"

    assert bench.adopt() == ["one"]
    record = bench.read()
    assert record.server == first.server
    assert record.keeper != first.keeper
    assert record.adopted
    assert record.reason == "", "a console tells it from the record's mark"
    bench.until(lambda _: bench.log().count("\n") > written + 200)
    bench.stopped()
    lines = [line for line in bench.log().splitlines() if line.startswith("tick")]
    assert lines == [f"tick {number}" for number in range(len(lines))]


def test_exit_status_of_adopted_server_is_reported_as_unknown(bench, session_of):
    record = bench.ready(bench.spec("--children", "2", "--children-ignore-term"))
    bench.until(lambda _: bench.log().count("child up") == 2)
    bench.orphaned(record)
    bench.adopt()
    os.kill(record.server.pid, signal.SIGKILL)
    failed = bench.wait(State.FAILED)
    assert (failed.exit.code, failed.exit.signal, failed.exit.requested) == (None, None, False)
    assert "exit code unknown" in failed.reason
    assert not session_of(record.server.pid)


def test_keeper_receives_signals_that_its_starter_blocks(bench):
    """A recorder blocks them, and it starts a new keeper if its own has died."""
    first = bench.ready(bench.spec())
    bench.orphaned(first)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        assert bench.adopt() == ["one"]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    keeper = bench.read().keeper
    os.kill(keeper.pid, signal.SIGTERM)
    bench.until(lambda _: not processes.alive(keeper))
    assert processes.alive(first.server)


def test_adopted_server_can_be_stopped_and_restarted(bench, session_of):
    spec = bench.spec("--children", "1")
    first = bench.ready(spec)
    bench.orphaned(first)
    bench.adopt()
    bench.restart(spec)
    second = bench.wait(State.READY, generation=2)
    assert not second.adopted
    assert not session_of(first.server.pid)
    assert second.downtime_seconds > 0
    bench.orphaned(second)
    assert bench.stop().state is State.STOPPING, "stop works without prior adoption"
    assert bench.wait(State.STOPPED).exit.requested
    assert not session_of(second.server.pid)


def test_unwatched_exit_is_recorded_and_leftovers_are_ended(bench, session_of):
    record = bench.ready(bench.spec("--children", "2", "--children-ignore-term"))
    bench.until(lambda _: bench.log().count("child up") == 2)
    bench.orphaned(record)
    os.kill(record.server.pid, signal.SIGKILL)
    bench.until(lambda _: not processes.alive(record.server))
    assert len(session_of(record.server.pid)) == 2
    assert bench.adopt() == ["one"]
    failed = bench.wait(State.FAILED)
    assert "no keeper was watching" in failed.reason
    assert failed.exit.code is None
    assert not session_of(record.server.pid)
    assert bench.adopt() == []


def test_interrupted_stop_is_resumed(bench, session_of):
    record = bench.ready(bench.spec("--ignore", "TERM", "--children", "1"))
    patient = {"stop_timeouts": {"terminate": 600.0}}
    bench.stopped()
    bench.restart(replace(record.current.spec, details={"again": True}))
    again = bench.wait(State.READY, generation=2)
    bench.orphaned(again)
    client.adopt_orphans(bench.root, tuning=patient)
    bench.orphaned(bench.stop())
    assert bench.read().state is State.STOPPING
    assert processes.alive(again.server)
    assert bench.adopt() == ["one"]
    assert bench.wait(State.STOPPED).exit.requested
    assert not session_of(again.server.pid)


def test_concurrent_adoption_has_one_winner(bench):
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    with ThreadPoolExecutor(4) as pool:
        won = [names for names in pool.map(lambda _: client.adopt_orphans(bench.root), range(4)) if names]
    assert won == [["one"]]
    assert bench.read().server == record.server


def test_reused_pid_is_never_signaled(bench):
    foreign = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        there = processes.identity(foreign.pid)
        for name, lie in {
            "earlier": replace(there, start_time=there.start_time - 1),
            "other-boot": replace(there, boot_id="11111111-2222-3333-4444-555555555555"),
        }.items():
            record = bench.launch(bench.spec("--never-ready", "--exit-after", "0"), name)
            record = bench.wait(State.FAILED, name)
            bench.until(lambda record: not client.keeper_alive(bench.root, record.name), name)
            running = replace(record.current, exit=None, ended_at=None)
            stale = replace(record, state=State.READY, server=lie, generations=(running,))
            folders.write_record(folders.server_folder(bench.root, name), stale)
            assert bench.adopt() == [name]
            assert "exit code unknown" in bench.wait(State.FAILED, name).reason
        assert foreign.poll() is None
        assert processes.alive(there)
    finally:
        foreign.kill()
        foreign.wait()


def test_session_without_leader_is_signaled_only_if_it_holds_our_pipe(bench, wait_until, session_of):
    """The session id of a dead server may have been reused."""
    code = "import os, subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'])"
    leader = subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)
    start = processes.stat(leader.pid).start_time
    leader.wait()
    (foreign,) = wait_until(lambda: session_of(leader.pid))
    try:
        bench.launch(bench.spec("--never-ready", "--exit-after", "0"))
        record = bench.wait(State.FAILED)
        bench.until(lambda _: not client.keeper_alive(bench.root, "one"))
        lie = ProcessIdentity(leader.pid, start, processes.boot_id())
        running = replace(record.current, exit=None, ended_at=None)
        stale = replace(record, state=State.READY, server=lie, generations=(running,))
        folders.write_record(folders.server_folder(bench.root, "one"), stale)
        bench.adopt()
        bench.wait(State.FAILED)
        assert processes.alive(foreign)
    finally:
        processes.send(foreign, signal.SIGKILL)


def test_next_keeper_continues_restart_backoff(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=2, backoff_seconds=0.05, backoff_cap_seconds=600)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "7", restart=policy))
    waiting = bench.until(lambda record: record.state is State.FAILED and record.next_attempt_at is None)
    assert "gave up after 2" in waiting.reason
    bench.until(lambda record: not client.keeper_alive(bench.root, record.name))
    # The state left by a keeper that dies while waiting for the second of two restarts.
    for due in (time.time() + 0.5, time.time() - 900, time.time() + 9e6):  # the last one: the clock was set back
        cut = replace(waiting, attempt=1, next_attempt_at=due, keeper=ProcessIdentity(1, 1, processes.boot_id()))
        folders.write_record(folders.server_folder(bench.root, "one"), cut)
        assert bench.adopt() == ["one"]
        again = bench.until(
            lambda record: record.state is State.FAILED and record.attempt == 2 and record.next_attempt_at is None
        )
        assert "gave up after 2 automatic restarts" in again.reason
        bench.until(lambda record: not client.keeper_alive(bench.root, record.name))


def test_no_automatic_restart_after_reboot(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=600, backoff_cap_seconds=600)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", restart=policy))
    record = bench.until(lambda record: record.next_attempt_at)
    bench.orphaned(record)
    earlier = replace(record, keeper=replace(record.keeper, boot_id="11111111-2222-3333-4444-555555555555"))
    folders.write_record(folders.server_folder(bench.root, "one"), earlier)
    assert bench.adopt() == ["one"]
    record = bench.until(lambda record: record.next_attempt_at is None)
    assert record.state is State.FAILED
    assert "the machine was rebooted since, so it is not restarted" in record.reason


def test_next_keeper_completes_restart_with_new_flags(bench, session_of):
    old, new = bench.spec("--ignore", "TERM", details={"flags": "old"}), bench.spec(details={"flags": "new"})
    first = bench.ready(old)
    bench.orphaned(first)
    client.adopt_orphans(bench.root, tuning={"stop_timeouts": {"terminate": 600.0}})
    asked = bench.restart(new)
    assert (asked.state, asked.next_spec) == (State.STOPPING, new)
    bench.orphaned(asked)
    assert processes.alive(first.server)
    assert bench.adopt() == ["one"]
    second = bench.wait(State.READY, generation=2)
    assert second.current.spec == new
    assert second.next_spec is None
    assert not session_of(first.server.pid)


def test_stop_overrides_restart_of_dead_keeper(bench):
    first = bench.ready(bench.spec("--ignore", "TERM"))
    bench.orphaned(first)
    client.adopt_orphans(bench.root, tuning={"stop_timeouts": {"terminate": 600.0}})
    bench.orphaned(bench.restart(bench.spec()))
    stopped = bench.stopped()
    assert (stopped.current.number, stopped.next_spec) == (1, None)


def test_restart_interrupted_by_reboot_is_reported(bench):
    first = bench.ready(bench.spec())
    bench.orphaned(first)
    processes.send(first.server, signal.SIGKILL)
    gone = replace(first.server, boot_id="11111111-2222-3333-4444-555555555555")
    cut = replace(first, state=State.STOPPING, server=gone, next_spec=bench.spec(details={"flags": "new"}))
    folders.write_record(folders.server_folder(bench.root, "one"), cut)
    bench.adopt()
    stopped = bench.wait(State.STOPPED)
    assert stopped.current.number == 1
    assert "its pending restart with other flags was dropped" in stopped.reason


def test_terminated_keeper_releases_its_server(bench, wait_until):
    record = bench.ready(bench.spec())
    os.kill(record.keeper.pid, signal.SIGTERM)
    wait_until(lambda: not client.keeper_alive(bench.root, "one"))
    assert processes.alive(record.server)
    assert bench.adopt() == ["one"]
    assert bench.stopped().exit.requested


def test_remove_is_refused_while_orphans_may_run(bench):
    record = bench.ready(bench.spec())
    bench.orphaned(record)
    with pytest.raises(errors.StillAliveError, match="stop it first"):
        client.remove(bench.root, "one")
    assert processes.alive(record.server)


def test_secrets_reach_only_the_server(bench, monkeypatch, wait_until):
    secret = "sk-very-secret-0123456789"
    monkeypatch.delenv("API_KEY_OF_OURS", raising=False)
    spec = bench.spec("--print-env", "API_KEY_OF_OURS", secret_names=("API_KEY_OF_OURS",))
    with pytest.raises(errors.SecretMissingError, match="API_KEY_OF_OURS"):
        bench.launch(spec)
    record = bench.ready(spec, secrets={"API_KEY_OF_OURS": secret})
    wait_until(lambda: f"API_KEY_OF_OURS = {len(secret)} characters" in bench.log())
    for path in folders.server_folder(bench.root, "one").iterdir():
        if path.is_file():
            assert secret not in path.read_text(), path
    for pid in (record.keeper.pid, record.server.pid):
        assert secret not in Path(f"/proc/{pid}/cmdline").read_text()
    assert secret not in Path(f"/proc/{record.keeper.pid}/environ").read_text()
    bench.restart(spec)
    record = bench.wait(State.READY, generation=2)
    wait_until(lambda: bench.log().count(f"= {len(secret)} characters") == 2, "that the keeper remembers it")

    bench.orphaned(record)
    bench.adopt()
    with pytest.raises(errors.SecretMissingError, match="API_KEY_OF_OURS"):
        bench.restart(spec)
    assert processes.alive(record.server), "refused before anything was stopped"
    monkeypatch.setenv("API_KEY_OF_OURS", secret)
    bench.restart(spec)
    bench.wait(State.READY, generation=3)
    wait_until(lambda: bench.log().count(f"= {len(secret)} characters") == 3)


def test_sidecar_runs_as_long_as_its_server(bench, wait_until):
    code = "import sys, time; print('sidecar_command', *sys.argv[1:], flush=True); time.sleep(600)"
    sidecar_command = (sys.executable, "-S", "-c", code, "{pid}", "{start_time}", "{generation}", "{other}")
    spec = bench.spec(sidecar=sidecar_command)
    bench.ready(spec)
    record = bench.until(lambda record: record.sidecar)
    server = record.server
    log = bench.file("sidecar.log")
    wait_until(lambda: log.read_text() == f"sidecar_command {server.pid} {server.start_time} 1 {{other}}\n")

    os.kill(record.sidecar.pid, signal.SIGKILL)
    again = bench.until(lambda now: now.sidecar and now.sidecar != record.sidecar)
    assert again.state is State.READY
    assert processes.alive(again.sidecar)

    bench.orphaned(again)
    bench.adopt()
    bench.until(lambda now: now.adopted)
    assert bench.read().sidecar == again.sidecar
    assert processes.alive(again.sidecar)

    bench.restart(spec)
    bench.wait(State.READY, generation=2)
    second = bench.until(lambda now: now.sidecar and now.sidecar != again.sidecar)
    assert not processes.alive(again.sidecar)
    bench.stopped()
    assert not processes.alive(second.sidecar)
    assert bench.read().sidecar is None


def test_known_exit_survives_keeper_death(bench):
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "9"))
    record = bench.wait(State.FAILED)
    bench.until(lambda _: not client.keeper_alive(bench.root, "one"))
    seen = Exit(record.exit.at, 9, None, requested=False, reason="exited with code 9")
    cut = replace(record, state=State.STOPPING, generations=(replace(record.current, exit=seen),))
    folders.write_record(folders.server_folder(bench.root, "one"), cut)
    bench.adopt()
    assert bench.wait(State.FAILED).exit == seen

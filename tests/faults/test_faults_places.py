"""File systems without working locks, and a home shared by containers: one keeper, no action on unknown state."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fakes.ports import free_port
from vllm_launchers.keeper import client, errors, folder_claim, processes
from vllm_launchers.keeper.records import State

GRANTING = Path(__file__).parents[1] / "fakes" / "granting.c"
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--uts", "--kill-child")


@pytest.fixture
def granting(tmp_path, monkeypatch):
    """Grant every lock, in this process and its children."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "granting.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(GRANTING)], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)


def at_once(what, times=8):
    """Run something in threads that start together; returns each thread's exception or None."""
    gate, results = threading.Barrier(times), []

    def one():
        gate.wait()
        try:
            results.append(what())
        except errors.KeeperError as error:
            results.append(error)

    threads = [threading.Thread(target=one) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def settled(bench) -> bool:
    """Whether the only live keeper is the one in the record and is not about to yield."""
    return [bench.read().keeper] == folder_claim.keepers_of(bench.file(""))


def test_concurrent_adoption_without_working_locks_leaves_one_keeper(bench, wait_until, granting):
    record = bench.ready(bench.spec("--tick", "0.02"))
    for _ in range(3):
        processes.send(bench.read().keeper, signal.SIGKILL)
        wait_until(lambda: not client.keeper_alive(bench.root, "one"), "the keeper's death")
        at_once(lambda: client.adopt(bench.root, bench.read()))
        # Keepers that saw each other may all have yielded, or be about to.
        one = "one keeper that wrote the record"
        wait_until(lambda: not client.adopt(bench.root, bench.read()) and settled(bench), one)
        alive = folder_claim.keepers_of(bench.file(""))
        for _ in range(10):
            assert not client.adopt(bench.root, bench.read())
        assert folder_claim.keepers_of(bench.file("")) == alive
        assert processes.alive(record.server)
    bench.stopped()
    wait_until(lambda: not folder_claim.keepers_of(bench.file("")), "the keeper's end")
    assert not processes.alive(record.server)


def test_concurrent_launch_without_working_locks_starts_one_server(bench, wait_until, granting):
    results = at_once(lambda: bench.launch(bench.spec()), 4)
    started = [one for one in results if not isinstance(one, Exception)]
    if not started:  # each saw another keeper
        wait_until(lambda: not folder_claim.keepers_of(bench.file("")), "their ends")
        started = [bench.launch(bench.spec())]
    wait_until(lambda: len(folder_claim.keepers_of(bench.file(""))) == 1, "one keeper")
    alive = {one.server for one in started if processes.alive(one.server)}
    assert len(alive) == 1
    bench.wait(State.READY)
    assert bench.read().server in alive
    bench.stopped()


def test_yielding_second_keeper_keeps_files_of_the_first(bench, granting):
    bench.ready(bench.spec())
    being_written = bench.file(".record.json.1")
    being_written.write_text("half of a record")
    lock = os.open(bench.file("keeper.lock"), os.O_RDWR)
    try:
        with pytest.raises(errors.KeeperError, match="already has a keeper"):
            client._start_keeper(bench.file(""), lock, {"do": "adopt"}, None)
    finally:
        os.close(lock)
    assert being_written.exists()
    bench.stopped()


@pytest.fixture
def contained(bench):
    """Run ``vllm-console`` in a container: separate PIDs, process table and host name, but the same state folder."""
    probe = subprocess.run([*CONTAINER, "true"], capture_output=True, check=False)
    if os.geteuid() != 0 or probe.returncode:
        pytest.skip("a container can be made by root only")

    def run(*words):
        inner = 'hostname otherbox; exec "$@"'
        program = [sys.executable, "-m", "vllm_console", "--state", str(bench.root), *words]
        return subprocess.run([*CONTAINER, "sh", "-c", inner, "sh", *program], capture_output=True, text=True)

    return run


def test_container_with_shared_home_shows_server_read_only(bench, contained):
    record = bench.ready(bench.spec())
    for orphaned in (False, True):
        if orphaned:
            bench.orphaned(record)
        before = bench.file("record.json").read_bytes()
        shown = json.loads(contained("list", "--ours", "--json").stdout)[0]
        assert (shown["state"], shown["elsewhere"] is None) == ("ready", False)
        assert f"runs on {os.uname().nodename}, in another container" in shown["notice"]
        for verb in ("stop", "restart", "remove"):
            done = contained(verb, "one")
            assert (done.returncode, "control it from there" in done.stderr) == (4, True), done.stderr
        assert contained("start", "batch", "--engine", "simulated", "--name", "one").returncode == 4
        assert "process" not in contained("leftovers").stdout.replace("no process", "")
        assert bench.file("record.json").read_bytes() == before
        assert processes.alive(record.server)
    assert bench.adopt() == ["one"]
    assert bench.read().server == record.server


def test_container_server_is_untouched_from_host_until_container_ends(bench, contained, tmp_path, wait_until):
    ready, inner = tmp_path / "ready", f'hostname otherbox; "$@" && touch {tmp_path / "ready"}; exec sleep 600'
    program = [sys.executable, "-m", "vllm_console", "--state", str(bench.root)]
    words = [*program, "start", "batch", "--engine", "simulated", "--port", str(free_port())]
    env = {**os.environ, "SIMULATED_STARTUP_SECONDS": "0"}
    container = subprocess.Popen([*CONTAINER, "sh", "-c", inner, "sh", *words, "--wait"], env=env, stdout=-3)
    try:
        wait_until(ready.exists, "the server")
        record = client.read(bench.root, "batch")
        assert record.location.hostname == "otherbox"
        assert client.elsewhere(bench.root, record) == "on otherbox, in another container (PID namespace)"
        assert client.adopt_orphans(bench.root) == []
        for verb in (client.stop, client.remove):
            with pytest.raises(errors.ElsewhereError):
                verb(bench.root, "batch")
    finally:
        container.kill()
        container.wait()
    wait_until(lambda: not client.elsewhere(bench.root, record), "the end of the container")
    assert client.adopt_orphans(bench.root) == ["batch"]
    failed = bench.wait(State.FAILED, "batch")
    assert "its container has ended since" in failed.reason

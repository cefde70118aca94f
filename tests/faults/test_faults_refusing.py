"""A keeper that continues while its file system fails, while it is stopped, and while its code is replaced."""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import vllm_launchers.keeper as keeper_package
from fakes.keeper_bench import PATIENCE
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import client, errors, folders, processes, wire
from vllm_launchers.keeper.records import State
from vllm_launchers.vllm.flags.changes import Changes

FAILING = Path(__file__).parents[1] / "fakes" / "failing.c"


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> Path:
    """The library that makes a process's file operations fail."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler: the file system that refuses cannot be built")
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("failing") / "failing.so"
    words = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(FAILING), "-ldl"]
    subprocess.run(words, check=True, capture_output=True)
    return library


def test_keeper_without_write_access_continues_and_catches_up(bench, failing, tmp_path, monkeypatch):
    """Quota exceeded, read-only file system, faulty disk, also for open files. One server for each."""
    faults = {"quota": errno.EDQUOT, "readonly": errno.EROFS, "broken": errno.EIO}
    flags = {name: tmp_path / f"{name}.flag" for name in faults}
    quiet = {name: tmp_path / f"{name}.quiet" for name in faults}
    ready = {}
    for name in faults:
        monkeypatch.setenv("LD_PRELOAD", str(failing))
        monkeypatch.setenv("FAILING_FOLDER", str(bench.root))
        monkeypatch.setenv("FAILING_FLAG", str(flags[name]))
        bench.launch(bench.spec("--tick", "0.05", "--quiet-file", str(quiet[name])), name)
    monkeypatch.delenv("LD_PRELOAD")
    for name in faults:
        ready[name] = bench.wait(State.READY, name)
    before = {name: (bench.file("record.json", name).read_bytes(), bench.log(name)) for name in faults}
    for name, number in faults.items():
        flags[name].write_text(str(number))
        quiet[name].touch()
    for name, number in faults.items():
        said = os.strerror(number)
        silent = bench.until(lambda record: record.state is State.UNRESPONSIVE and record.unwritten, name)
        assert said in silent.unwritten, "the error, and which process reported it"
        assert str(bench.file("record.json", name)) in silent.unwritten
        assert bench.file("record.json", name).read_bytes() == before[name][0], "the old record, complete"
        assert folders.is_stale(folders.server_folder(bench.root, name))
        with pytest.raises(errors.UnwrittenError, match=said):
            bench.restart(bench.spec(), name)
        assert processes.alive(ready[name].server), "refused before anything was stopped"
        reported = bench.until(lambda record: "log not writable" in record.reason or record.unwritten, name)
        assert reported.unwritten
    for name in faults:
        quiet[name].unlink()
        flags[name].unlink()
    for name, number in faults.items():
        again = bench.until(lambda record: record.state is State.READY and not record.unwritten, name)
        assert again.server == ready[name].server
        lost = f"bytes of log were lost here: {os.strerror(number)}"
        bench.until(lambda _, name=name, lost=lost: lost in bench.log(name), name)
        assert bench.log(name).startswith(before[name][1]), "earlier log content is kept"
    for name in faults:
        bench.stop(name)
    for name in faults:
        assert bench.wait(State.STOPPED, name).exit.requested


def test_full_log_folder_reports_lost_line_count_and_server_runs_on(bench, disk):
    """The server writes continuously: it is never blocked, and the log reports missing lines."""
    ready = bench.ready(bench.spec("--tick", "0.02"))
    bench.until(lambda _: "tick" in bench.log())  # space for more is reserved from the first output on
    disk.fill(ready.keeper)
    log = bench.file("server.log")
    reported = bench.until(lambda record: "log not writable" in record.reason)
    assert disk.error in reported.reason
    full = log.read_bytes()
    assert processes.alive(ready.server)
    assert bench.read().state is State.READY, "it keeps serving"
    disk.free(ready.keeper)
    bench.until(lambda _: f"bytes of log were lost here: {disk.error}" in bench.log())
    assert log.read_bytes().startswith(full), "nothing was lost"
    gone = next(line for line in bench.log().splitlines() if line.startswith("[keeper]"))
    assert int(gone.split()[1]) > 0
    bench.until(
        lambda record: re.fullmatch(r"log writable again; \d+ bytes were lost", record.reason) and not record.unwritten
    )


def test_keepers_recover_from_exhausted_file_descriptors(bench):
    """No descriptor is left: no connections, record writes, new log files or process checks.

    One keeper started its server, the other has adopted it.
    """
    ready = {"one": bench.ready(bench.spec("--tick", "0.0005", log_bytes=4096, log_files=3))}
    sidecar = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    bench.orphaned(bench.ready(bench.spec(sidecar=sidecar), "two"))
    bench.adopt()
    ready["two"] = bench.until(lambda record: record.state is State.READY and record.sidecar, "two")
    bench.until(lambda _: bench.file("server.log.2").exists())
    limits = {one.keeper.pid: resource.prlimit(one.keeper.pid, resource.RLIMIT_NOFILE) for one in ready.values()}
    for pid, (_, most) in limits.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, most))
    for name in ready:
        home = folders.server_folder(bench.root, name)
        wire.ask(home, {"do": "read"}, 10.0)  # waits for it with the descriptor that was opened earlier
        with pytest.raises(errors.SilentError):
            wire.ask(home, {"do": "read"}, 0.3)
    older = [bench.file(f"server.log.{number}").read_bytes() for number in (1, 2)]
    bench.until(lambda _: bench.file("server.log").stat().st_size > 3 * 4096)
    assert [bench.file(f"server.log.{number}").read_bytes() for number in (1, 2)] == older
    for pid, limit in limits.items():
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)
    bench.until(lambda _: bench.file("server.log").stat().st_size < 4096)
    for name, before in ready.items():
        wire.ask(folders.server_folder(bench.root, name), {"do": "read"}, 10.0)
        after = bench.wait(State.READY, name)
        assert (after.server, after.sidecar) == (before.server, before.sidecar), "no process was considered dead"
        assert processes.alive(after.server)
        assert "sent SIG" not in bench.file("keeper.log", name).read_text()
        bench.stopped(name)
    assert not processes.alive(ready["two"].sidecar)
    ticks = [int(line.split()[1]) for line in bench.log().splitlines() if line.startswith("tick")]
    assert ticks == list(range(ticks[0], ticks[-1] + 1)), "no line is missing"


def test_keeper_answers_malformed_requests(bench):
    """A request from the right user that our console never sends still gets a response."""
    ready = bench.ready(bench.spec())
    home = folders.server_folder(bench.root, "one")
    spec = wire.to_plain(ready.current.spec)
    for request in (
        {"do": "restart", "spec": spec, "secrets": [1]},
        {"do": "restart", "spec": spec | {"drain_seconds": 10**400}},
        {"do": "restart", "spec": 5},
        {"do": ["restart"]},
    ):
        answer = wire.ask(home, request, 5.0)
        assert answer["message"], request
        assert (bench.read().state, bench.read().server) == (State.READY, ready.server), request
    assert "internal error in the keeper" in bench.file("keeper.log").read_text()
    bench.stopped()


def test_stopped_keeper_is_reported_and_does_not_affect_others(bench, monkeypatch):
    """SIGSTOP: it holds its lock and its socket and does not respond."""
    monkeypatch.setattr(wire, "ANSWER_SECONDS", 0.4)
    ready, other = bench.ready(bench.spec()), bench.ready(bench.spec(), "two")
    processes.send(ready.keeper, signal.SIGSTOP)
    bench.until(lambda _: processes.is_stopped(ready.keeper))
    fleet = LocalFleet(bench.root, observe=False, interactive=True, gpus=False)
    try:
        for act in (
            lambda: fleet.stop("one"),
            lambda: fleet.forget("one"),
            lambda: client.restart(bench.root, "one", ready.current.spec),
        ):
            with pytest.raises((OperationError, errors.SilentError), match=f"kill -CONT {ready.keeper.pid}") as refused:
                act()
            assert "was stopped by a signal" in str(refused.value)
        assert client.adopt_orphans(bench.root) == [], "it is alive, so its server is not adopted"
        threads = [threading.Thread(target=fleet.snapshot, args=("one",), daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads), "a refresh hangs"
        assert [server.state for server in fleet.snapshot().servers] == [State.READY, State.READY]
        fleet.stop("two")
        bench.wait(State.STOPPED, "two")
        assert processes.alive(ready.server)
        assert not processes.alive(other.server)
    finally:
        processes.send(ready.keeper, signal.SIGCONT)
        fleet.close()
    bench.restart(ready.current.spec)
    again = bench.wait(State.READY, generation=2)
    assert again.keeper == ready.keeper
    notes = bench.file("keeper.log").read_text()
    assert notes.count("stop requested") == 1, (
        "requests sent while it was stopped, whose senders are gone, are not executed"
    )


def test_stale_record_of_stopped_keeper_is_shown_as_old(bench, disk, monkeypatch, tmp_path):
    monkeypatch.setattr(client, "READ_SECONDS", 0.3)
    quiet = tmp_path / "quiet"
    ready = bench.ready(bench.spec("--quiet-file", str(quiet)))
    disk.fill(ready.keeper)
    quiet.touch()
    bench.wait(State.UNRESPONSIVE)
    processes.send(ready.keeper, signal.SIGSTOP)
    try:
        seen = client.read(bench.root, "one")
        assert (seen.state, seen.reason) == (State.READY, client.STALE)
        assert client.list_records(bench.root) == ([seen], [])
    finally:
        processes.send(ready.keeper, signal.SIGCONT)
        disk.free(ready.keeper)


IMPORTS = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
import vllm_launchers.keeper.loop
from vllm_launchers.keeper import health
from vllm_launchers.listeners import Owner
posted, me = [], Owner.of(__import__("os").getpid())
asker = health.HealthChecker(posted.append)
asker.aim(health.HealthTarget(1, me, "127.0.0.1", int(sys.argv[2]), 60.0, tls=True))
asker.aim(None)
late = []
sys.addaudithook(lambda event, words: late.append(words[0]) if event == "import" else None)
said = [health.check(me, host, int(sys.argv[2]), tls=tls) for host in ("127.0.0.1", "localhost") for tls in (0, 1)]
print(json.dumps([late, said]))
"""


def test_probe_modules_are_imported_before_first_probe(port):
    """Also over TLS: an upgrade may have replaced the files on disk by the time of the first probe."""
    where = str(Path(keeper_package.__file__).parents[2])
    words = [sys.executable, "-I", "-S", "-c", IMPORTS, where, str(port)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    late, said = __import__("json").loads(done.stdout)
    assert late == []
    assert said == ["connection refused"] * 4


@pytest.mark.parametrize("moment", ["before it is read", "before its lock is taken"])
def test_start_of_a_server_that_is_removed_meanwhile_starts_a_new_one(bench, monkeypatch, port, moment):
    from vllm_launchers.launch.request import LaunchRequest

    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    bench.launch(bench.spec())
    bench.stopped()
    restart, take = client.restart, folders.take_lock

    def removed_first(root, name, *rest, **more):
        if moment == "before it is read":
            client.remove(root, name)
        else:
            monkeypatch.setattr(folders, "take_lock", removed_then_taken)
        return restart(root, name, *rest, **more)

    def removed_then_taken(home, *rest):
        monkeypatch.setattr(folders, "take_lock", take)
        client.remove(bench.root, home.name)
        return take(home, *rest)

    monkeypatch.setattr(client, "restart", removed_first)
    fleet = LocalFleet(bench.root, observe=False, gpus=False)
    try:
        fleet.start(LaunchRequest("chatbot", engine="simulated", name="one", port=port))
    finally:
        fleet.close()
    assert bench.wait(State.READY).current.number == 1


def test_two_concurrent_consoles_both_see_the_outcome(bench, monkeypatch, port):
    """User actions: start, restart, stop and switch, from two fleets concurrently."""
    monkeypatch.setenv("SIMULATED_STARTUP_SECONDS", "0")
    fleets = [LocalFleet(bench.root, observe=False, gpus=False) for _ in range(2)]
    outcomes: list[tuple[str, str]] = []

    def request():
        from vllm_launchers.launch.request import LaunchRequest

        return LaunchRequest("chatbot", engine="simulated", name="one", port=port)

    def act(name, do):
        try:
            do()
            outcomes.append((name, ""))
        except OperationError as error:
            outcomes.append((name, str(error)))
        except Exception as error:  # noqa: BLE001 - what must not be
            outcomes.append((name, f"FAULT {error!r}"))

    def both(*acts):
        threads = [threading.Thread(target=act, args=one) for one in acts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in threads)

    def settled():
        return bench.until(
            lambda record: (
                record.state in (State.READY, State.STOPPED)
                and record.next_spec is None
                and not record.start_pending
                and not (record.preparation is not None and record.preparation.step.under_way)
            )
        )

    try:
        both(("start", lambda: fleets[0].start(request())), ("start", lambda: fleets[1].start(request())))
        assert sorted(bool(text) for _, text in outcomes) == [False, True], outcomes
        assert "one already exists" in max(text for _, text in outcomes)
        first = settled()
        assert first.current.number == 1
        both(
            ("restart", lambda: fleets[0].restart("one", Changes(set={"max-num-seqs": 64}))),
            ("switch", lambda: fleets[1].switch("one", "batch")),
        )
        second = settled()
        assert second.state is State.READY
        assert [number.number for number in second.generations] == list(range(1, second.current.number + 1))
        assert second.current.number in (2, 3)
        both(("stop", lambda: fleets[0].stop("one")), ("restart", lambda: fleets[1].restart("one", Changes())))
        third = settled()
        assert client.keeper_alive(bench.root, "one") is third.state.alive or third.state is State.STOPPED
        both(("stop", lambda: fleets[0].stop("one")), ("stop", lambda: fleets[1].stop("one")))
        bench.wait(State.STOPPED)
        # The first starts it on its port; the second must not report that port as in use.
        both(
            ("restart", lambda: fleets[0].restart("one", Changes())),
            ("switch", lambda: fleets[1].switch("one", "batch")),
        )
        fourth = settled()
        assert len({number.spec.port for number in fourth.generations}) == 1, outcomes
        both(("stop", lambda: fleets[0].stop("one")), ("stop", lambda: fleets[1].stop("one")))
        bench.wait(State.STOPPED)
        both(("forget", lambda: fleets[0].forget("one")), ("start", lambda: fleets[1].start(request())))
        assert not [text for _, text in outcomes if text.startswith("FAULT")], outcomes
        left = client.list_records(bench.root)
        assert left[1] == []
        assert len(left[0]) <= 1
    finally:
        for fleet in fleets:
            fleet.close()

"""Other users' processes with every forgeable mark of a server: no action signals them or changes their files."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_console.cli import demo
from vllm_console.fleet.local import LocalFleet
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import client, errors, folders, orphans, process_group, processes, wire
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.keeper.spawn import LOG_BYTES, Sidecar
from vllm_launchers.procfs import open_files
from vllm_launchers.values import replace

FOREIGN = """
import ctypes, os, signal, sys
if uid := int(sys.argv[1]):
    os.setgroups([]), os.setresgid(uid, uid, uid), os.setresuid(uid, uid, uid)
catchable = set(range(1, 65)) - {signal.SIGKILL, signal.SIGSTOP, 32, 33}
signal.pthread_sigmask(signal.SIG_BLOCK, catchable)
ctypes.CDLL(None).prctl(15, b"VLLM::EngineCor", 0, 0, 0)
print("up", flush=True)
while True:
    got = signal.sigwaitinfo(catchable)
    print(got.si_signo, got.si_pid, flush=True)
"""
"""Records every signal it receives and the sender."""
NOBODY = 65534
OTHER_BOOT = "11111111-2222-3333-4444-555555555555"


class ForeignProcess:
    """A foreign process with the command line and title of a server."""

    def __init__(self, log, uid):
        words = [str(uid), "vllm", "serve", "m", "--port", "8000"]
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-c", FOREIGN, *words], stdout=output, start_new_session=True
            )
        self.pid = self.process.pid

    @property
    def identity(self):
        return processes.identity(self.pid)

    def unhurt(self):
        assert self.process.poll() is None
        assert self.log.read_text() == "up\n", "it got a signal"
        return True


@pytest.fixture
def foreign(tmp_path, wait_until):
    """Create foreign processes; each must be alive and unsignaled at the end of the test."""
    made = []

    def make(uid=0):
        if uid and os.geteuid() != 0:
            pytest.skip("only root can start another user's process")
        one = ForeignProcess(tmp_path / f"foreign-{len(made)}", uid)
        made.append(one)
        wait_until(lambda: one.log.read_text() == "up\n", "a foreign process")
        return one

    try:
        yield make
        assert made
        assert all(one.unhurt() for one in made)
    finally:
        for one in made:
            one.process.kill()
            one.process.wait()


def forged(root, name, server, *, state=State.READY, sidecar=None, keeper=None):
    """A record left by a keeper that was killed while its server was in this state."""
    spec = LaunchSpec((sys.executable, "-c", "pass"), "127.0.0.1", 1)
    generation = Generation(1, spec, 1.0, ready_at=2.0 if state is State.READY else None)
    record = ServerRecord(name, state, 1.0, 1.0, (generation,), server=server, keeper=keeper, sidecar=sidecar)
    home = folders.prepare(root, name)
    (home / "server.output").touch(0o600)
    (home / "sidecar.log").touch(0o600)
    folders.write_record(home, record)
    return record


LIES = {
    "exact": lambda there: there,
    "pid given to another": lambda there: replace(there, start_time=there.start_time - 1),
    "another boot": lambda there: replace(there, boot_id=OTHER_BOOT),
}


@pytest.mark.parametrize("uid", [0, NOBODY], ids=["same user", "another user"])
def test_forged_record_never_affects_foreign_process(bench, foreign, uid):
    """Every state and action with its exact identity, and every other forgery in each state, in one folder."""
    there = foreign(uid).identity
    cases = {}
    verbs = ("stop", "restart", "adopt")
    for at, (lie, tell) in enumerate(LIES.items()):
        for number, state in enumerate((State.STARTING, State.READY, State.UNRESPONSIVE, State.STOPPING)):
            for verb in verbs if lie == "exact" and not uid else [verbs[(at + number) % 3]]:
                name = f"{lie}.{state}.{verb}".replace(" ", "-")
                cases[name] = verb
                forged(bench.root, name, tell(there), state=state, sidecar=tell(there))

    def act(name):
        with client_errors():
            if cases[name] == "stop":
                bench.stop(name)
            elif cases[name] == "restart":
                bench.restart(replace(bench.spec("--exit-after", "0", "--exit-code", "2", "--never-ready")), name)
            else:
                client._adopt(folders.server_folder(bench.root, name), None)
        return bench.until(lambda record: not record.state.alive and not client.keeper_alive(bench.root, name), name)

    with ThreadPoolExecutor(16) as pool:
        ended = dict(zip(cases, pool.map(act, cases), strict=True))
    assert len(ended) == (12 if uid else 20)
    for name, record in ended.items():
        assert record.server is None, name
    reasons = [record.generations[0].exit.reason for name, record in ended.items() if name.startswith("exact")]
    assert all(f"pid {there.pid} is not this server's process" in reason for reason in reasons), reasons
    for name in cases:
        client.remove(bench.root, name)
    assert processes.alive(there)


def client_errors():
    """Ignore refused actions; they are not tested here."""
    return contextlib.suppress(errors.KeeperError)


def test_copied_state_folder_does_not_stop_original_server(bench, foreign, tmp_path):
    """Like a backup: the record is correct and the server runs, but its output is in another folder."""
    foreign()
    ready = bench.ready(bench.spec("--children", "2"))
    bench.until(lambda _: len(process_group.recorded(bench.file("")).members) >= 3)
    copy = tmp_path / "copy"
    home = folders.prepare(copy, "one")
    for file in ("record.json", "members.json"):
        shutil.copy(bench.file(file), home)
    (home / "server.output").touch(0o600)
    record = client.stop(copy, "one")
    record = client.wait_for(copy, "one", lambda record: not record.state.alive, 20)
    assert "is not this server's process" in record.exit.reason
    assert orphans.find(copy).found == ()

    renamed = folders.prepare(bench.root, "two")
    shutil.copy(bench.file("record.json"), renamed)
    for verb in (client.stop, client.read):
        with pytest.raises(errors.RecordError, match="it was copied or moved here"):
            verb(bench.root, "two")
    assert bench.adopt() == []
    client.remove(bench.root, "two")
    assert processes.alive(ready.server)
    assert bench.read().state is State.READY


def test_symlinks_in_state_folder_are_not_followed(bench, foreign, tmp_path):
    there = foreign().identity
    real = bench.ready(bench.spec())
    aim = tmp_path / "somebody"
    aim.mkdir()
    precious = aim / "precious"
    precious.write_bytes(b"x" * (LOG_BYTES + 1))

    (folders.servers_folder(bench.root) / "linked").symlink_to(bench.file(""))
    for verb in (client.stop, client.remove):
        with pytest.raises(errors.NotOursError, match="is a link"):
            verb(bench.root, "linked")
    assert any("linked" in problem for problem in client.list_records(bench.root)[1])

    for name in ("record.json", "keeper.lock", "server.log", "keeper.log", "server.output", "sidecar.log"):
        server = f"with-{name}"
        forged(bench.root, server, there)
        file = bench.file(name, server)
        file.unlink(missing_ok=True)
        file.symlink_to(precious)
        with client_errors():
            bench.stop(server)
        with client_errors():
            client.adopt_orphans(bench.root)
    assert precious.stat().st_size == LOG_BYTES + 1
    assert sorted(path.name for path in aim.iterdir()) == ["precious"]

    forged(bench.root, "pipe-for-a-file", there)
    output = bench.file("server.output", "pipe-for-a-file")
    output.unlink()
    os.mkfifo(output)
    with pytest.raises(errors.KeeperError, match="is not a plain file"):
        bench.stop("pipe-for-a-file")
    assert output.is_fifo()

    forged(bench.root, "socket", there)
    bench.file("keeper.sock", "socket").symlink_to(bench.file("keeper.sock"))
    with pytest.raises(wire.UnreachableError, match="in the socket's place"):
        wire.ask(folders.server_folder(bench.root, "socket"), {"do": "stop"})
    assert bench.read() == real, "stopping one server does not reach another through its socket"


def test_symlinked_sidecar_log_is_not_truncated(tmp_path):
    precious = tmp_path / "precious"
    precious.write_bytes(b"x" * (LOG_BYTES + 1))
    (tmp_path / "sidecar.log").symlink_to(precious)
    sidecar = Sidecar(tmp_path, lambda process: None, lambda text: None)
    sidecar.tick(0.0)
    assert precious.stat().st_size == LOG_BYTES + 1
    (tmp_path / "sidecar.log").unlink()
    precious.rename(tmp_path / "sidecar.log")
    sidecar.tick(0.0)
    assert (tmp_path / "sidecar.log").stat().st_size == 0


def test_state_folder_of_another_user_is_refused(bench, foreign, tmp_path):
    there = foreign(NOBODY).identity
    forged(bench.root, "one", there)
    os.chown(bench.file(""), NOBODY, NOBODY)
    for verb in (client.stop, client.remove):
        with pytest.raises(errors.NotOursError, match="belongs to another user"):
            verb(bench.root, "one")
    assert bench.adopt() == []
    os.chown(bench.file(""), 0, 0)
    os.chown(bench.file("record.json"), NOBODY, NOBODY)
    with pytest.raises(errors.NotOursError, match="belongs to another user"):
        client.stop(bench.root, "one")

    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    link = tmp_path / "link"
    link.symlink_to(theirs)
    with pytest.raises(errors.NotOursError, match="belongs to another user"):
        client.launch(link, "one", bench.spec())
    assert list(theirs.iterdir()) == []


def test_nothing_is_sent_to_socket_of_another_user(bench, foreign, tmp_path):
    there = foreign(NOBODY).identity
    forged(bench.root, "one", there, state=State.STOPPING)
    code = (
        "import os, socket, sys; os.setresgid(*3 * [65534]), os.setresuid(*3 * [65534]); "
        "one = socket.socket(socket.AF_UNIX); one.bind(sys.argv[1]); one.listen(); "
        "print('up', flush=True); taken = one.accept()[0]; print(taken.recv(100), flush=True)"
    )
    place = Path("/tmp", f"others-{os.getpid()}")
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    listener = subprocess.Popen([sys.executable, "-S", "-c", code, str(place / "sock")], stdout=subprocess.PIPE)
    try:
        assert listener.stdout.readline() == b"up\n"
        (place / "sock").rename(bench.file("keeper.sock"))
        with pytest.raises(wire.UnreachableError, match="another user"):
            wire.ask(bench.file(""), {"do": "stop"})
        assert listener.stdout.readline() == b"b''\n"
        bench.stop()
        bench.wait(State.STOPPED)
    finally:
        listener.kill()
        listener.wait()
        listener.stdout.close()
        shutil.rmtree(place)


def test_console_and_demo_never_affect_foreign_processes(bench, foreign, tmp_path):
    """A foreign server on the same port, and records that point to it."""
    there = foreign().identity
    with socket.create_server(("127.0.0.1", 0)):
        forged(bench.root, "mine", there)
        forged(bench.root, "other", there)
        fleet = LocalFleet(bench.root, observe=True)
        try:
            for verb in (fleet.stop, fleet.forget, fleet.loads.stop):
                with contextlib.suppress(OperationError):
                    verb("mine")
            with contextlib.suppress(OperationError):
                fleet.switch("other", "chatbot")
            seen = fleet.snapshot()
            observed = [view for view in seen.servers if not view.ours]
            for view in observed:
                with pytest.raises(OperationError, match=r"read-only|no server is called"):
                    fleet.stop(view.name)
        finally:
            fleet.close()
    root = tmp_path / "demo"
    forged(root, "chat", there)
    demo._end(root)
    assert not root.exists()
    assert processes.alive(there)


def test_reader_of_server_output_is_not_treated_as_server_process(bench, wait_until):
    ready = bench.ready(bench.spec("--tick", "0.05"))
    output = bench.file("server.output")
    reader = subprocess.Popen(["tail", "-f", str(output)], stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: str(output.resolve()) in (open_files(reader.pid) or ()), "the reader")
        bench.orphaned(ready)
        processes.send(ready.server, signal.SIGKILL)
        wait_until(lambda: not processes.alive(ready.server), "the server's death")
        assert bench.adopt() == ["one"]
        bench.wait(State.FAILED)
        assert reader.poll() is None, "it was not ended by a signal"
        assert orphans.find(bench.root).found == ()
    finally:
        reader.kill()
        reader.wait()

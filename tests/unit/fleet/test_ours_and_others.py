"""What follows from the records of this user's servers, and from the command lines of other users' servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from msgspec.structs import replace

from fakes.endpoint import FakeEndpoint
from vllm_console.attached import Endpoint, attached_folder, first_record
from vllm_console.fleet import other_servers
from vllm_console.fleet.attached_servers import without_attached
from vllm_console.fleet.local import LocalFleet
from vllm_console.fleet.other_servers import FIRST_ANSWER_SECONDS, ObservedWatch
from vllm_console.fleet.snapshot import ServerView
from vllm_launchers import procfs, values
from vllm_launchers.errors import OperationError
from vllm_launchers.host.ports import user_name
from vllm_launchers.host.processes import ObservedServer, ProcessScanner
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.keeper.records import State as Seen
from vllm_launchers.launch.server_records import ServerRecords


def record(name: str, port: int, state: State) -> ServerRecord:
    """A server as its keeper left it."""
    spec = LaunchSpec(("vllm", "serve"), "127.0.0.1", port)
    return ServerRecord(name, state, 1.0, 1.0, (Generation(1, spec, 1.0),))


def test_server_waiting_to_restart_keeps_its_name_and_port(tmp_path: Path) -> None:
    ended = record("chat", 8055, State.FAILED)
    waits = values.replace(record("chat", 8055, State.FAILED), next_attempt_at=time.time() + 60)
    lives = record("batch", 8056, State.READY)
    for one in (waits, lives):
        folders.write_record(folders.prepare(tmp_path, one.name), one)
    assert ServerRecords(tmp_path).taken_ports() == {8055, 8056}
    assert ServerRecords(tmp_path).taken_ports("chat") == {8056}, "its own port is not taken"
    assert ServerRecords(tmp_path).free_name("chat") == "chat-2"
    folders.write_record(folders.prepare(tmp_path, "chat"), ended)
    assert ServerRecords(tmp_path).taken_ports() == {8056}
    assert ServerRecords(tmp_path).free_name("chat") == "chat"


def test_unreadable_folder_is_reported_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("no folder")
    fleet = LocalFleet(tmp_path, observe=False, gpus=False)
    with pytest.raises(OperationError, match="servers"):
        fleet.snapshot()
    fleet.close()


@pytest.mark.parametrize("host", ["a b", "a:b", "[x", "\x1b[31m"])
def test_invalid_address_in_a_command_line_affects_only_that_server(host: str) -> None:
    """Any user of a machine can write such a command line."""
    watch = ObservedWatch(ObservedServer(1, 1, "anna", ("vllm", "serve", "m", "--host", host), 7999, host, "m"), 0.1)
    assert watch.sampled.wait(60)
    view = watch.view(None, ())
    assert view.state is not Seen.READY
    assert view.reason.endswith(
        ("is not a server URL; expected one such as http://gpubox:8000.", "no server listens there (yet).")
    )
    assert "\x1b" not in view.reason
    watch.close()


def test_server_of_others_is_as_old_as_its_process() -> None:
    """Not as old as the console that observes it."""
    own = psutil.Process()
    started = procfs.stat(own.pid)
    assert started is not None
    watch = ObservedWatch(ObservedServer(own.pid, started.start_time, "anna", ("vllm",), None, "0.0.0.0", "m"), 0.1)
    assert watch.view(None, ()).state_since == pytest.approx(own.create_time(), abs=2)
    watch.close()


def test_command_waits_for_a_slow_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command polls once, so a later answer is lost. A console polls again."""
    page = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"
    listener = socket.create_server(("127.0.0.1", 0))
    answered = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            answered.wait(FIRST_ANSWER_SECONDS + 0.2)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)

    threading.Thread(target=answer, daemon=True).start()
    own = procfs.stat(os.getpid())
    assert own is not None
    port = listener.getsockname()[1]
    seen = ObservedServer(own.pid, own.start_time, "anna", ("vllm", "serve"), port, "127.0.0.1", "m")
    monkeypatch.setattr(ProcessScanner, "scan", lambda *_: [seen])
    for interactive, expected in ((False, (Seen.READY, True)), (True, (Seen.STARTING, False))):
        fleet = LocalFleet(tmp_path, gpus=False, interactive=interactive)
        (view,) = fleet.snapshot().servers
        fleet.close()
        assert (view.state, view.contacted) == expected
    answered.set()
    listener.close()


def test_one_slow_answer_is_not_unresponsive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only three samples in a row without a response are."""
    monkeypatch.setattr(other_servers, "ANSWER_SECONDS", 1.0)
    page = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\n"
    listener = socket.create_server(("127.0.0.1", 0))
    states: list[Seen] = []
    done = threading.Event()

    def answer() -> None:
        for number in range(5):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if number == 0:
                    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(page)
                    connection.sendall(head + page)
                    continue
                states.append(watch.view(None, ()).state)
                connection.recv(1)  # until the client gives up
        done.set()

    own = procfs.stat(os.getpid())
    assert own is not None
    threading.Thread(target=answer, daemon=True).start()
    port = listener.getsockname()[1]
    seen = ObservedServer(own.pid, own.start_time, "anna", ("vllm", "serve"), port, "127.0.0.1", "m")
    watch = ObservedWatch(seen, 0.05)
    assert done.wait(60)
    watch.close()
    listener.close()
    assert states == [Seen.READY, Seen.READY, Seen.READY, Seen.UNRESPONSIVE]


def test_server_with_an_unknown_port_was_not_probed() -> None:
    watch = ObservedWatch(ObservedServer(1, 1, "anna", ("VLLM::APIServer",), None, "0.0.0.0", None), 0.1)
    assert not watch.view(None, ()).contacted
    watch.close()


def test_container_server_is_not_probed_on_this_machines_port() -> None:
    """Another server responds there; its metrics must not be shown as the container's."""
    script = "print(flush=True); import sys; sys.stdin.read()"
    words = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", script]
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as contained,
    ):
        assert contained.stdout is not None
        if not contained.stdout.readline():
            pytest.skip("this machine lets nobody make a network namespace")
        found = procfs.stat(contained.pid)
        assert found is not None
        port = listener.getsockname()[1]
        seen = ObservedServer(contained.pid, found.start_time, "anna", ("vllm", "serve"), port, "0.0.0.0", "m")
        watch = ObservedWatch(seen, 0.05)
        view = watch.view(None, ())
        watch.close()
        assert not any(thread.name == f"observe-{contained.pid}" for thread in threading.enumerate())
        assert (view.name, view.port, view.contacted, view.sample) == (f"vllm@pid-{contained.pid}", 0, False, None)
        assert view.reason == "in a container: its port is not reachable from here"
        assert not view.exposed
        contained.communicate()


def test_failure_line_is_counted_from_the_beginning_of_the_log(tmp_path: Path) -> None:
    """The log also holds earlier generations and redrawn progress bars."""
    before = "INFO all well\n" * 40 + "1 %\r50 %\r100 %\n"
    failed = values.replace(record("chat", 8055, State.FAILED), log_offset=len(before))
    folder = folders.prepare(tmp_path, "chat")
    folders.write_record(folder, failed)
    (folder / "server.log").write_text(before + "INFO hello\nvllm: error: unrecognized arguments: --nonsense\n")
    fleet = LocalFleet(tmp_path, observe=False, gpus=False)
    try:
        view = fleet.snapshot().server("chat")
        assert view is not None
        assert view.diagnosis is not None
        assert view.diagnosis.line == 43
    finally:
        fleet.close()


def test_only_a_server_of_this_user_is_asked_for_its_version() -> None:
    fake, own = FakeEndpoint(), procfs.stat(os.getpid())
    assert own is not None
    port = urlsplit(fake.url).port
    mine = ObservedServer(
        own.pid, own.start_time, user_name(os.getuid()), ("vllm", "serve", "m"), port, "127.0.0.1", "m"
    )
    others = replace(mine, user="anna")
    watches = [ObservedWatch(others, 0.05), ObservedWatch(mine, 0.05)]
    assert until(lambda: watches[1].view(None, ()).engine is not None)
    engine = watches[1].view(None, ()).engine
    assert engine is not None
    assert (engine.label, engine.release) == ("vLLM 0.32.0", (0, 32, 0))
    assert until(lambda: watches[0].view(None, ()).state is Seen.READY)
    for watch in watches:
        watch.close()
    assert watches[0].view(None, ()).engine is None
    assert [path for _, path, _ in fake.asked].count("/version") == 1
    fake.close()


def observed(fake: FakeEndpoint, user: str = "anna", model: str | None = "m") -> ObservedServer:
    """A server of another user at a fake endpoint."""
    own = procfs.stat(os.getpid())
    assert own is not None
    port = urlsplit(fake.url).port
    return ObservedServer(own.pid, own.start_time, user, ("vllm", "serve"), port, "127.0.0.1", model)


def test_it_is_unknown_since_when_a_server_was_ready_that_was_ready_when_first_seen() -> None:
    fake = FakeEndpoint()
    fake.answers["/metrics"] = (404, b"", {})
    later, found = ObservedWatch(observed(fake), 0.05), FakeEndpoint()
    ready = ObservedWatch(observed(found), 0.05)
    assert until(lambda: ready.view(None, ()).state is Seen.READY)
    assert ready.view(None, ()).since_start
    assert until(later.sampled.is_set)
    fake.answers["/metrics"] = found.answers["/metrics"]
    assert until(lambda: later.view(None, ()).state is Seen.READY)
    assert not later.view(None, ()).since_start
    for one in (later, ready, fake, found):
        one.close()


def test_model_that_no_command_line_names_is_read_from_the_metrics() -> None:
    """With ``vllm serve --config FILE``; nothing but metrics is requested from another user's server."""
    fake = FakeEndpoint()
    watch = ObservedWatch(observed(fake, model=None), 0.05)
    assert until(lambda: watch.view(None, ()).state is Seen.READY)
    assert watch.view(None, ()).model == "far-model"
    watch.close()
    assert {path for _, path, _ in fake.asked} == {"/metrics"}
    fake.close()


def test_server_that_is_also_attached_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeEndpoint()
    monkeypatch.setattr(ProcessScanner, "scan", lambda *_: [observed(fake, user_name(os.getuid()))])
    fleet = LocalFleet(tmp_path, gpus=False, read_only=True)
    (alone,) = fleet.snapshot().servers
    folder = attached_folder(tmp_path, "far")
    folder.mkdir(parents=True, mode=0o700)
    folders.write_record(folder, first_record("far", Endpoint(fake.url), time.time()))
    names = [server.name for server in fleet.snapshot().servers]
    fleet.close()
    fake.close()
    assert alone.name.startswith("vllm@")
    assert names == ["far"]


@pytest.mark.parametrize(
    ("bound", "endpoint", "listed"),
    [
        ("0.0.0.0", "127.0.0.1", False),
        ("127.0.0.1", "localhost", False),
        ("127.0.0.2", "127.0.0.1", True),
        ("10.0.0.5", "localhost", True),
    ],
)
def test_another_server_on_the_port_of_an_attached_one_is_listed(bound: str, endpoint: str, listed: bool) -> None:
    """Servers may bind different addresses with the same port."""
    attached = ServerView(
        name="far",
        state=Seen.READY,
        state_since=0.0,
        ours=False,
        port=8000,
        attached=Endpoint(f"http://{endpoint}:8000"),
    )
    other = ServerView(name="vllm@anna", state=Seen.READY, state_since=0.0, ours=False, host=bound, port=8000)
    assert without_attached([attached, other]) == [attached] + [other] * listed


def test_sampling_error_of_a_foreign_server_is_shown_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example if descriptors run out briefly; metrics from before must not remain forever."""
    fake, own = FakeEndpoint(), procfs.stat(os.getpid())
    assert own is not None
    faults = threading.Event()
    thread = threading.current_thread()

    def exposed(_: ObservedServer) -> str:
        if faults.is_set() and threading.current_thread() is not thread:
            raise OSError("too many open files")
        return ""

    faults.set()

    monkeypatch.setattr(other_servers, "exposed", exposed)
    port = urlsplit(fake.url).port
    server = ObservedServer(own.pid, own.start_time, "anna", ("vllm", "serve", "m"), port, "127.0.0.1", "m")
    watch = ObservedWatch(server, 0.05)
    assert until(lambda: "too many open files" in watch.view(None, ()).reason)
    faults.clear()
    assert until(lambda: watch.view(None, ()).state is Seen.READY)
    watch.close()
    fake.close()


def until(true: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 30
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True

"""Separate parts of the keeper: sequence, transitions, health checks, processes, the wire."""

from __future__ import annotations

import errno
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_launchers.keeper import health, processes, wire
from vllm_launchers.keeper.context import StopTimeouts, Tuning
from vllm_launchers.keeper.errors import SilentError
from vllm_launchers.keeper.lifecycle import (
    TRANSITIONS,
    ConsoleRequest,
    HealthChecked,
    HelperFailed,
    Transition,
    exit_of,
    next_state,
)
from vllm_launchers.keeper.loop import Keeper
from vllm_launchers.keeper.process_group import ProcessGroup
from vllm_launchers.keeper.records import RestartMode, RestartPolicy, State
from vllm_launchers.keeper.retry import retry_delay
from vllm_launchers.keeper.spawn import TERMINATE_SECONDS, Sidecar
from vllm_launchers.keeper.stop_sequence import StopSequence
from vllm_launchers.keeper.supervisor import Supervisor
from vllm_launchers.listeners import Owner, WrongProcessError
from vllm_launchers.values import replace

TIMEOUTS = StopTimeouts(interrupt=10, terminate=8, rest=5, kill=3)


def signals_at(sequence, times):
    return [(sequence.current(now).number.name, sequence.current(now).whole_group) for now in times]


def test_starting_server_gets_two_sigints_then_sigterm_then_sigkill():
    sequence = StopSequence.starting(100.0, TIMEOUTS)
    steps = []
    for now in (100, 109.9, 110, 119.9):
        sequence.current(now)
        steps.append(sequence.index)
    assert steps == [0, 0, 1, 1]
    assert signals_at(sequence, [110, 119.9, 120, 124.9, 125, 500]) == [
        ("SIGINT", False),
        ("SIGINT", False),
        ("SIGTERM", True),
        ("SIGTERM", True),
        ("SIGKILL", True),
        ("SIGKILL", True),
    ]
    assert sequence.stuck(500)


def test_serving_server_gets_its_drain_time():
    sequence = StopSequence.serving(0.0, TIMEOUTS, drain_seconds=60)
    assert signals_at(sequence, [0, 67.9, 68]) == [("SIGTERM", False), ("SIGTERM", False), ("SIGTERM", True)]


def test_remaining_processes_are_signaled_when_the_server_ends():
    sequence = StopSequence.serving(0.0, TIMEOUTS, drain_seconds=60)
    sequence.server_ended(2.0)
    assert signals_at(sequence, [2, 6.9, 7]) == [("SIGTERM", True), ("SIGTERM", True), ("SIGKILL", True)]
    assert not sequence.stuck(9.9)
    assert sequence.stuck(10)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=50), st.booleans())
def test_stop_sequence_never_goes_back_and_ends_in_sigkill(steps, serving):
    sequence = StopSequence.serving(0.0, TIMEOUTS, 0.0) if serving else StopSequence.starting(0.0, TIMEOUTS)
    order, now, before = ["SIGINT", "SIGTERM", "SIGKILL"], 0.0, -1
    for step in steps:
        now += step
        at = order.index(sequence.current(now).number.name)
        assert at >= before
        before = at
    for later in (20, 40, 60):
        sequence.current(now + later)
    assert sequence.current(now + 80).number is signal.SIGKILL


def test_every_state_can_be_left_and_reached():
    sources = frozenset().union(*(allowed for allowed, _ in TRANSITIONS.values()))
    assert sources == set(State)
    assert {target for _, target in TRANSITIONS.values()} == set(State)
    assert set(TRANSITIONS) == set(Transition)
    with pytest.raises(ValueError, match="stopped"):
        next_state(Transition.ANSWERED, State.STOPPED)


@pytest.mark.parametrize(
    ("status", "requested", "killed", "code", "name", "reason"),
    [
        (0, False, False, 0, None, "exited with code 0"),
        (2 << 8, False, False, 2, None, "exited with code 2"),
        (9, False, False, None, "SIGKILL", "killed by signal SIGKILL (9), not by this console"),
        (0, True, False, 0, None, "stopped as requested, exit code 0"),
        (9, True, True, None, "SIGKILL", "stopped as requested, SIGKILL (9); it had to be killed"),
    ],
)
def test_exit_reason_is_formatted(status, requested, killed, code, name, reason):
    ended = exit_of(status, requested, killed, at=5.0)
    assert (ended.code, ended.signal, ended.requested, ended.reason) == (code, name, requested, reason)


def test_exit_of_a_process_that_its_keeper_killed_says_why():
    ended = exit_of(9, requested=False, killed=False, at=5.0, overdue="it did not take over within 10s")
    assert ended.reason == "killed by signal SIGKILL (9), by its keeper: it did not take over within 10s"


def test_backoff_doubles_up_to_its_cap_and_ends():
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=6, backoff_seconds=2, backoff_cap_seconds=20)
    assert [retry_delay(policy, attempt) for attempt in range(7)] == [2, 4, 8, 16, 20, 20, None]
    assert retry_delay(replace(policy, mode=RestartMode.NEVER), 0) is None


def itself() -> Owner:
    """This process acts as a server here."""
    return Owner.of(os.getpid())


def serve_once(answer, delay=0.0):
    listener = socket.create_server(("127.0.0.1", 0))

    def run():
        connection, _ = listener.accept()
        with connection, listener:
            connection.recv(1000)
            for part in answer:
                try:
                    connection.sendall(part)
                except OSError:
                    return
                time.sleep(delay)

    threading.Thread(target=run, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize(
    ("answer", "delay", "expected"),
    [
        ([b"HTTP/1.1 200 OK\r\n\r\n"], 0, ""),
        ([b"HTTP/1.", b"1 200 OK\r\n\r\n"], 0.05, ""),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n"], 0, "HTTP 503"),
        ([b"SSH-2.0-OpenSSH_9.6\r\n"], 0, "not an HTTP response"),
        ([], 0, "connection closed without a response"),
        ([b"H"] * 100, 0.05, "no response within 0.3s"),
    ],
)
def test_probe_reports_what_went_wrong(answer, delay, expected, monkeypatch):
    monkeypatch.setattr(health, "DEADLINE_SECONDS", 0.3 if len(answer) > 2 else 5.0)
    port = serve_once(answer, delay)
    assert health.check(itself(), "0.0.0.0", port) == expected


def test_connecting_counts_against_the_probes_deadline(monkeypatch):
    monkeypatch.setattr(health, "DEADLINE_SECONDS", 0.3)
    waits = []

    def connect(_port, timeout):
        waits.append(timeout)
        raise TimeoutError

    assert health.check(SimpleNamespace(connect=connect), "127.0.0.1", 1) == "no response within 0.3s"
    assert len(waits) == 1
    assert 0 < waits[0] <= 0.3


def test_probe_of_a_closed_port(port):
    assert health.check(itself(), "127.0.0.1", port) == "connection refused"


def test_foreign_process_on_the_port_is_sent_nothing(wait_until):
    server = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        with socket.create_server(("127.0.0.1", 0)) as foreign, pytest.raises(WrongProcessError):
            health.check(Owner.of(server.pid), "localhost", foreign.getsockname()[1])
    finally:
        server.kill()
        server.wait()


def test_process_identity_is_more_than_its_pid(wait_until):
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    try:
        there = processes.identity(child.pid)
        assert processes.alive(there)
        assert processes.stat(child.pid).parent == os.getpid()
        assert child.pid in processes.descendants(processes.table(), [os.getpid()])
        assert processes.owner(child.pid) == os.getuid()
        for lie in (replace(there, start_time=there.start_time + 1), replace(there, boot_id="another")):
            assert not processes.alive(lie)
            assert not processes.send(lie, signal.SIGKILL)
        assert child.poll() is None
        assert processes.send(there, signal.SIGKILL)
        wait_until(lambda: not processes.alive(there))
        assert processes.stat(child.pid).state == "Z", "a zombie exists, but is not alive"
    finally:
        child.kill()
        child.wait()
    assert processes.identity(child.pid) is None
    assert not processes.send(there, signal.SIGKILL)


MAIN_THREAD_ENDS = """
import ctypes, threading
threading.Thread(target=threading.Event().wait).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_process_lives_until_its_last_thread_has_ended(tmp_path, wait_until):
    child = subprocess.Popen([sys.executable, "-S", "-c", MAIN_THREAD_ENDS])
    try:
        there = processes.identity(child.pid)
        wait_until(lambda: processes.stat(child.pid).state == "Z")
        assert processes.stat(child.pid).threads == 2
        assert child.poll() is None
        assert processes.alive(there)
        group = ProcessGroup(tmp_path / "server.output", there, os.getpid())
        assert there in group.refresh()
        inherited = ProcessGroup(tmp_path / "server.output", there, known=[there])
        assert there in inherited.refresh()
        assert not inherited.foreign
        assert processes.send(there, signal.SIGKILL)
        wait_until(lambda: not processes.alive(there))
        assert processes.stat(child.pid).threads == 1, "a complete zombie"
        assert there not in group.refresh()
    finally:
        child.kill()
        child.wait()


def test_sidecar_that_survives_sigkill_delays_a_stop_only_briefly(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(processes, "send", lambda process, number: sent.append(number))
    me = processes.identity(os.getpid())
    sidecar = Sidecar(tmp_path, lambda process: None, lambda text: None)
    sidecar.adopt(me, None)
    for now in (0.0, TERMINATE_SECONDS):
        sidecar.tick(now)
        assert not sidecar.gone
    sidecar.tick(2 * TERMINATE_SECONDS)
    assert sidecar.gone
    assert sent == [signal.SIGTERM, signal.SIGKILL, signal.SIGKILL]
    assert sidecar.process == me, "it is still no process of the server"


def test_unverifiable_process_leaks_no_descriptor(monkeypatch):
    def no_descriptors(_):
        raise OSError(errno.EMFILE, "no descriptors left")

    opened, closed, pidfd_open, close = [], [], os.pidfd_open, os.close
    me = processes.identity(os.getpid())
    monkeypatch.setattr(processes, "alive", no_descriptors)
    monkeypatch.setattr(os, "pidfd_open", lambda pid: opened.append(pidfd_open(pid)) or opened[-1])
    monkeypatch.setattr(os, "close", lambda fd: closed.append(fd) or close(fd))
    with pytest.raises(OSError, match="no descriptors left"):
        processes.open_pidfd(me)
    assert opened
    assert set(opened) <= set(closed)


def test_process_name_with_parentheses_is_parsed(tmp_path, wait_until):
    odd = tmp_path / "a) R (1 2"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "600"])
    try:
        found = wait_until(lambda: processes.stat(child.pid))
        assert found.parent == os.getpid()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("call", ["fork", "pipe"])
def test_failed_fork_leaks_no_descriptor(call):
    """It is retried repeatedly, and each failure would leak four descriptors.

    Runs in a separate process, since other threads of this process open and close descriptors too.
    """
    script = """
import errno, os, sys
from vllm_launchers.keeper import spawn
call = sys.argv[1]
real, calls = getattr(os, call), []
def refused():
    calls.append(call)
    if call == "pipe" and len(calls) % 2:
        return real()
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
command = spawn.ProcessCommand((sys.executable, "-c", "pass"), {}, "/", 1)
before = os.listdir("/proc/self/fd")
setattr(os, call, refused)
for _ in range(3):
    try:
        spawn.start(command, lambda child: None)
    except BlockingIOError:
        continue
    raise SystemExit("it was started")
assert calls
assert os.listdir("/proc/self/fd") == before, os.listdir("/proc/self/fd")
"""
    done = subprocess.run([sys.executable, "-c", script, call], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class NoDescriptors:
    """A listening socket whose process is out of descriptors for some calls."""

    def __init__(self, real, times):
        self.real, self.left = real, times

    def accept(self):
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self.real.accept()

    def __getattr__(self, name):
        return getattr(self.real, name)


def test_failing_accept_is_reported_once_and_retried(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "REST_SECONDS", 0.01)
    posted = []

    def post(event):
        posted.append(event)
        if isinstance(event, ConsoleRequest):
            event.reply({"heard": True})

    listener = wire.RequestListener(tmp_path, post)
    short = listener._socket = NoDescriptors(listener._socket, 5)
    listener.start()
    try:
        assert wire.ask(tmp_path, {"do": "read"}, 10.0) == {"heard": True}
        assert short.left == 0
        assert [type(event) for event in posted] == [HelperFailed, ConsoleRequest]
        assert "Too many open files" in posted[0].what
    finally:
        listener.close()
    listener.join(5)
    assert not listener.is_alive()
    assert len(posted) == 2, "its end is not an error"


def test_abandoned_request_is_not_executed(tmp_path):
    posted, stopped = queue.SimpleQueue(), []
    listener = wire.RequestListener(tmp_path, posted.put)
    listener.start()
    try:
        with pytest.raises(SilentError):
            wire.ask(tmp_path, {"do": "stop"}, 0.1)
        event = posted.get(timeout=60)
        assert event.abandoned.wait(60)
    finally:
        listener.close()
    listener.join(10)
    server = SimpleNamespace(stop=lambda: stopped.append(1))
    Keeper._asked(SimpleNamespace(supervisor=server), event)
    assert stopped == []


def test_wire_works_with_a_path_longer_than_a_socket_name(tmp_path):
    folder = tmp_path / ("long" * 30) / ("longer" * 20)
    folder.mkdir(parents=True)
    with pytest.raises(wire.UnreachableError):
        wire.ask(folder, {"do": "stop"})

    def post(event):
        assert isinstance(event, ConsoleRequest)
        event.reply({"heard": event.request})

    listener = wire.RequestListener(folder, post)
    listener.start()
    assert (folder / "keeper.sock").stat().st_mode & 0o777 == 0o600
    assert wire.ask(folder, {"do": "x" * 100_000}) == {"heard": {"do": "x" * 100_000}}
    with wire._address(folder) as address, socket.socket(socket.AF_UNIX) as rude:
        rude.connect(address)
        rude.sendall(b"no json\n")
        assert rude.recv(100) == b""
    assert wire.ask(folder, {"do": "again"}) == {"heard": {"do": "again"}}
    listener.close()
    listener.join(5)
    assert not listener.is_alive()
    with pytest.raises(wire.UnreachableError):
        wire.ask(folder, {"do": "stop"})


def test_foreign_process_warning_ends_when_the_server_answers():
    reasons, record = [], SimpleNamespace(state=State.READY, adopted=False, reason="")
    record.current = SimpleNamespace(spec=SimpleNamespace(port=8000))

    def change(reason):
        record.reason = reason
        reasons.append(reason)

    keeper = SimpleNamespace(
        _epoch=1, _ended=None, _stop=None, _warm_up=None, _health=health.Health(Tuning()), record=record,
        note=lambda text: None, record_writer=SimpleNamespace(change=change),
    )  # fmt: skip
    for event in (
        HealthChecked(1, healthy=True),
        HealthChecked(1, healthy=False, detail="pid 7 answers at port 8000", foreign=True),
        HealthChecked(1, healthy=True),
        HealthChecked(1, healthy=True),
    ):
        Supervisor.health_checked(keeper, event)
    assert reasons == ["pid 7 answers at port 8000", ""]


def test_failed_health_checks_while_asleep_do_not_count_after_waking():
    silent, judged = HealthChecked(1, healthy=False, detail="no answer"), health.Health(Tuning(failed_health_checks=3))
    found = [judged.transition(silent, state, 8000) for state in [*[State.ASLEEP] * 5, *[State.READY] * 3]]
    assert found == [None] * 7 + [Transition.UNANSWERED]

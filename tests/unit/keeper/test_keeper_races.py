"""Late events, as received by the single owner of the state."""

from __future__ import annotations

import errno
import os
import select
import signal
import time

import psutil
import pytest

from vllm_launchers.keeper import folders, processes
from vllm_launchers.keeper.context import KeeperContext, Tuning
from vllm_launchers.keeper.lifecycle import HealthChecked
from vllm_launchers.keeper.log_forwarder import Redaction, RotatingLog
from vllm_launchers.keeper.records import (
    Generation,
    ProcessIdentity,
    RestartMode,
    RestartPolicy,
    ServerRecord,
    State,
)
from vllm_launchers.keeper.supervisor import Supervisor
from vllm_launchers.values import replace


class QuietForwarder:
    """Replaces the log's thread."""

    def __init__(self, folder):
        self.log = RotatingLog(folder / "server.log", 1 << 20, 2)
        self.redaction = Redaction()
        self.reads_in_time = True
        self.waits = 0

    def begin_anew(self, seconds):
        self.waits += 1
        return self.reads_in_time


@pytest.fixture
def own_children(monkeypatch):
    """The children that the test process has already are not the keeper's, which would end them with its server."""
    before, present = [child.pid for child in psutil.Process().children()], Supervisor._other_children
    monkeypatch.setattr(Supervisor, "_other_children", lambda it: [*before, *present(it)])


@pytest.fixture
def server(bench, tmp_path, own_children):
    """A started server without helper threads: the test posts their events."""
    record = ServerRecord("one", State.STARTING, 1.0, 1.0, (Generation(1, bench.spec("--never-ready"), 1.0),))
    context = KeeperContext(tmp_path, dict(os.environ), 0o022, Tuning())
    it = Supervisor(context, record, {}, QuietForwarder(tmp_path), lambda event: None)
    it.start()
    process = it.record.server
    try:
        yield it
    finally:
        if processes.alive(process):
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


def test_start_whose_record_does_not_fit_on_the_disk_is_retried(bench, tmp_path, monkeypatch):
    def write(folder, record):
        if record.server is not None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "write_record", write)
    spec = bench.spec(restart=RestartPolicy(RestartMode.ON_FAILURE))
    record = ServerRecord("one", State.STARTING, 1.0, 1.0, (Generation(1, spec, 1.0),))
    context = KeeperContext(tmp_path, dict(os.environ), 0o022, Tuning())
    it = Supervisor(context, record, {}, QuietForwarder(tmp_path), lambda event: None)
    it.start()
    assert "No space left on device" in it.record.reason
    assert it.record.next_attempt_at is not None
    assert not it.over


def test_answer_for_an_earlier_process_is_ignored(server):
    server.health_checked(HealthChecked(epoch=0, healthy=True))
    assert server.record.state is State.STARTING
    server.health_checked(HealthChecked(epoch=1, healthy=True))
    assert server.record.state is State.READY


def test_silence_before_the_first_answer_is_not_a_failure(server):
    for _ in range(10):
        server.health_checked(HealthChecked(epoch=1, healthy=False, detail="connection refused"))
    assert server.record.state is State.STARTING


def test_only_consecutive_silence_counts(server):
    healthy, silent = HealthChecked(epoch=1, healthy=True), HealthChecked(epoch=1, healthy=False, detail="no answer")
    for event in (healthy, silent, silent, healthy, silent, silent):
        server.health_checked(event)
    assert server.record.state is State.READY
    server.health_checked(silent)
    assert server.record.state is State.UNRESPONSIVE
    assert "no answer (3 times in a row)" in server.record.reason


def test_answer_during_a_stop_changes_nothing(server):
    server.health_checked(HealthChecked(epoch=1, healthy=True))
    server.stop()
    server.health_checked(HealthChecked(epoch=1, healthy=True))
    server.health_checked(HealthChecked(epoch=1, healthy=False))
    assert server.record.state is State.STOPPING
    assert server.record.reason == "stopping as requested"


@pytest.mark.parametrize(("stopped", "state"), [(False, State.FAILED), (True, State.STOPPED)])
def test_end_that_an_error_kept_from_being_recorded_is_recorded_later(server, monkeypatch, stopped, state):
    def shortage(*_args, **_more):
        raise OSError(errno.ENFILE, "Too many open files in system")

    if stopped:
        server.stop()
    process = server.record.server
    child = os.pidfd_open(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    select.select([child], [], [], 60)
    os.close(child)
    with monkeypatch.context() as patched:
        patched.setattr(server, "_leave_nodes", shortage)
        with pytest.raises(OSError, match="Too many open files"):
            server.reap()
    deadline = time.monotonic() + 60
    while not server.over:
        assert time.monotonic() < deadline
        server.tick(time.monotonic())
    assert server.record.state is state
    assert server.record.current.exit.requested is stopped
    assert "its keeper failed to record its end" in server.record.reason


def until_over(server):
    """Run the server's events until it has ended."""
    until(server, lambda: server.over)


def until(server, condition):
    """Run the events of the server's present process until a condition holds."""
    ended = time.monotonic() + 60
    child = os.pidfd_open(server.record.server.pid)
    while not condition():
        assert time.monotonic() < ended
        select.select([child], [], [], server.due())
        server.reap()
        server.tick(time.monotonic())
    os.close(child)


def test_log_that_takes_too_long_to_read_is_reported(server):
    server._forwarder.reads_in_time = False
    server.stop()
    until_over(server)
    assert server.record.reason.endswith(
        "; reading the rest of its log took more than 30s; those lines may appear in the next run's section"
    )


def test_restart_waits_only_once_for_a_log_that_takes_long_to_read(server):
    server._forwarder.reads_in_time = False
    waits, spec = server._forwarder.waits, server.record.current.spec
    server.restart(spec)
    until(server, lambda: server.record.current.number == 2 and server.record.server is not None)
    assert server._forwarder.waits == waits + 1
    server.stop()
    until_over(server)


def test_server_is_stoppable_after_a_restart_that_could_not_be_recorded(server):
    """With a fault in the keeper's own code: it was never stopping, so nothing would ever have ended that state."""
    server.health_checked(HealthChecked(epoch=1, healthy=True))
    before = server.record
    with pytest.raises(TypeError, match="not JSON serializable"):
        server.restart(replace(before.current.spec, details={"x": object()}))
    assert server.record == before
    server.stop()
    until_over(server)
    assert server.record.state is State.STOPPED


class Unkillable:
    """Replaces a process group by a process that the kernel holds."""

    proven, left = False, (ProcessIdentity(1 << 30, 1, "another boot"),)

    def refresh(self, apart):
        return list(self.left)


def test_process_that_survives_sigkill_is_polled_less_often(server):
    """It may last for days, and each poll reads all of /proc."""
    server._group = held = Unkillable()
    server.stop()
    now, pauses = time.monotonic(), []
    while "survives SIGKILL" not in server.record.reason:
        assert len(pauses) < 10
        now += 100
        server.tick(now)
        pauses.append(server.due())
    assert server.record.reason.startswith("stopping as requested; survives SIGKILL (pid 1073741824): ")
    assert pauses[-1] == 2.0
    assert set(pauses[:-1]) == {0.1}
    held.left = ()
    server.tick(now)
    assert server.due() == 0.1, "at once again as soon as it moves"


def test_death_reported_twice_counts_once(server):
    child = os.pidfd_open(server.record.server.pid)
    os.kill(server.record.server.pid, signal.SIGKILL)
    assert select.select([child], [], [], 60)[0]
    os.close(child)
    server.reap()
    assert server.record.exit is not None
    first = server.record
    server.reap()
    server.adopted_ended(1)
    assert server.record == first
    assert first.state is State.STOPPING
    assert first.exit.signal == "SIGKILL"


class Overdue:
    """Replaces a prepared process that was asked to become the server long ago."""

    launched, why_not, went_at = True, "", 0.0

    def __init__(self, process, last):
        self.process, self._last = process, last

    def overdue(self, now):
        return True

    def end(self):
        processes.send(self.process, signal.SIGKILL)

    def last_message(self):
        return self._last

    def output(self):
        return b""

    def close(self):
        pass


@pytest.mark.parametrize("last", [{}, {"step": "started"}], ids=["silent", "took over just then"])
def test_exit_of_a_process_that_did_not_take_over_says_who_killed_it(server, last):
    process = server.record.server
    server._preparation._process = Overdue(process, last)
    child = os.pidfd_open(process.pid)
    server.tick(time.monotonic())
    assert select.select([child], [], [], 60)[0]
    os.close(child)
    server.reap()
    assert server.record.exit.reason == "killed by signal SIGKILL (9), by its keeper: it did not take over within 10s"

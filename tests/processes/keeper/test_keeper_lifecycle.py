"""A server's lifecycle under a real keeper: starting, ready, unresponsive, stopped, restarted, failed."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_launchers.keeper import client, errors, processes, wire
from vllm_launchers.keeper.records import (
    Generation,
    NotRetryable,
    Recording,
    RestartMode,
    RestartPolicy,
    State,
)
from vllm_launchers.values import replace


def test_start_serve_and_stop(bench, session_of, wait_until):
    launched = bench.launch(bench.spec("--children", "2"))
    assert launched.state is State.STARTING
    assert launched.server is not None
    assert processes.alive(launched.server)
    assert os.getsid(launched.server.pid) == launched.server.pid != os.getsid(launched.keeper.pid)

    ready = bench.wait(State.READY)
    assert ready.current.ready_at >= ready.current.started_at
    assert ready.exit is None
    assert bench.stop().state is State.STOPPING

    stopped = bench.wait(State.STOPPED)
    assert (stopped.exit.code, stopped.exit.signal, stopped.exit.requested) == (0, None, True)
    assert stopped.server is None
    assert not session_of(launched.server.pid)
    assert "got SIGTERM" in bench.log()
    wait_until(lambda: not client.keeper_alive(bench.root, "one"))
    assert not processes.alive(launched.keeper)


def test_resumed_recording_keeps_times_until_next_start(bench):
    spec = bench.spec()
    earlier = Generation(1, spec, 1000.0, 1001.0, 1100.0)
    bench.launch(spec, recording=Recording((earlier,), 1101.0, 1105.0, 0))
    ready = bench.until(lambda record: record.state is State.READY and record.state_since == 1105.0)
    assert ready.generations[0] == earlier
    assert (ready.current.number, ready.current.started_at, ready.current.ready_at) == (2, 1101.0, 1105.0)
    assert ready.created_at == 1000.0
    bench.restart(spec)
    again = bench.until(lambda record: record.current.number == 3 and record.state is State.READY)
    assert again.current.ready_at > again.current.started_at > 1_000_000_000
    bench.stopped()


def test_starting_server_gets_sigint_instead_of_sigterm(bench):
    bench.launch(bench.spec("--never-ready", "--tick", "0.05"))
    bench.until(lambda _: "tick" in bench.log())
    assert bench.stopped().exit.requested
    assert "got SIGINT" in bench.log()
    assert "got SIGTERM" not in bench.log()


@pytest.mark.parametrize("phase", ["starting", "ready"])
def test_server_ignoring_signals_is_killed(bench, session_of, phase):
    options = ["--ignore", "INT,TERM", "--children", "2", "--children-ignore-term", "--tick", "0.05"]
    record = bench.launch(bench.spec(*options, *(["--never-ready"] if phase == "starting" else [])))
    bench.until(lambda _: bench.log().count("child up") == 2 and "tick" in bench.log())
    if phase == "ready":
        bench.wait(State.READY)
    stopped = bench.stopped()
    assert stopped.exit.signal == "SIGKILL"
    assert "had to be killed" in stopped.exit.reason
    assert bench.file("keeper.log").read_text().count("sent SIGINT") == (2 if phase == "starting" else 0)
    assert not session_of(record.server.pid)


def test_sigstopped_process_is_continued_to_exit_cleanly(bench, session_of):
    record = bench.ready(bench.spec("--children", "1"))
    for member in session_of(record.server.pid):
        os.kill(member.pid, signal.SIGSTOP)
    assert bench.stopped().exit.code == 0
    assert not session_of(record.server.pid)


@pytest.mark.parametrize("phase", ["starting", "ready"])
@pytest.mark.parametrize("own_session", [False, True])
def test_killed_server_leaves_no_processes(bench, phase, own_session):
    options = ["--children", "2", "--children-ignore-term", *(["--children-own-session"] if own_session else [])]
    record = bench.launch(bench.spec(*options, *(["--never-ready"] if phase == "starting" else [])))
    if phase == "ready":
        bench.wait(State.READY)
    bench.until(lambda _: bench.log().count("child up") == 2)
    table = processes.table()
    children = [processes.identity_of(table[pid]) for pid in processes.descendants(table, [record.server.pid])]
    assert len(children) == 2

    os.kill(record.server.pid, signal.SIGKILL)
    failed = bench.wait(State.FAILED)
    assert failed.exit.signal == "SIGKILL"
    assert failed.exit.code is None
    assert not failed.exit.requested
    assert failed.reason == "killed by signal SIGKILL (9), not by this console"
    assert not any(processes.alive(child) for child in children)


@pytest.mark.parametrize("code", [0, 2])
def test_unrequested_exit_is_a_failure_for_any_exit_code(bench, code):
    bench.launch(bench.spec("--never-ready", "--exit-after", "0.1", "--exit-code", str(code)))
    failed = bench.wait(State.FAILED)
    assert failed.exit.code == code
    assert failed.reason == f"exited with code {code}"
    assert bench.log().endswith("fatal: made to fail\n")


def test_unusable_executable_is_reported(bench, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    cases = {
        "gone": (str(tmp_path / "none"), "no such file"),
        "plain": (str(plain), "it is not executable"),
        "nowhere": ("no-such-command-anywhere", "no executable named no-such-command-anywhere on PATH"),
    }
    for name, (executable, expected) in cases.items():
        record = bench.launch(bench.spec(argv=(executable, "serve")), name)
        assert record.state is State.FAILED
        assert expected in record.reason
        assert record.server is None
    record = bench.launch(bench.spec(cwd=str(tmp_path / "none")), "homeless")
    assert "working folder" in record.reason


def test_unresponsive_server_is_detected_and_recovers(bench, tmp_path):
    quiet = tmp_path / "quiet"
    bench.ready(bench.spec("--quiet-file", str(quiet)))
    quiet.touch()
    silent = bench.wait(State.UNRESPONSIVE)
    assert "HTTP 503 (3 times in a row)" in silent.reason
    quiet.unlink()
    assert bench.wait(State.READY).reason == ""


def test_foreign_process_on_port_is_not_taken_for_server(bench, port):
    bench.ready(bench.spec(port=port), "first")
    bench.launch(bench.spec("--never-ready", port=port), "second")
    record = bench.until(lambda record: "another process answers" in record.reason, "second")
    assert record.state is State.STARTING
    bench.stopped("first")
    assert bench.read("second").state is State.STARTING


def test_restart_keeps_name_and_folder_and_increments_generation(bench, session_of):
    first = bench.ready(bench.spec("--children", "1", "--tick", "0.05", details={"max-num-seqs": 256}))
    second = bench.spec("--children", "1", details={"max-num-seqs": 128})
    assert bench.restart(second).state is State.STOPPING
    record = bench.wait(State.READY, generation=2)
    assert record.server != first.server
    assert record.keeper == first.keeper
    assert not session_of(first.server.pid)
    assert [generation.spec.details["max-num-seqs"] for generation in record.generations] == [256, 128]
    assert record.generations[0].exit.requested
    assert record.downtime_seconds > 0
    log = bench.file("server.log")
    assert record.log_inode == log.stat().st_ino
    assert log.read_bytes()[record.log_offset :] in (b"", b"child up\n")


def test_stopped_server_restarts_as_next_generation(bench):
    spec = bench.spec()
    bench.ready(spec)
    bench.stopped()
    assert bench.restart(spec).current.number == 2
    assert bench.wait(State.READY).generations[0].exit.requested


def test_generation_count_is_bounded(bench):
    missing = bench.spec(argv=("/no/such/engine",))
    bench.launch(missing)
    for _ in range(21):
        record = bench.restart(missing)
    assert [generation.number for generation in record.generations] == list(range(3, 23))


def test_stop_overrides_running_restart(bench):
    spec = bench.spec("--ignore", "TERM")
    bench.ready(spec)
    bench.restart(spec)
    bench.stop()
    stopped = bench.wait(State.STOPPED)
    assert stopped.current.number == 1


def test_stopping_an_ended_server_changes_nothing(bench):
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "3"))
    failed = bench.wait(State.FAILED)
    assert bench.stop() == failed


def test_failures_are_retried_up_to_limit(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=2, backoff_seconds=0.05, backoff_cap_seconds=0.1)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "7", restart=policy))
    failed = bench.until(lambda record: record.state is State.FAILED and record.next_attempt_at is None)
    assert failed.attempt == 2
    assert failed.current.number == 1
    assert "gave up after 2 automatic restarts" in failed.reason
    assert bench.log().count("made to fail") == 3


def replaced(tmp_path):
    """A program that is temporarily missing, as during a reinstallation."""
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    return program


def test_temporarily_missing_program_is_retried(bench, tmp_path):
    program, marker = replaced(tmp_path), tmp_path / "marker"
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=4, backoff_seconds=0.4)
    spec = bench.spec("--fail-once", str(marker), restart=policy)
    marker.touch()
    ready = bench.ready(replace(spec, argv=(str(program), *spec.argv[1:])))
    program.unlink()
    processes.send(ready.server, signal.SIGKILL)
    waiting = bench.until(lambda record: "could not be started" in record.reason and record.next_attempt_at)
    assert waiting.state is State.FAILED
    assert waiting.attempt == 1
    assert "no such file" in waiting.exit.reason
    program.symlink_to(sys.executable)
    again = bench.wait(State.READY)
    assert 2 <= again.attempt <= 4
    bench.stopped()


def test_missing_program_fails_at_retry_limit(bench, tmp_path):
    program = replaced(tmp_path)
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=3, backoff_seconds=0.05)
    spec = bench.spec(restart=policy)
    ready = bench.ready(replace(spec, argv=(str(program), *spec.argv[1:])))
    program.unlink()
    processes.send(ready.server, signal.SIGKILL)
    failed = bench.until(lambda record: record.state is State.FAILED and not record.needs_keeper)
    assert failed.attempt == 3
    assert "gave up after 3 automatic restarts" in failed.reason


def test_restart_with_missing_program_is_retried(bench, tmp_path):
    program = replaced(tmp_path)
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=5, backoff_seconds=0.3)
    spec = bench.spec(restart=policy)
    spec = replace(spec, argv=(str(program), *spec.argv[1:]))
    bench.ready(spec)
    program.unlink()
    bench.restart(spec)
    bench.until(lambda record: record.current.number == 2 and record.next_attempt_at)
    program.symlink_to(sys.executable)
    bench.wait(State.READY, generation=2)
    bench.stopped()


def test_waits_for_free_file_descriptors(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=6, backoff_seconds=0.2)
    ready = bench.ready(bench.spec(restart=policy))
    limits = resource.prlimit(ready.keeper.pid, resource.RLIMIT_NOFILE)
    used = len(list(Path(f"/proc/{ready.keeper.pid}/fd").iterdir()))
    resource.prlimit(ready.keeper.pid, resource.RLIMIT_NOFILE, (used + 2, limits[1]))
    processes.send(ready.server, signal.SIGKILL)
    waiting = bench.until(lambda record: "could not be started" in record.reason and record.next_attempt_at)
    assert "Too many open files" in waiting.reason
    resource.prlimit(ready.keeper.pid, resource.RLIMIT_NOFILE, limits)
    bench.wait(State.READY)
    bench.stopped()


def test_permanent_failures_are_not_retried(bench):
    not_retryable = (NotRetryable("(", "no expression"), NotRetryable(r"^FATAL: made to \w+$", "it was made to fail"))
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05, not_retryable=not_retryable)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "7", restart=policy))
    failed = bench.wait(State.FAILED)
    assert (failed.attempt, failed.next_attempt_at) == (0, None)
    assert failed.reason.endswith("not restarted, because it would fail the same way: it was made to fail")
    assert "'(' is not a regular expression" in bench.file("keeper.log").read_text()


def test_usage_error_is_not_retried(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "2", restart=policy))
    failed = bench.wait(State.FAILED)
    assert (failed.attempt, failed.next_attempt_at) == (0, None)
    assert "exit code 2 means that it rejects its command line" in failed.reason


def test_previously_ready_server_is_restarted_regardless_of_log(bench):
    not_retryable = (NotRetryable("child up", "a line that was there when it was well, too"),)
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05, not_retryable=not_retryable)
    ready = bench.ready(bench.spec("--children", "1", restart=policy))
    bench.until(lambda _: "child up" in bench.log())
    os.kill(ready.server.pid, signal.SIGKILL)
    assert bench.until(lambda record: record.state is State.READY and record.attempt == 1)
    bench.restart(bench.spec())
    past = bench.wait(State.READY, generation=2).generations[0]
    assert past.spec.restart.not_retryable == (), "no longer needed, and large"


def test_attempts_reset_after_long_ready_time(bench, tmp_path):
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=2, backoff_seconds=0.05)
    spec = bench.spec("--fail-once", str(tmp_path / "failed"), restart=policy)
    bench.launch(spec, steady=0.5)
    ready = bench.until(lambda record: record.state is State.READY and record.attempt)
    assert ready.attempt == 1
    assert bench.until(lambda record: record.attempt == 0).state is State.READY


def test_stop_cancels_waiting_restart(bench, wait_until):
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=600, backoff_cap_seconds=600)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", restart=policy))
    waiting = bench.until(lambda record: record.next_attempt_at)
    assert waiting.state is State.FAILED
    assert bench.stop().state is State.STOPPED
    assert bench.read().next_attempt_at is None
    wait_until(lambda: not client.keeper_alive(bench.root, "one"))


def test_restart_during_backoff_begins_immediately(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=600, backoff_cap_seconds=600)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", restart=policy))
    bench.until(lambda record: record.next_attempt_at)
    bench.restart(bench.spec())
    assert bench.wait(State.READY).current.number == 2


def test_concurrent_launches_with_one_name_start_one_server(bench):
    def attempt(_):
        try:
            return bench.launch(bench.spec("--never-ready"))
        except errors.NameTakenError:
            return None

    with ThreadPoolExecutor(4) as pool:
        records = [record for record in pool.map(attempt, range(4)) if record]
    assert len(records) == 1
    assert bench.read().server == records[0].server


def test_server_survives_sighup_of_launching_session(bench, wait_until):
    script = (
        "import sys, json, signal; from pathlib import Path\n"
        "from vllm_launchers.keeper import client, wire; from vllm_launchers.keeper.records import LaunchSpec\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "client.launch(Path(sys.argv[1]), 'one', wire.from_plain(LaunchSpec, json.loads(sys.argv[2])))\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    console = subprocess.Popen(
        [sys.executable, "-c", script, str(bench.root), json.dumps(wire.to_plain(bench.spec()))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert console.stdout.readline() == b"up\n"
    os.killpg(console.pid, signal.SIGHUP)
    assert console.wait(60) == -signal.SIGHUP
    console.stdin.close()
    console.stdout.close()
    record = bench.wait(State.READY)
    os.kill(record.keeper.pid, signal.SIGHUP)
    os.kill(record.keeper.pid, signal.SIGINT)
    bench.restart(bench.spec())
    assert bench.wait(State.READY, generation=2).keeper == record.keeper


def test_ended_server_can_be_removed_and_its_name_reused(bench):
    spec = bench.spec()
    bench.ready(spec)
    with pytest.raises(errors.StillAliveError):
        client.remove(bench.root, "one")
    with pytest.raises(errors.NameTakenError):
        bench.launch(spec)
    bench.stopped()
    bench.until(lambda _: not client.keeper_alive(bench.root, "one"))
    client.remove(bench.root, "one")
    assert not client.exists(bench.root, "one")
    with pytest.raises(errors.NoSuchServerError):
        client.stop(bench.root, "one")
    assert bench.launch(spec).current.number == 1


def test_environment_is_overlaid_and_umask_kept(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("INHERITED", "abc")
    code = "import os; m = os.umask(0); print(os.environ['INHERITED'], os.environ['OURS'], oct(m), os.getcwd())"
    argv = (sys.executable, "-S", "-c", code)
    before = os.umask(0o027)
    try:
        bench.launch(replace(bench.spec(), argv=argv, environment={"OURS": "def"}, cwd=str(tmp_path)))
    finally:
        os.umask(before)
    bench.wait(State.FAILED)
    assert bench.log() == f"abc def 0o27 {tmp_path}\n"


def test_log_flood_is_complete_across_rotated_files(bench):
    lines = 300_000
    bench.launch(bench.spec("--lines", str(lines), "--exit-after", "0", log_bytes=200_000, log_files=100))
    bench.wait(State.FAILED)
    expected = "".join(f"line {number}\n" for number in range(lines)) + "fatal: made to fail\n"
    assert bench.log() == expected
    files = list(bench.file("").glob("server.log*"))
    assert len(files) > 10
    assert all(file.stat().st_size <= 200_000 and file.read_bytes().endswith(b"\n") for file in files)

"""A server's life under a real keeper: started, ready, silent, stopped, restarted, failing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from vllm_launchers.keeper import client, codec, errors, processes
from vllm_launchers.keeper.records import Hopeless, RestartMode, RestartPolicy, State


def test_starts_serves_and_stops_as_asked(bench, session_of, wait_until):
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


def test_while_it_starts_it_is_interrupted_rather_than_terminated(bench):
    bench.launch(bench.spec("--never-ready", "--tick", "0.05"))
    bench.until(lambda _: "tick" in bench.log())
    assert bench.stopped().exit.requested
    assert "got SIGINT" in bench.log()
    assert "got SIGTERM" not in bench.log()


@pytest.mark.parametrize("phase", ["starting", "ready"])
def test_what_ignores_every_request_is_killed_and_nothing_is_left(bench, session_of, phase):
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


def test_a_process_stopped_by_sigstop_is_let_go_on_to_end_well(bench, session_of):
    record = bench.ready(bench.spec("--children", "1"))
    for member in session_of(record.server.pid):
        os.kill(member.pid, signal.SIGSTOP)
    assert bench.stopped().exit.code == 0
    assert not session_of(record.server.pid)


@pytest.mark.parametrize("phase", ["starting", "ready"])
@pytest.mark.parametrize("own_session", [False, True])
def test_a_killed_server_leaves_no_process_behind(bench, phase, own_session):
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
def test_an_end_nobody_asked_for_is_a_failure_whatever_its_code(bench, code):
    bench.launch(bench.spec("--never-ready", "--exit-after", "0.1", "--exit-code", str(code)))
    failed = bench.wait(State.FAILED)
    assert failed.exit.code == code
    assert failed.reason == f"ended by itself with exit code {code}"
    assert bench.log().endswith("fatal: made to fail\n")


def test_an_executable_that_cannot_run_is_said_so(bench, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    cases = {
        "gone": (str(tmp_path / "none"), "there is no such file"),
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


def test_silence_is_seen_and_so_is_its_end(bench, tmp_path):
    quiet = tmp_path / "quiet"
    bench.ready(bench.spec("--quiet-file", str(quiet)))
    quiet.touch()
    silent = bench.wait(State.UNRESPONSIVE)
    assert "answer 503, 3 times in a row" in silent.reason
    quiet.unlink()
    assert bench.wait(State.READY).reason == ""


def test_another_process_that_answers_on_the_port_is_not_taken_for_ours(bench, port):
    bench.ready(bench.spec(port=port), "first")
    bench.launch(bench.spec("--never-ready", port=port), "second")
    record = bench.until(lambda record: "not this server's" in record.reason, "second")
    assert record.state is State.STARTING
    bench.stopped("first")
    assert bench.read("second").state is State.STARTING


def test_restart_keeps_name_and_folder_and_counts_the_generation(bench, session_of):
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


def test_a_stopped_server_starts_again_as_the_next_generation(bench):
    spec = bench.spec()
    bench.ready(spec)
    bench.stopped()
    assert bench.restart(spec).current.number == 2
    assert bench.wait(State.READY).generations[0].exit.requested


def test_generations_are_bounded(bench):
    missing = bench.spec(argv=("/no/such/engine",))
    bench.launch(missing)
    for _ in range(21):
        record = bench.restart(missing)
    assert [generation.number for generation in record.generations] == list(range(3, 23))


def test_a_stop_during_a_restart_is_the_last_word(bench):
    spec = bench.spec("--ignore", "TERM")
    bench.ready(spec)
    bench.restart(spec)
    bench.stop()
    stopped = bench.wait(State.STOPPED)
    assert stopped.current.number == 1


def test_a_stop_of_what_has_ended_changes_nothing(bench):
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "3"))
    failed = bench.wait(State.FAILED)
    assert bench.stop() == failed


def test_failures_are_retried_up_to_the_limit(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=2, backoff_seconds=0.05, backoff_cap_seconds=0.1)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "7", restart=policy))
    failed = bench.until(lambda record: record.state is State.FAILED and record.next_attempt_at is None)
    assert failed.attempt == 2
    assert failed.current.number == 1
    assert "gave up after 2 automatic restarts" in failed.reason
    assert bench.log().count("made to fail") == 3


def test_what_a_restart_cannot_mend_is_not_tried_again(bench):
    hopeless = (Hopeless("(", "no expression"), Hopeless(r"^FATAL: made to \w+$", "it was made to fail"))
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05, hopeless=hopeless)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "7", restart=policy))
    failed = bench.wait(State.FAILED)
    assert (failed.attempt, failed.next_attempt_at) == (0, None)
    assert failed.reason.endswith("not started again, since that would fail the same way: it was made to fail")
    assert "'(' is no regular expression" in bench.file("keeper.log").read_text()


def test_a_usage_error_is_not_tried_again(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", "--exit-code", "2", restart=policy))
    failed = bench.wait(State.FAILED)
    assert (failed.attempt, failed.next_attempt_at) == (0, None)
    assert "exit code 2 says that it does not understand its command line" in failed.reason


def test_what_was_ready_is_started_again_whatever_its_log_says(bench):
    hopeless = (Hopeless("child up", "a line that was there when it was well, too"),)
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=0.05, hopeless=hopeless)
    ready = bench.ready(bench.spec("--children", "1", restart=policy))
    bench.until(lambda _: "child up" in bench.log())
    os.kill(ready.server.pid, signal.SIGKILL)
    assert bench.until(lambda record: record.state is State.READY and record.attempt == 1)
    bench.restart(bench.spec())
    past = bench.wait(State.READY, generation=2).generations[0]
    assert past.spec.restart.hopeless == (), "of no use any more, and not small"


def test_a_server_that_was_ready_for_long_has_its_attempts_forgiven(bench, tmp_path):
    policy = RestartPolicy(RestartMode.ON_FAILURE, limit=2, backoff_seconds=0.05)
    spec = bench.spec("--fail-once", str(tmp_path / "failed"), restart=policy)
    bench.launch(spec, steady=0.5)
    ready = bench.until(lambda record: record.state is State.READY and record.attempt)
    assert ready.attempt == 1
    assert bench.until(lambda record: record.attempt == 0).state is State.READY


def test_a_stop_while_it_waits_to_be_started_again_cancels_that(bench, wait_until):
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=600, backoff_cap_seconds=600)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", restart=policy))
    waiting = bench.until(lambda record: record.next_attempt_at)
    assert waiting.state is State.FAILED
    assert bench.stop().state is State.STOPPED
    assert bench.read().next_attempt_at is None
    wait_until(lambda: not client.keeper_alive(bench.root, "one"))


def test_a_restart_while_it_waits_begins_at_once(bench):
    policy = RestartPolicy(RestartMode.ON_FAILURE, backoff_seconds=600, backoff_cap_seconds=600)
    bench.launch(bench.spec("--never-ready", "--exit-after", "0", restart=policy))
    bench.until(lambda record: record.next_attempt_at)
    bench.restart(bench.spec())
    assert bench.wait(State.READY).current.number == 2


def test_one_name_is_given_to_one_console_only(bench):
    def attempt(_):
        try:
            return bench.launch(bench.spec("--never-ready"))
        except errors.NameTakenError:
            return None

    with ThreadPoolExecutor(4) as pool:
        records = [record for record in pool.map(attempt, range(4)) if record]
    assert len(records) == 1
    assert bench.read().server == records[0].server


def test_a_server_outlives_a_hang_up_of_the_session_that_launched_it(bench, wait_until):
    script = (
        "import sys, json, signal; from pathlib import Path\n"
        "from vllm_launchers.keeper import client, codec; from vllm_launchers.keeper.records import LaunchSpec\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "client.launch(Path(sys.argv[1]), 'one', codec.from_plain(LaunchSpec, json.loads(sys.argv[2])))\n"
        "print('up', flush=True); sys.stdin.read()"
    )
    console = subprocess.Popen(
        [sys.executable, "-c", script, str(bench.root), json.dumps(codec.to_plain(bench.spec()))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert console.stdout.readline() == b"up\n"
    os.killpg(console.pid, signal.SIGHUP)
    assert console.wait(10) == -signal.SIGHUP
    console.stdin.close()
    console.stdout.close()
    record = bench.wait(State.READY)
    os.kill(record.keeper.pid, signal.SIGHUP)
    os.kill(record.keeper.pid, signal.SIGINT)
    bench.restart(bench.spec())
    assert bench.wait(State.READY, generation=2).keeper == record.keeper


def test_a_server_that_has_ended_can_be_removed_and_its_name_used_again(bench):
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


def test_the_inherited_environment_is_overlaid_and_the_mask_kept(bench, monkeypatch, tmp_path):
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

"""The recorder as a real process, with a stand-in for the server process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.keeper_bench import PATIENCE
from vllm_console.history.store import HistoryError, HistoryReader
from vllm_console.recorder import ReadyWatch, Schedule, process_lives


def start_time(pid):
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rfind(")") + 2 :].split()[19])


def entries(path):
    try:
        return HistoryReader(path).since(0)
    except HistoryError:
        return []


@pytest.fixture
def processes():
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def sleeper(processes, server):
    """A stand-in for vLLM: it holds the socket on which `server` responds, unless ``listening`` is off."""

    def start(*, listening=True):
        words = [sys.executable, "-c", "import time; time.sleep(600)"]
        process = subprocess.Popen(words, pass_fds=[server.fileno()] if listening else [])
        processes.append(process)
        return process

    return start


@pytest.fixture
def recorder(processes, tmp_path, server):
    def start(watched, *, generation=1, interval=0.05, begun=None, url=None, extra=(), history="history.sqlite"):
        command = [sys.executable, "-m", "vllm_console.recorder", "--url", url or server.url]
        command += ["--history", str(tmp_path / history), "--generation", str(generation), "--pid", str(watched.pid)]
        command += ["--start-time", str(begun or start_time(watched.pid)), "--interval", str(interval), *extra]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    return start


def test_records_until_server_exits(server, body, sleeper, recorder, tmp_path, until):
    text = body(engines=[{"running": 5.0}])
    server.serve_text(text)
    watched = sleeper()
    process = recorder(watched, generation=3)
    until(lambda: len(entries(tmp_path / "history.sqlite")) >= 3)
    server.serve_text(body(engines=[{"running": 6.0}]))
    until(lambda: entries(tmp_path / "history.sqlite")[-1].sample.engines["0"].requests_running == 6.0)
    watched.kill()  # not reaped yet: a zombie counts as ended
    assert process.wait(PATIENCE) == 0
    rows = entries(tmp_path / "history.sqlite")
    assert {row.generation for row in rows} == {3}
    assert server.connections == 1


def test_sigterm_ends_recorder_but_not_server(server, body, sleeper, recorder, tmp_path, until):
    server.serve_text(body())
    watched = sleeper()
    process = recorder(watched)
    until(lambda: entries(tmp_path / "history.sqlite"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    assert watched.poll() is None


def test_reused_pid_is_not_taken_for_server(sleeper, recorder):
    watched = sleeper()
    assert recorder(watched, begun=start_time(watched.pid) + 1).wait(PATIENCE) == 0
    assert process_lives(watched.pid, start_time(watched.pid))
    assert not process_lives(watched.pid, start_time(watched.pid) - 1)


def test_survives_refused_connections_and_invalid_metrics(server, body, sleeper, recorder, tmp_path, until):
    history = tmp_path / "history.sqlite"
    answers = iter([b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n<html>abc", b"\x00\xff\r\n\r\n",
                    b"HTTP/1.1 503 Dead\r\nContent-Length: 0\r\n\r\n"])  # fmt: skip
    text = body().encode()
    good = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text
    server.answer = lambda path: next(answers, good)
    process = recorder(sleeper())
    until(lambda: len(entries(history)) >= 2)
    process.terminate()
    _, said = process.communicate(timeout=PATIENCE)
    assert "HTML" in said
    assert "Traceback" not in said


def test_hanging_request_times_out_and_is_retried(server, body, sleeper, recorder, tmp_path, until):
    def hang():
        yield b"HTTP/1.1 200 OK\r\n"
        server.ending.wait(30)

    text = body().encode()
    good = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text
    server.answer = lambda path: hang() if server.requests == 1 else good
    process = recorder(sleeper())
    until(lambda: entries(tmp_path / "history.sqlite"))
    process.terminate()
    assert "did not answer" in process.communicate(timeout=PATIENCE)[1]


def test_refused_connection_is_not_reported(sleeper, recorder, tmp_path, until):
    process = recorder(sleeper(), url="http://127.0.0.1:9")
    until(lambda: (tmp_path / "history.sqlite").exists())
    process.terminate()
    assert process.communicate(timeout=PATIENCE)[1] == ""


def test_metrics_of_foreign_process_on_port_are_not_recorded(server, body, sleeper, recorder, tmp_path, until):
    """After the server ends or before it listens, another process may respond there with forged metrics."""
    server.serve_text(body())
    process = recorder(sleeper(listening=False))
    said = process.stderr.readline()
    assert "another process answers on port" in said
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert entries(tmp_path / "history.sqlite") == []
    assert server.requests == 0


def test_lost_gpu_samples_are_reported_once(server, body, sleeper, recorder, tmp_path, until):
    server.serve_text(body())
    nowhere = tmp_path / "gone" / "gpu-samples.jsonl"
    process = recorder(sleeper(), extra=("--gpu-samples", str(nowhere)))
    until(lambda: len(entries(tmp_path / "history.sqlite")) >= 3)
    process.terminate()
    said = process.communicate(timeout=PATIENCE)[1]
    assert said == f"recorder: GPU samples are lost (No such file or directory): {nowhere}\n"


def test_only_one_recorder_writes(server, body, sleeper, recorder, tmp_path, until):
    history = tmp_path / "history.sqlite"
    server.serve_text(body())
    first = recorder(sleeper(), generation=1)
    until(lambda: entries(history))
    second = recorder(sleeper(), generation=2)
    seen = server.requests
    until(lambda: server.requests > seen + 10)
    assert second.poll() is None
    first.terminate()
    first.wait(PATIENCE)
    until(lambda: entries(history)[-1].generation == 2)
    generations = [entry.generation for entry in entries(history)]
    assert generations == sorted(generations)


def test_waiting_recorder_can_be_stopped(server, body, sleeper, recorder, tmp_path, until):
    server.serve_text(body())
    recorder(sleeper())
    until(lambda: entries(tmp_path / "history.sqlite"))
    second = recorder(sleeper())
    until(lambda: _waits_for_a_lock(second.pid))
    second.terminate()
    assert second.wait(PATIENCE) == 0


def test_recorder_requests_new_keeper_after_keeper_death(server, body, sleeper, tmp_path, until):
    """Its parent, the keeper, dies; it requests a new keeper, here a stub that only records the call."""
    package = tmp_path / "stand_in"
    package.mkdir()
    (package / "sitecustomize.py").write_text(
        "import sys, types\n"
        "client = types.ModuleType('vllm_launchers.keeper.client')\n"
        "def adopt_orphans(root):\n"
        "    (root / 'called').write_text('x')\n"
        "    return ['chat']\n"
        "client.adopt_orphans = adopt_orphans\n"
        "sys.modules['vllm_launchers.keeper.client'] = client\n"
    )
    server.serve_text(body())
    watched = sleeper()
    history = tmp_path / "history.sqlite"
    command = [sys.executable, "-m", "vllm_console.recorder", "--url", server.url, "--history", str(history)]
    command += ["--generation", "1", "--pid", str(watched.pid), "--start-time", str(start_time(watched.pid))]
    command += ["--interval", "0.05", "--state-root", str(tmp_path)]
    keeper = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(600)",
            *command,
        ],
        env={**os.environ, "PYTHONPATH": str(package)},
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: entries(history))
        assert not (tmp_path / "called").exists()
        keeper.kill()
        keeper.wait()
        until((tmp_path / "called").exists)
        last = entries(history)[-1].sequence
        until(lambda: entries(history)[-1].sequence > last)
    finally:
        keeper.kill()
        watched.kill()  # ends the recorder, which has no parent anymore
        watched.wait()
    lock = history.with_name(history.name + ".lock")
    until(lambda: not _locked(lock))


def _waits_for_a_lock(pid):
    try:
        return any(fd.readlink().name.endswith(".lock") for fd in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def _locked(path):
    import fcntl

    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_schedule_does_not_drift_or_catch_up():
    schedule = Schedule(1.0, 100.0)
    assert schedule.wait_from(100.0) == pytest.approx(1.0)
    assert schedule.wait_from(101.25) == pytest.approx(0.75)
    assert schedule.wait_from(102.0) == pytest.approx(1.0)
    assert schedule.wait_from(107.5) == pytest.approx(0.5)  # 104 to 107 were missed
    assert schedule.wait_from(108.1) == pytest.approx(0.9)


@pytest.mark.parametrize("arguments", [["--interval", "0"], ["--interval", "nan"], ["--pid", "x"], []])
def test_bad_arguments_are_usage_errors(arguments):
    process = subprocess.run(
        [sys.executable, "-m", "vllm_console.recorder", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert "Traceback" not in process.stderr


def test_invalid_url_prints_one_line(sleeper, recorder):
    process = recorder(sleeper(), url="ftp://x")
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert said.count("\n") == 1


def test_recorder_imports_no_unneeded_modules():
    code = "import sys, vllm_console.recorder; print(*sys.modules)"
    modules = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not modules & {"textual", "rich", "httpx", "asyncio", "prometheus_client", "psutil", "pynvml", "vllm"}
    assert not modules & {"http.client", "email", "ssl"}, "would cost several MB per server, most without TLS"


def test_nothing_is_recorded_before_server_is_ready(tmp_path):
    """The warm-up request and its compilation are not part of the traffic."""
    history, record = tmp_path / "history.sqlite", tmp_path / "record.json"
    generations = [{"number": 1, "ready_at": 5.0}, {"number": 2, "ready_at": None}]
    record.write_text(json.dumps({"generations": generations}))
    ready = ReadyWatch(history, 2)
    assert not ready.check()
    generations[1]["ready_at"] = 9.0
    (tmp_path / "new").write_text(json.dumps({"generations": generations}))
    (tmp_path / "new").replace(record)
    assert ready.check()
    assert ReadyWatch(tmp_path / "elsewhere" / "history.sqlite", 1).check(), "without a record everything is recorded"

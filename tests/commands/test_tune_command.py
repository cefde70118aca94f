"""tune: rejected arguments, canceling restores the flags, and better flags are kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from typing import Any

from fakes.commands import ASK_SECONDS
from vllm_launchers.keeper import client

WORDS = ("tune", "chat", "--objective", "throughput", "--input-p95", "200", "--output-p95", "40")


def generation(program: Any) -> int:
    """Read from the record, because polling with the command would slow down the tuning."""
    return client.read(program.home / "state" / "vllm-console", "chat").current.number


def flags(program: Any) -> tuple[str, int, Any]:
    server = program.json("status", "chat")
    return server["state"], server["generation"], int(server["argv"][server["argv"].index("--max-num-seqs") + 1])


def tuning(program: Any) -> subprocess.Popen[str]:
    """Start a tuning that is ended from outside, long before its budget. With many trials, each measurement is
    short."""
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_console", *WORDS, "--trials", "50", "--budget", "8m"], env=program.env,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def tuned(program: Any) -> dict[str, Any]:
    """Result of one trial, retried with longer budgets. On a slow machine, prediction uses up a short budget; if other
    work disturbs the measurements, short ones can't be told apart, and the flags are reverted."""
    for budget in ("70s", "3m", "8m"):
        done = program(*WORDS, "--trials", "1", "--budget", budget, "--json", timeout=900.0)
        if done.returncode == 2 and "too short for a single trial" in done.stderr:
            continue
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        if result["kept"] is not None:
            break
        state, _, seqs = flags(program)
        assert (state, seqs) == ("ready", 4), result["sentence"]
    return result


def test_tune_keeps_better_flags_and_restores_on_cancel(program: Any) -> None:
    program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait", "--set", "max-num-seqs=4",
                 "--env", "SIMULATED_SPEED=2")  # fmt: skip
    program.json("start", "chatbot", "--engine", "simulated", "--name", "blind", "--wait", "--no-probe")
    for words, said in {
        ("blind",): "blind has no probe",
        ("chat", "--budget", "10s"): "--budget 10s is too short for a single trial: at least ",
        ("chat", "--rate", "2"): "--objective ttft",
        ("nobody",): "nobody",
        ("http://127.0.0.1:9",): "not one of your servers",
    }.items():
        refused = program("tune", *words)
        assert refused.returncode != 0, words
        assert said in refused.stderr, words
    assert flags(program) == ("ready", 1, 4)

    running = tuning(program)
    try:
        deadline = time.monotonic() + 600
        while program.json("status", "chat")["tuner"] is None and running.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(ASK_SECONDS)
        second = program(*WORDS, "--yes")
        while generation(program) == 1 and time.monotonic() < deadline and running.poll() is None:
            time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        output, errors = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode not in (0, 1), (output, errors)
    assert flags(program) == ("ready", 3, 4), (output, errors)
    assert "canceled: chat has its original flags" in errors
    assert second.returncode == 4
    assert f"a tuner (pid {running.pid}) is running on chat, for at most" in second.stderr

    result = tuned(program)
    now = flags(program)[1]
    assert result["unit"] == "tokens/s"
    assert result["considered"] > result["refused"]
    (trial,) = result["trials"]
    assert trial["run"] == f"chat@{now}"
    assert trial["predicted"] > result["original"]["predicted"]
    assert trial["measured"]["value"] > result["original"]["measured"]["value"]
    assert result["kept"] == trial["set"]
    assert result["improvement"]["low"] > 0
    assert flags(program) == ("ready", now, trial["set"]["max-num-seqs"])
    assert program("runs", "chat").stdout.count("chat@") == now

    running = tuning(program)
    assert running.stdout is not None
    try:
        running.stdout.readline()
        asked = program("chat", "chat", typed="Hello")
        stopped = program("stop", "chat")
        _, errors = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 1
    assert "chat was stopped by someone else meanwhile" in errors
    assert f"warning: a tuner (pid {running.pid}) is running on chat: it gives up now" in stopped.stderr
    assert (
        f"warning: a tuner (pid {running.pid}) is measuring chat: this prompt will distort its results" in asked.stderr
    )
    assert "Traceback" not in errors

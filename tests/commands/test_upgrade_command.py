"""``compare NAME --engine A --engine B``: rejected arguments, and canceling removes everything but the server."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

from fakes.commands import ASK_SECONDS, PATIENCE


def test_canceled_comparison_removes_only_its_own_servers(program: Any) -> None:
    program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait")
    refused = {
        ("chat", "--engine", "simulated"): "two engines",
        ("chat", "--engine", "simulated", "--engine", "simulated", "--rounds", "2"): "fewer than 4 rounds",
        ("chat", "--engine", "simulated", "--engine", "9.9.9"): "9.9.9",
        ("nobody", "--engine", "simulated", "--engine", "simulated"): "nobody",
        ("chat", "--set", "max-num-seqs=8"): "--engine",
        ("chat", "--engine", "simulated", "--engine", "simulated", "--set", "max-num-seqs=0"): "max-num-seqs",
    }
    for words, said in refused.items():
        answer = program("compare", *words)
        assert answer.returncode not in (0, 1) or said in answer.stderr, words
        assert said in answer.stderr, words
    assert [one["name"] for one in program.json("list") if one["ours"]] == ["chat"]

    check = ("compare", "chat", "--engine", "simulated", "--engine", "simulated", "--seconds", "60")
    running = subprocess.Popen(
        [sys.executable, "-m", "vllm_console", *check], env=program.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        up: list[str] = []
        deadline = time.monotonic() + PATIENCE
        while "chat-upgrade-a" not in up and time.monotonic() < deadline and running.poll() is None:
            up = [one["name"] for one in program.json("list") if one["state"] == "ready"]
            time.sleep(ASK_SECONDS)
        assert "chat-upgrade-a" in up
        running.send_signal(signal.SIGTERM)
        running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode not in (0, 1)
    left = {one["name"]: (one["state"], one["generation"]) for one in program.json("list") if one["ours"]}
    assert left == {"chat": ("ready", 1)}
    assert "chat-upgrade-a@1" in program("runs").stdout

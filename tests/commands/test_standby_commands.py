"""A standby pair on a GPU of a recorded host: one simulated server sleeps while the other serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import httpx

from fakes.commands import PATIENCE

HOST = ("--host", "4xa6000")


def start(program, preset, name, *words, speed="20"):
    words = (*HOST, "start", preset, "--engine", "simulated", "--name", name, *words, "--wait")
    return program.json(*words, env={"SIMULATED_SPEED": speed})


def free_gib(program, gpu=1):
    host = json.loads(program(*HOST, "host", "--json").stdout)
    return next(one["free_gib"] for one in host["gpus"] if one["index"] == gpu)


def test_standby_pair_shares_gpu_and_switches(program):
    start(program, "chatbot", "chat", "--gpus", "1", "--set", "enable-sleep-mode=true")
    refused = program(*HOST, "start", "batch", "--engine", "simulated", "--name", "night", "--standby-of", "chat")
    assert refused.returncode == 1
    assert "vllm-console sleep chat" in refused.stderr
    held = free_gib(program)
    assert program.json(*HOST, "sleep", "chat")["state"] == "asleep"
    assert free_gib(program) > held + 40
    refused = program("start", "batch", "--engine", "simulated", "--name", "night", "--standby-of", "chat")
    assert refused.returncode == 4
    assert "chat simulates a GPU of the recorded host gpubox: use that host with --host" in refused.stderr
    night = start(program, "batch", "night", "--standby-of", "chat")
    assert "--enable-sleep-mode" in night["argv"]
    assert free_gib(program) < 5

    assert program.json(*HOST, "wake", "chat")["state"] == "ready"
    chat, night = (program.json(*HOST, "status", name) for name in ("chat", "night"))
    assert (chat["partner"], night["partner"]) == ("night", "chat")
    assert (chat["sleep"]["step"], chat["sleep"]["golden_prompts"], chat["sleep"]["answered_differently"]) == (
        "awake", 4, [],
    )  # fmt: skip
    assert (night["state"], night["sleep"]["step"], night["sleep"]["level"]) == ("asleep", "asleep", 1)
    assert night["sleep"]["host_gib"] > 1
    assert night["findings"] == []

    refused = program(*HOST, "restart", "night")
    assert refused.returncode == 1
    assert "put chat to sleep first" in refused.stderr
    assert program(*HOST, "wake", "chat").returncode == 1

    woken = program("wake", "night")
    assert woken.returncode == 0
    assert "could not confirm that its GPUs have free memory: it is simulated, on no GPU of this host" in woken.stderr


def test_interrupted_command_leaves_server_serving(program):
    chat = start(program, "chatbot", "chat", "--gpus", "1", "--set", "enable-sleep-mode=true", speed="1")
    body = {"prompt": "one", "max_tokens": 3500, "ignore_eos": True, "stream": True}
    url = f"http://127.0.0.1:{chat['port']}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as busy:
        assert busy.status_code == 200
        words = [sys.executable, "-m", "vllm_console", *HOST, "sleep", "chat", "--drain", "120"]
        sleeping = subprocess.Popen(words, env=program.env, stderr=subprocess.PIPE, text=True)
        assert "waiting for its requests to end" in sleeping.stderr.readline()
        until(lambda: program.json(*HOST, "status", "chat")["sleep"] is not None)
        os.kill(sleeping.pid, signal.SIGINT)
        assert sleeping.wait(PATIENCE) == 130
        until(lambda: program.json(*HOST, "status", "chat")["sleep"]["step"] == "canceled")
        status = program.json(*HOST, "status", "chat")
    assert status["state"] == "ready"
    assert "the console that requested it has ended" in status["sleep"]["message"]


def until(true):
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)

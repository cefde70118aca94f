"""Two data-parallel engines of real vLLM: one server, metrics of both, ended together.

Keeps both cores busy for a minute, so it only runs with ``-m slow``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakes.commands import run_command
from fakes.keeper_bench import end_servers
from vllm_launchers.keeper import client, folders
from vllm_launchers.keeper.records import State

pytestmark = [pytest.mark.real, pytest.mark.slow]

SECONDS = 600


class Program:
    """The command, with a separate state folder."""

    def __init__(self, state: Path, environment: Mapping[str, str]) -> None:
        self.state, self.environment = state, environment

    def __call__(self, *words: str) -> Any:
        done = run_command(["--state", str(self.state), *words, "--json"], self.environment, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def program(tmp_path: Path, real_env: Mapping[str, str]) -> Iterator[Program]:
    shared = {**os.environ, **real_env}
    del shared["VLLM_ENABLE_V1_MULTIPROCESSING"], shared["VLLM_WORKER_MULTIPROC_METHOD"]
    try:
        yield Program(tmp_path / "state", shared)
    finally:
        end_servers(tmp_path / "state")


def test_two_ranks_are_one_server_and_end_together(
    program: Program, real_vllm: Path, tiny_model: Path, cpu_flags: Sequence[str], free_port: Any
) -> None:
    flags = (*cpu_flags, "data-parallel-size=2", "served-model-name=tiny")
    started = program(
        "start", "chatbot", "--vllm", str(real_vllm), "--model", str(tiny_model), "--name", "ranks", "--port",
        str(free_port()), "--wait", *(word for flag in flags for word in ("--set", flag)),
    )  # fmt: skip
    url = f"http://127.0.0.1:{started['port']}/v1/completions"
    body = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 8}
    for _ in range(4):
        assert httpx.post(url, json=body, timeout=120, trust_env=False).status_code == 200

    def served() -> Mapping[str, Any]:
        metrics = program("status", "ranks")["metrics"]
        found: Mapping[str, Any] = metrics["engines"] if metrics is not None else {}
        return found

    deadline = time.monotonic() + 60
    while sum(engine["generation_tokens_total"] or 0 for engine in served().values()) < 4 * 8:
        assert time.monotonic() < deadline, served()
        time.sleep(0.5)
    assert set(served()) == {"0", "1"}
    assert [one["name"] for one in program("list", "--ours")] == ["ranks"]

    record = client.read(program.state, "ranks")
    assert record.server is not None
    listed = subprocess.run(["ps", "-s", str(record.server.pid), "-o", "pid=,args="], capture_output=True, text=True)
    engine = next(int(line.split()[0]) for line in listed.stdout.splitlines() if "VLLM::EngineCore" in line)
    os.kill(engine, signal.SIGKILL)
    ended = client.wait_for(program.state, "ranks", lambda one: one.state in (State.FAILED, State.STOPPED), SECONDS)
    assert ended.state is State.FAILED
    log = folders.server_folder(program.state, "ranks") / "server.log"
    assert program("diagnose", str(log))["cause"] == "engine_core_died"

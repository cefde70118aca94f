"""Prepared real vLLM: its verdict on flags, the resources it holds while it waits, and the server it becomes."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import pytest

from fakes.forked import Forks
from fakes.prepared_process import Prepared
from vllm_launchers.prepared.command import prepared_command

pytestmark = pytest.mark.real

READY_SECONDS = 600
SPAWNED = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""vLLM's default; only then does a spare process replace the engine's process."""

Start = Callable[..., Prepared]


@pytest.fixture
def start(
    real_vllm: Path,
    tiny_model: Path,
    real_env: Mapping[str, str],
    cpu_flags: Sequence[str],
    forks: Forks,
    tmp_path: Path,
) -> Iterator[Start]:
    """Start real vLLM's bootstrap with the CPU flags and more: ``start("--port", "81")``.

    Environment variables are keyword arguments. With ``forked=True``, vLLM is already imported.
    """
    begun: list[Prepared] = []

    def begin(*words: str, forked: bool = False, **variables: str) -> Prepared:
        flags = [word for flag in cpu_flags for word in f"--{flag.removesuffix('=true')}".split("=")]
        argv = [str(real_vllm), "serve", str(tiny_model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
        command = prepared_command([*argv, *flags, *words])
        assert command
        environment = {**os.environ, **real_env, **variables}
        begun.append(Prepared(command, environment, tmp_path, forks if forked else None))
        return begun[-1]

    yield begin
    for prepared in begun:
        prepared.end()


def completion(prepared: Prepared, port: int) -> str:
    """The text of its first completion. The first prompt is long because short ones crash servers on some CPUs."""
    deadline = time.monotonic() + READY_SECONDS
    body = {"model": "tiny", "prompt": "one two three " * 12, "max_tokens": 4}
    while time.monotonic() < deadline and prepared.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60, trust_env=False)
            return str(answer.raise_for_status().json()["choices"][0]["text"])
        time.sleep(0.1)
    pytest.fail(f"it never answered:\n{prepared.server_output.read_text()[-4000:]}")


def test_prepared_process_holds_nothing_until_it_serves(start: Start, free_port: Callable[[], int]) -> None:
    port = free_port()
    prepared = start("--port", str(port), **SPAWNED)
    accepted = prepared.until("accepted")
    assert (accepted["cuda_initialized"], accepted["config_checked"]) == (False, True)
    process = Path(f"/proc/{prepared.process.pid}")
    (spare,) = (process / f"task/{prepared.process.pid}/children").read_text().split()
    assert len(list((process / "task").iterdir())) == 1, "no threads, which a fork would lose"
    targets = [str(each.readlink()) for each in (process / "fd").iterdir()]
    assert len([target for target in targets if target.startswith("socket:")]) == 2, "the keeper's and the spare's"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))

    prepared.go()
    assert prepared.step() == {"step": "started"}
    assert completion(prepared, port)
    log = prepared.server_output.read_text()
    assert "Resolved architecture: LlamaForCausalLM" in log, "logged during preparation and again"
    assert "Application startup complete" in log
    assert f"(EngineCore pid={spare})" in log, "the engine had finished its imports"
    prepared.process.terminate()
    assert prepared.wait() == 0


def test_prepared_process_ends_with_its_keeper(start: Start) -> None:
    prepared = start(forked=True)
    prepared.until("accepted")
    written = prepared.own_output.read_text()
    prepared.close()
    assert prepared.wait() == 0
    assert prepared.own_output.read_text() == written


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-flag"], "vllm: error: unrecognized arguments: --no-such-flag"),
        (["--max-num-seqs", "0"], "SchedulerConfig.max_num_seqs: Input should be greater than or equal to 1"),
    ],
)
def test_flags_are_rejected_with_vllm_message(start: Start, flags: list[str], message: str) -> None:
    prepared = start(*flags, forked=True)
    said = prepared.until("refused")["message"]
    assert message in said
    assert prepared.wait() == 2
    printed = prepared.own_output.read_text()
    assert all(line.rpartition(": ")[2] in printed for line in said.splitlines()), "as vLLM prints it"


def test_flags_are_checked_before_first_launch(
    real_vllm: Path, tiny_model: Path, real_env: Mapping[str, str], cpu_flags: Sequence[str], tmp_path: Path
) -> None:
    sets = [word for flag in (*cpu_flags, "max-model-len=9999") for word in ("--set", flag)]
    plan = ["plan", "chatbot", "--vllm", str(real_vllm), "--model", str(tiny_model), "--ask-vllm", "--json", *sets]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_console", *plan], capture_output=True, text=True, timeout=READY_SECONDS,
        env={**os.environ, **real_env, "VLLMCONSOLE_STATE": str(tmp_path)},
    )  # fmt: skip
    found = json.loads(done.stdout)["vllm_verdict"]
    assert (found["verdict"], found["version"], found["parser_only"]) == ("refused", "0.32.0", False)
    assert "User-specified max_model_len (9999) is greater" in found["message"]

"""Start, restart, stop and kill real vLLM with the commands; `test_real_findings` plays the whole loop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fakes.commands import run_command
from fakes.ports import free_port
from fakes.sessions import processes_of

pytestmark = pytest.mark.real


def program_at(home: Path, real_env, real_vllm, tiny_model, cpu_flags) -> Iterator[Callable[..., object]]:
    """``vllm-console`` with a separate home and the real engine; ends its servers afterwards."""
    env = {
        **os.environ,
        **real_env,
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CONFIG_HOME": str(home / "config"),
        "XDG_CACHE_HOME": str(home / "cache"),
    }

    def run(*words: str, check: bool = True):
        answer = run_command([*words, "--json"], env, timeout=300)
        if not check:
            return answer
        assert answer.returncode == 0, f"{words}: {answer.stderr}\n{answer.stdout}"
        return json.loads(answer.stdout)

    def start(name: str, *words: str, wait: bool = True):
        sets = [word for flag in cpu_flags for word in ("--set", flag)]
        waiting = ["--wait"] if wait else []
        return run(
            "start", "chatbot", "--model", str(tiny_model), "--vllm", str(real_vllm), "--name", name,
            "--port", str(free_port()), *sets, *waiting, *words,
        )  # fmt: skip

    run.start = start
    run.cpu_flags = cpu_flags
    run.env = env
    run.state = home / "state" / "vllm-console"
    yield run
    for server in run("list", "--ours"):
        run("stop", server["name"], check=False)


@pytest.fixture
def program(tmp_path, real_env, real_vllm, tiny_model, cpu_flags) -> Iterator[Callable[..., object]]:
    yield from program_at(tmp_path, real_env, real_vllm, tiny_model, cpu_flags)


@pytest.fixture(scope="module")
def steady(tmp_path_factory, real_env, real_vllm, tiny_model, cpu_flags):
    """A program and its server, shared by several tests; only the last two change it."""
    with contextlib.contextmanager(program_at)(
        tmp_path_factory.mktemp("steady"), real_env, real_vllm, tiny_model, cpu_flags
    ) as program:
        yield program, program.start("steady")


def until(check: Callable[[], object], what: str, seconds: float = 60.0) -> object:
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.25)  # each poll starts a process, so frequent polling slows down vLLM's startup
    return answer


@pytest.mark.parametrize("moment", [0.5, 4.0, 7.0])
def test_stop_during_startup_leaves_nothing(program, moment):
    server = program.start("early", wait=False)
    until(lambda: program("status", "early")["pid"], "a process")
    time.sleep(moment)  # the moment during startup matters here
    pid = program("status", "early")["pid"] or server["pid"]
    stopped = program("stop", "early")
    assert stopped["state"] == "stopped"
    assert processes_of(pid) == []


def test_foreign_vllm_is_never_signaled(program, shared_server):
    port = shared_server.port
    seen = until(lambda: [s for s in program("list") if s["port"] == port and s["state"] == "ready"], "seen", 120)
    assert seen[0]["ours"] is False
    refused = program("stop", seen[0]["name"], check=False)
    assert refused.returncode == 4
    assert shared_server.process.poll() is None


@pytest.mark.parametrize(
    ("sets", "code"),
    [
        (("no-such-flag=1",), "flag_unknown"),
        (("dtype=float7",), "flag_value"),
        (("max-model-len=4096", "num-gpu-blocks-override=4"), "kv_too_small"),
    ],
)
def test_flags_rejected_by_plan_are_never_started(program, tiny_model, real_vllm, sets, code):
    words = [word for pair in sets for word in ("--set", pair)]
    launch = ("--model", str(tiny_model), "--vllm", str(real_vllm), *words)
    planned = program("plan", "chatbot", *launch, check=False)
    assert planned.returncode == 1
    assert code in [found["code"] for found in json.loads(planned.stdout)["findings"] if found["level"] == "error"]
    answer = program("start", "chatbot", *launch, "--name", "refused", check=False)
    assert answer.returncode == 1
    assert f"[{code}]" in answer.stderr
    assert program("status", "refused", check=False).returncode == 3


def test_invalid_model_folder_and_invalid_vllm_program(program, tmp_path: Path, real_vllm):
    (tmp_path / "empty").mkdir()
    answer = program("start", "chatbot", "--model", str(tmp_path / "empty"), "--vllm", str(real_vllm), check=False)
    assert answer.returncode == 1
    assert "config.json" in answer.stderr
    answer = program("start", "chatbot", "--vllm", "/bin/true", check=False)
    assert answer.returncode == 1
    assert "/bin/true" in answer.stderr


def test_next_plan_uses_facts_reported_at_startup(steady, tiny_model, real_vllm):
    program, server = steady
    options = ("--model", str(tiny_model), "--vllm", str(real_vllm))
    flags = [word for pair in program.cpu_flags for word in ("--set", pair)]
    memory = program("plan", "chatbot", *options, *flags)["memory"]
    assert server["state"] == "ready"
    assert memory["source"] == "engine"
    assert memory["kv_tokens"] > 0


def test_started_server_has_the_probe(steady):
    program, _ = steady
    known = {request["id"] for request in program("requests", "steady")}
    done = program("load", "steady", "--requests", "3", "--output-p95", "10", "--input-p95", "20")
    deadline = time.monotonic() + 30
    while len(new := [one for one in program("requests", "steady") if one["id"] not in known]) < 3:
        assert time.monotonic() < deadline
    assert len(new) == done["completed"] == 3
    assert sum(one["output_tokens"] for one in new) == done["output_tokens"]


def test_refused_restart_does_not_affect_server(steady):
    program, before = steady
    answer = program("restart", "steady", "--set", "no-such-flag=1", "--force", check=False)
    assert answer.returncode == 1
    assert "[flag_unknown]" in answer.stderr
    after = program("status", "steady")
    assert (after["state"], after["generation"], after["pid"]) == ("ready", 1, before["pid"])


def test_flags_rejected_only_by_vllm_do_not_affect_server(steady):
    program, before = steady
    change = 'hf-overrides={"vocab_size":"many"}'
    answer = program("restart", "steady", "--set", change, "--force", "--wait", check=False)
    assert answer.returncode == 1
    assert "the server was not touched" in answer.stderr
    assert "expected int, got str" in answer.stderr
    after = program("status", "steady")
    assert (after["state"], after["generation"], after["pid"]) == ("ready", 1, before["pid"])
    assert after["restart"]["step"] == "refused"
    done = program("load", "steady", "--rate", "2", "--duration", "1", "--output-p95", "10", "--input-p95", "20")
    assert done["failed"] == 0


def test_forced_restart_fails_with_vllm_message_and_is_rolled_back(steady):
    program, _ = steady
    forced = ("--set", "max-model-len=4096", "--set", "num-gpu-blocks-override=4", "--force")
    answer = program("restart", "steady", *forced, "--wait", check=False)
    assert answer.returncode == 1
    status = program("status", "steady")
    assert (status["state"], status["generation"]) == ("ready", 3)
    assert status["rollback"].startswith("run 2 failed, back to run 1's flags: ")
    assert "KV cache" in status["rollback"]
    argv = status["argv"]
    assert argv[argv.index("--max-model-len") + 1] == "512"


def test_keeper_and_console_are_killed_separately(steady):
    """The last test on this server, because it ends the server."""
    program, _ = steady
    server = program("status", "steady")
    record = json.loads((program.state / "servers" / "steady" / "record.json").read_text())
    os.kill(record["keeper"]["pid"], signal.SIGKILL)
    until(lambda: program("status", "steady")["notice"], "adoption")
    assert program("status", "steady")["pid"] == server["pid"]
    done = program("load", "steady", "--rate", "2", "--duration", "1", "--output-p95", "10", "--input-p95", "20")
    assert done["failed"] == 0
    assert program("stop", "steady")["state"] == "stopped"
    assert processes_of(server["pid"]) == []

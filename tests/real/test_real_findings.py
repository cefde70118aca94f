"""Findings on real vLLM: preemption and its fix, missed prefixes, a hanging engine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest

from fakes.commands import run_command
from fakes.sessions import processes_of
from fakes.terminal import Terminal

pytestmark = pytest.mark.real

FINDING_SECONDS = 150.0
"""A finding takes 30 to 50 s of bad frames; a busy machine needs longer."""

PACED = Path(__file__).parent / "environment" / "paced"
"""A vLLM plugin that slows the engine down to the speed of a larger model, since these tests load it for minutes."""

SHORT = ("max-model-len=256", "num-gpu-blocks-override=20")
"""Half of the context and of the cache, so that responses end sooner."""

SIDE_BY_SIDE = 2
"""Number of concurrent scenarios; they mostly wait."""

Scene = Callable[[Any], None]


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory, real_env, real_vllm, tiny_model, cpu_flags, free_port
) -> Iterator[Callable[[Scene], None]]:
    """Return a scenario's outcome. The first call starts all scenarios, each with its own server and home."""

    def play(scene: Scene) -> None:
        home = tmp_path_factory.mktemp("home")
        with contextlib.contextmanager(program_at)(home, real_env, real_vllm, tiny_model, cpu_flags, free_port) as one:
            scene(one)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        futures = {scene: pool.submit(play, scene) for scene in (preemption, prefixes_and_a_stopped_engine)}
        yield lambda scene: futures[scene].result()
        for future in futures.values():
            future.cancel()


def program_at(home: Path, real_env, real_vllm, tiny_model, cpu_flags, free_port) -> Iterator[Any]:
    """``vllm-console`` with a separate home and the real engine; ends its servers and load generators afterwards."""
    paths = os.pathsep.join(filter(None, (str(PACED), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, **real_env, "HOME": str(home), "PYTHONPATH": paths, "PACED_STEP_SECONDS": "0.05"}
    env |= {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("STATE", "CONFIG", "CACHE")}
    env.pop("VLLM_API_KEY", None)
    console = [sys.executable, "-m", "vllm_console"]
    loads: list[subprocess.Popen[bytes]] = []

    def run(*more: str) -> Any:
        answer = run_command([*more, "--json"], env, timeout=300)
        assert answer.returncode == 0, f"{more}: {answer.stderr}\n{answer.stdout}"
        return json.loads(answer.stdout)

    def start(*sets: str) -> Any:
        flags = [word for flag in (*cpu_flags, *SHORT, *sets) for word in ("--set", flag)]
        words = ["start", "chatbot", "--model", str(tiny_model), "--vllm", str(real_vllm), "--name", "chat"]
        return run(*words, "--port", str(free_port()), *flags, "--wait")

    def load(*more: str) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        loads.append(
            subprocess.Popen([*console, "load", "chat", *more], env=env, stdin=quiet, stdout=quiet, stderr=quiet)
        )
        return loads[-1]

    run.start, run.load, run.env = start, load, env  # type: ignore[attr-defined]
    try:
        yield run
    finally:
        for one in loads:
            one.kill()
            one.wait()
        subprocess.run([*console, "stop", "chat"], env=env, capture_output=True, timeout=120, check=False)


def find(program: Any, code: str) -> dict[str, Any]:
    """The finding with that code, once reported; on timeout, fail and show the server's status."""
    try:
        return until(lambda: named(program).get(code), code)
    except AssertionError as error:
        told = program("status", "chat")
        told = {key: told[key] for key in ("state", "reason", "notice", "findings", "metrics")}
        raise AssertionError(f"{error}; {json.dumps(told)}") from error


def named(program: Any) -> dict[str, dict[str, Any]]:
    """The server's current findings, by code."""
    return {finding["code"]: finding for finding in program("status", "chat")["findings"]}


def running(program: Any) -> float:
    """Running requests in the engine's last sample; a stopped engine reports nothing."""
    return (program("status", "chat")["metrics"] or {}).get("requests_running") or 0.0


def stopped_at_work(program: Any, engine: psutil.Process) -> bool:
    """Stop the engine while requests run; resume it if its last sample shows none."""
    if running(program) < 1:
        return False
    engine.suspend()
    time.sleep(3)  # so that the recorder has read its last sample
    if at_work := running(program) >= 1:
        return at_work
    engine.resume()
    return False


def until(check: Callable[[], Any], what: str, seconds: float = FINDING_SECONDS, every: float = 3.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(every)
    return answer


def learned(finding: dict[str, Any] | None) -> dict[str, Any] | None:
    """The finding, once its limit of sequences is based on the lengths of finished responses."""
    limits = [fix["why"] for fix in finding["fixes"] if "max-num-seqs" in fix["set"]] if finding is not None else []
    return finding if limits and "still grows" not in limits[0] else None


PRESSURE = ("--rate", "6", "--concurrency", "12", "--duration", "150", "--input-p95", "40",
            "--output-p95", "1500", "--prefix-reuse", "0", "--seed", "3")  # fmt: skip


def preemption(program: Any) -> None:
    """The whole loop: load until it preempts, the finding, its fix by keyboard, a restart, no more preemptions."""
    started = program.start("max-num-seqs=6")
    load = program.load(*PRESSURE)
    assert find(program, "preempting")["severity"] == "critical"
    # The fix improves as responses finish: at first only the concurrency is known.
    finding = until(lambda: learned(named(program).get("preempting")), "a fix by the lengths of answers")
    fixes = [{*fix["set"], *fix["unset"]} for fix in finding["fixes"]]
    assert fixes[:2] == [{"num-gpu-blocks-override"}, {"max-num-seqs"}], "vLLM's log says that more blocks would fit"
    before = program("status", "chat")["metrics"]["preemptions_total"]
    assert before > 0
    fixed = restarted_with_fix(program)
    changed = program("status", "chat")
    outcome = (changed["generation"], changed["state"], changed["port"])
    assert outcome == (2, "ready", started["port"]), (changed["rollback"], program("logs", "chat"))
    assert changed["argv"][changed["argv"].index("--max-num-seqs") + 1] == fixed
    assert changed["engine_version"].startswith("0.32.0")
    assert {"weights", "kv cache"} <= {stage["name"] for stage in changed["stages"]}
    load.kill()
    program.load(*PRESSURE)
    judged = until(lambda: named(program), "anything at all is said of the new generation")
    assert "preempting" not in judged, judged
    assert program("status", "chat")["metrics"]["preemptions_total"] < before
    killed_api_server_leaves_no_process(program)


def restarted_with_fix(program: Any) -> str:
    """Stage the second fix in the console, restart, and exit; returns the new ``max-num-seqs``."""
    console = Terminal([sys.executable, "-m", "vllm_console"], 120, 40, program.env)
    try:
        # The title of the preemptions pane shows the rate per minute.
        console.wait_for(lambda text: re.search(r"2 Preempt[^\n]*?[1-9]\d*/min", text))
        console.press("f")
        console.wait_for("--num-gpu-blocks-override 20 → ")
        console.press("f")
        screen = console.wait_for("--max-num-seqs 6 → ")
        console.press("r")
        console.wait_for("Restart chat?")
        console.press("y")
        console.wait_for("chat is ready", 300)
        console.press("q")
        assert console.wait_end() == 0
        assert console.restored()
    finally:
        console.close()
    fixed = re.search(r"--max-num-seqs 6 → (\d+)", screen)
    assert fixed is not None
    return fixed[1]


def killed_api_server_leaves_no_process(program: Any) -> None:
    """The server is killed while it serves the load."""
    server = program("status", "chat")
    assert len(processes_of(server["pid"])) >= 2
    os.kill(server["pid"], signal.SIGKILL)
    until(lambda: not processes_of(server["pid"]), "all processes of the server gone", 15, every=0.25)
    status = until(lambda: (now := program("status", "chat"))["state"] == "failed" and now, "failed")
    assert status["exit"]["signal"] == "SIGKILL"
    assert status["diagnosis"]["cause"] == "killed"


def refused_requests(program: Any, port: int) -> None:
    """Requests for an unserved model are reported with their count and the model."""
    sent, done = threading.Event(), threading.Event()

    def send() -> None:
        message = {"role": "user", "content": "a"}
        body = json.dumps({"model": "gpt-4", "messages": [message], "max_tokens": 1}).encode()
        while not done.wait(0.3):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            assert connection.getresponse().status == HTTPStatus.NOT_FOUND
            connection.close()
            sent.set()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        finding = find(program, "requests_refused")
        answered = program("status", "chat")["last_minute"]["responses"]
    finally:
        done.set()
        sender.join()
    assert sent.is_set()
    assert answered["refused"] >= 5
    assert "gpt-4" in finding["cause"]
    assert {"404 Not Found", "model asked for"} <= {one["name"] for one in finding["measures"]}
    assert [(fix["set"], fix["unset"]) for fix in finding["fixes"]] == [({}, [])]


def prefixes_and_a_stopped_engine(program: Any) -> None:
    server = program.start("enable-prefix-caching=false", "max-num-seqs=4")
    load = program.load("--rate", "4", "--concurrency", "4", "--duration", "80", "--input-p95", "100",
                        "--output-p95", "4")  # fmt: skip
    finding = find(program, "prefix_cache_missed")
    assert finding["fixes"][0]["set"] == {"enable-prefix-caching": True}
    load.kill()
    refused_requests(program, server["port"])

    engine = next(
        child
        for child in psutil.Process(server["pid"]).children(recursive=True)
        if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
    )
    program.load("--rate", "20", "--concurrency", "4", "--duration", "200", "--output-p95", "1500")
    until(lambda: stopped_at_work(program, engine), "stopped while requests run")
    try:
        finding = find(program, "engine_hung")
        assert program("status", "chat")["state"] == "ready"  # /health does not show that the engine hangs
        assert finding["severity"] == "critical"
        assert "no answer" in finding["measures"][0]["value"]
    except BaseException:
        engine.resume()
        raise
    engine.kill()
    status = until(lambda: (now := program("status", "chat"))["state"] == "failed" and now, "failed")
    assert not psutil.pid_exists(server["pid"])
    found = status["diagnosis"]
    assert (status["exit"]["code"], found["cause"]) == (0, "engine_core_died"), "a failure despite exit code 0"
    assert "engine" in status["reason"].lower()
    assert "EngineDeadError" in found["evidence"]
    assert "dmesg" in found["fixes"][0]["why"]


def test_preemption_finding_and_its_fix(played):
    played(preemption)


def test_findings_for_prefixes_rejected_requests_and_stopped_engine(played):
    played(prefixes_and_a_stopped_engine)

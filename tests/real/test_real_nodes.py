"""One model on two machines, exported or started: two network namespaces with real vLLM in each.

Tests marked ``slow`` keep both cores busy for minutes; they only run with ``-m slow``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from fakes.keeper_bench import end_servers
from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.finding import Cause
from vllm_launchers.keeper import client, folders
from vllm_launchers.keeper.records import ServerRecord, State

pytestmark = pytest.mark.real
slow = pytest.mark.slow

ADDRESSES = ("10.77.0.1", "10.77.0.2")
SECONDS = 600
ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 4}).encode()
request = urllib.request.Request("http://127.0.0.1:8402" + sys.argv[1], body if "completions" in sys.argv[1] else None,
                                 {"Content-Type": "application/json"})
print(json.dumps([urllib.request.urlopen(request, timeout=120).status]))
"""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a pair of interfaces of the same names."""
    names = (f"vc{os.getpid()}a", f"vc{os.getpid()}b")
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "join", "netns", names[0], "type", "veth", "peer", "name", "join", "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "join")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", "join", "up")
        except OSError as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                ip("netns", "delete", name)


class Node:
    """One node, started from its exported script."""

    def __init__(self, machine: str, script: str, log: Path, environment: Mapping[str, str]) -> None:
        self.machine, self.log = machine, log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", machine, "sh", "-c", f"exec env {_one_line(script)}"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip

    def ask(self, path: str) -> bool:
        """Whether it responds with 200 on its machine."""
        words = ["ip", "netns", "exec", self.machine, sys.executable, "-c", ASK, path]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode == 0 and json.loads(done.stdout) == [200]

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def kill_worker(self) -> None:
        """SIGKILL to the process that computes."""
        kill_worker(self.process.pid)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def kill_worker(session: int) -> None:
    """SIGKILL to the process of a session that computes."""
    listed = subprocess.run(["ps", "-s", str(session), "-o", "pid=,args="], capture_output=True, text=True)
    (pid,) = (int(line.split()[0]) for line in listed.stdout.splitlines() if "VLLM::Worker" in line)
    os.kill(pid, signal.SIGKILL)


def _one_line(script: str) -> str:
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    return " ".join(line.removesuffix("\\") for line in lines)


def exported(vllm: Path, model: Path, flags: Sequence[str], rank: int, folder: Path) -> str:
    words = ["--vllm", str(vllm), "--model", str(model), "--nodes", "2", "--node-rank", str(rank), "--port", "8402"]
    words += ["--master-addr", ADDRESSES[0], "--set", "served-model-name=tiny", "--set", "max-num-seqs=4"]
    words += [word for flag in flags for word in ("--set", flag)]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_console", "--state", str(folder), "plan", "chatbot", *words, "--export", "shell"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@slow
def test_two_exported_nodes_serve_and_a_lost_node_ends_the_other(
    machines: tuple[str, str],
    real_vllm: Path,
    tiny_model: Path,
    real_env: Mapping[str, str],
    cpu_flags: Sequence[str],
    tmp_path: Path,
) -> None:
    nodes: list[Node] = []
    shared = {**os.environ, **real_env, "GLOO_SOCKET_IFNAME": "join"}
    del shared["VLLM_ENABLE_V1_MULTIPROCESSING"], shared["VLLM_WORKER_MULTIPROC_METHOD"]
    try:
        for rank, machine in enumerate(machines):
            script = exported(real_vllm, tiny_model, cpu_flags, rank, tmp_path)
            environment = {**shared, "VLLM_HOST_IP": ADDRESSES[rank]}
            nodes.append(Node(machine, script, tmp_path / f"{rank}.log", environment))
        first, second = nodes
        deadline = time.monotonic() + SECONDS
        while not first.ask("/health"):
            assert time.monotonic() < deadline, first.lines()[-30:]
            assert first.process.poll() is None, first.lines()[-30:]
            assert second.process.poll() is None, second.lines()[-30:]
            time.sleep(0.5)
        assert first.ask("/v1/completions")
        second.kill_worker()
        second.process.wait(SECONDS)
        assert first.ask("/health")  # it has not noticed yet, which is why readiness is not based on /health
        assert not first.ask("/v1/completions")
        first.process.wait(SECONDS)
        found = diagnose(first.lines())
        assert found.cause is Cause.ENGINE_DIED
        assert "Another rank died" in found.explanation
    finally:
        for node in nodes:
            node.end()


# -- started by the program -------------------------------------------------------------------------------------------


class Machine:
    """A machine with this program and its node."""

    def __init__(self, rank: int, namespace: str, root: Path, vllm: Path, environment: Mapping[str, str]) -> None:
        self.rank, self.namespace, self.root, self.vllm = rank, namespace, root / f"machine{rank}", vllm
        self.environment = {**environment, "VLLM_HOST_IP": ADDRESSES[rank], "GLOO_SOCKET_IFNAME": "join"}

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "vllm_console", "--state", str(self.root), *words]
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *program],
            capture_output=True, text=True, check=False, env=self.environment,
        )  # fmt: skip

    def start(self, model: Path, *flags: str) -> None:
        words = ["--vllm", str(self.vllm), "--model", str(model), "--nodes", "2", "--node-rank", str(self.rank)]
        words += ["--master-addr", ADDRESSES[0], "--port", "8402", "--name", "node"]
        words += [word for flag in ("served-model-name=tiny", "max-num-seqs=4", *flags) for word in ("--set", flag)]
        done = self.run("start", "chatbot", *words)
        assert done.returncode == 0, done.stderr

    def wait(self, state: State) -> ServerRecord:
        ended = (state, State.FAILED, State.STOPPED)
        record = client.wait_for(self.root, "node", lambda found: found.state in ended, SECONDS)
        assert record.state is state, (record.reason, self.log()[-30:])
        return record

    def log(self) -> list[str]:
        path = folders.server_folder(self.root, "node") / "server.log"
        return path.read_text(errors="replace").splitlines() if path.exists() else []

    def completes(self) -> bool:
        words = ["ip", "netns", "exec", self.namespace, sys.executable, "-c", ASK, "/v1/completions"]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0


@pytest.fixture
def started(
    machines: tuple[str, str], real_vllm: Path, real_env: Mapping[str, str], tmp_path: Path
) -> Iterator[tuple[Machine, Machine]]:
    """Two machines that can start nodes."""
    shared = {**os.environ, **real_env}
    del shared["VLLM_ENABLE_V1_MULTIPROCESSING"], shared["VLLM_WORKER_MULTIPROC_METHOD"]
    first, second = (Machine(rank, name, tmp_path, real_vllm, shared) for rank, name in enumerate(machines))
    try:
        yield first, second
    finally:
        for machine in (first, second):
            end_servers(machine.root)


@slow
def test_two_started_nodes_serve_and_end_together(
    started: tuple[Machine, Machine], tiny_model: Path, cpu_flags: Sequence[str], tmp_path: Path
) -> None:
    first, second = started
    flags = (*cpu_flags, "tensor-parallel-size=2")
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    first.start(tiny_model, *flags)
    second.start(other, *flags)
    refused = second.wait(State.FAILED)
    assert refused.reason == "node 1 and node 0 have different model configurations"
    assert refused.current.exit is not None
    assert diagnose(second.log()).cause is Cause.NODES_DIFFER
    second.start(tiny_model, *flags)
    assert first.wait(State.READY).current.warm_up is not None
    server = second.wait(State.READY).server
    assert server is not None
    assert first.completes()
    kill_worker(server.pid)
    ended = first.wait(State.FAILED)
    assert ended.reason.startswith("node 1 is gone: ")
    assert "node 1 is gone" in diagnose(first.log()).evidence
    second.wait(State.FAILED)


@slow
def test_killed_api_server_ends_all_processes_of_both_nodes(
    started: tuple[Machine, Machine], tiny_model: Path, cpu_flags: Sequence[str]
) -> None:
    for machine in started:
        machine.start(tiny_model, *cpu_flags, "tensor-parallel-size=2")
    sessions = []
    for machine in started:
        server = machine.wait(State.READY).server
        assert server is not None
        sessions.append(server.pid)
    os.kill(sessions[0], signal.SIGKILL)
    first, second = started
    assert "SIGKILL" in first.wait(State.FAILED).reason
    assert second.wait(State.FAILED).reason.startswith("node 0 is gone: ")
    for session in sessions:
        listed = subprocess.run(["ps", "-s", str(session), "-o", "args="], capture_output=True, text=True, check=False)
        assert not listed.stdout.strip()


@slow
def test_pipeline_stages_answer_health_but_are_never_ready(
    started: tuple[Machine, Machine], tiny_model: Path, cpu_flags: Sequence[str]
) -> None:
    for machine in started:
        machine.start(tiny_model, *cpu_flags, "pipeline-parallel-size=2", "tensor-parallel-size=1")
    first, second = started
    failed = first.wait(State.FAILED)
    assert failed.current.ready_at is None
    assert "/health answered" in failed.reason
    assert second.wait(State.FAILED).current.ready_at is None


def test_node_without_its_peer_fails_before_launch(
    started: tuple[Machine, Machine], tiny_model: Path, cpu_flags: Sequence[str]
) -> None:
    for machine, text in zip(started, ("node 1 did not join", "node 0 did not answer"), strict=True):
        machine.start(tiny_model, *cpu_flags, "tensor-parallel-size=2", "distributed-timeout-seconds=5")
        record = machine.wait(State.FAILED)
        assert record.reason.startswith(text)
        assert record.server is None

"""Workers on a Ray cluster: real vLLM with its own raylet, started, restarted, and failing.

Takes both cores for some minutes and a network namespace, so it only runs with ``-m slow`` and as root. vLLM refuses
Ray on the CPU; a plugin in the environment enables it (``environment/ray_on_cpu``).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fakes.keeper_bench import end_servers, until
from vllm_launchers import procfs
from vllm_launchers.keeper import client, folders, process_group, processes
from vllm_launchers.keeper.records import ProcessIdentity, ServerRecord, State

pytestmark = [pytest.mark.real, pytest.mark.slow]

BUILDER = Path(__file__).with_name("environment") / "ray_layer.py"
ADDRESS = "127.0.0.1:6390"
SECONDS = 900.0


@dataclass(frozen=True)
class Ray:
    """A one-node cluster with two fake GPUs, in a network namespace with only a loopback interface."""

    paths: Mapping[str, str]
    namespace: str
    environment: Mapping[str, str]
    state: Path
    scratch: Path
    """Ray's own folder; its path must be short, because it contains sockets."""

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["ip", "netns", "exec", self.namespace, *words]
        done = subprocess.run(command, env=dict(self.environment), capture_output=True, text=True, check=False)
        assert not (check and done.returncode), done.stdout + done.stderr
        return done

    def program(self, *words: str) -> Any:
        """JSON output of a command; a plan with errors exits with code 1."""
        own = [sys.executable, "-m", "vllm_console", "--state", str(self.state), *words, "--json"]
        return json.loads(self.run(*own, check=words[0] != "plan").stdout)

    def start(self) -> None:
        words = ["--head", "--num-gpus=2", "--num-cpus=2", "--port=6390", "--node-ip-address=127.0.0.1"]
        words += ["--include-dashboard=false", "--object-store-memory=80000000", f"--temp-dir={self.scratch}"]
        self.run(self.paths["ray"], "start", *words)

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        return [int(word) for word in listed.stdout.split()]

    def record(self) -> ServerRecord:
        return client.read(self.state, "onray")

    def both(self) -> list[ProcessIdentity]:
        """The two workers, once the keeper knows them: it polls again soon after the server is ready."""
        until(lambda: len(self.workers()) == 2, "the keeper's poll")
        return self.workers()

    def workers(self) -> list[ProcessIdentity]:
        """The workers known to the keeper."""
        members = process_group.recorded(folders.server_folder(self.state, "onray")).members
        return [one for one in members if processes.alive(one) and procfs.title(one.pid).startswith("ray::")]

    def ended(self, state: State = State.FAILED) -> Mapping[str, Any]:
        """The server's status, once it and its workers have ended."""
        workers = self.workers()
        client.wait_for(self.state, "onray", lambda record: record.state is state, SECONDS)
        assert not [one for one in workers if processes.alive(one)]
        found: Mapping[str, Any] = self.program("status", "onray")
        return found


@pytest.fixture
def ray(tmp_path: Path, real_environment: Mapping[str, str], real_env: Mapping[str, str]) -> Iterator[Ray]:
    cache = Path(real_environment["model"]).parent.parent
    built = subprocess.run([sys.executable, str(BUILDER), str(cache)], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"Ray cannot be installed here: {(built.stderr.strip() or 'no reason given').splitlines()[-1]}")
    namespace = f"vcray{os.getpid()}"
    for words in (["netns", "add", namespace], ["-n", namespace, "link", "set", "lo", "up"]):
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
    shared = {**os.environ, **real_env, "RAY_USAGE_STATS_ENABLED": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    shared["TORCHDYNAMO_DISABLE"] = (
        "1"  # Ray runs its workers with low priority: compiling a kernel at the first request takes minutes
    )
    del shared["VLLM_ENABLE_V1_MULTIPROCESSING"], shared["VLLM_WORKER_MULTIPROC_METHOD"]
    scratch = Path(tempfile.mkdtemp(prefix="ray-"))
    one = Ray(json.loads(built.stdout), namespace, shared, tmp_path / "state", scratch)
    try:
        one.start()
        yield one
    finally:
        end_servers(one.state)
        for pid in one.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not one.pids(), "the end of Ray")
        subprocess.run(["ip", "netns", "delete", namespace], check=False)
        shutil.rmtree(scratch, ignore_errors=True)
        left = Path(folders.server_folder(one.state, "onray")) / process_group.FILE
        for name in json.loads(left.read_text())["shared_memory"] if left.exists() else ():
            Path("/dev/shm", name).unlink(missing_ok=True)


def words(ray: Ray, model: Path, flags: Sequence[str], tensor: int = 2) -> list[str]:
    """A launch on the cluster. Starting needs ``--force``, since vLLM refuses the CPU without the plugin."""
    named = (*flags, "served-model-name=tiny", f"tensor-parallel-size={tensor}", "distributed-executor-backend=ray")
    sets = [word for flag in named for word in ("--set", flag)]
    vllm = ["--vllm", ray.paths["vllm"], "--model", str(model), "--env", f"RAY_ADDRESS={ADDRESS}"]
    return ["chatbot", *vllm, *sets]


def findings(plan: Mapping[str, Any]) -> dict[str, str]:
    return {one["code"]: one["message"] for one in plan["findings"] if one["code"].startswith("ray_")}


def test_ray_server_lifecycle(ray: Ray, tiny_model: Path, cpu_flags: Sequence[str], free_port: Any) -> None:
    launch = words(ray, tiny_model, cpu_flags)
    found = findings(ray.program("plan", *launch))
    assert found["ray_cluster"].startswith(f"the Ray cluster at {ADDRESS} has 2 GPUs (127.0.0.1 2), 2 free")
    assert "does not support ray" in found["ray_on_cpu"]
    assert "ray_gpus_too_few" in findings(ray.program("plan", *words(ray, tiny_model, cpu_flags, 4)))

    port = str(free_port())
    ray.program("start", *launch, "--name", "onray", "--port", port, "--wait", "--force")
    assert ray.record().current.warm_up is not None
    ray.both()
    ray.program("restart", "onray", "--set", "max-num-seqs=4", "--wait", "--force")
    assert ray.record().current.number == 2
    workers = ray.both()

    # Ray does not end an unresponsive worker; the keeper does.
    processes.send(workers[0], signal.SIGSTOP)
    processes.send(_of(ray.record()), signal.SIGKILL)
    assert "SIGKILL" in ray.ended()["reason"]

    ray.program("restart", "onray", "--wait", "--force")
    processes.send(ray.both()[0], signal.SIGKILL)
    assert "died unexpectedly" in ray.ended()["reason"]

    ray.program("restart", "onray", "--wait", "--force")
    ray.both()
    (raylet,) = [pid for pid in ray.pids() if procfs.title(pid) == process_group.RAYLET]
    os.kill(raylet, signal.SIGKILL)
    assert ray.ended()["reason"].startswith(f"Ray's raylet died (pid {raylet}); ")
    lost = {"ray_not_here", "ray_unreachable", "ray_gpus_too_few"}
    # Ray's control store takes a while to declare a node dead.
    until(lambda: findings(ray.program("plan", *launch)).keys() & lost, "the loss of the node in Ray's own state")


def _of(record: ServerRecord) -> ProcessIdentity:
    assert record.server is not None
    return record.server

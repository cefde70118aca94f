"""One model over two machines, as planned and exported: two network namespaces, real vLLM in each.

Both cores are busy for a minute: it runs only where ``VLLMCONSOLE_TEST_SLOW`` is set.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.finding import Cause

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not os.environ.get("VLLMCONSOLE_TEST_SLOW"), reason="slow: set VLLMCONSOLE_TEST_SLOW to run it"),
]

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
    """Two network namespaces, joined by a pair of interfaces of the same names."""
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
    """One machine's part, started from its exported script."""

    def __init__(self, machine: str, script: str, log: Path, environment: Mapping[str, str]) -> None:
        self.machine, self.log = machine, log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", machine, "sh", "-c", f"exec env {_one_line(script)}"],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip

    def ask(self, path: str) -> bool:
        """Whether it answers 200 on its own machine."""
        words = ["ip", "netns", "exec", self.machine, sys.executable, "-c", ASK, path]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        return done.returncode == 0 and json.loads(done.stdout) == [200]

    def lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def kill_worker(self) -> None:
        """SIGKILL to the process that computes."""
        listed = subprocess.run(["ps", "-s", str(self.process.pid), "-o", "pid=,args="], capture_output=True, text=True)
        (pid,) = (int(line.split()[0]) for line in listed.stdout.splitlines() if "VLLM::Worker" in line)
        os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _one_line(script: str) -> str:
    lines = [line for line in script.splitlines() if not line.startswith("#")]
    return " ".join(line.removesuffix("\\") for line in lines)


def exported(vllm: Path, model: Path, flags: Sequence[str], rank: int, folder: Path) -> str:
    """The script that ``plan`` exports for a node."""
    words = ["--vllm", str(vllm), "--model", str(model), "--nodes", "2", "--node-rank", str(rank), "--port", "8402"]
    words += ["--master-addr", ADDRESSES[0], "--set", "served-model-name=tiny", "--set", "max-num-seqs=4"]
    words += [word for flag in flags for word in ("--set", flag)]
    done = subprocess.run(
        [sys.executable, "-m", "vllm_console", "--state", str(folder), "plan", "chatbot", *words, "--export", "shell"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_exported_nodes_serve_together_and_one_that_is_lost_ends_the_other(
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
        assert first.ask("/health")  # it does not know yet, which is why "ready" is not /health
        assert not first.ask("/v1/completions")
        first.process.wait(SECONDS)
        found = diagnose(first.lines())
        assert found.cause is Cause.ENGINE_DIED
        assert "Another rank died" in found.explanation
    finally:
        for node in nodes:
            node.end()

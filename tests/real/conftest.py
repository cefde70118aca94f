"""Real vLLM on the CPU: its environment (built once), a tiny model, and servers that are always ended.

Where it is not available, the tests skip with the reason; with ``CI=true`` in the environment they fail instead.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from fakes import ports
from fakes.forked import Forked, Forks
from vllm_launchers.probe.environment import with_probe

BUILDER = Path(__file__).with_name("environment") / "build.py"
ENVIRONMENT = dict(os.environ)
"""The environment before tests set separate folders; all test runs share the cache."""

UNAVAILABLE = 3
"""The builder's exit code for an unsupported machine."""

IMPORTED = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
)
"""Modules that `forks` imports: everything that a server on the CPU needs."""

BUILD_SECONDS = 1800
READY_SECONDS = 600
"""Timeout for an overloaded machine; a dead server is noticed immediately."""
STOP_SECONDS = 30


@pytest.fixture(scope="session")
def real_environment() -> Mapping[str, str]:
    """Paths ``vllm``, ``python`` and ``model`` of the environment, which is built if missing."""
    done = subprocess.run(
        [sys.executable, str(BUILDER)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        env=ENVIRONMENT,
    )
    if done.returncode:
        reason = f"real vLLM is not available here: {(done.stderr.strip() or 'no reason given').splitlines()[-1]}"
        if done.returncode != UNAVAILABLE or os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    paths: dict[str, str] = json.loads(done.stdout)
    return paths


@pytest.fixture(scope="session")
def real_vllm(real_environment: Mapping[str, str]) -> Path:
    return Path(real_environment["vllm"])


@pytest.fixture(scope="session")
def tiny_model(real_environment: Mapping[str, str]) -> Path:
    """The folder of a model with random weights: 4,096 positions, a vocabulary of 375 tokens."""
    return Path(real_environment["model"])


@pytest.fixture(scope="session")
def real_env(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, str]:
    """Environment variables for a real server: offline, small, one thread per process, nothing in the home folder.

    Its engine is forked, which halves the startup time; tests of startup itself override this to spawn it, as vLLM
    does.
    """
    caches = tmp_path_factory.mktemp("vllm-caches")
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HOME": str(caches / "hf"),
        "VLLM_CACHE_ROOT": str(tiny_model.parent / "vllm-cache"),  # keeps model facts that the first use cached
        "VLLM_CONFIG_ROOT": str(caches / "vllm-config"),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "OMP_NUM_THREADS": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash in native code leaves a traceback in the log
    }


@pytest.fixture(scope="session")
def cpu_flags() -> list[str]:
    """Flags for ``--set`` that make a preset run on the CPU: a KV cache of 40 blocks of 32 tokens, no compilation."""
    return ["max-model-len=512", "block-size=32", "num-gpu-blocks-override=40", "enforce-eager=true"]


@dataclass(frozen=True, slots=True)
class RealServer:
    """A ``vllm serve`` that a test started, and its log."""

    url: str
    port: int
    process: subprocess.Popen[bytes] | Forked
    log: Path

    def log_lines(self) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()

    def wait_ready(self) -> None:
        """Wait until ``/health`` responds; fails with the end of the log if the server dies or takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        pytest.fail("the real server did not come up:\n" + "\n".join(self.log_lines()[-40:]))

    def wait_for(self, words: str) -> None:
        """Wait until the log contains these words; fails if the server dies or takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(words in line for line in self.log_lines()):
                return
            time.sleep(0.1)
        pytest.fail(f"never in the log: {words}:\n" + "\n".join(self.log_lines()[-40:]))

    def wait_exit(self) -> int:
        return self.process.wait(READY_SECONDS)

    def end(self) -> None:
        """End it and its children, which share a session whose id is the server's pid."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


StartServer = Callable[..., RealServer]


@pytest.fixture(scope="session")
def forks(real_environment: Mapping[str, str], real_env: Mapping[str, str]) -> Iterator[Forks]:
    """Runs programs in forks of a Python process that has imported vLLM once."""
    forks = Forks(real_environment["python"], {**os.environ, **real_env}, IMPORTED)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A function that returns a free port of 127.0.0.1."""
    return ports.free_port


@pytest.fixture(scope="session")
def start_for(
    real_vllm: Path,
    tiny_model: Path,
    real_env: Mapping[str, str],
    cpu_flags: Sequence[str],
    free_port: Callable[[], int],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[list[RealServer], Forks | None], StartServer]:
    """Make a `StartServer` that records started servers in a list; uses forks if given."""

    def make(servers: list[RealServer], forks: Forks | None) -> StartServer:
        folder = tmp_path_factory.mktemp("real-servers")
        numbers = itertools.count()

        def start(
            *words: str,
            port: int | None = None,
            model: Path | str = tiny_model,
            env: Mapping[str, str] | None = None,
            titled: bool = False,
        ) -> RealServer:
            port = port or free_port()
            flags = [word for flag in cpu_flags for word in _words(flag)]
            argv = [str(real_vllm), "serve", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1"]
            argv += ["--port", str(port), *flags, *words]
            log = folder / f"{next(numbers)}.log"
            process: subprocess.Popen[bytes] | Forked
            with log.open("wb") as output, Path(os.devnull).open("rb") as nothing:
                if forks is not None and not titled:
                    process = forks.start(argv, {**forks.environment, **(env or {})}, nothing, output, output)
                else:
                    process = subprocess.Popen(
                        argv,
                        stdin=nothing,
                        stdout=output,
                        stderr=output,
                        env={**os.environ, **real_env, **(env or {})},
                        start_new_session=True,
                    )
            server = RealServer(f"http://127.0.0.1:{port}", port, process, log)
            servers.append(server)
            return server

        return start

    return make


@pytest.fixture(scope="module")
def start_server(
    start_for: Callable[[list[RealServer], Forks | None], StartServer], forks: Forks
) -> Iterator[StartServer]:
    """Run ``vllm serve`` in a fork: ``start_server(*words, port=…, model=…, env=…)``; servers end with the module.

    Processes of a fork can't set their titles; with ``titled=True`` the server is started normally. ``words`` follow
    the CPU flags, so they win. Several threads may start servers.
    """
    servers: list[RealServer] = []
    yield start_for(servers, forks)
    for server in servers:
        server.end()


@pytest.fixture(scope="session")
def probed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `shared_server` with its probe records, like a keeper's folder."""
    return tmp_path_factory.mktemp("probed")


@pytest.fixture(scope="session")
def shared_server(
    start_for: Callable[[list[RealServer], Forks | None], StartServer], probed_folder: Path
) -> Iterator[RealServer]:
    """One server with the CPU flags, shared by all files whose tests only send requests."""
    server = start_for(_shared, None)(env=with_probe(os.environ, probed_folder))
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


_shared: list[RealServer] = []


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the shared server with the last test here, not with the session, because other tests' consoles would see
    it."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for server in _shared:
            server.end()


def _words(flag: str) -> list[str]:
    name, value = flag.split("=")
    return [f"--{name}"] if value == "true" else [f"--{name}", value]

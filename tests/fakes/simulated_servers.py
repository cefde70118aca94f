"""Engines in virtual time built from a command line, traffic, and a real server process."""

from __future__ import annotations

import asyncio
import atexit
import heapq
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import httpx
import pytest

from fakes.forked import Forked, Forks
from fakes.ports import free_port
from vllm_launchers.engine_model.core import Core, StepReport
from vllm_launchers.engine_model.scheduler import Request
from vllm_launchers.simulated.flags import parse_flags
from vllm_launchers.simulated.memory import MemoryPlan, plan_memory
from vllm_launchers.simulated.server import build_core
from vllm_launchers.simulated.settings import EngineSettings, Simulated, resolve_settings

DEADLINE = 120.0


@dataclass(slots=True)
class Simulation:
    """Result of :func:`simulate`: the sum of all step reports, and peak use of the KV cache."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    generated: int = 0
    preemptions: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    peak_usage: float = 0.0
    ttfts: list[float] = field(default_factory=list)
    itls: list[float] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)

    def add(self, report: StepReport, usage: float) -> None:
        self.steps += 1
        self.tokens += sum(share.count for share in report.batch.shares)
        self.generated += len(report.advanced)
        self.preemptions += report.batch.preempted
        self.cache_queries += report.batch.cache_queries
        self.cache_hits += report.batch.cache_hits
        self.peak_usage = max(self.peak_usage, usage)
        self.ttfts += report.ttfts
        self.itls += report.itls
        self.finished += report.finished


def simulate(core: Core, requests: Iterable[Request]) -> Simulation:
    """Run ``requests`` (each at its ``arrival``, in seconds) to completion in virtual time."""
    queue = [(request.arrival, index, request) for index, request in enumerate(requests)]
    heapq.heapify(queue)
    result = Simulation()
    now = 0.0
    while queue or core.busy:
        if not core.busy:
            now = max(now, queue[0][0])
        while queue and queue[0][0] <= now:
            core.scheduler.add(heapq.heappop(queue)[2])
        seconds = core.begin(now)
        usage = core.scheduler.pool.usage
        now += seconds
        result.add(core.finish(seconds, now), usage)
    result.seconds = now
    return result


@dataclass
class Lab:
    """The parsed command line, without a process."""

    settings: EngineSettings
    plan: MemoryPlan
    core: Core

    def run(self, requests: list[Request]) -> Simulation:
        return simulate(self.core, requests)


@pytest.fixture
def lab() -> Callable[..., Lab]:
    def build(line: str = "", *, model: str = "Qwen/Qwen3-8B-AWQ", **environment: str) -> Lab:
        args = parse_flags(["serve", model, *line.split()])
        settings = resolve_settings(args, Simulated.from_environment(environment))
        plan = plan_memory(settings)
        return Lab(settings, plan, build_core(settings, plan))

    return build


@pytest.fixture
def traffic() -> Callable[..., list[Request]]:
    """Poisson arrivals of requests with equal lengths; the first ``shared`` tokens of all prompts are the same."""

    def make(count: int, *, rate: float, prompt: int, output: int, shared: int = 0, seed: int = 1) -> list[Request]:
        rng = random.Random(seed)
        common = [rng.randrange(50_000) for _ in range(shared)]
        at, requests = 0.0, []
        for index in range(count):
            at += rng.expovariate(rate)
            tokens = common + [rng.randrange(50_000) for _ in range(prompt - shared)]
            requests.append(Request(str(index), tokens, output, output, arrival=at, seed=index))
        return requests

    return make


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@pytest.fixture
def quantile() -> Callable[[list[float], float], float]:
    return percentile


@dataclass
class Process:
    """A simulated server as a real process."""

    port: int
    popen: Forked
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self) -> int:
        return self.popen.wait(DEADLINE)

    def until(self, check: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not check():
            if time.monotonic() > end:
                raise AssertionError(f"not within {DEADLINE} s: {what}\n{self.text}")
            if self.popen.poll() is not None and not check():
                raise AssertionError(f"ended with {self.popen.returncode} before {what}\n{self.text}")
            time.sleep(0.02)

    def healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def ready(self) -> Process:
        self.until(self.healthy, "it answers /health")
        return self

    def metric(self, name: str) -> float:
        """The sum of all samples of a metric."""
        body = httpx.get(f"{self.url}/metrics").text
        return sum(
            float(line.rsplit(" ", 1)[1]) for line in body.splitlines() if line.startswith((name + "{", name + " "))
        )


IMPORTED = (
    "vllm_launchers.simulated.server",
    "vllm_launchers.simulated.startup",
    "uvicorn.loops.auto",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    "uvicorn.lifespan.on",
)


@cache
def _forks() -> Forks:
    """Starts servers in forks of a process that has imported their modules, since imports dominate the startup cost."""
    forks = Forks(sys.executable, os.environ, IMPORTED)
    atexit.register(forks.close)
    return forks


@dataclass
class Launcher:
    folder: Path
    started: list[Process] = field(default_factory=list)

    def __call__(self, *flags: str, model: str = "Qwen/Qwen3-8B-AWQ", port: int | None = None, **env: str) -> Process:
        port = port or free_port()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "SIMULATED_"))}
        environment |= {"SIMULATED_STARTUP_SECONDS": "0", **env}
        log = self.folder / f"{len(self.started)}.log"
        argv = ["-m", "vllm_launchers.simulated", "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
        with log.open("wb") as sink, Path(os.devnull).open("rb") as nothing:
            popen = _forks().start(argv, environment, nothing, sink, sink)
        process = Process(port, popen, log)
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            if process.popen.poll() is None:
                process.popen.send_signal(signal.SIGKILL)
            process.popen.wait(DEADLINE)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.end()


@pytest.fixture(scope="session")
def launcher_in() -> type[Launcher]:
    """Makes a launcher that keeps its logs in a folder."""
    return Launcher


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """One fast server for tests that only send requests."""
    launcher = Launcher(tmp_path_factory.mktemp("server"))
    yield launcher(
        "--max-model-len", "2048", "--served-model-name", "small", "other", "--enable-prompt-tokens-details",
        SIMULATED_SPEED="20",
    ).ready()  # fmt: skip
    launcher.end()


@pytest.fixture
def until() -> Callable[..., object]:
    async def wait(check: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not check():
                await asyncio.sleep(0.01)

    return wait

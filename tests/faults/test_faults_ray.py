"""Ray workers: children of a raylet that has no parent, next to workers of the user's other jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes.keeper_bench import FAKE, Bench, until
from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.fleet.gpus import roots
from vllm_launchers.keeper import client, process_group, processes
from vllm_launchers.keeper.records import ProcessIdentity, ServerRecord, State

TREE = FAKE.with_name("fake_tree.py")
SHARED = Path("/dev/shm")


class Ray:
    """A raylet with a worker of our server and one of another job. Both ignore SIGTERM; the raylet ends neither."""

    def __init__(self, root: Path) -> None:
        self.ours, self.theirs = SHARED / f"psm_{os.getpid()}_ours", SHARED / f"psm_{os.getpid()}_theirs"
        pids = root / "ray-pids"
        words = [sys.executable, "-S", str(TREE), "--pids", str(pids), "--raylet", f"{self.ours}:{self.theirs}"]
        self.raylet = subprocess.Popen(words, start_new_session=True)
        until(pids.exists, "the workers of Ray")
        self.worker, self.other = (_identity(int(pid)) for pid in pids.read_text().split())

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.raylet.pid, signal.SIGKILL)
        self.raylet.wait()
        for queue in (self.ours, self.theirs):
            queue.unlink(missing_ok=True)


def _identity(pid: int) -> ProcessIdentity:
    found = processes.identity(pid)
    assert found is not None
    return found


@pytest.fixture
def ray(bench: Bench) -> Iterator[Ray]:
    one = Ray(bench.root)
    yield one
    one.end()


def started(bench: Bench, ray: Ray, *, on_ray: bool = True) -> ServerRecord:
    """A server whose engine has the queue of one of the raylet's workers, and whose keeper has polled its group."""
    spec = bench.spec(ray=on_ray)
    words = ("--port", str(spec.port), "--pids", str(bench.root / "pids"), "--workers", "0", "--queue", str(ray.ours))
    bench.launch(type(spec)(**{**vars(spec), "argv": (sys.executable, "-S", str(TREE), *words)}))
    record = bench.wait(State.READY)
    until(lambda: len(members(bench)) == 2 + on_ray, "the keeper's poll")
    return record


def members(bench: Bench) -> frozenset[ProcessIdentity]:
    return process_group.recorded(bench.file("")).members


def test_ray_worker_is_found_only_through_its_queue(bench: Bench, ray: Ray) -> None:
    record = started(bench, ray)
    assert ray.worker in members(bench)
    assert ray.other not in members(bench)
    assert roots([record], bench.root)[ray.worker.pid] == "one"
    bench.stopped()
    assert not processes.alive(ray.worker)
    assert processes.alive(ray.other)
    assert ray.raylet.poll() is None


@pytest.mark.parametrize("gone", ["engine", "raylet", "server"])
def test_remaining_ray_worker_is_ended_with_server(bench: Bench, ray: Ray, gone: str) -> None:
    record = started(bench, ray)
    (engine,) = members(bench) - {record.server, ray.worker}
    if gone == "raylet":
        ray.raylet.kill()
        ray.raylet.wait()
    assert record.server is not None
    processes.send(record.server if gone == "server" else engine, signal.SIGKILL)
    failed = bench.wait(State.FAILED)
    assert not processes.alive(ray.worker)
    assert processes.alive(ray.other)
    assert failed.reason.startswith(f"Ray's raylet died (pid {ray.raylet.pid}); ") == (gone == "raylet")
    said = diagnose(bench.file("server.log").read_text().splitlines())
    assert (said.evidence == f"vllm-console: Ray's raylet died (pid {ray.raylet.pid})") == (gone == "raylet")
    assert ("(the raylet) ended" in said.explanation) == (gone == "raylet")
    assert f"sent SIGKILL (9) to pid {ray.worker.pid}" in bench.file("keeper.log").read_text()


def test_next_keeper_knows_ray_worker_after_kill(bench: Bench, ray: Ray) -> None:
    record = started(bench, ray)
    group = members(bench) - {ray.worker}
    bench.orphaned(record)
    for one in group:
        processes.send(one, signal.SIGKILL)
    bench.adopt()
    bench.until(lambda found: not found.state.alive)
    assert not processes.alive(ray.worker)
    assert processes.alive(ray.other)


def test_raylet_workers_are_ignored_without_ray_flag(bench: Bench, ray: Ray) -> None:
    started(bench, ray, on_ray=False)
    bench.stopped()
    assert processes.alive(ray.worker)
    assert processes.alive(ray.other)
    assert client.exists(bench.root, "one")

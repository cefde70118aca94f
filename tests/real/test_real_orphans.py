"""Processes of real vLLM are killed while it starts, serves and stops, with one worker and with two: no process is
left, and leftovers in shared memory are found and can be removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_console.fleet import leftovers
from vllm_launchers.host import shared_memory as shared_files
from vllm_launchers.keeper import client, folders, process_group, processes, wire
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity, ServerRecord, State

pytestmark = pytest.mark.real

SECONDS = 120.0
"""Timeout. An idle machine needs less than ten seconds; an overloaded one needed more than thirty."""
UP_SECONDS = 600.0
LAUNCH = """
import json, sys, time
from pathlib import Path
from vllm_launchers.keeper import client, folders, wire
from vllm_launchers.keeper.records import LaunchSpec
client.launch(Path(sys.argv[1]), sys.argv[2], wire.from_plain(LaunchSpec, json.load(sys.stdin)))
print("up", flush=True)
time.sleep(600)
"""


@dataclass(frozen=True)
class Case:
    """Which processes are killed in this order, and when; ``workers`` is the number of separate workers, 0 for none."""

    moment: str
    workers: int
    order: tuple[str, ...]


CASES = {
    "serving": Case("serving", 2, ("keeper", "tracker", "worker", "api", "engine", "worker2")),
    "stopping": Case("stopping", 0, ("api", "keeper")),
    "starting": Case("starting", 1, ("api",)),
    "starting-two": Case("starting", 2, ("keeper", "engine")),
}
KEPT = {name for name, case in CASES.items() if "keeper" not in case.order}
"""Cases in which the keeper cleans up."""


def wait(condition, what, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.25)  # four of these read the process table concurrently


@pytest.fixture
def spec_of(real_env, real_vllm, tiny_model, cpu_flags, free_port):
    """The launch spec of a case: real vLLM on a CPU with as many processes as possible."""

    def make(case: Case) -> LaunchSpec:
        port = free_port()
        argv = [str(real_vllm), "serve", str(tiny_model), "--host", "127.0.0.1", "--port", str(port)]
        for flag in cpu_flags:
            name, value = flag.split("=")
            argv += [f"--{name}"] if value == "true" else [f"--{name}", value]
        environment = {**real_env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if case.workers else "0"}
        if case.workers == 2:
            argv += ["--tensor-parallel-size", "2"]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
        return LaunchSpec(tuple(argv), "127.0.0.1", port, environment=environment)

    return make


@pytest.fixture
def family(tmp_path) -> Iterator[set[ProcessIdentity]]:
    """Every process ever seen; all are ended."""
    seen: set[ProcessIdentity] = set()
    before = set(Path("/dev/shm").iterdir())
    yield seen
    for record in client.list_records(tmp_path)[0]:
        seen.update(one for one in (record.keeper, record.server) if one)
        seen.update(process_group.recorded(folders.server_folder(tmp_path, record.name)).members)
    for one in seen:
        processes.send(one, signal.SIGKILL)
    # Processes killed during startup left files that no keeper has seen; these are offered after a minute.
    for file in shared_files.find(now=time.time() + 120.0, whole_machine=True).found:
        if Path(file.path).name.startswith("vllm_dist_") and Path(file.path) not in before:
            Path(file.path).unlink()


def tree(record: ServerRecord) -> dict[str, ProcessIdentity]:
    """The keeper and the server's processes by role (api, tracker, engine, worker, worker2) or by pid."""
    table = processes.table()
    found = {"keeper": record.keeper, "api": record.server}
    below = sorted(processes.descendants(table, [record.server.pid]))
    for pid in below:
        try:
            title = Path(f"/proc/{pid}/comm").read_text()
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        part = f"pid {pid}"
        if title.startswith("VLLM::EngineCor"):
            part = "engine"
        elif b"resource_tracker" in words:
            part = "tracker"
        elif title.startswith("VLLM::Worker") or b"spawn_main" in words:
            part = "worker2" if "worker" in found else "worker"
        found[part] = processes.identity_of(table[pid])
    return found


def play(root: Path, name: str, case: Case, spec: LaunchSpec, family: set[ProcessIdentity]) -> dict:
    """Launch it from a console that is killed immediately, and kill its processes at the given moment."""
    words = [sys.executable, "-c", LAUNCH, str(root), name]
    console = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    console.stdin.write(json.dumps(wire.to_plain(spec)).encode())
    console.stdin.close()
    assert console.stdout.readline() == b"up\n"
    os.killpg(console.pid, signal.SIGKILL)
    assert console.wait() == -signal.SIGKILL
    console.stdout.close()
    parts = {"keeper", "api", "engine", *("worker", "worker2")[: case.workers]} if case.workers else {"keeper", "api"}

    def come():
        record = client.read(root, name)
        assert record.state.alive, record.reason
        if case.moment != "starting" and record.state is not State.READY:
            return False  # the process table is long, so it is read only where needed
        there = tree(record)
        family.update(there.values())
        return parts <= there.keys()

    wait(come, f"{name}: {case.moment}", UP_SECONDS)
    home = folders.server_folder(root, name)
    if case.moment == "serving":
        wait(lambda: process_group.recorded(home).shared_memory, "the keeper's list of shared memory")
    if case.moment == "stopping":
        assert client.stop(root, name).state is State.STOPPING
    who, shared = tree(client.read(root, name)), dict(process_group.recorded(home).shared_memory)
    killed = [part for part in case.order if processes.send(who[part], signal.SIGKILL)]
    assert killed[0] == case.order[0], "the fault did not happen"
    return {"killed": killed, "family": [one for part, one in who.items() if part != "keeper"], "shared": shared}


def test_no_process_or_file_is_left(tmp_path, spec_of, family):
    specs = {name: spec_of(case) for name, case in CASES.items()}
    with ThreadPoolExecutor(len(CASES)) as pool:
        plays = pool.map(lambda name: play(tmp_path, name, CASES[name], specs[name], family), CASES)
        seen = dict(zip(CASES, plays, strict=True))
    assert {part for one in seen.values() for part in one["killed"]} >= {"keeper", "api", "engine", "worker", "tracker"}

    for name in CASES.keys() - KEPT:
        wait(lambda name=name: not client.keeper_alive(tmp_path, name), "the death of a keeper")
    words = [sys.executable, "-m", "vllm_console", "--state", str(tmp_path), "list", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    assert {view["name"] for view in json.loads(done.stdout) if view["ours"]} == CASES.keys()
    everybody = [one for play in seen.values() for one in play["family"]]
    assert len(everybody) >= 12
    for one in everybody:
        wait(lambda one=one: not processes.alive(one), f"the end of {one}")
    for name in CASES:
        record = client.wait_for(tmp_path, name, lambda record: not record.state.alive, 30)
        assert record.state is (State.STOPPED if name == "stopping" else State.FAILED), record.reason

    shared = seen["serving"]["shared"]
    there = {name for name in shared if Path("/dev/shm", name).exists()}
    assert there, "a server killed together with its resource tracker leaves shared memory"
    found = leftovers.find_leftovers(tmp_path)
    files = [file for file in found.files if Path(file.path).name in shared]
    assert {Path(file.path).name for file in files} == there
    removed = leftovers.remove_leftovers(tmp_path, leftovers.Leftovers(files=files))
    assert not removed.problems
    assert not any(Path("/dev/shm", name).exists() for name in shared)

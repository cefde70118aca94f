"""Real vLLM whose processes are killed with their keeper, in several orders: nothing of it is left on the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vllm_console.fleet import leftovers
from vllm_launchers.keeper import client, memory, processes
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity, ServerRecord, State

pytestmark = pytest.mark.real

SECONDS = 10.0
ORDERS = {
    "keeper-first": ("keeper", "api"),
    "engine-last": ("keeper", "worker", "api", "engine"),
}


def wait(condition, what, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s"
        time.sleep(0.1)


@pytest.fixture
def servers(tmp_path, real_env, real_vllm, tiny_model, cpu_flags, free_port) -> Iterator[dict[str, ServerRecord]]:
    """Servers with an engine and a worker each, started side by side, and ended for sure."""
    flags = [word for flag in cpu_flags for word in _words(flag)]

    def start(name):
        port = free_port()
        argv = (str(real_vllm), "serve", str(tiny_model), "--host", "127.0.0.1", "--port", str(port), *flags)
        environment = {**real_env, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        client.launch(tmp_path, name, LaunchSpec(argv, "127.0.0.1", port, environment=environment))
        return client.wait_for(
            tmp_path, name, lambda record: record.state is State.READY or not record.state.alive, 240
        )

    with ThreadPoolExecutor(len(ORDERS)) as pool:
        records = dict(zip(ORDERS, pool.map(start, ORDERS), strict=True))
    family = {one for record in records.values() for one in tree(record)}
    try:
        yield records
    finally:
        for one in (*family, *(record.keeper for record in records.values() if record.keeper)):
            processes.send(one, 9)


def _words(flag):
    name, value = flag.split("=")
    return [f"--{name}"] if value == "true" else [f"--{name}", value]


def tree(record) -> list[ProcessIdentity]:
    table = processes.table()
    pids = {record.server.pid} | processes.descendants(table, [record.server.pid])
    return [processes.identity_of(table[pid]) for pid in pids]


def named(record) -> dict[str, ProcessIdentity]:
    found = {"keeper": record.keeper, "api": record.server}
    for one in tree(record):
        title = Path(f"/proc/{one.pid}/comm").read_text()
        for part, words in (("engine", "VLLM::EngineCor"), ("worker", "VLLM::Worker")):
            if title.startswith(words):
                found[part] = one
    return found


def test_nothing_of_a_real_server_is_left(servers, tmp_path):
    families = {name: tree(record) for name, record in servers.items()}
    whole = {name: named(record) for name, record in servers.items()}
    assert all(record.state is State.READY for record in servers.values())
    assert all(set(parts) == {"keeper", "api", "engine", "worker"} for parts in whole.values()), whole

    def seen():
        return {name: memory.read(client.folder(tmp_path, name)) for name in ORDERS}

    wait(lambda: all(one.shared_memory for one in seen().values()), "the keepers' look at shared memory", 90)
    assert all(set(families[name]) <= one.members for name, one in seen().items())
    shared = seen()
    for name, order in ORDERS.items():
        for part in order:
            assert processes.send(whole[name][part], 9), f"{name}: the {part} was gone before it was killed"

    wait(lambda: not client.keeper_alive(tmp_path, "keeper-first"), "the death of a keeper")
    wait(lambda: not client.keeper_alive(tmp_path, "engine-last"), "the death of a keeper")
    done = subprocess.run(
        [sys.executable, "-m", "vllm_console", "--state", str(tmp_path), "list", "--json"],
        capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ),
    )  # fmt: skip
    assert {view["name"] for view in json.loads(done.stdout) if view["ours"]} == set(ORDERS)
    everybody = [one for family in families.values() for one in family]
    wait(lambda: not any(map(processes.alive, everybody)), "the end of all")
    for name in ORDERS:
        record = client.wait_for(tmp_path, name, lambda record: not record.state.alive, 30)
        assert record.state is State.FAILED

    recorded = {name for one in shared.values() for name in one.shared_memory}
    there = {name for name in recorded if Path("/dev/shm", name).exists()}
    assert there, "a SIGKILL leaves shared memory behind"
    found = leftovers.look(tmp_path)
    files = [file for file in found.files if Path(file.path).name in recorded]
    assert {Path(file.path).name for file in files} == there
    removed = leftovers.remove(tmp_path, leftovers.Leftovers(files=files))
    assert not removed.problems
    assert not any(Path("/dev/shm", name).exists() for name in recorded)

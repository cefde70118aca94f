"""A server's first process is prepared before the launch: launched at any step, or ended with its waiter."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.keeper_bench import PATIENCE, TUNING, Bench
from vllm_launchers.keeper import client, folders, processes
from vllm_launchers.keeper.prepared_launch import FirstStart, PreparedLaunch
from vllm_launchers.keeper.records import State

ACCEPTED = ({"say": {"step": "judged"}}, {"say": {"step": "accepted"}})
REFUSED = {"say": {"step": "refused", "message": "no such flag"}}


def prepare(bench, spec, *script, **tuning):
    words = (*spec.argv, "--prepared", json.dumps(script))
    start = FirstStart(folders.server_folder(bench.root, "one"), words, spec, {})
    return PreparedLaunch(start, {**TUNING, **tuning})


def process_of(prepared):
    """The identity of its process, once it has reported a step."""
    assert prepared.wait(PATIENCE, "judged", "imported")
    return processes.identity(prepared.pid)


def gone(process):
    try:
        descriptor = processes.open_pidfd(process)
    except ProcessLookupError:
        return True
    if descriptor is None:
        return True
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    ended = poller.poll(PATIENCE * 1000)
    os.close(descriptor)
    return bool(ended)


def test_prepared_process_becomes_the_server(bench: Bench):
    spec = bench.spec()
    prepared = prepare(bench, spec, {"print": "loading"}, *ACCEPTED)
    process = process_of(prepared)
    assert not client.exists(bench.root, "one"), "there is no server yet"
    launched = bench.launch(spec, prepared=prepared)
    assert launched.server == process
    after = bench.wait(State.READY)
    assert (after.server, after.keeper) == (process, launched.keeper)
    assert "loading" in bench.log()
    prepared.end()
    assert bench.stopped().exit.code == 0, "it is the keeper's child"


def test_ended_server_is_relaunched_from_prepared_process(bench: Bench):
    first = bench.ready(bench.spec())
    bench.stopped()
    spec = bench.spec(port=first.current.spec.port)
    prepared = prepare(bench, spec, *ACCEPTED)
    process = process_of(prepared)
    assert bench.restart(spec, prepared=prepared).server == process
    assert bench.wait(State.READY, generation=2).server == process


def test_launch_before_flags_are_checked(bench: Bench, tmp_path: Path):
    gate, spec = tmp_path / "gate", bench.spec()
    script = ({"say": {"step": "imported"}}, {"wait": str(gate)}, {"print": "judging"}, *ACCEPTED)
    prepared = prepare(bench, spec, *script)
    process = process_of(prepared)
    launched = bench.launch(spec, prepared=prepared)
    assert (launched.state, launched.server) == (State.STARTING, process)
    gate.touch()
    assert bench.wait(State.READY).server == process
    assert "judging" in bench.log()


def test_flags_rejected_after_launch_fail_with_server_message(bench: Bench, tmp_path: Path):
    gate, spec = tmp_path / "gate", bench.spec()
    script = ({"say": {"step": "imported"}}, {"wait": str(gate)}, {"print": "no such flag"}, REFUSED, {"exit": 2})
    prepared = prepare(bench, spec, *script)
    process = process_of(prepared)
    bench.launch(spec, prepared=prepared)
    gate.touch()
    after = bench.wait(State.FAILED)
    assert (after.exit.code, len(after.generations)) == (2, 1)
    assert "no such flag" in bench.log()
    assert gone(process)


@pytest.mark.parametrize("how", ["unprepared", "killed"])
def test_prepared_process_failing_after_launch_is_replaced(bench: Bench, tmp_path: Path, how: str):
    gate, spec = tmp_path / "gate", bench.spec()
    last = ({"say": {"step": "unprepared", "message": "replaced"}}, {"exit": 3})
    prepared = prepare(bench, spec, {"say": {"step": "imported"}}, {"wait": str(gate)}, *last)
    process = process_of(prepared)
    bench.launch(spec, prepared=prepared)
    if how == "killed":
        processes.send(process, signal.SIGKILL)
    gate.touch()
    after = bench.wait(State.READY)
    assert after.server != process
    assert (len(after.generations), after.attempt) == (1, 0)


def test_ended_prepared_process_falls_back_to_plain_launch(bench: Bench):
    spec = bench.spec()
    prepared = prepare(bench, spec, *ACCEPTED)
    process = process_of(prepared)
    processes.send(process, signal.SIGKILL)
    assert gone(process)
    assert bench.ready(spec, prepared=prepared).server != process


ASKS = """
import json, sys
from pathlib import Path
from vllm_launchers.keeper import wire
from vllm_launchers.keeper.prepared_launch import FirstStart, PreparedLaunch
from vllm_launchers.keeper.records import LaunchSpec
folder, words, spec = sys.argv[1:]
start = FirstStart(Path(folder), tuple(json.loads(words)), wire.from_plain(LaunchSpec, json.loads(spec)), {})
prepared = PreparedLaunch(start)
prepared.wait(60, "judged")
print(prepared.pid, flush=True)
sys.stdin.read()
"""


def test_prepared_process_ends_with_killed_console(bench: Bench):
    spec, folder = bench.spec(), folders.server_folder(bench.root, "one")
    words = json.dumps([*spec.argv, "--prepared", json.dumps(ACCEPTED)])
    command = [sys.executable, "-c", ASKS, str(folder), words, json.dumps(client.wire.to_plain(spec))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as console:
        process = processes.identity(int(console.stdout.readline()))
        console.kill()
    assert gone(process)


@pytest.mark.parametrize("how", ["left", "keeper killed", "too late"])
def test_prepared_process_ends_with_its_waiter(bench: Bench, how: str):
    prepared = prepare(bench, bench.spec(), *ACCEPTED, prepare=0.5 if how == "too late" else 300.0)
    process = process_of(prepared)
    if how == "left":
        prepared.end()
    elif how == "keeper killed":
        processes.send(processes.identity(processes.table()[process.pid].parent), signal.SIGKILL)
    assert gone(process)
    assert not client.exists(bench.root, "one")

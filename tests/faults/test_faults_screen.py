"""The screen never freezes: keys are pressed in a terminal while everything else hangs or floods."""

from __future__ import annotations

import os
import shutil
import statistics
import threading

import pytest

from fakes import key_presses as keys
from fakes.keeper_bench import PATIENCE
from vllm_console.fleet.local import LocalFleet
from vllm_console.history import store
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import State

PRESSES = 12


@pytest.fixture(scope="module")
def compiler():
    """The C compiler, needed for the stalled disk and the hanging driver; CI has one."""
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler: the stalled disk cannot be built")
        pytest.skip("no C compiler")
    return found


@pytest.fixture
def scene(tmp_path, terminal_module):
    made = keys.Scene(tmp_path, terminal_module)
    try:
        yield made
    finally:
        made.close()


def test_every_key_responds_under_every_fault(scene, compiler, tmp_path):
    """32 servers and a series of faults, some persistent: no key takes many times longer than without faults.

    The benchmark ``key_to_paint.py`` measures how much longer. All faults hang for seconds or forever, so a screen that
    waits for one of them takes hundreds of times longer.
    """
    box = scene.servers(32)
    environment = keys.stalling_environment(scene, keys.build_stalling(compiler, tmp_path))
    console = scene.console(env=environment)
    calm = keys.press(console, 2 * PRESSES)
    strange = [scene.strange_server(kind) for kind in keys.METRICS]

    waits = {"resizing": keys.press(console, PRESSES, 1, keys.resizing(console))}
    console.resize(120, 40)
    scene.order(box, "flood s00")
    scene.order(box, "flood s01")
    waits["a flooded log"] = keys.press(console, PRESSES, 2)
    for server in strange:
        keys.until_said(console, server, "asked")
    waits["strange metrics"] = keys.press(console, PRESSES, 3)
    with keys.stalled(scene):
        keys.until(console, scene.flag.with_name("stalled.met").exists)
        waits["a stalled disk"] = keys.press(console, PRESSES, 4)
    scene.order(box, "quiet")

    asked = tmp_path / "asked"
    library = keys.build(compiler, keys.HANGING_NVML, tmp_path / "libnvidia-ml.so.1")
    hung = scene.console(env={"LD_LIBRARY_PATH": str(library.parent), "NVML_ASKED": str(asked)})
    keys.until(hung, asked.exists)
    waits["a driver that hangs"] = keys.press(hung, PRESSES, 5)

    most = max(40 * statistics.median(calm), 10 * max(calm))
    assert {fault: max(found) for fault, found in waits.items() if max(found) > most} == {}, f"calm: {max(calm)}"
    assert most < keys.FROZEN_SECONDS, "this machine is too busy to tell"


def test_stop_is_not_blocked_by_hanging_poll_of_another_server(bench, monkeypatch):
    """The disk stalls under one server's history; stopping another server must not wait for it."""
    for name in ("one", "two"):
        bench.ready(bench.spec(), name)
    fleet = LocalFleet(bench.root, observe=False, interactive=True, gpus=False)
    assert [server.state for server in fleet.snapshot().servers] == [State.READY] * 2
    let_go, met, connected = threading.Event(), threading.Event(), store.HistoryFile._connected

    def stall(reader):
        if reader.path.parent.name == "two":
            met.set()
            let_go.wait(10 * PATIENCE)
        return connected(reader)

    monkeypatch.setattr(store.HistoryFile, "_connected", stall)
    polling = threading.Thread(target=fleet.snapshot)
    polling.start()
    try:
        assert met.wait(PATIENCE)
        assert fleet.stop("one").state in (State.STOPPING, State.STOPPED)
        bench.wait(State.STOPPED)
        assert polling.is_alive(), "the poll hung the whole time"
    finally:
        let_go.set()
        polling.join(PATIENCE)
        fleet.close()


def test_concurrent_verbs_and_polls_do_not_interfere(bench):
    for name in ("one", "two"):
        bench.ready(bench.spec(), name)
    fleet = LocalFleet(bench.root, observe=False, interactive=True, gpus=False)
    over, faults = threading.Event(), []

    def poll():
        try:
            while not over.wait(0.02):
                fleet.snapshot("one")
        except Exception as error:  # noqa: BLE001 - whatever goes wrong is a failure of the test
            faults.append(error)

    threads = [threading.Thread(target=poll) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name in ("one", "two"):
            fleet.stop(name)
            bench.wait(State.STOPPED, name)
            fleet.forget(name)
    finally:
        over.set()
        for thread in threads:
            thread.join(PATIENCE)
        fleet.close()
    assert faults == []
    assert client.names(bench.root) == []


@pytest.mark.parametrize("file", ["record.json", "server.log", "history.sqlite", "keeper.lock"])
def test_fifo_in_place_of_file_does_not_block(bench, file):
    """Opening a pipe without a writer blocks forever."""
    for name in ("one", "two"):
        bench.launch(bench.spec("--exit-after", "0", "--exit-code", "3"), name)
        bench.wait(State.FAILED, name)
    bench.until(lambda _: not client.keeper_alive(bench.root, "two"), "two")
    path = bench.file(file, "two")
    path.unlink(missing_ok=True)
    os.mkfifo(path, 0o600)
    fleet = LocalFleet(bench.root, observe=False, interactive=True, gpus=False)
    found = []
    polling = threading.Thread(target=lambda: found.append(fleet.snapshot("two")), daemon=True)
    polling.start()
    polling.join(PATIENCE)
    assert found, "the poll hangs"
    server = found[0].server("one")
    assert server is not None
    assert server.state is State.FAILED
    if file == "record.json":
        assert "record.json" in " ".join(found[0].notices)
    if file == "history.sqlite":
        assert "not a regular file" in found[0].server("two").notice
    fleet.close()

"""Faults at every file operation while stored data is written: readers then see the old or the new state."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fakes import tracing
from fakes.tracing import DONE, TOLD, strike
from vllm_console.alerts.notifier import FindingsLog
from vllm_console.history.store import HistoryReader, HistoryWriter
from vllm_console.metrics.sample import Sample
from vllm_console.runs.store import RunHead, RunStoreError
from vllm_console.runs.store import RunStore as Runs
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import client, errors, folders, processes, wire
from vllm_launchers.keeper.record_writer import Notes, RecordWriter
from vllm_launchers.keeper.records import Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.launcher import launch_lock
from vllm_launchers.vllm.startup_reports import StartupReportStore, remembered

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
MOST_STEPS = 1000


@dataclass(frozen=True)
class Kept:
    """Stored data: how to create the old state, write the new one, and read it."""

    old: Callable[[Path], object]
    act: Callable[[Path], int]
    read: Callable[[Path], Any]


def make_record() -> ServerRecord:
    spec = LaunchSpec(("vllm", "serve"), "127.0.0.1", 8000)
    return ServerRecord("one", State.READY, 1.0, 1.0, (Generation(1, spec, 1.0),), reason="x" * 9000)


def change_record(folder: Path) -> int:
    try:
        RecordWriter(folder, make_record(), Notes(folder)).change(insist=True, reason="new")
    except errors.UnwrittenError:
        return TOLD
    return DONE


def head(generation: int) -> RunHead:
    return RunHead(key=f"key-{generation}", server="one", generation=generation, started_at=float(generation))


def enter_run(folder: Path) -> int:
    try:
        Runs(folder / "runs.sqlite").enter([head(2), head(3)])
    except RunStoreError:
        return TOLD
    return DONE


def runs_of(folder: Path) -> list[int]:
    return sorted(run.generation for run in Runs(folder / "runs.sqlite").runs())


def record_history(folder: Path, at: float = 2.0) -> int:
    writer = HistoryWriter(folder / "history.sqlite")
    writer.append(Sample(at=at, engines={}))
    writer.close()
    return TOLD if writer.trouble else DONE


def history_of(folder: Path) -> list[float]:
    reader = HistoryReader(folder / "history.sqlite")
    try:
        return [entry.at for entry in reader.since(0)]
    finally:
        reader.close()


def remember(folder: Path, engine: str = "new") -> int:
    book = StartupReportStore(folder / "reports.json")
    if book.remember(remembered("m", "gpu", engine, {}, reported={"gib": 1.0}, predicted={})):
        return DONE
    return TOLD


def reports_of(folder: Path) -> list[str]:
    found = [entry.engine for entry in StartupReportStore(folder / "reports.json").entries()]
    assert not list(folder.glob("reports.json.damaged*"))
    return found


def find(folder: Path) -> int:
    log = FindingsLog(folder)
    assert log.mine() or log.trouble
    log.append({"code": "new"})
    return TOLD if log.trouble else DONE


def findings_of(folder: Path) -> list[str]:
    return [document["code"] for document in FindingsLog(folder).read()]


def launch_turn(folder: Path) -> int:
    try:
        with launch_lock(folder, timeout=0.0):
            (folder / "claimed").write_bytes(b"new")
    except (OperationError, OSError):
        return TOLD
    return DONE


def turns_of(folder: Path) -> str:
    with launch_lock(folder, timeout=0.0):  # a killed writer does not block others
        return "free"


KEPT = {
    "record": Kept(
        lambda f: folders.write_record(f, make_record()), change_record, lambda f: folders.read_record(f).reason
    ),
    "runs": Kept(lambda f: Runs(f / "runs.sqlite").enter([head(1)]), enter_run, runs_of),
    "history": Kept(lambda f: record_history(f, 1.0), record_history, history_of),
    "reports": Kept(lambda f: remember(f, "old"), remember, reports_of),
    "findings": Kept(lambda f: (f / "findings.log").write_text('{"code": "old"}\n'), find, findings_of),
    "launch lock": Kept(lambda f: (f / "launch.lock").touch(), launch_turn, turns_of),
}


@pytest.mark.parametrize("name", KEPT)
def test_kill_at_every_file_operation(tmp_path, name):
    """SIGKILL before each file-related system call."""
    kept, (old, new) = KEPT[name], old_and_new(tmp_path, KEPT[name])
    found = []
    for step in count():
        folder = fresh(tmp_path)
        struck = strike(lambda: kept.act(folder), step).struck  # noqa: B023 - run before the next turn
        found.append(kept.read(folder))
        assert found[-1] in (old, new), (step, found[-1])
        assert kept.act(folder) == DONE, "the next writer is not blocked"
        if not struck:
            break
    assert 4 <= step < MOST_STEPS
    assert found == sorted(found, key=[old, new].index), "the new record is never replaced by the old one"
    assert found[-1] == new


@pytest.mark.skipif(not tracing.X86, reason="system calls are made to fail on x86-64 only")
@pytest.mark.parametrize("name", KEPT)
def test_failure_of_every_file_operation(tmp_path, name):
    """In turn: full disk, exceeded quota, input/output error, read-only file system."""
    kept, (old, new) = KEPT[name], old_and_new(tmp_path, KEPT[name])
    reported = 0
    for step in count():
        folder = fresh(tmp_path)
        outcome = strike(lambda: kept.act(folder), step, ERRORS[step % len(ERRORS)])  # noqa: B023
        found = kept.read(folder)
        assert outcome.code in (DONE, TOLD), (step, "the error was not caught")
        assert found in (old, new), (step, found)
        assert outcome.code == TOLD or found == new, (step, "the error was not reported")
        reported += outcome.code == TOLD
        if not outcome.struck:
            break
    assert 2 <= step < MOST_STEPS
    assert reported


def old_and_new(tmp_path: Path, kept: Kept) -> tuple[Any, Any]:
    """The state before and after; leaves the old state as a template."""
    template = tmp_path / "template"
    template.mkdir()
    kept.old(template)
    folder = fresh(tmp_path)
    old = kept.read(folder)
    assert kept.act(folder) == DONE
    return old, kept.read(folder)


def fresh(tmp_path: Path) -> Path:
    folder = tmp_path / "one"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tmp_path / "template", folder)
    return folder


# -- several consoles on one server ------------------------------------------------------------------------------------

CONSOLE = """
import json, random, sys, time
from vllm_launchers.values import replace
from pathlib import Path
from vllm_launchers.keeper import client, wire, errors
from vllm_launchers.keeper.records import LaunchSpec

root, seed, turns = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spec, tuning = wire.from_plain(LaunchSpec, json.loads(sys.argv[4])), json.loads(sys.argv[5])
rng, reported = random.Random(seed), []
for number in range(turns):
    mine = replace(spec, details={"by": f"{seed}.{number}"})
    do = rng.choice(["launch", "launch", "restart", "restart", "stop", "stop", "remove", "adopt", "kill"])
    try:
        if do == "launch":
            client.launch(root, "one", mine, tuning=tuning)
        elif do == "restart":
            client.restart(root, "one", mine, tuning=tuning)
        elif do == "stop":
            client.stop(root, "one", tuning=tuning)
        elif do == "remove":
            client.remove(root, "one")
        elif do == "adopt":
            client.adopt_orphans(root, tuning=tuning)
        elif (keeper := client.read(root, "one").keeper) is not None:
            from vllm_launchers.keeper import processes
            processes.send(keeper, 9)
        reported.append([do, "", ""])
    except errors.KeeperError as error:
        reported.append([do, type(error).__name__, str(error)])
    time.sleep(rng.random() * 0.1)
print(json.dumps(reported))
"""
SEED, CONSOLES, TURNS = 20261121, 3, 12


def leaders(port: int) -> list[processes.ProcessIdentity]:
    """Running servers for a port: session leaders that have passed the gate."""
    found = []
    for pid, one in processes.table().items():
        if one.session == pid and one.running:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(port).encode() in words and any(word.endswith(b"fake_server.py") for word in words):
                found.append(processes.identity_of(one))
    return found


def test_concurrent_consoles_on_one_server(bench, port):
    """Launch, restart, stop, remove, adopt, and SIGKILL of its keeper; seeded."""
    spec, tuning = (
        bench.spec(port=port),
        {"stop_timeouts": {"interrupt": 0.5, "terminate": 0.5, "rest": 0.3, "kill": 5.0}},
    )
    words = [
        json.dumps(wire.to_plain(spec)),
        json.dumps({**tuning, "health_check_starting": 0.05, "health_check_ready": 0.1}),
    ]
    consoles = [
        subprocess.Popen(
            [sys.executable, "-c", CONSOLE, str(bench.root), str(SEED + number), str(TURNS), *words],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(CONSOLES)
    ]
    most, generations = 0, set()
    while any(console.poll() is None for console in consoles):
        running = leaders(port)
        bench.seen.update(running)
        most = max(most, len(running))
        with contextlib.suppress(errors.NoSuchServerError):
            generations.add(tuple(one.number for one in bench.read().generations))
        time.sleep(0.02)
    reported = [said for console in consoles for said in json.loads(console.communicate()[0])]

    assert len(reported) == CONSOLES * TURNS, "every request was answered"
    assert len({do for do, _, _ in reported}) == 6, "every action happened"
    assert {"", "NoSuchServerError"} < {kind for _, kind, _ in reported}
    known = {"", "NoSuchServerError", "NameTakenError", "StillAliveError", "KeeperError"}
    assert {kind for _, kind, _ in reported} <= known, reported
    assert all(text and "\n" not in text for _, kind, text in reported if kind)
    assert most <= 1, "two servers with one name would use a GPU twice"
    assert generations, "servers were launched, though on a busy machine each may live too shortly to be seen"
    for numbers in generations:
        assert list(numbers) == list(range(numbers[0], numbers[-1] + 1)), "no generation is missing"

    client.adopt_orphans(bench.root, tuning=tuning)
    if client.exists(bench.root, "one"):
        bench.until(lambda record: record.state in (State.READY, State.STOPPED, State.FAILED))
        bench.until(lambda record: record.state.alive == bool(leaders(port)))
        bench.stop()
        bench.until(lambda record: not record.state.alive)
    assert leaders(port) == []

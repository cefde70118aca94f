"""Invariants once a soak is idle, and once all its servers are stopped."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

from soak.schedule import SERVERS
from soak.world import World, digest, read_json
from vllm_launchers.host import shared_memory
from vllm_launchers.keeper import client, processes
from vllm_launchers.keeper.records import RestartMode, ServerRecord, State

REST_SECONDS = 900.0
"""A generous timeout for all running actions."""
GONE_SECONDS = 60.0
"""More than the guaranteed 10 s, because keepers on a busy machine take longer to write their last records."""
SERVING = (State.READY, State.UNRESPONSIVE)
"""An overloaded machine may make a server unresponsive for a while."""
UNSEEN = ("while no keeper watched", "no keeper was watching", "its keeper died before starting it")
"""Unobserved exits, whose cause is unknown: no restart follows."""
END_WORDS = ("gave up after", "not restarted")
"""Reasons why a server stays down despite its restart policy."""


def rest(world: World) -> dict[str, ServerRecord]:
    """Wait until no server is in transition; returns their records."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        world.command("list", "--json")  # like any console, it adopts servers whose keepers died
        records = {name: record for name in SERVERS if (record := world.record(name)) is not None}
        moving = [name for name, one in records.items() if not _at_rest(world, one)]
        if not moving:
            return records
        if time.monotonic() > deadline:
            for name in moving:
                one = records[name]
                world.journal.blame(f"{name} never came to rest: {one.state}, {one.reason}")
            return records
        time.sleep(1.0)


def _at_rest(world: World, record: ServerRecord) -> bool:
    if record.state in SERVING:
        return client.keeper_alive(world.state, record.name)
    return record.state in (State.STOPPED, State.FAILED) and record.next_attempt_at is None


def states(world: World, records: dict[str, ServerRecord]) -> None:
    """Every server is in the requested state or failed for an injected reason, and the commands report that."""
    told = {one["name"]: one for one in read_json(world.command("list", "--ours", "--json").out)}
    if set(told) != set(records):
        world.journal.blame(f"'list' tells of {sorted(told)}, there are {sorted(records)}")
    for name in SERVERS:
        record, wanted = records.get(name), world.journal.expected(name)
        if record is None:
            if "absent" not in wanted:
                world.journal.blame(f"{name} is gone, though it was to be {sorted(wanted)}")
            continue
        if name in told and State(told[name]["state"]).alive != record.state.alive:
            world.journal.blame(f"{name} is {record.state}, 'list' says {told[name]['state']}")
        _state(world, record, wanted)
        runs = processes.alive(record.server)
        if runs != record.state.alive:
            world.journal.blame(f"{name} is {record.state}, and its process {'runs' if runs else 'does not run'}")


def _state(world: World, record: ServerRecord, wanted: frozenset[str]) -> None:
    said = f"{record.name} is {record.state} ({record.reason}), though it was to be {sorted(wanted)}"
    match record.state:
        case State.READY | State.UNRESPONSIVE:
            if "running" not in wanted:
                world.journal.blame(said)
        case State.STOPPED:
            if not wanted & {"stopped", "absent"}:
                world.journal.blame(said)
        case State.FAILED:
            if not world.journal.injured(record.name, record.current.started_at, time.time()):
                world.journal.blame(f"{said}, and nothing of it was killed")
            restarts = record.current.spec.restart.mode is RestartMode.ON_FAILURE
            seen = record.exit is not None and not any(words in record.exit.reason for words in UNSEEN)
            if restarts and seen and not any(words in record.reason for words in END_WORDS):
                world.journal.blame(f"{said}, and it was to restart by itself")


def runs(world: World, records: dict[str, ServerRecord]) -> int:
    """Every unrequested exit has a cause, and ledger and records agree. Returns the number of runs."""
    found = [run for name in SERVERS for run in read_json(world.command("runs", name, "--json").out or "[]")]
    for run in found:
        end = run["exit"]
        if end is None or end["requested"]:
            continue
        if not world.journal.injured(run["server"], run["started_at"], run["ended_at"] + 1.0):
            world.journal.blame(f"{run['server']}@{run['generation']} ended by itself: {end['reason']}")
    for name, record in records.items():
        for generation in record.generations:
            same = [
                run
                for run in found
                if (run["server"], run["generation"]) == (name, generation.number)
                and record.created_at - 1.0 <= run["started_at"] <= generation.started_at + 0.01
            ]
            if len(same) != 1:
                world.journal.blame(f"{name}@{generation.number} stands {len(same)} times in the ledger")
                continue
            ended, told = generation.exit, same[0]["exit"]
            if (ended is None) != (told is None) or (ended and ended.reason != told["reason"]):
                world.journal.blame(f"{name}@{generation.number}: the record says {ended}, the ledger {told}")
    return len(found)


def files(world: World) -> int:
    """Files are complete, private and without secrets; only killed processes left temporary files.

    Returns the number of files.
    """
    seen = 0
    tops = [world.home / name / "vllm-console" for name in ("state", "config", "cache")]
    for path in (found for top in tops if top.exists() for found in (top, *top.rglob("*"))):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_mode & 0o077 and "config" not in path.parts:
                world.journal.blame(f"{path} is {status.st_mode & 0o777:o}")
            if path.name.startswith(".") and not _writer_was_killed(world, path):
                world.journal.blame(f"{path} is left of a write")
            if path.is_file():
                _look_into(world, path)
                seen += 1
    if crashes := list((world.state / "crashes").glob("*")):
        world.journal.blame(f"crash reports: {crashes[0].read_text()[:3000]}")
    return seen


def _writer_was_killed(world: World, path: Path) -> bool:
    """Whether it is a temporary file, ``.NAME.PID.RANDOM``, of a process that this soak killed."""
    pid = path.name.split(".")[-2]
    return pid.isdigit() and int(pid) in world.journal.killed


def _look_into(world: World, path: Path) -> None:
    data = path.read_bytes()
    for name, value in world.canaries.items():
        if value.encode() in data:
            world.journal.blame(f"{name} stands in {path}")
    if path.suffix == ".sqlite":
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as database:
            if (told := database.execute("PRAGMA integrity_check").fetchone()) != ("ok",):
                world.journal.blame(f"{path}: {told}")
    if path.name in ("keeper.log", "keeper.log.1"):
        for line in data.decode(errors="replace").splitlines():
            if "internal error in" in line or "Error" in line or "Traceback" in line:
                world.journal.blame(f"{path}: {line}")


def others(world: World) -> None:
    """No foreign process was signaled or received a changing request, and no foreign file changed."""
    notes = (world.home / "bystander").read_text().splitlines()
    if strange := [line for line in notes if line != "ready" and not line.startswith("GET ")]:
        world.journal.blame(f"somebody else's server was told {strange[:5]}")
    if not any(line.startswith("GET ") for line in notes):
        world.journal.blame("somebody else's server was never looked at: it proves nothing")
    for path, before in world.things.items():
        if digest(path) != before:
            world.journal.blame(f"{path} is somebody else's, and is not what it was")


def nothing_left(world: World) -> tuple[int, int]:
    """After all servers are stopped, no process is left, and `leftovers` finds none.

    Returns the number of shared memory files left by killed engines, and the number of them that `leftovers` lists. (In
    a container it lists only those that a keeper has seen.)
    """
    deadline = time.monotonic() + GONE_SECONDS
    while (left := world.ours()) and time.monotonic() < deadline:
        time.sleep(0.2)
    found = read_json(world.command("leftovers", "--json").out)
    if found["processes"]:
        world.journal.blame(f"leftovers: {found['processes']}")
    for pid, one in left.items():
        if processes.identity(pid) is not None:
            world.journal.blame(f"pid {pid} of {one.server or 'none'} is left: {one.words[:150]}")
    named = {file["path"] for file in found["files"]}
    if mine := named & {str(path) for path in world.things}:
        world.journal.blame(f"leftovers offers somebody else's {mine}")
    shared = [path for note in world.notes.glob("psm_*") if (path := Path("/dev/shm", note.name)).exists()]
    if shared_memory.sees_whole_machine():
        old = [path for path in shared if time.time() - path.stat().st_ctime > 2 * shared_memory.FRESH_SECONDS]
        if unnamed := [str(path) for path in old if str(path) not in named]:
            world.journal.blame(f"shared memory is left and not named: {unnamed}")
    return len(shared), sum(str(path) in named for path in shared)

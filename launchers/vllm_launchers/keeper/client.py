"""What a console calls: launch, restart, stop, read and adopt servers. Every call is short and stands alone.

A call that needs a keeper finds a living one by its socket, or takes the folder's lock and starts one; between the
two a keeper may end or begin, so such calls try again for a moment. Secrets travel over the socket or a pipe, never
in argv or in a file. A keeper that adopts knows only those that are in the environment of the console that starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import codec, credentials, errors, store
from vllm_launchers.keeper.errors import (
    KeeperError,
    NameTakenError,
    NewerRecordError,
    NoSuchServerError,
    RecordError,
    SilentError,
    StillAliveError,
    WaitTimeoutError,
)
from vllm_launchers.keeper.records import LaunchSpec, ServerRecord
from vllm_launchers.keeper.store import Stamp, default_root
from vllm_launchers.private import open_file

__all__ = [
    "KeeperError",
    "adopt",
    "adopt_orphans",
    "default_root",
    "exists",
    "folder",
    "keeper_alive",
    "launch",
    "list_records",
    "names",
    "read",
    "remove",
    "restart",
    "stamp",
    "stop",
    "wait_for",
]

Secrets = Mapping[str, str]
Options = Mapping[str, Any] | None
"""Overrides of the keeper's `Tuning` as plain JSON; consoles leave it alone."""

START_SECONDS = 60.0
RETRY_SECONDS = 10.0
READ_SECONDS = 2.0
OLD = "this may be old: its keeper cannot write its record, and does not answer"


def folder(root: Path, name: str) -> Path:
    """The folder of a server, whether it exists or not. Raises `BadNameError`."""
    return store.server_folder(root, name)


def exists(root: Path, name: str) -> bool:
    """Whether there is a record of that name. Raises `BadNameError`."""
    return stamp(root, name) is not None


def stamp(root: Path, name: str) -> Stamp | None:
    """Changes whenever the record does, for one ``stat``; None where there is no record."""
    return store.stamp(folder(root, name))


def names(root: Path) -> list[str]:
    """The names of all servers that have a record, sorted."""
    try:
        entries = [entry.name for entry in os.scandir(store.servers_folder(root))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeeperError(f"{store.servers_folder(root)} cannot be read: {error.strerror}") from error
    return sorted(name for name in entries if store.NAME.fullmatch(name) and exists(root, name))


def read(root: Path, name: str) -> ServerRecord:
    """The record of a server; from its keeper where the file lags behind what that knows (a full disk).

    Where that does not answer either, the record's reason says that it is old. Raises `NoSuchServerError`,
    `RecordError`, `NotOursError`.
    """
    home = folder(root, name)
    if not store.lags(home):
        return store.read_record(home)
    with contextlib.suppress(SilentError):
        if (told := _ask(home, {"do": "read"}, READ_SECONDS)) is not None:
            return told
    record = store.read_record(home)
    return replace(record, reason=OLD) if store.lags(home) else record


def list_records(root: Path) -> tuple[list[ServerRecord], list[str]]:
    """All records that can be read, sorted by name, and a sentence for each one that cannot."""
    records, problems = [], []
    for name in names(root):
        try:
            records.append(read(root, name))
        except NoSuchServerError:
            continue  # removed this instant
        except KeeperError as error:
            problems.append(f"server {name}: {error}")
    return records, problems


def keeper_alive(root: Path, name: str) -> bool:
    """Whether a keeper holds this server now."""
    return store.lock_is_held(folder(root, name))


def launch(
    root: Path, name: str, spec: LaunchSpec, secrets: Secrets | None = None, *, tuning: Options = None
) -> ServerRecord:
    """Start a new server; returns once its process runs (``starting``), or could not be started (``failed``).

    Raises `NameTakenError`, `SecretMissingError`, `BadNameError`, `NotOursError`.
    """
    given = credentials.complete(spec, secrets or {}, os.environ)
    with _on_disk(folder(root, name)):
        home = store.prepare(root, name)
        if store.stamp(home) is not None:
            raise NameTakenError(f"a server named {name} is there already; restart it, or remove it first")
        lock = store.take_lock(home)
    if lock is None:
        raise NameTakenError(f"a server named {name} is being started by another console")
    with _held(lock):
        if store.stamp(home) is not None:
            raise NameTakenError(f"a server named {name} was just started by another console")
        return _start_keeper(home, lock, {"do": "launch", "spec": codec.to_plain(spec), "secrets": given}, tuning)


def restart(
    root: Path, name: str, spec: LaunchSpec, secrets: Secrets | None = None, *, tuning: Options = None
) -> ServerRecord:
    """Start the next generation with this spec, after stopping what runs; returns once that is accepted.

    Raises `NoSuchServerError`, `SecretMissingError`, `RecordError`.
    """
    request = {
        "do": "restart",
        "spec": codec.to_plain(spec),
        "secrets": credentials.known(spec, secrets or {}, os.environ),
    }
    return _ask_or_start(root, name, request, tuning, lambda: credentials.complete(spec, secrets or {}, os.environ))


def stop(root: Path, name: str, *, tuning: Options = None) -> ServerRecord:
    """Stop a server; returns once that is accepted. One that has ended is left as it is. Raises `NoSuchServerError`."""
    return _ask_or_start(root, name, {"do": "stop"}, tuning)


def adopt(root: Path, name: str, *, tuning: Options = None) -> bool:
    """Start a keeper for this server if its own has died; whether that was done. Another console's win is no error.

    Raises `NoSuchServerError`, `RecordError`, and `KeeperError` when the keeper cannot be started.
    """
    return read(root, name).needs_keeper and _adopt(folder(root, name), tuning)


def adopt_orphans(root: Path, *, tuning: Options = None) -> list[str]:
    """Start a keeper for each server whose own has died; returns their names. Another console's win is no error.

    Raises `KeeperError` when a keeper cannot be started, after all others were tried.
    """
    adopted, problems = [], []
    for record in list_records(root)[0]:
        try:
            if record.needs_keeper and _adopt(folder(root, record.name), tuning):
                adopted.append(record.name)
        except KeeperError as error:
            problems.append(f"server {record.name} could not be adopted: {error}")
    if problems:
        raise KeeperError("; ".join(problems))
    return adopted


def remove(root: Path, name: str) -> None:
    """Delete all that is kept of a server that has ended: record, logs, history.

    Raises `NoSuchServerError`, `StillAliveError`.
    """
    import shutil

    from vllm_launchers.keeper import orphans

    home = folder(root, name)
    if not home.is_dir():
        raise NoSuchServerError(f"there is no server named {name}")
    store.check_own_folder(home)
    told = None
    with _on_disk(home):
        lock = store.take_lock(home)
        if lock is None and store.lags(home):  # its keeper may stay only because the record cannot be written
            told = _ask(home, {"do": "forget"})
            lock = store.take_lock(home, patience=RETRY_SECONDS)
    if lock is None:
        raise StillAliveError(f"{name} is still held by its keeper; stop it first")
    with _held(lock):
        if told is None and _may_run(root, name):
            raise StillAliveError(f"{name} has not been stopped (its keeper died); stop it first")
        if left := orphans.left_of(home):
            pids = ", ".join(map(str, left))
            raise StillAliveError(f"processes of {name} still run (pid {pids}); 'vllm-console leftovers' shows them")
        # Out of sight in one step, so that nobody meets a half-deleted server.
        grave = home.with_name(f".removed-{name}-{os.getpid()}-{time.monotonic_ns()}")
        with _on_disk(home):
            home.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)


def _may_run(root: Path, name: str) -> bool:
    """Whether a server without keeper may run. A broken record says nothing; a newer one must not be judged."""
    try:
        return read(root, name).state.alive
    except NewerRecordError:
        raise
    except (RecordError, NoSuchServerError):
        return False


def wait_for(
    root: Path, name: str, predicate: Callable[[ServerRecord], bool], timeout: float, *, poll: float = 0.05
) -> ServerRecord:
    """Wait until a record fulfils something; returns it. Raises `WaitTimeoutError`, `NoSuchServerError`."""
    deadline = time.monotonic() + timeout
    seen: Stamp | None = None
    record = read(root, name)
    while not predicate(record):
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(f"{name} is still {record.state} after {timeout:g} s")
        time.sleep(poll)
        now = stamp(root, name)
        if now != seen:
            record, seen = read(root, name), now
    return record


def _ask_or_start(
    root: Path,
    name: str,
    request: dict[str, Any],
    tuning: Options,
    fresh_secrets: Callable[[], dict[str, str]] | None = None,
) -> ServerRecord:
    """Have the living keeper do it; where there is none, start one (adopting what still runs)."""
    home = folder(root, name)
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        record = read(root, name)
        answer = _ask(home, request)
        if answer is not None:
            return answer
        if not record.needs_keeper and request["do"] == "stop" and not keeper_alive(root, name):
            return read(root, name)
        with _on_disk(home):
            lock = store.take_lock(home)
        if lock is not None:
            with _held(lock):
                if read(root, name).needs_keeper:
                    _start_keeper(home, lock, {"do": "adopt", "secrets": request.get("secrets")}, tuning)
                elif request["do"] == "restart":
                    secrets = fresh_secrets() if fresh_secrets else {}
                    return _start_keeper(home, lock, {**request, "secrets": secrets}, tuning)
        if time.monotonic() >= deadline:
            raise KeeperError(f"the keeper of {name} does not answer; see {home / 'keeper.log'}")
        time.sleep(0.02)


def _ask(home: Path, request: Mapping[str, Any], seconds: float | None = None) -> ServerRecord | None:
    """Ask the living keeper; None where there is none, or where it is just ending."""
    from vllm_launchers.keeper import wire

    try:
        answer = wire.ask(home, request, seconds or wire.ANSWER_SECONDS)
    except wire.UnreachableError:
        return None
    except SilentError as error:
        raise SilentError(_why_silent(home) or str(error)) from error
    return None if answer.get("gone") else _record(answer)


def _why_silent(home: Path) -> str:
    """Where a signal has stopped a keeper, a sentence that says how it goes on; else empty."""
    from vllm_launchers.keeper import processes

    try:
        keeper = store.read_record(home).keeper
    except KeeperError:
        return ""
    if keeper is None or not processes.is_stopped(keeper):
        return ""
    return (
        f"the keeper of {home.name} was stopped by a signal (pid {keeper.pid}) and cannot answer: "
        f"let it go on with 'kill -CONT {keeper.pid}'; nothing was done, and until then nobody writes its server's log"
    )


def _adopt(home: Path, tuning: Options) -> bool:
    if store.lock_is_held(home):
        return False
    with _on_disk(home):
        lock = store.take_lock(home, patience=0.0)
    if lock is None:
        return False
    with _held(lock):
        if not store.read_record(home).needs_keeper:
            return False
        _start_keeper(home, lock, {"do": "adopt"}, tuning)
    return True


def _start_keeper(home: Path, lock: int, order: Mapping[str, Any], tuning: Options) -> ServerRecord:
    """Start a keeper that takes over the lock; returns the record it begins with."""
    import subprocess

    program = Path(__file__).with_name("__main__.py")
    with _on_disk(home):
        notes = open_file(home / "keeper.log", os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), str(home.absolute()), str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=notes,
            pass_fds=(lock,),
        )
        output, _ = process.communicate(json.dumps({**order, "tuning": tuning}).encode(), timeout=START_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise KeeperError(f"the keeper of {home.name} did not begin within {START_SECONDS:g} s") from error
    except OSError as error:
        raise KeeperError(f"no keeper can be started with {sys.executable}: {error.strerror}") from error
    finally:
        os.close(notes)
    try:
        return _record(json.loads(output))
    except ValueError as error:
        raise KeeperError(f"the keeper of {home.name} ended before it began; see {home / 'keeper.log'}") from error


def _record(answer: Mapping[str, Any]) -> ServerRecord:
    """The record in an answer. Raises the error that stands there instead."""
    if "error" in answer:
        kind = getattr(errors, str(answer["error"]), KeeperError)
        raise kind(str(answer.get("message")))
    return codec.record_of(answer.get("record"))


@contextlib.contextmanager
def _held(lock: int) -> Iterator[None]:
    """Let go of our copy of the lock; a keeper that was started meanwhile holds its own."""
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _on_disk(home: Path) -> Iterator[None]:
    """What the file system refuses, in a sentence: a full disk, a read-only one, rights that are missing."""
    try:
        yield
    except OSError as error:
        raise KeeperError(f"{error.filename or home} cannot be used: {error.strerror or error}") from error

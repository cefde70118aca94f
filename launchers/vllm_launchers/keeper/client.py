"""The console's interface: launch, restart, stop, read and adopt servers. Every call is short and independent.

A call that needs a keeper finds a living one by its socket, or takes the folder's lock and starts one. A keeper may end
or start in between, so such calls retry for a moment. Secrets travel over the socket or a pipe, never in argv or in a
file. A keeper that adopts a server knows only the secrets in the environment of the console that starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_launchers.keeper import errors, folders, wire
from vllm_launchers.keeper.errors import (
    ElsewhereError,
    KeeperError,
    NameTakenError,
    NewerRecordError,
    NoSuchServerError,
    RecordError,
    SilentError,
    StillAliveError,
    WaitTimeoutError,
)
from vllm_launchers.keeper.files import KEEPER_LOG
from vllm_launchers.keeper.folders import Stamp
from vllm_launchers.keeper.records import LaunchSpec, Recording, ServerRecord
from vllm_launchers.private import open_file
from vllm_launchers.units import natural_key
from vllm_launchers.values import replace

if TYPE_CHECKING:
    from vllm_launchers.keeper.prepared_launch import PreparedLaunch

Secrets = Mapping[str, str]
Options = Mapping[str, Any] | None
"""Overrides of the keeper's `Tuning` as plain JSON; consoles leave it unset."""

START_SECONDS, END_SECONDS = 60.0, 5.0
"""Time limits for the answer of a new keeper, and for the end of one that was killed because it did not answer."""
RETRY_SECONDS = 10.0
READ_SECONDS = 2.0
POLL_SECONDS = 0.05
STALE = "may be out of date: its keeper can't write the record and does not answer"


def exists(root: Path, name: str) -> bool:
    """Whether a record with that name exists. Raises `BadNameError`."""
    return folders.has_record(folders.server_folder(root, name))


def stamp(root: Path, name: str) -> Stamp | None:
    """A value that changes whenever the record does, at the cost of one ``stat``; None if there is no record."""
    return folders.stamp(folders.server_folder(root, name))


def names(root: Path) -> list[str]:
    """The names of all servers that have a record, sorted."""
    home = str(folders.servers_folder(root))  # called every second: a Path for each name would cost more
    try:
        entries = os.listdir(home)  # noqa: PTH208
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeeperError(f"{home} can't be read: {error.strerror}") from error
    found = [name for name in entries if folders.NAME.fullmatch(name) and folders.has_record(f"{home}/{name}")]
    return sorted(found, key=natural_key)


def read(root: Path, name: str) -> ServerRecord:
    """The record of a server, read from its keeper if the file is stale (a full disk).

    If the keeper does not answer either, the record's reason says that it may be out of date. Raises
    `NoSuchServerError`, `RecordError`, `NotOursError`.
    """
    home = folders.server_folder(root, name)
    if not folders.is_stale(home):
        return folders.read_record(home)
    with contextlib.suppress(SilentError):
        if (record := _ask(home, {"do": "read"}, READ_SECONDS)) is not None:
            return record
    record = folders.read_record(home)
    return replace(record, reason=STALE) if folders.is_stale(home) else record


def list_records(root: Path) -> tuple[list[ServerRecord], list[str]]:
    """All readable records, sorted by name, and a sentence for each unreadable one."""
    records, problems = [], []
    for name in names(root):
        try:
            records.append(read(root, name))
        except NoSuchServerError:
            continue  # just removed
        except KeeperError as error:
            problems.append(f"server {name}: {error}")
    return records, problems


def keeper_alive(root: Path, name: str) -> bool:
    """Whether a keeper holds this server now, by its lock or, if that was lost, by its process."""
    return _has_keeper(folders.server_folder(root, name))


def elsewhere(root: Path, record: ServerRecord) -> str:
    """Where a server runs if it can't be judged or controlled from here (``on HOST, …``); empty if it can."""
    from vllm_launchers.keeper import location

    return "" if location.is_here(record) else location.elsewhere(folders.server_folder(root, record.name), record)


def refuse_elsewhere(root: Path, record: ServerRecord) -> None:
    """Raise `ElsewhereError` if a server runs on another machine or in another container."""
    if place := elsewhere(root, record):
        raise ElsewhereError(
            f"{record.name} runs {place}: control it from there. If that place no longer exists, delete "
            f"{folders.server_folder(root, record.name)}"
        )


def keeper_silence(record: ServerRecord) -> str:
    """How to resume a server's keeper that a signal stopped, as a sentence; empty if it is not stopped."""
    from vllm_launchers.keeper import location, processes

    keeper = record.keeper
    if keeper is None or not location.is_here(record) or not processes.is_stopped(keeper):
        return ""
    return (
        f"the keeper of {record.name} was stopped by a signal: resume it with 'kill -CONT {keeper.pid}'; "
        "until then it does nothing, and the server's output is kept but not logged"
    )


def refuse_running(record: ServerRecord) -> None:
    """Raise an error that says how to stop a server that has not ended: `StillAliveError`, or `SilentError` if a signal
    has stopped its keeper."""
    if why := keeper_silence(record):
        raise SilentError(f"no action taken: {why}")
    if record.needs_keeper:
        raise StillAliveError(f"{record.name} has not ended yet: stop it first")


def launch(
    root: Path,
    name: str,
    spec: LaunchSpec,
    secrets: Secrets | None = None,
    *,
    recording: Recording | None = None,
    prepared: PreparedLaunch | None = None,
    tuning: Options = None,
) -> ServerRecord:
    """Start a new server; returns once its process runs (``starting``) or could not be started (``failed``).

    ``recording``: what a simulated server continues from. ``prepared``: a keeper that has prepared exactly this start.
    Raises `NameTakenError`, `SecretMissingError`, `BadNameError`, `NotOursError`.
    """
    from vllm_launchers.keeper.context import complete_secrets

    given = complete_secrets(spec, secrets or {}, os.environ)
    with _on_disk(folders.server_folder(root, name)):
        home = folders.prepare(root, name)
        if folders.stamp(home) is not None:
            raise NameTakenError(f"server {name} already exists; restart it, or remove it first")
        lock = _take_lock(home)
    if lock is None:
        raise NameTakenError(f"server {name} is being started by another console")
    with _held(lock):
        if folders.stamp(home) is not None:
            raise NameTakenError(f"server {name} was just started by another console")
        request = {"do": "launch", "spec": wire.to_plain(spec), "secrets": given, "recording": wire.to_plain(recording)}
        return _start_keeper(home, lock, request, tuning, prepared)


def refuse_lost(root: Path, name: str) -> None:
    """Raise `NameTakenError` if a server of that name runs whose folder was deleted: in a new folder, its keeper would
    write its own record.
    """
    from vllm_launchers.keeper import folder_claim, orphans

    home = folders.server_folder(root, name)
    if not home.exists() and (folder_claim.keepers_of(home) or orphans.left_of(home)):
        ends = folders.command_text(root, "leftovers --remove")
        raise NameTakenError(
            f"server {name} still runs, but its folder was deleted: end it with {ends}, or choose another name"
        )


def restart(
    root: Path,
    name: str,
    spec: LaunchSpec,
    secrets: Secrets | None = None,
    *,
    prepared: PreparedLaunch | None = None,
    tuning: Options = None,
) -> ServerRecord:
    """Stop what runs and start the next generation with this spec; returns once the request is accepted.

    A ready server whose spec can be prepared keeps serving until that is done; the record's ``preparation`` shows the
    progress. It is canceled when this process ends. ``prepared``: a keeper that has prepared exactly this start, for a
    server that has ended. Raises `NoSuchServerError`, `SecretMissingError`, `RecordError`.
    """
    from vllm_launchers.keeper import processes
    from vllm_launchers.keeper.context import complete_secrets, known_secrets

    given = secrets or {}
    known = known_secrets(spec, given, os.environ)
    console = wire.to_plain(processes.identity(os.getpid()))
    request = {"do": "restart", "spec": wire.to_plain(spec), "secrets": known, "console": console}
    return _ask_or_start(root, name, request, tuning, lambda: complete_secrets(spec, given, os.environ), prepared)


def cancel(root: Path, name: str) -> ServerRecord:
    """Cancel the preparation of a restart, or going to sleep while the server still serves; it keeps serving.

    Raises `NoSuchServerError`, `NotPreparingError` if there is nothing to cancel or the server is already being stopped
    for the restart, and `KeeperError` if its keeper can't be reached.
    """
    refuse_elsewhere(root, read(root, name))
    answer = _ask(folders.server_folder(root, name), {"do": "cancel"})
    if answer is None:
        if keeper_alive(root, name):
            raise KeeperError(f"{name}: its keeper could not be reached; nothing was canceled")
        raise errors.NotPreparingError(f"{name}: no restart is being prepared; nothing was canceled")
    return answer


def sleep(root: Path, name: str, level: int, drain_seconds: float, *, tuning: Options = None) -> ServerRecord:
    """Let a server finish its requests, then put it to sleep; returns once the request is accepted.

    The record's ``sleep`` shows the progress. It is canceled if requests are left after ``drain_seconds``, or if this
    process ends before that. Raises `CannotSleepError`, `NoSuchServerError`.
    """
    from vllm_launchers.keeper import processes

    console = wire.to_plain(processes.identity(os.getpid()))
    request = {"do": "sleep", "level": level, "drain_seconds": drain_seconds, "console": console}
    return _ask_or_start(root, name, request, tuning)


def wake(root: Path, name: str, *, tuning: Options = None) -> ServerRecord:
    """Wake a server up; returns once the request is accepted. The record's ``sleep`` shows the progress.

    Raises `CannotSleepError`, `NoSuchServerError`.
    """
    return _ask_or_start(root, name, {"do": "wake"}, tuning)


def _refuse_ended(record: ServerRecord) -> None:
    if not record.state.alive:
        raise errors.CannotSleepError(f"{record.name} is {record.state}: only a running server can sleep or wake up")


def stop(root: Path, name: str, *, tuning: Options = None) -> ServerRecord:
    """Stop a server; returns once the request is accepted. No effect if it has ended. Raises `NoSuchServerError`."""
    return _ask_or_start(root, name, {"do": "stop"}, tuning)


def adopt(root: Path, record: ServerRecord, *, tuning: Options = None) -> bool:
    """Start a keeper for a server if its own has died; returns whether it was started.

    It is not an error if another console is faster. Raises `NoSuchServerError`, `RecordError`, and `KeeperError` if the
    keeper can't be started.
    """
    if not record.needs_keeper or elsewhere(root, record):
        return False
    return _adopt(folders.server_folder(root, record.name), tuning)


def adopt_orphans(root: Path, *, tuning: Options = None) -> list[str]:
    """Start a keeper for each server whose own has died; returns their names.

    It is not an error if another console is faster. Raises `KeeperError` if a keeper can't be started, after trying all
    others.
    """
    adopted, problems = [], []
    for record in list_records(root)[0]:
        try:
            if adopt(root, record, tuning=tuning):
                adopted.append(record.name)
        except KeeperError as error:
            problems.append(f"server {record.name} could not be adopted: {error}")
    if problems:
        raise KeeperError("; ".join(problems))
    return adopted


def remove(root: Path, name: str, *, keep: Callable[[Path], object] | None = None) -> None:
    """Delete all files of a server that has ended: record, logs, history.

    ``keep`` gets the folder first, once nothing uses it any more, and may move files elsewhere; if it raises, the
    server stays as it is. Raises `NoSuchServerError`, `StillAliveError`.
    """
    import shutil

    from vllm_launchers.keeper import orphans

    home = folders.server_folder(root, name)
    if not home.is_dir():
        raise NoSuchServerError(f"no server named {name}")
    folders.check_own_folder(home)
    with contextlib.suppress(RecordError, NoSuchServerError):
        refuse_elsewhere(root, read(root, name))
    answer = None
    with _on_disk(home):
        lock = _take_lock(home)
        if lock is None and folders.is_stale(home):  # its keeper may only be waiting to write the record
            answer = _ask(home, {"do": "forget"})
            lock = _take_lock(home, timeout=RETRY_SECONDS)
    if lock is None:
        raise StillAliveError(f"{name} has not ended yet: stop it first")
    with _held(lock):
        if answer is None and _may_run(root, name):
            raise StillAliveError(f"{name} is not stopped (its keeper died); stop it first")
        if left := orphans.left_of(home):
            pids = ", ".join(map(str, left))
            shows = folders.command_text(root, "leftovers")
            raise StillAliveError(f"processes of {name} still run (pid {pids}); {shows} shows them")
        if keep is not None:
            keep(home)
        # Rename first, so that no one sees a half-deleted server.
        trash = home.with_name(f".removed-{name}-{os.getpid()}-{time.monotonic_ns()}")
        with _on_disk(home):
            home.rename(trash)
        shutil.rmtree(trash, ignore_errors=True)


def _may_run(root: Path, name: str) -> bool:
    """Whether a server without a keeper may live; False for a broken record. A newer one must not be interpreted."""
    try:
        return read(root, name).state.alive
    except NewerRecordError:
        raise
    except (RecordError, NoSuchServerError):
        return False


def wait_for(root: Path, name: str, predicate: Callable[[ServerRecord], bool], timeout: float) -> ServerRecord:
    """Wait until a record satisfies ``predicate``; returns it. Raises `WaitTimeoutError`, `NoSuchServerError`."""
    deadline = time.monotonic() + timeout
    seen: Stamp | None = None
    record = read(root, name)
    while not predicate(record):
        if time.monotonic() >= deadline:
            raise WaitTimeoutError(f"{name} is still {record.state} after {timeout:g}s")
        time.sleep(POLL_SECONDS)
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
    prepared: PreparedLaunch | None = None,
) -> ServerRecord:
    """Send a request to the living keeper; if there is none, start one (which adopts what still runs)."""
    home = folders.server_folder(root, name)
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        record = _read_for(root, name, request)
        answer = _ask(home, request)
        if answer is not None:
            return answer
        if not record.needs_keeper and request["do"] == "stop" and not keeper_alive(root, name):
            return read(root, name)
        with _on_disk(home):
            try:
                lock = _take_lock(home)
            except FileNotFoundError:
                lock = None  # its folder was removed: then there is no record, either
        if lock is not None:
            with _held(lock):
                if read(root, name).needs_keeper:
                    _start_keeper(home, lock, {"do": "adopt", "secrets": request.get("secrets")}, tuning)
                elif request["do"] == "restart":
                    secrets = fresh_secrets() if fresh_secrets else {}
                    return _start_keeper(home, lock, {**request, "secrets": secrets}, tuning, prepared)
        if time.monotonic() >= deadline:
            raise KeeperError(f"the keeper of {name} does not answer; see {home / KEEPER_LOG}")
        time.sleep(0.02)


def _read_for(root: Path, name: str, request: Mapping[str, Any]) -> ServerRecord:
    """The record, unless the request is refused: by the server's place or state, or because its keeper is stopped."""
    record = read(root, name)
    refuse_elsewhere(root, record)
    if why := keeper_silence(record):
        raise SilentError(f"no action taken: {why}")
    if request["do"] in ("sleep", "wake"):
        _refuse_ended(record)
    return record


def _has_keeper(home: Path) -> bool:
    if folders.lock_is_held(home):
        return True
    from vllm_launchers.keeper import folder_claim

    return bool(folder_claim.keepers_of(home))


def _take_lock(home: Path, timeout: float = folders.LOCK_TIMEOUT) -> int | None:
    """Take the keeper's lock; None if a keeper is alive or starting, whatever the state of its lock."""
    from vllm_launchers.keeper import folder_claim

    deadline = time.monotonic() + timeout
    while (lock := folders.take_lock(home, max(0.0, deadline - time.monotonic()))) is not None:
        if not folder_claim.keepers_of(home):
            return lock
        os.close(lock)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.02)  # it may be ending right now
    return None


def _ask(home: Path, request: Mapping[str, Any], seconds: float | None = None) -> ServerRecord | None:
    """Send a request to the living keeper; None if there is none or it is just ending."""
    try:
        answer = wire.ask(home, request, seconds or wire.ANSWER_SECONDS)
    except wire.UnreachableError:
        return None
    except SilentError as error:
        raise SilentError(_why_silent(home) or str(error)) from error
    return None if answer.get("gone") else _record(answer)


def _why_silent(home: Path) -> str:
    """How to resume a keeper that a signal stopped, as a sentence; empty if it is not stopped."""
    with contextlib.suppress(KeeperError):
        if why := keeper_silence(folders.read_record(home)):
            return f"no action taken: {why}"
    return ""


def _adopt(home: Path, tuning: Options) -> bool:
    if _has_keeper(home):
        return False
    with _on_disk(home):
        lock = _take_lock(home, timeout=0.0)
    if lock is None:
        return False
    with _held(lock):
        if not folders.read_record(home).needs_keeper:
            return False
        _start_keeper(home, lock, {"do": "adopt"}, tuning)
    return True


def _start_keeper(
    home: Path, lock: int, request: Mapping[str, Any], tuning: Options, prepared: PreparedLaunch | None = None
) -> ServerRecord:
    """Start a keeper that takes over the lock, or use the one that prepared this start; returns its first record.

    Raises `SilentError` if it does not answer in time but may still start.
    """
    import subprocess

    if prepared is not None and (answer := prepared.launch(lock, {**request, "tuning": tuning})) is not None:
        return _record(answer)
    program = Path(__file__).with_name("__main__.py")
    with _on_disk(home):
        notes = open_file(home / KEEPER_LOG, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    try:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(program), str(home.absolute()), str(lock)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=notes,
            pass_fds=(lock,),
        ) as process:
            try:
                data = json.dumps({**request, "tuning": tuning}).encode()
                output, _ = process.communicate(data, timeout=START_SECONDS)
            except subprocess.TimeoutExpired as error:
                process.kill()
                # The keeper leaves this process with two forks. If it has done so, it still has the pipe open.
                output, _ = process.communicate(timeout=END_SECONDS)
                if not output:
                    raise KeeperError(f"the keeper of {home.name} did not start within {START_SECONDS:g}s") from error
    except subprocess.TimeoutExpired as error:
        raise SilentError.starting(home, START_SECONDS) from error
    except OSError as error:
        raise KeeperError(f"can't start a keeper with {sys.executable}: {error.strerror}") from error
    finally:
        os.close(notes)
    try:
        return _record(json.loads(output))
    except ValueError as error:
        raise KeeperError(f"the keeper of {home.name} ended during startup; see {home / KEEPER_LOG}") from error


def _record(answer: Mapping[str, Any]) -> ServerRecord:
    """The record in an answer; if the answer contains an error, raises that."""
    if "error" in answer:
        kind = getattr(errors, str(answer["error"]), KeeperError)
        raise kind(str(answer.get("message")))
    return wire.record_of(answer.get("record"))


@contextlib.contextmanager
def _held(lock: int) -> Iterator[None]:
    """Close our copy of the lock on exit; a keeper started in the meantime holds its own."""
    try:
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def _on_disk(home: Path) -> Iterator[None]:
    """Turn file system errors into a readable `KeeperError`: a full or read-only disk, missing permissions."""
    try:
        yield
    except OSError as error:
        raise KeeperError(f"can't use {error.filename or home}: {error.strerror or error}") from error

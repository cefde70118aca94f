"""The keeper process: its request arrives as JSON on standard input; its answer goes to standard output.

Only two modules start it: `client`, which takes the folder's lock and passes it on open, and `prepared_launch`, which
prepares a start and has no lock yet. Everything a keeper ever needs is imported at the start, so that an update of the
package does not affect a running keeper.

Helper threads and signals only post events; one loop (`Keeper`) acts on them. Only the loop changes the server's state,
signals processes and writes the record.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import folders, prepared_launch, processes, wire
from vllm_launchers.keeper.context import (
    KeeperContext,
    Tuning,
    inherited_from,
    known_secrets,
    restored_environment,
    secrets_of_process,
)
from vllm_launchers.keeper.errors import KeeperError, StillAliveError
from vllm_launchers.keeper.files import KEEPER_LOG, LOG, RECORD
from vllm_launchers.keeper.folder_claim import FolderClaim
from vllm_launchers.keeper.lifecycle import (
    AdoptedEnded,
    ChildEnded,
    ConsoleRequest,
    Event,
    HealthChecked,
    HelperFailed,
    LogLost,
    LogRecovered,
    NodeNews,
    PreparedStep,
    Released,
    SleepProgress,
    WarmedUp,
)
from vllm_launchers.keeper.log_forwarder import LogForwarder, Redaction, RotatingLog, values_of
from vllm_launchers.keeper.prepared_launch import WaitingProcess
from vllm_launchers.keeper.record_writer import RESTORED, Notes
from vllm_launchers.keeper.records import (
    Generation,
    Inherited,
    LaunchSpec,
    ProcessIdentity,
    Recording,
    ServerRecord,
    State,
)
from vllm_launchers.keeper.supervisor import Supervisor
from vllm_launchers.keeper.wire import SOCKET, RequestListener
from vllm_launchers.private import open_file, open_standard_streams
from vllm_launchers.values import replace

PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
FLUSH_SECONDS = 5.0
CHECK_SECONDS = 1.5
"""Interval between checks of the keeper's files; health checks wake the loop every two seconds anyway."""


class Keeper:
    """Supervises one server: start, restart or adopt it with ``supervisor``, then `run` until that is over."""

    def __init__(
        self,
        context: KeeperContext,
        record: ServerRecord,
        secrets: Mapping[str, str],
        lock: int,
        events: queue.SimpleQueue[Event] | None = None,
    ) -> None:
        """``events``: those of a process that was prepared earlier."""
        self._events: queue.SimpleQueue[Event] = events if events is not None else queue.SimpleQueue()
        self._leaves_server = self._replaced = False
        post, spec = self._events.put, record.current.spec
        log = RotatingLog(context.folder / LOG, spec.log_bytes, spec.log_files)
        own = secrets_of_process(record) | known_secrets(spec, secrets, context.environment)
        redaction = Redaction(values_of(own, context.environment))
        self._forwarder = LogForwarder(context.folder, log, post, redaction)
        self._claim = FolderClaim(context.folder, lock, Notes(context.folder))
        self._claim.refuse_second()
        folders.sweep(context.folder)  # only now: another keeper may be writing its record
        self._checked_at = time.monotonic()
        self._listener = RequestListener(context.folder, post)
        self.supervisor = Supervisor(context, record, secrets, self._forwarder, post)
        signal.signal(signal.SIGCHLD, lambda *_: post(ChildEnded()))
        signal.signal(signal.SIGTERM, lambda *_: post(Released()))
        for thread in (self._forwarder, self._listener, self.supervisor.health_checker):
            thread.start()

    def run(self) -> None:
        """Run until the server is stopped or has failed for good, or the keeper gets SIGTERM.

        A keeper whose record can't be written keeps running: otherwise nobody would know how its server ended.
        """
        fault = ""
        while not self._leaves_server and not self._done():
            try:
                self._step()
            except Exception as error:  # noqa: BLE001 - the loop's boundary: a fault in it must not leave a server unsupervised
                if fault != repr(error):
                    fault = repr(error)
                    self.supervisor.note(f"internal error in the keeper: {fault}")
                time.sleep(0.1)
            else:
                fault = ""
        self._end()

    def _done(self) -> bool:
        records = self.supervisor.record_writer
        return self.supervisor.over and (not records.trouble or records.folder_gone)

    def _step(self) -> None:
        try:
            event = self._events.get(timeout=self.supervisor.due())
        except queue.Empty:
            pass
        else:
            self._handle(event)
        if self.supervisor.over:
            self.supervisor.record_writer.catch_up()
        else:
            self.supervisor.tick(time.monotonic())
            self._check_files()

    def _check_files(self) -> None:
        """Every `CHECK_SECONDS`: release the server if another keeper has it, and restore deleted files."""
        now, records, note = time.monotonic(), self.supervisor.record_writer, self.supervisor.note
        if now - self._checked_at < CHECK_SECONDS or records.folder_gone:
            return
        self._checked_at = now
        if self._claim.lost():
            note("another keeper has taken over this server; this one ends")
            self._leaves_server, self._replaced = True, True
            return
        for what, restored in (
            (SOCKET, self._listener.restore()),
            (self._forwarder.log.path.name, self._forwarder.log.restore()),
            (self._forwarder.position.path.name, self._forwarder.position.restore()),
        ):
            if restored:
                note(f"{what} {RESTORED}")
        if happened := records.restore():
            note(f"{RECORD} {happened}")

    def _handle(self, event: Event) -> None:  # noqa: C901 (one branch per event)
        supervisor = self.supervisor
        match event:
            case HealthChecked():
                supervisor.health_checked(event)
            case WarmedUp():
                supervisor.warmed_up(event)
            case PreparedStep():
                supervisor.prepared_step(event)
            case SleepProgress():
                supervisor.slept(event)
            case NodeNews():
                supervisor.node_news(event)
            case ChildEnded():
                supervisor.reap()
            case AdoptedEnded(epoch):
                supervisor.adopted_ended(epoch)
            case ConsoleRequest():
                self._asked(event)
            case LogLost() | LogRecovered():
                supervisor.note(event.sentence)
                if supervisor.record.state.alive:  # otherwise the reason says why the server ended
                    supervisor.record_writer.change(reason=event.sentence)
            case HelperFailed(who, what):
                supervisor.note(f"internal error in the {who} thread: {what}")
            case Released():
                supervisor.note("got SIGTERM: ending; the server keeps running and can be adopted")
                self._leaves_server = True

    def _asked(self, event: ConsoleRequest) -> None:  # noqa: C901 (one branch per request)
        if event.abandoned.is_set():
            return
        request = event.request
        try:
            match request.get("do"):
                case "read":
                    pass
                case "forget":
                    self._forget()
                case "stop":
                    self.supervisor.stop()
                case "restart":
                    spec = wire.from_plain(LaunchSpec, request.get("spec"))
                    self.supervisor.restart(spec, request.get("secrets"), _console(request))
                case "cancel":
                    self.supervisor.cancel()
                case "sleep":
                    level, seconds = int(request.get("level", 1)), float(request.get("drain_seconds", 0.0))
                    self.supervisor.sleep(level, seconds, _console(request))
                case "wake":
                    self.supervisor.wake()
                case other:
                    raise KeeperError(f"unknown request: {other}")
            answer: Mapping[str, Any] = {"record": wire.to_plain(self.supervisor.record_writer.reported())}
        except KeeperError as error:
            answer = failure(error)
        except Exception as error:  # reported by the loop; the console must not wait for it
            event.reply(failure(KeeperError(f"internal error in the keeper, see its keeper.log: {error!r}")))
            raise
        event.reply(answer)

    def _forget(self) -> None:
        """Stop maintaining the record: the server's folder is about to be removed."""
        if not self.supervisor.over:
            raise StillAliveError(f"{self.supervisor.record.name} is not stopped; stop it first")
        self._leaves_server = True

    def _end(self) -> None:
        """Write the last lines of the log and answer every console."""
        if self._replaced:  # everything belongs to the other keeper now
            self._listener.close(remove=False)
            return
        self._listener.close()
        self._forwarder.drain(FLUSH_SECONDS)
        if self.supervisor.record_writer.trouble:
            self.supervisor.record_writer.write()
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(event := self._events.get_nowait(), ConsoleRequest):
                    event.reply({"gone": True})
        self._listener.join(timeout=1.0)


def _console(request: Mapping[str, Any]) -> ProcessIdentity | None:
    """The process that waits for the request to complete."""
    console = request.get("console")
    return wire.from_plain(ProcessIdentity, console) if console else None


def failure(error: KeeperError) -> dict[str, str]:
    """An error as the answer to a console."""
    return {"error": type(error).__name__, "message": str(error)}


def main(folder: Path, lock_fd: int) -> None:
    """Become a folder's keeper; report on standard output whether that worked."""
    open_standard_streams()
    os.set_inheritable(lock_fd, False)
    request = json.loads(sys.stdin.buffer.read())
    answer_fd = os.dup(1)
    umask = _detach()
    _redirect_output()
    _become_subreaper()
    _keep(request, folder, lock_fd, umask, answer_fd, None)


def prepare(socket_fd: int) -> None:
    """Prepare a server's first process, and become its keeper when it is launched."""
    open_standard_streams()
    control = socket.socket(fileno=socket_fd)
    os.set_inheritable(socket_fd, False)
    umask = _detach()
    _redirect_output()
    _become_subreaper()
    if (held := prepared_launch.hold(control, umask)) is None:
        return
    folder = held.context.folder
    with contextlib.suppress(OSError):
        notes = open_file(folder / KEEPER_LOG, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        os.dup2(notes, 2)
        os.close(notes)
    answer_fd = os.dup(socket_fd)
    control.close()
    _keep(held.request, folder, held.lock, umask, answer_fd, held)


def _keep(
    request: Mapping[str, Any], folder: Path, lock: int, umask: int, answer_fd: int, held: WaitingProcess | None
) -> None:
    try:
        keeper = _begin(request, folder, lock, umask, held)
    except (KeeperError, OSError) as error:
        problem = error if isinstance(error, KeeperError) else KeeperError(f"the keeper can't start: {error}")
        _answer(answer_fd, failure(problem))
        return
    _answer(answer_fd, {"record": wire.to_plain(keeper.supervisor.record_writer.reported())})
    del request, held
    keeper.run()


def _begin(request: Mapping[str, Any], folder: Path, lock: int, umask: int, held: WaitingProcess | None) -> Keeper:
    secrets, tuning = request.get("secrets") or {}, wire.from_plain(Tuning, request.get("tuning") or {})
    environment = dict(os.environ)
    shell = inherited_from(environment, umask)
    context = KeeperContext(folder, environment, umask, tuning)
    events = held.events if held is not None else None
    if request["do"] == "launch":
        raw = request.get("recording")
        recording = wire.from_plain(Recording, raw) if raw else None
        record = _new_record(folder.name, request["spec"], recording, shell)
        keeper = Keeper(context, record, secrets, lock, events)
        if held is not None:
            keeper.supervisor.use_prepared(held.process, record.current.spec)
        keeper.supervisor.start(recording)
        return keeper
    record = folders.read_record(folder)
    if request["do"] == "restart":
        spec = wire.from_plain(LaunchSpec, request["spec"])
        keeper = Keeper(context, replace(record, inherited=shell), secrets, lock, events)
        if held is not None:
            keeper.supervisor.use_prepared(held.process, spec)
        keeper.supervisor.start_next(spec)
        return keeper
    if record.inherited is not None:  # not the environment of whichever console started this keeper
        environment = restored_environment(record.inherited, record.current.spec.secret_names, environment)
        context = KeeperContext(folder, environment, record.inherited.umask, tuning)
    keeper = Keeper(context, record, secrets, lock)
    keeper.supervisor.adopt()
    return keeper


def _new_record(name: str, spec: object, recording: Recording | None, shell: Inherited) -> ServerRecord:
    now = time.time()
    earlier = recording.generations if recording is not None else ()
    began = earlier[0].started_at if earlier else recording.started_at if recording is not None else now
    generation = Generation(len(earlier) + 1, wire.from_plain(LaunchSpec, spec), started_at=now)
    return ServerRecord(name, State.STARTING, now, began, (*earlier, generation), inherited=shell)


def _detach() -> int:
    """Leave the starter's session for good; return the umask for the server.

    Two forks: the first child leads a session without a terminal, and the second can never acquire one.
    """
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a recorder, which may be the starter, blocks SIGTERM
    return os.umask(0o077)


def _become_subreaper() -> None:
    """Have orphaned descendants reparented to this process, where the kernel allows it."""
    with contextlib.suppress(OSError, AttributeError):
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        prctl(PR_SET_NAME, processes.KEEPER_TITLE.encode(), 0, 0, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _redirect_output() -> None:
    """Redirect standard input and output to ``/dev/null``; Python's own errors still go to ``keeper.log``."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)


def _answer(fd: int, message: Mapping[str, Any]) -> None:
    try:
        data = json.dumps(message).encode()
        while data:
            data = data[os.write(fd, data) :]
    except OSError:
        return  # the starter is gone; the keeper continues
    finally:
        os.close(fd)

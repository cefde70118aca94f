"""The keeper's loop: helper threads and signals only post events; the loop acts on them.

Only the loop changes the server's state, signals processes and writes the record.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Mapping
from typing import Any

from vllm_launchers.keeper import folders, wire
from vllm_launchers.keeper.claim import FolderClaim
from vllm_launchers.keeper.context import KeeperContext, known_secrets, secrets_of_process
from vllm_launchers.keeper.errors import KeeperError, StillAliveError
from vllm_launchers.keeper.files import LOG, RECORD
from vllm_launchers.keeper.lifecycle import (
    AdoptedEnded,
    Asked,
    ChildEnded,
    Event,
    HelperFailed,
    LetGo,
    LogLost,
    LogRecovered,
    NodeNews,
    PreparedStep,
    Probed,
    SleepProgress,
    WarmedUp,
)
from vllm_launchers.keeper.log_forwarder import LogForwarder, Redaction, RotatingLog, values_of
from vllm_launchers.keeper.record_writer import RESTORED, Notes
from vllm_launchers.keeper.records import LaunchSpec, ProcessIdentity, ServerRecord
from vllm_launchers.keeper.supervisor import Supervisor
from vllm_launchers.keeper.wire import SOCKET, RequestListener

FLUSH_SECONDS = 5.0
CHECK_SECONDS = 1.5
"""Between two checks of the keeper's files; probes wake the loop every two seconds anyway."""


class Keeper:
    """Supervises one server: start, restart or adopt with ``server``, then `run` until that is over."""

    def __init__(
        self,
        context: KeeperContext,
        record: ServerRecord,
        secrets: Mapping[str, str],
        lock: int,
        events: queue.SimpleQueue[Event] | None = None,
    ) -> None:
        """``events`` are those of a process that was prepared before."""
        self._events: queue.SimpleQueue[Event] = events if events is not None else queue.SimpleQueue()
        self._let_go = self._replaced = False
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
        signal.signal(signal.SIGTERM, lambda *_: post(LetGo()))
        for thread in (self._forwarder, self._listener, self.supervisor.prober):
            thread.start()

    def run(self) -> None:
        """Run until the server is stopped or has failed for good, or the keeper gets SIGTERM.

        A keeper whose record can't be written stays: otherwise it would be unknown how its server ended.
        """
        fault = ""
        while not self._let_go and not self._done():
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
        """From time to time: release the server if another keeper has it, and restore deleted files."""
        now, records, note = time.monotonic(), self.supervisor.record_writer, self.supervisor.note
        if now - self._checked_at < CHECK_SECONDS or records.folder_gone:
            return
        self._checked_at = now
        if self._claim.lost():
            note("another keeper has taken over this server; this one ends")
            self._let_go, self._replaced = True, True
            return
        for what, restored in (
            (SOCKET, self._listener.restore()),
            (RECORD, records.restore()),
            (self._forwarder.log.path.name, self._forwarder.log.restore()),
            (self._forwarder.position.path.name, self._forwarder.position.restore()),
        ):
            if restored:
                note(f"{what} {RESTORED}")

    def _handle(self, event: Event) -> None:  # noqa: C901 (one branch per event)
        supervisor = self.supervisor
        match event:
            case Probed():
                supervisor.probed(event)
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
            case Asked():
                self._asked(event)
            case LogLost() | LogRecovered():
                supervisor.note(event.sentence)
                supervisor.record_writer.change(reason=event.sentence)
            case HelperFailed(who, what):
                supervisor.note(f"internal error in the {who} thread: {what}")
            case LetGo():
                supervisor.note("got SIGTERM: ending; the server keeps running and can be adopted")
                self._let_go = True

    def _asked(self, event: Asked) -> None:  # noqa: C901 (one branch per request)
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
        """The server's folder is about to be removed: its record is no longer needed."""
        if not self.supervisor.over:
            raise StillAliveError(f"{self.supervisor.record.name} is not stopped; stop it first")
        self._let_go = True

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
                if isinstance(event := self._events.get_nowait(), Asked):
                    event.reply({"gone": True})
        self._listener.join(timeout=1.0)


def _console(request: Mapping[str, Any]) -> ProcessIdentity | None:
    """The process that waits for a request to be carried out."""
    console = request.get("console")
    return wire.from_plain(ProcessIdentity, console) if console else None


def failure(error: KeeperError) -> dict[str, str]:
    """An error as the answer to a console."""
    return {"error": type(error).__name__, "message": str(error)}

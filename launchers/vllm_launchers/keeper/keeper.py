"""The keeper: one loop, fed by helper threads and signals that only post events, acts on one server.

The loop alone changes the server's state, signals processes and writes the record.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Mapping
from typing import Any

from vllm_launchers.keeper import codec, credentials, store
from vllm_launchers.keeper.blanking import Blanking, values_of
from vllm_launchers.keeper.errors import KeeperError, StillAliveError
from vllm_launchers.keeper.events import (
    AdoptedEnded,
    Asked,
    ChildEnded,
    Event,
    HelperFailed,
    LetGo,
    LogLost,
    LogMended,
    Probed,
)
from vllm_launchers.keeper.logfile import LogPump, RotatingLog
from vllm_launchers.keeper.logpipe import open_pipe
from vllm_launchers.keeper.records import LaunchSpec, ServerRecord
from vllm_launchers.keeper.server import Server
from vllm_launchers.keeper.surroundings import Surroundings
from vllm_launchers.keeper.wire import Listener

FLUSH_SECONDS = 5.0


class Keeper:
    """Holds one server: begin with what its ``server`` offers, then `run` until that is over."""

    def __init__(self, around: Surroundings, record: ServerRecord, secrets: Mapping[str, str]) -> None:
        store.sweep(around.folder)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._let_go = False
        post, spec = self._events.put, record.current.spec
        log = RotatingLog(around.folder / "server.log", spec.log_bytes, spec.log_files)
        own = credentials.of_server(record) | credentials.known(spec, secrets, around.environment)
        blanking = Blanking(values_of(own, around.environment))
        self._pump = LogPump(open_pipe(around.folder, blocking=False), log, post, blanking)
        self._listener = Listener(around.folder, post)
        self.server = Server(around, record, secrets, self._pump, post)
        signal.signal(signal.SIGCHLD, lambda *_: post(ChildEnded()))
        signal.signal(signal.SIGTERM, lambda *_: post(LetGo()))
        for thread in (self._pump, self._listener, self.server.prober):
            thread.start()

    def run(self) -> None:
        """Go on until the server is stopped or has failed for good, or the keeper is told to let go.

        A keeper whose record cannot be written stays: else nobody would know how its server ended.
        """
        told = ""
        while not self._let_go and not self._done():
            try:
                self._turn()
            except Exception as error:  # noqa: BLE001 - the loop's boundary: a fault in it must not leave a server alone
                if told != repr(error):
                    told = repr(error)
                    self.server.note(f"fault in the keeper: {told}")
                time.sleep(0.1)
            else:
                told = ""
        self._end()

    def _done(self) -> bool:
        ledger = self.server.ledger
        return self.server.over and (not ledger.trouble or ledger.homeless)

    def _turn(self) -> None:
        try:
            event = self._events.get(timeout=self.server.due())
        except queue.Empty:
            pass
        else:
            self._handle(event)
        if self.server.over:
            self.server.ledger.catch_up()
        else:
            self.server.tick(time.monotonic())

    def _handle(self, event: Event) -> None:
        server = self.server
        match event:
            case Probed():
                server.probed(event)
            case ChildEnded():
                server.reap()
            case AdoptedEnded(epoch):
                server.adopted_ended(epoch)
            case Asked():
                self._asked(event)
            case LogLost(lost, why):
                server.note(f"the log cannot be written ({why}); {lost} bytes lost so far")
                server.ledger.change(reason=f"its log cannot be written ({why}); {lost} bytes of it are lost so far")
            case LogMended(lost):
                server.note(f"the log is written again; {lost} bytes were lost")
                server.ledger.change(reason=f"{lost} bytes of its log were lost while it could not be written")
            case HelperFailed(who, what):
                server.note(f"fault in the {who}: {what}")
            case LetGo():
                server.note("asked to end; the server stays and can be adopted")
                self._let_go = True

    def _asked(self, event: Asked) -> None:
        request = event.request
        try:
            match request.get("do"):
                case "read":
                    pass
                case "forget":
                    self._forget()
                case "stop":
                    self.server.stop()
                case "restart":
                    self.server.stop(codec.from_plain(LaunchSpec, request.get("spec")), request.get("secrets"))
                case other:
                    raise KeeperError(f"the keeper does not know how to {other}")
            answer: Mapping[str, Any] = {"record": codec.to_plain(self.server.ledger.told())}
        except KeeperError as error:
            answer = failure(error)
        except Exception as error:  # told by the loop; who asked is not to wait for it
            event.reply(failure(KeeperError(f"a fault in the keeper, see its keeper.log: {error!r}")))
            raise
        event.reply(answer)

    def _forget(self) -> None:
        """The server's folder is about to be removed: nobody needs its record any more."""
        if not self.server.over:
            raise StillAliveError(f"{self.server.record.name} has not been stopped; stop it first")
        self._let_go = True

    def _end(self) -> None:
        """Let the log have its last lines and every console its answer."""
        self._listener.close()
        self._pump.drain(FLUSH_SECONDS)
        if self.server.ledger.trouble:
            self.server.ledger.write()
        with contextlib.suppress(queue.Empty):
            while True:
                if isinstance(event := self._events.get_nowait(), Asked):
                    event.reply({"gone": True})
        self._listener.join(timeout=1.0)


def failure(error: KeeperError) -> dict[str, str]:
    """An error as an answer to a console."""
    return {"error": type(error).__name__, "message": str(error)}

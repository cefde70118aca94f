"""A server's next process, prepared while the present one still serves: most of a start, without its downtime.

The process is started with a socket as descriptor 3 (`spawn.CONTROL_FD`) and reports its progress there, one JSON
object per line: ``{"step": "imported"}``, ``"accepted"``, ``"refused"`` (with ``"message"``) or ``"unprepared"`` (it
can't be prepared, or a file that it loaded was replaced since; ``"message"`` says why). Once accepted, it waits.
`PreparedProcess.go` sends it the server's output file: it writes there from then on, reports ``"started"`` and
continues as the server.

Until then it belongs to this keeper alone: the kernel kills it when the keeper ends, and its output goes to a file in
memory, which has no name and disappears with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import processes, spawn
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.lifecycle import Post, PreparedStep
from vllm_launchers.keeper.log_forwarder import Redaction
from vllm_launchers.keeper.output import server_output
from vllm_launchers.keeper.record_writer import RecordWriter
from vllm_launchers.keeper.records import Generation, LaunchSpec, Preparation, PreparationStep, ProcessIdentity
from vllm_launchers.keeper.spawn import ProcessCommand, SpawnError
from vllm_launchers.values import replace

GO = b"g"
"""The byte that the output's descriptor comes with."""
GO_SECONDS = 10.0
"""How long it may take to report "started"."""
MOST_OUTPUT = 8 << 20
"""Bytes that it may print while it is prepared. They are kept in memory."""
LAST_MESSAGE_SECONDS = 1.0
"""How long to wait for the socket's end after the process's: at once, unless something that it started holds it."""
LONGEST_MESSAGE = 1 << 16
"""Bytes of one line on the socket."""


class PreparedProcess:
    """One prepared process. Only the keeper's loop calls it; its thread posts `PreparedStep`."""

    def __init__(
        self,
        epoch: int,
        spec: LaunchSpec,
        command: spawn.ProcessCommand,
        post: Post,
        before: Callable[[ProcessIdentity], None],
    ) -> None:
        """Start it; ``before`` gets its identity while it is held back. Raises `spawn.SpawnError`, OSError."""
        self.spec, self.epoch = spec, epoch
        self._output = -1
        self.started_at = time.monotonic()
        self.accepted = False
        """Whether it has accepted the flags, and waits."""
        self.before_launch = False
        """Whether it was prepared before there was a server, and so may be launched before it has judged its flags."""
        self.launched = False
        """Whether it is the server's process: asked to continue, or to be asked once it waits."""
        self.went_at: float | None = None
        """When it was asked to become the server; None before."""
        self.why_not = ""
        """Why it did not continue then, if that is known."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._last: Mapping[str, Any] = {}
        self._listener = threading.Thread(target=self._listen, args=(post,), name="prepared", daemon=True)
        try:
            with theirs:
                self._output = os.memfd_create("prepared", os.MFD_CLOEXEC)
                command = replace(command, output_fd=self._output, control_fd=theirs.fileno(), dies_with_parent=True)
                self.process = spawn.start(command, before)
            self._start_listener()
        except BaseException:
            self.close()
            self._control.close()
            raise

    @property
    def too_much_output(self) -> bool:
        """Whether it prints more than may be kept."""
        return os.fstat(self._output).st_size > MOST_OUTPUT

    def output(self) -> bytes:
        """What it has printed until now."""
        with contextlib.suppress(OSError):
            return os.pread(self._output, MOST_OUTPUT, 0)
        return b""

    def go(self, output_fd: int) -> None:
        """Let it continue as the server, with this file as its output, at first what it has printed until now.

        Raises OSError if it is gone.
        """
        os.write(output_fd, self.output())
        socket.send_fds(self._control, [GO], [output_fd])
        self.went_at = time.monotonic()

    def last_message(self) -> Mapping[str, Any]:
        """Its last message, once it has ended: the end may be noticed before that was read from the socket."""
        self._listener.join(LAST_MESSAGE_SECONDS)
        return self._last

    def overdue(self, now: float) -> bool:
        """Whether it was asked long ago to become the server and has not reported that it did."""
        return self.went_at is not None and now - self.went_at >= GO_SECONDS

    def end(self) -> None:
        """End it and everything that it started. It holds nothing that has to be cleaned up."""
        processes.end_session(self.process)

    def close(self) -> None:
        """Close its socket and its output."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _start_listener(self) -> None:
        try:
            self._listener.start()
        except RuntimeError as error:  # a shortage of threads
            self.end()
            raise OSError(str(error)) from error

    def _listen(self, post: Post) -> None:
        """Post each line that it sends, then None."""
        with self._control as control, contextlib.suppress(OSError), control.makefile("rb") as lines:
            while line := lines.readline(LONGEST_MESSAGE):
                if (message := _decoded(line)) is not None:
                    self._last = message
                    post(PreparedStep(self.epoch, message))
        post(PreparedStep(self.epoch, None))


def _decoded(line: bytes) -> Mapping[str, Any] | None:
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


KEPT_OUTPUT = 16 << 10
"""Bytes of a refused process's output that the record keeps: the end, with the error."""
KEPT_MESSAGE = 4 << 10


class RestartPreparation:
    """The next generation's process, from the request for a restart until it is the server or is discarded.

    At most one at a time. Only the keeper's loop calls this. It never stops the server: `on_step` returns the flags
    when that is to be done.
    """

    def __init__(
        self,
        folder: Path,
        limit: float,
        record_writer: RecordWriter,
        note: Callable[[str], None],
        redaction: Redaction,
        post: Post,
    ) -> None:
        """``limit``: how long it may take, in seconds."""
        self._folder = folder
        self._limit = limit
        self._record_writer = record_writer
        self._note = note
        self._redaction = redaction
        self._post = post
        self._process: PreparedProcess | None = None
        self._count = 0
        self._recorded: Preparation | None = None
        """What the record contained about it before it took over."""
        self.spec: LaunchSpec | None = None
        """The flags of the restart that was prepared last."""

    @property
    def under_way(self) -> bool:
        """Whether there is a prepared process that has not reported that it is the server."""
        return self._process is not None

    @property
    def waits(self) -> bool:
        """Whether there is a prepared process that was not yet asked to become the server."""
        return self._process is not None and not self._process.launched

    @property
    def cancelable(self) -> bool:
        """Whether the server is not yet being stopped for it."""
        return self._process is not None and not self._process.accepted

    @property
    def process(self) -> ProcessIdentity | None:
        """The prepared process, while it is not the server's."""
        return self._process.process if self._process is not None and self.waits else None

    def begin(self, spec: LaunchSpec, console: ProcessIdentity | None, command: ProcessCommand) -> None:
        """Start the process. Raises `UnwrittenError`, before anything is done."""
        now = time.time()
        self._record_writer.change(insist=True, preparation=Preparation(now, spec, step_at=now, console=console))
        self._count += 1
        self.spec, self._recorded = spec, None
        try:
            self._process = PreparedProcess(self._count, spec, command, self._post, self._record_process)
        except (SpawnError, KeeperError, OSError) as error:
            self.record(PreparationStep.FAILED, f"its process could not be started: {error}")

    def have(self, process: PreparedProcess, spec: LaunchSpec) -> None:
        """A process that was prepared before the launch is to be the server's first, at whatever step it is."""
        process.spec = self.spec = spec
        process.before_launch = True
        self._process = process

    def on_step(self, event: PreparedStep) -> LaunchSpec | None:
        """Handle a process's progress. Returns the flags for which the server is to be stopped now; else None."""
        process = self._process
        if process is None or event.epoch != process.epoch:
            return None
        message = event.message if event.message is not None else {}
        text = str(message.get("message") or "")
        match message.get("step"):
            case "imported" | "reading":
                self._checks(text)
            case "accepted":
                process.accepted = True
                if self.waits:
                    return process.spec
                with contextlib.suppress(OSError, KeeperError):  # what ended it is noticed by its end
                    self._go(process)
            case "refused" if self.waits:
                self.discard(PreparationStep.REFUSED, text)
            case "unprepared" if not self.waits:
                process.why_not = text
            case "unprepared":
                self.discard(PreparationStep.UNPREPARED, text)
                return process.spec
            case "started":
                self._became_server(process)
            case None if event.message is None and self.waits and not process.accepted:
                self.discard(PreparationStep.FAILED, "its process ended before it had judged the flags")
        return None

    def server_stops(self) -> None:
        """The server is being stopped for it."""
        if self.waits:
            self.record(PreparationStep.ACCEPTED)

    def fail(self, reason: str) -> None:
        """The server can't be stopped for it."""
        if self.waits:
            self.discard(PreparationStep.FAILED, reason)
        else:
            self.record(PreparationStep.FAILED, reason)

    def take_over(self, generation: Generation) -> ProcessIdentity | None:
        """Let the process continue as the server; None if there is none for this generation, or it can't.

        Raises `UnwrittenError`.
        """
        process, why = self._process, ""
        if process is None:
            return None
        if process.spec != generation.spec or not (process.accepted or process.before_launch):
            why = "it was prepared for other flags"
        elif not processes.alive(process.process):
            why = "its process has ended"
        if not why:
            try:
                return self._hand_over(process)
            except OSError as error:
                why = f"its process can't continue: {error}"
            except KeeperError as error:
                self._end(PreparationStep.UNPREPARED, str(error))
                raise
        self._end(PreparationStep.UNPREPARED, why)
        return None

    def server_ended(self) -> str:
        """The server has ended by itself. Returns why what is prepared can't be used; "" if that changes nothing."""
        process = self._process
        if process is None:
            return ""
        why = "the server ended by itself meanwhile"
        if not self.waits:  # it was to be the server, and this is its end
            last = process.last_message()
            if last.get("step") == "started":
                self._became_server(process)
                return ""
            if last.get("step") == "unprepared":
                process.why_not = str(last.get("message") or "")
            if process.went_at is None:
                self._write_output(process)
            if last.get("step") == "refused":
                self._became_server(process)
                return ""
            why = process.why_not or "its process ended"
        self._end(PreparationStep.UNPREPARED, why)
        return why

    def server_stopped(self) -> None:
        """The server has ended as requested."""
        if self._process is not None and not self.waits:  # it was to take over, and was stopped at once
            self._became_server(self._process)

    def discard(self, step: PreparationStep, message: str) -> None:
        """End a process that waits, and record why. There may be none."""
        if self.waits:
            self._end(step, message)

    def record(self, step: PreparationStep, message: str = "", output: str = "") -> None:
        """Record how far it is."""
        preparation = self._record_writer.record.preparation
        if preparation is None:
            return
        changed = replace(preparation, step=step, step_at=time.time(), message=message, output=output)
        if not step.under_way:
            # The patterns serve only a generation that runs, and are not small.
            spec = replace(changed.spec, restart=replace(changed.spec.restart, not_retryable=()))
            changed = replace(changed, spec=spec, process=None, console=None)
        self._note(f"preparing a restart: {step}" + (f" ({message})" if message else ""))
        self._record_writer.change(preparation=changed)

    def tick(self, now: float) -> None:
        """End one that takes too long, prints too much, or that nobody waits for any more. ``now``: monotonic."""
        process, preparation = self._process, self._record_writer.record.preparation
        if process is None:
            return
        if process.overdue(now) and not process.why_not:
            process.why_not = "it did not take over"
            process.end()
        elif not self.waits or preparation is None:
            return
        elif process.too_much_output:
            step = PreparationStep.UNPREPARED if process.accepted else PreparationStep.FAILED
            self.discard(step, "its process prints too much")
        elif process.accepted:
            return
        elif now - process.started_at >= self._limit:
            self.discard(PreparationStep.FAILED, f"it was not prepared within {self._limit:g}s")
        elif preparation.console is not None and not processes.alive(preparation.console):
            self.discard(PreparationStep.CANCELED, "the console that asked for it has ended")

    def _record_process(self, identity: ProcessIdentity) -> None:
        if (preparation := self._record_writer.record.preparation) is not None:
            self._record_writer.change(insist=True, preparation=replace(preparation, process=identity))

    def _checks(self, message: str) -> None:
        """It judges its flags, or does what the message says."""
        preparation = self._record_writer.record.preparation
        if preparation is not None and preparation.step is PreparationStep.CHECKING:
            self._record_writer.change(preparation=replace(preparation, message=message[:KEPT_MESSAGE]))
        else:
            self.record(PreparationStep.CHECKING)

    def _became_server(self, process: PreparedProcess) -> None:
        process.close()
        self._process = None

    def _end(self, step: PreparationStep, message: str) -> None:
        """End the process, and record why."""
        process, self._process = self._process, None
        if process is None:
            return
        output = process.output()
        process.close()  # first: where it waits, it ends by that alone
        process.end()
        if self._record_writer.record.preparation is None and self._recorded is not None:  # it was about to take over
            self._record_writer.change(preparation=self._recorded)
        self.record(step, self._shown(message.encode(errors="replace"))[:KEPT_MESSAGE],
                    self._shown(output)[-KEPT_OUTPUT:])  # fmt: skip

    def _shown(self, data: bytes) -> str:
        """Text without secrets; cut it only afterwards, since half a secret is not recognized."""
        return self._redaction.clean(data, whole=True)[0].decode(errors="replace")

    def _hand_over(self, process: PreparedProcess) -> ProcessIdentity:
        self._recorded = self._record_writer.record.preparation
        self._record_writer.change(insist=True, server=process.process, preparation=None)
        process.launched = True
        if process.accepted:
            self._go(process)
        return process.process

    def _go(self, process: PreparedProcess) -> None:
        with server_output(self._folder) as output:
            process.go(output)

    def _write_output(self, process: PreparedProcess) -> None:
        """Add what it has printed to the log: it ended before it waited."""
        # A full disk is no reason to fail.
        with contextlib.suppress(OSError, KeeperError), server_output(self._folder) as output:
            os.write(output, process.output())

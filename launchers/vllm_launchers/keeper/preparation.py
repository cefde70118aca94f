"""Prepares a server's next process while the current one still serves: most of a start, without its downtime.

The process is started with a socket as descriptor 3 (`spawn.CONTROL_FD`) and reports its progress there, one JSON
object per line: ``{"step": "imported"}``, ``"accepted"``, ``"refused"`` (with ``"message"``) or ``"unprepared"`` (it
can't be prepared, or a file that it loaded has been replaced; ``"message"`` says why). Once it has accepted the flags,
it waits. `PreparedProcess.go` sends it the server's output file: from then on it writes there, reports ``"started"``
and continues as the server.

Until then it belongs to this keeper alone: the kernel kills it when the keeper ends, and its output goes to an
anonymous in-memory file that disappears with it.
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
"""The byte that accompanies the output's descriptor."""
GO_SECONDS = 10.0
"""Time limit for reporting "started"."""
OVERDUE = f"it did not take over within {GO_SECONDS:g}s"
MOST_OUTPUT = 8 << 20
"""Maximum output while it is prepared, which is kept in memory."""
LAST_MESSAGE_SECONDS = 1.0
"""How long to wait for the end of the socket after that of the process: usually none, unless a child holds it."""
LONGEST_MESSAGE = 1 << 16
"""Maximum bytes of one line on the socket."""


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
        """Whether it has accepted the flags and waits."""
        self.before_launch = False
        """Whether it was prepared before the server existed, and so may be launched before it has checked its flags."""
        self.launched = False
        """Whether it is the server's process: it was asked to continue, or will be once it waits."""
        self.went_at: float | None = None
        """When it was asked to become the server; None if it was not."""
        self.why_not = ""
        """Why it did not continue after that, if known."""
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
        """Whether it has printed more than may be kept."""
        return os.fstat(self._output).st_size > MOST_OUTPUT

    def output(self) -> bytes:
        """What it has printed so far."""
        with contextlib.suppress(OSError):
            return os.pread(self._output, MOST_OUTPUT, 0)
        return b""

    def go(self, output_fd: int) -> None:
        """Let it continue as the server, with this file as its output, to which its output so far is written first.

        Raises OSError if it is gone.
        """
        os.write(output_fd, self.output())
        socket.send_fds(self._control, [GO], [output_fd])
        self.went_at = time.monotonic()

    def last_message(self) -> Mapping[str, Any]:
        """Its last message, for use once it has ended: its end may be noticed before that message is read."""
        self._listener.join(LAST_MESSAGE_SECONDS)
        return self._last

    def overdue(self, now: float) -> bool:
        """Whether it was asked to become the server more than `GO_SECONDS` ago and has not reported that it did."""
        return self.went_at is not None and now - self.went_at >= GO_SECONDS

    def end(self) -> None:
        """Kill it and everything that it started. It holds nothing that needs cleaning up."""
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
"""How much of a refused process's output the record keeps: the end, with the error."""
KEPT_MESSAGE = 4 << 10


class RestartPreparation:
    """The next generation's process, from the request for a restart until it is the server or is discarded.

    At most one at a time. Only the keeper's loop calls this. It never stops the server: `on_step` returns the flags
    when that should be done.
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
        """``limit``: maximum seconds for the preparation."""
        self._folder = folder
        self._limit = limit
        self._record_writer = record_writer
        self._note = note
        self._redaction = redaction
        self._post = post
        self._process: PreparedProcess | None = None
        self._count = 0
        self._recorded: Preparation | None = None
        """What the record contained about the preparation before the process took over."""
        self.spec: LaunchSpec | None = None
        """The flags of the last restart that was prepared."""
        self.killed: ProcessIdentity | None = None
        """The process that was killed because it was `OVERDUE`: the server's, even if it did take over just then."""

    @property
    def under_way(self) -> bool:
        """Whether there is a prepared process that has not reported that it is the server."""
        return self._process is not None

    @property
    def waits(self) -> bool:
        """Whether there is a prepared process that has not been asked to become the server."""
        return self._process is not None and not self._process.launched

    @property
    def cancelable(self) -> bool:
        """Whether a preparation can be canceled: the server is not yet being stopped for it."""
        return self._process is not None and not self._process.accepted

    @property
    def process(self) -> ProcessIdentity | None:
        """The prepared process, until it is the server's."""
        return self._process.process if self._process is not None and self.waits else None

    def begin(self, spec: LaunchSpec, console: ProcessIdentity | None, command: ProcessCommand) -> None:
        """Start the process. Raises `UnwrittenError` before anything is done."""
        now = time.time()
        self._record_writer.change(insist=True, preparation=Preparation(now, spec, step_at=now, console=console))
        self._count += 1
        self.spec, self._recorded = spec, None
        try:
            self._process = PreparedProcess(self._count, spec, command, self._post, self._record_process)
        except (SpawnError, KeeperError, OSError) as error:
            self.record(PreparationStep.FAILED, f"its process could not be started: {error}")

    def have(self, process: PreparedProcess, spec: LaunchSpec) -> None:
        """Use a process that was prepared before the launch as the server's first, whatever its step."""
        process.spec = self.spec = spec
        process.before_launch = True
        self._process = process

    def on_step(self, event: PreparedStep) -> LaunchSpec | None:
        """Handle a process's progress. Returns the flags for which the server should be stopped now, else None."""
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
                with contextlib.suppress(OSError, KeeperError):  # if it has ended, that is noticed elsewhere
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
                self.discard(PreparationStep.FAILED, "its process ended before it had checked the flags")
        return None

    def server_stops(self) -> None:
        """Record that the server is being stopped for it."""
        if self.waits:
            self.record(PreparationStep.ACCEPTED)

    def fail(self, reason: str) -> None:
        """Record that the server can't be stopped for it."""
        if self.waits:
            self.discard(PreparationStep.FAILED, reason)
        else:
            self.record(PreparationStep.FAILED, reason)

    def take_over(self, generation: Generation) -> ProcessIdentity | None:
        """Let the process continue as the server; None if none can for this generation. Raises `UnwrittenError`."""
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
        """Handle an unrequested end of the server. Returns why its preparation can't be used; "" if nothing changes."""
        process = self._process
        if process is None:
            return ""
        why = "the server ended in the meantime"
        if not self.waits:  # it was to become the server, and this is its own end
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
        """Handle the requested end of the server."""
        if self._process is not None and not self.waits:  # it was to take over but was stopped immediately
            self._became_server(self._process)

    def discard(self, step: PreparationStep, message: str) -> None:
        """End a waiting process, if there is one, and record why."""
        if self.waits:
            self._end(step, message)

    def record(self, step: PreparationStep, message: str = "", output: str = "") -> None:
        """Record the progress."""
        preparation = self._record_writer.record.preparation
        if preparation is None:
            return
        changed = replace(preparation, step=step, step_at=time.time(), message=message, output=output)
        if not step.under_way:
            # Only a running generation needs the patterns, and they are not small.
            spec = replace(changed.spec, restart=replace(changed.spec.restart, not_retryable=()))
            changed = replace(changed, spec=spec, process=None, console=None)
        self._note(f"preparing a restart: {step}" + (f" ({message})" if message else ""))
        self._record_writer.change(preparation=changed)

    def tick(self, now: float) -> None:
        """End a process that takes too long, prints too much, or is no longer awaited. ``now``: monotonic."""
        process, preparation = self._process, self._record_writer.record.preparation
        if process is None:
            return
        if process.overdue(now) and not process.why_not:
            process.end()
            process.why_not = OVERDUE
            self.killed = process.process
        elif not self.waits or preparation is None:
            return
        elif process.too_much_output:
            step = PreparationStep.UNPREPARED if process.accepted else PreparationStep.FAILED
            self.discard(step, "its process printed too much output")
        elif process.accepted:
            return
        elif now - process.started_at >= self._limit:
            self.discard(PreparationStep.FAILED, f"it was not prepared within {self._limit:g}s")
        elif preparation.console is not None and not processes.alive(preparation.console):
            self.discard(PreparationStep.CANCELED, "the console that requested it has ended")

    def _record_process(self, identity: ProcessIdentity) -> None:
        if (preparation := self._record_writer.record.preparation) is not None:
            self._record_writer.change(insist=True, preparation=replace(preparation, process=identity))

    def _checks(self, message: str) -> None:
        """Record that it is checking its flags, or what the message says."""
        preparation = self._record_writer.record.preparation
        if preparation is not None and preparation.step is PreparationStep.CHECKING:
            self._record_writer.change(preparation=replace(preparation, message=message[:KEPT_MESSAGE]))
        else:
            self.record(PreparationStep.CHECKING)

    def _became_server(self, process: PreparedProcess) -> None:
        process.close()
        self._process = None

    def _end(self, step: PreparationStep, message: str) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        output = process.output()
        process.close()  # first, because a waiting process ends when its socket closes
        try:
            process.end()
        except OSError as error:  # a shortage of descriptors must not keep its end from being recorded
            self._note(f"its process {process.process.pid} was not killed ({error}); it ends with its socket")
        if self._record_writer.record.preparation is None and self._recorded is not None:  # it was about to take over
            self._record_writer.change(preparation=self._recorded)
        self.record(step, self._shown(message.encode(errors="replace"))[:KEPT_MESSAGE],
                    self._shown(output)[-KEPT_OUTPUT:])  # fmt: skip

    def _shown(self, data: bytes) -> str:
        """Text without secrets. Truncate only afterwards, because half a secret would not be recognized."""
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
        """Add its output to the log if it ended before it waited."""
        # A full disk is no reason to fail.
        with contextlib.suppress(OSError, KeeperError), server_output(self._folder) as output:
            os.write(output, process.output())

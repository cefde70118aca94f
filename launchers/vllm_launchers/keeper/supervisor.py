"""The life of one server process: start, health, warm-up, exit, stop, restart, adoption.

One method per event; only the keeper's loop calls them. `lifecycle` lists the transitions and the races.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Mapping
from typing import Any

from vllm_launchers.keeper import location, processes, spawn
from vllm_launchers.keeper.context import KeeperContext, complete_secrets, known_secrets, secrets_of_process
from vllm_launchers.keeper.errors import CannotSleepError, KeeperError, NotPreparingError, UnwrittenError
from vllm_launchers.keeper.files import LOG, NODE_MARK, NODES_JOINED
from vllm_launchers.keeper.health import Health, HealthChecker, HealthTarget, WarmUpRun
from vllm_launchers.keeper.lifecycle import (
    KEPT_GENERATIONS,
    LIVE,
    AdoptedEnded,
    HealthChecked,
    NodeNews,
    NodeStep,
    Post,
    PreparedStep,
    SleepProgress,
    Transition,
    WarmedUp,
    exit_of,
    exit_unknown,
)
from vllm_launchers.keeper.log_forwarder import LogForwarder
from vllm_launchers.keeper.node_link import NodeLink
from vllm_launchers.keeper.output import server_output
from vllm_launchers.keeper.preparation import OVERDUE, PreparedProcess, RestartPreparation
from vllm_launchers.keeper.process_group import ProcessGroup
from vllm_launchers.keeper.record_writer import Notes, RecordWriter
from vllm_launchers.keeper.records import (
    Exit,
    Generation,
    LaunchSpec,
    PreparationStep,
    ProcessIdentity,
    Recording,
    RestartMode,
    Rollback,
    ServerRecord,
    Sleep,
    SleepStep,
    State,
    WarmUpOutcome,
    WarmUpReport,
)
from vllm_launchers.keeper.reservation import Reservation
from vllm_launchers.keeper.retry import decide_restart, gave_up, remaining, retry_delay
from vllm_launchers.keeper.sleeper import Sleeper, SleepOrder
from vllm_launchers.keeper.spawn import Sidecar, SidecarCommand, fill, server_process_command
from vllm_launchers.keeper.stop_sequence import Stop, StopSequence
from vllm_launchers.listeners import Owner
from vllm_launchers.values import Value, replace

START_PENDING = "started by a new keeper; the old one died before it could"
ADOPTED_EXIT = "it was adopted by a new keeper, which is not its parent"
WARMING_UP = "/health answers; ready after a first completed request"
JOINED = f"{NODES_JOINED}; ready once node 0 has completed a request"
LINK_LOST = "its keeper ended, and with it the link to the other nodes"
STOPPING, STOPPING_FOR_RESTART = "stopping as requested", "stopping for a restart"
SURVIVES = "; survives SIGKILL"
"""Follows the reason of the stop."""
UNUSABLE = (SleepStep.FAILED, SleepStep.MISMATCH)
"""Outcomes of sleep or wake-up after which the server must be restarted."""
DRAIN_SECONDS = 30.0
"""Time limit for reading an ended server's remaining output; the largest backlog (256 MiB) takes less."""


def unfit(report: WarmUpReport) -> str:
    """Why a server whose warm-up failed is stopped."""
    return f"/health answered, but the first request failed: {report.detail}"


def failed_warm_up(record: ServerRecord) -> bool:
    """Whether a stopping server ends because its warm-up failed."""
    report = record.current.warm_up
    return report is not None and report.outcome is WarmUpOutcome.FAILED and record.next_spec is None


def lost_node(record: ServerRecord) -> str:
    """If a stopping server ends because another node was lost: why. Otherwise empty."""
    reason, _, _ = record.reason.partition(SURVIVES)
    asked = reason.startswith((STOPPING, STOPPING_FOR_RESTART))
    return "" if asked or failed_warm_up(record) or record.current.spec.node is None else reason


class MissedExit(Value):
    """How a server ended while no keeper was watching, and what comes next.

    ``next_spec``: what to start next. ``start_pending``: the current generation's process has yet to be started.
    ``retry``: the restart policy decides.
    """

    exit: Exit
    next_spec: LaunchSpec | None
    start_pending: bool
    retry: bool


def missed_exit(record: ServerRecord, ended_with: str, now: float, *, foreign: bool = False) -> MissedExit:
    """How a server ended (or that it was never started) while no keeper was watching. ``now`` in Unix seconds.

    ``ended_with``: the result of `location.ended_with`. ``foreign``: the recorded process exists but is not this
    server's.
    """
    why, next_spec, start_pending = "no keeper was watching", record.next_spec, record.start_pending
    if ended_with:
        why = ended_with
        if next_spec is not None or start_pending:  # nothing is started automatically after that
            other = " with other flags" if next_spec is not None else ""
            why, next_spec, start_pending = f"{why}; its pending restart{other} was dropped", None, False
    elif record.server is None:
        why = "its keeper died before starting it"
    elif foreign:
        pid = record.server.pid
        why = f"pid {pid} is not this server's process (it does not have its output open) and was left alone"
    stopping = record.state is State.STOPPING
    lost = lost_node(record) if stopping else ""
    exit_ = record.current.exit or exit_unknown(stopping and not lost, f"{lost}; {why}" if lost else why, now)
    # The policy applies only to an exit that a keeper saw: for any other, it is unknown whether it was requested.
    return MissedExit(exit_, next_spec, start_pending, retry=record.current.exit is not None and not exit_.requested)


def dropped_restart(record: ServerRecord, ended_with: str) -> ServerRecord | None:
    """The record without its pending restart, if its machine or container has ended since then; else None."""
    if record.keeper is None or not ended_with:
        return None
    why = f"{record.reason}; {ended_with}, so it is not restarted"
    return replace(record, next_attempt_at=None, reason=why, keeper=None)


class Supervisor:
    """Supervises one server through its whole life. ``over``: nothing is left to supervise."""

    def __init__(
        self,
        context: KeeperContext,
        record: ServerRecord,
        secrets: Mapping[str, str],
        forwarder: LogForwarder,
        post: Post,
    ) -> None:
        self.note = Notes(context.folder)
        self.record_writer = RecordWriter(context.folder, record, self.note)
        self.health_checker = HealthChecker(post)
        self.over = False
        self._context = context
        self._secrets = dict(secrets)
        self._forwarder = forwarder
        self._post = post
        self._health = Health(context.tuning)
        self._reservation = Reservation()
        self._sidecar = Sidecar(context.folder, lambda process: self.record_writer.change(sidecar=process), self.note)
        self._epoch = 0
        self._ended = True
        self._left_ready_at: float | None = None
        self._retry_at: float | None = None
        self._stop: Stop | None = None
        self._preparation = RestartPreparation(
            context.folder, context.tuning.prepare, self.record_writer, self.note, forwarder.redaction, post
        )
        self._sleeper = Sleeper(self.record_writer, post)
        self._warm_up: WarmUpRun | None = None
        self._group: ProcessGroup | None = None
        self._nodes: NodeLink | None = None
        self._node_lost = ""
        """Why another node makes this one end; empty if none does."""
        self._recording: Recording | None = None
        """What the process being started continues from."""

    @property
    def record(self) -> ServerRecord:
        """The current record."""
        return self.record_writer.record

    def due(self) -> float:
        """Maximum seconds until `tick` is due."""
        if self._stop is not None:
            return self._stop.pause
        soon = self._sidecar.busy or self.record_writer.trouble or self._preparation.under_way
        seconds = 0.25 if soon else 5.0
        if self._retry_at is not None and not self.record_writer.trouble:
            seconds = min(seconds, max(self._retry_at - time.monotonic(), 0.0))
        return seconds

    # -- start and adoption ----------------------------------------------------------------------------------------

    def use_prepared(self, process: PreparedProcess, spec: LaunchSpec) -> None:
        """Use this process, prepared before the server existed, for the first start with these flags."""
        self._preparation.have(process, spec)

    def start(self, recording: Recording | None = None) -> None:
        """Start the current generation's process for the first time. Raises `UnwrittenError`."""
        self._recording = recording
        self._start_process("")

    def start_next(self, spec: LaunchSpec, *, start_pending: bool = False, rollback: Rollback | None = None) -> None:
        """Start the next generation; nothing of the previous one may be left.

        ``start_pending``: no console is waiting for it. Raises `UnwrittenError` before anything is changed.
        """
        record = self.record
        generation = Generation(record.current.number + 1, spec, started_at=time.time(), rollback=rollback)
        # Only the current generation needs the patterns, and they are not small.
        past = replace(record.current.spec, restart=replace(record.current.spec.restart, not_retryable=()))
        earlier = (*record.generations[:-1], replace(record.current, spec=past))
        kept = (*earlier, generation)[-KEPT_GENERATIONS:]
        preparation = record.preparation
        goes_on = preparation is not None and preparation.step in (PreparationStep.ACCEPTED, PreparationStep.UNPREPARED)
        if preparation is not None and not (goes_on and preparation.spec.argv == spec.argv):
            preparation = None  # of another restart
        self._forwarder.log.resize(spec.log_bytes, spec.log_files)
        self._start_process(
            "",
            start_pending=start_pending,
            generations=kept,
            attempt=0,
            downtime_seconds=None,
            preparation=preparation,
            sleep=_unusable_sleep(record),
        )

    def adopt(self) -> None:
        """Take over a server whose keeper died, whatever its state."""
        record, server = self.record, self.record.server
        self.note(f"adopting: {record.state}, pid {server.pid if server else 'none'}")
        if record.preparation is not None and record.preparation.step.under_way:
            goes_on = record.next_spec is not None or record.start_pending
            step = PreparationStep.UNPREPARED if goes_on else PreparationStep.CANCELED
            self._preparation.record(step, "its keeper has ended")
        if not record.state.alive:
            self._adopt_waiting()
            return
        self._epoch += 1
        # Pids from another boot or container mean nothing here.
        gone = location.ended_with(record)
        self._group = None if gone else ProcessGroup.adopted(self._context.folder, server, ray=record.current.spec.ray)
        if server is None or record.current.exit is not None or self._group is None or not self._group.server_lives:
            self._adopt_dead()
            return
        self._ended = False
        self._group.refresh(self._other_children())
        _watch_exit(server, self._epoch, self._post)
        reason = "" if record.state is State.READY else record.reason  # its port may have been another process's
        self.record_writer.change(**_this_keeper(), adopted=True, start_pending=False, reason=reason)
        self._adopt_sidecar()
        if record.state is State.STOPPING:
            unserved, self._node_lost = failed_warm_up(record), lost_node(record)
            sequence = self._new_stop_sequence(serving=unserved)
            requested = not unserved and not self._node_lost
            self._stop = Stop(sequence, self.note, requested=requested, retry=unserved)
            self._sidecar.want(None)
        elif record.current.spec.node is not None:
            self._end_with_nodes(LINK_LOST)
        else:
            self._start_health_checks()
            self._sleeper.resume(*self._request_target(record, server))

    def _adopt_waiting(self) -> None:
        """The server failed and is waiting for its automatic restart: continue the wait."""
        record = self.record
        if (dropped := dropped_restart(record, location.ended_with(record))) is not None:
            self.record_writer.replace(dropped)
            self.over = True
            return
        seconds = remaining(record, time.time())
        self.note(f"restarts in {seconds:.1f}s")
        self._retry_at = time.monotonic() + seconds
        self._keep_port()
        self.record_writer.change(**_this_keeper(), next_attempt_at=time.time() + seconds)

    def _adopt_dead(self) -> None:
        """The server ended (or was never started) while no keeper was watching: record that and end its leftovers."""
        foreign = self._group is not None and self._group.foreign
        found = missed_exit(self.record, location.ended_with(self.record), time.time(), foreign=foreign)
        self._ended = True
        self._adopt_sidecar()
        self._sidecar.want(None)
        sequence = StopSequence.leftover(time.monotonic(), self._context.tuning.stop_timeouts)
        self._stop = Stop(sequence, self.note, requested=found.exit.requested, retry=found.retry)
        fields = {"next_spec": found.next_spec, "start_pending": found.start_pending}
        self._write_exit(found.exit, **_this_keeper(), **fields)

    def _adopt_sidecar(self) -> None:
        sidecar = self.record.sidecar
        if sidecar is not None and self._sidecar.is_mine(sidecar):
            self._sidecar.adopt(sidecar, self._sidecar_command())
        elif not self._ended:
            self._sidecar.want(self._sidecar_command())

    # -- starting --------------------------------------------------------------------------------------------------

    def _start_process(self, reason: str, **fields: Any) -> None:
        """Start the last generation; ``fields`` change in the same write.

        Raises `UnwrittenError` before anything is changed. ``start_pending`` stays set until the process runs. No
        process is started without a record: if this keeper died, nobody would own it.
        """
        record = self.record
        self._empty_output()  # a killed keeper may have left some
        inode, offset = self._forwarder.log.position()
        begun = (fields.get("generations") or record.generations)[-1]
        started_at = time.time()
        if self._recording is not None:
            started_at, offset = self._recording.started_at, self._recording.log_offset
        generation = replace(begun, started_at=started_at, ready_at=None, ended_at=None, exit=None, warm_up=None)
        fields |= {
            "server": None,
            **_this_keeper(),
            "adopted": False,
            "next_attempt_at": None,
            "log_inode": inode,
            "log_offset": offset,
            "next_spec": None,
        }
        if record.state is State.STARTING:  # the very first start
            generations = (*record.generations[:-1], generation)
            self.record_writer.change(insist=True, reason=reason, **fields | {"generations": generations})
        else:
            self.record_writer.move(Transition.LAUNCHED, reason, generation, insist=True, **fields)
        self.over = False
        self._epoch += 1
        self._health.reset()
        self._reservation.admit(begun.spec.host, begun.spec.port, shared=begun.spec.reuse_port)
        self._node_lost = ""
        if begun.spec.node is None:
            self._run_process(begun)
            return
        self._ended = True
        if not begun.spec.node.headless:
            self._reservation.hold(begun.spec.host, begun.spec.port)
        self._nodes = NodeLink(begun.spec.node, self._epoch, self._post)
        self._nodes.start()

    def _run_process(self, begun: Generation) -> None:
        """Start the process of the last generation, whose start is already recorded."""
        try:
            server = self._preparation.take_over(begun) or self._spawn(begun.spec)
        except (spawn.SpawnError, KeeperError, OSError) as error:
            self._could_not_start(f"could not be started: {error}", self._may_pass(error))
            return
        self._retry_at = None
        self._ended = False
        self._record_started()
        self._group = ProcessGroup.born(self._context.folder, server, ray=begun.spec.ray)
        self._start_health_checks()
        self._sidecar.want(self._sidecar_command())

    def _record_started(self) -> None:
        """Record that the pending start is done. A prepared process must have reported that it is the server.

        If this keeper dies before that, the kernel kills the process, and the next keeper has to start another one.
        """
        if self.record.start_pending and not self._ended and not self._preparation.under_way:
            self.record_writer.change(start_pending=False)

    def _spawn(self, spec: LaunchSpec) -> ProcessIdentity:
        """Start a process that writes to the output file; it is recorded before it runs.

        Raises `SecretMissingError`, `UnwrittenError`, `SpawnError`, OSError.
        """
        with server_output(self._context.folder) as output:
            command = server_process_command(self._context, spec, spec.argv, self._secrets, output)
            return spawn.start(command, lambda server: self.record_writer.change(insist=True, server=server))

    def _sidecar_command(self) -> SidecarCommand | None:
        record, context = self.record, self._context
        if record.server is None:
            return None
        argv = fill(record.current.spec.sidecar, record.server, record.current.number)
        return SidecarCommand(argv, context.environment, str(context.folder), context.umask) if argv else None

    def _may_pass(self, error: Exception) -> bool:
        """Whether another attempt to start the process may succeed. A command that has never run may be misspelled."""
        number = error.number if isinstance(error, spawn.SpawnError) else getattr(error, "errno", 0)
        if number in spawn.SHORTAGES:
            return True
        record = self.record
        program = record.current.spec.argv[:1]
        earlier = any(one.ready_at is not None and one.spec.argv[:1] == program for one in record.generations)
        return number in spawn.REPLACED and (record.attempt > 0 or earlier)

    def _could_not_start(self, reason: str, passing: bool) -> None:
        """Handle a process that could not be started; the restart policy applies if the error may be temporary."""
        self._leave_nodes(reason, requested=False)
        at = time.time()
        ended = Exit(at, code=None, signal=None, requested=False, reason=reason)
        generation = replace(self.record.current, ended_at=at, exit=ended)
        self._ended = True
        self._sidecar.want(None)
        record = self.record
        earlier = self._earlier_flags()
        delay = retry_delay(record.current.spec.restart, record.attempt) if passing and earlier is None else None
        if delay is None:
            if passing and record.attempt:
                reason += f"; {gave_up(record.attempt)}"
            self.record_writer.move(Transition.LOST, reason, generation, server=None, keeper=None, start_pending=False)
            self._retry_at = None
            self.over = True
            if earlier is not None:
                with contextlib.suppress(UnwrittenError):
                    self._roll_back(earlier, reason)
            if self.over:
                self._reservation.release()
            return
        self._retry_at = time.monotonic() + delay
        self._keep_port()
        at += delay
        self.record_writer.move(
            Transition.LOST, reason, generation, server=None, start_pending=False, next_attempt_at=at
        )

    # -- health ----------------------------------------------------------------------------------------------------

    def _start_health_checks(self) -> None:
        spec, tuning = self.record.current.spec, self._context.tuning
        if spec.node is not None and spec.node.headless:
            return  # it serves no HTTP; its process and the link to node 0 show that it is alive
        interval = tuning.health_check_starting if self.record.state is State.STARTING else tuning.health_check_ready
        if (server := self.record.server) is not None:
            owner = Owner(server.pid, server.start_time)
            self.health_checker.aim(HealthTarget(self._epoch, owner, spec.host, spec.port, interval, spec.tls))

    def health_checked(self, event: HealthChecked) -> None:
        """Handle the result of a health check."""
        if event.epoch != self._epoch or self._ended or self._stop is not None or self._warm_up is not None:
            return
        record = self.record
        before = self._health.reason
        transition = self._health.transition(event, record.state, record.current.spec.port)
        match transition:
            case Transition.ANSWERED:
                self._reservation.release()
                if record.current.spec.warm_up is None:
                    self._ready(record.current)
                else:
                    self._begin_warm_up()
            case Transition.RECOVERED:
                self.record_writer.move(transition, "")
            case Transition.UNANSWERED:
                self.record_writer.move(transition, self._health.reason)
            case _ if event.foreign and self._health.reason != record.reason:
                self.note(self._health.reason)
                self.record_writer.change(reason=self._health.reason)
            case _ if event.healthy and before and record.reason == before:  # it is our process that answers again
                self.record_writer.change(reason="")

    def _begin_warm_up(self) -> None:
        """/health answers: send the warm-up request, which must complete before the server is ready."""
        record, spec = self.record, self.record.current.spec
        warm_up, server = spec.warm_up, record.server
        if warm_up is None or server is None:
            return
        target, key = self._request_target(record, server)
        generation = replace(record.current, warm_up=WarmUpReport(time.time()))
        self.record_writer.change(reason=WARMING_UP, generations=(*record.generations[:-1], generation))
        begun, golden = record.current.warm_up is not None, spec.sleep_mode
        self._warm_up = WarmUpRun(target, warm_up, key, self._post, begun=begun, golden=golden, ray=spec.ray)
        self._warm_up.start()

    def _request_target(self, record: ServerRecord, server: ProcessIdentity) -> tuple[HealthTarget, str]:
        """Where to send requests for the server's own process, and the API key for them."""
        spec = record.current.spec
        found = secrets_of_process(record) | known_secrets(spec, self._secrets, self._context.environment)
        owner = Owner(server.pid, server.start_time)
        key = found.get(spec.warm_up.api_key, "") if spec.warm_up is not None else ""
        return HealthTarget(self._epoch, owner, spec.host, spec.port, 0.0, spec.tls), key

    def _end_warm_up(self) -> None:
        if self._warm_up is not None:
            self._warm_up.cancel()
            self._warm_up = None

    def warmed_up(self, event: WarmedUp) -> None:
        """Handle the end of the warm-up: the server is ready, or is stopped because it can't serve."""
        if event.epoch != self._epoch or self._ended or self._stop is not None or self._warm_up is None:
            return  # from a process that has ended or is stopping
        self._warm_up = None
        report = event.report
        # With several nodes, /health answers although no request can be computed: only a completed request counts.
        if self._nodes is not None and report.outcome is WarmUpOutcome.REFUSED:
            report = replace(report, outcome=WarmUpOutcome.FAILED)
        generation = replace(self.record.current, warm_up=report, golden=event.golden)
        if report.outcome is not WarmUpOutcome.FAILED:
            if report.detail:
                self.note(f"warm-up {report.outcome}: {report.detail}")
            self._ready(generation)
            return
        reason = unfit(report)
        self.note(reason)
        self.health_checker.aim(None)
        self._leave_nodes(reason, requested=False)
        self.record_writer.move(Transition.UNFIT, reason, generation)
        self._stop = Stop(self._new_stop_sequence(serving=True), self.note, requested=False, retry=True)

    def _ready(self, generation: Generation) -> None:
        downtime = self.record.downtime_seconds
        self._health.since = time.monotonic()
        if self._left_ready_at is not None:
            downtime, self._left_ready_at = self._health.since - self._left_ready_at, None
        recording, self._recording = self._recording, None  # applies to this start only
        generation = replace(generation, ready_at=recording.ready_at if recording is not None else time.time())
        self.record_writer.move(Transition.ANSWERED, "", generation, downtime_seconds=downtime)
        if recording is not None:
            self.record_writer.change(state_since=recording.ready_at)
        self._start_health_checks()
        if self._nodes is not None and generation.spec.node is not None and not generation.spec.node.headless:
            self._nodes.ready()
        if self._group is not None:
            self._group.poll_soon()

    # -- the other nodes of a multi-node server --------------------------------------------------------------------

    def node_news(self, event: NodeNews) -> None:
        """Handle a report from the link to the other nodes."""
        if event.epoch != self._epoch or self._nodes is None or self._stop is not None or self.over:
            return
        record = self.record
        waits = record.server is None
        match event.step:
            case NodeStep.WAITING if event.message != record.reason:
                self.note(event.message)
                self.record_writer.change(reason=event.message)
            case NodeStep.JOINED:
                self.record_writer.change(reason=JOINED)
                self._mark_log(NODES_JOINED)
                spec = record.current.spec
                self._reservation.admit(spec.host, spec.port, shared=spec.reuse_port)
                self._run_process(record.current)
            case NodeStep.READY if record.state is State.STARTING and not waits:
                self._ready(record.current)
            case NodeStep.MISSING | NodeStep.DIFFERS:
                self._mark_log(event.message)
                self._could_not_start(event.message, passing=False)
            case NodeStep.ENDED if event.requested:
                self.note(event.message)
                self._node_lost = event.message
                self.stop()
            case NodeStep.ENDED if waits:
                self._mark_log(event.message)
                self._could_not_start(event.message, passing=False)
            case NodeStep.ENDED:
                self._end_with_nodes(event.message)

    def _end_with_nodes(self, reason: str) -> None:
        """End this node with the stop sequence, as a failure: vLLM would leave it running."""
        self.note(reason)
        self._mark_log(reason)
        self._node_lost = reason
        sequence = self._new_stop_sequence()
        self.health_checker.aim(None)
        self._end_warm_up()
        self._sleeper.end(reason)
        self.record_writer.move(Transition.NODE_LOST, reason)
        self._stop = Stop(sequence, self.note, requested=False)

    def _leave_nodes(self, why: str, *, requested: bool) -> None:
        """This node is ending: end the others, too."""
        if self._nodes is not None:
            self._nodes.close(why, requested=requested)
            self._nodes = None

    def _mark_log(self, text: str) -> None:
        """Add a line to the server's log: vLLM does not log the cause, and the log should be readable on its own."""
        with contextlib.suppress(OSError, KeeperError), server_output(self._context.folder) as output:
            os.write(output, f"{NODE_MARK}{text}\n".encode(errors="replace"))

    # -- exit and stop ---------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Reap all children that have ended (SIGCHLD)."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            server = self.record.server
            if server is not None and pid == server.pid and not self._ended and not self.record.adopted:
                self._process_ended(status)

    def adopted_ended(self, epoch: int) -> None:
        """Handle the end of an adopted server's process."""
        if epoch == self._epoch and not self._ended:
            self._process_ended(None)

    def _process_ended(self, status: int | None) -> None:
        """Handle the end of the server's process; ``status`` is None if unknown."""
        now, timeouts, stop = time.time(), self._context.tuning.stop_timeouts, self._stop
        self._ended = True
        self.health_checker.aim(None)
        self._sleeper.end("the server ended")
        self._sidecar.want(None)
        requested = stop is not None and stop.requested
        if status is None:
            ended = exit_unknown(requested, ADOPTED_EXIT, now)
        else:
            overdue = OVERDUE if self._preparation.killed == self.record.server else ""
            ended = exit_of(status, requested, stop is not None and stop.sequence.killing, now, overdue)
        more: dict[str, Any] = {}
        if stop is None:
            sequence = StopSequence.leftover(time.monotonic(), timeouts)
            self._stop = Stop(sequence, self.note, requested=False, retry=True)
            more = self._ended_beside(self._stop)
        else:
            stop.sequence.server_ended(time.monotonic())
            self._preparation.server_stopped()
        if self._node_lost:
            ended = replace(ended, reason=f"{self._node_lost}; stopped ({_exit_text(ended)})")
        elif not requested:
            ended = self._with_raylet(self._with_first_request(ended))
        self._leave_nodes(ended.reason, requested=requested)
        self._write_exit(ended, **more)
        self._keep_port()

    def _with_raylet(self, ended: Exit) -> Exit:
        """Add the death of the workers' raylet to an unrequested exit: vLLM often sees only a lost worker."""
        raylet = self._group.dead_raylet if self._group is not None else None
        if raylet is None:
            return ended
        reason = f"Ray's raylet died (pid {raylet.pid})"
        self._mark_log(reason)
        return replace(ended, reason=f"{reason}; {ended.reason}")

    def _with_first_request(self, ended: Exit) -> Exit:
        """Add the first request's part in it to an unrequested exit."""
        record = self.record
        report = record.current.warm_up
        if self._warm_up is not None and report is not None:
            self._end_warm_up()
            report = replace(report, outcome=WarmUpOutcome.FAILED, detail=ended.reason, seconds=time.time() - report.at)
            generation = replace(record.current, warm_up=report)
            self.record_writer.change(generations=(*record.generations[:-1], generation))
            was = "was " if ended.signal else ""
            return replace(ended, reason=f"/health answered; on the first request it {was}{ended.reason}")
        if report is not None and report.outcome is WarmUpOutcome.FAILED:
            return replace(ended, reason=f"{unfit(report)}; stopped ({_exit_text(ended)})")
        return ended

    def _keep_port(self) -> None:
        """Hold the port for the next start as soon as the server releases it."""
        policy, stop, following = self.record.current.spec.restart, self._stop, self.record.next_spec
        if stop is not None and following is not None:
            self._reservation.hold(following.host, following.port)
        elif self._retry_at is not None or (stop is not None and stop.retry and policy.mode is not RestartMode.NEVER):
            self._reservation.hold(self.record.current.spec.host, self.record.current.spec.port)

    def _write_exit(self, ended: Exit, **fields: Any) -> None:
        record = self.record
        generation = replace(record.current, ended_at=record.current.ended_at or ended.at, exit=ended)
        if record.state is State.STOPPING:
            self.record_writer.change(generations=(*record.generations[:-1], generation), **fields)
        else:
            self.record_writer.move(Transition.ENDED, ended.reason, generation, **fields)

    def stop(self) -> None:
        """Stop the server as requested. The next `tick` sends the signals."""
        self._stop_for(None)

    def _stop_for(self, next_spec: LaunchSpec | None) -> None:
        """Stop the server as requested; ``next_spec``: what to start afterwards. The last request counts.

        Raises `SecretMissingError` before anything is done, and for a restart `UnwrittenError` before the server is
        touched (another restart's preparation is already discarded then).
        """
        if next_spec is not None:
            self._learn_secrets(next_spec)
        if next_spec is None or next_spec is not self._preparation.spec:
            self._preparation.discard(PreparationStep.CANCELED, "a stop was requested")
        reason = STOPPING if next_spec is None else STOPPING_FOR_RESTART
        record, stop = self.record, self._stop
        insist = next_spec is not None
        if stop is not None:
            if stop.requested:
                self.record_writer.change(insist=insist, reason=reason, next_spec=next_spec)
            else:
                self.record_writer.change(insist=insist, next_spec=next_spec, start_pending=False)
            stop.retry = False
        elif record.state in LIVE:
            self.record_writer.move(
                Transition.STOP_REQUESTED, reason, insist=insist, next_spec=next_spec, start_pending=False
            )
            self._leave_nodes("stopped as requested", requested=True)
            if record.current.spec.node is not None and record.server is None:
                before = Exit(time.time(), None, None, True, "stopped as requested before its process was started")
                self._write_exit(before)
            if record.state is not State.STARTING:
                since = self._health.since if record.state is State.UNRESPONSIVE else time.monotonic()
                self._left_ready_at = since
            self._stop = Stop(self._new_stop_sequence(), self.note, requested=True)
            self.health_checker.aim(None)
            self._end_warm_up()
            self._sleeper.end("a stop was requested")
        elif next_spec is not None:  # failed, and waiting for its automatic restart
            self.start_next(next_spec)
        elif not self.over:
            self._retry_at = None
            self._reservation.release()
            reason = "stopped as requested while it waited for a restart"
            self.record_writer.move(Transition.CANCELED, reason, next_attempt_at=None, keeper=None)
            self.over = True

    def _learn_secrets(self, spec: LaunchSpec, secrets: Mapping[str, str] | None = None) -> None:
        """Collect all secrets of a spec and redact them in the log. Raises `SecretMissingError`."""
        given = {**self._secrets, **(secrets or {})}
        self._secrets.update(complete_secrets(spec, given, self._context.environment))
        self._forwarder.redaction.know(self._secrets.values())

    def _new_stop_sequence(self, *, serving: bool = False) -> StopSequence:
        now, timeouts = time.monotonic(), self._context.tuning.stop_timeouts
        if self.record.current.ready_at is None and not serving:
            return StopSequence.starting(now, timeouts)
        return StopSequence.serving(now, timeouts, self.record.current.spec.drain_seconds)

    def _continue_after_end(self, stop: Stop) -> None:
        """Take the next step once nothing of the server is left. Raises `UnwrittenError` to wait for the record."""
        record = self.record
        if record.state in LIVE or (record.state is State.STOPPING and record.current.exit is None):
            unknown = exit_unknown(stop.requested, "its keeper failed to record its end", time.time())
            self._write_exit(unknown)
        self._group = None
        if record.next_spec is not None:
            self.start_next(record.next_spec, start_pending=True)
        elif self.record.start_pending:
            self._start_process(stop.restart_reason or START_PENDING, attempt=self.record.attempt)
        else:
            self._end(stop)
        self._stop = None

    def _end(self, stop: Stop) -> None:
        """Nothing is to be started next: record the end, and decide whether to try again."""
        unread = self._empty_output()
        ended = self.record.current.exit
        reason = "; ".join(filter(None, (ended.reason if ended else "it ended", unread)))
        if stop.requested:
            self._reservation.release()
            self.record_writer.move(Transition.GONE, reason, server=None, keeper=None, next_spec=None)
            self.over = True
        elif stop.retry and (earlier := self._earlier_flags()) is not None:
            self._roll_back(earlier, reason)
        else:
            self._retry_or_fail(reason, stop.retry)

    def _empty_output(self) -> str:
        """Write the rest of the log once nothing of the server is left. Returns a clause if that took too long."""
        if self._forwarder.begin_anew(DRAIN_SECONDS):
            return ""
        unread = (
            f"reading the rest of its log took more than {DRAIN_SECONDS:g}s; those lines may appear in the next run's "
            "section"
        )
        self.note(unread)
        return unread

    def _retry_or_fail(self, reason: str, retry: bool) -> None:
        back = self.record.current.rollback
        if back is not None and self.record.current.ready_at is None:
            retry = False
            reason = f"run {back.failed}: {back.reason}; after reverting to run {back.to}'s flags: {reason}"
        decision = decide_restart(self.record, self._context.folder / LOG, self.note) if retry else None
        if decision is None or decision.delay is None:
            if decision is not None and decision.why:
                reason += f"; {decision.why}"
            self._reservation.release()
            self.record_writer.move(Transition.LOST, reason, server=None, keeper=None)
            self.over = True
            return
        self._retry_at = time.monotonic() + decision.delay
        self._keep_port()
        self.record_writer.move(Transition.LOST, reason, server=None, next_attempt_at=time.time() + decision.delay)

    # -- rollback --------------------------------------------------------------------------------------------------

    def _earlier_flags(self) -> Generation | None:
        """The generation to roll back to: it served until a restart stopped it, and the current one never served."""
        generations, current = self.record.generations, self.record.current
        if len(generations) < 2 or current.ready_at is not None or not current.spec.rollback:
            return None
        earlier = generations[-2]
        served = earlier.ready_at is not None and earlier.exit is not None and earlier.exit.requested
        return earlier if served else None

    def _roll_back(self, earlier: Generation, reason: str) -> None:
        """Start again with the previous generation's flags. Raises `UnwrittenError` before anything is changed."""
        failed = self.record.current
        self.note(f"run {failed.number} failed ({reason}): back to the flags of run {earlier.number}")
        restart = replace(earlier.spec.restart, not_retryable=failed.spec.restart.not_retryable)
        spec = replace(earlier.spec, restart=restart, rollback=False)
        record, (_, log_end) = self.record, self._forwarder.log.position()
        rollback = Rollback(failed.number, earlier.number, reason, record.log_inode, record.log_offset, log_end)
        self.start_next(spec, start_pending=True, rollback=rollback)

    def _retry(self) -> None:
        record = self.record
        attempt, limit = record.attempt + 1, record.current.spec.restart.limit
        before = record.current.exit.reason if record.current.exit else "it failed"
        self._start_process(
            f"automatic restart {attempt} of {limit} after: {before}", attempt=attempt, start_pending=True
        )

    # -- a prepared restart ----------------------------------------------------------------------------------------

    def restart(
        self, spec: LaunchSpec, secrets: Mapping[str, str] | None = None, console: ProcessIdentity | None = None
    ) -> None:
        """Restart as requested. A ready server keeps serving until the next generation's process is prepared.

        ``console``: the process that waits for it; if that ends, the preparation is canceled. Raises `CannotSleepError`
        before anything is done, and `SecretMissingError` and `UnwrittenError` before the server is touched; by then, a
        preparation or drain in progress may have been canceled.
        """
        if self._sleeper.busy and not self._sleeper.cancel_drain():
            raise CannotSleepError(f"{self.record.name} is going to sleep or waking up: restart it after that")
        self._learn_secrets(spec, secrets)
        self._preparation.discard(PreparationStep.CANCELED, "another restart was requested")
        if spec.prepared_argv and self._stop is None and self.record.state is State.READY:
            command = server_process_command(self._context, spec, spec.prepared_argv, self._secrets)
            self._preparation.begin(spec, console, command)
            return
        self._stop_for(spec)
        if self.record.preparation is not None:
            self.record_writer.change(preparation=None)  # from an earlier restart

    def cancel(self) -> None:
        """Cancel what does not yet keep the server from serving: a restart's preparation, or draining before sleep.

        Raises `NotPreparingError` if there is nothing to cancel.
        """
        if self._sleeper.cancel_drain():
            return
        if not self._preparation.cancelable:
            raise NotPreparingError(f"{self.record.name}: no restart is being prepared; nothing was canceled")
        self._preparation.discard(PreparationStep.CANCELED, "as requested")

    # -- sleep -----------------------------------------------------------------------------------------------------

    def sleep(self, level: int, drain_seconds: float, console: ProcessIdentity | None) -> None:
        """Put the server to sleep as requested. It serves until its requests have ended, for at most ``drain_seconds``.

        Raises `CannotSleepError` and `UnwrittenError` before anything is done.
        """
        self._order_sleep(SleepOrder(False, level, drain_seconds, console))

    def wake(self) -> None:
        """Wake the server up as requested. Raises `CannotSleepError` and `UnwrittenError` before anything is done."""
        self._order_sleep(SleepOrder(True, self.record.sleep.level if self.record.sleep is not None else 1))

    def _order_sleep(self, order: SleepOrder) -> None:
        self._sleeper.check(wake=order.wake)
        record = self.record
        if record.server is not None:
            self._sleeper.begin(order, *self._request_target(record, record.server))

    def slept(self, event: SleepProgress) -> None:
        """Handle a step of going to sleep or waking up; restart a server that can't continue afterwards."""
        if event.epoch != self._epoch or self._ended or self._stop is not None or not self._sleeper.busy:
            return
        if why := self._sleeper.progress(event):
            self.note(f"restarted: {why}")
            self._restart_after_sleep()

    def _restart_after_sleep(self) -> None:
        """Restart a server that is unusable after its sleep; if that can't be done now, `tick` tries again."""
        try:
            self._stop_for(self.record.current.spec)
        except KeeperError as error:
            reason = f"can't be restarted: {error}"
            if self.record.reason != reason:
                self.note(reason)
                self.record_writer.change(reason=reason)

    def prepared_step(self, event: PreparedStep) -> None:
        """Handle progress reported by the prepared process."""
        if (spec := self._preparation.on_step(event)) is None:
            self._record_started()
            return
        try:
            self._stop_for(spec)
        except KeeperError as error:
            self._preparation.fail(str(error))
        else:
            self._preparation.server_stops()

    def _ended_beside(self, stop: Stop) -> dict[str, Any]:
        """The server exited on its own while its next process was being prepared: the restart continues.

        Returns the changes for the record.
        """
        waits, spec, why = self._preparation.waits, self._preparation.spec, self._preparation.server_ended()
        if not why:
            return {"start_pending": False}
        stop.retry = False
        if waits:
            return {"next_spec": spec}
        stop.restart_reason = f"restarted without preparation, because the prepared process could not be used: {why}"
        return {"start_pending": True}

    # -- periodic work ---------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Check everything that no event reports, and do what is due."""
        record = self.record
        self.record_writer.catch_up()
        if record.adopted and not self._ended and not processes.alive(record.server):
            self._process_ended(None)
        self._sidecar.tick(now)
        self._preparation.tick(now)
        if self._stop is not None:
            self._keep_port()
            self._go_on_stopping(self._stop, now)
        elif self._retry_at is not None and now >= self._retry_at:
            if not self.record_writer.trouble:  # else wait until the record can be written
                with contextlib.suppress(UnwrittenError):
                    self._retry()
        elif record.state is State.ASLEEP and record.sleep is not None and record.sleep.step in UNUSABLE:
            if not self.record_writer.trouble:
                self._restart_after_sleep()
        elif record.attempt and record.state is State.READY and now - self._health.since >= self._context.tuning.steady:
            self.record_writer.change(attempt=0)
        elif self._group is not None and not self._ended:
            self._group.poll(now, self._other_children())

    def _go_on_stopping(self, stop: Stop, now: float) -> None:
        clean = stop.advance(self._group, self._other_children(), self._ended, now)
        if clean and self._sidecar.gone:
            if self.record.next_spec is None or not self.record_writer.trouble:  # else wait until it can be written
                with contextlib.suppress(UnwrittenError):
                    self._continue_after_end(stop)
        elif stop.stuck:
            pids = ", ".join(map(str, stop.stuck))
            before, _, _ = self.record.reason.partition(SURVIVES)
            reason = f"{before}{SURVIVES} (pid {pids}): the kernel or a driver holds it"
            if self.record.reason != reason:
                self.note(reason)
                self.record_writer.change(reason=reason)

    def _other_children(self) -> list[int]:
        """Pids of this keeper's children that do not belong to the server."""
        others = (self._sidecar.process, self._preparation.process)
        return [process.pid for process in others if process is not None]


def _exit_text(ended: Exit) -> str:
    return f"exit code {ended.code}" if ended.code is not None else ended.signal or "exit code unknown"


def _this_keeper() -> dict[str, Any]:
    """The fields in which a record describes the keeper that writes it."""
    return {"keeper": processes.identity(os.getpid()), "location": location.here()}


def _unusable_sleep(record: ServerRecord) -> Sleep | None:
    """The previous generation's sleep, if the new one keeps it: it says why the server had to be restarted."""
    sleep = record.sleep
    if sleep is None or sleep.step not in UNUSABLE:
        return None
    return sleep if sleep.step_at >= record.current.started_at else None


def _watch_exit(process: ProcessIdentity, epoch: int, post: Post) -> None:
    """Post `AdoptedEnded` when a process that is not our child ends. Without pidfds, `tick` has to notice it."""
    with contextlib.suppress(OSError):
        pidfd = processes.open_pidfd(process)
        if pidfd is not None:
            threading.Thread(target=_wait_for_exit, args=(pidfd, epoch, post), name="watch", daemon=True).start()


def _wait_for_exit(pidfd: int, epoch: int, post: Post) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    os.close(pidfd)
    post(AdoptedEnded(epoch))

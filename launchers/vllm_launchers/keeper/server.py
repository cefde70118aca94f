"""The lifecycle of one server: what happens to it, one method per happening. Only the keeper's loop calls in here.

`lifecycle` lists the transitions and the races.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_launchers.keeper import credentials, processes, spawn
from vllm_launchers.keeper.companion import Companion, Wanted, fill
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.events import Post, Probed
from vllm_launchers.keeper.health import Health
from vllm_launchers.keeper.ladder import Ladder
from vllm_launchers.keeper.ledger import Ledger, Notes
from vllm_launchers.keeper.lifecycle import (
    KEPT_GENERATIONS,
    LIVE,
    Transition,
    Tuning,
    exit_of,
    exit_unknown,
    retry_delay,
)
from vllm_launchers.keeper.logfile import LogPump, open_pipe
from vllm_launchers.keeper.members import Household
from vllm_launchers.keeper.prober import Prober, Target
from vllm_launchers.keeper.records import Exit, Generation, LaunchSpec, ProcessIdentity, ServerRecord, State
from vllm_launchers.keeper.stopping import Stop
from vllm_launchers.keeper.watch import watch

ADOPTED = "a new keeper adopted it after the old one died; its exit code will be unknown"
ADOPTED_EXIT = "it was adopted by a new keeper, which is not its parent"
DRAIN_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a keeper was started with, and hands on to its server."""

    folder: Path
    environment: Mapping[str, str]
    umask: int
    tuning: Tuning


class Server:
    """One server and everything that happens to it. ``over`` once nothing is left to keep."""

    def __init__(
        self, around: Surroundings, record: ServerRecord, secrets: Mapping[str, str], pump: LogPump, post: Post
    ) -> None:
        self.note = Notes(around.folder)
        self.ledger = Ledger(around.folder, record, self.note)
        self.prober = Prober(post)
        self.over = False
        self._around = around
        self._secrets = dict(secrets)
        self._pump = pump
        self._post = post
        self._health = Health(around.tuning)
        self._companion = Companion(around.folder, lambda process: self.ledger.change(companion=process), self.note)
        self._epoch = 0
        self._ended = True
        self._left_ready_at: float | None = None
        self._retry_at: float | None = None
        self._stop: Stop | None = None
        self._household: Household | None = None

    @property
    def record(self) -> ServerRecord:
        """The record as it is now."""
        return self.ledger.record

    def due(self) -> float:
        """Seconds until `tick` has something to do, at most."""
        if self._stop is not None:
            return 0.1
        seconds = 0.25 if self._companion.busy else 5.0
        if self._retry_at is not None:
            seconds = min(seconds, max(self._retry_at - time.monotonic(), 0.0))
        return seconds

    # -- beginnings ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the present generation's process for the first time."""
        self._start_process("")

    def start_next(self, spec: LaunchSpec) -> None:
        """Start the next generation; nothing of the one before is left."""
        record = self.record
        generation = Generation(record.current.number + 1, spec, started_at=time.time())
        kept = (*record.generations, generation)[-KEPT_GENERATIONS:]
        self.ledger.record = replace(record, generations=kept, attempt=0, downtime_seconds=None)
        self._pump.log.resize(spec.log_bytes, spec.log_files)
        self._start_process("")

    def adopt(self) -> None:
        """Take over a server whose keeper died, wherever it stands."""
        record, server = self.record, self.record.server
        self.note(f"adopting: {record.state}, pid {server.pid if server else 'none'}")
        if not record.state.alive:
            why = f"{record.reason}; its keeper died while it waited, so it is not started again"
            self.ledger.change(next_attempt_at=None, reason=why, keeper=None)
            self.over = True
            return
        self.ledger.change(keeper=processes.identity(os.getpid()))
        self._epoch += 1
        if server is not None:
            self._household = Household((self._around.folder / "server.pipe").resolve(), server)
        if server is None or record.current.exit is not None or not processes.alive(server):
            self._adopt_dead()
            return
        self._ended = False
        self._look()
        watch(server, self._epoch, self._post)
        self.ledger.change(adopted=True, reason=ADOPTED)
        self._adopt_companion()
        if record.state is State.STOPPING:
            self._stop = Stop(self._fresh_ladder(), self.note, requested=True)
            self._companion.want(None)
        else:
            self._aim()

    def _adopt_dead(self) -> None:
        """It ended (or was never started) while no keeper watched: write that down, and end what it left."""
        record = self.record
        why = "it ended while no keeper watched"
        if record.server is None:
            why = "its keeper died before it was started"
        elif record.server.boot_id != processes.boot_id():
            why = "the machine was restarted since"
        ended = record.current.exit or exit_unknown(record.state is State.STOPPING, why, time.time())
        self._ended = True
        self._adopt_companion()
        self._companion.want(None)
        ladder = Ladder.left_over(time.monotonic(), self._around.tuning.patience)
        self._stop = Stop(ladder, self.note, requested=ended.requested)
        self._write_exit(ended)

    def _adopt_companion(self) -> None:
        companion = self.record.companion
        if companion is not None and processes.alive(companion):
            self._companion.adopt(companion, self._companion_wanted())
        elif not self._ended:
            self._companion.want(self._companion_wanted())

    # -- starting --------------------------------------------------------------------------------------------------

    def _start_process(self, reason: str) -> None:
        self._epoch += 1
        self._health.reset()
        record, spec = self.record, self.record.current.spec
        inode, offset = self._pump.log.position()
        generation = replace(record.current, started_at=time.time(), ready_at=None, ended_at=None, exit=None)
        fields: dict[str, Any] = {
            "server": None,
            "keeper": processes.identity(os.getpid()),
            "adopted": False,
            "next_attempt_at": None,
            "log_inode": inode,
            "log_offset": offset,
        }
        if record.state is State.STARTING:  # the very first start
            self.ledger.change(generations=(*record.generations[:-1], generation), reason=reason, **fields)
        else:
            self.ledger.move(Transition.LAUNCHED, reason, generation, **fields)
        try:
            server = self._spawn(spec)
        except (spawn.SpawnError, KeeperError, OSError) as error:
            self._could_not_start(f"could not be started: {error}")
            return
        self._ended = False
        self._household = Household((self._around.folder / "server.pipe").resolve(), server, os.getpid())
        self._aim()
        self._companion.want(self._companion_wanted())

    def _spawn(self, spec: LaunchSpec) -> ProcessIdentity:
        secrets = credentials.complete(spec, self._secrets, self._around.environment)
        environment = {**self._around.environment, **spec.environment, **secrets}
        output = open_pipe(self._around.folder, blocking=True)
        try:
            command = spawn.Command(spec.argv, environment, spec.cwd, output, self._around.umask)
            return spawn.start(command, lambda server: self.ledger.change(server=server))
        finally:
            os.close(output)

    def _could_not_start(self, reason: str) -> None:
        at = time.time()
        ended = Exit(at, code=None, signal=None, requested=False, reason=reason)
        generation = replace(self.record.current, ended_at=at, exit=ended)
        self._ended = True
        self._companion.want(None)
        self.ledger.move(Transition.LOST, reason, generation, server=None, keeper=None)
        self.over = True

    def _companion_wanted(self) -> Wanted | None:
        record = self.record
        if record.server is None:
            return None
        argv = fill(record.current.spec.companion, record.server, record.current.number)
        return Wanted(argv, self._around.environment, str(self._around.folder), self._around.umask) if argv else None

    # -- health ----------------------------------------------------------------------------------------------------

    def _aim(self) -> None:
        spec, tuning = self.record.current.spec, self._around.tuning
        interval = tuning.probe_starting if self.record.state is State.STARTING else tuning.probe_ready
        self.prober.aim(Target(self._epoch, spec.host, spec.port, interval))

    def probed(self, event: Probed) -> None:
        """The prober heard something, or nothing."""
        if event.epoch != self._epoch or self._ended or self._stop is not None:
            return
        record = self.record
        transition = self._health.heard(event, record.state, record.current.spec.port, self._look)
        standing = ADOPTED if record.adopted else ""
        match transition:
            case Transition.ANSWERED:
                now = time.time()
                downtime = record.downtime_seconds
                if self._left_ready_at is not None:
                    downtime, self._left_ready_at = now - self._left_ready_at, None
                generation = replace(record.current, ready_at=now)
                self.ledger.move(transition, standing, generation, downtime_seconds=downtime)
                self._aim()
            case Transition.SPOKE_AGAIN:
                self.ledger.move(transition, standing)
            case Transition.FELL_SILENT:
                self.ledger.move(transition, self._health.reason)
            case _ if event.healthy and self._health.reason and self._health.reason != record.reason:
                self.note(self._health.reason)
                self.ledger.change(reason=self._health.reason)

    # -- ending ----------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Some child has ended: take leave of all that have."""
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
        """The process of an adopted server is gone."""
        if epoch == self._epoch and not self._ended:
            self._process_ended(None)

    def _process_ended(self, status: int | None) -> None:
        """The server's process is gone; ``status`` is None where nobody can know how."""
        now, patience, stop = time.time(), self._around.tuning.patience, self._stop
        self._ended = True
        self.prober.aim(None)
        self._companion.want(None)
        requested = stop is not None
        if status is None:
            ended = exit_unknown(requested, ADOPTED_EXIT, now)
        else:
            ended = exit_of(status, requested, stop is not None and stop.ladder.killing, now)
        if stop is None:
            self._stop = Stop(Ladder.left_over(time.monotonic(), patience), self.note, requested=False, retry=True)
        else:
            stop.ladder.server_ended(time.monotonic())
        self._write_exit(ended)

    def _write_exit(self, ended: Exit) -> None:
        record = self.record
        generation = replace(record.current, ended_at=record.current.ended_at or ended.at, exit=ended)
        if record.state is State.STOPPING:
            self.ledger.change(generations=(*record.generations[:-1], generation))
        else:
            self.ledger.move(Transition.ENDED, ended.reason, generation)

    def stop(self, then: LaunchSpec | None = None, secrets: Mapping[str, str] | None = None) -> None:
        """A stop was asked for; ``then`` is what to start afterwards. The last word counts.

        Raises `SecretMissingError` before anything is done.
        """
        if then is not None:
            given = {**self._secrets, **(secrets or {})}
            self._secrets.update(credentials.complete(then, given, self._around.environment))
        reason = "stopping as asked" if then is None else "stopping, to start again"
        record, stop = self.record, self._stop
        if stop is not None:
            stop.then, stop.retry = then, False
            if stop.requested:
                self.ledger.change(reason=reason)
        elif record.state in LIVE:
            if record.state is not State.STARTING:
                self._left_ready_at = time.time() if record.state is State.READY else record.state_since
            self._stop = Stop(self._fresh_ladder(), self.note, requested=True, then=then)
            self.prober.aim(None)
            self.ledger.move(Transition.STOP_ASKED, reason)
        elif then is not None:  # failed, and waiting to be started again
            self._retry_at = None
            self.start_next(then)
        else:
            self._retry_at = None
            reason = "stopped as asked while it waited to be started again"
            self.ledger.move(Transition.CANCELLED, reason, next_attempt_at=None, keeper=None)
            self.over = True

    def _fresh_ladder(self) -> Ladder:
        now, patience = time.monotonic(), self._around.tuning.patience
        if self.record.current.ready_at is None:
            return Ladder.starting(now, patience)
        return Ladder.serving(now, patience, self.record.current.spec.drain_seconds)

    def _gone(self, stop: Stop) -> None:
        """Nothing of the server is left."""
        self._stop = self._household = None
        if not self._pump.drain(DRAIN_SECONDS):
            self.note(f"the rest of the log could not be read within {DRAIN_SECONDS:g} s")
        ended = self.record.current.exit
        reason = ended.reason if ended else "it ended"
        if stop.then is not None:
            self.start_next(stop.then)
        elif stop.requested:
            self.ledger.move(Transition.GONE, reason, server=None, keeper=None)
            self.over = True
        else:
            self._lost(reason, stop.retry)

    def _lost(self, reason: str, retry: bool) -> None:
        policy, attempt = self.record.current.spec.restart, self.record.attempt
        delay = retry_delay(policy, attempt) if retry else None
        if delay is None:
            if retry and attempt:
                reason += f"; gave up after {attempt} automatic restart{'s' if attempt > 1 else ''}"
            self.ledger.move(Transition.LOST, reason, server=None, keeper=None)
            self.over = True
            return
        self._retry_at = time.monotonic() + delay
        self.ledger.move(Transition.LOST, reason, server=None, next_attempt_at=time.time() + delay)

    def _retry(self) -> None:
        self._retry_at = None
        record = self.record
        attempt, limit = record.attempt + 1, record.current.spec.restart.limit
        before = record.current.exit.reason if record.current.exit else "it failed"
        self.ledger.record = replace(record, attempt=attempt)
        self._start_process(f"started again by itself ({attempt} of {limit}) after: {before}")

    # -- the passing of time ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at everything that is not told by an event, and do what is due."""
        record = self.record
        if self.ledger.behind:
            self.ledger.write()
        if record.adopted and not self._ended and not processes.alive(record.server):
            self._process_ended(None)
        self._companion.tick(now)
        if self._stop is not None:
            self._climb(self._stop, now)
        elif self._retry_at is not None and now >= self._retry_at:
            self._retry()
        elif record.adopted and not self._ended:
            self._look()
        elif record.attempt and record.state is State.READY and self._is_steady():
            self.ledger.change(attempt=0)

    def _is_steady(self) -> bool:
        return time.time() - self.record.state_since >= self._around.tuning.steady

    def _climb(self, stop: Stop, now: float) -> None:
        clean = stop.advance(self._household, self._companion_pid(), self._ended, now)
        if clean and self._companion.gone:
            self._gone(stop)
        elif stop.stuck:
            pids = ", ".join(map(str, stop.stuck))
            reason = f"cannot be ended even by SIGKILL (pid {pids}): the kernel or a driver holds it"
            if self.record.reason != reason:
                self.note(reason)
                self.ledger.change(reason=reason)

    def _look(self) -> list[ProcessIdentity]:
        return self._household.look(self._companion_pid()) if self._household else []

    def _companion_pid(self) -> int | None:
        return self._companion.process.pid if self._companion.process else None

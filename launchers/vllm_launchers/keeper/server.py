"""The lifecycle of one server: what happens to it, one method per happening. Only the keeper's loop calls in here.

`lifecycle` lists the transitions and the races.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_launchers.keeper import adoption, credentials, processes, spawn
from vllm_launchers.keeper.adoption import ADOPTED, ADOPTED_EXIT
from vllm_launchers.keeper.companion import Companion
from vllm_launchers.keeper.errors import KeeperError, UnwrittenError
from vllm_launchers.keeper.events import Post, Probed
from vllm_launchers.keeper.health import Health
from vllm_launchers.keeper.ladder import Ladder
from vllm_launchers.keeper.ledger import Ledger, Notes
from vllm_launchers.keeper.lifecycle import (
    KEPT_GENERATIONS,
    LIVE,
    Transition,
    exit_of,
    exit_unknown,
)
from vllm_launchers.keeper.logfile import LogPump
from vllm_launchers.keeper.members import Household
from vllm_launchers.keeper.prober import Prober, Target
from vllm_launchers.keeper.records import Exit, Generation, LaunchSpec, ProcessIdentity, ServerRecord, State
from vllm_launchers.keeper.stopping import Stop
from vllm_launchers.keeper.surroundings import Surroundings
from vllm_launchers.keeper.verdict import judge, remaining
from vllm_launchers.keeper.watch import watch

OWED = "started by a new keeper; the old one died before it could"
DRAIN_SECONDS = 5.0


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
            return self._stop.pause
        seconds = 0.25 if self._companion.busy or self.ledger.trouble else 5.0
        if self._retry_at is not None and not self.ledger.trouble:
            seconds = min(seconds, max(self._retry_at - time.monotonic(), 0.0))
        return seconds

    # -- beginnings ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the present generation's process for the first time. Raises `UnwrittenError`."""
        self._start_process("")

    def start_next(self, spec: LaunchSpec, *, owed: bool = False) -> None:
        """Start the next generation; nothing of the one before is left. ``owed``: nobody waits to hear whether it was.

        Raises `UnwrittenError`: all is as before.
        """
        record = self.record
        generation = Generation(record.current.number + 1, spec, started_at=time.time())
        # What makes a restart hopeless is of use to the present generation only, and not small.
        past = replace(record.current.spec, restart=replace(record.current.spec.restart, hopeless=()))
        earlier = (*record.generations[:-1], replace(record.current, spec=past))
        kept = (*earlier, generation)[-KEPT_GENERATIONS:]
        self._start_process("", owed=owed, generations=kept, attempt=0, downtime_seconds=None)
        self._pump.log.resize(spec.log_bytes, spec.log_files)

    def adopt(self) -> None:
        """Take over a server whose keeper died, wherever it stands."""
        record, server = self.record, self.record.server
        self.note(f"adopting: {record.state}, pid {server.pid if server else 'none'}")
        if not record.state.alive:
            self._adopt_waiting()
            return
        self._epoch += 1
        household = self._household = Household.adopted(self._around.folder, server)
        if server is None or record.current.exit is not None or household is None or not household.server_lives:
            self._adopt_dead()
            return
        self._ended = False
        self._look()
        watch(server, self._epoch, self._post)
        self.ledger.change(keeper=processes.identity(os.getpid()), adopted=True, owed=False, reason=ADOPTED)
        self._adopt_companion()
        if record.state is State.STOPPING:
            self._stop = Stop(self._fresh_ladder(), self.note, requested=True, then=record.then)
            self._companion.want(None)
        else:
            self._aim()

    def _adopt_waiting(self) -> None:
        """It failed and waits to be started again: the wait goes on, with what is left of it."""
        record = self.record
        if (missed := adoption.missed_by_reboot(record, processes.boot_id())) is not None:
            self.ledger.replace(missed)
            self.over = True
            return
        seconds = remaining(record, time.time())
        self.note(f"it waits {seconds:.1f} s more to be started again")
        self._retry_at = time.monotonic() + seconds
        self.ledger.change(keeper=processes.identity(os.getpid()), next_attempt_at=time.time() + seconds)

    def _adopt_dead(self) -> None:
        """It ended (or was never started) while no keeper watched: write that down, and end what it left."""
        stranger = self._household is not None and self._household.stranger
        found = adoption.ended(self.record, processes.boot_id(), time.time(), stranger=stranger)
        self._ended = True
        self._adopt_companion()
        self._companion.want(None)
        ladder = Ladder.left_over(time.monotonic(), self._around.tuning.patience)
        self._stop = Stop(ladder, self.note, requested=found.exit.requested, then=found.then, retry=found.retry)
        self._write_exit(found.exit, keeper=processes.identity(os.getpid()), owed=found.owed)

    def _adopt_companion(self) -> None:
        companion = self.record.companion
        if companion is not None and self._companion.is_mine(companion):
            self._companion.adopt(companion, self._around.companion(self.record))
        elif not self._ended:
            self._companion.want(self._around.companion(self.record))

    # -- starting --------------------------------------------------------------------------------------------------

    def _start_process(self, reason: str, **fields: Any) -> None:
        """Start the last of the generations; ``fields`` change with it. Raises `UnwrittenError`: all is as before.

        One that is ``owed`` stays so until its process has been let go.

        A server that no record knows would be nobody's, should this keeper die: none is started without one.
        """
        record = self.record
        inode, offset = self._pump.log.position()
        begun = (fields.get("generations") or record.generations)[-1]
        generation = replace(begun, started_at=time.time(), ready_at=None, ended_at=None, exit=None)
        fields |= {
            "server": None,
            "keeper": processes.identity(os.getpid()),
            "adopted": False,
            "next_attempt_at": None,
            "log_inode": inode,
            "log_offset": offset,
            "then": None,
        }
        if record.state is State.STARTING:  # the very first start
            generations = (*record.generations[:-1], generation)
            self.ledger.change(insist=True, reason=reason, **fields | {"generations": generations})
        else:
            self.ledger.move(Transition.LAUNCHED, reason, generation, insist=True, **fields)
        self.over = False
        self._epoch += 1
        self._health.reset()
        try:
            server = self._around.spawn(
                begun.spec, self._secrets, lambda server: self.ledger.change(insist=True, server=server)
            )
        except (spawn.SpawnError, KeeperError, OSError) as error:
            self._could_not_start(f"could not be started: {error}")
            return
        self._ended = False
        if self.record.owed:
            self.ledger.change(owed=False)
        self._household = Household.born(self._around.folder, server)
        self._aim()
        self._companion.want(self._around.companion(self.record))

    def _could_not_start(self, reason: str) -> None:
        at = time.time()
        ended = Exit(at, code=None, signal=None, requested=False, reason=reason)
        generation = replace(self.record.current, ended_at=at, exit=ended)
        self._ended = True
        self._companion.want(None)
        self.ledger.move(Transition.LOST, reason, generation, server=None, keeper=None, owed=False)
        self.over = True

    # -- health ----------------------------------------------------------------------------------------------------

    def _aim(self) -> None:
        spec, tuning = self.record.current.spec, self._around.tuning
        interval = tuning.probe_starting if self.record.state is State.STARTING else tuning.probe_ready
        self.prober.aim(Target(self._epoch, spec.host, spec.port, interval, spec.tls))

    def probed(self, event: Probed) -> None:
        """The prober heard something, or nothing."""
        if event.epoch != self._epoch or self._ended or self._stop is not None:
            return
        record = self.record
        transition = self._health.heard(event, record.state, record.current.spec.port, self._look)
        standing = ADOPTED if record.adopted else ""
        match transition:
            case Transition.ANSWERED:
                downtime = record.downtime_seconds
                if self._left_ready_at is not None:
                    downtime, self._left_ready_at = self._health.since - self._left_ready_at, None
                generation = replace(record.current, ready_at=time.time())
                self.ledger.move(transition, standing, generation, downtime_seconds=downtime)
                self._aim()
                if self._household is not None:
                    self._household.look_closely()
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

    def _write_exit(self, ended: Exit, **fields: Any) -> None:
        record = self.record
        generation = replace(record.current, ended_at=record.current.ended_at or ended.at, exit=ended)
        if record.state is State.STOPPING:
            self.ledger.change(generations=(*record.generations[:-1], generation), **fields)
        else:
            self.ledger.move(Transition.ENDED, ended.reason, generation, **fields)

    def stop(self, then: LaunchSpec | None = None, secrets: Mapping[str, str] | None = None) -> None:
        """A stop was asked for; ``then`` is what to start afterwards. The last word counts.

        Raises `SecretMissingError`, and for a restart `UnwrittenError`, before anything is done.
        """
        if then is not None:
            given = {**self._secrets, **(secrets or {})}
            self._secrets.update(credentials.complete(then, given, self._around.environment))
            self._pump.blanking.know(self._secrets.values())
        reason = "stopping as asked" if then is None else "stopping, to start again"
        record, stop = self.record, self._stop
        insist = then is not None
        if stop is not None:
            if stop.requested:
                self.ledger.change(insist=insist, reason=reason, then=then)
            else:
                self.ledger.change(insist=insist, then=then, owed=False)
            stop.then, stop.retry = then, False
        elif record.state in LIVE:
            self.ledger.move(Transition.STOP_ASKED, reason, insist=insist, then=then)
            if record.state is not State.STARTING:
                self._left_ready_at = time.monotonic() if record.state is State.READY else self._health.since
            self._stop = Stop(self._fresh_ladder(), self.note, requested=True, then=then)
            self.prober.aim(None)
        elif then is not None:  # failed, and waiting to be started again
            self.start_next(then)
            self._retry_at = None
        elif not self.over:
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
        """Nothing of the server is left. Raises `UnwrittenError` when what comes next has to wait for the record."""
        self._household = None
        if not self._pump.drain(DRAIN_SECONDS):
            self.note(f"the rest of the log could not be read within {DRAIN_SECONDS:g} s")
        ended = self.record.current.exit
        reason = ended.reason if ended else "it ended"
        if stop.then is not None:
            self.start_next(stop.then, owed=True)
        elif self.record.owed:
            self._start_process(OWED, attempt=self.record.attempt)
        elif stop.requested:
            self.ledger.move(Transition.GONE, reason, server=None, keeper=None, then=None)
            self.over = True
        else:
            self._lost(reason, stop.retry)
        self._stop = None

    def _lost(self, reason: str, retry: bool) -> None:
        verdict = judge(self.record, self._around.folder / "server.log", self.note) if retry else None
        if verdict is None or verdict.delay is None:
            if verdict is not None and verdict.why:
                reason += f"; {verdict.why}"
            self.ledger.move(Transition.LOST, reason, server=None, keeper=None)
            self.over = True
            return
        self._retry_at = time.monotonic() + verdict.delay
        self.ledger.move(Transition.LOST, reason, server=None, next_attempt_at=time.time() + verdict.delay)

    def _retry(self) -> None:
        record = self.record
        attempt, limit = record.attempt + 1, record.current.spec.restart.limit
        before = record.current.exit.reason if record.current.exit else "it failed"
        self._start_process(
            f"started again by itself ({attempt} of {limit}) after: {before}", attempt=attempt, owed=True
        )
        self._retry_at = None

    # -- the passing of time ---------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at everything that is not told by an event, and do what is due."""
        record = self.record
        self.ledger.catch_up()
        if record.adopted and not self._ended and not processes.alive(record.server):
            self._process_ended(None)
        self._companion.tick(now)
        if self._stop is not None:
            self._climb(self._stop, now)
        elif self._retry_at is not None and now >= self._retry_at:
            if not self.ledger.trouble:  # else it waits until its record can be written
                with contextlib.suppress(UnwrittenError):
                    self._retry()
        elif record.attempt and record.state is State.READY and now - self._health.since >= self._around.tuning.steady:
            self.ledger.change(attempt=0)
        elif self._household is not None and not self._ended:
            self._household.glance(now, self._companion_pid())

    def _climb(self, stop: Stop, now: float) -> None:
        clean = stop.advance(self._household, self._companion_pid(), self._ended, now)
        if clean and self._companion.gone:
            if stop.then is None or not self.ledger.trouble:  # else it waits until its record can be written
                with contextlib.suppress(UnwrittenError):
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

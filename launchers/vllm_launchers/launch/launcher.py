"""Starts and restarts servers: a plan becomes a keeper with a server, one launch at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from vllm_launchers import values
from vllm_launchers.errors import OperationError, UsageError
from vllm_launchers.keeper import client, folders
from vllm_launchers.keeper.errors import NameTakenError, NoSuchServerError
from vllm_launchers.keeper.records import LaunchSpec, NotRetryable, Recording, RestartMode, ServerRecord, State
from vllm_launchers.launch.details import unpack
from vllm_launchers.launch.earlier_starts import own_start
from vllm_launchers.launch.engine_check import EngineCheck
from vllm_launchers.launch.launch_plan import LaunchPlan
from vllm_launchers.launch.node_start import node_spec, refuse_node, startable
from vllm_launchers.launch.planner import Planner
from vllm_launchers.launch.refusal import refuse_unfit
from vllm_launchers.launch.request import AS_CONFIGURED, LaunchRequest, RestartOptions
from vllm_launchers.launch.server_records import ServerRecords
from vllm_launchers.launch.standby import find_other, one_switch, refuse_awake, refuse_beside_partner, standby_request
from vllm_launchers.plan.model import Plan
from vllm_launchers.prepared.command import prepared_command
from vllm_launchers.private import lock, open_file, own_folder
from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.changes import Changes
from vllm_launchers.vllm.startup_reports import StoredReport

if TYPE_CHECKING:
    from vllm_launchers.keeper.prepared_launch import PreparedLaunch

TIMEOUT_SECONDS = 30.0
"""How long to wait for the launch lock; launches hold it for well under a second."""

OTHERS_TIMEOUT_SECONDS = 5.0
"""How long to wait for other users' launches."""


@contextlib.contextmanager
def launch_lock(state: Path, timeout: float = TIMEOUT_SECONDS) -> Iterator[None]:
    """Hold the launch lock of a state folder; it is released when its process ends.

    Raises:
        OperationError: another process holds it for longer than ``timeout`` seconds, or the folder cannot be written.
    """
    path = state / "launch.lock"
    try:
        own_folder(state)
        fd = open_file(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError as error:
        raise OperationError(_theirs(path) or f"{path}: can't be written: {error.strerror}") from error
    try:
        if wrong := _theirs(path):
            raise OperationError(wrong)
        _wait_for(fd, path, timeout)
        with _among_all():
            yield
    finally:
        os.close(fd)


def _theirs(path: Path) -> str:
    """The problem if a lock file belongs to another user, who could hold it forever; else empty."""
    try:
        owner = path.lstat().st_uid
    except OSError:
        return ""
    if owner == os.geteuid():
        return ""
    return f"{path} belongs to another user (uid {owner}), inside your state folder: delete it"


def _wait_for(opened: int, path: Path, timeout: float) -> None:
    try:
        lock(opened, timeout)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            message = f"another console has been launching a server for {timeout:.0f}s; try again later"
        else:
            message = f"{path}: can't be locked: {os.strerror(error.errno or 0)}"
        raise OperationError(message) from error


@contextlib.contextmanager
def _among_all() -> Iterator[None]:
    """Serialize launches of all users of this machine, so that no two choose the same free port.

    The lock is a socket name in the abstract namespace: it needs no world-writable folder and disappears with its
    process. Other users may hold it for long, so a launch continues without it after a while; then its port is checked
    but not reserved.
    """
    with socket.socket(socket.AF_UNIX) as name:
        deadline = time.monotonic() + OTHERS_TIMEOUT_SECONDS
        while True:
            try:
                name.bind("\0vllm-console/launch")
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    break
            time.sleep(0.02)
        yield


Recorded = Callable[[Path, Sequence[LaunchSpec]], tuple[LaunchSpec, Recording]]
"""Puts a recording into a server's folder; returns the spec to run and the recording that it continues."""


class LaunchHooks(Protocol):
    """What the console adds to launches: `vllm_console.fleet.launch_hooks.FleetLaunchHooks`."""

    def refresh_gpus(self) -> None:
        """Update the planner's GPUs. Called before planning."""

    def recorder_command(self, launch: LaunchPlan, folder: Path) -> Sequence[str]:
        """The command that the keeper runs beside the server, whose records are in ``folder``."""

    def not_retryable(self) -> Sequence[NotRetryable]:
        """Log lines that show that another automatic start would fail the same way."""

    def note(self, record: ServerRecord) -> ServerRecord:
        """Record that a server was launched, or is about to restart; return its record."""


class Launcher:
    """Starts and restarts servers below the state folder ``state``.

    ``prepare`` and ``rollback`` are defaults for restarts whose options leave them out.
    """

    def __init__(
        self,
        state: Path,
        planner: Planner,
        records: ServerRecords,
        hooks: LaunchHooks,
        engine_check: EngineCheck,
        *,
        prepare: bool,
        rollback: bool,
    ) -> None:
        self.planner = planner
        self._state, self._records = state, records
        self._hooks, self._engine_check = hooks, engine_check
        self._prepare, self._rollback = prepare, rollback
        self._own_reports: dict[str, tuple[float, StoredReport | None]] = {}

    def plan(self, request: LaunchRequest) -> LaunchPlan:
        """Plan a launch without doing it; problems are in the plan's findings."""
        self._hooks.refresh_gpus()
        freed = None
        if request.standby_of:
            other = find_other(self._records.read()[0], request.standby_of)
            self.planner.refuse_other_host(other, host_needed=True)
            request, freed = standby_request(request, other), None if other.state is State.ASLEEP else other
        taken, starting, prepared = self._records.taken_ports(), self._records.starting(), self._engine_check.pids
        launch = self.planner.plan(request, taken, starting, freed=freed, prepared=prepared)
        return msgspec.structs.replace(launch, plan=self._engine_check.with_verdict(launch.plan))

    def name_of(self, request: LaunchRequest) -> str:
        """The name that the server would get now."""
        return request.name or self._records.free_name(self.planner.preset(request.preset).name)

    def folder_of(self, request: LaunchRequest) -> Path:
        """The folder that the server would get now."""
        return folders.server_folder(self._state, self.name_of(request))

    def plan_restart(
        self, record: ServerRecord, changes: Changes, options: RestartOptions = AS_CONFIGURED
    ) -> LaunchPlan:
        """Plan a restart with changed flags without doing it."""
        refuse_node(record)
        self._hooks.refresh_gpus()
        own, starting = self._own_report(record), self._records.starting()
        return self.planner.plan_restart(record, changes, options, starting, own)

    def start(self, request: LaunchRequest, planned: Callable[[Plan], None] | None = None) -> ServerRecord:
        """Launch a server; returns as soon as its keeper runs. ``planned`` gets the plan before it is executed.

        Raises:
            UnfitError: the plan has errors that ``force`` does not override.
            OperationError: it cannot be launched, or the name is taken.
        """
        if request.vllm_version is not None:
            raise UsageError("--vllm-version names a release that is not installed: it can be planned but not started")
        if request.nodes is not None:
            request = startable(request, request.nodes)
        with launch_lock(self._state):
            name = self.name_of(request)
            client.refuse_lost(self._state, name)  # before the plan, which its memory may make fail
            existing = self._existing(name)
            if existing is not None and existing.needs_keeper:
                client.refuse_elsewhere(self._state, existing)
                raise NameTakenError(f"server {name} already exists; restart it, or choose another name")
            launch = self.plan(request)
            if planned is not None:
                planned(launch.plan)
            self.planner.refuse_elsewhere(launch.plan)
            refuse_unfit(launch.plan, force=request.force)
            if not request.standby_of:
                return self._launch(name, launch)
            with one_switch(self._state, self._records.read()[0], request.standby_of):
                refuse_awake(client.read(self._state, request.standby_of))
                return self._launch(name, launch)

    def start_beside(self, name: str, changes: Changes, options: RestartOptions = AS_CONFIGURED) -> ServerRecord:
        """Launch the same server with changed flags next to a ready one, which keeps serving: the first half of a
        rolling update. It gets another port and another name: ``NAME-2``, or ``NAME`` again if that server has ended.

        Raises:
            NoPlaceError, UnfitError: there is not enough GPU memory for a second server.
            OperationError: the server is not ready, or no port is free.
            UsageError: an option applies only to restarts.
        """
        if options.prepare or options.rollback:
            raise UsageError("--rolling needs neither --prepare nor --rollback: the old server keeps serving")
        with launch_lock(self._state):
            record = client.read(self._state, name)
            refuse_node(record)
            if record.state is not State.READY:
                raise OperationError(f"{name} is {record.state}: a rolling update needs a server that is ready")
            self._refuse_third(record)
            beside = self._name_beside(record)
            client.refuse_lost(self._state, beside)
            self._hooks.refresh_gpus()
            taken, starting = self._records.taken_ports(), self._records.starting()
            launch = self.planner.plan_beside(record, changes, options, taken, starting)
            self.planner.refuse_elsewhere(launch.plan)
            refuse_unfit(launch.plan, force=options.force)
            return self._launch(beside, launch)

    def plan_trial(self, name: str, engine: Engine, changes: Changes) -> LaunchPlan:
        """Plan a temporary server with a server's flags on another engine, next to it where it is up.

        Raises:
            NoPlaceError: there is no room for it.
            OperationError: no port is free, or the server's record lacks data.
        """
        record = client.read(self._state, name)
        refuse_node(record)
        self._hooks.refresh_gpus()
        taken, starting = self._records.taken_ports(), self._records.starting()
        options = RestartOptions()
        launch = self.planner.plan_beside(record, changes, options, taken, starting, engine)
        never = values.replace(launch.restart, mode=RestartMode.NEVER)
        return msgspec.structs.replace(launch, plan=self._engine_check.with_verdict(launch.plan), restart=never)

    def start_trial(self, name: str, trial: str, engine: Engine, changes: Changes) -> ServerRecord:
        """Launch what `plan_trial` plans, under the name ``trial``, which may have run before.

        Raises:
            NoPlaceError, UnfitError: there is no room for it, or vLLM would refuse its flags.
            OperationError: it cannot be launched.
        """
        with launch_lock(self._state):
            client.refuse_lost(self._state, trial)
            launch = self.plan_trial(name, engine, changes)
            self.planner.refuse_elsewhere(launch.plan)
            refuse_unfit(launch.plan, force=False)
            return self._launch(trial, launch)

    def _name_beside(self, record: ServerRecord) -> str:
        """A name for a server beside this one. Two servers that replace each other in turn reuse their two names."""
        ours = unpack(record.current.spec.details)
        if not ours.beside:
            return self._records.free_name(record.name)
        if not client.exists(self._state, ours.beside):
            return ours.beside
        other = client.read(self._state, ours.beside)
        theirs = unpack(other.current.spec.details)
        if not other.needs_keeper and (ours.preset, ours.model) == (theirs.preset, theirs.model):
            return ours.beside
        return self._records.free_name(min(record.name, ours.beside, key=len))

    def _refuse_third(self, record: ServerRecord) -> None:
        """Raise OperationError while both servers of a rolling update are up."""
        ours = unpack(record.current.spec.details)
        for one in self._records.read()[0]:
            theirs = unpack(one.current.spec.details)
            same = (ours.preset, ours.model) == (theirs.preset, theirs.model)
            if one.needs_keeper and same and (theirs.beside == record.name or ours.beside == one.name):
                raise OperationError(
                    f"a rolling update is not finished: {one.name} is {one.state} next to {record.name}; "
                    "stop one of them before the next"
                )

    def _existing(self, name: str) -> ServerRecord | None:
        """The record of a server; None if there is none."""
        try:
            return client.read(self._state, name)
        except NoSuchServerError:
            return None

    def _launch(self, name: str, launch: LaunchPlan) -> ServerRecord:
        """Launch under a name that no running server has."""
        folder = folders.server_folder(self._state, name)
        prepared = self._engine_check.take(launch, folder) if launch.plan.nodes is None else None
        try:
            if client.exists(self._state, name):
                # A stopped server of that name continues: it keeps its history and generation numbers.
                with contextlib.suppress(NoSuchServerError):  # another command has just removed it
                    return self._again(name, launch, prepared=prepared)
            spec = self._spec(name, launch)
            return self._hooks.note(client.launch(self._state, name, spec, launch.secrets, prepared=prepared))
        finally:
            if prepared is not None:
                prepared.end()

    def resume(self, name: str, runs: Sequence[LaunchRequest], recorded: Recorded) -> ServerRecord:
        """Launch a simulated server that continues from a recording, as the last of ``runs``; the others have ended.

        ``recorded`` gets the server's folder and the spec of each run, and writes the recording into the folder.

        Raises:
            UnfitError: a plan has errors.
            OperationError: it cannot be launched, or the name is taken.
        """
        with launch_lock(self._state):
            client.refuse_lost(self._state, name)
            launches = [self.plan(request) for request in runs]
            for launch in launches:
                refuse_unfit(launch.plan, force=False)
            folder = folders.server_folder(self._state, name)
            own_folder(folder)
            spec, recording = recorded(folder, [self._spec(name, launch) for launch in launches])
            secrets = launches[-1].secrets
            return self._hooks.note(client.launch(self._state, name, spec, secrets, recording=recording))

    def restart(
        self,
        name: str,
        changes: Changes,
        options: RestartOptions = AS_CONFIGURED,
        planned: Callable[[Plan], None] | None = None,
    ) -> ServerRecord:
        """Stop and start again with changed flags: same name, GPUs, and port (unless another is given).

        A running server keeps running if the plan has errors. ``planned`` gets the plan before it is executed.

        Raises:
            UnfitError: the plan has errors that ``force`` does not override.
            OperationError: the port is taken: another process may use an ended server's port by now.
        """
        return self._replaced(name, options, planned, lambda record: self.plan_restart(record, changes, options))

    def switch(
        self,
        name: str,
        preset: str,
        options: RestartOptions = AS_CONFIGURED,
        planned: Callable[[Plan], None] | None = None,
    ) -> ServerRecord:
        """Restart the server with another preset, keeping name, GPUs and port. ``planned`` is as for `restart`.

        Raises:
            UnfitError: the preset's plan has errors; a running server keeps running.
            UsageError: the options name a port.
        """
        if options.port is not None:
            raise UsageError("--preset keeps the port and can't be combined with --port")

        def plan(record: ServerRecord) -> LaunchPlan:
            self._hooks.refresh_gpus()
            return self.planner.plan_switch(record, preset, options, self._records.starting())

        return self._replaced(name, options, planned, plan)

    def _replaced(
        self,
        name: str,
        options: RestartOptions,
        planned: Callable[[Plan], None] | None,
        plan: Callable[[ServerRecord], LaunchPlan],
    ) -> ServerRecord:
        """Replace a server with what ``plan`` returns."""
        with launch_lock(self._state):
            record = client.read(self._state, name)
            refuse_node(record)
            # Servers that share its GPUs must be asleep or have ended, and must not wake up meanwhile.
            with one_switch(self._state, self._records.read()[0], record.name):
                refuse_beside_partner(self._records.read()[0], record)
                launch = plan(record)
                if planned is not None:
                    planned(launch.plan)
                refuse_unfit(launch.plan, force=options.force)
                return self._again(name, launch, options)

    def _again(
        self,
        name: str,
        launch: LaunchPlan,
        options: RestartOptions | None = None,
        prepared: PreparedLaunch | None = None,
    ) -> ServerRecord:
        """Start the next generation. Without options it is a launch, which is neither prepared nor rolled back."""
        spec = self._spec(name, launch)
        if options is not None:
            prepare = self._prepare if options.prepare is None else options.prepare
            rollback = self._rollback if options.rollback is None else options.rollback
            environment = {**os.environ, **launch.plan.environment}
            argv = prepared_command(launch.plan.argv, environment) if prepare else ()
            spec = values.replace(spec, prepared_argv=argv, rollback=rollback)
        record = self._hooks.note(client.read(self._state, name))
        if spec.port and (not record.needs_keeper or record.current.spec.port != spec.port):
            self.planner.refuse_taken_port(spec.host, spec.port, self._records.taken_ports(name))
        return self._hooks.note(client.restart(self._state, name, spec, launch.secrets, prepared=prepared))

    def _spec(self, name: str, launch: LaunchPlan) -> LaunchSpec:
        retried = launch.restart.mode is not RestartMode.NEVER
        sidecar = self._hooks.recorder_command(launch, folders.server_folder(self._state, name))
        return launch.spec(sidecar, self._hooks.not_retryable() if retried else (), node_spec(launch))

    def _own_report(self, record: ServerRecord) -> StoredReport | None:
        """The memory report in the server's log, read once per generation."""
        if record.current.ready_at is None:
            return None
        kept = self._own_reports.get(record.name)
        if kept is None or kept[0] != record.current.ready_at:
            kept = (record.current.ready_at, own_start(folders.server_folder(self._state, record.name), record))
            self._own_reports[record.name] = kept
        return kept[1]

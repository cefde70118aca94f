"""The servers on this machine: this user's through their records and keepers, other users' from outside."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.fleet.access import ServerAccess
from vllm_console.fleet.attached_servers import AllRecords, AttachedServers, endpoint_access, without_attached
from vllm_console.fleet.attachments import Attachments
from vllm_console.fleet.background_commands import Loads, Ramps, child_options
from vllm_console.fleet.board import GpuClaims, SharedBoard, gpu_claims
from vllm_console.fleet.change_predictions import ChangePredictions
from vllm_console.fleet.failure import verdict_with_fix
from vllm_console.fleet.leftovers import FleetLeftovers, format_lost_here
from vllm_console.fleet.other_servers import FIRST_ANSWER_SECONDS, ONLY_ANSWER_SECONDS, Observer
from vllm_console.fleet.runs import RunHistory, RunRecorder
from vllm_console.fleet.snapshot import FIRST, FleetSnapshot, ServerView, paired
from vllm_console.fleet.types import DRAIN_SECONDS, PresetProblem, Say, silently
from vllm_console.fleet.watched_server import Identity, JudgeContext, WatchedServer, record_identity
from vllm_console.history.time_view import LIVE, TimeView
from vllm_console.settings import Settings, config_folder, gpu_reserves, gpu_shares
from vllm_launchers.addresses import base_url
from vllm_launchers.errors import OperationError, RefusedError
from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import KeeperError
from vllm_launchers.keeper.folders import default_root, server_folder
from vllm_launchers.keeper.records import ServerRecord, State
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.launch.engine_check import EngineCheck
from vllm_launchers.launch.request import AS_CONFIGURED, LaunchRequest, RestartOptions
from vllm_launchers.launch.server_records import ServerRecords
from vllm_launchers.listeners import Listener, Owner
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Preset
from vllm_launchers.secrets import API_KEY
from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.changes import Changes

if TYPE_CHECKING:
    from vllm_console.chat.client import ChatServer
    from vllm_console.fleet.adapters import Adapters, Loaded
    from vllm_console.fleet.downloads import ModelDownload
    from vllm_console.fleet.gpu_charts import GpuChart, GpuCharts
    from vllm_console.fleet.gpus import FleetGpus, Releases
    from vllm_console.fleet.probe import ProbeReports
    from vllm_console.fleet.replay import Replays
    from vllm_console.fleet.rolling import AnswerComparison
    from vllm_console.fleet.standby import Sleeping
    from vllm_console.history.energy import Energy, Tariff
    from vllm_console.history.workload import SeenWorkload
    from vllm_launchers.host.gpu.host import Host
    from vllm_launchers.launch.launcher import Launcher, Recorded
    from vllm_launchers.plan.choices.choice import Choice
    from vllm_launchers.vllm.flags.flag_table import FlagTable
    from vllm_launchers.vllm.modelfacts.facts import ModelFacts
    from vllm_launchers.vllm.modelfacts.local import LocalModels


class LocalFleet:
    """All servers of this machine as one user sees them, and the actions on them.

    An action that fails raises an `OperationError` with one clear sentence.

    ``interactive`` is for a console, which refreshes once a second: threads then watch the GPUs, the board and, with
    ``leftovers``, leftovers. A command reads them when it needs them. A stop never waits for a snapshot in another
    thread. ``own_presets`` is the folder of the user's presets; None: the one in the folder of the settings.
    """

    def __init__(
        self,
        state: Path | None = None,
        *,
        config_file: Path | None = None,
        settings: Settings | None = None,
        read_only: bool = False,
        observe: bool = True,
        interactive: bool = False,
        host_file: Path | None = None,
        own_presets: Path | None = None,
        gpus: bool = True,
        read_only_by: str = "",
        notices: Sequence[str] = (),
        leftovers: bool = True,
        judge_launches: bool = False,
        window_seconds: float | None = None,
        remote: bool = False,
    ) -> None:
        self._settings = settings or Settings()
        self.read_only, self.read_only_by = read_only, read_only_by
        self._state = state or default_root()
        self.access = ServerAccess(self._state, self.snapshot, read_only=read_only, read_only_by=read_only_by)
        """Which servers may be read and acted on."""
        self.judge_launches = judge_launches and not read_only
        self._interactive = interactive
        self._notices = tuple(notices)
        self._hostname = os.uname().nodename
        self._shares, self._reserves = gpu_shares(self._settings), gpu_reserves(self._settings)
        self._host_file, self._with_gpus = host_file, gpus
        self._own_presets = own_presets or config_folder() / "presets"
        self._window_seconds = window_seconds
        """Length of the windows in which runs are compared, for the servers it starts; None means one minute."""
        self._report_leftovers = interactive and leftovers and not read_only  # only a console that may remove them
        self._acted = False
        """Whether this fleet has started, restarted or stopped a server."""

        self._records = ServerRecords(self._state)
        self._endpoints = AttachedServers(self._state, interactive=interactive, read_only=read_only)
        self._all_records = AllRecords(self._records, self._endpoints)
        self._recorder = RunRecorder(self._state, 0.0 if interactive else time.time(), read_only=read_only)
        self.history = RunHistory(self._state, self.access, self._recorder, self._all_records, self.snapshot)
        """Past and present runs."""
        self.attached = Attachments(
            self._state,
            self.access,
            self._endpoints,
            self._recorder,
            self.history,
            self.snapshot,
            interactive=interactive,
            show_hosts=remote,
        )
        """Attached endpoints and machines."""
        options = child_options(self._state, config_file, host_file)
        self.loads, self.ramps = Loads(options, self.access), Ramps(options, self.access)
        """The loads and ramps that this console runs."""
        self.predictions = ChangePredictions(
            self._state, self.access, self._recorder, self._restart_plan, self._facts, options
        )
        """Predictions of changed flags."""
        self.leftovers = FleetLeftovers(self._state, self.access.refuse_read_only)
        """What ended servers left."""
        board = self._settings.board
        self._board = SharedBoard(Path(board), watched=interactive, read_only=read_only) if board else None
        self.claims = GpuClaims(self._board, self.access.refuse_read_only, self._gpu_indices)
        """The board, and claims of GPUs on it."""
        self.engine_check = EngineCheck(self.access.refuse_read_only)
        """The engine's verdicts on planned launches, and the process that waits to be launched."""
        self._download: ModelDownload | None = None
        patience = FIRST_ANSWER_SECONDS if interactive else ONLY_ANSWER_SECONDS
        self._observer = Observer(self._state, patience) if observe else None
        self._watched: dict[Identity, WatchedServer] = {}
        self._snapshot_lock = threading.Lock()
        self._gpus: FleetGpus | None = None
        self._gpu_charts: GpuCharts | None = None
        self._releases: Releases | None = None
        if gpus and (interactive or host_file is not None):
            self._open_gpus()

    @property
    def tariff(self) -> Tariff | None:
        """Energy prices; None if none are set."""
        from vllm_console.history.energy import Tariff

        price = self._settings.energy
        return Tariff(price.price_per_kwh, price.currency) if price.price_per_kwh else None

    @cached_property
    def probes(self) -> ProbeReports:
        """What probes recorded."""
        # Imported lazily, like the parts below: few commands use them.
        from vllm_console.fleet.probe import ProbeReports

        return ProbeReports(self._state, self.access, self.history)

    @cached_property
    def replays(self) -> Replays:
        """Replays of ended runs."""
        from vllm_console.fleet.replay import Replays

        return Replays(self._state, self.access, self._all_records, self.history)

    # -- snapshot --------------------------------------------------------------------------------------------------

    def snapshot(self, selected: str | None = None, time_view: TimeView = LIVE) -> FleetSnapshot:
        """Return all servers as of now; start a new keeper for each server that lost its own. One snapshot at a time.

        One bad server never makes it raise. ``selected`` is a server name, or `FIRST` for the first one with a record;
        that server also gets its chart series over the range of ``time_view``. If that names a moment, the snapshot
        includes the server's state at that moment; if a GPU, that GPU's chart over the range; if a run, that run as
        ``replay``.
        """
        with self._snapshot_lock:
            return self._take_snapshot(selected, time_view)

    def _take_snapshot(self, selected: str | None, view: TimeView) -> FleetSnapshot:
        now = time.time()
        records, problems = self._records.read()
        if any(self._lacks_keeper(record) for record in records):
            problems += self._adopt()
            records, _ = self._records.read()
        for gone in self._watched.keys() - {record_identity(record) for record in records}:
            self._watched.pop(gone).close()
        own = {record.name for record in records}
        attached, more = self._endpoints.read()
        attached = [record for record in attached if record.name not in own]
        if selected == FIRST:
            selected = next((record.name for record in [*records, *attached]), None)
        views = paired([self._view(record, now, selected, view) for record in records], now)
        attached_views = self._endpoints.views(attached, now, selected, view)
        problems += more + self._recorder.update([*records, *attached], [*views, *attached_views])
        if self._observer is not None:
            pids = {record.server.pid for record in records if record.server and record.state.alive}
            preparations = [record.preparation for record in records]
            pids |= {one.process.pid for one in preparations if one is not None and one.process is not None}
            pids.update(self.engine_check.pids)
            taken = [*own, *(one.name for one in attached)]
            views += self._observer.views(pids, taken, selected, view)
        if self._board is not None:
            announcing = self._interactive or self._acted
            views = self._board.exchange(records, views, announce=announcing, always=self._interactive)
            if self._gpus is not None:
                self._gpus.claims = gpu_claims(self._board.latest())
            problems += [self._board.trouble] if self._board.trouble else []
        views[len(records) : len(records)] = attached_views
        remote_views, more = self.attached.host_views(selected)
        views, problems = [*views, *remote_views], problems + more
        lost = {Path(view.lost) for view in views if view.lost and not view.remote}
        lost_text = format_lost_here(self._state, sorted(lost))
        problems += self.leftovers.notices(lost) if self._report_leftovers else filter(None, [lost_text])
        replay = None
        if view.run is not None or "replays" in self.__dict__:
            replay = self.replays.view(now, view)
            problems += filter(None, [self.replays.trouble])
        found = FleetSnapshot(
            at=now,
            hostname=self._hostname,
            servers=tuple(without_attached(views)),
            notices=(*problems, *self._notices),
            earlier=self._earlier([*records, *attached], views, selected, view.at),
            replay=replay,
        )
        if self._gpus is None or not self._interactive:
            return found
        self._gpus.update(records, views)
        seen = self._gpus.latest()
        chart = self._gpu_chart(self._gpus, seen.host, now, view) if seen.host is not None else None
        trouble = self._gpu_charts.trouble if self._gpu_charts is not None else ""
        return replace(
            found,
            notices=(*found.notices, *([trouble] if trouble else [])),
            host=seen.host,
            host_problem=seen.problem,
            host_recorded=self._gpus.recorded,
            gpu_shares=self._shares,
            gpu_chart=chart,
        )

    def _gpu_chart(self, source: FleetGpus, host: Host, now: float, view: TimeView) -> GpuChart | None:
        """Record the GPUs' current readings where no recorder does, and return the chart of the requested GPU."""
        if not host.gpus:
            return None
        if self._gpu_charts is None:
            from vllm_console.fleet.gpu_charts import GpuCharts

            recorded = host if source.recorded else None
            self._gpu_charts = GpuCharts(self._state, recorded, write=not self.read_only)
        self._gpu_charts.record(host, now)
        gpu = host.gpu(view.gpu) if view.gpu is not None else None
        if gpu is None:
            self._gpu_charts.close_charts()
            return None
        return self._gpu_charts.chart(gpu, now, view)

    def _view(self, record: ServerRecord, now: float, selected: str | None, time_view: TimeView = LIVE) -> ServerView:
        name, key = record.name, record_identity(record)
        if key not in self._watched:
            self._watched[key] = WatchedServer(server_folder(self._state, name), interactive=self._interactive)
        watched = self._watched[key]
        context = JudgeContext(self._gpus, self._shares, self._reserves, may_ask=not self.read_only, board=self._board)
        if not record.state.alive:
            self.loads.server_ended(name)
        load, chosen = self.loads.describe(name), selected == name
        view = watched.view(record, now, selected=chosen, load=load, context=context)
        if chosen and self._interactive:
            view = watched.in_time(view, record, now, time_view)
        if result := self.loads.result(name):
            view = replace(view, load_result=result)
        held = self._releases.notice(name) if self._releases is not None else ""
        shown_as = ""
        if place := client.elsewhere(self._state, record):
            # Its pids belong to another machine.
            view = replace(view, elsewhere=place, pid=None, tuner=None, load_test=None)
            shown_as = f"runs {place}, so it is read-only here; this is its last recorded state"
        notices = [*filter(None, (shown_as, client.keeper_silence(record), held))]
        return replace(view, notice="; ".join(filter(None, (*notices, view.notice)))) if notices else view

    def _earlier(
        self, records: Sequence[ServerRecord], views: Sequence[ServerView], selected: str | None, at: float | None
    ) -> ServerView | None:
        """One of our servers, if selected, at an earlier moment."""
        record = next((one for one in records if one.name == selected), None)
        view = next((one for one in views if one.name == selected and one.recorded), None)
        if at is None or record is None or view is None:
            return None
        if view.attached is not None:
            return self._endpoints.earlier(record, view, at)
        return self._watched[record_identity(record)].earlier(view, record, at)

    def _view_apart(self, record: ServerRecord) -> ServerView:
        """A server after an action, without snapshot caches: another thread's snapshot may be running or hang."""
        with contextlib.closing(WatchedServer(server_folder(self._state, record.name), interactive=False)) as watched:
            load = self.loads.describe(record.name)
            return watched.view(record, time.time(), selected=False, load=load, startup_stages=False)

    def _lacks_keeper(self, record: ServerRecord) -> bool:
        if not record.needs_keeper or client.elsewhere(self._state, record):
            return False
        return not client.keeper_alive(self._state, record.name)

    def _adopt(self) -> list[str]:
        if self.read_only:
            return ["a keeper died; this console is read-only and does not start a new one"]
        try:
            client.adopt_orphans(self._state)
        except KeeperError as error:
            return [str(error)]
        return []

    # -- what can be launched --------------------------------------------------------------------------------------

    @cached_property
    def _launcher(self) -> Launcher:
        # Imported lazily: takes a considerable part of a command's start-up time.
        from vllm_console.fleet.launch_hooks import FleetLaunchHooks
        from vllm_launchers.launch.earlier_starts import report_store
        from vllm_launchers.launch.inputs_reader import PlanInputsReader
        from vllm_launchers.launch.launcher import Launcher
        from vllm_launchers.launch.planner import Planner

        if self._with_gpus and self._gpus is None:
            self._open_gpus()
        inputs = PlanInputsReader(self._gpus, self._shares, patient=not self._interactive)
        planner = Planner(
            self._own_presets,
            inputs,
            report_store(self._state),
            self._settings.vllm,
            self._gpus,
            warm_up=self._settings.warm_up,
            probe=self._settings.probe,
        )
        return Launcher(
            self._state,
            planner,
            self._records,
            FleetLaunchHooks(
                self._state, self._recorder, self._refresh_gpus, self._forget_release, self._window_seconds
            ),
            self.engine_check,
            prepare=self._settings.prepare_restarts,
            rollback=self._settings.rollback,
        )

    def _open_gpus(self) -> None:
        """Open the GPU source; a console watches it, a command that launches reads it once."""
        from vllm_console.fleet.gpus import FleetGpus

        self._gpus = FleetGpus(self._host_file, self._state)
        if self._interactive:
            from vllm_console.fleet.gpus import Releases

            self._gpus.start()
            # A recorded host's memory is never freed.
            self._releases = None if self._gpus.recorded else Releases(self._gpus.host)

    def _refresh_gpus(self) -> None:
        """Before a launch, map processes (and the GPUs of a recorded host) to servers."""
        if self._gpus is None and self._with_gpus:
            self._open_gpus()
        if self._gpus is not None and not self._interactive:
            records = self._records.read()[0]
            views = [self._view(record, time.time(), None) for record in records] if self._gpus.recorded else []
            self._gpus.update(records, views)
            if self._board is not None:
                self._gpus.claims = gpu_claims(self._board.latest())

    def _gpu_indices(self) -> Sequence[int]:
        """The indices of the GPUs of this machine; empty if they are unknown.

        Raises:
            RefusedError: a recorded host is used instead of this machine.
        """
        self._refresh_gpus()
        source = self._gpus
        if source is not None and source.recorded:
            raise RefusedError("GPUs of a recorded host can't be claimed: the board is this machine's; omit --host")
        if source is None or not source.has_driver:
            return ()
        return [gpu.index for gpu in source.read().gpus]

    def presets(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        """All usable presets by name, and the files that cannot be used."""
        presets, problems = self._launcher.planner.presets()
        return tuple(presets.values()), tuple(PresetProblem(str(error.path), str(error)) for error in problems)

    def preset(self, name: str) -> Preset:
        """The preset of that name. Raises NotFoundError."""
        return self._launcher.planner.preset(name)

    def engines(self) -> Sequence[Engine]:
        """The engines found here, the simulated one last."""
        return self._launcher.planner.engines()

    def models(self) -> LocalModels:
        """The models in the Hugging Face cache and in the configured folders; reads files only, no network."""
        from vllm_launchers.vllm.modelfacts.local import local_models

        return local_models(self._settings.models)

    def model_download(self, model: str) -> ModelDownload:
        """Ask the hub what downloading a model would involve; downloads nothing yet. Ends with the fleet.

        Raises:
            OperationError: it can't be downloaded, or this console is read-only.
        """
        self.access.refuse_read_only()
        from vllm_console.fleet.downloads import ModelDownload

        self._download = ModelDownload(model, self._settings.vllm)
        return self._download

    def flags(self, engine: Engine | None = None) -> FlagTable:
        """All flags of an engine; by default, of the engine that a launch would use.

        Uses flags learned from the engine's files, else those of its release, else assumed ones. Learning continues in
        the background, so a later call may return more.
        """
        planner = self._launcher.planner
        return planner.inputs.flags(engine or planner.engine("auto", None))

    def plan(self, request: LaunchRequest) -> Plan:
        """Plan a launch without executing it; problems are in its findings."""
        return self._launcher.plan(request).plan

    def launch_name(self, request: LaunchRequest) -> str:
        """The name a server would get if launched now: its preset's, with a number appended if that is taken."""
        return self._launcher.name_of(request)

    def judged_plan(self, request: LaunchRequest) -> Plan | None:
        """Plan a launch and have the engine itself check the flags; the verdict is in the findings. Takes seconds.

        The process that accepted the flags waits to be launched. There is one check at a time: a new call ends the
        previous one, which then returns None.

        Raises:
            RefusedError: this console is read-only.
        """
        self.access.refuse_read_only()
        launch = self._launcher.plan(request)
        elsewhere = self._gpus is not None and self._gpus.recorded
        folder = self._launcher.folder_of(request)
        verdict = self.engine_check.ask(launch, folder, elsewhere=elsewhere)
        if verdict is None:
            return None
        self.engine_check.keep(launch.plan, verdict_with_fix(verdict, launch.details))
        return self.engine_check.with_verdict(launch.plan)

    def plan_restart(self, name: str, changes: Changes) -> Plan:
        """Plan a restart with changed flags without executing it; what the server holds now counts as free."""
        return self._restart_plan(self.access.adopt_ours(name), changes)

    def _restart_plan(self, record: ServerRecord, changes: Changes) -> Plan:
        return self._launcher.plan_restart(record, changes).plan

    def seen_workload(self, name: str) -> SeenWorkload | None:
        """The traffic of one of our servers in the last hour, as a workload; None for others' servers."""
        from vllm_console.fleet.probe import seen_traffic

        record = self.access.record(name)
        return seen_traffic(server_folder(self._state, name), record, time.time()) if record is not None else None

    def suggest(self, name: str, seen: SeenWorkload, keep: Collection[str] = ()) -> Sequence[Choice]:
        """Suggest flag changes for seen traffic, each with its reason; empty if there are none.

        Flags in ``keep`` are not changed. Steps that were shortened because prompts held up streams stay short.
        """
        from vllm_console.fleet.probe import kept_for_streams

        if seen.workload is None:
            return ()
        record = self.access.adopt_ours(name)
        self._refresh_gpus()
        kept = (*keep, *kept_for_streams(self._state, record))
        return self._launcher.planner.suggest(record, seen.workload, seen.room, seen.longest, kept)

    # -- verbs -----------------------------------------------------------------------------------------------------

    def start(self, request: LaunchRequest, planned: Callable[[Plan], None] | None = None) -> ServerView:
        """Launch a server; return as soon as a keeper has it. ``planned`` gets the plan before it is executed.

        Raises:
            UnfitError, OperationError: as `Launcher.start`; or an attached endpoint has the name.
        """
        self.access.refuse_read_only()
        attached = self._endpoints.names()
        if attached and (name := self.launch_name(request)) in attached:
            raise OperationError(f"an endpoint is attached as '{name}': choose another --name, or detach it")
        return self._launched(self._launcher.start(request, planned))

    def resume(self, name: str, runs: Sequence[LaunchRequest], recorded: Recorded) -> ServerView:
        """Launch a simulated server that continues a recording; see `Launcher.resume`."""
        self.access.refuse_read_only()
        return self._launched(self._launcher.resume(name, runs, recorded))

    def restart(
        self,
        name: str,
        changes: Changes,
        options: RestartOptions = AS_CONFIGURED,
        planned: Callable[[Plan], None] | None = None,
    ) -> ServerView:
        """Restart with changed flags; ``planned`` and errors as for `Launcher.restart`.

        ``planned`` is not called for a server of another machine.
        """
        if (done := self.attached.act(name, "restart", changes=changes, options=options)) is not None:
            return done
        self.access.adopt_ours(name)
        return self._launched(self._launcher.restart(name, changes, options, planned))

    def switch(
        self,
        name: str,
        preset: str,
        options: RestartOptions = AS_CONFIGURED,
        planned: Callable[[Plan], None] | None = None,
    ) -> ServerView:
        """Restart a server with another preset; ``planned`` and errors as for `Launcher.switch`."""
        self.access.adopt_ours(name)
        return self._launched(self._launcher.switch(name, preset, options, planned))

    def cancel_restart(self, name: str) -> ServerView:
        """Cancel a restart that is being prepared, or a pending sleep; the server keeps serving.

        Raises:
            OperationError: neither is pending, or the server is already being stopped for it.
        """
        self.access.adopt_ours(name)
        return self._view_apart(client.cancel(self._state, name))

    def sleep(
        self, name: str, *, level: int = 1, drain_seconds: float = DRAIN_SECONDS, say: Say = silently
    ) -> ServerView:
        """Put a server to sleep; block until it sleeps. ``say`` gets each step; errors as `Sleeping.sleep`."""
        from vllm_launchers.launch.node_start import refuse_node

        record = self.access.adopt_ours(name)
        refuse_node(record)
        return self._launched(self._sleeping.sleep(record, level, drain_seconds, say))

    def wake(
        self, name: str, *, level: int = 1, drain_seconds: float = DRAIN_SECONDS, say: Say = silently
    ) -> ServerView:
        """Wake a server; block until it answers as before. ``say`` gets each step as a sentence.

        The other server of its pair is first put to sleep at ``level``. Errors as `Sleeping.wake`.
        """
        return self._launched(self._sleeping.wake(self.access.adopt_ours(name), level, drain_seconds, say))

    def adapters(self, name: str) -> Adapters:
        """The LoRA adapters of one of our servers.

        Raises:
            RefusedError: the server is another user's.
            OperationError: it is not ready, or does not answer.
        """
        from vllm_console.fleet.adapters import ServerAdapters

        return ServerAdapters(self.access.recorded(name, "its adapters are unknown")).served()

    def load_adapter(self, name: str, adapter: str, folder: str) -> Loaded:
        """Load a LoRA adapter into a running server; errors as `ServerAdapters.load`."""
        from vllm_console.fleet.adapters import ServerAdapters

        return ServerAdapters(self.access.adopt_ours(name)).load(adapter, folder)

    def unload_adapter(self, name: str, adapter: str) -> Loaded:
        """Unload a LoRA adapter from a running server; errors as `ServerAdapters.unload`."""
        from vllm_console.fleet.adapters import ServerAdapters

        return ServerAdapters(self.access.adopt_ours(name)).unload(adapter)

    @cached_property
    def _sleeping(self) -> Sleeping:
        from vllm_console.fleet.standby import Sleeping

        def host(details: Details) -> Host | None:
            self._refresh_gpus()
            source = self._gpus
            return source.read() if source is not None and details.gpus_on(source.recorded_host) else None

        return Sleeping(self._state, self._records, self._facts, host, self.loads.stop)

    def _facts(self, details: Details) -> ModelFacts | None:
        return self._launcher.planner.inputs.model(details.model, details.flags, os.environ, token=None).facts

    def start_beside(self, name: str, changes: Changes, options: RestartOptions = AS_CONFIGURED) -> ServerView:
        """Launch a server with changed flags beside a ready one; errors as `Launcher.start_beside`."""
        self.access.adopt_ours(name)
        return self._launched(self._launcher.start_beside(name, changes, options))

    def engine(self, word: str) -> Engine:
        """Find an engine: ``simulated``, ``vllm`` (the first one found), the version of one listed by `engines`, or the
        path of a vLLM.

        Raises:
            OperationError: there is no such engine.
        """
        if word in ("simulated", "vllm"):
            return self._launcher.planner.engine(word, None)
        known = [one for one in self.engines() if one.kind == "vllm" and word in (one.version, one.public_version)]
        if len(known) > 1:
            raise OperationError(f"several vLLM {word} are installed: name one by its path, as 'engines' lists it")
        return known[0] if known else self._launcher.planner.engine("vllm", word)

    def plan_trial(self, name: str, engine: Engine, changes: Changes) -> Plan:
        """Plan what `start_trial` starts; errors as `Launcher.plan_trial`."""
        self.access.recorded(name)
        return self._launcher.plan_trial(name, engine, changes).plan

    def start_trial(self, name: str, trial: str, engine: Engine, changes: Changes) -> ServerView:
        """Launch a temporary server with a server's flags on another engine; errors as `Launcher.start_trial`."""
        self.access.adopt_ours(name)
        return self._launched(self._launcher.start_trial(name, trial, engine, changes))

    def compare_answers(self, old: str, new: str) -> AnswerComparison:
        """Compare two ready servers' greedy answers to the golden prompts (takes seconds). Raises OperationError."""
        from vllm_console.fleet.rolling import compare_answers

        return compare_answers(self.access.adopt_ours(old), self.access.adopt_ours(new))

    def listener(self, name: str) -> Listener | None:
        """Where one of our servers listens; None if it does not, or was removed.

        Raises:
            OSError: another process has its port.
        """
        record = self.access.record(name)
        if record is None or record.server is None or not record.state.alive:
            return None
        return Owner(record.server.pid, record.server.start_time).listener(record.current.spec.port)

    def energy(self, name: str) -> Energy | None:
        """Energy used by the GPUs of one of our servers in the last half hour; None if unknown."""
        from vllm_console.fleet.gpus import recent_energy

        record = client.read(self._state, name)
        found = recent_energy(self._state, record, unpack(record.current.spec.details).gpus, time.time())
        return replace(found, tariff=self.tariff) if found is not None else None

    def stop(self, name: str) -> ServerView:
        """Ask the server's keeper to stop it; return at once."""
        if (done := self.attached.act(name, "stop")) is not None:
            return done
        record = self.access.adopt_ours(name)
        if record.needs_keeper:
            if self._releases is not None:
                self._releases.watch(name, lambda: self._has_ended(name))
            try:
                record = client.stop(self._state, name)
            except OperationError:
                self._forget_release(name)  # it continues to serve, perhaps for weeks
                raise
            self._announce()
        self.loads.server_ended(name)  # only now: a server that can't be stopped keeps its load
        self.ramps.cancel(name)
        return self._view_apart(record)

    def forget(self, name: str, *, purge: bool = False) -> bool:
        """Remove a stopped or failed server: delete its record and log, keep its history for replays.

        ``purge`` keeps nothing, and also deletes histories of earlier servers with this name. Returns whether there is
        a history to replay.

        Raises:
            OperationError: it has not ended, or the end of its last run or its history can't be kept (a full disk);
                nothing was removed. ``purge`` removes it also then.
        """
        if purge and self._purged(name):
            return False
        record = self.access.adopt_ours(name)
        client.refuse_running(record)
        self._recorder.enter_last(record, may_be_lost=purge)
        self._recorder.judge_past([record])
        self.loads.stop(name)
        self.ramps.stop(name)
        self._forget_release(name)
        kept = False

        def keep(home: Path) -> None:
            nonlocal kept
            kept = self.history.removed.keep(home, name, record.created_at)

        client.remove(self._state, name, keep=None if purge else keep)
        if purge:
            self.history.removed.delete(name)
        return kept

    def _purged(self, name: str) -> bool:
        """Delete histories of removed servers of that name if no server has it now; return whether there were any."""
        self.access.refuse_read_only()
        return not client.exists(self._state, name) and self.history.removed.delete(name)

    def chat_server(self, name: str) -> ChatServer:
        """Where to chat with one of our ready servers, or with an attached endpoint.

        Raises:
            OperationError: it is not ready.
            NotFoundError, RefusedError: there is no such server, or nothing may be sent to it.
        """
        from vllm_console.chat.client import ChatServer
        from vllm_console.load.client import ApiAccess, own_access

        seen = self.snapshot().server(name)
        if seen is not None and seen.attached is not None:
            if seen.state not in (State.READY, State.UNRESPONSIVE):
                raise OperationError(f"{name} is {seen.state_text}: you can chat with it once it responds")
            return ChatServer(name, seen.url, endpoint_access(seen.attached))
        record = self.access.adopt_ours(name)
        if record.state not in (State.READY, State.UNRESPONSIVE):
            raise OperationError(f"{name} is {record.state}: you can chat with it once it is ready")
        spec = record.current.spec
        access = own_access() if API_KEY in spec.secret_names else ApiAccess()
        return ChatServer(name, base_url(spec.host, spec.port, tls=spec.tls), access, partial(self.listener, name))

    def _launched(self, record: ServerRecord) -> ServerView:
        self._announce()
        return self._view_apart(record)

    def _announce(self) -> None:
        """Announce what runs now, after an action. Ignores a board that cannot be written: the servers run anyway."""
        self._acted = True
        if self._board is not None:
            with contextlib.suppress(KeeperError):
                self._board.announce(self._records.read()[0])

    def _has_ended(self, name: str) -> bool:
        """Called from another thread: only reads the record."""
        try:
            return not client.read(self._state, name).state.alive
        except KeeperError:
            return True

    def _forget_release(self, name: str) -> None:
        if self._releases is not None:
            self._releases.forget(name)

    # -- the rest --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End loads and observers, close files. Servers keep running."""
        if self._download is not None:
            self._download.cancel()
        owned = (
            self.predictions.staged,
            self.loads,
            self.ramps,
            self.leftovers,
            self.engine_check,
            self._gpus,
            self._gpu_charts,
            self._releases,
            self._board,
        )
        for one in (*owned, self.__dict__.get("replays"), self._observer):
            if one is not None:
                one.close()
        for watched in tuple(self._watched.values()):  # a snapshot that hangs may still be running
            watched.close()
        self._watched.clear()
        self.attached.close()

"""The fleet on this machine: records and keepers of this person, the others' servers from outside."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.config import config_folder
from vllm_console.fleet.api import FleetError, NotFoundError, PresetProblem, RefusedError, UsageError
from vllm_console.fleet.board import BoardVerbs, SharedBoard, gpu_claims
from vllm_console.fleet.details import unpack
from vllm_console.fleet.leftovers import LeftoversVerbs
from vllm_console.fleet.loads import Loads, LoadVerbs
from vllm_console.fleet.model import Changes, Engine, FleetSnapshot, LaunchRequest, Preset, ServerView, Workload
from vllm_console.fleet.observed import Observer
from vllm_console.fleet.records import Records
from vllm_console.fleet.runs import RunBook, RunsVerbs
from vllm_console.fleet.turns import turn
from vllm_console.fleet.watched import Around, WatchedServer
from vllm_launchers.keeper import client
from vllm_launchers.keeper.errors import BadNameError, KeeperError, NameTakenError, NoSuchServerError
from vllm_launchers.keeper.records import LaunchSpec, ServerRecord
from vllm_launchers.plan.model import Plan

if TYPE_CHECKING:
    from vllm_console.fleet.gpus import GpuSource
    from vllm_console.fleet.launching import Launch, Launcher
    from vllm_console.fleet.releases import Releases
    from vllm_console.telemetry.workload import SeenWorkload
    from vllm_launchers.machine.flags.model import FlagTable
    from vllm_launchers.machine.gpu.sharing import Share
    from vllm_launchers.plan.choices.model import Choice


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What the keeper's client refuses, as the fleet's own errors."""
    try:
        yield
    except BadNameError as error:
        raise UsageError(str(error)) from error
    except NoSuchServerError as error:
        raise NotFoundError(str(error)) from error
    except KeeperError as error:
        raise FleetError(str(error)) from error


class LocalFleet(RunsVerbs, BoardVerbs, LeftoversVerbs, LoadVerbs):
    """`vllm_console.fleet.api.Fleet` on this machine. Stopping never waits for a look that another thread is in."""

    def __init__(
        self,
        state: Path | None = None,
        *,
        read_only: bool = False,
        vllm_paths: Sequence[str] = (),
        observe: bool = True,
        charts: bool = False,
        host_file: Path | None = None,
        gpus: bool = True,
        shares: Sequence[Share] = (),
        reserves: Sequence[Share] = (),
        read_only_by: str = "",
        notices: Sequence[str] = (),
        board: str = "",
    ) -> None:
        self.read_only, self.read_only_by = read_only, read_only_by
        self._notices = tuple(notices)
        self._board = SharedBoard(Path(board), watched=charts, read_only=read_only) if board else None
        self._state = state or client.default_root()
        self._vllm_paths = tuple(vllm_paths)
        self._loads = Loads()
        self._observer = Observer() if observe else None
        self._charts = charts
        self._shares, self._reserves = tuple(shares), tuple(reserves)
        self._host_file, self._with_gpus = host_file, gpus
        self._gpus: GpuSource | None = None
        self._releases: Releases | None = None
        if gpus and (charts or host_file is not None):
            self._watch_gpus()
        self._runs = RunBook(self._state, 0.0 if charts else time.time(), read_only=read_only)
        self._watched: dict[str, WatchedServer] = {}
        self._looking = threading.Lock()
        self._records = Records(self._state)
        self._hostname = os.uname().nodename

    def snapshot(self, selected: str | None = None) -> FleetSnapshot:
        """Look once at everything; a server whose keeper died gets a new one on the way. One look at a time."""
        with self._looking, _told():
            return self._look(selected)

    def _look(self, selected: str | None) -> FleetSnapshot:
        now = time.time()
        records, problems = self._records.read()
        if any(record.needs_keeper and not client.keeper_alive(self._state, record.name) for record in records):
            problems += self._adopt()
            records, _ = self._records.read()
        for gone in self._watched.keys() - {record.name for record in records}:
            self._watched.pop(gone).close()
        views = [self._view(record, now, selected) for record in records]
        problems += self._runs.look(records, views)
        if self._observer is not None:
            own = {record.server.pid for record in records if record.server and record.state.alive}
            views += self._observer.views(own, [view.name for view in views], selected)
        views, said = self._with_board(records, views)
        problems += said + self._leftovers_notice()
        found = FleetSnapshot(
            at=now, hostname=self._hostname, servers=tuple(views), notices=(*problems, *self._notices)
        )
        if self._gpus is None or not self._charts:
            return found
        self._gpus.tell(records, views)
        seen = self._gpus.latest()
        return replace(
            found,
            host=seen.host,
            host_problem=seen.problem,
            host_recorded=self._gpus.recorded,
            gpu_shares=self._shares,
        )

    def _tell_gpus(self) -> None:
        """Before a launch: which processes, and which GPUs of a recorded host, are whose."""
        if self._gpus is None and self._with_gpus:
            self._watch_gpus()
        if self._gpus is not None and not self._charts:
            records = self._records.read()[0]
            views = [self._view(record, time.time(), None) for record in records] if self._gpus.recorded else []
            self._gpus.tell(records, views)
            if self._board is not None:
                self._gpus.claims = gpu_claims(self._board.latest())

    def _watch_gpus(self) -> None:
        """Have GPUs at hand; a console watches them, a command that launches looks once."""
        from vllm_console.fleet.gpus import GpuSource

        self._gpus = GpuSource(self._host_file)
        if self._charts:
            from vllm_console.fleet.releases import Releases

            self._gpus.start()
            # A recorded host's memory never comes back.
            self._releases = None if self._gpus.recorded else Releases(self._gpus.host)

    def presets(self) -> tuple[Sequence[Preset], Sequence[PresetProblem]]:
        """All usable presets by name, and the files that are of no use."""
        presets, problems = self._launcher.presets()
        return tuple(presets.values()), tuple(PresetProblem(str(error.path), str(error)) for error in problems)

    def engines(self) -> Sequence[Engine]:
        """The engines found here, the simulated one last."""
        return self._launcher.engines()

    def flags(self, engine: Engine | None = None) -> FlagTable | None:
        """All flags of an engine, as far as they are known by now; what is not is learned in the background."""
        return self._launcher.knowing.flags(engine or self._launcher.engine("auto", None))

    def seen_workload(self, name: str) -> SeenWorkload | None:
        """The traffic that a server of ours has had in the last hour, as a workload; None for others' servers."""
        from vllm_console.fleet.traffic import seen_traffic

        if name not in client.names(self._state):
            return None
        with _told():
            return seen_traffic(client.folder(self._state, name), client.read(self._state, name), time.time())

    def suggest(self, name: str, workload: Workload) -> Sequence[Choice]:
        """What traffic asks to change of a server's flags, each with its reason; nothing where they fit already."""
        record = self._ours(name)
        self._tell_gpus()
        return self._launcher.suggest(name, unpack(record.current.spec.details), self._placed(record), workload)

    def plan(self, request: LaunchRequest) -> Plan:
        """Resolve a launch without doing it; what stands in its way is in its findings."""
        with _told():
            self._tell_gpus()
            return self._launcher.launch(request, self._records.taken_ports(), self._records.starting()).plan

    def start(self, request: LaunchRequest) -> ServerView:
        """Launch; returns as soon as a keeper holds it.

        Raises:
            UnfitError: its plan finds errors that ``force`` does not or may not pass over.
            FleetError: it cannot be launched, or the name is taken.
        """
        from vllm_console.fleet.refusing import refuse_unfit

        if request.vllm_version is not None:
            raise UsageError(
                "a release that is not installed can be planned for, not started: leave --vllm-version out"
            )
        with self._turn(), _told():
            name = request.name or self._records.free_name(self._launcher.preset(request.preset).name)
            existing = client.read(self._state, name) if client.exists(self._state, name) else None
            if existing is not None and existing.needs_keeper:
                raise NameTakenError(f"a server named {name} is there already; restart it, or take another name")
            self._tell_gpus()
            launch = self._launcher.launch(request, self._records.taken_ports(), self._records.starting())
            self._launcher.refuse_elsewhere(launch.plan)
            refuse_unfit(launch.plan, force=request.force)
            if existing is not None:
                # A stopped server of that name is the same server: it keeps its history and counts on.
                record = self._again(name, launch)
            else:
                spec = launch.spec(client.folder(self._state, name), self._state)
                record = self._runs.enter(client.launch(self._state, name, spec, launch.secrets))
        self._announce()
        return self._apart(record)

    def restart(self, name: str, changes: Changes, *, force: bool = False) -> ServerView:
        """Stop and start again with a difference of flags: same name, port and GPUs, next generation.

        One that does not run gets another port if its own has been taken since. One that runs goes on when its plan
        finds errors.

        Raises:
            UnfitError: its plan finds errors that ``force`` does not or may not pass over.
        """
        with self._turn():
            return self._take_over(name, self._relaunch(self._ours(name), changes), force)

    def plan_restart(self, name: str, changes: Changes) -> Plan:
        """What a restart with a difference of flags would come to, without doing it."""
        return self._relaunch(self._ours(name), changes).plan

    def _relaunch(self, record: ServerRecord, changes: Changes) -> Launch:
        details = unpack(record.current.spec.details)
        self._tell_gpus()
        return self._launcher.relaunch(record.name, details, self._placed(record), changes, self._records.starting())

    def switch(self, name: str, preset: str, *, force: bool = False) -> ServerView:
        """Hand the server's place (name, GPUs, port) to another preset.

        Raises:
            UnfitError: the preset's plan finds errors; the server that runs goes on.
        """
        with self._turn():
            record = self._ours(name)
            details = unpack(record.current.spec.details)
            self._tell_gpus()
            launch = self._launcher.handover(name, details, self._placed(record), preset, self._records.starting())
            return self._take_over(name, launch, force)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One verb that launches at a time; what it goes by is read within, or another's launch would be overlooked."""
        self._refuse_read_only()
        with turn(self._state):
            yield

    def _take_over(self, name: str, launch: Launch, force: bool) -> ServerView:
        from vllm_console.fleet.refusing import refuse_unfit

        refuse_unfit(launch.plan, force=force)
        record = self._again(name, launch)
        self._announce()
        return self._apart(record)

    def stop(self, name: str) -> ServerView:
        """Ask its keeper to stop it; returns at once."""
        record = self._ours(name)
        self._loads.stop(name)
        if record.needs_keeper:
            if self._releases is not None:
                self._releases.watch(name, lambda: self._has_ended(name))
            with _told():
                record = client.stop(self._state, name)
            self._announce()
        return self._apart(record)

    def forget(self, name: str) -> None:
        """Remove the record, log and history of a server that has stopped or failed."""
        self._runs.judge_past([self._runs.enter(self._ours(name))])
        self._loads.stop(name)
        self._forget_release(name)
        with _told():
            client.remove(self._state, name)

    def close(self) -> None:
        """Let go of loads, open files and observers. Servers go on."""
        self._loads.close()
        if self._gpus is not None:
            self._gpus.close()
        if self._releases is not None:
            self._releases.close()
        if self._board is not None:
            self._board.close()
        if self._leftovers_watch is not None:
            self._leftovers_watch.close()
        if self._observer is not None:
            self._observer.close()
        for watched in self._watched.values():
            watched.close()
        self._watched.clear()

    @cached_property
    def _launcher(self) -> Launcher:
        # Not needed to look at servers, and a good part of a command's start-up time.
        from vllm_console.fleet.knowing import Knowing
        from vllm_console.fleet.launching import Launcher
        from vllm_console.fleet.remembering import report_book

        knowing = Knowing(self._gpus, self._shares, patient=not self._charts)
        book = report_book(self._state)
        return Launcher(config_folder(), knowing, book, self._vllm_paths, self._gpus, self._shares)

    def _adopt(self) -> list[str]:
        if self.read_only:
            return ["a keeper died; this console is read-only and starts none"]
        try:
            client.adopt_orphans(self._state)
        except KeeperError as error:
            return [str(error)]
        return []

    def _view(self, record: ServerRecord, now: float, selected: str | None) -> ServerView:
        name = record.name
        if name not in self._watched:
            self._watched[name] = WatchedServer(client.folder(self._state, name), charts=self._charts)
        around = Around(self._gpus, self._shares, self._reserves, may_ask=not self.read_only, board=self._board)
        load, chosen = self._loads.describe(name), selected == name
        view = self._watched[name].view(record, now, selected=chosen, load=load, around=around)
        held = self._releases.notice(name) if self._releases is not None else ""
        return replace(view, notice="; ".join(filter(None, (held, view.notice)))) if held else view

    def _apart(self, record: ServerRecord) -> ServerView:
        """A server after a verb, without what looks keep: one may be under way in another thread, or hang there."""
        with contextlib.closing(WatchedServer(client.folder(self._state, record.name), charts=False)) as watched:
            return watched.view(record, time.time(), selected=True, load=self._loads.describe(record.name))

    def _has_ended(self, name: str) -> bool:
        """Asked from another thread: reads the record and nothing else."""
        try:
            return not client.read(self._state, name).state.alive
        except KeeperError:
            return True

    def _forget_release(self, name: str) -> None:
        if self._releases is not None:
            self._releases.forget(name)

    def _placed(self, record: ServerRecord) -> LaunchSpec:
        """Where it runs, or will: a server that has ended keeps its port unless somebody else has it by now."""
        spec = record.current.spec
        if record.state.alive:
            return spec
        return replace(spec, port=self._launcher.port(spec.host, spec.port, self._records.taken_ports(record.name)))

    def _again(self, name: str, launch: Launch) -> ServerRecord:
        spec = launch.spec(client.folder(self._state, name), self._state)
        self._forget_release(name)
        with _told():
            if not self._runs.enter(client.read(self._state, name)).state.alive:
                self._launcher.claim(spec.host, spec.port, self._records.taken_ports(name))
            return self._runs.enter(client.restart(self._state, name, spec, launch.secrets))

    def _refuse_read_only(self) -> None:
        if self.read_only:
            from vllm_console.fleet.refusing import read_only_words

            raise RefusedError(read_only_words(self.read_only_by))

    def _ours(self, name: str) -> ServerRecord:
        """The record of a server that may be acted on.

        Raises:
            RefusedError: the console is read-only, or somebody else started the server.
            NotFoundError: there is none of that name.
        """
        self._refuse_read_only()
        with _told(), contextlib.suppress(BadNameError):  # names of observed servers look otherwise than ours
            if client.exists(self._state, name):
                client.adopt(self._state, name)
                return client.read(self._state, name)
        seen = self.snapshot().server(name)
        if seen is not None and not seen.ours:
            owner = seen.owner or "somebody else"
            raise RefusedError(f"{name} was started by {owner}, not by vllm-console: it is shown and never touched")
        known = ", ".join(client.names(self._state)) or "none yet"
        raise NotFoundError(f"no server is called '{name}'; servers of yours: {known}")

"""Plans launches on this machine: chooses engine, model, and port, separates secrets, and gathers the plan's inputs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from vllm_launchers.errors import OperationError, RefusedError, UsageError
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.host.gpu.sharing import without_server
from vllm_launchers.host.ports import check_port, free_port, host_problem
from vllm_launchers.host.processes import announced_ports
from vllm_launchers.keeper.records import RestartMode, RestartPolicy, ServerRecord, State
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.launch.errors import NoPlaceError
from vllm_launchers.launch.inputs_reader import GpuSource, PlanInputsReader
from vllm_launchers.launch.launch_plan import LaunchPlan, plan_launch, suggestions
from vllm_launchers.launch.place import AUTO, NONE, OFFERED, GpuFinder, kept_devices, kept_slice
from vllm_launchers.launch.request import LaunchRequest, RestartOptions
from vllm_launchers.launch.resolved_request import ResolvedRequest
from vllm_launchers.plan.budget.budget import needed_gib
from vllm_launchers.plan.budget.memory_flags import accepted_utilization
from vllm_launchers.plan.checks.environment import OTHER_PORT, engine_missing
from vllm_launchers.plan.checks.request import local_ranks, visible_gpus
from vllm_launchers.plan.checks.sleep import DEVELOPERS, sleeps
from vllm_launchers.plan.choices.choice import Choice, SeenRoom
from vllm_launchers.plan.command_line import inherited_secrets, split_secrets
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import BLOCKS, BYTES, VISIBLE, not_set
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.plan.model import Plan
from vllm_launchers.plan.probe import ProbeWish
from vllm_launchers.presets.load import PresetError, find_preset, read_presets
from vllm_launchers.presets.model import Preset, Workload
from vllm_launchers.vllm.engines import Engine, EngineKind, engine_at, engine_problems, find_engines, simulated_engine
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.release_defaults import parse_release
from vllm_launchers.vllm.startup_reports import StartupReportStore, StoredReport

LOOPBACK = "127.0.0.1"
FIRST_PORT = 8000


class Planner:
    """Plans launches on this machine.

    ``own_presets`` is the folder of the user's presets, ``vllm_paths`` are the installations named in the settings.
    """

    def __init__(
        self,
        own_presets: Path,
        inputs: PlanInputsReader,
        reports: StartupReportStore,
        vllm_paths: Sequence[str] = (),
        gpus: GpuSource | None = None,
        *,
        warm_up: bool = True,
        probe: ProbeWish = "auto",
    ) -> None:
        self._own_presets = own_presets
        self._warm_up, self._probe = warm_up, probe
        self._gpus, self._recorded_host = gpus, gpus.recorded_host if gpus is not None else None
        self._recorded = self._recorded_host is not None
        self._vllm_paths = tuple(vllm_paths)
        self.inputs, self._reports = inputs, reports

    def presets(self) -> tuple[dict[str, Preset], list[PresetError]]:
        """All usable presets by name, and the problems of the other files."""
        return read_presets(self._own_presets)

    def engines(self) -> list[Engine]:
        """All engines found here, real ones first."""
        return [*find_engines(self._vllm_paths), simulated_engine()]

    def engine(self, kind: str, path: str | None) -> Engine:
        """The engine to launch.

        Raises:
            OperationError: ``path`` is not a vLLM, or none was found.
            UsageError: a path was given for the simulated engine.
        """
        if kind == EngineKind.SIMULATED:
            if path:
                raise UsageError("--vllm can't be combined with --engine simulated: drop one of them")
            return simulated_engine()
        if path:
            return engine_at(path)
        found = find_engines(self._vllm_paths)
        if not found:
            if refused := engine_problems(self._vllm_paths):
                raise OperationError(". ".join(refused))
            raise OperationError(
                "no vLLM was found on PATH. Install one ('vllm-console engines install'), name one with --vllm PATH, "
                "or try the simulated engine with --engine simulated"
            )
        return found[0]

    def preset(self, name: str) -> Preset:
        """The preset of that name.

        Raises:
            NotFoundError: it does not exist, or its file is invalid.
        """
        presets, problems = self.presets()
        return find_preset(name, presets, problems)

    @staticmethod
    def refuse_taken_port(host: str, port: int, taken: Collection[int]) -> None:
        """Refuse a port that is not free. vLLM up to 0.24 may silently share one, so its own bind is not a safe check.

        Raises:
            UsageError: it is not a port number.
            OperationError: it belongs to another server or process.
        """
        if not 1 <= port <= 65535:
            raise UsageError(f"--port {port}: expected a port between 1 and 65535")
        if port in taken:
            raise OperationError(
                f"port {port} belongs to another of your servers (see 'vllm-console list'); choose another with --port"
            )
        if use := check_port(host, port):
            raise OperationError(f"port {port} {use}; choose another with --port")

    def plan(
        self,
        request: LaunchRequest,
        taken: Collection[int],
        starting: Sequence[str] = (),
        *,
        freed: ServerRecord | None = None,
        prepared: Collection[int] = (),
    ) -> LaunchPlan:
        """Plan a launch. ``taken``: ports that our other servers hold or will hold. ``starting``: names of those that
        are starting. GPU memory held by the server ``freed`` counts as free, and so does the port that a process
        ``prepared`` for this launch announces.

        Raises:
            OperationError: there is no such preset or host, no port is free, no GPUs are available.
            UsageError: a flag or an option is invalid.
        """
        preset = self.preset(request.preset)
        host = request.host or LOOPBACK
        if problem := host_problem(host):
            raise UsageError(problem)
        found: list[PlanFinding] = []
        engine = self._engine(request, found)
        if self._gpus is not None and self._recorded and engine.kind is EngineKind.VLLM:
            text = "planned for a recorded host; it can't be started on this machine"
            if engine.build == "cpu" and engine.version and not request.vllm and self._gpus.read().gpus:
                engine = _release(engine.version.partition("+")[0])
                text += f". The vLLM here is a CPU build: planned for vLLM {engine.version} with CUDA"
            found.append(PlanFinding("recorded_host", Level.ADVICE, text))
        port = request.port if request.port is not None else _free(host, taken, prepared)
        if not 1 <= port <= 65535:
            raise UsageError(f"--port {port}: expected a port between 1 and 65535")
        if port in taken:
            text = f"port {port} belongs to another of your servers (see 'vllm-console list'); {OTHER_PORT}"
            found.append(PlanFinding("port_taken", Level.ERROR, text))
        port_to_check = request.port if request.port is not None and port not in taken else None
        environment, given = split_secrets(request.environment)
        place = request.place
        if self._recorded and engine.kind is EngineKind.SIMULATED and not request.gpus:
            place = place or AUTO  # it simulates a server on that host, so it takes a GPU of it
        place = "" if place == NONE else place
        resolved = ResolvedRequest(
            preset,
            engine,
            request.changes,
            model=_located(request.model) if request.model else preset.model,
            host=host,
            port=port,
            environment=environment,
            gpus=request.gpus,
            secrets={**inherited_secrets(os.environ), **given},
            inherited=os.environ,
            workload=request.workload,
            gpu_finder=GpuFinder(place, recorded=self._recorded, beyond_shares=request.beyond_shares),
            recorded_host=self._recorded_host,
            found=tuple(found),
            restart=RestartPolicy(RestartMode(request.restart)),
            warm_up=self._warm_up if request.warm_up is None else request.warm_up,
            probe=self._probe,
            probe_asked=request.probe,
            standby_of=request.standby_of,
            nodes=request.nodes,
            gpus_unnamed=not place and not request.gpus,
        )
        inputs = self.inputs.gather(resolved, port_to_check, starting, place=place, from_hub=request.from_hub)
        if freed:
            inputs = replace(inputs, host=_without(freed, inputs))
        return plan_launch(resolved, inputs, self._reports)

    def plan_restart(
        self,
        record: ServerRecord,
        changes: Changes,
        options: RestartOptions,
        starting: Sequence[str] = (),
        own: StoredReport | None = None,
    ) -> LaunchPlan:
        """Plan a restart with changed flags: same model, engine, address (unless another port is given) and GPUs.

        ``own`` is the server's own memory report.

        Raises:
            OperationError: its record lacks data, or it is on another recorded host.
            UsageError: a flag to unset is not set.
        """
        self.refuse_other_host(record)
        details = unpack(record.current.spec.details)
        preset = _own_preset(details, "can't be restarted", ". Stop it, then start it again")

        def plan(changes: Changes) -> LaunchPlan:
            resolved = self._in_place_of(record, details, preset, changes, details.environment, options)
            resolved = replace(resolved, port=options.port or resolved.port, sources=details.sources)
            return self._planned_again(record, resolved, starting, own)

        _refuse_needless_unset(record.name, details.flags, changes, plan)
        return plan(changes)

    def plan_switch(
        self, record: ServerRecord, preset: str, options: RestartOptions, starting: Sequence[str] = ()
    ) -> LaunchPlan:
        """Plan a restart of a server with another preset, on the same engine, address, and GPUs.

        Raises:
            OperationError: its record lacks data, or it is on another recorded host.
        """
        self.refuse_other_host(record)
        details = unpack(record.current.spec.details)
        environment = kept_devices(details.environment, details.gpus)
        resolved = self._in_place_of(record, details, self.preset(preset), Changes(), environment, options)
        resolved = replace(resolved, beside="")  # it now serves something else
        return self._planned_again(record, resolved, starting)

    def plan_beside(
        self,
        record: ServerRecord,
        changes: Changes,
        options: RestartOptions,
        taken: Collection[int],
        starting: Sequence[str] = (),
        engine: Engine | None = None,
    ) -> LaunchPlan:
        """Plan a second server next to a running one: same preset with changed flags, another port, GPUs with room.

        What the running server holds counts as taken. With another ``engine`` it is not part of a rolling update.

        Raises:
            OperationError: there is no room for it, no port is free, the server's record lacks data, or it is on
                a recorded host that is not the one used here.
            UsageError: a flag or the port is invalid, or a flag to unset is not set.
        """
        self.refuse_other_host(record, host_needed=True)
        details = unpack(record.current.spec.details)
        preset = _own_preset(details, "can't be planned")
        _refuse_needless_unset(
            record.name, details.flags, changes, lambda before: self.plan_restart(record, before, RestartOptions())
        )
        environment = {name: value for name, value in details.environment.items() if name != VISIBLE}
        resolved = self._in_place_of(record, details, preset, changes, environment, options)
        port = options.port
        if port is not None:
            self.refuse_taken_port(resolved.host, port, taken)
        real = resolved.engine.kind is EngineKind.VLLM
        place = AUTO if details.gpus or kept_slice(details.environment) else OFFERED if real else ""
        resolved = replace(
            resolved,
            port=port if port is not None else _free(resolved.host, taken),
            engine=engine or resolved.engine,
            sources=details.sources,
            standby_of="",  # it is not part of a standby pair
            beside="" if engine is not None else record.name,
            gpus=(),
            gpu_finder=GpuFinder(place, recorded=self._recorded),
            gpus_unnamed=not place,
        )
        inputs = self.inputs.gather(resolved, None, starting, place=place)
        try:
            return plan_launch(resolved, inputs, self._reports)
        except NoPlaceError as error:
            text = error.problem if error.only_of_command else str(error)
            raise NoPlaceError(f"no room for a second server beside {record.name}: {text}", error.sets) from error

    def suggest(
        self,
        record: ServerRecord,
        workload: Workload,
        room: SeenRoom | None,
        longest: float,
        keep: Collection[str],
    ) -> tuple[Choice, ...]:
        """The flag changes that a workload calls for on the same model, engine, and GPUs; flags in ``keep`` stay.

        ``longest`` is as in `ChoiceInputs`.
        """
        details = unpack(record.current.spec.details)
        preset = _own_preset(details, "its record can't be read")
        resolved = self._in_place_of(record, details, preset, Changes(), details.environment, RestartOptions())
        inputs = self._restart_inputs(record, resolved, ())
        return suggestions(replace(resolved, workload=workload), inputs, room, longest, keep)

    def _in_place_of(
        self,
        record: ServerRecord,
        details: Details,
        preset: Preset,
        changes: Changes,
        environment: Mapping[str, str],
        options: RestartOptions,
    ) -> ResolvedRequest:
        """A request to replace a server, with its engine, address, and GPUs."""
        spec = record.current.spec
        plain, given = split_secrets({**environment, **options.environment})
        if details.gpus and not kept_slice(plain):
            plain.pop(VISIBLE, None)  # follows from its GPUs, which may change with their number
        if sleeps(details.flags):
            plain.pop(DEVELOPERS, None)  # follows from that flag
        return ResolvedRequest(
            preset,
            self._still_there(details.engine),
            changes,
            model=preset.model,
            host=spec.host,
            port=spec.port,
            environment=plain,
            gpus=details.gpus,
            secrets={**inherited_secrets(os.environ), **given},
            more_secrets=spec.secret_names,
            inherited=os.environ,
            gpu_finder=GpuFinder(again=True, chosen=details.gpus_chosen, recorded=self._recorded),
            recorded_host=self._recorded_host if details.recorded_host is None else details.recorded_host,
            restart=spec.restart,
            warm_up=self._warm_up and details.warm_up if options.warm_up is None else options.warm_up,
            probe=self._probe,
            probe_asked=details.probe_asked if options.probe is None else options.probe,
            standby_of=details.standby_of,
            beside=details.beside,
            gpus_unnamed=not details.gpus,
        )

    def _planned_again(
        self, record: ServerRecord, request: ResolvedRequest, starting: Sequence[str], own: StoredReport | None = None
    ) -> LaunchPlan:
        try:
            return plan_launch(request, self._restart_inputs(record, request, starting), self._reports, own)
        except NoPlaceError:
            self.refuse_other_host(record, host_needed=True)
            raise

    def _restart_inputs(self, record: ServerRecord, request: ResolvedRequest, starting: Sequence[str]) -> PlanInputs:
        """A restart's plan inputs: what the server holds now counts as free."""
        inputs = self.inputs.gather(request, None, [other for other in starting if other != record.name])
        ray = inputs.ray
        if ray is not None:  # what it has reserved there can't be told from what others have
            ray = replace(ray, nodes=tuple(replace(node, free=None) for node in ray.nodes))
        return replace(inputs, host=_without(record, inputs), ray=ray)

    def _engine(self, request: LaunchRequest, found: list[PlanFinding]) -> Engine:
        """The engine to launch, or a placeholder for a vLLM that is not installed here."""
        if request.vllm_version is not None:
            if request.vllm or request.engine == EngineKind.SIMULATED:
                raise UsageError("--vllm-version names a release that need not be here: omit --vllm and --engine")
            return _release(request.vllm_version)
        try:
            return self.engine(request.engine, request.vllm)
        except UsageError:
            raise
        except OperationError as error:
            found.append(engine_missing(str(error), elsewhere=self._recorded))
            return Engine(EngineKind.VLLM, (request.vllm or "vllm",), None, None, "")

    def refuse_elsewhere(self, plan: Plan) -> None:
        """Refuse to start a real server that was planned for a recorded host's GPUs or for a vLLM installed only there.

        Raises:
            RefusedError: the engine is real.
        """
        if not self._recorded or plan.engine.kind is not EngineKind.VLLM:
            return
        if not plan.engine.path:
            raise RefusedError(
                "planned for a recorded host, and no vLLM was found here: start a simulated server with --engine "
                "simulated, or omit --host and name a vLLM with --vllm PATH"
            )
        if plan.gpus:
            raise RefusedError(
                "planned for the GPUs of a recorded host: omit --host to start it here, or choose no GPUs"
            )

    def refuse_other_host(self, record: ServerRecord, *, host_needed: bool = False) -> None:
        """Refuse to plan for a server that simulates GPUs of another recorded host than the one used here.

        ``host_needed``: GPUs of its host are chosen or shared, so this machine's GPUs do not do, either.

        Raises:
            RefusedError: it does.
        """
        own, used = unpack(record.current.spec.details).recorded_host, self._recorded_host
        if own is None or own == used or (used is None and not host_needed):
            return
        other = f", not of {used}" if used is not None else ""
        way = "use that host with --host" if host_needed else "omit --host"
        raise RefusedError(f"{record.name} simulates a GPU of the recorded host {own}{other}: {way}")

    @staticmethod
    def _still_there(engine: Engine | None) -> Engine:
        if engine is None or not engine.command:
            raise OperationError("its record does not say which engine ran it. Stop it, then start it again")
        # The simulated engine is part of this program: after an upgrade its path may differ.
        return simulated_engine() if engine.kind is EngineKind.SIMULATED else engine


def _without(record: ServerRecord, inputs: PlanInputs) -> Host | None:
    """The host as if a server had ended (see `without_server`).

    A server that is ready holds memory on its GPUs, chosen or the first visible ones: at most its share, unless the
    size of its KV cache is set. One that starts or sleeps may hold none.
    """
    details, host = unpack(record.current.spec.details), inputs.host
    if host is None or details.simulated or record.state not in (State.READY, State.UNRESPONSIVE):
        return without_server(host, record.name)
    devices = {**inputs.environment.variables, **details.environment}.get(VISIBLE)
    visible = visible_gpus(host, devices)[: local_ranks(details.flags)]
    gpus = [gpu for gpu in host.gpus if gpu.index in details.gpus] or visible
    release = details.engine.release if details.engine is not None else None
    share = math.inf if {BLOCKS, BYTES} & details.flags.keys() else accepted_utilization(details.flags, release)
    return without_server(host, record.name, {gpu.index: needed_gib(gpu, share) or math.inf for gpu in gpus})


def _own_preset(details: Details, problem: str, way: str = "") -> Preset:
    """A server's launch as a preset.

    Raises:
        OperationError: its record lacks data.
    """
    try:
        return details.as_preset()
    except ValueError as error:
        raise OperationError(f"{problem}: {error}{way}") from error


def _release(version: str) -> Engine:
    """A placeholder for a vLLM release that need not be installed.

    Raises:
        UsageError: it is not a version.
    """
    if parse_release(version) is None:
        raise UsageError(f"--vllm-version {version[:40]}: expected a release such as 0.33.0")
    return Engine(EngineKind.VLLM, ("vllm",), version, "cuda", "")


def _refuse_needless_unset(
    server: str, running: Flags, changes: Changes, plan: Callable[[Changes], LaunchPlan]
) -> None:
    """Refuse to unset a flag that is neither set now nor would be after the other changes: it is probably misspelled.

    Raises:
        UsageError: there is such a flag.
    """
    for name in changes.unset:
        if (refusal := not_set(server, name, running)) and not_set(server, name, plan(Changes(changes.set)).plan.flags):
            raise UsageError(refusal)


def _free(host: str, taken: Collection[int], prepared: Collection[int] = ()) -> int:
    # Servers that are starting, of any user, have not bound their ports yet.
    return free_port(host, FIRST_PORT, {*taken, *announced_ports(prepared)})


def _located(model: str) -> str:
    """A folder as an absolute path, since the server has another working directory; a hub id unchanged."""
    path = Path(model).expanduser()
    return str(path.resolve()) if os.path.isdir(path) else model  # noqa: PTH112 - False for a name too long too

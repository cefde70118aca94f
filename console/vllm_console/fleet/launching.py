"""From what a person asks for to what a keeper is told: engine, model, name and port chosen, secrets kept apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from secrets import token_hex

from vllm_console.fleet.api import FleetError, NotFoundError, RefusedError, UsageError
from vllm_console.fleet.details import Details, pack
from vllm_console.fleet.gpus import GpuSource
from vllm_console.fleet.knowing import Knowing
from vllm_console.fleet.model import Changes, LaunchRequest, Preset, Workload
from vllm_console.fleet.placing import VISIBLE, Place, Wanted, find_place, find_place_again, kept_slice
from vllm_console.fleet.planning import Ask, Resolved, resolve, suggestions, without_server
from vllm_console.fleet.watched import HISTORY
from vllm_console.telemetry.gpu_looks import GPU_LOOKS
from vllm_console.telemetry.ledger_file import FILE_NAME as LEDGER
from vllm_console.telemetry.run_windows import WINDOW_SECONDS as RUN_WINDOW_SECONDS
from vllm_launchers.addresses import TLS_FLAGS, base_url
from vllm_launchers.keeper.records import LaunchSpec, RestartMode, RestartPolicy
from vllm_launchers.machine.engines import EngineError, engine_at, engine_problems, find_engines, simulated_engine
from vllm_launchers.machine.flags.releases import parse_release
from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.ports import PortError, check_port, free_port, host_problem
from vllm_launchers.machine.processes import announced_ports
from vllm_launchers.machine.reports import ReportBook
from vllm_launchers.plan.budget.report import budget_figures
from vllm_launchers.plan.checks.engine import engine_missing
from vllm_launchers.plan.choices.model import Choice
from vllm_launchers.plan.findings import Finding, Level
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Engine, EngineKind, Plan
from vllm_launchers.plan.secrets import inherited_secrets, split_secrets
from vllm_launchers.presets.load import PresetError, find_preset, read_presets

LOOPBACK = "127.0.0.1"
FIRST_PORT = 8000


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan with what the keeper needs besides: the preset it came from, and the values of its secrets."""

    plan: Plan
    preset: Preset
    secrets: Mapping[str, str]
    restart: RestartPolicy
    gpu_kind: str = ""
    gpus_chosen: bool = False
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Its memory as estimated, to be set beside what the engine will report."""

    @classmethod
    def of(cls, found: Resolved, preset: Preset, secrets: Mapping[str, str], restart: RestartPolicy) -> Launch:
        """A launch that has been worked out."""
        predicted = budget_figures(found.estimated) if found.estimated is not None else {}
        return cls(found.plan, preset, secrets, restart, found.gpu_kind, found.chosen, predicted)

    def spec(self, folder: Path, state: Path) -> LaunchSpec:
        """What the keeper runs: the plan's command, and the recorder beside it."""
        plan, tls = self.plan, _tls(self.plan)
        url = base_url(plan.host, plan.port, tls=tls)
        recorder = (
            *(sys.executable, "-m", "vllm_console.telemetry.recorder", "--url", url),
            *("--history", str(folder / HISTORY), "--generation", "{generation}"),
            *("--pid", "{pid}", "--start-time", "{start_time}", "--state-root", str(state)),
            *("--ledger", str(state / LEDGER), "--run", token_hex(8), "--window", f"{RUN_WINDOW_SECONDS:g}"),
            *(("--gpu-looks", str(state / GPU_LOOKS)) if plan.gpus else ()),
        )
        return LaunchSpec(
            argv=plan.argv,
            host=plan.host,
            port=plan.port,
            # Without it, tracebacks and prints wait in a buffer when the log is a pipe.
            environment={"PYTHONUNBUFFERED": "1", **plan.environment},
            secret_names=plan.secrets,
            cwd=str(Path.home()) if Path.home().is_dir() else "/",
            restart=_wise(self.restart),
            drain_seconds=_drain(plan),
            companion=recorder,
            tls=tls,
            details=pack(
                Details.of(
                    plan,
                    self.preset,
                    gpu_kind=self.gpu_kind,
                    gpus_chosen=self.gpus_chosen,
                    predicted=self.predicted,
                )
            ),
        )


class Launcher:
    """Resolves launches on this machine. ``vllm_paths`` are installations named in the config."""

    def __init__(
        self,
        config_folder: Path,
        knowing: Knowing,
        book: ReportBook,
        vllm_paths: Sequence[str] = (),
        gpus: GpuSource | None = None,
        shares: Sequence[Share] = (),
    ) -> None:
        self._config_folder = config_folder
        self._gpus, self._shares = gpus, tuple(shares)
        self._vllm_paths = tuple(vllm_paths)
        self.knowing, self._book = knowing, book

    def presets(self) -> tuple[dict[str, Preset], list[PresetError]]:
        """All usable presets by name, and what is wrong with the other files."""
        return read_presets(self._config_folder / "presets")

    def engines(self) -> list[Engine]:
        """Every engine found here, real ones first."""
        return [*find_engines(self._vllm_paths), simulated_engine()]

    def engine(self, kind: str, path: str | None) -> Engine:
        """The engine to launch.

        Raises:
            FleetError: ``path`` is no vLLM, or no vLLM was found.
            UsageError: a path was given for the simulated engine.
        """
        if kind == EngineKind.SIMULATED:
            if path:
                raise UsageError("--vllm names a real vLLM, --engine simulated asks for none: leave one of them out")
            return simulated_engine()
        try:
            if path:
                return engine_at(path)
            found = find_engines(self._vllm_paths)
        except EngineError as error:
            raise FleetError(str(error)) from error
        if not found:
            if refused := engine_problems(self._vllm_paths):
                raise FleetError(". ".join(refused))
            raise FleetError(
                "no vLLM was found on PATH. Install it (pip install 'vllm-console[vllm]'), name one with --vllm PATH, "
                "or try the simulated engine with --engine simulated"
            )
        return found[0]

    def preset(self, name: str) -> Preset:
        """The preset of that name.

        Raises:
            NotFoundError: there is none, or its file is wrong.
        """
        presets, problems = self.presets()
        try:
            return find_preset(name, presets, problems)
        except PresetError as error:
            raise NotFoundError(str(error)) from error

    @staticmethod
    def claim(host: str, port: int, taken: Collection[int]) -> None:
        """See that a port can be had. vLLM up to 0.24 may share a port with another silently, so it is not asked.

        Raises:
            UsageError: it is no port.
            FleetError: it belongs to another server, or to some other process.
        """
        if not 1 <= port <= 65535:
            raise UsageError(f"--port {port}: a port lies between 1 and 65535")
        if port in taken:
            raise FleetError(
                f"port {port} belongs to another server of yours, see 'vllm-console list'; leave --port out"
            )
        if use := check_port(host, port):
            raise FleetError(f"port {port} is taken {use}; choose another, or leave --port out to get a free one")

    def port(self, host: str, wanted: int, taken: Collection[int]) -> int:
        """``wanted`` if it can be had, else the next free one.

        Raises:
            FleetError: there is none.
        """
        try:
            self.claim(host, wanted, taken)
        except FleetError:
            return _free(host, taken)
        return wanted

    def launch(self, request: LaunchRequest, taken: Collection[int], starting: Sequence[str] = ()) -> Launch:
        """Resolve a request; ``taken`` are ports that other servers of ours hold or will hold, ``starting`` the names
        of those that are on their way up.

        Raises:
            FleetError: there is no such preset or host, no port is free, no GPUs can be given to it.
            UsageError: a flag or a choice makes no sense as written.
        """
        preset = self.preset(request.preset)
        host = request.host or LOOPBACK
        if problem := host_problem(host):
            raise UsageError(problem)
        found: list[Finding] = []
        engine = self._engine(request, found)
        if self._gpus is not None and self._gpus.recorded and engine.kind is EngineKind.VLLM:
            text = "its GPUs are those of a recorded host, not of this machine: it can be planned, not started, here"
            found.append(Finding("recorded_host", Level.ADVICE, text))
        port = request.port if request.port is not None else _free(host, taken)
        if not 1 <= port <= 65535:
            raise UsageError(f"--port {port}: a port lies between 1 and 65535")
        if port in taken:
            text = f"port {port} belongs to another server of yours, see 'vllm-console list'; leave --port out"
            found.append(Finding("port_taken", Level.ERROR, text))
        look_at = request.port if request.port is not None and port not in taken else None
        plain, given = split_secrets(request.environment)
        values = {**inherited_secrets(os.environ), **given}
        ask = Ask(
            preset,
            engine,
            request.changes,
            model=_located(request.model) if request.model else preset.model,
            host=host,
            port=port,
            environment=plain,
            gpus=request.gpus,
            secrets=tuple(sorted(values)),
            inherited=os.environ,
            workload=request.workload,
            find=partial(self._find_place, place=request.place, gpus=request.gpus),
            found=tuple(found),
        )
        knowledge = self.knowing.gather(ask, values, look_at, starting, place=request.place, from_hub=request.from_hub)
        resolved = resolve(ask, knowledge, self._book)
        return Launch.of(resolved, preset, values, RestartPolicy(RestartMode(request.restart)))

    def relaunch(
        self, name: str, details: Details, spec: LaunchSpec, changes: Changes, starting: Sequence[str]
    ) -> Launch:
        """The same server with a difference of flags: same model, engine, address and GPUs."""
        try:
            preset = details.as_preset()
        except ValueError as error:
            raise FleetError(f"it cannot be restarted: {error}. Stop it and start it anew") from error
        return self._again(name, preset, details, spec, changes, details.environment, starting, sources=details.sources)

    def suggest(self, name: str, details: Details, spec: LaunchSpec, workload: Workload) -> tuple[Choice, ...]:
        """What traffic asks to change of a server's flags: same model, engine, address and GPUs."""
        try:
            preset = details.as_preset()
        except ValueError as error:
            raise FleetError(f"its record cannot be read: {error}") from error
        ask, values = self._asked_again(preset, details, spec, Changes(), details.environment)
        return suggestions(replace(ask, workload=workload), self._know_again(name, ask, values, ()))

    def handover(self, name: str, details: Details, spec: LaunchSpec, preset: str, starting: Sequence[str]) -> Launch:
        """Another preset in the place of a server: its engine, address and GPUs."""
        environment = kept_slice(details.environment)
        return self._again(name, self.preset(preset), details, spec, Changes(), environment, starting)

    def _again(
        self,
        name: str,
        preset: Preset,
        details: Details,
        spec: LaunchSpec,
        changes: Changes,
        environment: Mapping[str, str],
        starting: Sequence[str],
        sources: Mapping[str, str] | None = None,
    ) -> Launch:
        ask, values = self._asked_again(preset, details, spec, changes, environment, sources)
        knowledge = self._know_again(name, ask, values, starting)
        return Launch.of(resolve(ask, knowledge, self._book), preset, values, spec.restart)

    def _asked_again(
        self,
        preset: Preset,
        details: Details,
        spec: LaunchSpec,
        changes: Changes,
        environment: Mapping[str, str],
        sources: Mapping[str, str] | None = None,
    ) -> tuple[Ask, Mapping[str, str]]:
        """A launch in the place of a server, and the values of its secrets."""
        plain, given = split_secrets(environment)
        values = {**inherited_secrets(os.environ), **given}
        if details.gpus and not kept_slice(plain):
            plain.pop(VISIBLE, None)  # follows from its GPUs, which may change with their number
        ask = Ask(
            preset,
            self._still_there(details.engine),
            changes,
            model=preset.model,
            host=spec.host,
            port=spec.port,
            environment=plain,
            gpus=details.gpus,
            secrets=tuple(sorted({*values, *spec.secret_names})),
            inherited=os.environ,
            sources=sources,
            find=partial(self._find_place_again, gpus=details.gpus, chosen=details.gpus_chosen),
        )
        return ask, values

    def _know_again(self, name: str, ask: Ask, secrets: Mapping[str, str], starting: Sequence[str]) -> Knowledge:
        """What that launch is checked against: what the server holds now is free then."""
        others = tuple(other for other in starting if other != name)
        knowledge = self.knowing.gather(ask, secrets, None, others)
        return replace(knowledge, host=without_server(knowledge.host, name))

    def _engine(self, request: LaunchRequest, found: list[Finding]) -> Engine:
        """The engine to launch, or one that stands for a vLLM that is not installed here."""
        if request.vllm_version is not None:
            if request.vllm or request.engine == EngineKind.SIMULATED:
                raise UsageError("--vllm-version names a release that need not be here: leave --vllm and --engine out")
            return _release(request.vllm_version)
        try:
            return self.engine(request.engine, request.vllm)
        except UsageError:
            raise
        except FleetError as error:
            found.append(engine_missing(str(error)))
            return Engine(EngineKind.VLLM, (request.vllm or "vllm",), None, None, "")

    def _find_place(self, plan: Plan, host: Host | None, *, place: str, gpus: tuple[int, ...]) -> Place:
        return find_place(Wanted(plan.flags, plan.engine), host, place, gpus, self._shares)

    def _find_place_again(self, plan: Plan, host: Host | None, *, gpus: tuple[int, ...], chosen: bool) -> Place:
        return find_place_again(Wanted(plan.flags, plan.engine), host, gpus, chosen=chosen, shares=self._shares)

    def refuse_elsewhere(self, plan: Plan) -> None:
        """A real server is not started on the GPUs of a recorded host.

        Raises:
            RefusedError: it would be.
        """
        if self._gpus is not None and self._gpus.recorded and plan.gpus and plan.engine.kind is EngineKind.VLLM:
            raise RefusedError(
                "its GPUs are those of a recorded host: leave --host out to start it here, or choose no GPUs"
            )

    @staticmethod
    def _still_there(engine: Engine | None) -> Engine:
        if engine is None or not engine.command:
            raise FleetError("its record does not say which engine ran it. Stop it and start it anew")
        # The simulated engine is part of this program: after an upgrade its path may be another one.
        return simulated_engine() if engine.kind is EngineKind.SIMULATED else engine


def _release(version: str) -> Engine:
    """An engine that stands for a release of vLLM, which need not be installed.

    Raises:
        UsageError: it is no version.
    """
    if parse_release(version) is None:
        raise UsageError(f"--vllm-version {version[:40]}: expected a release such as 0.33.0")
    return Engine(EngineKind.VLLM, ("vllm",), version, "cuda", "")


def _free(host: str, taken: Collection[int]) -> int:
    try:
        # A server on its way up has not bound its port yet, and may be anybody's.
        return free_port(host, FIRST_PORT, {*taken, *announced_ports()})
    except PortError as error:
        raise FleetError(str(error)) from error


def _located(model: str) -> str:
    """A folder as its whole path, since the server runs elsewhere; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _tls(plan: Plan) -> bool:
    """Whether the server will speak TLS."""
    return any(plan.flags.get(name) for name in TLS_FLAGS)


def _wise(policy: RestartPolicy) -> RestartPolicy:
    """The policy with what shows that another start would fail the same way."""
    if policy.mode is RestartMode.NEVER:
        return policy
    from vllm_console.diagnosis.hopeless import HOPELESS

    return replace(policy, hopeless=HOPELESS)


def _drain(plan: Plan) -> float:
    value = plan.flags.get("shutdown-timeout", 0)
    try:
        return float(value)
    except ValueError:
        return 0.0

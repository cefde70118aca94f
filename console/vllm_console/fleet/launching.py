"""From what a person asks for to what a keeper is told: engine, model, name and port chosen, secrets kept apart."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_console.fleet.api import FleetError, NotFoundError, RefusedError, UsageError
from vllm_console.fleet.details import Details, pack
from vllm_console.fleet.gpus import GpuSource
from vllm_console.fleet.model import Changes, LaunchRequest, Preset
from vllm_console.fleet.placing import AUTO, Place, Wanted, find_place, kept_slice
from vllm_console.fleet.watched import HISTORY
from vllm_launchers.addresses import base_url
from vllm_launchers.keeper.records import LaunchSpec, RestartMode, RestartPolicy
from vllm_launchers.machine.engines import EngineError, engine_at, find_engines, simulated_engine
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.models import model_folder_problem
from vllm_launchers.machine.ports import PortError, check_port, free_port, host_problem
from vllm_launchers.plan.build import make_plan
from vllm_launchers.plan.errors import PlanError
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

    def spec(self, folder: Path, state: Path) -> LaunchSpec:
        """What the keeper runs: the plan's command, and the recorder beside it."""
        plan = self.plan
        recorder = (
            *(sys.executable, "-m", "vllm_console.telemetry.recorder", "--url", base_url(plan.host, plan.port)),
            *("--history", str(folder / HISTORY), "--generation", "{generation}"),
            *("--pid", "{pid}", "--start-time", "{start_time}", "--state-root", str(state)),
        )
        return LaunchSpec(
            argv=plan.argv,
            host=plan.host,
            port=plan.port,
            # Without it, tracebacks and prints wait in a buffer when the log is a pipe.
            environment={"PYTHONUNBUFFERED": "1", **plan.environment},
            secret_names=plan.secrets,
            cwd=str(Path.home()) if Path.home().is_dir() else "/",
            restart=self.restart,
            drain_seconds=_drain(plan),
            companion=recorder,
            details=pack(Details.of(plan, self.preset)),
        )


class Launcher:
    """Resolves launches on this machine. ``vllm_paths`` are installations named in the config."""

    def __init__(
        self,
        config_folder: Path,
        vllm_paths: Sequence[str] = (),
        gpus: GpuSource | None = None,
        shares: Sequence[Share] = (),
    ) -> None:
        self._config_folder = config_folder
        self._gpus, self._shares = gpus, tuple(shares)
        self._vllm_paths = tuple(vllm_paths)

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

    def launch(self, request: LaunchRequest, taken: Collection[int]) -> Launch:
        """Resolve a request; ``taken`` are ports that other servers of ours hold or will hold.

        Raises:
            FleetError: preset, engine, model, port or a flag cannot be used.
        """
        preset = self.preset(request.preset)
        host = request.host or LOOPBACK
        if problem := host_problem(host):
            raise UsageError(problem)
        port = request.port if request.port is not None else _free(host, taken)
        if request.port is not None:
            self.claim(host, port, taken)
        return self._resolve(
            preset,
            self.engine(request.engine, request.vllm),
            request.changes,
            model=_located(request.model) if request.model else preset.model,
            host=host,
            port=port,
            environment=request.environment,
            gpus=request.gpus,
            restart=RestartPolicy(RestartMode(request.restart)),
            place=request.place,
        )

    def relaunch(self, details: Details, spec: LaunchSpec, changes: Changes) -> Launch:
        """The same server with a difference of flags: same model, engine, address and GPUs."""
        try:
            preset = details.as_preset()
        except ValueError as error:
            raise FleetError(f"it cannot be restarted: {error}. Stop it and start it anew") from error
        return self._resolve(
            preset,
            self._still_there(details.engine),
            changes,
            model=details.model,
            host=spec.host,
            port=spec.port,
            environment=details.environment,
            gpus=details.gpus,
            restart=spec.restart,
            secrets=spec.secret_names,
        )

    def handover(self, details: Details, spec: LaunchSpec, preset: str) -> Launch:
        """Another preset in the place of a server: its engine, address and GPUs."""
        chosen = self.preset(preset)
        return self._resolve(
            chosen,
            self._still_there(details.engine),
            Changes(),
            model=chosen.model,
            host=spec.host,
            port=spec.port,
            environment=kept_slice(details.environment),
            gpus=details.gpus,
            restart=spec.restart,
            secrets=spec.secret_names,
        )

    def _resolve(
        self,
        preset: Preset,
        engine: Engine,
        changes: Changes,
        *,
        model: str,
        host: str,
        port: int,
        environment: Mapping[str, str],
        gpus: tuple[int, ...],
        restart: RestartPolicy,
        secrets: Sequence[str] = (),
        place: str | None = None,
    ) -> Launch:
        """``place`` is given for a launch that is still to get its GPUs; otherwise it keeps ``gpus``."""
        if engine.kind is EngineKind.VLLM and (problem := model_folder_problem(model)):
            raise FleetError(problem)
        plain, given = split_secrets(environment)
        values = {**inherited_secrets(os.environ), **given}

        def planned(environment: Mapping[str, str], gpus: tuple[int, ...]) -> Plan:
            try:
                return make_plan(
                    preset,
                    engine,
                    changes,
                    model=model,
                    host=host,
                    port=port,
                    environment=environment,
                    gpus=gpus,
                    secrets=tuple(sorted({*values, *secrets})),
                    inherited=os.environ,
                )
            except PlanError as error:
                raise UsageError(str(error)) from error

        if place is not None:
            found = self._find_place(planned(plain, ()), place, gpus)
            plan = _placed(planned({**plain, **found.environment}, () if found.environment else found.gpus), found)
        elif kept_slice(plain):
            plan = replace(planned(plain, ()), gpus=gpus)
        else:
            plan = planned(plain, gpus)
        return Launch(plan, preset, values, restart)

    def _find_place(self, plan: Plan, place: str, gpus: tuple[int, ...]) -> Place:
        """The GPUs for a launch. They are looked at where that costs nothing, or where it was asked for."""
        source = self._gpus
        limited = any(share.gpu in gpus for share in self._shares)
        host = source.read() if source is not None and (place == AUTO or limited or source.watching) else None
        found = find_place(Wanted(plan.flags, plan.engine), host, place, gpus, self._shares)
        recorded = source is not None and source.recorded
        if recorded and found.gpus and plan.engine.kind is EngineKind.VLLM:
            warning = "these are the GPUs of a recorded host, not of this machine: it can be planned, not started, here"
            found = replace(found, warnings=(warning, *found.warnings))
        return found

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


def _placed(plan: Plan, place: Place) -> Plan:
    told = "; ".join(filter(None, (place.reason, *place.warnings)))
    return replace(
        plan,
        gpus=place.gpus,
        reasons={**plan.reasons, "gpus": told} if told and place.gpus else plan.reasons,
        warnings=(*place.warnings, *plan.warnings),
        placement=place.reason,
        sets=place.sets,
    )


def _free(host: str, taken: Collection[int]) -> int:
    try:
        return free_port(host, FIRST_PORT, taken)
    except PortError as error:
        raise FleetError(str(error)) from error


def _located(model: str) -> str:
    """A folder as its whole path, since the server runs elsewhere; a hub id as it is."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model


def _drain(plan: Plan) -> float:
    value = plan.flags.get("shutdown-timeout", 0)
    try:
        return float(value)
    except ValueError:
        return 0.0

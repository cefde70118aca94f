"""Reads and caches the inputs of plans: the engine's flags, the model's facts, GPUs, the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from vllm_launchers.host.environment import HostEnvironment, read_environment, without_secrets
from vllm_launchers.host.gpu.host import Host
from vllm_launchers.host.gpu.sharing import GpuShare
from vllm_launchers.host.hub_folders import cache_folder as hub_cache
from vllm_launchers.host.hub_folders import model_folder
from vllm_launchers.launch.placement import AUTO
from vllm_launchers.plan.budget.memory_flags import draft_model
from vllm_launchers.plan.checks.request import on_ray
from vllm_launchers.plan.choices.choice import overlay
from vllm_launchers.plan.files import named_files
from vllm_launchers.plan.inputs import PlanInputs
from vllm_launchers.prepared.command import prepared_command
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.cache import FlagCache
from vllm_launchers.vllm.flags.changes import Flags
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError, FlagTable
from vllm_launchers.vllm.flags.releases import UnknownReleaseError, release_table
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError
from vllm_launchers.vllm.modelfacts.read import model_facts
from vllm_launchers.vllm.ray_cluster import RayCluster, RayClusters

if TYPE_CHECKING:
    from vllm_launchers.launch.launch_plan import ResolvedRequest

LEARN = (
    "import sys; from vllm_launchers.vllm.engines import engine_at; "
    "from vllm_launchers.vllm.flags.cache import FlagCache; "
    "FlagCache().learn(engine_at(sys.argv[1]))"
)
"""Runs in a separate process: reading vLLM's source would block the interpreter, and thus the screen."""

LEARN_SECONDS = 60.0
PLACES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME", "VLLM_USE_MODELSCOPE")

Stamp = tuple[int | None, ...]


class Model(msgspec.Struct, frozen=True):
    """A model's facts, or why there is no such model."""

    facts: ModelFacts | None = None
    problem: str = ""


class GpuSource(Protocol):
    """The source of GPU data."""

    @property
    def recorded(self) -> bool:
        """Whether they are a recorded host's, instead of this machine's."""

    @property
    def watching(self) -> bool:
        """Whether GPUs are known without reading them now."""

    @property
    def has_driver(self) -> bool:
        """Whether GPUs can be read at all; costs next to nothing."""

    def read(self) -> Host:
        """The host now; may take a second."""


class PlanInputsReader:
    """Reads the inputs of plans and caches them. ``patient`` waits the fraction of a second that learning an engine's
    flags takes; otherwise that continues in the background, and the release's table is used meanwhile.
    """

    def __init__(self, gpus: GpuSource | None = None, shares: Sequence[GpuShare] = (), *, patient: bool = True) -> None:
        self._gpus, self._shares = gpus, tuple(shares)
        self._cache = FlagCache()
        self._patient = patient
        self._ray = RayClusters()
        self._learning: set[str] = set()
        self._lock = threading.Lock()
        self._models: dict[tuple[str, ...], tuple[Stamp, Model]] = {}
        self._from_hub: dict[str, Model] = {}

    def gather(
        self,
        request: ResolvedRequest,
        port: int | None,
        starting: Sequence[str],
        *,
        place: str = "",
        from_hub: bool = False,
    ) -> PlanInputs:
        """All inputs of a launch's checks.

        ``port`` is given if it must be free now. ``place`` is as in `LaunchRequest`: if GPUs are requested they are
        read, whatever that costs.
        """
        environment = {**os.environ, **request.environment}
        flags = _flags(request)
        real = request.engine.kind is EngineKind.VLLM
        token = request.secrets.get("HF_TOKEN") or request.secrets.get("HUGGING_FACE_HUB_TOKEN")
        table = self.flags(request.engine)
        model = self.model(request.model, flags, environment, from_hub=from_hub, token=token)
        if real and self._gpus is not None and self._gpus.recorded:
            about = HostEnvironment(port_holder="", variables=without_secrets(environment))  # not from this machine
        else:
            folder = _text(flags, "download-dir")
            here = table is not None and table.source == "installation"  # a wrapper may start it in a container
            about = read_environment(
                request.host,
                port,
                starting=starting,
                environment=environment,
                download_dir=folder,
                files=[path for _, path in named_files(flags, request.model)] if here else (),
            )
        return PlanInputs(
            facts=model.facts,
            flags=table,
            host=self._host(request, place),
            shares=self._shares,
            environment=about,
            draft=self._draft(flags, environment, from_hub=from_hub, token=token),
            model_problem=model.problem if real else "",
            ray=self._cluster(request.engine, flags, environment),
        )

    def _cluster(self, engine: Engine, flags: Flags, environment: Mapping[str, str]) -> RayCluster | None:
        """The Ray cluster of a vLLM on this machine, if Ray runs its workers and its Python is known."""
        if not on_ray(engine, flags) or not engine.path or (self._gpus is not None and self._gpus.recorded):
            return None
        words = prepared_command((*engine.command, "serve"), environment)
        return self._ray.read(words[0], environment) if words else None

    def _host(self, request: ResolvedRequest, place: str) -> Host | None:
        """The machine's GPUs. They are read if that is cheap, or if the launch needs them."""
        source = self._gpus
        if source is None:
            return None
        limited = any(share.gpu in request.gpus for share in self._shares)
        real = request.engine.kind is EngineKind.VLLM and request.engine.build != "cpu"
        if not (place == AUTO or limited or source.watching or (real and source.has_driver)):
            return None
        host = source.read()
        return host if host.gpus or place == AUTO else None

    def _draft(
        self, flags: Flags, environment: Mapping[str, str], *, from_hub: bool, token: str | None
    ) -> ModelFacts | None:
        """The facts of the draft model named by the flags, if any."""
        named = draft_model(flags)
        alone = {name: value for name, value in flags.items() if name == "download-dir"}
        return self.model(named, alone, environment, from_hub=from_hub, token=token).facts if named else None

    # -- flags -----------------------------------------------------------------------------------------------------

    def flags(self, engine: Engine) -> FlagTable | None:
        """Its flags as learned from its files, else those of its release, else None; starts learning if needed."""
        if engine.kind is EngineKind.SIMULATED or not engine.path:
            return _of_release(engine)
        if (known := self._cache.get(engine)) is not None:
            return known
        if self._patient:
            try:
                return self._cache.learn(engine)
            except FlagsUnknownError:
                return _of_release(engine)
        self._learn_soon(engine)
        return _of_release(engine)

    def _learn_soon(self, engine: Engine) -> None:
        """Once per installation while this console runs: a failed attempt is not repeated."""
        with self._lock:
            if engine.path in self._learning:
                return
            self._learning.add(engine.path)
        threading.Thread(target=self._run, args=(engine,), name="flags", daemon=True).start()

    def _run(self, engine: Engine) -> None:
        try:
            subprocess.run(
                [sys.executable, "-c", LEARN, engine.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=LEARN_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return  # the release's table is used instead

    # -- models ----------------------------------------------------------------------------------------------------

    def model(
        self, model: str, flags: Flags, environment: Mapping[str, str], *, from_hub: bool = False, token: str | None
    ) -> Model:
        """A model's facts; with ``from_hub`` the hub is queried if this machine does not have it."""
        revision, folder = (_text(flags, name) for name in ("revision", "download-dir"))
        key = (model, revision or "", folder or "", *(environment.get(name, "") for name in PLACES))
        stamp = _stamp(model, folder, environment)
        known = self._models.get(key)
        if known is None or known[0] != stamp:
            known = self._models[key] = (stamp, _read(model, revision, folder, environment))
        found = known[1]
        if not from_hub or found.facts is None or found.facts.source in ("folder", "cache"):
            return found
        if model not in self._from_hub:
            from vllm_launchers.vllm.modelfacts.hub import facts_from_hub  # imports an HTTP client

            try:
                self._from_hub[model] = Model(facts_from_hub(model, token, revision=revision, environ=environment))
            except ModelFactsError as error:
                return Model(found.facts, str(error))
        return self._from_hub[model]


def _flags(request: ResolvedRequest) -> Flags:
    """The flags as far as they are known before planning.

    Raises:
        UsageError: a change names an invalid flag, a secret, or a setting chosen elsewhere.
    """
    chosen = overlay(request.preset.flags, request.changes)
    return {name: choice.value for name, choice in chosen.items() if choice.value is not None}


def _of_release(engine: Engine) -> FlagTable | None:
    if engine.version is None:
        return None
    try:
        return release_table(engine.version)
    except UnknownReleaseError:
        return None


def _read(model: str, revision: str | None, folder: str | None, environment: Mapping[str, str]) -> Model:
    try:
        return Model(model_facts(model, revision=revision, download_dir=folder, environ=environment))
    except ModelFactsError as error:
        return Model(None, str(error))


def _stamp(model: str, folder: str | None, environment: Mapping[str, str]) -> Stamp:
    """Differs when files of a model were added or changed."""
    if Path(model).is_absolute():
        return _times([Path(model), Path(model) / "config.json"])
    places = [hub_cache(environment), *([Path(folder)] if folder else [])]
    here = [model_folder(place, model) for place in places]
    return _times([path / part for path in here for part in ("refs/main", "snapshots", "blobs")])


def _times(paths: Sequence[Path]) -> Stamp:
    def time(path: Path) -> int | None:
        try:
            return path.stat().st_mtime_ns
        except (OSError, ValueError):
            return None

    return tuple(map(time, paths))


def _text(flags: Flags, name: str) -> str | None:
    value = flags.get(name)
    return str(value) if value is not None and not isinstance(value, bool) else None

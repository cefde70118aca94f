"""Reads and caches what a plan depends on: the engine's flags, model facts, GPUs, and the machine."""

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
from vllm_launchers.launch.place import AUTO
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
from vllm_launchers.vllm.flags.releases import known_or_assumed
from vllm_launchers.vllm.modelfacts.facts import ModelFacts, ModelFactsError
from vllm_launchers.vllm.modelfacts.read import model_facts
from vllm_launchers.vllm.ray_cluster import RayCluster, RayClusters

if TYPE_CHECKING:
    from vllm_launchers.launch.resolved_request import ResolvedRequest

LEARN = (
    "import sys; from vllm_launchers.vllm.engines import engine_at; "
    "from vllm_launchers.vllm.flags.cache import FlagCache; "
    "FlagCache().learn(engine_at(sys.argv[1]))"
)
"""Run in a separate process: parsing vLLM's source would hold the GIL and freeze the screen."""

LEARN_SECONDS = 60.0
PLACES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME", "VLLM_USE_MODELSCOPE")

Stamp = tuple[int | None, ...]


class Model(msgspec.Struct, frozen=True):
    """Facts about a model, or why there is no such model."""

    facts: ModelFacts | None = None
    problem: str = ""


class GpuSource(Protocol):
    """Where GPU data comes from."""

    @property
    def recorded_host(self) -> str | None:
        """Name of the recorded host whose GPUs these are; None for this machine's."""

    @property
    def watching(self) -> bool:
        """Whether a background reader already knows the GPUs."""

    @property
    def has_driver(self) -> bool:
        """Whether there is a GPU driver to read from; cheap."""

    def read(self) -> Host:
        """Read the host's current state; may take a second."""


class PlanInputsReader:
    """Reads and caches the inputs of plans.

    ``patient`` waits for an engine's flags to be learned from its files (a fraction of a second). Otherwise they are
    learned in the background, and the table of its release is used until then.
    """

    def __init__(self, gpus: GpuSource | None = None, shares: Sequence[GpuShare] = (), *, patient: bool = True) -> None:
        self._gpus, self._shares = gpus, tuple(shares)
        self._cache = FlagCache()
        self._patient = patient
        self._ray = RayClusters()
        self._learning: set[str] = set()
        self._lock = threading.Lock()
        self._models: dict[tuple[str, ...], tuple[Stamp, Model]] = {}
        self._from_hub: dict[tuple[str, ...], Model] = {}

    def gather(
        self,
        request: ResolvedRequest,
        port: int | None,
        starting: Sequence[str],
        *,
        place: str = "",
        from_hub: bool = False,
    ) -> PlanInputs:
        """Collect the inputs of one plan.

        ``port`` is given only if it must be free now. ``place`` is as in `LaunchRequest`: if it requests GPUs, they are
        read even if that is slow.
        """
        environment = {**os.environ, **request.environment}
        flags = _flags(request)
        real = request.engine.kind is EngineKind.VLLM
        token = request.secrets.get("HF_TOKEN") or request.secrets.get("HUGGING_FACE_HUB_TOKEN")
        table = self.flags(request.engine)
        model = self.model(request.model, flags, environment, from_hub=from_hub, token=token)
        if real and self._gpus is not None and self._gpus.recorded_host is not None:
            about = HostEnvironment(port_problem="", variables=without_secrets(environment))  # nothing of this machine
        else:
            folder = _text(flags, "download-dir")
            # Paths are checked only for a vLLM installed here: a wrapper may start it in a container.
            here = table.source == "installation"
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
        """The Ray cluster, if Ray runs the workers of a vLLM on this machine whose Python is known."""
        recorded = self._gpus is not None and self._gpus.recorded_host is not None
        if not on_ray(engine, flags) or not engine.path or recorded:
            return None
        words = prepared_command((*engine.command, "serve"), environment)
        return self._ray.read(words[0], environment) if words else None

    def _host(self, request: ResolvedRequest, place: str) -> Host | None:
        """The GPUs of the host it is planned for, read only if that is cheap or the launch needs them."""
        source = self._gpus
        if source is None or request.recorded_host != source.recorded_host:
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
        """Facts about the draft model that the flags name, if any."""
        named = draft_model(flags)
        alone = {name: value for name, value in flags.items() if name == "download-dir"}
        return self.model(named, alone, environment, from_hub=from_hub, token=token).facts if named else None

    # -- flags -----------------------------------------------------------------------------------------------------

    def flags(self, engine: Engine) -> FlagTable:
        """An engine's flags, learned from its files or of its release, or assumed. Starts learning if needed."""
        if engine.kind is EngineKind.SIMULATED or not engine.path:
            return known_or_assumed(engine.version)
        if (known := self._cache.get(engine)) is not None:
            return known
        if self._patient:
            try:
                return self._cache.learn(engine)
            except FlagsUnknownError:
                return known_or_assumed(engine.version)
        self._learn_soon(engine)
        return known_or_assumed(engine.version)

    def _learn_soon(self, engine: Engine) -> None:
        """Learn in the background, once per installation and process: a failed attempt is not repeated."""
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
        """Facts about a model. With ``from_hub``, the hub is queried if the model is not on this machine."""
        revision, folder = (_text(flags, name) for name in ("revision", "download-dir"))
        key = (model, revision or "", folder or "", *(environment.get(name, "") for name in PLACES))
        stamp = _stamp(model, folder, environment)
        known = self._models.get(key)
        if known is None or known[0] != stamp:
            known = self._models[key] = (stamp, _read(model, revision, folder, environment))
        found = known[1]
        if not from_hub or found.facts is None or found.facts.source in ("folder", "cache"):
            return found
        asked = (*key, token or "")  # a gated model's files are known only with a token
        if asked not in self._from_hub:
            from vllm_launchers.vllm.modelfacts.hub import facts_from_hub  # imports an HTTP client

            try:
                self._from_hub[asked] = Model(facts_from_hub(model, token, revision=revision, environ=environment))
            except ModelFactsError as error:
                return Model(found.facts, str(error))
        return self._from_hub[asked]


def _flags(request: ResolvedRequest) -> Flags:
    """The flags that are known before planning.

    Raises:
        UsageError: a change names an invalid flag, a secret, or a setting chosen elsewhere.
    """
    chosen = overlay(request.preset.flags, request.changes)
    return {name: choice.value for name, choice in chosen.items() if choice.value is not None}


def _read(model: str, revision: str | None, folder: str | None, environment: Mapping[str, str]) -> Model:
    try:
        return Model(model_facts(model, revision=revision, download_dir=folder, environ=environment))
    except ModelFactsError as error:
        return Model(None, str(error))


def _stamp(model: str, folder: str | None, environment: Mapping[str, str]) -> Stamp:
    """A value that changes when files of a model are added or changed."""
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

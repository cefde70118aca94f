"""Gathers what a plan is checked against: flags, model, GPUs, the machine beside them. Kept while it holds true."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.fleet.gpus import GpuSource
from vllm_console.fleet.placing import AUTO
from vllm_launchers.machine.flags.cache import FlagCache
from vllm_launchers.machine.flags.errors import FlagsUnknownError
from vllm_launchers.machine.flags.model import FlagTable
from vllm_launchers.machine.flags.releases import UnknownReleaseError, release_table
from vllm_launchers.machine.gpu.host import Host
from vllm_launchers.machine.gpu.sharing import Share
from vllm_launchers.machine.model import Surroundings
from vllm_launchers.machine.modelfacts.cache import cache_folder as hub_cache
from vllm_launchers.machine.modelfacts.model import ModelFacts, ModelFactsError
from vllm_launchers.machine.modelfacts.read import model_facts
from vllm_launchers.machine.surroundings import look_around, without_secrets
from vllm_launchers.plan.knowledge import Knowledge
from vllm_launchers.plan.model import Engine, EngineKind, Flags

if TYPE_CHECKING:
    from vllm_console.fleet.planning import Ask

LEARN = (
    "import sys; from vllm_launchers.machine.engines import engine_at; "
    "from vllm_launchers.machine.flags.cache import FlagCache; "
    "FlagCache().learn(engine_at(sys.argv[1]))"
)
"""Run in a process of its own: reading vLLM's source keeps the interpreter busy, and a screen must go on."""

LEARN_SECONDS = 60.0
PLACES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME", "VLLM_USE_MODELSCOPE")

Stamp = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model's facts, or why there is no such model."""

    facts: ModelFacts | None = None
    problem: str = ""


class Knowing:
    """What is known, kept between plans. ``patient`` waits the part of a second in which flags are learned; else
    that goes on in the background, and the release's table stands in for them.
    """

    def __init__(self, gpus: GpuSource | None = None, shares: Sequence[Share] = (), *, patient: bool = True) -> None:
        self._gpus, self._shares = gpus, tuple(shares)
        self._cache = FlagCache()
        self._patient = patient
        self._learning: set[str] = set()
        self._lock = threading.Lock()
        self._models: dict[tuple[str, ...], tuple[Stamp, Model]] = {}
        self._from_hub: dict[str, Model] = {}

    def gather(
        self,
        ask: Ask,
        secrets: Mapping[str, str],
        port: int | None,
        starting: Sequence[str],
        *,
        place: str = "",
        from_hub: bool = False,
    ) -> Knowledge:
        """All that a launch is checked against.

        ``secrets`` are values by name. ``port`` is given where it must be free now. ``place`` is as in
        `LaunchRequest`: GPUs that are asked for are looked at, whatever it costs.
        """
        environment = {**os.environ, **ask.environment}
        flags = {name: setting.value for name, setting in ask.preset.flags.items()} | dict(ask.changes.set)
        real = ask.engine.kind is EngineKind.VLLM
        token = secrets.get("HF_TOKEN") or secrets.get("HUGGING_FACE_HUB_TOKEN")
        model = self.model(ask.model, flags, environment, from_hub=from_hub, token=token)
        if real and self._gpus is not None and self._gpus.recorded:
            around = Surroundings(port_holder="", environment=without_secrets(environment))  # not of this machine
        else:
            folder = _text(flags, "download-dir")
            around = look_around(ask.host, port, starting=starting, environment=environment, download_dir=folder)
        return Knowledge(
            facts=model.facts,
            flags=self.flags(ask.engine),
            host=self._host(ask, place),
            shares=self._shares,
            surroundings=around,
            model_problem=model.problem if real else "",
        )

    def _host(self, ask: Ask, place: str) -> Host | None:
        """The machine's GPUs. They are looked at where that costs nothing, or where the launch needs it."""
        source = self._gpus
        if source is None:
            return None
        limited = any(share.gpu in ask.gpus for share in self._shares)
        real = ask.engine.kind is EngineKind.VLLM and ask.engine.build != "cpu"
        if not (place == AUTO or limited or source.watching or (real and source.has_driver)):
            return None
        host = source.read()
        return host if host.gpus or place == AUTO else None

    # -- flags -----------------------------------------------------------------------------------------------------

    def flags(self, engine: Engine) -> FlagTable | None:
        """Its flags as learned from its files, else those of its release, else None; learns what is not known yet."""
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
        """Once for each installation while this console runs: what cannot be learned is not tried again and again."""
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
            return  # the release's table stands in for it

    # -- models ----------------------------------------------------------------------------------------------------

    def model(
        self, model: str, flags: Flags, environment: Mapping[str, str], *, from_hub: bool = False, token: str | None
    ) -> Model:
        """What is known of a model; with ``from_hub`` the hub is asked where this machine does not have it."""
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
            from vllm_launchers.machine.modelfacts.hub import facts_from_hub  # brings HTTP along

            try:
                self._from_hub[model] = Model(facts_from_hub(model, token, revision=revision, environ=environment))
            except ModelFactsError as error:
                return Model(found.facts, str(error))
        return self._from_hub[model]


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
    """Differs when files of a model came or changed."""
    if Path(model).is_absolute():
        return _times([Path(model), Path(model) / "config.json"])
    places = [hub_cache(environment), *([Path(folder)] if folder else [])]
    here = [place / f"models--{model.replace('/', '--')}" for place in places]
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

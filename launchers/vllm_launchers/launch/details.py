"""What the console stores with a launch, so that later consoles know what the server is and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_launchers.addresses import format_exposure
from vllm_launchers.engine_model.gpu_models import DEFAULT_GPU, find_model
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.plan.attention import fp8_cache_support
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import FlagSetting, Objectives, Preset, Workload
from vllm_launchers.secrets import API_KEY
from vllm_launchers.typed_decoding import convert
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import FlagValue


class Details(msgspec.Struct, frozen=True):
    """The console's part of a launch spec, which the keeper stores and never reads."""

    preset: str = ""
    model: str = ""
    engine: Engine | None = None
    flags: Mapping[str, FlagValue] = msgspec.field(default_factory=dict)
    reasons: Mapping[str, str] = msgspec.field(default_factory=dict)
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Who chose each flag (`Source`), if not the preset."""
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    gpus_chosen: bool = False
    """Whether they were chosen automatically: a restart on another number of GPUs may then choose others."""
    workload: Workload | None = None
    objectives: Objectives | None = None
    recorded_host: str | None = None
    """Name of the recorded host whose GPUs it simulates; None if it simulates none of a recorded host."""
    gpu_kind: str = ""
    """GPU model it runs on; empty if unknown."""
    predicted: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Memory estimate before the start, uncorrected, to compare with the engine's report."""
    warm_up: bool = True
    """Whether the keeper sends a warm-up request before the server is ready."""
    probe_asked: bool | None = None
    """The option that turned the probe on or off; None: as configured."""
    no_probe: str = "its record does not say why"
    """Why it has no probe (a clause); empty if it has one."""
    standby_of: str = ""
    """The server it shares its GPUs with: one of them sleeps while the other serves."""
    beside: str = ""
    """The server next to which a rolling update started this one."""
    mla: bool = False
    """Whether the model is known to use multi-head latent attention."""
    inherited: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Inherited variables that select its attention backend."""

    @property
    def simulated(self) -> bool:
        """Whether the engine is simulated."""
        return self.engine is not None and self.engine.kind is EngineKind.SIMULATED

    @property
    def gpu_name(self) -> str:
        """The GPU it runs on or simulates; empty if unknown."""
        if self.simulated:
            return self.environment.get("SIMULATED_GPU") or DEFAULT_GPU
        return self.gpu_kind

    def gpus_on(self, recorded_host: str | None) -> tuple[int, ...]:
        """Its GPUs if they are those of this recorded host, or of this machine (None).

        A simulated server is on no GPU of this machine.
        """
        here = self.recorded_host == recorded_host and not (self.simulated and recorded_host is None)
        return self.gpus if here else ()

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables it is known to run with."""
        return {**self.inherited, **self.environment}

    @property
    def fp8_cache_problem(self) -> str:
        """Why vLLM cannot keep the KV cache in FP8 on this GPU; empty if it can, or if unknown."""
        model = find_model(self.gpu_name)
        if model is None or self.engine is None or self.engine.build == "cpu":
            return ""
        able = float(model.compute_capability)
        verdict = fp8_cache_support(self.flags, self.variables, self.engine.release, able, mla=self.mla)
        return f"{model.name}: {verdict.why}" if verdict.works is False else ""

    @classmethod
    def of(cls, plan: Plan, preset: Preset) -> Details:
        """The details of a plan that was made from ``preset``."""
        return cls(
            preset=plan.preset,
            model=plan.model,
            engine=plan.engine,
            flags=dict(plan.flags),
            reasons=dict(plan.reasons),
            sources={c.flag: str(c.source) for c in plan.choices if c.source != "preset" and c.flag in plan.flags},
            environment=dict(plan.environment),
            gpus=plan.gpus,
            gpus_chosen=plan.gpus_chosen,
            workload=preset.workload,
            objectives=preset.objectives,
            no_probe=plan.probe.why_not,
        )

    def as_preset(self) -> Preset:
        """The launch as a preset, for a restart: the preset's file may have changed or been deleted.

        Raises:
            ValueError: the record lacks data (it was written by another version).
        """
        if self.workload is None or self.objectives is None or not self.model:
            raise ValueError("its record does not say which model, workload and objectives it was started with")
        flags = {name: FlagSetting(value, self.reasons.get(name, "")) for name, value in self.flags.items()}
        return Preset(
            name=self.preset,
            title=self.preset,
            summary="",
            model=self.model,
            flags=flags,
            workload=self.workload,
            objectives=self.objectives,
        )


def pack(details: Details) -> dict[str, Any]:
    """Convert to plain JSON values."""
    packed: dict[str, Any] = msgspec.to_builtins(details)
    return packed


def unpack(packed: Mapping[str, Any]) -> Details:
    """Read what `pack` wrote. If another version wrote it differently, only preset, model and engine are kept."""
    try:
        return convert(dict(packed), Details)
    except ValueError:  # also a lone surrogate, which JSON can contain and text cannot
        preset, model = (str(packed.get(name) or "") for name in ("preset", "model"))
        engine = packed.get("engine")
        kind = engine.get("kind") if isinstance(engine, dict) else None
        simulated = Engine(EngineKind.SIMULATED, (), None, None, "") if kind == EngineKind.SIMULATED else None
        return Details(preset=preset, model=model, engine=simulated)


def exposed_message(record: ServerRecord) -> str:
    """Warning that others can reach a server; empty unless it is up or will be restarted."""

    spec = record.current.spec
    return format_exposure(spec.host, API_KEY in spec.secret_names) if record.needs_keeper else ""

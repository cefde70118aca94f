"""What the console writes beside a launch, so that any later console knows what the server is and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_launchers.plan.model import Engine, EngineKind, Plan
from vllm_launchers.presets.model import FlagSetting, FlagValue, Objectives, Preset, Workload


@dataclass(frozen=True, slots=True)
class Details:
    """The console's part of a launch spec, which the keeper stores and never reads."""

    preset: str = ""
    model: str = ""
    engine: Engine | None = None
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    """Per flag who chose it (`Source`), where that was not the preset."""
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    gpus_chosen: bool = False
    """Whether these were chosen for it, so that a restart that works on another number of them may take others."""
    workload: Workload | None = None
    objectives: Objectives | None = None
    gpu_kind: str = ""
    """What kind of GPU it runs on, empty where that is not known."""
    predicted: Mapping[str, float] = field(default_factory=dict)
    """Its memory as estimated before the start, uncorrected, to be set beside what the engine reports."""

    @classmethod
    def of(
        cls,
        plan: Plan,
        preset: Preset,
        *,
        gpu_kind: str = "",
        gpus_chosen: bool = False,
        predicted: Mapping[str, float] | None = None,
    ) -> Details:
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
            workload=preset.workload,
            objectives=preset.objectives,
            gpu_kind=gpu_kind,
            gpus_chosen=gpus_chosen,
            predicted=dict(predicted or {}),
        )

    def as_preset(self) -> Preset:
        """The launch as a preset: what a restart starts from, though the preset's file may have changed or gone.

        Raises:
            ValueError: the record says too little (it was written by another version).
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
    """As plain JSON values."""
    packed: dict[str, Any] = msgspec.to_builtins(details)
    return packed


def unpack(packed: Mapping[str, Any]) -> Details:
    """Read back what `pack` wrote; what another version wrote otherwise is left at its default."""
    try:
        return msgspec.convert(dict(packed), Details)
    except ValueError:  # also half of a character, which JSON can hold and no text can
        preset, model = (str(packed.get(name) or "") for name in ("preset", "model"))
        engine = packed.get("engine")
        kind = engine.get("kind") if isinstance(engine, dict) else None
        simulated = Engine(EngineKind.SIMULATED, (), None, None, "") if kind == EngineKind.SIMULATED else None
        return Details(preset=preset, model=model, engine=simulated)

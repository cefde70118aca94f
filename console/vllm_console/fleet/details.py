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
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[int, ...] = ()
    workload: Workload | None = None
    objectives: Objectives | None = None

    @classmethod
    def of(cls, plan: Plan, preset: Preset) -> Details:
        """The details of a plan that was made from ``preset``."""
        return cls(
            preset=plan.preset,
            model=plan.model,
            engine=plan.engine,
            flags=dict(plan.flags),
            reasons=dict(plan.reasons),
            environment=dict(plan.environment),
            gpus=plan.gpus,
            workload=preset.workload,
            objectives=preset.objectives,
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
    except msgspec.ValidationError:
        preset, model = (str(packed.get(name) or "") for name in ("preset", "model"))
        engine = packed.get("engine")
        kind = engine.get("kind") if isinstance(engine, dict) else None
        simulated = Engine(EngineKind.SIMULATED, (), None, None, "") if kind == EngineKind.SIMULATED else None
        return Details(preset=preset, model=model, engine=simulated)

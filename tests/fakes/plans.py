"""Plans of a preset's flags, from which nothing is derived."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vllm_launchers.plan.build import PlanRequest, make_plan
from vllm_launchers.plan.choices.choice import Choice, overlay
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.engines import Engine
from vllm_launchers.vllm.flags.changes import Changes


def plan_with(
    preset: Preset,
    engine: Engine,
    changes: Changes,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    model: str = "",
    environment: Mapping[str, str] | None = None,
    inherited: Mapping[str, str] | None = None,
    gpus: Sequence[int] = (),
    secrets: Collection[str] = (),
    choices: Sequence[Choice] | None = None,
) -> Plan:
    """The plan of a preset with these changes, or with ``choices``; of the preset's model unless given."""
    request = PlanRequest(
        preset,
        engine,
        changes,
        model or preset.model,
        host,
        port,
        environment or {},
        inherited or {},
        more_secrets=tuple(secrets),
    )
    return make_plan(request, tuple(overlay(preset.flags, changes).values()) if choices is None else choices, gpus)

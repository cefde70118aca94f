from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from fakes.plans import plan_with
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, FlagValue

VLLM = "/opt/venv/bin/vllm"


def plan_of(
    flags: Mapping[str, FlagValue] | None = None,
    *,
    version: str | None = "0.33.0",
    build: str | None = "cuda",
    command: tuple[str, ...] = (VLLM,),
    **other: Any,
) -> Plan:
    """A plan of the shipped chatbot preset with more flags."""
    kind = EngineKind.SIMULATED if build == "simulated" else EngineKind.VLLM
    engine = Engine(kind, command, version, build, command[0])
    return plan_with(read_presets(None)[0]["chatbot"], engine, Changes(flags or {}), **other)


@pytest.fixture
def make() -> Callable[..., Plan]:
    """``make({flag: value}, version=…, build=…, command=…, host=…, model=…, environment=…, gpus=…, secrets=…)``."""
    return plan_of

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fakes.nvml_stub import recorded
from fakes.plans import plan_with
from vllm_launchers.plan.model import Plan
from vllm_launchers.presets.load import read_presets
from vllm_launchers.presets.model import Preset
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes

__all__ = ["engine", "plan", "presets", "recorded"]


@pytest.fixture(scope="session")
def presets() -> dict[str, Preset]:
    return read_presets(None)[0]


@pytest.fixture
def engine() -> Callable[..., Engine]:
    def engine(version: str | None = "0.33.0", build: str | None = "cuda") -> Engine:
        kind = EngineKind.SIMULATED if build == "simulated" else EngineKind.VLLM
        return Engine(kind, ("/opt/venv/bin/vllm",), version, build, "/opt/venv/bin/vllm")

    return engine


@pytest.fixture
def plan(presets: dict[str, Preset], engine: Callable[..., Engine]) -> Callable[..., Plan]:
    """A plan of a shipped preset: ``plan("chatbot", set={…}, unset=(…), build="cpu", …)``."""

    def plan(name: str = "chatbot", *, set: Any = None, unset: tuple[str, ...] = (), **other: Any) -> Plan:
        chosen = engine(other.pop("version", "0.33.0"), other.pop("build", "cuda"))
        return plan_with(presets[name], chosen, Changes(set or {}, unset), **other)

    return plan

"""Startup advice that a server's own vLLM supports."""

from __future__ import annotations

import pytest

from vllm_console.fleet.startup_progress import startup_finding
from vllm_console.logs.startup import Startup
from vllm_console.logs.startup_facts import Stage, StartupFacts
from vllm_launchers.launch.details import Details
from vllm_launchers.plan.budget.budget import EngineReport
from vllm_launchers.units import GIB
from vllm_launchers.vllm.engines import Engine, EngineKind


@pytest.mark.parametrize(
    ("version", "build", "offered"),
    [("0.33.0", "cuda", True), ("0.10.2", "cuda", True), ("0.10.1", "cuda", False), ("0.33.0", "cpu", False)],
)
def test_cache_size_is_offered_only_where_vllm_has_the_flag(version: str, build: str, offered: bool) -> None:
    engine = Engine(EngineKind.VLLM, ("/no/such/vllm",), version, build, "/no/such/vllm")
    startup = Startup(report=EngineReport(kv_pin_bytes=13 * GIB), facts=StartupFacts(kv_measure_seconds=6.0))
    found = startup_finding(Details(model="m", engine=engine), [Stage("weights", 0.0, 60.0)], startup, 5.0)
    fixes = [dict(fix.changes.set) for fix in found.fixes if not fix.changes.empty] if found is not None else []
    assert fixes == ([{"kv-cache-memory-bytes": 13 * GIB}] if offered else [])

"""What the next start of a server needs not do again: facts of its last one, and what its vLLM could use."""

from __future__ import annotations

import os
from collections.abc import Sequence

from vllm_console.diagnosis.finding import Finding
from vllm_console.diagnosis.live.startup import LastStart, slow_startup
from vllm_console.logs.startup import Startup
from vllm_console.metrics.sample import Stage
from vllm_launchers.launch.details import Details
from vllm_launchers.plan.model import Engine, EngineKind
from vllm_launchers.vllm.fast_loaders import FastLoader, fast_loaders
from vllm_launchers.vllm.flags.cache import FlagCache
from vllm_launchers.vllm.flags.flag_table import FlagsUnknownError, FlagTable
from vllm_launchers.vllm.flags.releases import UnknownReleaseError, release_table


def startup_finding(details: Details, stages: Sequence[Stage], startup: Startup, ready_at: float) -> Finding | None:
    """Judge the start of a server that is ready since ``ready_at`` (Unix seconds). Reads files of its vLLM."""
    engine = details.engine
    if engine is None:
        return None
    table = _flags(engine)
    pins = table is not None and "kv-cache-memory-bytes" in table.flags and engine.build not in (None, "cpu")
    start = LastStart(
        ready_at=ready_at,
        stages=stages,
        facts=startup.facts,
        flags=details.flags,
        release=engine.release,
        pin_bytes=startup.report.kv_pin_bytes if pins else None,
        loaders=_loaders(engine, table, details),
        cache_off=details.environment.get("VLLM_DISABLE_COMPILE_CACHE", "0") not in ("", "0"),
    )
    return slow_startup(start)


def _flags(engine: Engine) -> FlagTable | None:
    """Its flags as learned, else those of its release."""
    if engine.kind is EngineKind.VLLM and (known := FlagCache().get(engine)) is not None:
        return known
    try:
        return release_table(engine.version) if engine.version is not None else None
    except UnknownReleaseError:
        return None


def _loaders(engine: Engine, table: FlagTable | None, details: Details) -> tuple[FastLoader, ...]:
    spec = table.flags.get("load-format") if table is not None else None
    try:
        return fast_loaders(engine, spec, details.model, details.flags, {**os.environ, **details.environment})
    except (FlagsUnknownError, OSError):
        return ()

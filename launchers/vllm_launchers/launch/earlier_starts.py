"""Memory reports of earlier starts of a model, read from server logs, to improve memory estimates."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from vllm_launchers.host.gpu.host import Gpu
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.launch.details import unpack
from vllm_launchers.plan.budget.engine_report import learned_from, read_report, report_figures
from vllm_launchers.plan.findings import Level, PlanFinding
from vllm_launchers.plan.flags import BLOCKS, BYTES
from vllm_launchers.plan.inputs import EarlierReport
from vllm_launchers.plan.model import Plan
from vllm_launchers.private import open_regular
from vllm_launchers.units import GIB
from vllm_launchers.vllm.engines import Engine, EngineKind
from vllm_launchers.vllm.flags.changes import Changes, Flags
from vllm_launchers.vllm.startup_reports import StartupReportStore, StoredReport, flags_digest, remembered

START_LOG_BYTES = 4 << 20
"""How much of a generation's log is searched for its startup."""

CPU = "cpu"
"""Stands in for the GPU's name with builds that use none."""


class EarlierStart(msgspec.Struct, frozen=True):
    """An earlier start of a model. ``same``: it had the same engine and flags, so its report applies unchanged."""

    learned: EarlierReport
    same: bool


def report_store(state: Path) -> StartupReportStore:
    """The store of memory reports of this user's servers."""
    return StartupReportStore(state / "reports.json")


def gpu_kind(gpus: tuple[Gpu, ...], build: str | None) -> str:
    """The GPU model of a launch, or ``cpu`` for a CPU build; empty if unknown."""
    return CPU if build == CPU else (gpus[0].name or "" if gpus else "")


def find_earlier(
    reports: StartupReportStore, plan: Plan, kind: str, own: StoredReport | None = None
) -> EarlierStart | None:
    """The most relevant earlier start for a plan, or None. ``own`` is the report of the server being replaced."""
    place = _memory_of(plan.engine, kind, plan.environment)
    if not place:
        return None
    settings = launch_settings(plan.flags, plan.environment)
    found = reports.find(plan.model, place, plan.engine.label, settings, [own] if own is not None else ())
    if found is None:
        return None
    learned = learned_from(found.reported, found.predicted)
    if found.engine != plan.engine.label:  # vLLM before 0.21 counts tokens differently
        return EarlierStart(replace(learned, predicted_kv_tokens=None), same=False)
    return EarlierStart(learned, found.flags == flags_digest(settings))


def fixed_cache(
    reports: StartupReportStore, plan: Plan, kind: str, own: StoredReport | None = None
) -> PlanFinding | None:
    """A finding about a KV cache size that is fixed in bytes, since vLLM then measures nothing. ``own`` as above."""
    size, place = plan.flags.get(BYTES), _memory_of(plan.engine, kind, plan.environment)
    if not isinstance(size, int) or plan.engine.kind is not EngineKind.VLLM or plan.engine.build == CPU or not place:
        return None
    flags = {name: value for name, value in plan.flags.items() if name != BYTES}
    digest = flags_digest(launch_settings(flags, plan.environment))
    all_starts = [*reports.entries(), *filter(None, [own])]
    starts = [one for one in all_starts if (one.model, one.gpu, one.engine) == (plan.model, place, plan.engine.label)]
    suggested = {one.flags: round(one.reported["kv_pin_bytes"]) for one in starts if "kv_pin_bytes" in one.reported}
    fixed = f"--{BYTES} fixes the KV cache at {size / GIB:.1f} GiB, whatever --gpu-memory-utilization says"
    memory = "the server runs out of memory if neighbors hold more than at that start"
    known = suggested.get(digest)
    if known is not None and size <= known:
        return PlanFinding("kv_cache_fixed", Level.ADVICE, f"{fixed}; vLLM suggested it with these flags: {memory}")
    without = Changes(unset=(BYTES,))
    if known is not None:
        text = f"{fixed}; with these flags vLLM suggested {known / GIB:.1f} GiB, so it may run out of memory"
        return PlanFinding("kv_cache_fixed", Level.WARNING, text, without)
    if size in suggested.values():
        text = f"{fixed}; vLLM suggested that with other flags, so it may run out of memory: measure again without it"
        return PlanFinding("kv_cache_fixed", Level.WARNING, text, without)
    return PlanFinding("kv_cache_fixed", Level.ADVICE, f"{fixed}; vLLM does not check that it fits")


def remember_start(reports: StartupReportStore, folder: Path, record: ServerRecord) -> bool:
    """Store the memory report of a server that is ready; returns whether there was anything to store."""
    start = own_start(folder, record)
    return start is not None and reports.remember(start)


def own_start(folder: Path, record: ServerRecord) -> StoredReport | None:
    """The memory report in the log of a server's current generation, or None."""
    details = unpack(record.current.spec.details)
    engine, predicted = details.engine, details.predicted
    place = _memory_of(engine, details.gpu_kind, details.environment) if engine is not None else ""
    if engine is None or not place:
        return None
    report = read_report(start_of_log(folder / "server.log", record))
    if report.disturbed(details.gpu_kind, details.flags, details.environment):
        return None  # it does not predict the next start
    if not (figures := report_figures(report)):
        return None
    if BLOCKS in details.flags:  # the number of tokens does not follow from the memory
        predicted = {name: value for name, value in predicted.items() if name not in ("kv_gib", "kv_tokens")}
    settings = launch_settings(details.flags, details.environment)
    at = record.current.ready_at or record.current.started_at
    return remembered(details.model, place, engine.label, settings, reported=figures, predicted=predicted, at=at)


def _memory_of(engine: Engine, kind: str, environment: Mapping[str, str]) -> str:
    """The GPU model that a report is about, with simulated GPUs kept apart; empty if unknown."""
    if engine.kind is EngineKind.SIMULATED:
        return f"simulated {environment.get('SIMULATED_GPU') or kind or 'GPU'}"
    return kind


def launch_settings(flags: Flags, environment: Mapping[str, str]) -> dict[str, object]:
    """Everything a report depends on: variables such as VLLM_CPU_KVCACHE_SPACE affect memory as flags do."""
    return {**flags, **{name: value for name, value in environment.items() if name.startswith(("VLLM_", "SIMULATED_"))}}


def start_of_log(path: Path, record: ServerRecord) -> list[str]:
    """The present generation's log from its beginning; empty if it was rotated meanwhile."""
    try:
        with open_regular(path) as file:
            if record.log_inode not in (None, os.fstat(file.fileno()).st_ino):
                return []
            file.seek(record.log_offset)
            data = file.read(START_LOG_BYTES)
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()

"""What earlier starts tell of the next: their memory as the engine reported it, for a plan, and how long they took.

Read from a server's log once it is ready.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_console.fleet.details import Details, unpack
from vllm_console.fleet.watched import open_log
from vllm_console.fleet.way_up import START_LOG_BYTES
from vllm_console.telemetry.progress import Durations, durations
from vllm_console.telemetry.startup import stages
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.machine.gpu.host import Gpu
from vllm_launchers.machine.reports import ReportBook, flags_digest
from vllm_launchers.plan.budget.report import learned_from, read_report, report_figures
from vllm_launchers.plan.knowledge import Learned
from vllm_launchers.plan.model import EngineKind, Flags, Plan

CPU = "cpu"
"""Stands where a GPU's name would, for builds that use none."""


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier start of a model. ``same`` is whether it had the same engine and flags, so that its report holds."""

    learned: Learned
    same: bool


def report_book(state: Path) -> ReportBook:
    """The starts of this person's servers."""
    return ReportBook(state / "reports.json")


def kind_of(gpus: tuple[Gpu, ...], build: str | None) -> str:
    """What kind of GPU it runs on; empty where that is not known."""
    return CPU if build == CPU else (gpus[0].name or "" if gpus else "")


def find_earlier(book: ReportBook, plan: Plan, kind: str) -> Earlier | None:
    """The earlier start that says most about a plan; None without any."""
    if not kind or plan.engine.kind is not EngineKind.VLLM:
        return None
    settings = _settings(plan.flags, plan.environment)
    found = book.find(plan.model, kind, plan.engine.label, settings)
    if found is None:
        return None
    same = found.flags == flags_digest(settings) and found.engine == plan.engine.label
    return Earlier(learned_from(found.reported, found.predicted), same)


def remember_start(book: ReportBook, folder: Path, record: ServerRecord) -> bool:
    """Keep what a server that is ready said of its memory; whether there was anything to keep."""
    details = unpack(record.current.spec.details)
    engine = details.engine
    if engine is None or engine.kind is not EngineKind.VLLM or not details.gpu_kind:
        return False
    figures = report_figures(read_report(start_of_log(folder / "server.log", record)))
    settings = _settings(details.flags, details.environment)
    return book.remember(
        details.model, details.gpu_kind, engine.label, settings, reported=figures, predicted=details.predicted
    )


def times_book(state: Path) -> ReportBook:
    """How long the stages of starts took, in seconds by stage: the newest start per model, engine and flags."""
    return ReportBook(state / "start-times.json")


def remember_times(book: ReportBook, folder: Path, record: ServerRecord) -> bool:
    """Keep how long a server that is ready took; whether there was anything to keep."""
    details, ready_at = unpack(record.current.spec.details), record.current.ready_at
    lines = start_of_log(folder / "server.log", record)
    if details.engine is None or ready_at is None or not lines:
        return False
    took = durations(stages(lines, record.current.started_at, ready_at, ready_at, ended=False))
    settings = _settings(details.flags, details.environment)
    return book.remember(details.model, _place(details), details.engine.label, settings, reported=took, predicted={})


def earlier_times(state: Path, details: Details) -> Durations:
    """How long an earlier start of this model took, one with the same flags before others; empty without any."""
    if details.engine is None:
        return {}
    settings = _settings(details.flags, details.environment)
    found = times_book(state).find(details.model, _place(details), details.engine.label, settings)
    return found.reported if found is not None and found.engine == details.engine.label else {}


def _place(details: Details) -> str:
    return details.gpu_kind or (str(details.engine.kind) if details.engine is not None else "")


def _settings(flags: Flags, environment: Mapping[str, str]) -> dict[str, object]:
    """All that a report depends on: variables such as VLLM_CPU_KVCACHE_SPACE decide over memory as flags do."""
    return {**flags, **{name: value for name, value in environment.items() if name.startswith("VLLM_")}}


def start_of_log(path: Path, record: ServerRecord) -> list[str]:
    """The present generation's log from its beginning; nothing where it was rotated away meanwhile."""
    try:
        with open_log(path) as file:
            if record.log_inode not in (None, os.fstat(file.fileno()).st_ino):
                return []
            file.seek(record.log_offset)
            data = file.read(START_LOG_BYTES)
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()

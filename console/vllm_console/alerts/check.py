"""Whether a server keeps its objectives: what ``vllm-console check`` answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_console.alerts.objectives import Judged, Served, judge, served
from vllm_console.diagnosis.document import condition_document
from vllm_console.diagnosis.model import Condition
from vllm_console.fleet.model import ServerView, State
from vllm_console.fleet.watched import HISTORY
from vllm_console.format import duration
from vllm_console.telemetry.history import TIERS, HistoryError, HistoryMissingError, Reader
from vllm_console.telemetry.history_file import Entry

STALE_SECONDS = 30.0
"""Without a look for so long nothing is known of now; the recorder looks once a second."""

MOST_POINTS = 2000
"""Half an hour by the second; a longer window is read by coarser steps."""

CHUNK_SECONDS = 3600.0
"""So much is held at once of a long window that is read by ten seconds: it has a lot of histograms."""

SILENT_SECONDS = 60.0
"""A prompt that is computed for longer without a token is none: the engine hangs."""

BROKEN_ENGINE = ("engine_dead", "engine_hung")
"""Conditions that break a check whatever the objectives say."""


@dataclass(frozen=True, slots=True)
class Report:
    """The answer. ``problems`` are sentences for people, one for each thing that is broken; none when all holds."""

    name: str
    state: State
    window_seconds: float
    objectives: tuple[Judged, ...]
    conditions: tuple[Condition, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the server serves and keeps every objective."""
        return not self.problems


def report_document(report: Report) -> dict[str, Any]:
    """The JSON of ``check`` (a contract)."""
    return {
        "name": report.name,
        "ok": report.ok,
        "state": str(report.state),
        "window_seconds": report.window_seconds,
        "objectives": [
            {
                "name": one.name,
                "value": one.value,
                "limit": one.limit,
                "ok": one.ok,
                "source": one.source,
                "window_seconds": report.window_seconds if one.seconds is None else one.seconds,
            }
            for one in report.objectives
        ],
        "conditions": [condition_document(condition) for condition in report.conditions],
        "problems": list(report.problems),
    }


def look(server: ServerView, now: float, window: float, *, allow_idle: bool = False) -> Report:
    """Read a server's history of the last ``window`` seconds before ``now`` and judge it."""
    reader = Reader(Path(server.log_path).with_name(HISTORY))
    try:
        entries = reader.range(now - window, now, MOST_POINTS)
        often = _often(reader, now, window) if window > TIERS[0].step * TIERS[0].rows else None
        return check(server, entries, now, window, allow_idle=allow_idle, often=often)
    except HistoryMissingError:
        return check(server, (), now, window, allow_idle=allow_idle)
    except HistoryError as error:
        return check(server, (), now, window, allow_idle=allow_idle, trouble=str(error))
    finally:
        reader.close()


def _often(reader: Reader, now: float, window: float) -> Iterator[Entry]:
    """What was recorded every ten seconds or more often, as far as that reaches back; a bit at a time."""
    start = now - min(window, TIERS[1].step * TIERS[1].rows)
    while start < now:
        stop = min(start + CHUNK_SECONDS, now)
        yield from reader.range(start, stop, MOST_POINTS)
        start = stop


def check(
    server: ServerView,
    entries: Sequence[Entry],
    now: float,
    window: float,
    *,
    allow_idle: bool = False,
    trouble: str = "",
    often: Iterable[Entry] | None = None,
) -> Report:
    """Judge what was recorded of a server in a window. Only its present generation counts.

    ``allow_idle`` takes it for well when nothing was asked of it; ``trouble`` is why its history cannot be read.
    ``often`` are the entries by which the KV cache's usage is judged, where the others are minutes apart.
    """
    present = [entry for entry in entries if entry.generation == server.generation]
    fine = (entry.sample for entry in often if entry.generation == server.generation) if often is not None else None
    done = served([entry.sample for entry in present], fine)
    covered = present[-1].at - present[0].at if present else 0.0
    span = min(covered, window)
    judged = judge(done, server.objectives, server.preset, span)
    problems = _engine_problems(server, now) or _no_data(server, present, now, trouble)
    if not problems:
        problems = _silent(server, done, span) or _broken(server, judged, done, span, idle_is_well=allow_idle)
    return Report(server.name, server.state, round(span, 1), judged, server.conditions, tuple(problems))


def _engine_problems(server: ServerView, now: float) -> list[str]:
    """That it does not serve, or that its engine is dead or hangs."""
    if server.state is not State.READY:
        since = f" for {duration(now - server.state_since)}" if server.state_since else ""
        why = f": {server.reason}" if server.reason else ""
        return [f"{server.name} does not serve: it has been {server.state}{since}{why}"]
    return [f"{server.name}: {one.symptom} {one.cause}" for one in server.conditions if one.code in BROKEN_ENGINE]


def _no_data(server: ServerView, entries: Sequence[Entry], now: float, trouble: str) -> list[str]:
    """Why nothing can be said of a server that is ready."""
    if trouble:
        return [f"{server.name} cannot be judged: {trouble}"]
    if not entries:
        return [f"{server.name} cannot be judged: nothing was recorded of it in the window"]
    if (age := now - entries[-1].at) > STALE_SECONDS:
        return [f"{server.name} cannot be judged: its metrics were last read {duration(age)} ago"]
    if len(entries) < 2:
        return [f"{server.name} cannot be judged: it was looked at only once so far"]
    return []


def _silent(server: ServerView, done: Served, span: float) -> list[str]:
    """Requests that run while no token comes at all, over a time that no prompt needs."""
    tokens = done.counted.generation_tokens_total if done.counted is not None else None
    if done.running_min < 1 or tokens != 0 or span < SILENT_SECONDS:
        return []
    return [f"{server.name} gives no token: requests have run for {duration(span)}, and none came"]


def _broken(
    server: ServerView, judged: Sequence[Judged], done: Served, span: float, *, idle_is_well: bool
) -> list[str]:
    """One sentence for each objective that is broken or that nothing is known of."""
    broken = [f"{server.name}: {one.sentence}" for one in judged if one.ok is False]
    unknown = [one for one in judged if one.ok is None]
    if unknown == list(judged):
        return [f"{server.name} reports no metrics to judge it by (was it started with --disable-log-stats?)"]
    if done.idle:
        told = f"{server.name} served nothing in the last {duration(span)}, so that its latencies could not be judged"
        return broken if idle_is_well else [*broken, f"{told} (--allow-idle takes that for well)"]
    # Where requests run and none has ended yet, shares and latencies may be unknown: that breaks nothing.
    return broken + [f"{server.name}: {one.sentence}" for one in unknown if one.name == "kv_cache_usage"]

"""Checks whether a server meets its objectives, for ``vllm-console check``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Finding, finding_document
from vllm_console.diagnosis.live.rule import UNJUDGED_SECONDS
from vllm_console.diagnosis.objectives import Judged, ServedWindow, judge_objectives, served_window
from vllm_console.fleet.probe import recorded_latencies
from vllm_console.fleet.snapshot import ServerView
from vllm_console.history.exact import BOUNDARY_SECONDS
from vllm_console.history.probe_records import SETTLED_SECONDS
from vllm_console.history.store import HISTORY, TIERS, HistoryEntry, HistoryError, HistoryMissingError, HistoryReader
from vllm_console.metrics.window import traffic
from vllm_console.text import duration
from vllm_launchers.keeper.records import State
from vllm_launchers.probe.environment import PROBE

MOST_POINTS = 360
"""Steps of a window longer than half an hour; in a shorter one, every sample is read."""

CHUNK_SECONDS = 3600.0
"""How much of a long window is held in memory at once, because ten-second rows hold many histograms."""

LONGEST_EXACT_SECONDS = 1800.0
"""Latencies of a longer window are estimates, because reading that many records takes too long."""

BROKEN_ENGINE = ("engine_dead", "engine_hung")
"""Findings that fail a check whatever the objectives are."""


class Report(msgspec.Struct, frozen=True):
    """The result. ``problems`` holds one sentence for each violation; empty if there is none."""

    name: str
    state: State
    window_seconds: float
    objectives: tuple[Judged, ...]
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the server is up and meets every objective."""
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
                **_bucket(one),
                "limit": one.limit,
                "ok": one.ok,
                "source": one.source,
                "window_seconds": report.window_seconds if one.seconds is None else one.seconds,
            }
            for one in report.objectives
        ],
        "findings": [finding_document(finding) for finding in report.findings],
        "problems": list(report.problems),
    }


def _bucket(one: Judged) -> dict[str, Any]:
    """The ends of a latency's bucket; without a ``value``, only one of them is known."""
    if not one.name.endswith("_seconds"):
        return {}
    found = one.bucket
    ends = {"value_below": found.below if found else None, "value_above": found.above if found else None}
    return {**ends, "exact": one.exact}


def check_server(server: ServerView, now: float, window: float, *, allow_idle: bool = False) -> Report:
    """Check a server's history of the last ``window`` seconds before ``now``."""
    folder = Path(server.folder)
    with contextlib.closing(HistoryReader(folder / HISTORY)) as reader:
        try:
            long = window > TIERS[0].step * TIERS[0].rows
            entries = reader.range(now - window, now, window / MOST_POINTS if long else 0.0)
            often = _often(reader, now, window) if long else None
            probe = folder / PROBE if window <= LONGEST_EXACT_SECONDS else None
            return check_window(server, entries, now, window, allow_idle=allow_idle, often=often, probe=probe)
        except HistoryMissingError:
            return check_window(server, (), now, window, allow_idle=allow_idle)
        except HistoryError as error:
            return check_window(server, (), now, window, allow_idle=allow_idle, trouble=str(error))


def _often(reader: HistoryReader, now: float, window: float) -> Iterator[HistoryEntry]:
    """The samples of the window, at most ten seconds apart as far back as available; read in chunks."""
    start = now - min(window, TIERS[1].step * TIERS[1].rows)
    while start < now:
        stop = min(start + CHUNK_SECONDS, now)
        yield from reader.range(start, stop, TIERS[1].step)
        start = stop


def check_window(
    server: ServerView,
    entries: Sequence[HistoryEntry],
    now: float,
    window: float,
    *,
    allow_idle: bool = False,
    trouble: str = "",
    often: Iterable[HistoryEntry] | None = None,
    probe: Path | None = None,
) -> Report:
    """Check a window of a server's history. Only the current generation counts, without its first requests.

    ``allow_idle`` accepts a server that got no requests; ``trouble`` is why its history cannot be read. ``often`` holds
    the entries for KV cache usage if the others are minutes apart. ``probe`` is the folder in which the server's probe
    may have recorded: latencies are exact if its records are complete.
    """
    present = [entry for entry in entries if entry.generation == server.generation]
    fine = (entry.sample for entry in often if entry.generation == server.generation) if often is not None else None
    samples = traffic(entry.sample for entry in present)
    done = served_window(samples, fine)
    written = [one for one in samples if one.at <= now - SETTLED_SECONDS - BOUNDARY_SECONDS]
    exact = recorded_latencies(probe, written) if probe is not None else {}
    covered = present[-1].at - present[0].at if present else 0.0
    span = min(covered, window)
    judged = tuple(
        replace(one, note=_waiting(server)) if one.name == "ttft_p99_seconds" else one
        for one in judge_objectives(done, server.objectives, server.preset, span, exact)
    )
    problems = _engine_problems(server, now) or _no_data(server, present, now, trouble)
    if not problems:
        problems = _broken(server, judged, done, span, idle_is_well=allow_idle)
    return Report(server.name, server.state, round(span, 1), judged, server.findings, tuple(problems))


def _waiting(server: ServerView) -> str:
    """A note on the requests that TTFT does not include yet."""
    window = server.window
    if window is None or not window.requests_waiting:
        return ""
    number = round(window.requests_waiting)
    who = "1 waiting request is" if number == 1 else f"{number} waiting requests are"
    known = window.longest_wait is not None and window.longest_wait >= 1
    return f"{who} not included yet" + (
        f", the longest has waited at least {duration(window.longest_wait)}" if known else ""
    )


def _engine_problems(server: ServerView, now: float) -> list[str]:
    """Problems of a server that is not ready, or whose engine is dead or hangs."""
    if server.state is not State.READY:
        since = f" for {duration(now - server.state_since)}" if server.state_since else ""
        why = f": {server.reason}" if server.reason else ""
        return [f"{server.name} is not serving: {server.state_text}{since}{why}"]
    return [f"{server.name}: {one.symptom} {one.cause}" for one in server.findings if one.code in BROKEN_ENGINE]


def _no_data(server: ServerView, entries: Sequence[HistoryEntry], now: float, trouble: str) -> list[str]:
    """Why a ready server cannot be checked."""
    if trouble:
        return [f"{server.name} can't be judged: {trouble}"]
    if not entries:
        return [f"{server.name} can't be judged: nothing recorded in the window"]
    if (age := now - entries[-1].at) > UNJUDGED_SECONDS:
        return [f"{server.name} can't be judged: its metrics were last read {duration(age)} ago"]
    if len(entries) < 2:
        return [f"{server.name} can't be judged: only one sample so far"]
    return []


def _broken(
    server: ServerView, judged: Sequence[Judged], done: ServedWindow, span: float, *, idle_is_well: bool
) -> list[str]:
    """One sentence for each objective that is violated or cannot be checked."""
    broken = [f"{server.name}: {one.sentence}" for one in judged if one.ok is False]
    unknown = [one for one in judged if one.ok is None]
    if unknown == list(judged):
        return [f"{server.name} reports no metrics (started with --disable-log-stats?)"]
    if done.idle:
        message = f"{server.name} served nothing in the last {duration(span)}, so its latencies are unknown"
        return broken if idle_is_well else [*broken, f"{message} (an idle server passes only with --allow-idle)"]
    # If requests run and none has ended yet, shares and latencies may be unknown; that is not a violation.
    return broken + [f"{server.name}: {one.sentence}" for one in unknown if one.name == "kv_cache_usage"]

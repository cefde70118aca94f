"""Compute findings for the time without an open console, from the stored history.

The history has no GPU samples, and does not show whether a silent engine would have answered a request. Ten-second rows
reach back a day; older times are skipped. These rows hold the longest queue of their step, not the shortest, so a
growing queue looks like bursts that are processed at once. Queues are therefore judged only for the last half hour,
which is stored second by second. The TTFT shows the effect of earlier queues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from vllm_console.diagnosis.finding import Span
from vllm_console.diagnosis.live.engine import EngineHung
from vllm_console.fleet.judge import HISTORY_SECONDS, Judge
from vllm_console.fleet.moment import at_work
from vllm_console.fleet.watched_server import JudgeContext
from vllm_console.history.store import HISTORY, TIERS, HistoryEntry, HistoryMissingError, HistoryReader
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.launch.details import unpack
from vllm_launchers.probe.environment import PROBE

INTERVAL_SECONDS = 60.0
"""Interval between evaluations, as in a console."""

DAY_SECONDS = TIERS[1].step * TIERS[1].rows - 600.0
FINE_SECONDS = TIERS[0].step * TIERS[0].rows - 60.0
"""How far back one-second rows reliably reach."""

_CHUNK_SECONDS = 3600.0


def judge_past(
    folder: Path, record: ServerRecord, index: int, since: float, until: float
) -> Mapping[str, Collection[Span]]:
    """When findings held in a generation of a server, by code, from ``since`` to ``until`` (Unix seconds).

    Spans may overlap. ``index`` is the generation's position in the record. Times without data have no findings.

    Raises:
        HistoryError: the history cannot be read.
    """
    generation, then = record.generations[index], at_work(record, index)
    judge = Judge(record.name, probe=folder / PROBE)
    found: defaultdict[str, set[Span]] = defaultdict(set)
    details = unpack(generation.spec.details)
    due = since
    for entry in _rows(folder, max(since, until - DAY_SECONDS) - HISTORY_SECONDS, until):
        if entry.generation > generation.number:
            break
        judge.append(entry.sample, entry.generation)
        if entry.at < due or entry.generation != generation.number:
            continue
        due = entry.at + INTERVAL_SECONDS
        for finding in judge.findings(then, details, JudgeContext(may_ask=False), entry.at):
            if finding.severity != "good" and finding.code != EngineHung.code:
                spans = (span for span in finding.spans(entry.at) if span[1] > since)
                found[finding.code].update((max(since, start), end) for start, end in spans)
    return found


def _rows(folder: Path, start: float, end: float) -> Iterator[HistoryEntry]:
    """Read an hour at a time, since a day of histograms takes too much memory; the last half hour second by second."""
    reader, fine = HistoryReader(folder / HISTORY), end - FINE_SECONDS
    try:
        while start < end:
            stop = min(start + _CHUNK_SECONDS, fine if start < fine else end)
            yield from reader.range(start, stop, TIERS[1].step if start < fine else 0.0)
            start = stop
    except HistoryMissingError:
        return
    finally:
        reader.close()

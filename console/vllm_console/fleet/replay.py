"""Replays of ended runs: their charts, their events, and the metrics and findings of any moment.

A run's history is in its server's folder, or among those of removed servers. The run database has the runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vllm_console.attached import record_folder
from vllm_console.fleet.chart_history import ChartHistory, server_source
from vllm_console.fleet.markers import Marker, replay_markers
from vllm_console.fleet.moment import Moment, read_moment, state_at
from vllm_console.fleet.probe import ProbeView, ServerProbe
from vllm_console.fleet.removed import KEPT_SECONDS, RemovedServers, began_with
from vllm_console.fleet.snapshot import ServerView
from vllm_console.fleet.types import Replay
from vllm_console.fleet.watched_server import JudgeContext
from vllm_console.history.store import HISTORY, HistoryError, HistoryReader
from vllm_console.history.time_view import TimeView, points_shown, range_for
from vllm_console.history.timeline import newest_points
from vllm_console.load.spans import read_spans
from vllm_console.logs.startup import Startup
from vllm_console.logs.startup_facts import Stage
from vllm_console.metrics.sample import Series
from vllm_console.text import clock, plain
from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.keeper.files import LOG
from vllm_launchers.keeper.records import Exit, Generation, LaunchSpec, ServerRecord, State
from vllm_launchers.launch.details import Details, pack
from vllm_launchers.plan.budget.engine_report import learned_from
from vllm_launchers.presets.model import Objectives
from vllm_launchers.private import REMOVED
from vllm_launchers.probe.environment import PROBE
from vllm_launchers.typed_decoding import convert
from vllm_launchers.vllm.engines import Engine, EngineKind

if TYPE_CHECKING:
    from vllm_console.fleet.access import ServerAccess
    from vllm_console.fleet.attached_servers import AllRecords
    from vllm_console.fleet.runs import RunHistory
    from vllm_console.runs.store import PastRun, Run

LAST_SECONDS = 180.0
"""How far before a run's end to look for its last figures; one-minute rows are at most that far apart."""

LEFT_SECONDS = 10.0
"""How long a replay stays open after it was last shown: some actions take a snapshot without it in between."""


class ReplayedRun:
    """A run that has ended, as a console shows it at any moment."""

    def __init__(self, replayed: Replay, run: Run, past: PastRun, place: Path) -> None:
        self.replayed = replayed
        self._run, self._record = run, record_of_run(run)
        self._log = place / LOG
        self._history = HistoryReader(place / HISTORY)
        self._charts = ChartHistory(server_source(place / HISTORY, run.generation))
        self._markers: tuple[Marker, ...] = replay_markers(
            past, self._record.current, read_spans(place, replayed.ended_at)
        )
        self._past: Moment | None = None
        self._probe_folder = place / PROBE
        self._probe = ServerProbe(self._probe_folder, replayed.name, replayed.started_at)

    @property
    def there(self) -> bool:
        """Whether its history is still in place: the server may have been removed in the meantime."""
        return self._history.path.exists()

    def view(self, now: float, time: TimeView) -> ServerView:
        """The run at the requested moment, by default its end, with the charts around it."""
        at = time.at if time.at is not None else self.replayed.ended_at
        view = self._described(at)
        try:
            moment = self._moment(at)
            series, probe = self._series(now, time)
        except HistoryError as error:
            return replace(view, notice=str(error))
        # Omit fixes: changes can't be staged for a run that has ended.
        findings = tuple(replace(finding, fixes=()) for finding in moment.findings)
        view = replace(view, window=moment.window, series=series, probe=probe)
        return replace(view, findings=findings, judged=moment.judged, no_findings=moment.no_findings)

    def close(self) -> None:
        """Close open files."""
        self._history.close()
        self._charts.close()
        self._probe.close()

    def _described(self, at: float) -> ServerView:
        """Model, flags and exit of the run."""
        run, record, replayed = self._run, self._record, self.replayed
        report = learned_from(run.report, {}).report if run.report else None
        return ServerView(
            name=replayed.name,
            state=record.state,
            state_since=record.state_since,
            preset=run.preset,
            model=run.model,
            engine=_engine(run),
            gpus=run.gpus,
            recorded_host=run.recorded_host or None,
            flags=run.flags,
            generation=run.generation,
            attempt=run.attempts,
            reason=record.reason,
            exit=record.exit,
            objectives=_objectives(run),
            stages=tuple(_stages(run)),
            startup=Startup(report=report) if report is not None else None,
            log_path="" if replayed.removed else str(self._log),
            markers=self._markers,
            moment=at,
            then=state_at(record, at),
            replayed=True,
            removed=replayed.removed,
        )

    def _moment(self, at: float) -> Moment:
        if self._past is None or self._past.at != at:
            context = JudgeContext(may_ask=False)
            self._past = read_moment(self._history, self._record, at, context, self._probe_folder)
        return self._past

    def _series(self, now: float, time: TimeView) -> tuple[Series, ProbeView]:
        begin = self.replayed.started_at
        end = time.end if time.end is not None else self.replayed.ended_at
        age = end - begin
        span = range_for(time.range, age)
        found = self._charts.series(span, now, end)
        shown = newest_points(found, points_shown(time.range, age, span.step))
        return self._probe.in_time(replace(shown, recorded_from=begin), span, now, time, end)


class Replays:
    """Finds runs that can be replayed, and shows the requested one."""

    def __init__(self, state: Path, access: ServerAccess, records: AllRecords, runs: RunHistory) -> None:
        self._state, self._access, self._records, self._runs = state, access, records, runs
        self._removed = RemovedServers(state)
        self._open: ReplayedRun | None = None
        self._shown_at = 0.0
        self.trouble = ""
        """A sentence explaining why the requested run is not shown; empty if it is."""

    def find(self, word: str, at: float | None = None) -> Replay:
        """The run named by an argument (see `RunHistory.finished`), starting at ``at`` or at its last figures.

        Raises:
            OperationError: it has not ended, or nothing of it is kept.
            NotFoundError: there is no such run.
            UsageError: the argument names no run, or it did not run at that moment.
        """
        run = self._runs.finished(word, at)
        begin, end = _span(run)
        if at is not None and not begin <= at <= end:
            now = time.time()
            raise UsageError(f"{plain(run.name)} ran from {clock(begin, now)} to {clock(end, now)}: name a time within")
        place, removed = self._place(run)
        last = _last_at(place, begin, end)
        if last is None:
            raise OperationError(self._why_nothing(run, removed=removed))
        return Replay(run.id, run.name, begin, end, at if at is not None else last, removed)

    def removed_at(self, name: str, at: float) -> Replay | None:
        """The run of a removed server that had this name at a moment; None if the current server had it by then."""
        if (present := self._access.record(name)) is not None and present.created_at <= at:
            return None
        with contextlib.suppress(NotFoundError):
            return self.find(name, at)
        return None

    def view(self, now: float, time: TimeView) -> ServerView | None:
        """The requested run; None if none is requested, or if it can't be shown (see ``trouble``)."""
        self.trouble = ""
        if time.run is None:
            if now - self._shown_at > LEFT_SECONDS:
                self.close()
            return None
        self._shown_at = now
        if self._open is not None and (self._open.replayed.run != time.run or not self._open.there):
            self.close()
        try:
            self._open = self._open or self._opened(time.run)
        except OperationError as error:
            self.trouble = str(error)
            return None
        return self._open.view(now, time)

    def close(self) -> None:
        """Close open files."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _opened(self, number: int) -> ReplayedRun:
        found = self._runs.run(number)
        if found is None:
            raise OperationError(f"run {number} is gone: it can't be replayed")
        run, past = found
        begin, end = _span(run)
        place, removed = self._place(run)
        return ReplayedRun(Replay(run.id, run.name, begin, end, end, removed), run, past, place)

    def _place(self, run: Run) -> tuple[Path, bool]:
        """The folder with a run's history, and whether its server was removed."""
        present = next((one for one in self._records.read()[0] if one.name == run.server), None)
        if present is not None and began_with(run, present):
            return record_folder(self._state, present), False
        kept = self._removed.find(run.server, run.started_at)
        return (kept.folder if kept is not None else self._state / REMOVED / run.server), True

    def _why_nothing(self, run: Run, *, removed: bool) -> str:
        begin = f"nothing is left to replay of {plain(run.name)}"
        if run.ended_at is not None and time.time() - run.ended_at > KEPT_SECONDS:
            return f"{begin}: a history is kept for {KEPT_SECONDS / 86_400:.0f} days"
        if removed and self._removed.find(run.server, run.started_at) is None:
            return f"{begin}: its history was deleted with its server"
        return f"{begin}: it ended before a figure was recorded; 'vllm-console runs {plain(run.server)}' says how"


def _span(run: Run) -> tuple[float, float]:
    end = run.ended_at if run.ended_at is not None else run.last_at
    return run.started_at, max(run.started_at, end if end is not None else run.started_at)


def _last_at(place: Path, begin: float, end: float) -> float | None:
    """When the last row of a run was recorded; its end if rows are too coarse to tell, None without any row."""
    with contextlib.closing(HistoryReader(place / HISTORY)) as reader:
        try:
            last = [entry.at for entry in reader.range(max(begin, end - LAST_SECONDS), end)]
            if last:
                return last[-1]
            parts = reader.stretches(begin, end, end - begin)
            return end if any(reader.read(part, 1) for part in parts) else None
        except HistoryError:
            return None


def record_of_run(run: Run) -> ServerRecord:
    """A run as the record of a server without other runs, as input for findings."""
    details = Details(
        preset=run.preset,
        model=run.model,
        engine=_engine(run),
        flags=run.flags,
        gpus=run.gpus,
        recorded_host=run.recorded_host or None,
        gpu_kind=run.gpu_kind,
        objectives=_objectives(run),
    )
    begin, end = _span(run)
    how = run.ended
    ended = Exit(end, how.get("code"), how.get("signal"), bool(how.get("requested")), str(how.get("reason") or ""))
    spec = LaunchSpec((), "127.0.0.1", 0, details=pack(details))
    only = Generation(run.generation, spec, begin, run.ready_at, end, ended)
    state = State.STOPPED if ended.requested else State.FAILED
    return ServerRecord(run.server, state, end, begin, (only,), reason=ended.reason)


def _engine(run: Run) -> Engine | None:
    try:
        return Engine(EngineKind(run.engine), (), run.version or None, run.build or None, "")
    except ValueError:
        return None


def _objectives(run: Run) -> Objectives | None:
    try:
        return convert(dict(run.objectives), Objectives)
    except ValueError:
        return None


def _stages(run: Run) -> Sequence[Stage]:
    at, stages = run.started_at, []
    for name, seconds, detail in run.stages:
        stages.append(Stage(name, at, seconds, detail))
        at += seconds or 0.0
    return stages

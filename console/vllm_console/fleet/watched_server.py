"""One of our servers as a console sees it over time: its record, history, startup and failure."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from vllm_console.fleet.snapshot import PreparedRestart, ServerView, SleepView, UnsetFlags
from vllm_console.history.store import HISTORY, HistoryEntry, HistoryError, HistoryMissingError, HistoryReader
from vllm_console.history.time_view import TimeView, points_shown, range_for
from vllm_console.history.timeline import Timeline, ended, newest_points
from vllm_console.load.spans import LoadWatch
from vllm_console.logs.startup_facts import Stage
from vllm_console.metrics.sample import Series, Window
from vllm_console.metrics.window import traffic
from vllm_console.text import plain
from vllm_launchers.keeper.files import LOG, NODE_MARK
from vllm_launchers.keeper.records import Generation, ServerRecord, State, WarmUpOutcome
from vllm_launchers.launch.details import Details, exposed_message, unpack
from vllm_launchers.probe.environment import PROBE
from vllm_launchers.secrets import redact, redact_argv, redact_environment

if TYPE_CHECKING:
    from vllm_console.diagnosis.finding import Diagnosis, Finding
    from vllm_console.diagnosis.objectives import Judged
    from vllm_console.fleet.board import SharedBoard
    from vllm_console.fleet.chart_history import ChartHistory
    from vllm_console.fleet.failure import LastRestart
    from vllm_console.fleet.gpus import FleetGpus
    from vllm_console.fleet.judge import Judge
    from vllm_console.fleet.markers import ServerMarkers
    from vllm_console.fleet.moment import Moment
    from vllm_console.fleet.probe import ProbeView, ServerProbe
    from vllm_console.fleet.startup_progress import StartupProgress
    from vllm_console.load.tuner_progress import TunerProgress
    from vllm_console.logs.startup import Startup
    from vllm_console.runs.store import PastRun
    from vllm_launchers.host.gpu.host import Host
    from vllm_launchers.host.gpu.sharing import GpuShare

CHART_STEP_SECONDS = 5.0
CHART_POINTS = 180
"""Charts cover a quarter of an hour in steps of five seconds."""

UNRECORDED_SECONDS = 10.0
"""After this long without a sample, check whether the disk is full."""

LEAST_FREE_BYTES = 64 << 10
"""The recorder can't write with less free space than this."""

RECENT_SECONDS = 65.0
"""How far back every single sample is read: a one-minute window plus the sample before it."""

EARLIER_RUNS_SECONDS = 300.0
"""Interval at which earlier runs are reread: a run's findings are stored some time after it ended."""

MENTIONED_SECONDS = 600.0
"""How long to mention a restart that did not happen."""


Identity = tuple[str, float]
"""A server's name and when it was created (Unix seconds): a name may be reused by another server."""


def record_identity(record: ServerRecord) -> Identity:
    """The identity of a record's server."""
    return record.name, record.created_at


class JudgeContext(msgspec.Struct, frozen=True):
    """Inputs for findings besides a server's own metrics: GPUs, and how they are shared.

    ``reserves`` is GPU memory kept for other tenants. ``may_ask`` is whether test requests may be sent to a server;
    ``board`` is where people announce which GPUs they use.
    """

    gpus: FleetGpus | None = None
    shares: Sequence[GpuShare] = ()
    reserves: Sequence[GpuShare] = ()
    may_ask: bool = True
    board: SharedBoard | None = None

    @property
    def host(self) -> Host | None:
        """The machine's GPUs as last seen; None for a recorded host, whose GPUs do not show the current state."""
        return self.gpus.host() if self.gpus is not None and not self.gpus.recorded else None


class WatchedServer:
    """Everything read about one server, cached between snapshots so that each snapshot is cheap."""

    def __init__(self, folder: Path, *, interactive: bool) -> None:
        self._folder, self._probe_folder = folder, folder / PROBE
        self._interactive = interactive
        self._details: tuple[object, Details] | None = None
        self._argv: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        """A command line as recorded, and with its secrets redacted."""
        self._history: HistoryReader | None = None
        self._timeline = Timeline(CHART_STEP_SECONDS, CHART_POINTS + 1)  # charts omit the incomplete point
        self._sequence: int | None = None
        self._startup: tuple[tuple[int, int], StartupProgress] | None = None
        self._failure: tuple[tuple[int, int], Diagnosis | None] | None = None
        self._advice: tuple[tuple[int, int], Finding | None] | None = None
        self._unset: tuple[int, UnsetFlags] | None = None
        self._judge: Judge | None = None
        self._charts: ChartHistory[HistoryEntry, Timeline] | None = None
        self._chart_cache: tuple[object, tuple[Series, ProbeView]] | None = None
        """The last chart, keyed by its moment and range."""
        self._markers: ServerMarkers | None = None
        self._past: Moment | None = None
        self._past_of = 0
        self._restart: LastRestart | None = None
        self._probe: ServerProbe | None = None
        self._loads = LoadWatch(folder)
        self._runs: tuple[int, float, Sequence[PastRun]] | None = None
        """A generation, when its runs were read, and the runs up to it."""
        self._begun: tuple[float, Mapping[tuple[int, str], float]] = (0.0, {})
        """When the open findings began, by generation and code; and the moment of that list (Unix seconds)."""
        self._window: Window | None = None
        """The last minute, as of the newest snapshot."""

    def view(
        self,
        record: ServerRecord,
        now: float,
        *,
        selected: bool,
        load: str,
        context: JudgeContext | None = None,
        startup_stages: bool = True,
    ) -> ServerView:
        """The server as of ``now`` (Unix seconds). Findings are computed if it is selected, and always in a console.

        Without ``startup_stages``, the log of a starting server is not read.
        """
        spec = record.current.spec
        details = self._read_details(spec.details)
        if self._judge is None and context is not None and (selected or self._interactive):
            from vllm_console.fleet.judge import Judge

            self._judge = Judge(record.name, self._earlier_runs, self._folder / LOG, self._probe_folder)
            self._timeline.clear()  # both are filled again from the recent past
            self._sequence = None
            if (gpus := details.gpus_on(None)) and (context.gpus is None or not context.gpus.recorded):
                self._recall(self._judge, gpus, context, now)
        history_problem = self._read_history(now) or self._not_recorded(record, now)
        self._window = self._last_minute(record, now)
        earlier = _generation_before(record)
        answered = self._answered(record)
        stages, startup = (
            self._startup_progress(record, details, now, selected=selected) if startup_stages else ((), None)
        )
        exposed = exposed_message(record)
        found, judged = self._judged(record, details, context, now)
        if (advice := self._startup_advice(record, details, stages, startup)) is not None:
            found = (*found, advice)
        if record.sleep is not None:
            from vllm_console.diagnosis.live.sleep import after_sleep

            slept = after_sleep(record.sleep, now)
            found = (slept, *(one for one in found if one.severity != "good")) if slept is not None else found
        restart, tuner = self._prepared(record, details), self._loads.progress(now)
        rollback = self._rolled_back(record)
        killed = self._loads.killed_tuner(now) if tuner is None else None
        about_restart = (_about_restart(restart, tuner, now), rollback, _left_by_tuner(record, details, killed))
        return ServerView(
            name=record.name,
            state=record.state,
            state_since=record.state_since,
            preset=details.preset,
            model=details.model,
            engine=details.engine,
            host=spec.host,
            port=spec.port,
            tls=spec.tls,
            pid=record.server.pid if record.server and record.state.alive else None,
            gpus=details.gpus,
            recorded_host=details.recorded_host,
            argv=self._shown_argv(spec.argv),
            environment=redact_environment(details.environment),
            flags=details.flags,
            unset=self._unset_flags(record, details),
            fp8_cache_problem=details.fp8_cache_problem,
            reasons=details.reasons,
            previous_flags=unpack(earlier.spec.details).flags if earlier else None,
            generation=record.current.number,
            attempt=record.attempt,
            reason=self._reason(record, details),
            diagnosis=self._diagnosis(record, details),
            notice="; ".join(filter(None, (_notice(record), *about_restart, exposed, history_problem))),
            exposed=exposed,
            exit=record.exit,
            next_attempt_at=record.next_attempt_at,
            downtime_seconds=record.downtime_seconds,
            restart=restart,
            sleep=_sleep(record, details),
            node=spec.node.text if spec.node is not None else "",
            partner=details.standby_of,
            rollback=rollback,
            warm_up=record.current.warm_up,
            workload=details.workload,
            objectives=details.objectives,
            stages=stages,
            startup=startup,
            folder=str(self._folder),
            log_path=str(self._folder / LOG),
            sample=self._timeline.latest if answered else None,
            window=self._window if answered else None,
            last_window=self._last_window(record),
            no_probe="" if spec.probe else details.no_probe,
            load=load,
            tuner=tuner,
            load_test=self._loads.load_test(now),
            findings=found,
            judged=judged,
        )

    def close(self) -> None:
        """Close open files."""
        if self._history is not None:
            self._history.close()
            self._history = None
        if self._charts is not None:
            self._charts.close()
            self._charts = None
        if self._probe is not None:
            self._probe.close()

    def in_time(self, view: ServerView, record: ServerRecord, now: float, time_view: TimeView) -> ServerView:
        """Add charts over the requested range, and event markers."""
        if self._charts is None:
            from vllm_console.fleet.chart_history import ChartHistory, server_source
            from vllm_console.fleet.markers import ServerMarkers
            from vllm_console.runs.store import FILE_NAME

            self._charts = ChartHistory(server_source(self._folder / HISTORY))
            self._markers = ServerMarkers(self._folder.parents[1] / FILE_NAME)
        if self._markers is not None:
            view = replace(view, markers=self._markers.markers(record, view.findings, self._loads.spans(now), now))
        try:
            series, probe = self._cached_chart(self._charts, record, now, time_view)
            return replace(view, series=series, probe=probe)
        except HistoryError as error:
            return _with_notice(view, error)

    def earlier(self, view: ServerView, record: ServerRecord, at: float) -> ServerView:
        """The view with metrics, findings, preset and objectives at an earlier moment (Unix seconds); state and flags
        are current.

        ``then`` is the state at that moment.
        """
        from vllm_console.fleet.moment import state_at

        try:
            past = self._moment(record, at)
        except HistoryError as error:
            view, past = _with_notice(view, error), None
        view = replace(view, moment=at, then=state_at(record, at), sample=None, last_window=None)
        if past is None:
            return replace(view, window=None, findings=(), judged=(), no_findings="its history can't be read")
        if past.preset is not None:
            view = replace(view, preset=past.preset, objectives=past.objectives)
        return replace(
            view, window=past.window, findings=past.findings, judged=past.judged, no_findings=past.no_findings
        )

    def _cached_chart(
        self, charts: ChartHistory[HistoryEntry, Timeline], record: ServerRecord, now: float, time_view: TimeView
    ) -> tuple[Series, ProbeView]:
        """Chart series and probe records over the requested range.

        A chart changes only when a point is complete, every `CHART_STEP_SECONDS`. Until then the same objects are
        returned, so nothing needs to be redrawn.
        """
        until = self._newest_complete(now)
        key = (time_view, record.current.number, record.state.alive, until)
        if (
            self._chart_cache is None
            or self._chart_cache[0] != key
            or time_view.requests
            or self._chart_cache[1][0].loading
        ):
            self._chart_cache = (key, self._read_chart(charts, record, now, until, time_view))
            return self._chart_cache[1]
        series, probe = self._chart_cache[1]
        last = self._probe_of(record).last if time_view.at is None else None
        return series, replace(probe, last=last) if probe.last is not last else probe

    def _newest_complete(self, now: float) -> float:
        """End of the newest point for which all samples and records have arrived (Unix seconds)."""
        from vllm_console.history.probe_records import SETTLED_SECONDS

        newest, known = self._timeline.latest, now - CHART_STEP_SECONDS
        if newest is not None:
            known = max(known, newest.at - (SETTLED_SECONDS if self._has_probe else 0.0))
        return (math.ceil(known / CHART_STEP_SECONDS) - 1) * CHART_STEP_SECONDS  # a point includes its end

    def _read_chart(
        self,
        charts: ChartHistory[HistoryEntry, Timeline],
        record: ServerRecord,
        now: float,
        until: float,
        time_view: TimeView,
    ) -> tuple[Series, ProbeView]:
        last = self._series(record, now)
        end = time_view.end if time_view.end is not None else last.as_of
        first = charts.recorded_from(now)
        age = (end if end is not None else now) - first if first is not None else 0.0
        span = range_for(time_view.range, age)
        found = last if span.step == CHART_STEP_SECONDS and time_view.end is None else charts.series(span, now, end)
        if time_view.end is None and last.as_of is None and span.step == CHART_STEP_SECONDS:
            found = ended(found, until)
        points = points_shown(time_view.range, age, span.step)
        shown = replace(newest_points(found, points), recorded_from=first)
        shown = replace(shown, as_of=last.as_of if time_view.end is None else None)
        return self._probe_of(record).in_time(shown, span, now, time_view, end)

    def _moment(self, record: ServerRecord, at: float) -> Moment | None:
        if self._history is None:
            return None
        generation = record.current.number
        if self._past is None or self._past.at != at or self._past_of != generation:
            from vllm_console.fleet.moment import read_moment

            self._past = read_moment(self._history, record, at, JudgeContext(may_ask=False), self._probe_folder)
            self._past_of = generation
        return self._past

    @property
    def _has_probe(self) -> bool:
        return self._probe_folder.is_dir()

    def _probe_of(self, record: ServerRecord) -> ServerProbe:
        if self._probe is None:
            from vllm_console.fleet.probe import ServerProbe

            self._probe = ServerProbe(self._probe_folder, record.name)
        return self._probe.of(record.current.spec)

    def _last_minute(self, record: ServerRecord, now: float) -> Window | None:
        """The last minute, with exact latencies where its probe has them."""
        window = self._timeline.window()
        if window is None or not any(one.count for one in window.latencies.values()) or not self._answered(record):
            return window
        if not self._has_probe:
            return window
        return self._probe_of(record).window(window, self._timeline.recent, now)

    def _answered(self, record: ServerRecord) -> bool:
        """Whether the newest sample is from the running process, not from an earlier start."""
        newest = self._timeline.latest
        if newest is None or not record.state.alive or self._timeline.generation != record.current.number:
            return False
        # An automatic restart does not begin a new generation: while starting, only samples since then are its own.
        began = record.state_since if record.state is State.STARTING else record.current.started_at
        return newest.at >= began

    def _last_window(self, record: ServerRecord) -> Window | None:
        """In a console, the last minute of a crashed server, without gauges: nothing runs or waits there now."""
        if self._window is None or not self._interactive or not self._crashed(record):
            return None
        return replace(self._window, requests_running=None, requests_waiting=None, longest_wait=None)

    def _crashed(self, record: ServerRecord) -> bool:
        """Whether it failed after it had been ready, and the newest sample is from that time."""
        newest, ready_at = self._timeline.latest, record.current.ready_at
        if record.state is not State.FAILED or newest is None or ready_at is None:
            return False
        return self._timeline.generation == record.current.number and newest.at >= ready_at

    def _read_details(self, packed: object) -> Details:
        if self._details is None or self._details[0] is not packed:
            self._details = (packed, unpack(packed))  # type: ignore[arg-type]
        return self._details[1]

    def _shown_argv(self, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Cached: redacting takes a quarter of a snapshot."""
        if self._argv is None or self._argv[0] != argv:
            self._argv = (argv, redact_argv(argv))
        return self._argv[1]

    def _read_history(self, now: float) -> str:
        """Read what the recorder wrote since the last snapshot; return an error sentence, or an empty string."""
        try:
            if self._history is None:
                self._history = HistoryReader(self._folder / HISTORY)
            if self._sequence is None:
                entries = self._read_past(self._history, now)
            else:
                entries = self._history.after(self._sequence)
            for entry in entries:
                self._timeline.append(entry.sample, entry.generation)
                if self._judge is not None:
                    self._judge.append(entry.sample, entry.generation)
                self._sequence = entry.sequence
        except HistoryMissingError:
            return ""
        except HistoryError as error:
            return str(error)
        return ""

    def _not_recorded(self, record: ServerRecord, now: float) -> str:
        """A sentence if nothing has been recorded for a while because the disk is full; else empty."""
        newest = self._timeline.latest
        since = newest.at if newest is not None and self._answered(record) else record.state_since
        if record.state is not State.READY or now - since < UNRECORDED_SECONDS:
            return ""
        try:
            disk = os.statvfs(self._folder)
        except OSError:
            return ""  # the history reader reports what is wrong with the folder
        if disk.f_bavail * disk.f_frsize >= LEAST_FREE_BYTES:
            return ""
        return f"no metrics are recorded: the disk of {self._folder.parents[1]} is full"

    def _series(self, record: ServerRecord, now: float) -> Series:
        """The charted series: the last quarter of an hour, or the last one with data."""
        newest = self._timeline.latest
        if newest is None or (record.state.alive and now - newest.at < CHART_POINTS * CHART_STEP_SECONDS):
            return self._timeline.series(now)
        return replace(self._timeline.series(newest.at), as_of=newest.at)

    def _recall(self, judge: Judge, gpus: Sequence[int], context: JudgeContext, now: float) -> None:
        """Feed the judge the recent GPU samples, from its own or another recorder."""
        from vllm_console.fleet.gpus import earlier_samples
        from vllm_console.fleet.judge import HISTORY_SECONDS

        board = context.board.latest() if context.board is not None else None
        for host in earlier_samples(self._folder.parents[1], now - HISTORY_SECONDS, board):
            judge.add_gpus(host, gpus, host.at or now)

    def _read_past(self, history: HistoryReader, now: float) -> list[HistoryEntry]:
        """Read the history that a first snapshot needs: half an hour for findings (every sample, for the shortest
        queue), a quarter of an hour for charts, else a minute.
        """
        span = CHART_POINTS * CHART_STEP_SECONDS if self._interactive else 0.0
        recent = RECENT_SECONDS
        if self._judge is not None:
            from vllm_console.fleet.judge import HISTORY_SECONDS

            span = recent = HISTORY_SECONDS
        newest = history.since(now - recent)
        if self._interactive and not newest and (last := history.latest()) is not None and last.at < now:
            now = last.at  # no newer samples: its last frame is shown
            newest = history.since(now - recent)
        begin = newest[0].at if newest else now
        older = history.range(now - span, begin, CHART_STEP_SECONDS) if begin > now - span else []
        return older + newest

    def _judged(
        self, record: ServerRecord, details: Details, context: JudgeContext | None, now: float
    ) -> tuple[tuple[Finding, ...], tuple[Judged, ...]]:
        """Findings, and the last minute judged against its objectives; the two agree."""
        found = self._findings(record, details, context, now)
        ready = record.state is State.READY and self._answered(record)  # ignore samples of the previous generation
        if self._judge is None or context is None or not ready:
            return found, ()
        from vllm_console.diagnosis.live.rule import UNJUDGED_SECONDS
        from vllm_console.diagnosis.objectives import agreed, judge_window

        samples = self._timeline.recent
        traffic_alone = traffic(samples)
        if not traffic_alone or now - samples[-1].at > UNJUDGED_SECONDS:
            return found, ()
        if self._window is None or len(traffic_alone) != len(samples):
            return found, ()
        judged = judge_window(self._window, traffic_alone, details.objectives, details.preset)
        return agreed(found, judged), judged

    def _findings(
        self, record: ServerRecord, details: Details, context: JudgeContext | None, now: float
    ) -> tuple[Finding, ...]:
        if self._judge is None or context is None:
            return ()
        self._judge.add_gpus(context.host, details.gpus_on(None), now)
        if self._has_probe:
            self._judge.set_resumed(self._probe_of(record).resumed(now))
        # A command takes only one snapshot, so it waits for the test request to a server that seems to hang.
        found = self._judge.findings(record, details, context, now, minute=self._window, wait=not self._interactive)
        return self._from_their_beginning(found, record, now)

    def _from_their_beginning(
        self, found: tuple[Finding, ...], record: ServerRecord, now: float
    ) -> tuple[Finding, ...]:
        """The findings with their true start: findings use half an hour of samples, but may have begun earlier."""
        number = record.current.number
        at, known = self._begun
        if not 0 <= now - at <= RECENT_SECONDS:
            known = {}
        begun = {}
        for one in found:
            key = (number, one.code)
            since = known[key] if key in known else self._recorded_since(one, record, now)
            begun[key] = min(one.since, since)
        self._begun = now, begun
        return tuple(
            one if begun[number, one.code] == one.since else replace(one, since=begun[number, one.code])
            for one in found
        )

    def _recorded_since(self, found: Finding, record: ServerRecord, now: float) -> float:
        """When a finding as old as the samples behind it really began, according to the run database."""
        from vllm_console.diagnosis.live.rule import SILENCE_SECONDS
        from vllm_console.fleet.judge import HISTORY_SECONDS
        from vllm_console.fleet.markers import SAME_SECONDS

        if now - found.since < HISTORY_SECONDS - SAME_SECONDS:
            return found.since
        begun = found.since
        present = (run for run in self._past_runs(record) if run.generation == record.current.number)
        held = [(since, until) for run in present for code, since, until in run.findings if code == found.code]
        # It stays open through such pauses and recoveries; slow requests before them count for another minute.
        longest = SILENCE_SECONDS + 60.0
        for since, until in sorted(held, reverse=True):
            if until >= begun - longest:
                begun = min(begun, since)
        return begun

    def _earlier_runs(self, record: ServerRecord) -> Sequence[PastRun]:
        """This server's runs before the current one, newest first."""
        return [run for run in self._past_runs(record) if run.generation < record.current.number]

    def _past_runs(self, record: ServerRecord) -> Sequence[PastRun]:
        """This server's runs up to the current one, newest first; reread after `EARLIER_RUNS_SECONDS`."""
        from vllm_console.runs.store import past_runs

        number, now = record.current.number, time.monotonic()
        if self._runs is None or self._runs[0] != number or now - self._runs[1] >= EARLIER_RUNS_SECONDS:
            if (runs := past_runs(self._folder.parents[1], record)) is None:
                return ()
            self._runs = (number, now, runs)
        return self._runs[2]

    def _reason(self, record: ServerRecord, details: Details) -> str:
        """The keeper's sentence; for a failed server, with the log line that shows the cause."""
        found = self._diagnosis(record, details)
        if found is None or not found.evidence or found.evidence.startswith(NODE_MARK):
            return redact(plain(record.reason))
        from vllm_console.diagnosis.failure.diagnose import UNNAMED

        # The meaning comes first and the exit code last, because a table row shows only the beginning.
        meaning = "" if found.explanation == UNNAMED else found.explanation.removesuffix(".")
        parts = (meaning, found.evidence)
        line = ": ".join(filter(None, map(plain, parts)))
        return redact(plain(f"{line} ({record.reason})"))

    def _diagnosis(self, record: ServerRecord, details: Details) -> Diagnosis | None:
        """Why it failed, computed once per failure; None if it has not."""
        if record.state is not State.FAILED:
            return None
        key = (record.current.number, record.attempt)
        if self._failure is None or self._failure[0] != key:
            from vllm_console.fleet.failure import diagnosed_part

            log, code = self._folder / LOG, record.exit.status if record.exit else None
            found = diagnosed_part(log, code, details, record.log_inode, record.log_offset)
            self._failure = (key, found)
        return self._failure[1]

    def _prepared(self, record: ServerRecord, details: Details) -> PreparedRestart | None:
        """The restart being prepared, or the last one if it did not happen as requested."""
        return self._last_restart().view(record.preparation, details) if record.preparation is not None else None

    def _rolled_back(self, record: ServerRecord) -> str:
        """Why it runs the flags of an earlier generation; empty if it does not."""
        if record.current.rollback is None or not record.state.alive:
            return ""
        return self._last_restart().rolled_back(record)

    def _last_restart(self) -> LastRestart:
        if self._restart is None:
            from vllm_console.fleet.failure import LastRestart

            self._restart = LastRestart(self._folder / LOG)
        return self._restart

    def _startup_progress(
        self, record: ServerRecord, details: Details, now: float, *, selected: bool
    ) -> tuple[tuple[Stage, ...], Startup | None]:
        """Startup stages and their progress, for a server that is starting or selected."""
        if not selected and record.state is not State.STARTING:
            return (), None
        key = (record.current.number, record.attempt)
        if self._startup is None or self._startup[0] != key:
            from vllm_console.fleet.startup_progress import StartupProgress, earlier_times

            earlier = earlier_times(self._folder.parents[1], details)
            self._startup = (key, StartupProgress(self._folder / LOG, record, details, earlier))
        return self._startup[1].update(record, now)

    def _startup_advice(
        self, record: ServerRecord, details: Details, stages: Sequence[Stage], startup: Startup | None
    ) -> Finding | None:
        """A finding on how to shorten the next start, computed once per start."""
        ready_at = record.current.ready_at
        if self._judge is None or startup is None or ready_at is None or record.state is not State.READY:
            return None
        key = (record.current.number, record.attempt)
        if self._advice is None or self._advice[0] != key:
            from vllm_console.fleet.startup_progress import startup_finding

            self._advice = (key, startup_finding(details, stages, startup, ready_at))
        return self._advice[1]

    def _unset_flags(self, record: ServerRecord, details: Details) -> UnsetFlags:
        """vLLM's values for flags that are not set, looked up once per generation."""
        if not self._interactive:
            return UnsetFlags()
        if self._unset is None or self._unset[0] != record.current.number:
            from vllm_console.fleet.unset_flags import unset_flags

            self._unset = record.current.number, unset_flags(details)
        return self._unset[1]


def _about_restart(restart: PreparedRestart | None, tuner: TunerProgress | None, now: float) -> str:
    """A notice about a restart that is being prepared or did not happen; empty if there is none."""
    if restart is None or not (restart.under_way or now - restart.since < MENTIONED_SECONDS):
        return ""
    by_tuner = tuner is not None and tuner.asked(restart.asked_at)
    return f"{'tuner: ' if by_tuner else ''}{restart.sentence}"


def _left_by_tuner(record: ServerRecord, details: Details, killed: TunerProgress | None) -> str:
    """A notice if a killed tuner left its flags behind, and the command that restores the original ones."""
    if killed is None or not killed.started(record.current.number):
        return ""
    restoring = killed.restoring(details.flags)
    if not restoring:
        return ""
    return (
        f"a tuner (pid {killed.pid}) was killed and left {killed.kept(details.flags)}; "
        f"'vllm-console restart {record.name} {restoring}' restores the original flags"
    )


def _sleep(record: ServerRecord, details: Details) -> SleepView | None:
    if record.sleep is None:
        return None
    from vllm_console.fleet.standby import sleep_view

    return sleep_view(record.sleep, details)


def _generation_before(record: ServerRecord) -> Generation | None:
    """The generation to revert to: the previous one; after a rollback, the last one served before the restored one."""
    back = record.current.rollback
    if back is None:
        return record.generations[-2] if len(record.generations) > 1 else None
    served = [one for one in record.generations if one.number < back.to and one.ready_at is not None]
    return served[-1] if served else None


def _with_notice(view: ServerView, error: HistoryError) -> ServerView:
    return replace(view, notice="; ".join(dict.fromkeys(filter(None, (view.notice, str(error))))))


def _notice(record: ServerRecord) -> str:
    notes = [f"{record.unwritten}; shown from its keeper's memory"] if record.unwritten else []
    if (node := record.current.spec.node) is not None:
        notes.append(f"{node.text}; node 0 is {node.master}" if node.headless else node.text)
    if record.adopted and record.state.alive:
        notes.append("adopted by a new keeper; its exit code will not be known")
    warm_up = record.current.warm_up
    if warm_up is not None and warm_up.outcome is WarmUpOutcome.REFUSED and record.state.alive:
        notes.append(
            f"its warm-up request did not complete, so it is unknown whether it can serve requests ({warm_up.detail})"
        )
    return "; ".join(notes)

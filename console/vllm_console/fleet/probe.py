"""The records of our servers' probes: for snapshots, and as requests, steps and traffic for commands."""

from __future__ import annotations

import contextlib
import heapq
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec.structs import replace

from vllm_console.diagnosis.live.rule import DEFAULT_OBJECTIVES
from vllm_console.history.exact import BOUNDARY_SECONDS, ProbeRecords, exact_latencies, read_records
from vllm_console.history.prefix_use import PrefixUse, prefix_use
from vllm_console.history.probe_records import (
    SETTLED_SECONDS,
    EngineStep,
    FinishedRequest,
    FirstToken,
    Interval,
    ProbeReader,
    Resumed,
)
from vllm_console.history.store import HISTORY, HistoryError, HistoryMissingError, HistoryReader
from vllm_console.history.timeline import ended, newest_points
from vllm_console.history.workload import PRESENT_RUN, SEEN_SECONDS, SeenWorkload, seen_workload
from vllm_console.metrics.quantile import Quantiles
from vllm_console.metrics.sample import Sample, Series, Window
from vllm_console.metrics.window import combine, growths
from vllm_launchers.errors import OperationError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.records import LaunchSpec, ServerRecord
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.plan.flags import BATCHED, token_count
from vllm_launchers.plan.probe import plan_probe
from vllm_launchers.probe.environment import PROBE

if TYPE_CHECKING:
    from vllm_console.fleet.access import ServerAccess
    from vllm_console.fleet.chart_history import ChartHistory, ChartSource
    from vllm_console.fleet.runs import RunHistory
    from vllm_console.history.probe_records import Timed
    from vllm_console.history.step_timeline import StepTimeline
    from vllm_console.history.time_view import ChartRange, TimeView

WINDOW_SECONDS = 60.0
"""How far back figures of a moment reach."""

SPAN_SECONDS = 75.0
"""How long records are kept for the figures of the last minute."""

RESUMED_SECONDS = 300.0
"""How far back a server's findings consider resumed requests."""

MOST_REQUESTS = 20_000
"""Number of newest requests that are read, for lists such as the slowest ones."""

MOST_LISTED = 200
"""Maximum number of requests per list in a snapshot."""

MOST_DOTS = 2000
"""Number of newest requests whose prompt length and TTFT a snapshot has."""

ENDED_EARLY = ("abort", "error")
"""Finish reasons of requests that were not fully answered."""

ORDERS = ("slowest", "newest", "preempted", "aborted")
"""Lists of requests: by total time, by end, and by end only the preempted or aborted ones."""


class RequestsSeen(msgspec.Struct, frozen=True):
    """The requests that finished in a span of time (Unix seconds).

    ``listed`` has the first requests of each of `ORDERS`, ``counts`` their total numbers. ``dots`` are prompt tokens
    and TTFT in seconds of the newest requests. ``prefixes`` is their use of the prefix cache. ``partial``: there were
    more than `MOST_REQUESTS`, and the oldest were left out.
    """

    since: float
    until: float
    count: int = 0
    counts: tuple[int, ...] = (0,) * len(ORDERS)
    listed: tuple[tuple[FinishedRequest, ...], ...] = ((),) * len(ORDERS)
    dots: tuple[tuple[float, float], ...] = ()
    prefixes: PrefixUse = PrefixUse()
    partial: bool = False


class ProbeView(msgspec.Struct, frozen=True):
    """A server's probe records in a snapshot.

    ``steps`` are points over the shown range, keyed as `vllm_console.history.step_timeline.SERIES`; ``last`` is the
    newest step; ``requests`` are present if asked for. ``problem`` is a sentence explaining why something is missing.
    """

    steps: Series | None = None
    last: EngineStep | None = None
    requests: RequestsSeen | None = None
    problem: str = ""


def no_probe_message(name: str, details: Details) -> str:
    """A sentence explaining why a server without a probe has no recorded requests, and how to change that."""
    message = f"{name} has no probe, so its requests are not recorded: {details.no_probe}"
    engine = details.engine
    if engine is None or not plan_probe(engine, details.flags, {}, "on", asked=True).variables:
        return message  # it can't have a probe
    return f"{message.removesuffix('. --probe turns it on')}; 'vllm-console restart {name} --probe' adds it"


def exact_window(folder: Path, window: Window, samples: Sequence[Sample]) -> Window:
    """A past window with exact latencies where the records in a folder have them. ``samples`` are the window's."""
    return _with_exact(window, recorded_latencies(folder, samples))


def recorded_latencies(folder: Path, samples: Sequence[Sample]) -> dict[str, Quantiles]:
    """The exact latencies, as far as recorded in a folder, between the first and the last sample."""
    if len(samples) < 2:
        return {}
    try:
        records = read_records(folder, samples[0].at, samples[-1].at)
    except OSError:
        return {}  # the estimates stay
    return _recorded(samples, records)


def _recorded(samples: Sequence[Sample], records: ProbeRecords) -> dict[str, Quantiles]:
    before, after = samples[0], samples[-1]
    histograms = combine(growths(before, after)).histograms
    counted = {key: histogram.count for key, histogram in histograms.items()}
    return exact_latencies(records, before.at, after.at, counted)


def _with_exact(window: Window, found: Mapping[str, Quantiles]) -> Window:
    if not found:
        return window
    means = {key: one.mean if one.mean is not None else _mean(window, key) for key, one in found.items()}
    exact = {key: replace(one, mean=means[key]) for key, one in found.items()}
    return replace(window, latencies={**window.latencies, **exact})


def _mean(window: Window, key: str) -> float | None:
    known = window.latencies.get(key)
    return known.mean if known is not None else None


class _Listing:
    """The requests of a range, read once and kept up to date. Without ``end``, the range ends now.

    ``key`` identifies the range: its length or begin, and its end.
    """

    def __init__(self, folder: Path, key: tuple[float, float | None], start: float, end: float | None) -> None:
        self.key = key
        self._reader = ProbeReader(folder, start, end, MOST_REQUESTS)
        self._found: list[FinishedRequest] = []
        self._again: list[Resumed] = []
        self._partial = False
        self._seen: RequestsSeen | None = None

    def seen(self, start: float, until: float) -> RequestsSeen:
        """The requests between two moments. Raises OSError."""
        added, again = self._reader.requests(), self._reader.resumed()
        self._found += added
        self._again += again
        self._partial = self._partial or len(self._found) > MOST_REQUESTS
        del self._found[: max(bisect_left(self._found, start, key=_end_of), len(self._found) - MOST_REQUESTS)]
        del self._again[: bisect_left(self._again, start, key=_at)]
        if self._seen is None or added or again or self._seen.count != len(self._found):
            self._seen = listed(self._found, start, until, self._again, partial=self._partial)
        self._seen = replace(self._seen, since=start, until=until)
        return self._seen


_end_of = attrgetter("finished_at")
_at = attrgetter("at")


def listed(
    found: Sequence[FinishedRequest],
    since: float,
    until: float,
    resumed: Sequence[Resumed] = (),
    *,
    partial: bool = False,
) -> RequestsSeen:
    """List requests of a time span (in order of their end) in each of `ORDERS`; ``resumed`` adds to the prefix use."""
    slowest = heapq.nlargest(MOST_LISTED, found, key=lambda one: one.e2e_seconds or 0.0)
    preempted = [one for one in found if one.preemptions]
    aborted = [one for one in found if one.finish_reason in ENDED_EARLY]
    kinds: tuple[Sequence[FinishedRequest], ...] = (found, preempted, aborted)
    dots = (
        (float(one.prompt_tokens), one.ttft_seconds)
        for one in found[-MOST_DOTS:]
        if one.prompt_tokens is not None and one.ttft_seconds is not None
    )
    return RequestsSeen(
        since=since,
        until=until,
        count=len(found),
        counts=(len(found), *map(len, kinds)),
        listed=(tuple(slowest), *(tuple(kind[: -MOST_LISTED - 1 : -1]) for kind in kinds)),
        dots=tuple(dots),
        prefixes=prefix_use(found, resumed),
        partial=partial,
    )


def step_source(folder: Path, begin: float) -> ChartSource[Timed, StepTimeline]:
    """The chart source for steps since ``begin`` (Unix seconds), because the folder also has steps of earlier runs."""
    from vllm_console.fleet.chart_history import ChartSource
    from vllm_console.history.step_timeline import ProbeRows, StepTimeline

    def append(timeline: StepTimeline, row: Timed) -> None:
        if row.at >= begin:
            timeline.append(row)

    return ChartSource(lambda: ProbeRows(folder), lambda span: StepTimeline(span.step, span.points), append)


class ServerProbe:
    """Reads a server's records, each once; ``begin`` (Unix seconds) excludes earlier runs."""

    def __init__(self, folder: Path, name: str, begin: float = 0.0) -> None:
        self._folder, self._name, self._begin = folder, name, begin
        self._spec: LaunchSpec | None = None
        self._reader: ProbeReader | None = None
        self._steps: list[EngineStep] = []
        self._last: EngineStep | None = None
        self._intervals: list[Interval] = []
        self._first_tokens: list[FirstToken] = []
        self._requests: list[FinishedRequest] = []
        self._resumed_reader: ProbeReader | None = None
        self._resumed: list[Resumed] = []
        self._charts: ChartHistory[Timed, StepTimeline] | None = None
        self._listing: _Listing | None = None

    def of(self, spec: LaunchSpec) -> ServerProbe:
        """Set how the server was launched; return self."""
        self._spec = spec
        return self

    @property
    def last(self) -> EngineStep | None:
        """The newest step."""
        return self._last

    def window(self, window: Window, samples: Sequence[Sample], now: float) -> Window:
        """The last minute with exact latencies where the records have them; ``samples`` are the window's.

        The newest records may not be written yet, so the exact part ends slightly before the window.
        """
        self._update(now)
        settled = [one for one in samples if one.at <= now - SETTLED_SECONDS - BOUNDARY_SECONDS]
        if len(settled) < 2 or not self._steps or self._reader is None:
            return window
        writers = self._reader.writers(settled[0].at, settled[-1].at)
        records = ProbeRecords(self._steps, self._intervals, self._first_tokens, self._requests, writers)
        return _with_exact(window, _recorded(settled, records))

    def _update(self, now: float) -> None:
        """Read new records, and drop those that are too old."""
        if self._reader is None:
            self._reader = ProbeReader(self._folder, now - SPAN_SECONDS)
        try:
            added = self._reader.added()
        except OSError:
            return  # unreadable records are treated as missing, and nothing is exact then
        self._steps += added.steps
        self._intervals += added.intervals
        self._first_tokens += added.first_tokens
        self._requests += added.requests
        self._last = self._steps[-1] if self._steps else self._last
        since = now - SPAN_SECONDS
        del self._steps[: bisect_left(self._steps, since, key=_at)]
        del self._intervals[: bisect_left(self._intervals, since, key=_at)]
        del self._first_tokens[: bisect_left(self._first_tokens, since, key=_at)]
        del self._requests[: bisect_left(self._requests, since, key=_end_of)]

    def resumed(self, now: float) -> Sequence[Resumed]:
        """Prefix cache hits of the requests resumed in the last `RESUMED_SECONDS`; empty if they cannot be read."""
        if self._resumed_reader is None:
            self._resumed_reader = ProbeReader(self._folder, now - RESUMED_SECONDS)
        try:
            added = self._resumed_reader.resumed()
        except OSError:
            return ()
        kept = bisect_left(self._resumed, now - RESUMED_SECONDS, key=_at)
        if added or kept:
            self._resumed = [*self._resumed[kept:], *added]
        return self._resumed

    def in_time(
        self, series: Series, span: ChartRange, now: float, time: TimeView, end: float | None
    ) -> tuple[Series, ProbeView]:
        """The chart with exact points, and the records of its range, which ends at ``end`` (None: now).

        Raises:
            HistoryError: the records cannot be read.
        """
        if not self._folder.is_dir():
            return series, ProbeView(problem=self._why_nothing())
        from vllm_console.history.step_timeline import with_exact_points

        points = max(map(len, series.values.values()), default=0)
        charts = self._step_charts()
        steps = newest_points(ended(charts.series(span, now, end), series.end), points)
        requests, problem = None, ""
        if time.requests:
            first = charts.recorded_from(now) or self._begin
            start, until, length = max(series.start, first), end, series.end - series.start
            if time.at is not None:
                start, until, length = time.at - WINDOW_SECONDS, time.at, WINDOW_SECONDS
            try:
                requests = self._requests_between(start, until, now, length)
            except OSError as error:
                problem = f"the requests of {self._name} can't be read: {error.strerror}"
        last = self._last if time.at is None else None
        return with_exact_points(series, steps), ProbeView(steps, last, requests, problem)

    def _why_nothing(self) -> str:
        if self._spec is None:
            return f"nothing is left of what the probe of {self._name} recorded, if it had one"
        if not self._spec.probe:
            return no_probe_message(self._name, unpack(self._spec.details))
        return f"the probe of {self._name} has recorded nothing yet"

    def _step_charts(self) -> ChartHistory[Timed, StepTimeline]:
        if self._charts is None:
            from vllm_console.fleet.chart_history import ChartHistory

            self._charts = ChartHistory(step_source(self._folder, self._begin))
        return self._charts

    def _requests_between(self, start: float, end: float | None, now: float, length: float) -> RequestsSeen:
        """The requests of a range. If it ends now, it moves on, and its requests are not reread."""
        start = max(start, self._begin)
        key = (length if end is None else start, end)
        if self._listing is None or self._listing.key != key:
            self._listing = _Listing(self._folder, key, start, end)
        return self._listing.seen(start, now if end is None else end)

    def close(self) -> None:
        """Discard the records read."""
        if self._charts is not None:
            self._charts.close()
            self._charts = None


def kept_for_streams(state: Path, record: ServerRecord) -> tuple[str, ...]:
    """Flags of a server that traffic alone must not change: fewer tokens per step that ended an earlier contention."""
    from vllm_console.diagnosis.live.latency import answered_by_shorter_steps
    from vllm_console.runs.store import past_runs

    earlier = [run for run in past_runs(state, record) or () if run.generation < record.current.number]
    flags = unpack(record.current.spec.details).flags
    return (BATCHED,) if answered_by_shorter_steps(flags, earlier) else ()


STEP_SECONDS = 5.0
"""A sample in this time is enough for counters, which only grow."""


def seen_traffic(folder: Path, record: ServerRecord, now: float) -> SeenWorkload | None:
    """The traffic of the last hour before ``now`` (Unix seconds); of the current run alone if that is enough.

    None if the record has no workload.
    """
    details = unpack(record.current.spec.details)
    if details.workload is None:
        return None
    longest = token_count(details.flags.get("max-model-len"))
    objectives = details.objectives or DEFAULT_OBJECTIVES
    with contextlib.closing(HistoryReader(folder / HISTORY)) as reader:
        try:
            samples = list(reader.range(now - SEEN_SECONDS, now, STEP_SECONDS))
            ended = _ended(folder / PROBE, now)
            whole = seen_workload(
                samples, details.workload, longest=longest, objective=objectives.kv_cache_usage, recorded=ended
            )
            present = [one for one in samples if one.generation == record.current.number]
            own = seen_workload(present, details.workload, longest=longest, span=PRESENT_RUN, recorded=ended)
            if own.workload is None or len(present) == len(samples):
                return whole
            # Other flags led to other queues, but earlier runs also show what fits into the KV cache and how long
            # requests get.
            return replace(own, room=whole.room, longest=whole.longest)
        except HistoryMissingError:
            return seen_workload((), details.workload, longest=longest)
        except HistoryError as error:
            return SeenWorkload(None, 0, 0.0, str(error))


def _ended(folder: Path, now: float) -> Sequence[FinishedRequest]:
    """The requests that ended in the last hour; none if they can't be read: lengths are then estimated."""
    try:
        return ProbeReader(folder, now - SEEN_SECONDS - BOUNDARY_SECONDS).requests()
    except OSError:
        return ()


# -- probe records -----------------------------------------------------------------------------------------------------

T = TypeVar("T", FinishedRequest, EngineStep)


class ProbeReports:
    """What probes recorded of our servers, by server name, for commands and suggestions.

    Without ``since``, all methods use the current or last run from when it was ready; with it, everything since then
    (Unix seconds). Unless they say otherwise, they raise `OperationError` if there is no probe and nothing was
    recorded or the records cannot be read, and `NotFoundError` or `RefusedError` if there is no such server of ours.
    """

    def __init__(self, state: Path, access: ServerAccess, history: RunHistory) -> None:
        self._state, self._access, self._history = state, access, history

    def requests(self, name: str, since: float | None = None) -> Sequence[FinishedRequest]:
        """Finished requests, oldest first."""
        record = self._access.recorded(name)
        begin = _begin(record, since)
        found = _read_records(record, ProbeReader(self._folder(record), begin).requests)
        return tuple(request for request in found if request.finished_at >= begin)

    def requests_of(self, word: str) -> Sequence[FinishedRequest]:
        """The finished requests of one run, named as for `RunHistory.keep_measurement`, oldest first; its errors too.

        Raises:
            NotFoundError: also if the run's server was removed.
        """
        run = self._history.find(word)
        end = run.ended_at or time.time()
        found = self.requests(run.server, run.started_at)
        return [one for one in found if run.started_at <= one.arrived_at and one.finished_at <= end]

    def steps(self, name: str, since: float | None = None, most: int = 1000) -> Sequence[EngineStep]:
        """The newest ``most`` engine steps, oldest first."""
        record = self._access.recorded(name)
        begin = _begin(record, since)
        found = _read_records(record, ProbeReader(self._folder(record), begin, most=most).steps)
        newest = heapq.nlargest(most, (step for step in found if step.at >= begin), key=lambda step: step.at)
        return tuple(newest[::-1])

    def cached_prefixes(self, name: str, since: float | None) -> PrefixUse:
        """Prefix cache use of the finished requests."""
        record = self._access.recorded(name)
        begin = _begin(record, since)
        reader = ProbeReader(self._folder(record), begin)
        requests = [one for one in _read_records(record, reader.requests) if one.finished_at >= begin]
        try:
            resumed = reader.resumed()
        except OSError as error:
            raise _unreadable(record, error) from error
        return prefix_use(requests, [one for one in resumed if one.at >= begin])

    def _folder(self, record: ServerRecord) -> Path:
        return folders.server_folder(self._state, record.name) / PROBE


def _begin(record: ServerRecord, since: float | None) -> float:
    """Start of the records to use (Unix seconds)."""
    return (record.current.ready_at or record.current.started_at) if since is None else since


def _read_records(record: ServerRecord, read: Callable[[], list[T]]) -> list[T]:
    try:
        found = read()
    except OSError as error:
        raise _unreadable(record, error) from error
    if not found and not record.current.spec.probe:
        raise OperationError(no_probe_message(record.name, unpack(record.current.spec.details)))
    return found


def _unreadable(record: ServerRecord, error: OSError) -> OperationError:
    return OperationError(f"the requests of {record.name} can't be read: {error.strerror}")

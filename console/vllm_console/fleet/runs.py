"""The fleet's access to the run database: records runs as they are observed, lists and compares them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from vllm_console.attached import record_folder
from vllm_console.fleet.types import NothingToCompareError
from vllm_console.history.store import HistoryError
from vllm_console.runs.keys import run_key
from vllm_console.text import plain
from vllm_launchers.errors import NotFoundError, OperationError, UsageError
from vllm_launchers.keeper import folders
from vllm_launchers.keeper.files import LOG
from vllm_launchers.keeper.records import Generation, ServerRecord, State
from vllm_launchers.launch.details import Details, unpack
from vllm_launchers.private import ATTACHED
from vllm_launchers.secrets import redact

if TYPE_CHECKING:
    from vllm_console.diagnosis.finding import Span
    from vllm_console.fleet.access import ServerAccess
    from vllm_console.fleet.attached_servers import AllRecords
    from vllm_console.fleet.removed import RemovedServers
    from vllm_console.fleet.snapshot import FleetSnapshot, ServerView
    from vllm_console.prediction.score import KeptPrediction
    from vllm_console.runs.compare import Comparison
    from vllm_console.runs.measurement import Measurement
    from vllm_console.runs.store import PastRun, Run, RunHead, RunName, RunStore
    from vllm_console.runs.windows import RunWindow

RETRY_SECONDS = 30.0
CONDITIONS_EVERY_SECONDS = 60.0
PAST_SECONDS = 120.0
"""If at least this much history lacks findings, listing the runs computes them first."""

_NOT_JUDGED = "read-only: no findings for times without an open console; a console that is not read-only computes them"
_MANY = 5000
"""More runs than a server has."""
_FEW_EARLIER = 12
"""How many earlier runs are searched for one to compare with."""

Seen = tuple[object, ...]


class _Held(Struct, frozen=True):
    """When the open findings of a run held, by code, and when this was last stored (Unix seconds)."""

    run: RunName
    at: float
    spans: Mapping[str, Sequence[Span]]

    def ended(self, later: _Held) -> dict[str, Sequence[Span]]:
        """The findings that are no longer open."""
        same = later.run.key == self.run.key
        return {code: spans for code, spans in self.spans.items() if not same or code not in later.spans}


class RunRecorder:
    """Writes runs to the store as they begin, become ready and end.

    ``since`` (Unix seconds): earlier events are already stored, or left for a console to store.
    """

    def __init__(self, state: Path, since: float, *, read_only: bool) -> None:
        self.read_only = read_only
        self._state, self._since = state, since
        self._remembered: set[tuple[str, int, int]] = set()
        self._seen: dict[str, Seen] = {}
        self._held: dict[str, _Held] = {}
        self._trouble = ""
        self._tried_at = 0.0
        self._waits = not since

    def update(self, records: Sequence[ServerRecord], views: Sequence[ServerView]) -> list[str]:
        """Store the changes in these records and their views; return what went wrong, one sentence each.

        To show a console's first frame sooner, its first update stores nothing.
        """
        if self.read_only or self._waits:
            self._waits = False
            return []
        self._remember_starts(records)
        due = [pair for pair in zip(records, views, strict=True) if self._new(pair[0])]
        holding = [] if self._since else [pair for pair in zip(records, views, strict=True) if self._holds(*pair)]
        if (due or holding) and time.monotonic() - self._tried_at >= (RETRY_SECONDS if self._trouble else 0):
            self._write(due, holding)
        return [self._trouble] if self._trouble else []

    def _remember_starts(self, records: Iterable[ServerRecord]) -> None:
        """Store what each new start reported, its memory and stage durations, once per start."""
        for record in records:
            ready_at = record.current.ready_at
            key = (record.name, record.current.number, record.attempt)
            if record.state is not State.READY or ready_at is None or ready_at < self._since or key in self._remembered:
                continue
            if not record.current.spec.argv:
                continue  # an attached endpoint was not started here
            self._remembered.add(key)
            # Imported lazily: needed rarely, and not by a command that only lists.
            from vllm_console.fleet.startup_progress import remember_times, times_store
            from vllm_launchers.launch.earlier_starts import remember_start, report_store

            folder = record_folder(self._state, record)
            remember_start(report_store(self._state), folder, record)
            remember_times(times_store(self._state), folder, record)

    def enter(self, record: ServerRecord) -> ServerRecord:
        """Store all facts of a record that is about to be restarted; return the record."""
        if not self.read_only:
            self._write([(record, None)], [])
        return record

    def enter_last(self, record: ServerRecord, *, may_be_lost: bool) -> None:
        """Store all facts of a record that is about to be deleted.

        Raises:
            OperationError: they can't be stored, and they may not be lost.
        """
        from vllm_console.runs.store import RunStoreError

        store = self.open()
        try:
            store.enter(list(self._heads(record, None)))
        except RunStoreError as error:
            if may_be_lost:
                return
            raise OperationError(
                f"{record.name} was not removed, because the end of its last run can't be recorded: {error} "
                f"'vllm-console remove {record.name} --purge' removes it nevertheless"
            ) from error
        self._seen[record.name], self._trouble = _stamp(record), store.notice

    def judge_past(self, records: Sequence[ServerRecord]) -> str:
        """Store findings that were open while no console was; return what went wrong or is not allowed, if anything."""
        from vllm_console.fleet.backfill import judge_past
        from vllm_console.runs.store import RunName, RunStoreError

        store, now = self.open(), time.time()
        try:
            for record in records:
                known = {run.key: run for run in store.runs(record.name)}
                folder = record_folder(self._state, record)
                for index, generation in enumerate(record.generations):
                    key, until = run_key(record, generation), generation.ended_at or now
                    judged = known[key].judged_until if key in known else None
                    since = max(generation.ready_at or until, judged or 0.0)
                    if until - since < (PAST_SECONDS if generation.ended_at is None else 1.0):
                        continue
                    if self.read_only:
                        return _NOT_JUDGED
                    found = judge_past(folder, record, index, since, until)
                    store.note_findings(RunName(key, record.name, generation.number), found, judged_until=until)
        except (HistoryError, RunStoreError) as error:
            return str(error)
        return store.notice

    def open(self) -> RunStore:
        """The store, for reading."""
        from vllm_console.runs.store import FILE_NAME, RunStore

        return RunStore(self._state / FILE_NAME, read_only=self.read_only)

    def name(self, record: ServerRecord) -> RunName:
        """The name of a server's current run in the store."""
        from vllm_console.runs.store import RunName

        return RunName(run_key(record, record.current), record.name, record.current.number)

    def catch_up(self) -> None:
        """Make the next update also store events that no console saw."""
        self._since, self._waits = 0.0, False

    def _new(self, record: ServerRecord) -> bool:
        current = record.current
        newest = max(current.started_at, current.ready_at or 0.0, current.ended_at or 0.0)
        return newest >= self._since and self._seen.get(record.name) != _stamp(record)

    def _holds(self, record: ServerRecord, view: ServerView) -> bool:
        """Whether to note a server's findings now: they changed, or a minute has passed."""
        now = time.time()
        found, last = _holding(view, now), self._held.get(record.name)
        if last is None or last.run.key != run_key(record, record.current) or last.spans.keys() != found.keys():
            return bool(found) or (last is not None and bool(last.spans))
        self._held[record.name] = replace(last, spans=found)
        return bool(found) and now - last.at >= CONDITIONS_EVERY_SECONDS

    def _write(
        self, due: Sequence[tuple[ServerRecord, ServerView | None]], holding: Sequence[tuple[ServerRecord, ServerView]]
    ) -> None:
        from vllm_console.runs.store import RunStoreError

        store, now = self.open(), time.time()
        self._tried_at = time.monotonic()
        try:
            if due:
                store.enter([head for record, view in due for head in self._heads(record, view)])
            self._seen.update((record.name, _stamp(record)) for record, _ in due)
            for record, view in holding:
                held = _Held(self.name(record), now, _holding(view, now))
                last = self._held.get(record.name)
                if last is not None and (ended := last.ended(held)):
                    store.note_findings(last.run, ended)
                if held.spans:
                    store.note_findings(held.run, held.spans)
                self._held[record.name] = held
            self._trouble = store.notice
        except RunStoreError as error:
            self._trouble = str(error)

    def _heads(self, record: ServerRecord, view: ServerView | None) -> Iterable[RunHead]:
        """The current run, the previous one (its end may have been missed), and at the first update all others."""
        first = 0 if record.name not in self._seen else -2
        for generation in record.generations[first:-1]:
            yield _head(record, generation)
        yield self._present(record, view)

    def _present(self, record: ServerRecord, view: ServerView | None) -> RunHead:
        from vllm_console.logs.startup import watched
        from vllm_launchers.launch.earlier_starts import start_of_log
        from vllm_launchers.plan.budget.engine_report import report_figures

        head, current = _head(record, record.current), record.current
        cause = str(view.diagnosis.cause) if view is not None and view.diagnosis is not None else ""
        until = current.ready_at or current.ended_at
        if until is None:
            return replace(head, attempts=record.attempt, cause=cause)
        lines = start_of_log(record_folder(self._state, record) / LOG, record)
        first = current.warm_up.at if current.warm_up is not None else None
        watch = watched(lines, current.started_at, first)
        found = watch.stages(until, current.ready_at, current.ready_at is None) if lines else ()
        return replace(
            head,
            attempts=record.attempt,
            cause=cause,
            stages=tuple((stage.name, stage.seconds, plain(stage.detail)) for stage in found),
            startup=to_builtins(watch.facts.facts),
            report=report_figures(watch.memory.report),
        )


def _stamp(record: ServerRecord) -> Seen:
    current = record.current
    return (current.number, record.attempt, current.ready_at, current.ended_at, record.state.alive)


def _holding(view: ServerView, now: float) -> dict[str, Sequence[Span]]:
    """When its open findings held, by code."""
    if not view.findings:
        return {}
    from vllm_console.diagnosis.finding import OF_THE_NEXT_START

    found = (finding for finding in view.findings if finding.code != OF_THE_NEXT_START)
    return {finding.code: finding.spans(now) for finding in found if finding.severity != "good"}


def _head(record: ServerRecord, generation: Generation) -> RunHead:
    """The run of one of a record's generations."""
    from vllm_console.runs.store import RunHead

    details: Details = unpack(generation.spec.details)
    engine, end = details.engine, generation.exit
    ended = {"code": end.code, "signal": end.signal, "requested": end.requested} if end is not None else {}
    return RunHead(
        key=run_key(record, generation),
        server=record.name,
        generation=generation.number,
        started_at=generation.started_at,
        preset=details.preset,
        model=details.model,
        engine=str(engine.kind) if engine is not None else "",
        version=engine.version or "" if engine is not None else "",
        build=engine.build or "" if engine is not None else "",
        gpus=details.gpus,
        recorded_host=details.recorded_host or "",
        gpu_kind=details.gpu_kind,
        flags=dict(details.flags),
        objectives=asdict(details.objectives) if details.objectives is not None else {},
        ready_at=generation.ready_at,
        ended_at=generation.ended_at,
        ended={**ended, "reason": redact(plain(end.reason))} if end is not None else {},
    )


class RunHistory:
    """Lists and compares runs: the part of the fleet that commands and screens use for what ran earlier.

    ``snapshot`` takes a fleet snapshot, which stores new events.
    """

    def __init__(
        self,
        state: Path,
        access: ServerAccess,
        recorder: RunRecorder,
        records: AllRecords,
        snapshot: Callable[[], FleetSnapshot],
    ) -> None:
        self._state, self._access, self._recorder = state, access, recorder
        self._records, self._snapshot = records, snapshot

    @cached_property
    def removed(self) -> RemovedServers:
        """Histories of removed servers."""
        # Imported lazily: most commands remove and replay nothing.
        from vllm_console.fleet.removed import RemovedServers

        return RemovedServers(self._state)

    def used_presets(self) -> Sequence[str]:
        """The presets that ran, most recently used first; reads only the store.

        Raises:
            OperationError: the store cannot be read.
        """
        return list(dict.fromkeys(run.preset for run in self._recorder.open().runs(None) if run.preset))

    def used_models(self) -> Mapping[str, float]:
        """When each model was last started (Unix seconds), as far as runs are kept; reads only the store.

        Raises:
            OperationError: the store cannot be read.
        """
        found: dict[str, float] = {}
        for run in self._recorder.open().runs(None):
            if run.model:
                found[run.model] = max(run.started_at, found.get(run.model, 0.0))
        return found

    def runs(self, name: str | None = None) -> tuple[Sequence[Run], Sequence[str]]:
        """The newest runs of one server or of all, newest first; and problems with the store, if any.

        Raises:
            OperationError: the store cannot be read.
            NotFoundError: no run of that server is recorded.
        """
        store, problems = self._store()
        found = self._filled(store.runs(name))
        if name is not None and not found:
            raise NotFoundError(f"no runs of a server named '{plain(name)}'; see 'vllm-console runs'")
        self._prune_removed()
        marked = self.removed.marked(found, self._records.read()[0])
        return marked, [*problems, *filter(None, [store.notice])]

    def has_others(self, server: str, shown: Collection[int]) -> bool:
        """Whether runs of a server other than those with these numbers are stored; cheap enough to call often.

        Raises:
            OperationError: the store cannot be read.
        """
        return any(run.id not in shown for run in self._recorder.open().runs(server, most=len(shown) + 1))

    def finished(self, word: str, at: float | None = None) -> Run:
        """The ended run named by an argument, as for `compare`; ``NAME`` is its newest, or the one at the moment ``at``
        (Unix seconds).

        Raises:
            OperationError: the store cannot be read, or that run has not ended.
            NotFoundError: there is no such run.
            UsageError: the argument names no run.
        """
        store, _ = self._store()
        named = _find(store, word)
        if named.server != word:
            (run,) = self._filled([named])
            return _ended(run)
        runs = self._filled(store.runs(word, most=_MANY))
        found = next((run for run in runs if run.ended_at is not None and (at is None or _covers(run, at))), None)
        if found is not None:
            return found
        if at is None:
            return _ended(runs[0])
        raise NotFoundError(f"no run of {plain(word)} at that time has ended; see 'vllm-console runs {plain(word)}'")

    def run(self, number: int) -> tuple[Run, PastRun] | None:
        """A run by its number, and its events. Raises OperationError if the store cannot be read."""
        from vllm_console.runs.store import PastRun

        store = self._recorder.open()
        if (run := store.run(number)) is None:
            return None
        (run,) = self._filled([run])
        return run, PastRun.of(run, store.findings(number))

    def find(self, word: str) -> Run:
        """The run named by ``word``, as for `compare`; ``NAME`` is its newest.

        Raises:
            OperationError: the store cannot be read.
            NotFoundError: there is no such run.
            UsageError: the word names no run.
        """
        store, _ = self._store()
        (run,) = self._filled([_find(store, word)])
        return run

    def keep_measurement(self, word: str, found: Measurement) -> str:
        """Keep a client's measurement with the run named by ``word``; return the run's name.

        Raises:
            OperationError: the store cannot be written.
            NotFoundError: there is no such run.
            RefusedError: this fleet is read-only.
            UsageError: the word names no run.
        """
        from vllm_console.runs.store import RunName

        self._access.refuse_read_only()
        store, _ = self._store()
        run = _find(store, word)
        store.add_measurement(RunName(run.key, run.server, run.generation), found)
        return run.name

    def compare(self, before: str, after: str | None = None) -> Comparison:
        """Compare two runs: numbers, ``NAME@GENERATION``, or ``NAME`` for its newest; with one name, its newest run and
        the previous one that served.

        Raises:
            OperationError: the store cannot be read.
            NothingToCompareError: a run has no earlier one to compare with.
            NotFoundError: there is no such run.
            UsageError: an argument names no run, or both are the same.
        """
        store, _ = self._store()
        if after is None:
            return self._compared(store, *_last_two(store, before))
        one, other = _find(store, before), _find(store, after)
        if one.id == other.id:
            raise UsageError(f"{plain(before)} and {plain(after)} are the same run ({one.id}): name two different runs")
        return self._compared(store, one, other)

    def last_change(self, name: str) -> Comparison | None:
        """The result of `compare` for a server, from what is stored so far; None if there is nothing to compare.

        Cheap enough to call often: samples no server and computes no findings.

        Raises:
            OperationError: the store cannot be read.
        """
        store = self._recorder.open()
        try:
            return self._compared(store, *_last_two(store, name))
        except (NotFoundError, NothingToCompareError):
            return None

    def compare_again(self, before: int, after: int) -> Comparison:
        """Compare two runs by their numbers, from what is stored so far; cheap enough to call often.

        Raises:
            OperationError: the store cannot be read.
            NotFoundError: there is no such run.
        """
        store = self._recorder.open()
        return self._compared(store, _find(store, str(before)), _find(store, str(after)))

    def judge_past(self, name: str | None = None) -> str:
        """Store which findings were open while no console was, for one server or all, and delete expired histories.

        Reads up to a day of history. Returns what went wrong, if anything; a read-only fleet stores nothing.
        """
        if self._recorder.read_only:
            return ""
        self._prune_removed()
        return self._recorder.judge_past([record for record in self._records.read()[0] if name in (None, record.name)])

    def outcome(self, found: Comparison) -> KeptPrediction | None:
        """The prediction for the restart between two compared runs, with its outcome; None if there is none."""
        from vllm_console.fleet.predictions import outcome

        before, after = found.before.run, found.after.run
        if before.server != after.server or (record := self._access.record(after.server)) is None:
            return None
        return outcome(self._state, record, self._recorder, before, after)

    def _prune_removed(self) -> None:
        if not self._recorder.read_only:
            self.removed.prune()

    def _compared(self, store: RunStore, before: Run, after: Run, *passed: Run) -> Comparison:
        from vllm_console.runs.compare import MOST_WINDOWS_SEARCHED, WARM_UP, Recorded, compare

        def recorded(run: Run, windows: Sequence[RunWindow]) -> Recorded:
            return Recorded(run, windows, store.warm_up(run.id, WARM_UP))

        other, one = self._filled([after, before])
        long = _longest(store, one, other)
        found = compare(
            recorded(one, store.windows(one.id)),
            recorded(other, store.first_windows(other.id, MOST_WINDOWS_SEARCHED + WARM_UP)),
            recorded(long, store.windows(long.id)) if long else None,
        )
        return replace(found, skipped=passed)

    def _filled(self, found: Sequence[Run]) -> Sequence[Run]:
        """Runs, completed from their servers' records for a read-only fleet, which may not store these."""
        from vllm_console.runs.store import changes

        records = self._records.read()[0]
        if not self._recorder.read_only:
            return self._without_lost(found, records)
        heads = {run_key(record, one): _head(record, one) for record in records
                 for one in record.generations}  # fmt: skip
        filled = [_with_head(run, heads.get(run.key)) for run in self._without_lost(found, records)]
        for index, run in enumerate(filled):
            earlier = next((one for one in filled[index + 1 :] if one.server == run.server and one.flags), None)
            if run.before is None and earlier is not None:
                filled[index] = replace(run, before=earlier.id, changed=changes(earlier.flags, run.flags))
        return filled

    def _without_lost(self, found: Sequence[Run], records: Sequence[ServerRecord]) -> list[Run]:
        """Runs; one whose end was lost with its server's record ended when it was last seen, in an unknown way.

        ``remove --purge`` on a full disk, or deleting a server's folder by hand, can lose it.
        """
        known = {run_key(record, one) for record in records for one in record.generations}
        readable = {record.name for record in records}
        return [
            replace(run, ended_at=_last_seen(run))
            if run.ended_at is None and run.key not in known and (run.server in readable or not self._has(run.server))
            else run
            for run in found
        ]

    def _has(self, name: str) -> bool:
        """Whether a server or an endpoint has this name now, even if its record can't be read."""
        places = (folders.servers_folder(self._state), self._state / ATTACHED)
        return any(folders.has_record(place / name) for place in places)

    def _store(self) -> tuple[RunStore, Sequence[str]]:
        """The store, updated from all the servers' records."""
        self._recorder.catch_up()
        problems = [text for text in self._snapshot().notices if "runs.sqlite" in text]
        if not problems and (trouble := self._recorder.judge_past(self._records.read()[0])):
            problems.append(trouble)
        return self._recorder.open(), problems


def _find(store: RunStore, word: str) -> Run:
    if word.isdecimal() and len(word) < 16:
        if (run := store.run(int(word))) is not None:
            return run
        raise NotFoundError(f"there is no run {word}; see 'vllm-console runs'")
    name, at, number = word.rpartition("@")
    if at and not (number.isdecimal() and len(number) < 16):
        raise UsageError(f"{plain(word)}: expected a run's number, NAME or NAME@RUN")
    for run in store.runs(name if at else word, most=_MANY if at else 1):
        if not at or run.generation == int(number):
            return run
    raise NotFoundError(f"no run '{plain(word)}' is known; see 'vllm-console runs'")


def _ended(run: Run) -> Run:
    """The run. Raises `OperationError` if it has not ended."""
    if run.ended_at is None:
        raise OperationError(f"{plain(run.name)} has not ended: the console shows it, and its past with --at TIME")
    return run


def _last_seen(run: Run) -> float:
    """When a run is last known to have been alive (Unix seconds)."""
    return max(run.started_at, run.ready_at or 0.0, run.last_at or 0.0)


def _covers(run: Run, at: float) -> bool:
    return run.started_at <= at and (run.ended_at is None or at <= run.ended_at)


def _last_two(store: RunStore, word: str) -> tuple[Run, ...]:
    """A run's predecessor that served, the run itself, and the runs skipped as too short to compare."""
    from vllm_console.runs.compare import FEWEST, WARM_UP

    newest = _find(store, word)
    for most in (_FEW_EARLIER, 1000):
        runs = store.runs(newest.server, most=most)
        place = next((index for index, run in enumerate(runs) if run.id == newest.id), len(runs))
        earlier = [run for run in runs[place + 1 :] if run.served]
        for index, run in enumerate(earlier):
            if run.windows >= WARM_UP + FEWEST:
                return (run, newest, *earlier[:index])
        if earlier:
            return earlier[0], newest
    raise NothingToCompareError(
        f"{newest.name} has no earlier run that served: nothing to compare with. Restart it with a changed flag, or "
        "name two runs"
    )


def _longest(store: RunStore, before: Run, after: Run) -> Run | None:
    """The longest of the newest earlier runs with the same model, engine and GPUs, to estimate drift."""
    here = (after.model, after.engine, after.gpu_kind)
    runs = store.runs(after.server, most=_FEW_EARLIER)
    others = [run for run in runs if run.id != before.id and run.id < after.id]  # a later one would change the verdict
    alike = [run for run in others if (run.model, run.engine, run.gpu_kind) == here]
    return max(alike, key=lambda run: run.windows, default=None)


def _with_head(run: Run, head: RunHead | None) -> Run:
    """A run, completed from its server's record."""
    from vllm_console.runs.store import RunHead

    if head is None:
        return run
    known = {name: getattr(head, name) for name in RunHead.__struct_fields__ if not getattr(run, name)}
    return replace(run, **known)

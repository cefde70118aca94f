"""The ledger as the fleet keeps and reads it: what each run was, entered as it is seen, and two runs compared."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_console.fleet.api import FleetError, NotFoundError, UsageError
from vllm_console.fleet.details import Details, unpack
from vllm_console.fleet.starts import Starts
from vllm_console.text import plain
from vllm_launchers.keeper import client
from vllm_launchers.keeper.records import Generation, ServerRecord
from vllm_launchers.secrets import redact

if TYPE_CHECKING:
    from vllm_console.fleet.model import FleetSnapshot, ServerView
    from vllm_console.fleet.records import Records
    from vllm_console.telemetry.compare import Recorded
    from vllm_console.telemetry.comparison import Comparison
    from vllm_console.telemetry.ledger import Ledger, Run, RunHead

RETRY_SECONDS = 30.0
CONDITIONS_EVERY_SECONDS = 60.0
PAST_SECONDS = 120.0
"""From so much unjudged history on a look at the runs judges it."""

_NOT_JUDGED = "read-only: what held while no console was open is not judged; a console that may write does that"
_FEW_EARLIER = 12
"""So many runs are looked at first for one to compare with."""

Seen = tuple[object, ...]


def run_key(record: ServerRecord, generation: Generation) -> str:
    """What tells a run from all others: the key that its recorder was given."""
    words = generation.spec.companion
    if "--run" in words[:-1]:
        return words[words.index("--run") + 1]
    return f"{record.name}@{generation.number}/{record.created_at:.0f}"


class RunBook:
    """Enters runs into the ledger as they begin, become ready and end.

    ``since`` (Unix seconds): what happened earlier has been entered already, or waits for a console to be entered.
    """

    def __init__(self, state: Path, since: float, *, read_only: bool) -> None:
        self.read_only = read_only
        self._state, self._since = state, since
        self._starts = Starts(state, since)
        self._seen: dict[str, Seen] = {}
        self._held_at: dict[str, float] = {}
        self._trouble = ""
        self._tried_at = 0.0

    def look(self, records: Sequence[ServerRecord], views: Sequence[ServerView]) -> list[str]:
        """Enter what is new of these records and their views; what went wrong, one sentence each."""
        if self.read_only:
            return []
        self._starts.look(records)
        due = [pair for pair in zip(records, views, strict=True) if self._new(pair[0])]
        holding = [] if self._since else [pair for pair in zip(records, views, strict=True) if self._holds(*pair)]
        if (due or holding) and time.monotonic() - self._tried_at >= (RETRY_SECONDS if self._trouble else 0):
            self._write(due, holding)
        return [self._trouble] if self._trouble else []

    def enter(self, record: ServerRecord) -> ServerRecord:
        """Enter all that is known of a record, which may be about to go or to begin anew; gives it back."""
        if not self.read_only:
            self._write([(record, None)], [])
        return record

    def judge_past(self, records: Sequence[ServerRecord]) -> str:
        """Enter which conditions held while no console was open; what went wrong or may not be, if anything is."""
        from vllm_console.fleet.afterwards import judge_past
        from vllm_console.telemetry.history_file import HistoryError
        from vllm_console.telemetry.ledger_file import LedgerError
        from vllm_console.telemetry.ledger_log import RunName

        ledger, now = self.open(), time.time()
        try:
            for record in records:
                known = {run.key: run for run in ledger.runs(record.name)}
                folder = client.folder(self._state, record.name)
                for index, generation in enumerate(record.generations):
                    key, until = run_key(record, generation), generation.ended_at or now
                    judged = known[key].judged_until if key in known else None
                    since = max(generation.ready_at or until, judged or 0.0)
                    if until - since < (PAST_SECONDS if generation.ended_at is None else 1.0):
                        continue
                    if self.read_only:
                        return _NOT_JUDGED
                    found = judge_past(folder, record, index, since, until)
                    ledger.note_past(RunName(key, record.name, generation.number), found, since, until)
        except (HistoryError, LedgerError) as error:
            return str(error)
        return ledger.notice

    def open(self) -> Ledger:
        """The ledger, to be read."""
        from vllm_console.telemetry.ledger import Ledger
        from vllm_console.telemetry.ledger_file import FILE_NAME

        return Ledger(self._state / FILE_NAME, read_only=self.read_only)

    def catch_up(self) -> None:
        """At the next look enter also what no console saw."""
        self._since = 0.0

    def _new(self, record: ServerRecord) -> bool:
        current = record.current
        newest = max(current.started_at, current.ready_at or 0.0, current.ended_at or 0.0)
        return newest >= self._since and self._seen.get(record.name) != _stamp(record)

    def _holds(self, record: ServerRecord, view: ServerView) -> bool:
        """Whether it is time to note the conditions of a server."""
        held_at = self._held_at.get(run_key(record, record.current), 0.0)
        return bool(_codes(view)) and time.time() - held_at >= CONDITIONS_EVERY_SECONDS

    def _write(
        self,
        due: Sequence[tuple[ServerRecord, ServerView | None]],
        holding: Sequence[tuple[ServerRecord, ServerView]],
    ) -> None:
        from vllm_console.telemetry.ledger_file import LedgerError
        from vllm_console.telemetry.ledger_log import RunName

        ledger, now = self.open(), time.time()
        self._tried_at = time.monotonic()
        try:
            if due:
                ledger.enter([head for record, view in due for head in self._heads(record, view)])
            self._seen.update((record.name, _stamp(record)) for record, _ in due)
            for record, view in holding:
                key = run_key(record, record.current)
                ledger.note_conditions(RunName(key, record.name, record.current.number), now, _codes(view))
                self._held_at[key] = now
            self._trouble = ledger.notice
        except LedgerError as error:
            self._trouble = str(error)

    def _heads(self, record: ServerRecord, view: ServerView | None) -> Iterable[RunHead]:
        """The present run, the one before, whose end may have passed unseen, and at the first look all before."""
        first = 0 if record.name not in self._seen else -2
        for generation in record.generations[first:-1]:
            yield _head(record, generation)
        yield self._present(record, view)

    def _present(self, record: ServerRecord, view: ServerView | None) -> RunHead:
        from vllm_console.fleet.remembering import start_of_log
        from vllm_console.telemetry.startup import stages
        from vllm_launchers.plan.budget.report import read_report, report_figures

        head, current = _head(record, record.current), record.current
        cause = str(view.diagnosis.cause) if view is not None and view.diagnosis is not None else ""
        until = current.ready_at or current.ended_at
        if until is None:
            return replace(head, attempts=record.attempt, cause=cause)
        lines = start_of_log(client.folder(self._state, record.name) / "server.log", record)
        found = stages(lines, current.started_at, until, current.ready_at, current.ready_at is None) if lines else ()
        return replace(
            head,
            attempts=record.attempt,
            cause=cause,
            stages=tuple((stage.name, stage.seconds, plain(stage.detail)) for stage in found),
            report=report_figures(read_report(lines)),
        )


def _stamp(record: ServerRecord) -> Seen:
    current = record.current
    return (current.number, record.attempt, current.ready_at, current.ended_at, record.state.alive)


def _codes(view: ServerView) -> list[str]:
    return [condition.code for condition in view.conditions if condition.severity != "good"]


def _head(record: ServerRecord, generation: Generation) -> RunHead:
    """What the record says of one of its generations."""
    from msgspec.structs import asdict

    from vllm_console.telemetry.ledger import RunHead

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
        gpu_kind=details.gpu_kind,
        flags=dict(details.flags),
        objectives=asdict(details.objectives) if details.objectives is not None else {},
        ready_at=generation.ready_at,
        ended_at=generation.ended_at,
        ended={**ended, "reason": redact(plain(end.reason))} if end is not None else {},
    )


class RunsVerbs:
    """The fleet's verbs on runs."""

    _runs: RunBook
    _records: Records

    def snapshot(self, selected: str | None = None) -> FleetSnapshot:
        """Look once at everything."""
        raise NotImplementedError

    def runs(self, name: str | None = None) -> tuple[Sequence[Run], Sequence[str]]:
        """The newest runs, newest first, of one server or of all; and what is wrong with the ledger, if anything is.

        Raises:
            FleetError: the ledger cannot be read.
            NotFoundError: no run of that server is known.
        """
        ledger, problems = self._ledger()
        with _read():
            found = self._filled(ledger.runs(name))
        if name is not None and not found:
            raise NotFoundError(f"no run of a server called '{plain(name)}' is known; see 'vllm-console runs'")
        return found, [*problems, *filter(None, [ledger.notice])]

    def compare(self, before: str, after: str | None = None) -> Comparison:
        """Two runs side by side: numbers, ``NAME@GENERATION``, or ``NAME`` for its newest; with one name its newest run
        and the one before it that served.

        Raises:
            FleetError: the ledger cannot be read, or there is nothing to compare.
            NotFoundError: there is no such run.
            UsageError: a word names no run, or both are the same.
        """
        ledger, _ = self._ledger()
        with _read():
            if after is None:
                return self._compared(ledger, *_last_two(ledger, before))
            one, other = _find(ledger, before), _find(ledger, after)
            if one.id == other.id:
                raise UsageError(f"{plain(before)} and {plain(after)} are the same run ({one.id}): name two")
            return self._compared(ledger, one, other)

    def last_change(self, name: str) -> Comparison | None:
        """What `compare` says of a server, from what the ledger has at the moment; None where there is nothing to say.

        Quick enough to be asked again and again: no server is looked at and nothing is judged.

        Raises:
            FleetError: the ledger cannot be read.
        """
        ledger = self._runs.open()
        with _read():
            try:
                return self._compared(ledger, *_last_two(ledger, name))
            except FleetError:
                return None

    def judge_past(self, name: str | None = None) -> str:
        """Enter in the ledger which conditions held while no console was open, of one server or of all.

        Reads up to a day of history. What went wrong, if anything did; a read-only fleet enters nothing.
        """
        if self._runs.read_only:
            return ""
        return self._runs.judge_past([record for record in self._records.read()[0] if name in (None, record.name)])

    def _compared(self, ledger: Ledger, before: Run, after: Run, *passed: Run) -> Comparison:
        from vllm_console.telemetry.compare import compare

        other, one = self._filled([after, before])
        long = _longest(ledger, one, other)
        found = compare(_recorded(ledger, one), _recorded(ledger, other), _recorded(ledger, long) if long else None)
        return replace(found, notes=(_passed_over(passed), *found.notes)) if passed else found

    def _filled(self, found: Sequence[Run]) -> Sequence[Run]:
        """Runs with what their servers' records know, where a read-only fleet may not enter that."""
        from vllm_console.telemetry.ledger import changes

        if not self._runs.read_only:
            return found
        heads = {run_key(record, one): _head(record, one) for record in self._records.read()[0]
                 for one in record.generations}  # fmt: skip
        filled = [_with_head(run, heads.get(run.key)) for run in found]
        for index, run in enumerate(filled):
            earlier = next((one for one in filled[index + 1 :] if one.server == run.server and one.flags), None)
            if run.before is None and earlier is not None:
                filled[index] = replace(run, before=earlier.id, changed=changes(earlier.flags, run.flags))
        return filled

    def _ledger(self) -> tuple[Ledger, Sequence[str]]:
        """The ledger with everything in it that the servers' records can tell."""
        self._runs.catch_up()
        problems = [text for text in self.snapshot().notices if "runs.sqlite" in text]
        if not problems and (trouble := self._runs.judge_past(self._records.read()[0])):
            problems.append(trouble)
        return self._runs.open(), problems


@contextlib.contextmanager
def _read() -> Iterator[None]:
    """What the ledger refuses, as the fleet's own errors."""
    from vllm_console.telemetry.ledger_file import LedgerError

    try:
        yield
    except LedgerError as error:
        raise FleetError(str(error)) from error


def _find(ledger: Ledger, word: str) -> Run:
    """The run that a word names."""
    if word.isdecimal() and len(word) < 16:
        if (run := ledger.run(int(word))) is not None:
            return run
        raise NotFoundError(f"there is no run {word}; see 'vllm-console runs'")
    name, at, number = word.rpartition("@")
    if at and not (number.isdecimal() and len(number) < 16):
        raise UsageError(f"{plain(word)}: expected a run's number, NAME or NAME@GENERATION")
    for run in ledger.runs(name if at else word, most=5000 if at else 1):
        if not at or run.generation == int(number):
            return run
    raise NotFoundError(f"no run '{plain(word)}' is known; see 'vllm-console runs'")


def _last_two(ledger: Ledger, word: str) -> tuple[Run, ...]:
    """A run's predecessor that served, that run, and what was passed over: runs too short for a comparison."""
    from vllm_console.telemetry.compare import FEWEST, WARM_UP

    newest = _find(ledger, word)
    for most in (_FEW_EARLIER, 1000):
        runs = ledger.runs(newest.server, most=most)
        earlier = [run for run in runs if (run.started_at, run.id) < (newest.started_at, newest.id) and run.served]
        for index, run in enumerate(earlier):
            if run.windows >= WARM_UP + FEWEST:
                return (run, newest, *earlier[:index])
        if earlier:
            return earlier[0], newest
    raise FleetError(
        f"{newest.name} has no earlier run that served: there is nothing to compare with. Restart it with a changed "
        "flag, or name two runs"
    )


def _longest(ledger: Ledger, before: Run, after: Run) -> Run | None:
    """The longest of the newest other runs that served like these two, to see how such a server's figures drift."""
    here = (after.model, after.engine, after.gpu_kind)
    others = [run for run in ledger.runs(after.server, most=_FEW_EARLIER) if run.id not in (before.id, after.id)]
    alike = [run for run in others if (run.model, run.engine, run.gpu_kind) == here]
    return max(alike, key=lambda run: run.windows, default=None)


def _passed_over(runs: Sequence[Run]) -> str:
    """Which runs lie between the two."""
    names = ", ".join(run.name for run in runs[:3]) + (", …" if len(runs) > 3 else "")
    return f"{names} had too little traffic to compare with, and {'is' if len(runs) == 1 else 'are'} passed over."


def _with_head(run: Run, head: RunHead | None) -> Run:
    """A run with what its server's record knows and the ledger does not."""
    from vllm_console.telemetry.ledger import RunHead

    if head is None:
        return run
    known = {name: getattr(head, name) for name in RunHead.__dataclass_fields__ if not getattr(run, name)}
    return replace(run, **known)


def _recorded(ledger: Ledger, run: Run) -> Recorded:
    from vllm_console.telemetry.compare import WARM_UP, Recorded

    return Recorded(run, ledger.windows(run.id), ledger.warm_up(run.id, WARM_UP))

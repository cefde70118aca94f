"""The ledger of runs: every generation of every server, what it ran with, how it started, served and ended.

It outlives the servers' own records. What a run was (its head) is entered by the fleet, its minutes by the recorder.
Fields that are not known yet are left out and filled in by whoever learns them.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec

from vllm_console.telemetry.ledger_file import LedgerDamagedError, LedgerMissingError, read, set_aside, write
from vllm_console.telemetry.ledger_log import RunName, run_id, thin
from vllm_console.telemetry.run_windows import FIGURES, RunWindow

_Answer = TypeVar("_Answer")

KEY_FIGURES = ("requests_per_second", "ttft_p99", "itl_p99", "e2e_p99", "generation_tokens_per_second")
"""What a list of runs shows of each: medians over its newest windows."""

MOST_WINDOWS_READ = 240
_TOGETHER_SECONDS = 120.0
"""Two reports of a condition no further apart are one."""

Flags = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RunHead:
    """What is known of a run besides its minutes. Times are Unix seconds; None and empty are 'not known'.

    ``stages`` are name, seconds and detail of its way up; ``report`` the engine's own memory figures; ``ended`` how its
    process ended (``code``, ``signal``, ``requested``, ``reason``) and ``cause`` the name of the failure.
    """

    key: str
    server: str
    generation: int
    started_at: float
    preset: str = ""
    model: str = ""
    engine: str = ""
    version: str = ""
    build: str = ""
    gpus: tuple[int, ...] = ()
    gpu_kind: str = ""
    flags: Flags = field(default_factory=dict)
    objectives: Mapping[str, float] = field(default_factory=dict)
    attempts: int = 0
    ready_at: float | None = None
    ended_at: float | None = None
    stages: tuple[tuple[str, float | None, str], ...] = ()
    report: Mapping[str, float] = field(default_factory=dict)
    ended: Mapping[str, Any] = field(default_factory=dict)
    cause: str = ""


@dataclass(frozen=True, slots=True)
class FlagChange:
    """One flag of a run that was otherwise in the run before. None is 'not set'."""

    flag: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class Run(RunHead):
    """A run as the ledger has it. ``changed`` is its difference to the run of that server ``before`` (its number, None
    for a first one), ``windows`` how many there are of it, ``last_at`` the end of the newest of them, ``figures`` its
    `KEY_FIGURES`, ``conditions`` those that were seen to hold, each with its minutes.
    """

    id: int = 0
    before: int | None = None
    changed: tuple[FlagChange, ...] = ()
    windows: int = 0
    last_at: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    conditions: Mapping[str, float] = field(default_factory=dict)
    judged_until: float | None = None
    """Up to when (Unix seconds) conditions were judged afterwards, from its history: without GPUs, and without asking
    a silent engine for a token."""

    @property
    def name(self) -> str:
        """``NAME@GENERATION``."""
        return f"{self.server}@{self.generation}"

    @property
    def served(self) -> bool:
        """Whether it ever answered."""
        return self.ready_at is not None or self.windows > 0


class Ledger:
    """The ledger in one file. Safe to use from several processes at once.

    Every method raises a `LedgerError` that says why when the file cannot be used; what was in it before stays.
    ``notice`` says when a damaged file was set aside.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.notice = ""
        self._read_only = read_only

    def enter(self, heads: Sequence[RunHead]) -> None:
        """Enter runs, or add what became known of them: what a head does not know stays as it was."""

        def act(connection: sqlite3.Connection) -> None:
            for head in heads:
                _enter(connection, head)
            thin(connection)

        self.notice = write(self.path, act) or self.notice

    def note_conditions(self, run: RunName, at: float, codes: Sequence[str]) -> None:
        """Note that conditions hold at ``at`` (Unix seconds); reports up to two minutes apart are one stretch."""

        def act(connection: sqlite3.Connection) -> None:
            number = run_id(connection, run, at)
            for code in codes:
                # Clocks of consoles and the order of their writes differ: one may tell of slightly before the other.
                known = connection.execute(
                    "UPDATE conditions SET until = max(until, ?)"
                    " WHERE run = ? AND code = ? AND since <= ? AND until >= ?",
                    (at, number, code, at + _TOGETHER_SECONDS, at - _TOGETHER_SECONDS),
                )
                if not known.rowcount:
                    connection.execute("INSERT INTO conditions VALUES (?, ?, ?, ?)", (number, code, at, at))

        self.notice = write(self.path, act) or self.notice

    def note_past(
        self, run: RunName, stretches: Mapping[str, Sequence[tuple[float, float]]], since: float, until: float
    ) -> None:
        """Note the stretches (Unix seconds) in which conditions held, judged afterwards from ``since`` to ``until``.

        What is known already is not counted twice.
        """

        def act(connection: sqlite3.Connection) -> None:
            number = run_id(connection, run, since)
            for code, new in stretches.items():
                known = connection.execute(
                    "SELECT since, until FROM conditions WHERE run = ? AND code = ?", (number, code)
                ).fetchall()
                connection.execute("DELETE FROM conditions WHERE run = ? AND code = ?", (number, code))
                rows = [(number, code, *stretch) for stretch in _together([*known, *new])]
                connection.executemany("INSERT INTO conditions VALUES (?, ?, ?, ?)", rows)
            (text,) = connection.execute("SELECT document FROM runs WHERE id = ?", (number,)).fetchone()
            document = _document(text) | {"judged_until": until}
            connection.execute("UPDATE runs SET document = ? WHERE id = ?", (json.dumps(document), number))

        self.notice = write(self.path, act) or self.notice

    def runs(self, server: str | None = None, most: int = 100) -> list[Run]:
        """The newest runs, newest first; of one server or of all. None is recorded: an empty list."""
        if server is not None and any("\ud800" <= character <= "\udfff" for character in server):
            return []  # bytes that are no text, as a command line may have them: no server is called so
        query = "SELECT id, key, server, generation, started_at, document FROM runs"
        where = " WHERE server = ?" if server is not None else ""
        values = (server,) if server is not None else ()
        order = " ORDER BY started_at DESC, id DESC LIMIT ?"

        def ask(connection: sqlite3.Connection) -> list[Run]:
            rows = connection.execute(f"{query}{where}{order}", (*values, most)).fetchall()
            return [_measured(connection, _run(row)) for row in rows]

        return self._ask(ask, [])

    def run(self, number: int) -> Run | None:
        """The run of that number."""
        query = "SELECT id, key, server, generation, started_at, document FROM runs WHERE id = ?"

        def ask(connection: sqlite3.Connection) -> Run | None:
            row = connection.execute(query, (number,)).fetchone()
            return _measured(connection, _run(row)) if row else None

        return self._ask(ask, None)

    def windows(self, number: int, most: int = MOST_WINDOWS_READ) -> list[RunWindow]:
        """The newest windows of a run, oldest first."""
        return self._ask(lambda connection: _windows(connection, number, most, FIGURES), [])

    def warm_up(self, number: int, count: int) -> float | None:
        """When the first ``count`` windows of a run ended (Unix seconds); None where it has fewer."""
        query = "SELECT at + seconds FROM windows WHERE run = ? ORDER BY at LIMIT 1 OFFSET ?"

        def ask(connection: sqlite3.Connection) -> float | None:
            row = connection.execute(query, (number, count - 1)).fetchone()
            return float(row[0]) if row else None

        return self._ask(ask, None)

    def _ask(self, question: Callable[[sqlite3.Connection], _Answer], nothing: _Answer) -> _Answer:
        try:
            return read(self.path, question)
        except LedgerMissingError:
            return nothing
        except LedgerDamagedError as error:
            if self._read_only:
                raise
            aside = set_aside(self.path)
            if aside is not None:
                self.notice = f"{error} It was moved to {aside.name} and a new one begun."
            return nothing


def _together(stretches: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Stretches that overlap, or are hardly apart, as one."""
    found: list[tuple[float, float]] = []
    for since, until in sorted(stretches):
        if found and since <= found[-1][1] + _TOGETHER_SECONDS:
            found[-1] = found[-1][0], max(found[-1][1], until)
        else:
            found.append((since, until))
    return found


def changes(before: Flags, after: Flags) -> tuple[FlagChange, ...]:
    """The flags that differ, by name; ``1`` and ``True`` do."""
    pairs = ((flag, before.get(flag), after.get(flag)) for flag in sorted({*before, *after}))
    return tuple(
        FlagChange(flag, one, other)
        for flag, one, other in pairs
        if one != other or isinstance(one, bool) != isinstance(other, bool)
    )


_IN_COLUMNS = ("key", "server", "generation", "started_at")
_NOT_STORED = (*_IN_COLUMNS, "id", "windows", "last_at", "figures", "conditions")


def _enter(connection: sqlite3.Connection, head: RunHead) -> None:
    number = run_id(connection, RunName(head.key, head.server, head.generation), head.started_at)
    query = "SELECT started_at, document FROM runs WHERE id = ?"
    began, text = connection.execute(query, (number,)).fetchone()
    document = _document(text)
    fresh = {name: getattr(head, name) for name in RunHead.__dataclass_fields__ if name not in _IN_COLUMNS}
    if head.attempts > document.get("attempts", 0):
        for name in ("ended_at", "ended", "cause"):  # it was started again by itself
            document.pop(name, None)
    document |= {name: value for name, value in fresh.items() if value not in (None, "", (), {}, 0)}
    if "before" not in document and head.flags:
        document |= _since_before(connection, head, number)
    # A restart by itself begins the process anew; the run began with its first.
    connection.execute(
        "UPDATE runs SET started_at = ?, document = ? WHERE id = ?",
        (min(float(began), head.started_at), json.dumps(document), number),
    )


def _since_before(connection: sqlite3.Connection, head: RunHead, number: int) -> dict[str, Any]:
    """The run of that server before, and what differs; kept, because that run may be thinned out one day."""
    rows = connection.execute(
        "SELECT id, document FROM runs WHERE server = ? AND started_at <= ? AND id != ?"
        " ORDER BY started_at DESC, id DESC",
        (head.server, head.started_at, number),
    )
    for other, text in rows:
        flags = _document(text).get("flags")
        if flags:
            different = changes(flags, head.flags)
            return {"before": other, "changed": [[c.flag, c.before, c.after] for c in different]}
    return {"before": None, "changed": []}


def _document(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _run(row: tuple[int, str, str, int, float, str]) -> Run:
    number, key, server, generation, started_at, text = row
    known = {name: value for name, value in _document(text).items() if name in Run.__dataclass_fields__}
    for name in _NOT_STORED:
        known.pop(name, None)
    columns: dict[str, Any] = {
        "key": key,
        "server": server,
        "generation": generation,
        "started_at": started_at,
        "id": number,
    }
    try:
        changed = [dict(zip(("flag", "before", "after"), change, strict=True)) for change in known.get("changed", ())]
        return msgspec.convert({**known, "changed": changed, **columns}, Run)
    except (TypeError, ValueError):  # not as this version writes it, or damaged: what the columns say is left
        return Run(**columns)


def _measured(connection: sqlite3.Connection, run: Run) -> Run:
    """With what its minutes come to."""
    count, last = connection.execute(
        "SELECT count(*), max(at + seconds) FROM windows WHERE run = ?", (run.id,)
    ).fetchone()
    held = connection.execute("SELECT code, sum(until - since) FROM conditions WHERE run = ? GROUP BY code", (run.id,))
    newest = _windows(connection, run.id, MOST_WINDOWS_READ, KEY_FIGURES)
    figures = {}
    for name in KEY_FIGURES:
        values = [window.figures[name] for window in newest if name in window.figures]
        if values:
            figures[name] = median(values)
    minutes = {code: seconds / 60 for code, seconds in held.fetchall()}
    return replace(run, windows=count, last_at=last, figures=figures, conditions=minutes)


def _windows(connection: sqlite3.Connection, run: int, most: int, figures: Sequence[str]) -> list[RunWindow]:
    query = f"SELECT at, seconds, {', '.join(figures)} FROM windows WHERE run = ? ORDER BY at DESC LIMIT ?"
    found = []
    for at, seconds, *values in connection.execute(query, (run, most)):
        known = {name: value for name, value in zip(figures, values, strict=True) if value is not None}
        found.append(RunWindow(at, seconds, known))
    return found[::-1]

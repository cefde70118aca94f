"""The run database: every generation of every server, its launch, start, performance and exit.

It outlives the servers' own records. The fleet stores a run's launch (its head), the recorder its windows. Unknown
fields are left out and filled in later. The file is opened for each operation, because writers (recorders, consoles,
commands) are infrequent and take turns. Committed data survives any disk error.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from vllm_console import sqlite_files
from vllm_console.metrics.quantile import middle
from vllm_console.runs.measurement import Measurement
from vllm_console.runs.windows import FIGURES, RunWindow, by_exact, filled, kept
from vllm_launchers.errors import OperationError
from vllm_launchers.private import locked, own_folder
from vllm_launchers.typed_decoding import convert, decode_json

if TYPE_CHECKING:
    from vllm_launchers.keeper.records import ServerRecord

_Answer = TypeVar("_Answer")

FILE_NAME = "runs.sqlite"
APPLICATION_ID = 0x764C4C72
BUSY_TIMEOUT_SECONDS = 2.0
"""How long to wait for another writer."""

SCHEMA_VERSION = 1
_SCHEMA = (
    "CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, server TEXT NOT NULL,"
    " generation INTEGER NOT NULL, started_at REAL NOT NULL, document TEXT NOT NULL)",
    "CREATE INDEX runs_by_server ON runs (server, started_at)",
    "CREATE TABLE windows (run INTEGER NOT NULL, at REAL NOT NULL, seconds REAL NOT NULL,"
    f" {', '.join(f'{name} REAL' for name in FIGURES)}, PRIMARY KEY (run, at)) WITHOUT ROWID",
    "CREATE TABLE findings (run INTEGER NOT NULL, code TEXT NOT NULL, since REAL NOT NULL, until REAL NOT NULL,"
    " PRIMARY KEY (run, code, since)) WITHOUT ROWID",
    "CREATE TABLE measurements (run INTEGER NOT NULL, at REAL NOT NULL, document TEXT NOT NULL,"
    " PRIMARY KEY (run, at)) WITHOUT ROWID",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
"""Creates a run database in an empty file. Changed columns require a new `SCHEMA_VERSION`."""

KEY_FIGURES = ("generation_tokens_per_second", "ttft_mean", "itl_mean", "e2e_mean")
KEY_QUANTILES = ("ttft_p99", "itl_p99", "e2e_p99")
"""Shown in a list of runs, with the requests that ended per second: medians over a run's newest windows, rates over
those that traffic filled."""

MOST_WINDOWS_READ = 240
_TOGETHER_SECONDS = 120.0
"""Two reports of a finding within this time are merged."""

MOST_WINDOWS = 200_000
"""Maximum windows in total, about 80 MB; beyond that, the oldest runs are thinned."""

FEWEST_KEPT = 240
"""Windows that a thinned run keeps."""

MOST_RUNS = 5000

MOST_PREDICTIONS = 8
"""Maximum number of stored predictions per run."""

MOST_MEASUREMENTS = 20
"""Maximum number per run; the oldest are deleted first."""


Flags = Mapping[str, Any]


class PastRun(msgspec.Struct, frozen=True):
    """A run without figures: its start, flags, changed flags, and the spans in which findings held.

    ``changed`` has name, value before and after; ``findings`` code, since and until (Unix seconds).
    """

    generation: int
    started_at: float
    changed: tuple[tuple[str, Any, Any], ...] = ()
    findings: tuple[tuple[str, float, float], ...] = ()
    flags: Flags = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, findings: tuple[tuple[str, float, float], ...]) -> PastRun:
        """A run with its findings, without its figures."""
        changed = tuple((one.flag, one.before, one.after) for one in run.changed)
        return cls(run.generation, run.started_at, changed, findings, run.flags)


class RunStoreError(OperationError):
    """The run database can't be used. The message is one sentence with the reason and its consequence."""


class RunStoreMissingError(RunStoreError):
    """There is no run database yet."""


class RunStoreDamagedError(RunStoreError):
    """The file is damaged, or is not a run database."""


class RunName(msgspec.Struct, frozen=True):
    """Identifies a run: the ``key`` from its launch, its server and generation."""

    key: str
    server: str
    generation: int


class RunHead(msgspec.Struct, frozen=True):
    """A run without its windows. Times are Unix seconds; None and empty mean unknown.

    ``stages`` are name, seconds and detail of its startup; ``startup`` the facts that explain its duration
    (`StartupFacts`); ``report`` the engine's own memory figures; ``ended`` how its process ended (``code``, ``signal``,
    ``requested``, ``reason``) and ``cause`` the name of the failure.
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
    recorded_host: str = ""
    """Name of the recorded host whose GPUs it simulates."""
    gpu_kind: str = ""
    flags: Flags = msgspec.field(default_factory=dict)
    objectives: Mapping[str, float] = msgspec.field(default_factory=dict)
    attempts: int = 0
    ready_at: float | None = None
    ended_at: float | None = None
    stages: tuple[tuple[str, float | None, str], ...] = ()
    startup: Mapping[str, Any] = msgspec.field(default_factory=dict)
    report: Mapping[str, float] = msgspec.field(default_factory=dict)
    ended: Mapping[str, Any] = msgspec.field(default_factory=dict)
    cause: str = ""


class FlagChange(msgspec.Struct, frozen=True):
    """One flag that differs from the previous run. None means not set."""

    flag: str
    before: Any
    after: Any


class Run(RunHead, frozen=True):
    """A stored run.

    ``changed`` is its difference from the server's previous run, whose number is ``before`` (None for a first run);
    ``windows`` is their number, ``last_at`` the end of the newest one. ``figures`` are its `KEY_FIGURES` and
    `KEY_QUANTILES` (with the ends of their buckets), ``findings`` the observed ones, each with its minutes.
    """

    id: int = 0
    before: int | None = None
    changed: tuple[FlagChange, ...] = ()
    windows: int = 0
    window_seconds: float = 60.0
    """Average length of its windows."""
    last_at: float | None = None
    figures: Mapping[str, float] = msgspec.field(default_factory=dict)
    findings: Mapping[str, float] = msgspec.field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()
    """Clients' measurements of it, oldest first."""
    judged_until: float | None = None
    """Until when (Unix seconds) its history was judged afterwards: without GPUs and test requests."""
    removed: bool = False
    """Whether its server was removed; not stored, like ``replayable``."""
    replayable: bool = False
    """Whether its history can be replayed."""

    @property
    def name(self) -> str:
        """``NAME@GENERATION``."""
        return f"{self.server}@{self.generation}"

    @property
    def served(self) -> bool:
        """Whether it was ever ready."""
        return self.ready_at is not None or self.windows > 0


class RunStore:
    """The runs in one file. Safe to use from several processes at once.

    Every method raises a `RunStoreError` with the reason if the file cannot be used; its data stays. ``notice`` reports
    that a damaged file was moved aside.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self.notice = ""
        self._read_only = read_only

    def enter(self, heads: Sequence[RunHead]) -> None:
        """Store runs, or add facts about them: fields that a head lacks stay unchanged."""

        def act(connection: sqlite3.Connection) -> None:
            for head in heads:
                _enter(connection, head)
            thin(connection)

        self._write(act)

    def note_findings(
        self, run: RunName, spans: Mapping[str, Collection[tuple[float, float]]], judged_until: float | None = None
    ) -> None:
        """Note the spans (Unix seconds) in which findings held, by code.

        Spans up to two minutes apart are merged, so none is counted twice. ``judged_until``: findings up to then were
        computed from the history.
        """

        def act(connection: sqlite3.Connection) -> None:
            since = min((start for held in spans.values() for start, _ in held), default=judged_until)
            if since is None:
                return
            number = run_id(connection, run, since)
            for code, new in spans.items():
                _note(connection, number, code, new)
            if judged_until is not None:
                _write_document(connection, number, _read_document(connection, number) | {"judged_until": judged_until})

        self._write(act)

    def add_measurement(self, run: RunName, found: Measurement) -> None:
        """Store a client's measurement of a run; a run keeps at most `MOST_MEASUREMENTS`."""

        def act(connection: sqlite3.Connection) -> None:
            number = run_id(connection, run, found.at)
            document = msgspec.json.encode(found).decode()
            connection.execute("INSERT OR REPLACE INTO measurements VALUES (?, ?, ?)", (number, found.at, document))
            old = "SELECT at FROM measurements WHERE run = ? ORDER BY at DESC LIMIT -1 OFFSET ?"
            connection.execute(
                f"DELETE FROM measurements WHERE run = ? AND at IN ({old})", (number, number, MOST_MEASUREMENTS)
            )

        self._write(act)

    def runs(self, server: str | None = None, most: int = 100) -> list[Run]:
        """The newest runs of one server (by generation) or of all, newest first. Empty if none is recorded."""
        if server is not None and any("\ud800" <= character <= "\udfff" for character in server):
            return []  # invalid text, as a command line may contain: no server has this name
        newest = "SELECT id FROM runs ORDER BY started_at DESC, id DESC LIMIT ?"

        def ask(connection: sqlite3.Connection) -> list[Run]:
            if server is None:
                numbers = [number for (number,) in connection.execute(newest, (most,)).fetchall()]
            else:
                numbers = _by_generation(connection, server)[:most]
            return [_measured(connection, _stored(connection, number)[0]) for number in numbers]

        return self._ask(ask, [])

    def past(self, server: str, most: int = 200) -> list[PastRun]:
        """A server's newest runs without figures, but with their findings, newest first."""

        def ask(connection: sqlite3.Connection) -> list[PastRun]:
            found = []
            for number in _by_generation(connection, server)[:most]:
                run, _ = _stored(connection, number)
                found.append(PastRun.of(run, tuple(connection.execute(_HELD, (number,)).fetchall())))
            return found

        return self._ask(ask, [])

    def findings(self, number: int) -> tuple[tuple[str, float, float], ...]:
        """The spans in which findings held in a run: code, since and until (Unix seconds)."""
        return self._ask(lambda connection: tuple(connection.execute(_HELD, (number,)).fetchall()), ())

    def run(self, number: int) -> Run | None:
        """The run of that number."""

        def ask(connection: sqlite3.Connection) -> Run | None:
            known = connection.execute("SELECT 1 FROM runs WHERE id = ?", (number,)).fetchone()
            return _measured(connection, _stored(connection, number)[0]) if known else None

        return self._ask(ask, None)

    def note_predictions(self, run: RunName, at: float, predictions: Sequence[Mapping[str, Any]]) -> None:
        """Replace the stored predictions for changes of a run; only the newest few are kept."""

        def act(connection: sqlite3.Connection) -> None:
            number = run_id(connection, run, at)
            document = _read_document(connection, number) | {"predictions": list(predictions)[-MOST_PREDICTIONS:]}
            _write_document(connection, number, document)

        self._write(act)

    def predictions(self, server: str) -> list[tuple[Run, list[dict[str, Any]]]]:
        """A server's runs, newest first, each with its stored predictions."""

        def ask(connection: sqlite3.Connection) -> list[tuple[Run, list[dict[str, Any]]]]:
            stored = [_stored(connection, number) for number in _by_generation(connection, server)]
            return [(run, document.get("predictions") or []) for run, document in stored]

        return self._ask(ask, [])

    def windows(self, number: int, most: int = MOST_WINDOWS_READ) -> list[RunWindow]:
        """The newest windows of a run, oldest first."""
        return self._ask(lambda connection: _windows(connection, number, most, FIGURES), [])

    def first_windows(self, number: int, most: int) -> list[RunWindow]:
        """The oldest windows of a run, oldest first."""
        return self._ask(lambda connection: _windows(connection, number, most, FIGURES, newest=False), [])

    def warm_up(self, number: int, count: int) -> float | None:
        """When the first ``count`` windows of a run ended (Unix seconds); None if it has fewer."""
        query = "SELECT at + seconds FROM windows WHERE run = ? ORDER BY at LIMIT 1 OFFSET ?"

        def ask(connection: sqlite3.Connection) -> float | None:
            row = connection.execute(query, (number, count - 1)).fetchone()
            return float(row[0]) if row else None

        return self._ask(ask, None)

    def _write(self, act: Callable[[sqlite3.Connection], None]) -> None:
        self.notice = write(self.path, act) or self.notice

    def _ask(self, question: Callable[[sqlite3.Connection], _Answer], nothing: _Answer) -> _Answer:
        try:
            return query_runs(self.path, question)
        except RunStoreMissingError:
            return nothing
        except RunStoreDamagedError as error:
            if self._read_only:
                raise
            aside = set_aside(self.path)
            if aside is not None:
                self.notice = _moved(error, aside)
            return nothing


def past_runs(state: Path, record: ServerRecord) -> Sequence[PastRun] | None:
    """A server's runs up to the current one, newest first; None if the run database can't be read.

    The fleet reports that error when it stores a run.
    """
    try:
        runs = RunStore(state / FILE_NAME, read_only=True).past(record.name)
    except RunStoreError:
        return None
    number = record.current.number
    return [run for run in runs if run.generation <= number and run.started_at >= record.created_at]


def _note(connection: sqlite3.Connection, run: int, code: str, new: Collection[tuple[float, float]]) -> None:
    """Store intervals of a finding, merged with the known ones. Consoles may report them late or in another order."""
    known = connection.execute("SELECT since, until FROM findings WHERE run = ? AND code = ?", (run, code)).fetchall()
    merged = _merged([*known, *new])
    if merged == sorted(known):
        return
    connection.execute("DELETE FROM findings WHERE run = ? AND code = ?", (run, code))
    connection.executemany("INSERT INTO findings VALUES (?, ?, ?, ?)", [(run, code, *one) for one in merged])


def _merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge spans that overlap or nearly touch."""
    found: list[tuple[float, float]] = []
    for since, until in sorted(spans):
        if found and since <= found[-1][1] + _TOGETHER_SECONDS:
            found[-1] = found[-1][0], max(found[-1][1], until)
        else:
            found.append((since, until))
    return found


def changes(before: Flags, after: Flags) -> tuple[FlagChange, ...]:
    """The flags that differ, by name; ``1`` and ``True`` count as different."""
    pairs = ((flag, before.get(flag), after.get(flag)) for flag in sorted({*before, *after}))
    return tuple(
        FlagChange(flag, one, other)
        for flag, one, other in pairs
        if one != other or isinstance(one, bool) != isinstance(other, bool)
    )


_IN_COLUMNS = ("key", "server", "generation", "started_at")
_NOT_STORED = (
    *(*_IN_COLUMNS, "id", "windows", "window_seconds", "last_at", "figures", "findings", "measurements"),
    *("removed", "replayable"),
)


def _enter(connection: sqlite3.Connection, head: RunHead) -> None:
    number = run_id(connection, RunName(head.key, head.server, head.generation), head.started_at)
    run, document = _stored(connection, number)
    fresh = {name: getattr(head, name) for name in RunHead.__struct_fields__ if name not in _IN_COLUMNS}
    if head.started_at > document.get("ended_at", math.inf):  # it was restarted automatically
        for name in ("ended_at", "ended", "cause"):
            document.pop(name, None)
    document |= {name: value for name, value in fresh.items() if value not in (None, "", (), {}, 0)}
    if "before" not in document and head.flags:
        document |= _since_before(connection, head, number)
    # An automatic restart starts a new process, but the run began with the first one.
    began = min(run.started_at, head.started_at)
    connection.execute("UPDATE runs SET started_at = ? WHERE id = ?", (began, number))
    _write_document(connection, number, document)


def _since_before(connection: sqlite3.Connection, head: RunHead, number: int) -> dict[str, Any]:
    """The server's previous run, and the differences; stored, because that run may be deleted."""
    numbers = _by_generation(connection, head.server)
    for other in numbers[numbers.index(number) + 1 :]:
        if flags := _read_document(connection, other).get("flags"):
            different = changes(flags, head.flags)
            return {"before": other, "changed": [[c.flag, c.before, c.after] for c in different]}
    return {"before": None, "changed": []}


def _by_generation(connection: sqlite3.Connection, server: str) -> list[int]:
    """The numbers of a server's runs, newest first: by generation, because clocks can change.

    A reused name starts again at generation 1. Numbers only grow, so a generation that appears again belongs to a later
    use of the name.
    """
    uses: list[dict[int, int]] = [{}]
    for number, generation in connection.execute(
        "SELECT id, generation FROM runs WHERE server = ? ORDER BY id", (server,)
    ):
        if generation in uses[-1]:
            uses.append({})
        uses[-1][generation] = number
    return [use[generation] for use in reversed(uses) for generation in sorted(use, reverse=True)]


def _read_document(connection: sqlite3.Connection, number: int) -> dict[str, Any]:
    (text,) = connection.execute("SELECT document FROM runs WHERE id = ?", (number,)).fetchone()
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_document(connection: sqlite3.Connection, number: int, document: Mapping[str, Any]) -> None:
    connection.execute("UPDATE runs SET document = ? WHERE id = ?", (json.dumps(document), number))


def _stored(connection: sqlite3.Connection, number: int) -> tuple[Run, dict[str, Any]]:
    """A run without the figures of its windows, and its whole document."""
    query = f"SELECT {', '.join(_IN_COLUMNS)} FROM runs WHERE id = ?"
    columns: dict[str, Any] = dict(zip(_IN_COLUMNS, connection.execute(query, (number,)).fetchone(), strict=True))
    columns["id"] = number
    document = _read_document(connection, number)
    known = {name: document[name] for name in Run.__struct_fields__ if name in document and name not in _NOT_STORED}
    try:
        changed = [dict(zip(("flag", "before", "after"), change, strict=True)) for change in known.get("changed", ())]
        return convert({**known, "changed": changed, **columns}, Run), document
    except (TypeError, ValueError):  # written by another version, or damaged: the columns are still valid
        return Run(**columns), document


_HELD = "SELECT code, since, until FROM findings WHERE run = ? ORDER BY since"
"""The spans in which findings held in a run."""


def _measured(connection: sqlite3.Connection, run: Run) -> Run:
    """Add the figures of its windows."""
    from statistics import median  # imports `decimal` and `fractions`, which a recorder doesn't need

    count, last, seconds = connection.execute(
        "SELECT count(*), max(at + seconds), avg(seconds) FROM windows WHERE run = ?", (run.id,)
    ).fetchone()
    held = connection.execute("SELECT code, sum(until - since) FROM findings WHERE run = ? GROUP BY code", (run.id,))
    ends = (f"{name}{end}" for name in KEY_QUANTILES for end in ("", "_above", "_below", "_exact"))
    windows = _windows(connection, run.id, MOST_WINDOWS_READ, ("requests", *KEY_FIGURES, *ends))
    newest = by_exact(windows, KEY_QUANTILES)
    full = filled(newest)
    ended = [window.figures["requests"] / window.seconds for window in full if "requests" in window.figures]
    figures: dict[str, float] = {"requests_per_second": median(ended)} if ended else {}
    for name in KEY_FIGURES:
        used = full if name.endswith("_per_second") else newest
        values = [window.figures[name] for window in used if name in window.figures]
        if values:
            figures[name] = median(values)
    for name in KEY_QUANTILES:
        found = middle([one for window in newest if (one := window.quantile(name)) is not None])
        figures |= {key: value for key, value in kept(name, found).items() if value is not None}
    minutes = {code: held_for / 60 for code, held_for in held.fetchall()}
    measurements = _measurements(connection, run.id)
    return replace(
        run,
        windows=count,
        window_seconds=seconds or run.window_seconds,
        last_at=last,
        figures=figures,
        findings=minutes,
        measurements=measurements,
    )


def _measurements(connection: sqlite3.Connection, run: int) -> tuple[Measurement, ...]:
    rows = connection.execute("SELECT document FROM measurements WHERE run = ? ORDER BY at", (run,)).fetchall()
    found = []
    for (text,) in rows:
        with contextlib.suppress(msgspec.DecodeError):  # skip unreadable ones
            found.append(decode_json(text.encode(), Measurement))
    return tuple(found)


def _windows(
    connection: sqlite3.Connection, run: int, most: int, figures: Sequence[str], *, newest: bool = True
) -> list[RunWindow]:
    order = "DESC" if newest else "ASC"
    query = f"SELECT at, seconds, {', '.join(figures)} FROM windows WHERE run = ? ORDER BY at {order} LIMIT ?"
    found = []
    for at, seconds, *values in connection.execute(query, (run, most)):
        known = {name: value for name, value in zip(figures, values, strict=True) if value is not None}
        found.append(RunWindow(at, seconds, known))
    return found[::-1] if newest else found


def run_id(connection: sqlite3.Connection, run: RunName, at: float) -> int:
    """The number of a run; a run not yet stored by a console gets a row, with ``at`` as its known start."""
    known = connection.execute("SELECT id FROM runs WHERE key = ?", (run.key,)).fetchone()
    if known is not None:
        return int(known[0])
    row = (run.key, run.server, run.generation, at)
    insert = "INSERT INTO runs (key, server, generation, started_at, document) VALUES (?, ?, ?, ?, '{}')"
    return connection.execute(insert, row).lastrowid or 0


def store_windows(connection: sqlite3.Connection, run: int, windows: Iterable[RunWindow]) -> None:
    """Store windows of a run."""
    marks = ", ".join("?" * (len(FIGURES) + 3))
    rows = [(run, window.at, window.seconds, *map(window.figures.get, FIGURES)) for window in windows]
    names = ", ".join(("run", "at", "seconds", *FIGURES))
    connection.executemany(f"INSERT OR REPLACE INTO windows ({names}) VALUES ({marks})", rows)


def thin(connection: sqlite3.Connection) -> None:
    """Enforce the limits: the oldest runs keep `FEWEST_KEPT` windows, evenly spread, then none; then they are deleted.

    A thinned run can still be compared, since that does not need all windows.
    """
    _drop_oldest_runs(connection)
    total = int(connection.execute("SELECT count(*) FROM windows").fetchone()[0])
    if total <= MOST_WINDOWS:
        return
    wanted = int(MOST_WINDOWS * 0.9)
    query = (
        "SELECT run, count(*) FROM windows JOIN runs ON runs.id = run GROUP BY run ORDER BY runs.started_at, runs.id"
    )
    for keep in (FEWEST_KEPT, 0):
        for run, count in connection.execute(query).fetchall():
            if total <= wanted:
                return
            if count > keep:
                connection.execute(
                    "DELETE FROM windows WHERE run = ? AND at IN (SELECT at FROM (SELECT at, row_number() OVER"
                    " (ORDER BY at DESC) - 1 AS place FROM windows WHERE run = ?) WHERE ? = 0 OR place % ? != 0)",
                    (run, run, keep, -(-count // max(keep, 1))),
                )
                left = connection.execute("SELECT count(*) FROM windows WHERE run = ?", (run,)).fetchone()[0]
                total -= count - int(left)


def _drop_oldest_runs(connection: sqlite3.Connection) -> None:
    old = "SELECT id FROM runs ORDER BY started_at DESC, id DESC LIMIT -1 OFFSET ?"
    if not connection.execute(old, (MOST_RUNS,)).fetchone():
        return
    for table, column in (("windows", "run"), ("findings", "run"), ("measurements", "run"), ("runs", "id")):
        connection.execute(f"DELETE FROM {table} WHERE {column} IN ({old})", (MOST_RUNS,))


def store_error(error: Exception, path: Path) -> RunStoreError:
    """Convert an error of SQLite or the file system to the matching `RunStoreError`."""
    if isinstance(error, RunStoreError):
        return error
    if isinstance(error, OSError):
        return RunStoreError(f"{path} can't be used ({error.strerror}): runs are not recorded until it can.")
    if sqlite_files.is_damaged(error):
        return RunStoreDamagedError(f"{path} is damaged: its runs can't be read.")
    if sqlite_files.is_full(error):
        return RunStoreError(f"{path} can't grow, the disk is full. Runs recorded so far are kept.")
    if sqlite_files.is_missing(error, path):
        return RunStoreMissingError(f"{path} does not exist: no runs recorded yet.")
    return RunStoreError(f"{path} can't be used right now ({error}).")


def query_runs(path: Path, question: Callable[[sqlite3.Connection], _Answer]) -> _Answer:
    """Query the run database. Raises the matching `RunStoreError`, never an SQLite error."""
    if not path.exists():
        raise RunStoreMissingError(f"{path} does not exist: no runs recorded yet.")
    try:
        with contextlib.closing(sqlite_files.connect_read_only(path, BUSY_TIMEOUT_SECONDS)) as connection:
            if _version(connection, path) == 0:
                raise RunStoreMissingError(f"{path} is empty: no runs recorded yet.")
            return question(connection)
    except (*sqlite_files.ERRORS, OSError) as error:
        raise store_error(error, path) from None


def write(path: Path, act: Callable[[sqlite3.Connection], object]) -> str:
    """Change the run database in one transaction, durable when this returns.

    A damaged file is moved aside and a new one started; the result reports that, and is empty otherwise.

    Raises:
        RunStoreError: it could not be written; nothing changed.
    """
    try:
        _write(path, act)
    except RunStoreDamagedError as error:
        aside = set_aside(path)
        _write(path, act)
        return _moved(error, aside) if aside else ""
    return ""


def _moved(error: RunStoreError, aside: Path) -> str:
    return f"{error} It was moved to {aside.name}, and a new one was started."


def set_aside(path: Path) -> Path | None:
    """Rename a damaged run database; None if another process has already done so.

    Raises:
        RunStoreError: it can't be renamed.
    """
    try:
        with locked(path.with_name(path.name + ".lock"), BUSY_TIMEOUT_SECONDS):
            return None if _sound(path) else sqlite_files.move_aside(path, keep_earlier=True)
    except OSError as error:
        raise store_error(error, path) from None


def _write(path: Path, act: Callable[[sqlite3.Connection], object]) -> None:
    try:
        own_folder(path.parent)
        with contextlib.closing(sqlite_files.open_database(path, BUSY_TIMEOUT_SECONDS)) as connection:
            _version(connection, path)
            # FULL: a run's launch is written only once, and must survive a power loss.
            sqlite_files.apply_pragmas(connection, "FULL")
            connection.execute("BEGIN IMMEDIATE")
            try:
                if _version(connection, path) == 0:  # within the transaction: another process may have created it
                    sqlite_files.execute_all(connection, _SCHEMA)
                act(connection)
                connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise
    except (*sqlite_files.ERRORS, OSError) as error:
        raise store_error(error, path) from None


def _version(connection: sqlite3.Connection, path: Path) -> int:
    """The schema version, 0 for an empty file. Raises `RunStoreError` for another program's file."""
    try:
        version = sqlite_files.version_of(connection, APPLICATION_ID)
    except sqlite_files.ForeignFileError:
        raise RunStoreDamagedError(f"{path} is not a run database of vllm-console.") from None
    if version > SCHEMA_VERSION:
        raise RunStoreError(
            f"{path} was written by a newer vllm-console (format {version}): update vllm-console."
            " The file is left as it is."
        )
    return version


def _sound(path: Path) -> bool:
    try:
        return bool(
            query_runs(path, lambda connection: connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
        )
    except RunStoreMissingError:
        return True
    except RunStoreDamagedError:
        return False

"""History of the machine's GPUs on disk: a row per five seconds for a day, per minute for thirty days.

One file per machine and user, whatever runs on the GPUs. Rows are numbered by their time step: each writer (a recorder
or its successor) continues where the last one ended, and each step is written once. A minute row is made from the finer
ones when its minute ends: means, or maxima of figures with a limit. If the clock was set back, rows ahead of it are
replaced one by one as their time comes again.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec

from vllm_console import sqlite_files
from vllm_console.history.store import (
    Format,
    HistoryFile,
    Stretch,
    Tier,
    first_row_at,
    open_for_writing,
    prune,
    store_or_start_anew,
    stretches_of,
)
from vllm_console.metrics.sample import Series
from vllm_launchers.host.gpu.host import Gpu, Host

GPU_HISTORY = "gpu-history.sqlite"
"""The file's name in the state folder."""

FIVES, MINUTES = TIERS = (
    Tier("fives", 5.0, 24 * 720, 60_000_000),
    Tier("minutes", 60.0, 30 * 24 * 60, 100_000_000),
)
"""A day by five seconds, thirty days by the minute; less if dozens of GPUs with many links need more space."""

_PER_MINUTE = round(MINUTES.step / FIVES.step)
_DAY = round(86400 / FIVES.step)
_PRUNE_EVERY = 720
"""Rows between two prunings: an hour."""


class GpuFigure(NamedTuple):
    """A figure of a GPU, named as in `Gpu`, stored as an integer number of ``1 / scale``.

    If ``highest``, a longer step keeps the maximum, for comparison with limits; otherwise the mean.
    """

    name: str
    scale: int = 1
    highest: bool = False


FIGURES = (
    GpuFigure("utilization"),
    GpuFigure("memory_utilization"),
    GpuFigure("used_gib", 1024, highest=True),
    GpuFigure("temperature_c", highest=True),
    GpuFigure("power_w", 10, highest=True),
    GpuFigure("clock_mhz"),
    GpuFigure("memory_clock_mhz"),
    GpuFigure("pcie_sent_gbs", 1000),
    GpuFigure("pcie_received_gbs", 1000),
    GpuFigure("nvlink_sent_gbs", 1000),
    GpuFigure("nvlink_received_gbs", 1000),
)
"""In storage order: changing the order requires another version of the file."""

LINK_FIGURES = (GpuFigure("sent_gbs", 1000), GpuFigure("received_gbs", 1000))
"""Stored for each NVLink of a GPU, after the GPU's own figures."""

HIGHEST = frozenset(figure.name for figure in FIGURES if figure.highest)


class LinkEnd(msgspec.Struct, frozen=True, array_like=True):
    """An NVLink of a GPU and its other end: the GPU ``remote``, or a switch."""

    number: int
    remote: int | None = None
    switch: bool | None = None

    def key(self, figure: str) -> str:
        """The name of one of its figures: ``link3_sent_gbs``."""
        return f"link{self.number}_{figure}"


class Card(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """What rarely changes about a GPU: identity, limits, links. Stored once for many rows."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_gib: float | None = None
    power_limit_w: int | None = None
    temperature_slowdown_c: int | None = None
    links: tuple[LinkEnd, ...] = ()

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Names of its figures in storage order."""
        of_links = (link.key(figure.name) for link in self.links for figure in LINK_FIGURES)
        return (*(figure.name for figure in FIGURES), *of_links)

    @cached_property
    def scales(self) -> tuple[int, ...]:
        """Scale of each stored figure."""
        return (*(figure.scale for figure in FIGURES), *(figure.scale for _ in self.links for figure in LINK_FIGURES))


class GpuEntry(NamedTuple):
    """A row of one GPU: Unix seconds, seconds covered, and its figures in the order of `Card.keys`."""

    at: float
    seconds: float
    card: Card
    values: tuple[float | None, ...]


_Numbers = list[int | None]

FORMAT = Format(
    0x764C4C47,
    1,
    (
        "CREATE TABLE machines (id INTEGER PRIMARY KEY, data BLOB NOT NULL UNIQUE)",
        *(
            f"CREATE TABLE {tier.table} (sequence INTEGER PRIMARY KEY, at REAL NOT NULL, machine INTEGER NOT NULL,"
            " data BLOB NOT NULL)"
            for tier in TIERS
        ),
    ),
)


class GpuHistoryWriter:
    """Appends samples of a machine's GPUs. Several processes may hold a writer; each step is written once.

    Never raises disk errors: ``trouble`` gives the reason why samples are lost, and the next sample is tried again. A
    damaged file is moved aside and a new one is started; ``notice`` reports that.
    """

    def __init__(self, path: Path, timeout: float = 1.0) -> None:
        self.path = path
        self.trouble = ""
        self.notice = ""
        self._timeout = timeout
        self._connection: sqlite3.Connection | None = None
        self._inode = 0
        self._step: int | None = None

    def append(self, host: Host, at: float) -> None:
        """Store the GPUs' state at ``at`` (Unix seconds); once per five-second step."""
        step = int(at // FIVES.step)
        if step == self._step or not host.gpus:
            return
        fault, notice = store_or_start_anew(self.path, lambda: self._store(host.gpus, at, step), self.close)
        self.notice = notice or self.notice
        self.trouble = f"GPU history is lost: {fault}" if fault else ""
        if not fault:
            self._step = step

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _opened(self) -> sqlite3.Connection:
        if self._connection is not None and sqlite_files.is_at(self.path, self._inode):
            return self._connection
        self.close()
        self._connection = open_for_writing(self.path, FORMAT, self._timeout)
        self._inode = self.path.stat().st_ino
        return self._connection

    def _store(self, gpus: Sequence[Gpu], at: float, step: int) -> None:
        connection = self._opened()
        connection.execute("BEGIN IMMEDIATE")  # undone if it fails, because the file is closed then
        last = _last_before(connection, sys.maxsize)
        ahead = last is not None and last > step
        if ahead:
            _delete_far_ahead(connection, step)
            last = _last_before(connection, step)
        if last is not None and last // _PER_MINUTE < step // _PER_MINUTE:
            _sum_up(connection, last // _PER_MINUTE)
        row = (step, at, _machine(connection, tuple(map(card_of, gpus))), _packed(gpus))
        insert = "INSERT OR REPLACE" if ahead else "INSERT OR IGNORE"
        connection.execute(f"{insert} INTO {FIVES.table} VALUES (?, ?, ?, ?)", row)
        if step % _PRUNE_EVERY == 0:
            prune(connection, TIERS)
            used = " UNION ".join(f"SELECT machine FROM {tier.table}" for tier in TIERS)
            connection.execute(f"DELETE FROM machines WHERE id NOT IN ({used})")
        connection.execute("COMMIT")


def _last_before(connection: sqlite3.Connection, step: int) -> int | None:
    query = f"SELECT max(sequence) FROM {FIVES.table} WHERE sequence < ?"
    found: int | None = connection.execute(query, (step,)).fetchone()[0]
    return found


def _delete_far_ahead(connection: sqlite3.Connection, step: int) -> None:
    """Delete rows from a clock that was wrong by more than a day: they would outlast all rows written now."""
    connection.execute(f"DELETE FROM {FIVES.table} WHERE sequence > ?", (step + _DAY,))
    connection.execute(f"DELETE FROM {MINUTES.table} WHERE sequence > ?", ((step + _DAY) // _PER_MINUTE,))


def card_of(gpu: Gpu) -> Card:
    """The part of a GPU that is stored once. Limits are rounded, so that tiny changes are ignored."""
    return Card(
        gpu.index,
        gpu.uuid,
        gpu.name,
        gpu.memory_gib,
        _rounded(gpu.power_limit_w),
        _rounded(gpu.temperature_slowdown_c),
        tuple(LinkEnd(link.number, link.remote, link.switch) for link in gpu.nvlinks),
    )


def _rounded(value: float | None) -> int | None:
    return None if value is None else round(value)


def _machine(connection: sqlite3.Connection, cards: tuple[Card, ...]) -> int:
    data = msgspec.msgpack.encode(cards)
    found = connection.execute("SELECT id FROM machines WHERE data = ?", (data,)).fetchone()
    if found is None:
        return connection.execute("INSERT INTO machines (data) VALUES (?)", (data,)).lastrowid or 0
    return int(found[0])


def _packed(gpus: Iterable[Gpu]) -> bytes:
    numbers: list[_Numbers] = []
    for gpu in gpus:
        own = [_whole(getattr(gpu, name), scale) for name, scale, _ in FIGURES]
        own += [_whole(getattr(link, name), scale) for link in gpu.nvlinks for name, scale, _ in LINK_FIGURES]
        numbers.append(own)
    return msgspec.msgpack.encode(numbers)


def _unpacked(data: object) -> list[_Numbers] | None:
    if not isinstance(data, bytes):
        return None
    try:
        return msgspec.msgpack.decode(data, type=list[_Numbers])
    except msgspec.DecodeError:
        return None


def _cards(data: object) -> tuple[Card, ...]:
    if not isinstance(data, bytes):
        return ()
    try:
        return msgspec.msgpack.decode(data, type=tuple[Card, ...])
    except msgspec.DecodeError:
        return ()


def _whole(value: float | None, scale: int) -> int | None:
    return None if value is None else round(value * scale)


def _sum_up(connection: sqlite3.Connection, minute: int) -> None:
    """Write the row of a finished minute, from those of its rows with the same GPUs as the last one."""
    query = f"SELECT at, machine, data FROM {FIVES.table} WHERE sequence BETWEEN ? AND ? ORDER BY sequence"
    rows = connection.execute(query, (minute * _PER_MINUTE, (minute + 1) * _PER_MINUTE - 1)).fetchall()
    if not rows:
        return
    at, machine, _ = rows[-1]
    samples = [numbers for _, of, data in rows if of == machine and (numbers := _unpacked(data)) is not None]
    data = msgspec.msgpack.encode([_joined(of_gpu) for of_gpu in zip(*samples, strict=False)])
    connection.execute(f"INSERT OR REPLACE INTO {MINUTES.table} VALUES (?, ?, ?, ?)", (minute, at, machine, data))


def _joined(samples: Sequence[_Numbers]) -> _Numbers:
    joined: _Numbers = []
    for place, values in enumerate(zip(*samples, strict=False)):
        known = [value for value in values if value is not None]
        highest = place < len(FIGURES) and FIGURES[place].highest
        joined.append(None if not known else max(known) if highest else round(sum(known) / len(known)))
    return joined


class GpuHistoryReader:
    """Reads the history of one GPU, identified by UUID or else index, while it is written. Raises `HistoryError`."""

    def __init__(self, path: Path, gpu: Card) -> None:
        self._gpu = gpu
        self._machines: dict[int, tuple[int, Card] | None] = {}
        """By machine id, the GPU's position in its rows, and its card."""
        self._file = HistoryFile(path, FORMAT, self._machines.clear)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def first_at(self) -> float | None:
        """When the oldest row was taken (Unix seconds), or None if there is none."""
        return self._file.ask(lambda connection: first_row_at(connection, TIERS))

    def stretches(self, start: float, end: float, step: float) -> list[Stretch]:
        """Where to read the rows from ``start`` to ``end`` (Unix seconds) for points of ``step`` seconds."""
        return self._file.ask(lambda connection: stretches_of(connection, TIERS, start, end, step))

    def read(self, part: Stretch, most: int, _step: float = 0.0) -> list[GpuEntry]:
        """The first ``most`` rows of a stretch that have this GPU, oldest first; the stretch's start is excluded."""
        return self._file.ask(lambda connection: self._read(connection, part, most))

    def _read(self, connection: sqlite3.Connection, part: Stretch, most: int) -> list[GpuEntry]:
        query = (
            f"SELECT at, machine, data FROM {part.tier.table}"
            " WHERE sequence >= ? AND at > ? AND at <= ? ORDER BY sequence"
        )
        found: list[GpuEntry] = []
        first = int(part.start // part.tier.step)
        for at, machine, data in connection.execute(query, (first, part.start, part.end)):
            if len(found) >= most:
                break
            place = self._place(connection, machine)
            values = _values(data, place) if place is not None else None
            if place is not None and values is not None:
                found.append(GpuEntry(at, part.tier.step, place[1], values))
        return found

    def _place(self, connection: sqlite3.Connection, machine: int) -> tuple[int, Card] | None:
        if machine not in self._machines:
            row = connection.execute("SELECT data FROM machines WHERE id = ?", (machine,)).fetchone()
            self._machines[machine] = self._find(row[0]) if row is not None else None
        return self._machines[machine]

    def _find(self, data: object) -> tuple[int, Card] | None:
        return next(((place, card) for place, card in enumerate(_cards(data)) if _same_gpu(card, self._gpu)), None)


def last_cards(path: Path) -> tuple[Card, ...]:
    """The GPUs of the newest row. Raises `HistoryError` if the file cannot be read."""

    def ask(connection: sqlite3.Connection) -> object:
        newest = f"SELECT machine FROM {FIVES.table} ORDER BY sequence DESC LIMIT 1"
        row = connection.execute(f"SELECT data FROM machines WHERE id = ({newest})").fetchone()
        return row[0] if row is not None else None

    with contextlib.closing(HistoryFile(path, FORMAT)) as file:
        return _cards(file.ask(ask))


def _same_gpu(one: Card, other: Card) -> bool:
    if one.uuid is not None and other.uuid is not None:
        return one.uuid == other.uuid
    return one.index == other.index


def _values(data: object, place: tuple[int, Card]) -> tuple[float | None, ...] | None:
    """The figures of the GPU at that position in a row; None if the row is damaged."""
    position, card = place
    numbers = _unpacked(data)
    if numbers is None or position >= len(numbers) or len(numbers[position]) != len(card.scales):
        return None
    pairs = zip(numbers[position], card.scales, strict=True)
    return tuple(None if number is None else number / scale for number, scale in pairs)


def known_figures(values: Mapping[str, Sequence[float | None]]) -> frozenset[str]:
    """The figures that have any value."""
    return frozenset(name for name, column in values.items() if any(value is not None for value in column))


class _Sum:
    """A figure over one step: its maximum, and its mean over the time for which it is known."""

    __slots__ = ("highest", "seconds", "total")

    def __init__(self) -> None:
        self.highest = -math.inf
        self.total = self.seconds = 0.0

    def add(self, value: float, seconds: float) -> None:
        self.highest = max(self.highest, value)
        self.total += value * seconds
        self.seconds += seconds


class GpuTimeline:
    """The last ``points`` steps of ``step`` seconds of one GPU.

    A row covers the time since the previous row. A gap of more than ``gap`` seconds between rows stays empty.
    """

    def __init__(self, step: float, points: int) -> None:
        self.step, self.points = step, points
        self.gap = max(2.5 * step, 15.0)
        self.card: Card | None = None
        """The GPU with its limits and links, from the newest row."""
        self._steps: dict[int, dict[str, _Sum]] = {}
        self._at: float | None = None
        self._drawn: tuple[tuple[int, float | None], Series] | None = None

    def append(self, entry: GpuEntry) -> None:
        """Add the next row. One that is not newer than the last is ignored."""
        before = self._at
        if before is not None and entry.at <= before:
            return
        last = self._index(entry.at)
        first = last
        if before is not None and entry.at - before <= self.gap:
            first = min(last, self._index(before) + 1)
        self._at, self.card = entry.at, entry.card
        for index in range(max(first, last - self.points + 1), last + 1):
            figures = self._steps.setdefault(index, {})
            for name, value in zip(entry.card.keys, entry.values, strict=True):
                if value is not None:
                    figures.setdefault(name, _Sum()).add(value, entry.seconds)
        if len(self._steps) > 2 * self.points:
            self._steps = {index: one for index, one in self._steps.items() if index > last - self.points}

    def series(self, end: float) -> Series:
        """The points up to ``end`` (Unix seconds), oldest first, `points` of them. Keys are those of `Card.keys`."""
        last = self._index(end)
        if self._drawn is not None and self._drawn[0] == (last, self._at):
            return self._drawn[1]
        steps = [self._steps.get(index, {}) for index in range(last - self.points + 1, last + 1)]
        names = self.card.keys if self.card is not None else ()
        values = {name: tuple(_value(name, one.get(name)) for one in steps) for name in names}
        found = Series(end=(last + 1) * self.step, step=self.step, values=values or {"": (None,) * self.points})
        self._drawn = ((last, self._at), found)
        return found

    def _index(self, at: float) -> int:
        """The step that a moment belongs to; a step includes its end but not its beginning."""
        return math.ceil(at / self.step) - 1


def _value(name: str, found: _Sum | None) -> float | None:
    if found is None:
        return None
    return found.highest if name in HIGHEST else found.total / found.seconds

"""One server of ours as a console sees it over time: its record, its history, its way up, its failure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from vllm_console.fleet.details import Details, unpack
from vllm_console.fleet.model import ServerView, Stage, State
from vllm_console.telemetry.history import Entry, HistoryError, HistoryMissingError, Reader
from vllm_console.telemetry.timeline import Timeline
from vllm_console.text import plain
from vllm_launchers.addresses import open_words
from vllm_launchers.keeper.records import ServerRecord
from vllm_launchers.plan.model import Flags
from vllm_launchers.secrets import API_KEY, redact, redact_argv

if TYPE_CHECKING:
    from vllm_console.diagnosis.model import Condition, Diagnosis
    from vllm_console.fleet.board import SharedBoard
    from vllm_console.fleet.gpus import GpuSource
    from vllm_console.fleet.judging import Judge
    from vllm_console.fleet.way_up import WayUp
    from vllm_console.telemetry.progress import Startup
    from vllm_launchers.machine.gpu.host import Host
    from vllm_launchers.machine.gpu.sharing import Share

HISTORY = "history.sqlite"
"""The recorder's file in a server's folder."""

CHART_STEP_SECONDS = 5.0
CHART_POINTS = 180
"""Charts reach back a quarter of an hour in steps of five seconds."""

RECENT_SECONDS = 65.0
"""How far back every single look is read: the window of a minute, and the look before it."""

END_LOG_BYTES = 512 << 10
"""How much of a dead server's log is searched for the reason."""


@dataclass(frozen=True, slots=True)
class Around:
    """What servers are judged by besides: GPUs, and how this person shares them with others.

    ``reserves`` are what is kept for other tenants. ``may_ask`` is whether a server may be sent a request of ours;
    ``board`` is where people say which GPUs they take.
    """

    gpus: GpuSource | None = None
    shares: Sequence[Share] = ()
    reserves: Sequence[Share] = ()
    may_ask: bool = True
    board: SharedBoard | None = None

    @property
    def host(self) -> Host | None:
        """The machine's GPUs as they were seen last; a recorded host's say nothing of what happens now."""
        return self.gpus.host() if self.gpus is not None and not self.gpus.recorded else None


class WatchedServer:
    """What is read of one server, kept between looks so that a look costs little."""

    def __init__(self, folder: Path, *, charts: bool) -> None:
        self._folder = folder
        self._charts = charts
        self._details: tuple[object, Details] | None = None
        self._history: Reader | None = None
        self._timeline = Timeline(CHART_STEP_SECONDS, CHART_POINTS)
        self._sequence: int | None = None
        self._startup: tuple[tuple[int, int], WayUp] | None = None
        self._failure: tuple[tuple[int, int], Diagnosis | None] | None = None
        self._judge: Judge | None = None

    def view(
        self, record: ServerRecord, now: float, *, selected: bool, load: str, around: Around | None = None
    ) -> ServerView:
        """The server as of ``now`` (Unix seconds); a selected one, and in a console each, is judged too."""
        spec = record.current.spec
        details = self._read_details(spec.details)
        if self._judge is None and around is not None and (selected or self._charts):
            self._judge, self._sequence = _judge(record.name), None
            if details.gpus and (around.gpus is None or not around.gpus.recorded):
                self._recall(self._judge, details.gpus, around, now)
        history_problem = self._read_history(now)
        earlier = record.generations[-2] if len(record.generations) > 1 else None
        window = self._timeline.window() if record.state.alive else None
        stages, startup = self._way_up(record, details, now, selected=selected)
        exposed = exposed_words(record)
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
            argv=redact_argv(spec.argv),
            flags=details.flags,
            reasons=details.reasons,
            previous_flags=unpack(earlier.spec.details).flags if earlier else None,
            generation=record.current.number,
            attempt=record.attempt,
            reason=self._reason(record, details.flags),
            diagnosis=self._diagnosis(record, details.flags),
            notice="; ".join(filter(None, (_notice(record), exposed, history_problem))),
            exposed=exposed,
            exit=record.exit,
            next_attempt_at=record.next_attempt_at,
            downtime_seconds=record.downtime_seconds,
            workload=details.workload,
            objectives=details.objectives,
            stages=stages,
            startup=startup,
            log_path=str(self._folder / "server.log"),
            sample=self._timeline.latest if record.state.alive else None,
            window=window,
            series=self._timeline.series(now) if selected else None,
            load=load,
            conditions=self._conditions(record, details, around, now),
        )

    def close(self) -> None:
        """Let go of open files."""
        if self._history is not None:
            self._history.close()
            self._history = None

    def _read_details(self, packed: object) -> Details:
        if self._details is None or self._details[0] is not packed:
            self._details = (packed, unpack(packed))  # type: ignore[arg-type]
        return self._details[1]

    def _read_history(self, now: float) -> str:
        """Take in what the recorder wrote since the last look; a sentence when that cannot be read."""
        try:
            if self._history is None:
                self._history = Reader(self._folder / HISTORY)
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

    def _recall(self, judge: Judge, gpus: Sequence[int], around: Around, now: float) -> None:
        """What its recorder, or one beside it, saw of its GPUs so far."""
        from vllm_console.fleet.gpus import earlier_looks
        from vllm_console.fleet.judging import HISTORY_SECONDS

        board = around.board.latest() if around.board is not None else None
        for host in earlier_looks(self._folder.parents[1], now - HISTORY_SECONDS, board):
            judge.look(host, gpus, host.at or now)

    def _read_past(self, history: Reader, now: float) -> list[Entry]:
        """What a first look needs: half an hour to judge by (every look, for the shortest of queues), a quarter for
        charts, else a minute.
        """
        span = CHART_POINTS * CHART_STEP_SECONDS if self._charts else 0.0
        recent = RECENT_SECONDS
        if self._judge is not None:
            from vllm_console.fleet.judging import HISTORY_SECONDS

            span = recent = HISTORY_SECONDS
        newest = history.since(now - recent)
        begin = newest[0].at if newest else now
        older = history.range(now - span, begin, CHART_POINTS) if begin > now - span else []
        return older + newest

    def _conditions(
        self, record: ServerRecord, details: Details, around: Around | None, now: float
    ) -> tuple[Condition, ...]:
        if self._judge is None or around is None:
            return ()
        self._judge.look(around.host, details.gpus, now)
        # A command looks once, and waits for the answer of a server that seems to hang.
        return self._judge.conditions(record, details, around, now, wait=not self._charts)

    def _reason(self, record: ServerRecord, flags: Flags) -> str:
        """The keeper's sentence; for a failed server with the line from its log that shows why."""
        found = self._diagnosis(record, flags)
        if found is None or not found.evidence:
            return redact(plain(record.reason))
        from vllm_console.diagnosis.diagnose import UNNAMED

        # What it means comes first and the exit code last: a row of a table shows only the beginning.
        meaning = "" if found.explanation == UNNAMED else found.explanation.removesuffix(".")
        parts = (meaning, found.evidence)
        line = ": ".join(filter(None, map(plain, parts)))
        return redact(plain(f"{line} ({record.reason})"))

    def _diagnosis(self, record: ServerRecord, flags: Flags) -> Diagnosis | None:
        """Why it failed, worked out once per failure; None for a server that has not."""
        if record.state is not State.FAILED:
            return None
        key = (record.current.number, record.attempt)
        if self._failure is None or self._failure[0] != key:
            from vllm_console.diagnosis.diagnose import diagnose

            code = record.exit.status if record.exit else None
            lines = [redact(line) for line in _tail(self._folder / "server.log", record)]
            self._failure = (key, diagnose(lines, code, flags) if lines or (code or 0) < 0 else None)
        return self._failure[1]

    def _way_up(
        self, record: ServerRecord, details: Details, now: float, *, selected: bool
    ) -> tuple[tuple[Stage, ...], Startup | None]:
        """Its stages and what is to be said of them, where somebody looks."""
        if not selected and record.state is not State.STARTING:
            return (), None
        key = (record.current.number, record.attempt)
        if self._startup is None or self._startup[0] != key:
            from vllm_console.fleet.remembering import earlier_times
            from vllm_console.fleet.way_up import WayUp

            earlier = earlier_times(self._folder.parents[1], details)
            self._startup = (key, WayUp(self._folder / "server.log", record, details, earlier))
        return self._startup[1].look(record, now)


def _judge(name: str) -> Judge:
    from vllm_console.fleet.judging import Judge

    return Judge(name)


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading; a pipe that somebody put in its place holds nobody up. Raises OSError."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _inode(descriptor: int) -> int:
    return os.fstat(descriptor).st_ino


def _tail(path: Path, record: ServerRecord) -> list[str]:
    """The end of the present generation's log, as lines."""
    try:
        with open_log(path) as file:
            size = file.seek(0, 2)
            begin = record.log_offset if record.log_inode in (None, _inode(file.fileno())) else 0
            file.seek(max(begin, size - END_LOG_BYTES))
            data = file.read(END_LOG_BYTES)
    except OSError:
        return []
    return data.decode(errors="replace").splitlines()


def _notice(record: ServerRecord) -> str:
    notes = [f"{record.unwritten}; what is shown comes from its keeper's memory"] if record.unwritten else []
    if record.adopted and record.state.alive:
        notes.append("a new keeper adopted it; how it ends will not be known")
    return "; ".join(notes)


def exposed_words(record: ServerRecord) -> str:
    """The warning of a server that others can use, while it is up or will be again."""
    spec = record.current.spec
    return open_words(spec.host, API_KEY in spec.secret_names) if record.needs_keeper else ""

"""Servers that this user's keepers did not start: observed from outside, in memory, never signaled.

Each has its own thread, so an unresponsive server delays only itself.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from pathlib import Path

from msgspec.structs import replace

from vllm_console.fleet.snapshot import ServerView, lost_text
from vllm_console.fleet.watched_server import CHART_POINTS, CHART_STEP_SECONDS
from vllm_console.history.time_view import LIVE, TimeView, points_shown
from vllm_console.history.timeline import Timeline, newest_points
from vllm_console.metrics.sample import Sample, Series
from vllm_console.text import plain
from vllm_launchers.addresses import TLS_FLAGS, base_url, format_exposure
from vllm_launchers.host.processes import ObservedServer, ProcessScanner
from vllm_launchers.keeper.records import State
from vllm_launchers.listeners import Owner
from vllm_launchers.procfs import other_network, started_at
from vllm_launchers.secrets import API_KEY
from vllm_launchers.units import natural_key
from vllm_launchers.vllm.engines import Engine, EngineKind, simulated_engine

SCAN_SECONDS = 5.0
"""How often to scan the process table."""

FIRST_ANSWER_SECONDS = 0.5
"""How long a console's first snapshot waits for first answers; later snapshots show the rest."""

ANSWER_SECONDS = 5.0
"""Request timeout: a busy server may need seconds."""

ONLY_ANSWER_SECONDS = ANSWER_SECONDS + 0.5
"""How long a command's only snapshot waits: longer than the request timeout, so each server has answered or not."""

REST_PER_WORK = 9.0
"""Seconds of rest per second of computing, so that parsing others' metrics uses at most a tenth of a core."""


PORT_UNKNOWN = "its port is unknown: its processes belong to another user"
IN_A_CONTAINER = "in a container: its port is not reachable from here"


class ObservedWatch:
    """A server without a record and the thread that samples it. The lock guards the shared state.

    It is another user's, started by hand, or ours, whose folder ``lost`` was deleted while it ran.
    """

    def __init__(self, server: ObservedServer, interval: float = 1.0, *, lost: Path | None = None) -> None:
        self.server, self._lost = server, lost
        self.sampled = threading.Event()
        self._interval = interval
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._state = State.STARTING
        # Only the start of its process is known, not when it became ready.
        self._since = min(time.time(), started_at(server.start_time))
        self._since_start = False
        self._reason = ""
        self._contacted = False
        # A container's ports are not this machine's: whatever answers there is another server.
        self._port = 0 if other_network(server.pid) else server.port or 0
        self._exposed = exposed(server) if self._port else ""
        self._engine: Engine | None = None
        self._timeline = Timeline(CHART_STEP_SECONDS, CHART_POINTS)
        self._first_at: float | None = None
        if self._port:
            threading.Thread(target=self._run, name=f"observe-{server.pid}", daemon=True).start()
        else:
            self._reason = IN_A_CONTAINER if server.port else PORT_UNKNOWN
            self.sampled.set()

    def view(self, selected: str | None, taken: Collection[str], time_view: TimeView = LIVE) -> ServerView:
        """The current view."""
        server = self.server
        name = f"vllm@{self._port}" if self._port else f"vllm@pid-{server.pid}"
        if name in taken:
            name = f"vllm@pid-{server.pid}"
        now = time.time()
        with self._lock:
            latest = self._timeline.latest
            return ServerView(
                name=name,
                state=self._state,
                state_since=self._since,
                since_start=self._since_start,
                ours=False,
                owner=server.user,
                model=server.model or (latest.model_name if latest is not None else None) or "",
                engine=simulated_engine() if server.simulated else self._engine,
                host=server.host,
                port=self._port,
                pid=server.pid,
                argv=server.argv,
                reason=self._reason,
                contacted=self._contacted,
                notice="; ".join(filter(None, (self._exposed, self._whose()))),
                exposed=self._exposed,
                lost=str(self._lost or ""),
                sample=latest,
                window=self._timeline.window(),
                series=self._series(time_view, now) if selected == name else None,
            )

    def _whose(self) -> str:
        if self._lost:
            return lost_text(self._lost)
        return f"started by {self.server.user or 'another user'} outside this console: read-only"

    def _series(self, view: TimeView, now: float) -> Series:
        """The requested range, limited to the quarter of an hour that is kept in memory."""
        first = self._first_at
        reach = min(view.range.seconds, self._timeline.points * self._timeline.step)
        shown = points_shown(replace(view.range, seconds=reach), now - first if first else 0.0, self._timeline.step)
        return replace(newest_points(self._timeline.series(now), shown), recorded_from=first)

    def close(self) -> None:
        """Ask the thread to end; it does after its current sample."""
        self._ended.set()

    def _run(self) -> None:
        # Imported lazily: most machines have no servers of other users.
        from vllm_console.metrics.scrape import ScrapeError, Scraper
        from vllm_launchers.host.ports import user_name

        try:
            server = self.server
            url = base_url(server.host, self._port, tls=_tls(server))
            scraper = Scraper(url, timeout=ANSWER_SECONDS, owner=Owner(server.pid, server.start_time))
        except ScrapeError as error:  # an invalid --host in another user's command line
            self._enter(State.UNRESPONSIVE, str(error))
            self.sampled.set()
            return
        rest, unanswered, mine = 0.0, 0, self.server.user == user_name(os.getuid())
        while not self._ended.wait(rest):
            busy = time.thread_time()
            try:
                first = self._take(scraper.sample(time.time()))
                # From another user's server, only metrics are requested.
                if first and mine and (version := scraper.version()) is not None:
                    self._engine = Engine(EngineKind.VLLM, self.server.argv[:1], version, None, "")
                unanswered = 0
            except ScrapeError as error:
                unanswered = unanswered + 1 if error.kind == "timeout" else 0
                self._enter(self._after(error.kind, unanswered), str(error))
            except Exception as error:  # noqa: BLE001 - thread boundary: shown and retried
                self._enter(
                    State.UNRESPONSIVE, f"its metrics can't be read: {plain(str(error), 200) or type(error).__name__}"
                )
            self.sampled.set()
            rest = max(self._interval, REST_PER_WORK * (time.thread_time() - busy))
        scraper.close()

    def _take(self, sample: Sample) -> bool:
        """Store a sample; return whether the server was not ready before."""
        with self._lock:
            self._timeline.append(sample)
            self._first_at = self._first_at or sample.at
            first = self._state is not State.READY
        self._enter(State.READY, "", exposed(self.server) if first else None)
        return first

    def _after(self, kind: str, unanswered: int) -> State:
        """The state after a failed sample and ``unanswered`` consecutive timeouts."""
        from vllm_console.metrics.scrape import still_busy

        if kind == "refused":
            return State.STARTING
        return State.READY if still_busy(unanswered, ready=self._state is State.READY) else State.UNRESPONSIVE

    def _enter(self, state: State, reason: str, exposed: str | None = None) -> None:
        with self._lock:
            if exposed is not None:
                self._exposed = exposed
            self._contacted = True
            if state is not self._state:
                self._state = state
                self._since_start = state is State.READY and not self.sampled.is_set()
                if self.sampled.is_set():
                    self._since = time.time()
            self._reason = reason


def _flags(server: ObservedServer) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in server.argv}


def _tls(server: ObservedServer) -> bool:
    return not _flags(server).isdisjoint(f"--{name}" for name in TLS_FLAGS)


def exposed(server: ObservedServer) -> str:
    """The warning about an open server, as far as visible from outside; reads ``/proc``.

    Its command line says where it listens, unless the kernel lists only loopback addresses.
    """
    flags = _flags(server)
    if "--uds" in flags:
        return ""
    message = format_exposure(server.host, True if "--api-key" in flags or _has_key(server.pid) else None)
    if message and server.port:
        from vllm_launchers.host.ports import listens_to_itself

        return "" if listens_to_itself(server.port, server.user) else message
    return message


def _has_key(pid: int) -> bool:
    """Whether a process was started with an API key in its environment; False if that cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(name == API_KEY.encode() and value for name, _, value in (entry.partition(b"=") for entry in entries))


class Observer:
    """Finds others' servers and samples them. The first snapshot waits up to ``patience`` seconds for answers."""

    def __init__(self, state: Path, patience: float) -> None:
        self._state, self._patience = state, patience
        self._scanner = ProcessScanner()
        self._scanned_at = float("-inf")
        self._watches: dict[tuple[int, int], ObservedWatch] = {}

    def views(
        self, own_pids: Collection[int], names: Collection[str], selected: str | None, time_view: TimeView = LIVE
    ) -> list[ServerView]:
        """A view of each, named ``vllm@PORT`` (or ``vllm@pid-PID``); ``names`` are taken by our servers."""
        if time.monotonic() - self._scanned_at >= SCAN_SECONDS:
            self._scan(own_pids)
        views = []
        taken = set(names)
        for watch in self._watches.values():
            if watch.server.pid in own_pids:
                continue
            view = watch.view(selected, taken, time_view)
            taken.add(view.name)
            views.append(view)
        return sorted(views, key=lambda view: natural_key(view.name))

    def _scan(self, own_pids: Collection[int]) -> None:
        self._scanned_at = time.monotonic()
        if not (servers := self._scanner.scan(own_pids)) and not self._watches:
            return
        found = {(server.pid, server.start_time): server for server in servers}
        for key in [key for key in self._watches if key not in found]:
            self._watches.pop(key).close()
        unknown = [server for key, server in found.items() if key not in self._watches]
        new = [ObservedWatch(server, lost=self._lost_folder(server.pid)) for server in unknown]
        self._watches.update({(watch.server.pid, watch.server.start_time): watch for watch in new})
        deadline = time.monotonic() + self._patience
        for watch in new:
            watch.sampled.wait(max(0.0, deadline - time.monotonic()))

    def _lost_folder(self, pid: int) -> Path | None:
        """The folder of our server that a process belongs to, if it was deleted; None for other processes."""
        from vllm_launchers.keeper.orphans import deleted_folder

        folder = deleted_folder(pid)
        return folder if folder is not None and folder.is_relative_to(self._state.resolve()) else None

    def close(self) -> None:
        """Stop observing."""
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()

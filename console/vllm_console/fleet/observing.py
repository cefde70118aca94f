"""One server of others and the thread that looks at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from pathlib import Path

from vllm_console.fleet.model import ServerView, State
from vllm_console.fleet.watched import CHART_POINTS, CHART_STEP_SECONDS
from vllm_console.telemetry.scrape import ScrapeError, Scraper
from vllm_console.telemetry.timeline import Timeline
from vllm_launchers.addresses import TLS_FLAGS, base_url, open_words
from vllm_launchers.machine.engines import simulated_engine
from vllm_launchers.machine.ports import listens_to_itself
from vllm_launchers.machine.processes import ObservedServer
from vllm_launchers.secrets import API_KEY

REST_PER_WORK = 9.0
"""Seconds of rest per second of computing: others' metrics, however long, take a tenth of a core at most."""


class ObservedWatch:
    """One server of others and the thread that looks at it. The lock guards what the thread hands over."""

    def __init__(self, server: ObservedServer, interval: float) -> None:
        self.server = server
        self.looked = threading.Event()
        self._interval = interval
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._state = State.STARTING
        self._since = time.time()
        self._reason = ""
        self._exposed = exposed(server)
        self._timeline = Timeline(CHART_STEP_SECONDS, CHART_POINTS)
        if server.port:
            threading.Thread(target=self._look, name=f"observe-{server.pid}", daemon=True).start()
        else:
            self._reason = "its port is not known: its processes belong to another user"
            self.looked.set()

    def view(self, selected: str | None, taken: Collection[str]) -> ServerView:
        """What is known now."""
        server = self.server
        name = f"vllm@{server.port}" if server.port else f"vllm@pid-{server.pid}"
        if name in taken:
            name = f"vllm@pid-{server.pid}"
        now = time.time()
        with self._lock:
            return ServerView(
                name=name,
                state=self._state,
                state_since=self._since,
                ours=False,
                owner=server.user,
                model=server.model or "",
                engine=simulated_engine() if server.simulated else None,
                host=server.host,
                port=server.port or 0,
                pid=server.pid,
                argv=server.argv,
                reason=self._reason,
                notice="; ".join(filter(None, (self._exposed, _whose(server)))),
                exposed=self._exposed,
                sample=self._timeline.latest,
                window=self._timeline.window(),
                series=self._timeline.series(now) if selected == name else None,
            )

    def close(self) -> None:
        """Tell the thread to end; it does after its present look."""
        self._ended.set()

    def _look(self) -> None:
        try:
            # It is a process of this machine, so nobody else's certificate could be in its place.
            scraper = Scraper(base_url(self.server.host, self.server.port or 0, tls=_tls(self.server)), own=True)
        except ScrapeError as error:  # a --host that is none, in somebody's command line
            self._enter(State.UNRESPONSIVE, str(error))
            self.looked.set()
            return
        rest = 0.0
        while not self._ended.wait(rest):
            busy = time.thread_time()
            try:
                sample = scraper.sample(time.time())
            except ScrapeError as error:
                state = State.STARTING if error.kind == "refused" else State.UNRESPONSIVE
                self._enter(state, str(error))
            else:
                with self._lock:
                    self._timeline.append(sample)
                    first = self._state is not State.READY
                self._enter(State.READY, "", exposed(self.server) if first else None)
            self.looked.set()
            rest = max(self._interval, REST_PER_WORK * (time.thread_time() - busy))
        scraper.close()

    def _enter(self, state: State, reason: str, exposed: str | None = None) -> None:
        with self._lock:
            if exposed is not None:
                self._exposed = exposed
            if state is not self._state:
                self._state, self._since = state, time.time()
            self._reason = reason


def _flags(server: ObservedServer) -> set[str]:
    return {word.partition("=")[0].replace("_", "-") for word in server.argv}


def _tls(server: ObservedServer) -> bool:
    """Whether it speaks TLS."""
    return not _flags(server).isdisjoint(f"--{name}" for name in TLS_FLAGS)


def exposed(server: ObservedServer) -> str:
    """The warning of a server that others can use, as far as it is seen from outside; reads ``/proc``.

    Where it listens is what its command line says, unless the kernel knows of this machine's own addresses only.
    """
    flags = _flags(server)
    if "--uds" in flags:
        return ""
    told = open_words(server.host, True if "--api-key" in flags or _has_key(server.pid) else None)
    return "" if told and server.port and listens_to_itself(server.port, server.user) else told


def _has_key(pid: int) -> bool:
    """Whether a process was started with an API key in its environment; False where that cannot be read."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return any(name == API_KEY.encode() and value for name, _, value in (entry.partition(b"=") for entry in entries))


def _whose(server: ObservedServer) -> str:
    return f"started by {server.user or 'somebody else'}, not by this console: shown, never touched"

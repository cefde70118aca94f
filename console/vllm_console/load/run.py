"""Sends a workload to a server for a while and reports the client's measurements."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import httpx
import msgspec

from vllm_console.load.client import (
    ApiAccess,
    LoadError,
    LoadTarget,
    Lookup,
    Sender,
    check_url,
    find_served_model,
    find_vocabulary,
    lookup_of,
    open_client,
    own_access,
    wait,
)
from vllm_console.load.report import LoadReport, Tally, Times
from vllm_console.load.shape import Exact, RecordedTraffic, TrafficShape, request_count
from vllm_console.text import rate as rate_text
from vllm_console.text import took
from vllm_launchers.presets.model import Workload

MOST_REQUESTS = 1_000_000
GRACE_SECONDS = 60.0
UNFINISHED = "unfinished"
"""Start of the failure message for a request that had not ended long after the last one was sent."""
PROGRESS_SECONDS = 0.5


class LoadProgress(msgspec.Struct, frozen=True):
    """A load while it runs: seconds since its start and counts so far.

    ``held_back`` requests were sent late because ``max_in_flight`` others were in flight.
    """

    elapsed: float
    sent: int
    completed: int
    failed: int
    in_flight: int
    output_tokens: int
    held_back: int
    max_in_flight: int


async def run_load(
    url: str,
    model: str | None,
    workload: Workload,
    rate: float | None,
    seconds: float,
    *,
    requests: int | None = None,
    exact: Exact | None = None,
    recorded: RecordedTraffic | None = None,
    access: ApiAccess | None = None,
    max_in_flight: int = 256,
    on_progress: Callable[[LoadProgress], None] | None = None,
    seed: int = 0,
    allow_remote: bool = False,
    lookup: Lookup | None = None,
    grace_seconds: float = GRACE_SECONDS,
    stop: asyncio.Event | None = None,
    answers: dict[int, Times] | None = None,
) -> LoadReport:
    """Send requests of a workload's shape for ``seconds``, then wait for the answers.

    With a ``rate`` (requests per second), the loop is open: requests are sent when they are due, whatever the server
    does, but at most ``max_in_flight`` at once. With None it is closed: ``max_in_flight`` are kept in flight.
    ``requests`` limits their number; in an open loop it replaces ``seconds``. The load ends when all answers are
    complete, ``grace_seconds`` after the last possible arrival, or when ``stop`` is set; unfinished requests then count
    as failed. ``recorded`` replaces all this with requests that are sent when they are due. ``exact`` replaces the
    workload's length distributions. The default ``model`` is the first one served, the default ``access`` uses
    ``VLLM_API_KEY``. ``lookup`` finds where our own server listens on this machine, whatever its address. Without it,
    the process answering at an address of this machine must belong to this user or root, unless ``allow_remote`` is
    set. ``answers`` gets the times of each finished answer, by its index in the load.

    Raises:
        LoadError: an argument is invalid, exact lengths do not fit in the server's context, or the server is not on
            this machine, or does not answer.
    """
    if recorded is not None:
        requests, seconds = len(recorded.due), max(recorded.due[-1:], default=0.0) or 1.0
        rate = requests / seconds
    elif requests is not None and rate:
        seconds = requests / rate
    planned = _planned(rate, seconds, requests, max_in_flight)
    base = check_url(url, allow_remote=allow_remote or lookup is not None)
    if lookup is None and not allow_remote:
        lookup = lookup_of(base)
    stop = stop or asyncio.Event()
    tally, access = Tally(seed), access or own_access()
    tally.answers = answers
    async with open_client(base, access, lookup) as client:
        target = await find_served_model(client, model, access)
        vocabulary = await find_vocabulary(client, target.model)
        shape = TrafficShape(
            workload, exact=exact, seed=seed, max_model_len=target.max_model_len, vocabulary=vocabulary
        )
        if misfit := shape.misfit():
            raise LoadError(misfit)
        sender = Sender(client, target.model, tally, max_in_flight)
        begin = time.perf_counter()
        with _progress(tally, begin, max_in_flight, on_progress):
            if rate is not None:
                due = recorded.due if recorded is not None else shape.arrivals(planned, seconds)
                stream = recorded.stream(vocabulary, target.max_model_len) if recorded is not None else shape.at(due)
                words = f"{rate_text(rate, 'req')}, at most {max_in_flight} in flight"
                words = (
                    f"{recorded.words()}, {words}" if recorded is not None else f"open loop, {words} · {shape.words()}"
                )
                await _finish(sender, sender.play(stream, stop), stop, tally, seconds, grace_seconds)
                elapsed = time.perf_counter() - begin
                tally.never_sent([elapsed - at for at in due[tally.sent :] if at < elapsed])
            else:
                words = f"closed loop, {max_in_flight} in flight · {shape.words()}"
                limit = None if requests else seconds
                sending = sender.play_closed(shape.at(itertools.repeat(0.0, planned)), limit, stop)
                await _finish(sender, sending, stop, tally, limit, grace_seconds)
                planned = requests or tally.sent
        elapsed = time.perf_counter() - begin
        return tally.report(elapsed, planned, stopped=stop.is_set(), shape=words)


async def _finish(
    sender: Sender,
    sending: Coroutine[None, None, None],
    stop: asyncio.Event,
    tally: Tally,
    seconds: float | None,
    grace: float,
) -> None:
    """Send, wait for the answers, and abort what is unfinished at the deadline or when ``stop`` is set.

    The deadline is ``grace`` seconds after ``seconds``; if those are None, ``grace`` seconds without an answer.
    """
    kind = "stopped before the answer was complete"
    try:
        async with asyncio.timeout(grace if seconds is None else seconds + grace) as clock:
            watching = asyncio.create_task(_extend(clock, tally, grace)) if seconds is None else None
            try:
                await sending
                await sender.drain(stop)
            finally:
                if watching is not None:
                    watching.cancel()
    except TimeoutError:
        waited = took(grace)
        kind = f"no response for {waited}" if seconds is None else f"{UNFINISHED} {waited} after the last arrival"
    finally:
        await sender.cancel(kind)


async def _extend(clock: asyncio.Timeout, tally: Tally, grace: float) -> None:
    """Postpone the deadline as long as answers arrive."""
    loop = asyncio.get_running_loop()
    seen = -1
    while True:
        if (now := tally.output_tokens + tally.completed + tally.failed) != seen:
            clock.reschedule(loop.time() + grace)
        seen = now
        await asyncio.sleep(min(1.0, grace / 4))


def run_load_sync(*args: Any, **kwargs: Any) -> LoadReport:
    """`run_load` for code without an event loop. SIGINT and SIGTERM end the load early, with its report."""

    async def main() -> LoadReport:
        stop = asyncio.Event()
        stop_on_signals(stop)
        return await run_load(*args, stop=stop, **kwargs)

    return asyncio.run(main())


def stop_on_signals(stop: asyncio.Event) -> None:
    """Make SIGINT and SIGTERM set ``stop``; no effect outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)


def _planned(rate: float | None, seconds: float, requests: int | None, max_in_flight: int) -> int:
    """The maximum number of requests. Raises LoadError if an argument is invalid."""
    if not (math.isfinite(seconds) and seconds > 0 and (rate is None or (math.isfinite(rate) and rate > 0))):
        raise LoadError("rate and duration must be greater than 0")
    if max_in_flight < 1 or (requests is not None and requests < 1):
        raise LoadError("at least one request must be sent and allowed in flight")
    planned = requests or (request_count(rate, seconds) if rate is not None else MOST_REQUESTS)
    if planned > MOST_REQUESTS:
        raise LoadError(f"that would be {planned} requests; at most {MOST_REQUESTS} are sent in one go")
    return planned


@contextlib.contextmanager
def _progress(
    tally: Tally, begin: float, max_in_flight: int, progress: Callable[[LoadProgress], None] | None
) -> Iterator[None]:
    """Report the progress twice a second, and again at the end."""
    if progress is None:
        yield
        return

    def now() -> LoadProgress:
        elapsed = time.perf_counter() - begin
        return LoadProgress(
            elapsed, tally.sent, tally.completed, tally.failed, tally.in_flight, tally.output_tokens, tally.held_back,
            max_in_flight,
        )  # fmt: skip

    async def repeat() -> None:
        while True:
            progress(now())
            await asyncio.sleep(PROGRESS_SECONDS)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        progress(now())


# -- traffic in phases ------------------------------------------------------------------------------------------------


READY_POLL_SECONDS = 1.0
"""How long to wait before retrying a server that does not answer: it may be starting."""

IN_FLIGHT = 256


class Phase(msgspec.Struct, frozen=True):
    """One phase of a scenario: its name, duration, requests per second, and their shape.

    ``exact`` replaces the workload's length distributions.
    """

    name: str
    seconds: float
    rate: float
    workload: Workload
    exact: Exact | None = None


async def run_scenario(
    url: str,
    phases: Sequence[Phase],
    *,
    first: Sequence[Phase] = (),
    max_in_flight: int = IN_FLIGHT,
    stop: asyncio.Event | None = None,
) -> LoadReport:
    """Play the phases in a loop until ``stop`` is set; return the total report.

    Phases in ``first`` are played once, before them. Phases overlap: requests of one may end in the next. If the server
    does not answer, wait for it, so that a restart with other flags only interrupts the scenario.

    Raises:
        LoadError: the URL is not on this machine, or there are no phases.
    """
    base = check_url(url, allow_remote=False)
    if not phases:
        raise LoadError("a scenario needs at least one phase")
    stop = stop or asyncio.Event()
    tally = Tally()
    begin = time.perf_counter()
    async with open_client(base, own_access(), lookup_of(base)) as client:
        sender = Sender(client, "", tally, max_in_flight)
        player = _PhasePlayer(client, sender)
        try:
            for phase in first:
                await player.play(phase, stop)
            while not stop.is_set():
                for phase in phases:
                    await player.play(phase, stop)
        finally:
            await sender.cancel("stopped before the answer was complete")
    return tally.report(time.perf_counter() - begin, tally.sent)


class _PhasePlayer:
    """Plays phases on one server, which may disappear and come back with another context."""

    def __init__(self, client: httpx.AsyncClient, sender: Sender) -> None:
        self._client = client
        self._sender = sender
        self._shapes: dict[tuple[Phase, int | None], TrafficShape] = {}

    async def play(self, phase: Phase, stop: asyncio.Event) -> None:
        """Play one phase once the server answers; a repeated phase keeps the same shared prefixes."""
        target = await self._wait_for_server(stop)
        if target is None:
            return
        self._sender.model = target.model
        key = (phase, target.max_model_len)
        if key not in self._shapes:
            self._shapes[key] = TrafficShape(phase.workload, exact=phase.exact, max_model_len=target.max_model_len)
        begin = time.perf_counter()
        await self._sender.play(self._shapes[key].stream(phase.rate, phase.seconds), stop)
        await wait(stop, begin + phase.seconds - time.perf_counter())

    async def _wait_for_server(self, stop: asyncio.Event) -> LoadTarget | None:
        while not stop.is_set():
            try:
                return await find_served_model(self._client, None)
            except LoadError:
                await wait(stop, READY_POLL_SECONDS)
        return None

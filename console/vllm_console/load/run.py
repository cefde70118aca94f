"""Sends a workload to a server for a while and reports what the client saw."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_console.load.client import LoadError, Sender, check_url, find_target, open_client
from vllm_console.load.report import LoadReport, Tally
from vllm_console.load.shape import Shape, request_count
from vllm_launchers.presets.model import Workload

MOST_REQUESTS = 1_000_000
GRACE_SECONDS = 60.0
PROGRESS_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """A load while it runs: seconds since its start and counts so far."""

    elapsed: float
    sent: int
    completed: int
    failed: int
    in_flight: int
    output_tokens: int


async def run_load(
    url: str,
    model: str | None,
    workload: Workload,
    rate: float,
    seconds: float,
    *,
    api_key: str | None = None,
    max_in_flight: int = 256,
    on_progress: Callable[[LoadProgress], None] | None = None,
    seed: int = 0,
    allow_remote: bool = False,
    own: bool = False,
    grace_seconds: float = GRACE_SECONDS,
    stop: asyncio.Event | None = None,
) -> LoadReport:
    """Send ``rate`` requests per second of a workload's shape for ``seconds``, then wait for the answers.

    Open loop: requests are sent when they are due, whatever the server does, but at most ``max_in_flight`` are under
    way at once. It ends when all answers are in, ``grace_seconds`` after the last arrival could be, or when ``stop``
    is set; what is then unfinished counts as failed. ``model`` None takes the first one served; ``api_key`` None
    takes ``VLLM_API_KEY`` of the environment. ``own`` says that the address is that of a server of ours, so on this
    machine whatever it looks like, with a certificate that nobody has to trust.

    Raises:
        LoadError: a figure makes no sense, the server is not on this machine, or does not answer.
    """
    _check(rate, seconds, max_in_flight)
    base = check_url(url, allow_remote=allow_remote or own)
    stop = stop or asyncio.Event()
    tally = Tally(seed)
    async with open_client(base, api_key or os.environ.get("VLLM_API_KEY"), max_in_flight, own=own) as client:
        target = await find_target(client, model)
        shape = Shape(workload, seed=seed, max_model_len=target.max_model_len)
        sender = Sender(client, target.model, tally, max_in_flight)
        begin = time.perf_counter()
        with _progress(tally, begin, on_progress):
            kind = "stopped before the answer was complete"
            try:
                async with asyncio.timeout(seconds + grace_seconds):
                    await sender.play(shape.stream(rate, seconds), stop)
                    await sender.drain(stop)
            except TimeoutError:
                kind = f"unfinished {grace_seconds:g} s after the last arrival"
            finally:
                await sender.cancel(kind)
        return tally.report(time.perf_counter() - begin, request_count(rate, seconds))


def run_load_sync(*args: Any, **kwargs: Any) -> LoadReport:
    """`run_load` for code without an event loop. SIGINT and SIGTERM end the load early, with its report."""

    async def main() -> LoadReport:
        stop = asyncio.Event()
        stop_on_signals(stop)
        return await run_load(*args, stop=stop, **kwargs)

    return asyncio.run(main())


def stop_on_signals(stop: asyncio.Event) -> None:
    """Let SIGINT and SIGTERM set ``stop``; of no effect outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)


def _check(rate: float, seconds: float, max_in_flight: int) -> None:
    if not (math.isfinite(rate) and math.isfinite(seconds) and rate > 0 and seconds > 0):
        raise LoadError("rate and duration must be greater than 0")
    if request_count(rate, seconds) > MOST_REQUESTS:
        raise LoadError(f"that would be {rate * seconds:.0f} requests; at most {MOST_REQUESTS} are sent in one go")
    if max_in_flight < 1:
        raise LoadError("at least one request must be allowed in flight")


@contextlib.contextmanager
def _progress(tally: Tally, begin: float, tell: Callable[[LoadProgress], None] | None) -> Iterator[None]:
    """Tell the progress twice a second, and once more at the end."""
    if tell is None:
        yield
        return

    def now() -> LoadProgress:
        elapsed = time.perf_counter() - begin
        return LoadProgress(elapsed, tally.sent, tally.completed, tally.failed, tally.in_flight, tally.output_tokens)

    async def repeat() -> None:
        while True:
            tell(now())
            await asyncio.sleep(PROGRESS_SECONDS)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        tell(now())

"""Runs blocking calls in threads that never delay quitting."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

from textual.dom import DOMNode

from vllm_launchers.errors import OperationError

T = TypeVar("T")

SWITCH_SECONDS = 0.0005
"""How long a computing thread may hold the GIL. Python's default of 5 ms is long for a UI event."""


def favor_the_screen() -> None:
    """Make computing threads (reading metrics, logs, records) yield to the UI thread sooner.

    Also exempts existing objects from garbage collection, which pauses all threads.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()


class _Worker:
    """A daemon thread that runs one call after another, so that frequent calls need no new threads."""

    idle: ClassVar[list[_Worker]] = []
    """Idle threads; at most as many as there were simultaneous calls."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    @classmethod
    def call(cls, name: str, call: Callable[[], None]) -> None:
        """Run ``call`` in a thread, which has this name meanwhile."""
        try:
            worker = cls.idle.pop()
        except IndexError:
            worker = cls()
        worker._calls.put((name, call))

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            thread.name, call = self._calls.get()
            call()
            del call  # it may keep a screen alive
            thread.name = "idle"
            self.idle.append(self)


def in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``call`` in a daemon thread; await the result.

    Unlike with `asyncio.to_thread`, a call that hangs forever (a driver after a fault) does not keep the program from
    exiting. Exceptions of ``call`` are raised here.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as caught:  # noqa: BLE001 - the thread's boundary: passed to the awaiting task
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody is waiting

    _Worker.call(name, work)
    return future


async def woken(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until ``event`` is set, setting it after ``seconds``. Unlike `asyncio.wait_for`, needs no extra task."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set) if seconds is not None else None
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()


async def answer_for(asker: DOMNode, call: Callable[[], T], name: str) -> T:
    """`in_thread` for a screen's worker: cancels the worker if the screen was closed meanwhile.

    A screen's widgets are removed before its workers end, so a worker that continued would draw on removed widgets.
    """
    try:
        return await in_thread(call, name)
    finally:
        if not asker.display:
            raise asyncio.CancelledError


def failure(error: Exception, doing: str) -> str:
    """The message for a failed call: the fleet's own sentence; other errors are prefixed with what was being done."""
    return str(error) if isinstance(error, OperationError) else f"{doing}: {error}"


def begin_worker(node: DOMNode, work: Callable[[], Coroutine[Any, Any, None]], name: str, group: str) -> None:
    """Run ``work``, replacing the running worker of its group. Work that begins with a sleep is thereby debounced.

    ``work`` is a function, not a coroutine: a coroutine that is replaced before it starts would never be awaited.
    """
    run: Any = work
    node.run_worker(run, name=name, group=group, exclusive=True)

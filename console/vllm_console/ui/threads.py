"""Blocking calls off the screen's thread, in threads that never hold up quitting."""

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
"""How long a thread that computes may keep the interpreter from the screen's; Python's own 5 ms are long per event."""


def favor_the_screen() -> None:
    """Have threads that compute (reading metrics, logs, records) yield to the screen's thread sooner.

    The program's own objects are exempt from garbage collection too, which would pause all threads.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()


class _Worker:
    """A daemon thread that makes one call after another, so that a call every second needs no new thread."""

    idle: ClassVar[list[_Worker]] = []
    """Those that wait for a call: no more than there were calls at the same time."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    @classmethod
    def call(cls, name: str, call: Callable[[], None]) -> None:
        """Have this called, in a thread of this name meanwhile."""
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
            del call  # it may hold a screen
            thread.name = "idle"
            self.idle.append(self)


def in_thread(call: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run ``call`` in a daemon thread; its result is to be awaited.

    Unlike `asyncio.to_thread`, a call that hangs for ever (a driver after a fault) doesn't keep the program from
    ending. What ``call`` raises is raised here.
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
        except BaseException as caught:  # noqa: BLE001 - the thread's boundary: handed to whoever awaits
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    _Worker.call(name, work)
    return future


async def woken(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until ``event`` is set. After ``seconds`` it is set here; `asyncio.wait_for` would make a task for that."""
    timer = asyncio.get_running_loop().call_later(seconds, event.set) if seconds is not None else None
    try:
        await event.wait()
    finally:
        if timer is not None:
            timer.cancel()


async def answer_for(asker: DOMNode, call: Callable[[], T], name: str) -> T:
    """`in_thread` for a worker of a screen that may be left meanwhile: then the worker ends here.

    A screen's parts go before its workers do, so that one that goes on would draw on what is no longer there.
    """
    try:
        return await in_thread(call, name)
    finally:
        if not asker.display:
            raise asyncio.CancelledError


def failure(error: Exception, doing: str) -> str:
    """What to say of a call that failed: the fleet's own sentence; of any other error what was not done, too."""
    return str(error) if isinstance(error, OperationError) else f"{doing}: {error}"


def begin_worker(node: DOMNode, work: Callable[[], Coroutine[Any, Any, None]], name: str, group: str) -> None:
    """Run ``work`` in place of what its group does.

    It is a function, not the coroutine that it makes: one that is replaced before it began would never be awaited.
    """
    run: Any = work
    node.run_worker(run, name=name, group=group, exclusive=True)

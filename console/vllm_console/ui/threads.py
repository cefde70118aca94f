"""Blocking calls off the screen's thread, in threads that never hold up quitting."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from textual.dom import DOMNode

T = TypeVar("T")

SWITCH_SECONDS = 0.0005
"""How long a thread that computes may keep the interpreter from the screen's; Python's own 5 ms are long per event."""


def favor_the_screen() -> None:
    """Have threads that compute (reading metrics, logs, records) yield to the screen's thread sooner.

    The program's own objects are exempt from garbage collection too, which would pause all threads.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Run ``call`` in a daemon thread of its own and await its result.

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

    threading.Thread(target=work, name=name, daemon=True).start()
    return await future


async def answer_for(asker: DOMNode, call: Callable[[], T], name: str) -> T:
    """`in_thread` for a worker of a screen that may be left meanwhile: then the worker ends here.

    A screen's parts go before its workers do, so that one that goes on would draw on what is no longer there.
    """
    try:
        return await in_thread(call, name)
    finally:
        if not asker.display:
            raise asyncio.CancelledError


def begin_worker(node: DOMNode, work: Callable[[], Coroutine[Any, Any, None]], name: str, group: str) -> None:
    """Run ``work`` in place of what its group does.

    It is a function, not the coroutine that it makes: one that is replaced before it began would never be awaited.
    """
    run: Any = work
    node.run_worker(run, name=name, group=group, exclusive=True)

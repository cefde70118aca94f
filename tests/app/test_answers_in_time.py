"""A result that arrives while the screen that requested it is being closed."""

from __future__ import annotations

import asyncio
import threading

import pytest
from textual.app import App
from textual.screen import Screen

from vllm_console.ui.threads import answer_for, in_thread


async def ask(screen: Screen[None], call) -> tuple[asyncio.Task[str], threading.Event]:
    """Make a call whose result arrives only when the event is set."""
    asked, answered = threading.Event(), threading.Event()

    def wait() -> str:
        asked.set()
        assert answered.wait(30)
        return call()

    task = asyncio.ensure_future(answer_for(screen, wait, "test"))
    await asyncio.to_thread(asked.wait, 30)
    return task, answered


async def test_a_screen_that_stays_gets_its_answer():
    async with App().run_test() as pilot:
        task, answered = await ask(pilot.app.screen, lambda: "yes")
        answered.set()
        assert await task == "yes"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_screen_that_is_being_left_gets_none(fails: bool):
    """Neither a result nor an error: both would be drawn on something that no longer exists."""

    def call() -> str:
        if fails:
            raise OSError("no")
        return "yes"

    async with App().run_test() as pilot:
        left = Screen[None]()
        await pilot.app.push_screen(left)
        task, answered = await ask(left, call)
        left.dismiss(None)
        answered.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_call_that_hangs_holds_up_no_other():
    """Threads are reused, but never while they still have a call to finish."""
    asked, answered = threading.Event(), threading.Event()

    def hang() -> str:
        asked.set()
        assert answered.wait(30)
        return threading.current_thread().name

    hanging = asyncio.ensure_future(in_thread(hang, "hangs"))
    await asyncio.to_thread(asked.wait, 30)
    names = [await in_thread(lambda: threading.current_thread().name, f"call {number}") for number in range(5)]
    assert names == [f"call {number}" for number in range(5)]
    answered.set()
    assert await hanging == "hangs"

"""Makes a Textual pilot continue after a key or a pause a few milliseconds after the app is idle.

Textual's own waits for 20 ms in which the process computes for less than 1 ms, twice for each key: half of the time
that tests of screens took.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from textual._context import active_app

STEP_SECONDS, IDLE_SECONDS = 0.004, 0.0004
"""Idle means less than a tenth of a step of CPU time in all threads together."""


async def wait_for_idle(_min_sleep: float = 0.0, max_sleep: float = 1.0) -> None:
    """Wait until no callback is due and no thread computes, then draw the next frame."""
    deadline = time.monotonic() + max_sleep
    while time.monotonic() < deadline:
        before = time.process_time()
        await asyncio.sleep(STEP_SECONDS)
        if time.process_time() - before < IDLE_SECONDS and await _nothing_is_due():
            break
    app = active_app.get(None)
    if app is not None and app.screen_stack and app.screen.is_running:
        app.screen._on_timer_update()


async def _nothing_is_due() -> bool:
    """Whether the loop would wait now, and still would after another turn."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(2):
        await asyncio.sleep(0)
        if ready:
            return False
    return True


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a pilot continue as soon as the app is idle."""
    monkeypatch.setattr("textual.app.wait_for_idle", wait_for_idle)
    monkeypatch.setattr("textual.pilot.wait_for_idle", wait_for_idle)

"""Makes a Textual pilot continue after a key or a pause once the app has been idle for a few milliseconds.

Textual waits for 20 ms with less than 1 ms of CPU time, twice per key: half of the time of screen tests.
"""

from __future__ import annotations

import asyncio
import time

import pytest
from textual._context import active_app

STEP_SECONDS, IDLE_SECONDS = 0.004, 0.0004
"""Idle means that all threads together used less than a tenth of a step of CPU time."""


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
    """Whether the event loop would wait now, and still would after another iteration."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]
    for _ in range(2):
        await asyncio.sleep(0)
        if ready:
            return False
    return True


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textual.app.wait_for_idle", wait_for_idle)
    monkeypatch.setattr("textual.pilot.wait_for_idle", wait_for_idle)

"""For tests that open the app: a console on the fake fleet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from fakes.headless import parsed_once, undrawn  # noqa: F401 - fixtures of all tests here
from fakes.idle import soon_idle  # noqa: F401 - a fixture of all tests here
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.screens import dialogs

REFRESH_SECONDS, POLL_SECONDS = 1.0, 0.05
"""Interval of the console's own polls, and of polls while a test waits. Polling and drawing the results took a third of
the CPU time of these tests."""


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late question can be answered as soon as it appears."""
    monkeypatch.setattr(dialogs, "UNREAD_SECONDS", 0.0)


class Console:
    """The app under a pilot, with helpers for tests."""

    def __init__(self, app: ConsoleApp, pilot: Pilot[None], fleet: Any) -> None:
        self.app, self.pilot, self.fleet = app, pilot, fleet

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait for a condition up to three minutes, because machines may be busy; poll often until it holds."""
        end = time.monotonic() + 180
        poll_at = 0.0
        while not condition():
            assert time.monotonic() < end, f"never true: {what or condition}; screen:\n{self.text}"
            if time.monotonic() >= poll_at:
                self.app.poll_now()
                poll_at = time.monotonic() + POLL_SECONDS
            await asyncio.sleep(0.01)
            await self.pilot.pause()

    async def settle(self) -> None:
        """Wait until the first frame is laid out: a pause draws it, and widgets that then change size are drawn
        again."""
        before = None
        while (now := [widget.region for widget in self.app.operations.query("*")]) != before:
            before = now
            await self.pilot.pause()

    @property
    def text(self) -> str:
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)

    async def sees(self, text: str) -> None:
        await self.until(lambda: text in self.text, f"{text!r} on the screen")

    async def lacks(self, text: str) -> None:
        await self.until(lambda: text not in self.text, f"{text!r} not on the screen")


@pytest.fixture
def console(fakes: ModuleType) -> Callable[..., AbstractAsyncContextManager[Console]]:
    @asynccontextmanager
    async def run(
        *servers: Any, size: tuple[int, int] = (120, 40), fleet: Any = None, **options: Any
    ) -> AsyncIterator[Console]:
        fleet = fleet or fakes.FakeFleet(*(servers or fakes.EVERY_STATE))
        app = ConsoleApp(fleet, **{"refresh": REFRESH_SECONDS, **options})
        async with app.run_test(size=size) as pilot:
            console = Console(app, pilot, fleet)
            await console.until(lambda: app.snapshot is not None or fleet.look_error or not fleet.open.is_set())
            await console.settle()
            try:
                yield console
            finally:
                fleet.open.set()

    return run

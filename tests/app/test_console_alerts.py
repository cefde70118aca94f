"""The console passes every snapshot to a notifier, and reports notifications that failed."""

from __future__ import annotations

import asyncio
from types import ModuleType

import pytest
from textual.drivers.headless_driver import HeadlessDriver

import vllm_console.ui.app as app_module
from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.ui.app import ConsoleApp


class FakeNotifier:
    def __init__(self) -> None:
        self.looks: list[FleetSnapshot] = []
        self.write: object = None
        self.trouble = ""

    def update(self, snapshot: FleetSnapshot) -> tuple[()]:
        self.looks.append(snapshot)
        self.trouble = "the webhook at example.org answered 500: a message was lost"
        return ()


async def test_every_poll_notifies_and_trouble_is_reported_once(fakes: ModuleType) -> None:
    notifier = FakeNotifier()
    app = ConsoleApp(fakes.FakeFleet(lambda at: fakes.ready("chat", at, 1.0)), refresh=0.05, notifier=notifier)  # type: ignore[arg-type]
    said: list[str] = []
    say = app.say
    app.say = lambda text, style=None: (said.append(text), say(text, style))[1]  # type: ignore[method-assign]
    async with app.run_test(size=(120, 40)) as pilot:
        async with asyncio.timeout(20):
            while len(notifier.looks) < 3:
                await pilot.pause(0.01)
        assert callable(notifier.write)
        notifier.write(b"\x07")
    assert notifier.looks[0].server("chat") is not None
    assert said == [notifier.trouble]


async def test_what_the_first_snapshot_has_rings_once_there_is_a_terminal(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ringing(FakeNotifier):
        def update(self, snapshot: FleetSnapshot) -> tuple[()]:
            if not self.looks and callable(self.write):
                self.write(b"\x07")
            self.looks.append(snapshot)
            return ()

    written: list[str] = []
    monkeypatch.setattr(app_module, "FIRST_SECONDS", 60)
    monkeypatch.setattr(ConsoleApp, "is_headless", False)
    monkeypatch.setattr(HeadlessDriver, "write", lambda self, data: written.append(data))
    monkeypatch.setattr(ConsoleApp, "on_mount", lambda self: None)  # it handles signals if there is a terminal
    app = ConsoleApp(fakes.FakeFleet(fakes.chat), refresh=60, notifier=Ringing())  # type: ignore[arg-type]
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
    assert written.count("\x07") == 1

"""Shared by all screenshots: the console on a fake fleet, a single screen, and waiting until nothing changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
from rich.terminal_theme import TerminalTheme
from textual.app import App
from textual.filter import LineFilter
from textual.pilot import Pilot

from fakes.headless import parsed_once  # noqa: F401 - a fixture of all tests here
from fakes.idle import soon_idle  # noqa: F401 - a fixture of all tests here
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.theme import CONSOLE_THEME, AsciiFilter


async def _settled(pilot: Pilot[Any]) -> None:
    """Wait for the first snapshot, for the verdict on staged changes, and until everything is drawn."""
    app = pilot.app
    assert isinstance(app, ConsoleApp)
    for _ in range(500):
        await pilot.pause()
        server = app.operations.selected
        verdict = app.operations.staged_state(server).verdict if server is not None else None
        judged = verdict is None or "checking" not in verdict.message
        if app.snapshot is not None and judged and (server is None or server.series is not None):
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the first look, or the verdict, never came")
    app.operations.redraw()
    await pilot.pause()


def _pressing(*keys: str) -> Callable[[Pilot[Any]], Any]:
    async def run(pilot: Pilot[Any]) -> None:
        await _settled(pilot)
        if keys:
            await pilot.press(*keys)
            await _settled(pilot)

    return run


@pytest.fixture
def pressing() -> Callable[..., Callable[[Pilot[Any]], Any]]:
    """For ``run_before``: settle; press the keys, if any, and settle again."""
    return _pressing


@pytest.fixture
def app(fakes: ModuleType) -> Callable[..., ConsoleApp]:
    """Make the console on a fleet of these servers, by default one in every state; ``gpus`` are the fleet's GPUs."""

    def make(*servers: Any, gpus: Any = None, **options: Any) -> ConsoleApp:
        fleet = fakes.FakeFleet(*(servers or fakes.EVERY_STATE))
        if gpus is not None:
            fleet.gpus = gpus
            known = gpus["host"].gpus if gpus.get("host") is not None else ()
            fleet.gpu_charts = {gpu.index: fakes.gpu_chart_at(gpu, fakes.NOW) for gpu in known}
        return ConsoleApp(fleet, **{"refresh": 0.25, **options})

    return make


LIGHT = TerminalTheme(
    (255, 255, 255),
    (30, 30, 30),
    [(0, 0, 0), (194, 28, 28), (38, 125, 30), (140, 100, 0), (0, 80, 180), (135, 40, 135), (0, 115, 125),
     (200, 200, 200)],
    [(90, 90, 90), (220, 50, 47), (60, 150, 50), (170, 125, 0), (40, 110, 210), (165, 70, 165), (0, 140, 150),
     (255, 255, 255)],
)  # fmt: skip
"""The sixteen colors of a terminal with a light background; the console uses no others."""


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, bool]]:
    """Draw as on a ``light`` terminal, with ``no-color`` or in ``ascii``; returns options for `app`."""

    def choose(name: str) -> dict[str, bool]:
        if name == "light":
            monkeypatch.setattr("rich.console.SVG_EXPORT_THEME", LIGHT)
        elif name == "no-color":
            monkeypatch.setenv("NO_COLOR", "1")
        return {"ascii": name == "ascii"}

    return choose


class Host(App[None]):
    CSS = "Screen { background: ansi_default; color: ansi_default; }"
    ascii = False

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(ansi_color=True)
        self.animation_level = "none"
        self.register_theme(CONSOLE_THEME)
        self.theme = CONSOLE_THEME.name
        self._make = make

    def on_mount(self) -> None:
        self.push_screen(self._make())

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), *((AsciiFilter(),) if self.ascii else ())]


@pytest.fixture
def alone() -> Callable[[Callable[[], Any]], App[None]]:
    """Make an app that shows one screen, which the given function creates."""
    return Host

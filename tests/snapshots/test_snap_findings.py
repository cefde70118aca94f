"""Pictures of findings, cures and starts at three sizes."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from vllm_console.ui.app import ConsoleApp

SIZES = pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")


async def settled(pilot: Pilot[Any]) -> None:
    """Wait for the first look and until nothing is being worked out any more."""
    app = pilot.app
    assert isinstance(app, ConsoleApp)
    for _ in range(500):
        await pilot.pause()
        server = app.operations.selected
        known = server is not None and server.series is not None
        if known and server is not None:
            verdict = app.operations.told(server).verdict
            if verdict is None or "checking" not in verdict.words:
                break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the first look, or the verdict, never came")
    app.operations.redraw()
    await pilot.pause()


def pressing(*keys: str) -> Any:
    """Settle, press keys, settle."""

    async def run(pilot: Pilot[Any]) -> None:
        await settled(pilot)
        await pilot.press(*keys)
        await settled(pilot)

    return run


@pytest.fixture
def app(fakes: ModuleType) -> Any:
    def make(*servers: Any, **options: Any) -> ConsoleApp:
        return ConsoleApp(fakes.FakeFleet(*servers), **{"refresh": 0.25, **options})

    return make


@SIZES
def test_pressure(snap_compare, app, fakes, size):
    servers = (fakes.pressed, fakes.calm, fakes.loading)
    assert snap_compare(app(*servers), terminal_size=size, run_before=settled)


@SIZES
def test_cure_staged(snap_compare, app, fakes, size):
    servers = (fakes.pressed, fakes.calm, fakes.loading)
    assert snap_compare(app(*servers), terminal_size=size, run_before=pressing("f"))


def test_pressure_in_ascii(snap_compare, app, fakes):
    servers = (fakes.calm, fakes.pressed)
    assert snap_compare(app(*servers, ascii=True), terminal_size=(80, 24), run_before=pressing("j"))


def test_pressure_without_colour(snap_compare, app, fakes, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    servers = (fakes.pressed, fakes.calm)
    assert snap_compare(app(*servers), terminal_size=(120, 40), run_before=settled)


@SIZES
def test_healthy(snap_compare, app, fakes, size):
    assert snap_compare(app(fakes.calm, fakes.pressed), terminal_size=size, run_before=settled)


@SIZES
def test_failed_with_a_cause(snap_compare, app, fakes, size):
    assert snap_compare(app(fakes.diagnosed, fakes.calm), terminal_size=size, run_before=settled)


@SIZES
def test_starting(snap_compare, app, fakes, size):
    assert snap_compare(app(fakes.loading, fakes.silent), terminal_size=size, run_before=settled)


@SIZES
def test_why(snap_compare, app, fakes, size):
    assert snap_compare(app(fakes.pressed), terminal_size=size, run_before=pressing("i", "j"))


def test_why_it_failed(snap_compare, app, fakes):
    assert snap_compare(app(fakes.diagnosed), terminal_size=(80, 24), run_before=pressing("i"))

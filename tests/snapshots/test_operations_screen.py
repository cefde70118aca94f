"""Pictures of the operations screen at three sizes, dark and without colours."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from textual.pilot import Pilot

from vllm_console.ui.app import ConsoleApp

SIZES = [(80, 24), (120, 40), (200, 60)]


async def settled(pilot: Pilot[Any]) -> None:
    """Wait for the first look, for the verdict on what is staged, and until everything is drawn."""
    app = pilot.app
    assert isinstance(app, ConsoleApp)
    for _ in range(500):
        await pilot.pause()
        server = app.operations.selected
        verdict = app.operations.told(server).verdict if server is not None else None
        judged = verdict is None or "checking" not in verdict.words
        if app.snapshot is not None and judged and (server is None or server.series is not None):
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the first look never came")
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
        return ConsoleApp(fakes.FakeFleet(*(servers or fakes.EVERY_STATE)), **{"refresh": 0.25, **options})

    return make


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("colour", ["dark", "no-colour"])
def test_every_state(snap_compare, app, monkeypatch, size, colour):
    if colour == "no-colour":
        monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app(), terminal_size=size, run_before=settled)


def test_ascii(snap_compare, app):
    assert snap_compare(app(ascii=True), terminal_size=(80, 24), run_before=settled)


@pytest.mark.parametrize("pane", ["2", "3", "4", "5"])
def test_one_pane_at_a_time(snap_compare, app, pane):
    assert snap_compare(app(), terminal_size=(80, 24), run_before=pressing(pane))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_starting(snap_compare, app, size):
    assert snap_compare(app(), terminal_size=size, run_before=pressing("j", "j"))


def test_failed(snap_compare, app):
    assert snap_compare(app(), terminal_size=(80, 24), run_before=pressing("j", "j", "j"))


def test_staged_changes(snap_compare, app):
    run = pressing("left_square_bracket", "v", "p")
    assert snap_compare(app(), terminal_size=(120, 40), run_before=run)


def test_restart_asks(snap_compare, app):
    run = pressing("left_square_bracket", "r")
    assert snap_compare(app(), terminal_size=(80, 24), run_before=run)


def test_switch_preset(snap_compare, app):
    async def run(pilot: Pilot[Any]) -> None:
        await pressing("w")(pilot)
        for _ in range(500):
            if pilot.app.screen is not pilot.app.operations:  # type: ignore[attr-defined]
                break
            await asyncio.sleep(0.01)
        await pilot.press("j")

    assert snap_compare(app(), terminal_size=(80, 24), run_before=run)


def test_describe(snap_compare, app):
    assert snap_compare(app(), terminal_size=(120, 40), run_before=pressing("d"))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_help(snap_compare, app, size):
    assert snap_compare(app(), terminal_size=size, run_before=pressing("question_mark"))


def test_wide_names(snap_compare, app, fakes):
    def wide(at: float) -> Any:
        return replace(fakes.chat(at), name="日本語モデル", preset="😀 preset")

    assert snap_compare(app(wide, fakes.coder), terminal_size=(120, 40), run_before=settled)


def test_read_only(snap_compare, app):
    assert snap_compare(app(read_only=True), terminal_size=(80, 24), run_before=settled)


def test_no_servers(snap_compare, fakes):
    fleet = fakes.FakeFleet()
    assert snap_compare(ConsoleApp(fleet, refresh=0.25), terminal_size=(80, 24), run_before=settled)

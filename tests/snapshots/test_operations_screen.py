"""Pictures of the operations screen at three sizes, dark and without colours."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot

from vllm_console.ui.app import ConsoleApp

SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("colour", ["dark", "no-colour"])
def test_every_state(snap_compare, app, pressing, monkeypatch, size, colour):
    if colour == "no-colour":
        monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app(), terminal_size=size, run_before=pressing())


def test_ascii(snap_compare, app, pressing):
    assert snap_compare(app(ascii=True), terminal_size=(80, 24), run_before=pressing())


@pytest.mark.parametrize("pane", ["2", "3", "4", "5"])
def test_one_pane_at_a_time(snap_compare, app, pressing, pane):
    assert snap_compare(app(), terminal_size=(80, 24), run_before=pressing(pane))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_starting(snap_compare, app, pressing, size):
    assert snap_compare(app(), terminal_size=size, run_before=pressing("j", "j"))


def test_failed(snap_compare, app, pressing):
    assert snap_compare(app(), terminal_size=(80, 24), run_before=pressing("j", "j", "j"))


def test_staged_changes(snap_compare, app, pressing):
    run = pressing("left_square_bracket", "v", "p")
    assert snap_compare(app(), terminal_size=(120, 40), run_before=run)


def test_restart_asks(snap_compare, app, pressing):
    run = pressing("left_square_bracket", "r")
    assert snap_compare(app(), terminal_size=(80, 24), run_before=run)


def test_switch_preset(snap_compare, app, pressing):
    async def run(pilot: Pilot[Any]) -> None:
        await pressing("w")(pilot)
        for _ in range(500):
            if pilot.app.screen is not pilot.app.operations:  # type: ignore[attr-defined]
                break
            await asyncio.sleep(0.01)
        await pilot.press("j")

    assert snap_compare(app(), terminal_size=(80, 24), run_before=run)


def test_describe(snap_compare, app, pressing):
    assert snap_compare(app(), terminal_size=(120, 40), run_before=pressing("d"))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_help(snap_compare, app, pressing, size):
    assert snap_compare(app(), terminal_size=size, run_before=pressing("question_mark"))


def test_wide_names(snap_compare, app, pressing, fakes):
    def wide(at: float) -> Any:
        return replace(fakes.chat(at), name="日本語モデル", preset="😀 preset")

    assert snap_compare(app(wide, fakes.coder), terminal_size=(120, 40), run_before=pressing())


def test_read_only(snap_compare, app, pressing):
    assert snap_compare(app(read_only=True), terminal_size=(80, 24), run_before=pressing())


def test_no_servers(snap_compare, fakes, pressing):
    fleet = fakes.FakeFleet()
    assert snap_compare(ConsoleApp(fleet, refresh=0.25), terminal_size=(80, 24), run_before=pressing())

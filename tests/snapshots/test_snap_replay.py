"""Screenshots of a replayed run, and of the question before its server is removed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot

from vllm_console.ui.app import ConsoleApp

SIZES = [(60, 15), (80, 24), (120, 40), (200, 60), (200, 20)]
LOOKS = ["light", "no-color", "ascii"]


@pytest.fixture
def replayed(fakes, pressing):
    """The console on a run whose metrics were read; then ``keys`` are pressed."""

    def make(removed: bool = True, *keys: str, **options: Any) -> tuple[ConsoleApp, Any]:
        replay = fakes.REPLAY if removed else replace(fakes.REPLAY, name="chat@2", removed=False)
        fleet = fakes.FakeFleet(fakes.chat, fakes.coder)
        fleet.replayed = {replay.name: replay}
        app = ConsoleApp(fleet, refresh=0.25, replay=replay, **options)

        async def run(pilot: Pilot[Any]) -> None:
            for key in ("", *keys):
                if key:
                    await pilot.press(key)
                for _ in range(500):
                    server = app.operations.selected
                    if server is not None and server.moment == app.operations.time.view.at:
                        break
                    await asyncio.sleep(0.01)
                else:
                    pytest.fail("the moment was never shown")
            await pressing()(pilot)

        return app, run

    return make


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_size(snap_compare, replayed, size):
    app, run = replayed()
    assert snap_compare(app, terminal_size=size, run_before=run)


@pytest.mark.parametrize("look_name", LOOKS)
def test_appearance(snap_compare, replayed, look, look_name):
    app, run = replayed(**look(look_name))
    assert snap_compare(app, terminal_size=(80, 24), run_before=run)


def test_of_a_present_server_on_a_marker(snap_compare, replayed):
    app, run = replayed(False, "comma")
    assert snap_compare(app, terminal_size=(120, 40), run_before=run)


@pytest.mark.parametrize("size", [(60, 15), (80, 24)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_forgetting(snap_compare, app, pressing, fakes, size):
    assert snap_compare(app(fakes.stopped), terminal_size=size, run_before=pressing("x"))

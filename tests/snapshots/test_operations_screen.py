"""Screenshots of the operations screen in its states; `test_every_screen` has it at every size and appearance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Input

from vllm_console.fleet.markers import Marker, MarkerKind
from vllm_console.ui.app import ConsoleApp
from vllm_launchers.host.gpu.document import read_host

SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.mark.parametrize("size", SIZES[1:], ids=lambda size: f"{size[0]}x{size[1]}")
def test_every_state_without_color(snap_compare, app, pressing, monkeypatch, size):
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(app(), terminal_size=size, run_before=pressing())


@pytest.mark.parametrize("pane", ["2", "3", "4", "5"])
def test_one_pane_at_a_time(snap_compare, app, pressing, pane):
    assert snap_compare(app(), terminal_size=(80, 24), run_before=pressing(pane))


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_starting(snap_compare, app, pressing, size):
    assert snap_compare(app(), terminal_size=size, run_before=pressing("j", "j"))


def test_failed(snap_compare, app, pressing):
    assert snap_compare(app(), terminal_size=(80, 24), run_before=pressing("j", "j", "j"))


@pytest.mark.parametrize("size", [(60, 15), (120, 24), (200, 20), (90, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_best_layout_for_other_sizes(snap_compare, app, pressing, fakes, size):
    servers = app(fakes.pressed, fakes.coder, gpus={"host": read_host(Path("4xa6000")), "host_recorded": True})
    assert snap_compare(servers, terminal_size=size, run_before=pressing())


def test_one_large_pane_on_a_large_screen(snap_compare, app, pressing, fakes):
    assert snap_compare(app(fakes.pressed, fakes.coder), terminal_size=(120, 40), run_before=pressing("3"))


def test_sorted_with_marked_servers(snap_compare, app, pressing):
    run = pressing("asterisk", "j", "asterisk", "o", "down", "down", "enter")
    assert snap_compare(app(), terminal_size=(120, 40), run_before=run)


def test_staged_changes(snap_compare, app, pressing):
    run = pressing("left_square_bracket", "v", "p")
    assert snap_compare(app(), terminal_size=(120, 40), run_before=run)


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_a_tuner_at_work(snap_compare, app, pressing, fakes, size):
    assert snap_compare(app(fakes.tuned, fakes.coder), terminal_size=size, run_before=pressing())


def test_wide_names(snap_compare, app, pressing, fakes):
    def wide(at: float) -> Any:
        return replace(fakes.chat(at), name="日本語モデル", preset="😀 preset")

    assert snap_compare(app(wide, fakes.coder), terminal_size=(120, 40), run_before=pressing())


def test_read_only(snap_compare, app, pressing):
    assert snap_compare(app(read_only=True), terminal_size=(80, 24), run_before=pressing())


def test_no_servers(snap_compare, fakes, pressing):
    fleet = fakes.FakeFleet()
    assert snap_compare(ConsoleApp(fleet, refresh=0.25), terminal_size=(80, 24), run_before=pressing())


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("pane", ["", "3"], ids=["all", "latency"])
def test_an_earlier_moment(snap_compare, fakes, pressing, size, pane):
    """The cursor on a marker, latencies on a logarithmic scale."""
    fleet = fakes.FakeFleet(fakes.chat, fakes.coder)
    fleet.markers = (
        Marker(fakes.NOW - 700, MarkerKind.LOAD, "b", "Load began: 4 requests/s"),
        Marker(fakes.NOW - 500, MarkerKind.START, "r3", "Restarted: run 3: --max-num-seqs 512 → 256"),
        Marker(fakes.NOW - 200, MarkerKind.FINDING, "!", "Finding began: preempting"),
        Marker(fakes.NOW - 60, MarkerKind.CRASH, "✗", "Exited unexpectedly: exit code 1"),
    )
    app = ConsoleApp(fleet, refresh=0.25)

    async def run(pilot: Pilot[Any]) -> None:
        await pressing()(pilot)
        await pilot.press(*pane, "Y", "comma", "comma", "comma")
        for _ in range(500):
            if app.snapshot.earlier is not None and app.snapshot.earlier.moment == fakes.NOW - 500:
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("the moment of the marker was never shown")
        await pressing()(pilot)

    assert snap_compare(app, terminal_size=size, run_before=run)


@pytest.mark.parametrize("theme", ["dark", "light", "high-contrast", "nord", "gruvbox"])
def test_themes(snap_compare, app, pressing, fakes, monkeypatch, theme):
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    servers = app(fakes.pressed, fakes.coder, fakes.diagnosed, theme=theme)
    assert snap_compare(servers, terminal_size=(120, 40), run_before=pressing("left_square_bracket"))


async def _steady_cursor(pilot: Pilot[Any]) -> None:
    """Otherwise the screenshot depends on when it is taken."""
    pilot.app.screen.query_one(Input).cursor_blink = False
    await pilot.pause()


@pytest.mark.parametrize("size", SIZES[:2], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_filter(snap_compare, app, pressing, size):
    async def run(pilot: Pilot[Any]) -> None:
        await pressing("slash", *"coder")(pilot)
        await _steady_cursor(pilot)

    assert snap_compare(app(), terminal_size=size, run_before=run)


def test_chosen_columns(snap_compare, app, pressing):
    servers = app(columns=("name", "owner", "model", "kv", "ttft", "state"))
    assert snap_compare(servers, terminal_size=(120, 24), run_before=pressing())

"""Startup on the screen: progress, remaining time, the engine's memory report, and silence."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.logs.startup import Progress, Startup
from vllm_console.logs.startup_facts import Stage
from vllm_console.ui.panes.servers import columns_for, row
from vllm_console.ui.panes.state import format_left, stage_lines, state_lines
from vllm_launchers.keeper.records import State
from vllm_launchers.plan.budget.budget import EngineReport


def text(lines, width=200):
    assert all(strip.cell_length <= width for strip in lines)
    return "\n".join(strip.text.rstrip() for strip in lines)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_how_far_it_is_and_how_long_yet_stand_above_the_stages(console, fakes, size):
    async with console(fakes.loading, size=size) as c:
        await c.sees("Start-up of docs")
        await c.sees(" 40%  ~50s left (last start took 1m26s)")
        await c.sees("download")
        await c.sees("15.0 GiB, 812 MiB/s")
        await c.sees("weights 15.0 GiB")


async def test_a_server_that_failed_while_it_served_keeps_its_last_minutes_in_the_panes(console, fakes):
    """The finding area shows why it failed, and the log is one of the panes."""

    def crashed(at):
        return replace(fakes.diagnosed(at), last_window=fakes.window_at(fakes.NOW - 200, 0.9))

    async with console(crashed) as c:
        await c.sees("KV cache too small for max-model-len")
        await c.sees(" of 441k tokens")
        assert "Start-up" not in c.text
        row = next(row for row in c.text.splitlines() if " in tok/s · " in row)
        assert "– out" not in row, "the figures of its last minute"
        assert " running · " not in c.text, "nothing runs there now"
        assert "61%" not in next(row for row in c.text.splitlines() if "nightly" in row), "the table has none"
        await c.press("3")
        await c.sees("end-to-end")


async def test_a_start_that_failed_is_shown_in_its_stages(console, fakes):
    async with console(fakes.diagnosed) as c:
        await c.sees("nightly · run")
        await c.press("1")
        await c.sees("nightly · run")


async def test_the_table_says_how_long_yet_of_a_server_that_is_not_selected(console, fakes):
    async with console(fakes.chat, fakes.loading) as c:
        await c.sees("weights 61%")
        await c.sees("~50s left")


async def test_silence_is_reported_in_table_and_pane(console, fakes):
    async with console(fakes.silent) as c:
        await c.sees("! compile: no progress for 5m12s")
        await c.sees("neither its log nor the model's cache")


def test_without_an_earlier_start_that_is_reported(fakes):
    view = replace(fakes.docs(fakes.NOW), startup=Startup())
    assert "first start of this model here" in text(state_lines(view, fakes.NOW, 80, 20), 80)


def test_what_is_not_known_of_a_start_is_left_out(fakes):
    shown = text(state_lines(fakes.docs(fakes.NOW), fakes.NOW, 80, 20), 80)
    assert "earlier start" not in shown
    assert "memory" not in shown


def test_the_engines_figures_stand_under_the_stages(fakes):
    report = EngineReport(15.0, 18.83, 176_240, 21.5, 0.54, 8192)
    view = replace(fakes.loading(fakes.NOW), startup=Startup(report=report))
    shown = text(state_lines(view, fakes.NOW, 120, 20), 120)
    assert "weights 15.0 GiB · KV cache 18.8 GiB, 176k tokens · CUDA graphs 0.5 GiB" in shown
    assert "21.5 full-length requests in parallel" in shown


def test_an_estimate_changes_in_steps_and_makes_no_promise_when_overdue():
    assert format_left(Progress(0.5, 52.4, 100)) == format_left(Progress(0.5, 48.1, 100)) == "~50s left"
    assert format_left(Progress(0.5, 7.2, 100)) == "~7s left"
    assert format_left(Progress(0.99, 0.2, 100)) == "almost done"
    assert format_left(Progress(0.5, None, 100)) == "longer than last time"


def test_long_figures_of_a_stage_take_room_from_the_bar_and_are_not_cut(fakes):
    stages = [Stage("download", fakes.NOW - 9, None, "123.4 of about 141.0 GiB, 812 MiB/s, 87%")]
    assert "812 MiB/s, 87%" in text(stage_lines(stages, fakes.NOW, 80), 80)


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_the_lines_fit_any_width(fakes, width):
    for view in (fakes.loading(fakes.NOW), fakes.silent(fakes.NOW), fakes.diagnosed(fakes.NOW)):
        row(view, columns_for([view], width), fakes.NOW, width, True)
        lines = state_lines(view, fakes.NOW, width, 30)
        assert len(lines) <= 30


def test_a_failed_server_shows_what_was_found_its_line_and_the_remedies(fakes):
    shown = text(state_lines(fakes.diagnosed(fakes.NOW), fakes.NOW, 120, 20), 120)
    assert "One request of the full context length does not fit into the KV cache." in shown
    assert "line 143: ValueError: To serve at least one request" in shown
    assert " f --max-model-len 131072 → 40960. Trade-off: Longer requests are rejected." in shown
    assert "f fix   i findings" in shown


async def test_before_the_servers_are_read_a_key_reports_it(console, fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.open.clear()
    async with console(fleet=fleet) as c:
        await c.press("f")
        await c.sees("Still reading the servers")
        assert "No server selected" not in c.text
        fleet.open.set()
        await c.sees("chat")


async def test_that_a_server_was_killed_is_shown_until_it_is_ready_again(console, fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    async with console(fleet=fleet) as c:
        await c.sees("ready")
        fleet.makers[0] = lambda at: replace(fakes.chat(at), state=State.FAILED, reason="killed", state_since=at)
        await c.until(lambda: c.app.message is not None and c.app.message[0] == "chat failed: killed", "the message")
        c.app.messages.expire()
        assert c.app.message is not None, "until it was seen"
        fleet.makers[0] = fakes.chat
        await c.until(lambda: c.app.message is None, "no message of what is over")

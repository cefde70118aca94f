"""The time that the screen shows: ranges, the cursor in the charts, and markers."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.fleet.markers import Marker, MarkerKind
from vllm_console.fleet.snapshot import StateThen
from vllm_console.history.time_view import DEFAULT_RANGE, LIVE
from vllm_console.ui.parts.time_cursor import SEEN_SECONDS
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.keeper.records import State


async def charted(c):
    """Wait until charts were read: the first snapshot has no selected server."""
    first = c.app.snapshot
    await c.until(lambda: c.app.snapshot is not first, "the second snapshot")
    await c.pilot.pause()


async def test_keys_step_through_the_ranges(console):
    async with console() as c:
        await charted(c)
        await c.sees("15m · 12:41:07")
        await c.press("right_parenthesis")
        await c.sees("1h · 12:41:07")
        await c.until(lambda: c.fleet.times[-1].range.name == "1h")
        await c.press(*["right_parenthesis"] * 9)
        await c.sees("all · 12:41:07")
        await c.press(*["left_parenthesis"] * 9)
        await c.sees("5m · 12:41:07")


async def test_the_palette_has_every_range(console):
    async with console() as c:
        await charted(c)
        await c.press("ctrl+p", *"range 6h")
        await c.sees("Charts over 6h")
        await c.press("enter")
        await c.sees("6h · 12:41:07")


async def test_the_cursor_shows_an_earlier_moment_and_end_leads_back(console, fakes):
    async with console() as c:
        await charted(c)
        await c.sees("99%")
        await c.press("left")
        await c.sees("at 12:40:50 · 17s ago · 15m  end live")
        await c.until(lambda: c.app.snapshot.earlier is not None)
        await c.press("left", "left")
        await c.sees("at 12:40:20")
        await c.press("right")
        await c.sees("at 12:40:35")
        await c.press("end")
        await c.sees("live")
        await c.until(lambda: c.fleet.times[-1] == LIVE)
        assert c.app.snapshot.earlier is None


async def test_forward_beyond_now_is_live(console):
    async with console() as c:
        await charted(c)
        await c.press("left", "right", "right")
        await c.until(lambda: c.fleet.times[-1] == LIVE)


async def test_pages_move_charts_and_cursor(console, fakes):
    async with console() as c:
        await charted(c)
        await c.until(lambda: c.app.snapshot.server("chat").series is not None)
        await c.press("shift+left")
        await c.until(lambda: c.fleet.times[-1].at is not None)
        view = c.fleet.times[-1]
        assert view.end - view.at == 5
        assert fakes.NOW - view.end == pytest.approx(900, abs=10)
        await c.press("left")
        await c.until(lambda: c.fleet.times[-1].at == view.at - 15)
        assert c.fleet.times[-1].end == view.end, "within the charts the cursor alone moves"


async def test_the_cursor_stops_where_history_begins(console, fakes):
    async with console() as c:
        await charted(c)
        await c.press(*["right_parenthesis"] * 5)
        await c.until(lambda: c.fleet.times[-1].range.name == "all")
        await c.press("shift+left")
        await c.until(lambda: c.fleet.times[-1].at == fakes.NOW - 86_400)


async def test_markers_are_jumped_to_and_explained(console, fakes):
    fleet = fakes.FakeFleet(fakes.chat, fakes.coder)
    fleet.markers = (
        Marker(fakes.NOW - 9000, MarkerKind.START, "r3", "Restarted: run 3: --max-num-seqs 256 → 128"),
        Marker(fakes.NOW - 300, MarkerKind.FINDING, "!", "Finding began: preempting"),
    )
    async with console(fleet=fleet) as c:
        await charted(c)
        await c.press("comma")
        await c.sees("! 12:36:07  Finding began: preempting")
        assert c.fleet.times[-1].range is DEFAULT_RANGE
        await c.until(lambda: c.fleet.times[-1].at == fakes.NOW - 300 + SEEN_SECONDS)
        await c.press("comma")
        await c.sees("r3 10:11:07  Restarted: run 3: --max-num-seqs 256 → 128")
        await c.until(lambda: c.fleet.times[-1].at == fakes.NOW - 9000)
        assert c.fleet.times[-1].end == fakes.NOW - 9000 + 450
        await c.press("comma")
        await c.sees("No earlier marker.")
        await c.press("full_stop")
        await c.sees("! 12:36:07  Finding began: preempting")
        said = [message.text for message in c.app.messages.history]
        assert not any("Finding began: preempting" in text or "marker" in text for text in said), (
            "m lists what happened"
        )


async def test_a_range_keeps_the_moment_under_the_cursor(console, fakes):
    async with console() as c:
        await charted(c)
        await c.press("left", "right_parenthesis")
        await c.sees("1h  end live")
        at = c.fleet.times[-1].at
        await c.press("left_parenthesis", "left_parenthesis")
        await c.sees("5m  end live")
        assert c.fleet.times[-1].at == at


async def test_another_server_is_shown_at_the_same_moment(console):
    async with console() as c:
        await charted(c)
        await c.press("left")
        await c.until(lambda: c.app.snapshot.earlier is not None)
        at = c.fleet.times[-1].at
        await c.press("j")
        await c.until(lambda: c.app.snapshot.earlier.moment == at and c.app.snapshot.earlier.name == "coder")


async def test_figures_that_are_not_of_the_moment_are_called_so(console, fakes):
    async with console(fakes.observed) as c:
        await charted(c)
        await c.press("left")
        await c.sees("figures are current")


async def test_a_server_that_has_ended_shows_its_charts_at_an_earlier_moment(console, fakes):
    async with console(fakes.stopped) as c:
        await charted(c)
        await c.sees("r start")
        assert c.app.operations.selected.state is State.STOPPED
        await c.press("left")
        await c.sees("1 KV cache")


async def test_findings_that_are_not_known_of_a_moment_are_not_called_absent(console, fakes):
    async with console(fakes.pressed) as c:
        c.fleet.no_findings = "nothing was recorded then"
        await charted(c)
        await c.press("left")
        await c.until(lambda: c.app.snapshot.earlier is not None)
        await c.press("i")
        await c.sees("No findings available for that moment: nothing was recorded then.")


async def test_a_moment_at_which_nothing_was_wrong_has_no_findings(console, fakes):
    async with console(fakes.pressed) as c:
        await charted(c)
        await c.press("left")
        await c.until(lambda: c.app.snapshot.earlier is not None)
        await c.press("i")
        await c.sees("No findings at that moment")
        await c.lacks("available for")


async def test_latencies_on_a_logarithmic_scale(console):
    async with console() as c:
        await charted(c)
        await c.press("3")
        await c.sees("TTFT p50, p99")
        await c.press("Y")
        await c.sees("TTFT p50, p99, log scale")
        await c.press("Y")
        await c.until(lambda: "log scale" not in c.text)


async def test_a_console_opens_at_an_earlier_moment(console, fakes):
    async with console(at=fakes.NOW - 7200) as c:
        await charted(c)
        await c.sees("at 10:41:07 · 2h00m ago")
        assert c.fleet.times[0].at == fakes.NOW - 7200
        assert c.fleet.times[0].end == fakes.NOW - 7200 + 450


async def test_a_paused_console_moves_in_time_too(console):
    async with console() as c:
        await charted(c)
        await c.press("space")
        await c.sees("paused")
        await c.press("left")
        await c.until(lambda: c.app.snapshot.earlier is not None)


async def test_the_table_and_findings_of_an_ended_server_are_of_the_moment(console, fakes):
    async with console(fakes.diagnosed) as c:
        await charted(c)
        await c.sees("KV cache too small")
        await c.press("left")
        await c.until(lambda: "KV cache too small for max-model-len" not in c.text)
        await c.sees("minute to 12:40")
        await c.until(lambda: "Exited with code 1" not in c.text.splitlines()[3], "its figures stand there")


async def test_the_log_is_shown_up_to_the_moment_and_follows_again_when_live(console, fakes, tmp_path):
    """The fleet's clock stands at 12:41:07 UTC of January 1."""
    path = tmp_path / "server.log"
    lines = [f"INFO 01-01 12:{minute:02}:30 [loggers.py:248] minute {minute} is over" for minute in range(60)]
    path.write_text("\n".join(lines) + "\n")

    def chat(at):
        return replace(fakes.chat(at), log_path=str(path))

    async with console(chat) as c:
        await charted(c)
        await c.sees("minute 59 is over")
        await c.press("left", "left", "left", "left")
        await c.sees("minute 39 is over")
        await c.until(lambda: "minute 40 is over" not in c.text)
        await c.press("end")
        await c.sees("minute 59 is over")


async def test_what_a_restart_aborts_is_counted_now_and_not_at_the_moment_shown(console, fakes):
    async with console(fakes.pressed) as c:
        await charted(c)
        running = c.app.snapshot.server("chat").window.requests_running
        assert running
        await c.press("left")
        await c.until(lambda: c.app.snapshot.earlier is not None)
        c.app.operations.console.snapshot = replace(
            c.app.snapshot, earlier=replace(c.app.snapshot.earlier, window=None)
        )
        await c.press("r")
        await c.sees("Restart chat?")
        await c.sees("in flight")


async def test_the_tuning_bar_closes_when_the_cursor_leaves_its_server(console, fakes):
    async with console(fakes.chat, fakes.coder) as c:
        await c.press("a")
        await c.sees("nothing staged")
        c.fleet.makers = [fakes.coder]
        await c.until(lambda: c.app.operations.selected_name == "coder")
        await c.until(lambda: "nothing staged" not in c.text)
        await c.press("escape")
        assert c.app.operations.staging.of("coder") == {}


def row_of(c, name):
    return next(row for row in c.text.splitlines()[:8] if f"{name} " in row)


async def test_what_is_not_of_the_moment_has_no_figures_and_reports_it(console, fakes):
    async with console(fakes.chat, fakes.coder, fakes.observed) as c:
        await charted(c)
        c.fleet.then = StateThen(State.READY, fakes.NOW - 500, 1)
        await c.press("left")
        await c.sees("now: 3 ready")
        assert "now: ready" in row_of(c, "coder")
        assert "select it to see it at this moment" in row_of(c, "coder")
        assert "not your server" in row_of(c, "anna-8100")
        await c.until(lambda: "r1 ready" in row_of(c, "chat"), "state and generation of then")
        assert "tok" not in row_of(c, "coder")
        await c.sees("Changes still apply to the running servers")
        await c.lacks("r restart")
        await c.press("end")
        await c.sees("r restart")
        await c.lacks("now: ready")


async def test_before_its_launch_a_server_is_not_called_ready(console, fakes):
    async with console(fakes.chat) as c:
        await charted(c)
        c.fleet.then = StateThen(before=True)
        await c.press("left")
        await c.until(lambda: "before launch" in row_of(c, "chat"))
        await c.sees("chat  was not launched yet")


async def test_what_was_reported_of_a_marker_goes_with_the_cursor(console, fakes):
    async with console(fakes.chat) as c:
        await charted(c)
        c.fleet.markers = (Marker(fakes.NOW - 300, MarkerKind.START, "r2", "Restarted: run 2"),)
        await c.until(lambda: c.app.operations.selected.markers)
        await c.press("comma")
        await c.sees("Restarted: run 2")
        await c.press("left", "left", "left")
        await c.until(lambda: "Restarted: run 2" not in c.text)


@pytest.mark.parametrize("size", [(60, 30), (80, 24), (100, 30)])
async def test_a_narrow_row_that_is_not_of_the_moment_has_a_shorter_text(console, fakes, size):
    async with console(fakes.chat, fakes.coder, fakes.observed, size=size) as c:
        await charted(c)
        await c.press("left")
        await c.sees("now: 3 ready")
        rows = [row for row in c.text.splitlines()[:8] if "now: ready" in row]
        assert rows
        assert not any("…" in row.partition("now: ready")[2] for row in rows)
        await c.sees("running servers.")


async def test_what_is_of_now_reports_it_while_the_screen_shows_an_earlier_moment(console, fakes):
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.gpus = {"host": read_host(Path("4xa6000")), "host_recorded": True}
    async with console(fleet=fleet, size=(120, 40)) as c:
        await charted(c)
        await c.press("6")
        await c.sees("6 GPUs ─")
        await c.press("left")
        await c.sees("6 GPUs now, not at 12:40:50")
        await c.press("D")
        await c.sees("now, not at 12:40:50: the charts (H) reach back")
        await c.press("escape", "d")
        await c.sees("now, not at 12:40:50")
        await c.sees("ready for")
        await c.press("escape", "end")
        await c.sees("6 GPUs ─")
        await c.press("d")
        await c.sees("Flags")
        await c.lacks("not at")

"""Whatever looks like a key or a title can be clicked, and does what its key does."""

from __future__ import annotations

import pytest
from textual.events import Click, MouseScrollDown, MouseScrollLeft, MouseScrollUp

from vllm_console.ui.screens.findings import FindingsScreen
from vllm_console.ui.terminal.lines import LineView, clickable, line
from vllm_launchers.vllm.flags.changes import Changes


async def place(c, text):
    """The first cell of a text on the screen, once it is shown."""
    await c.sees(text)
    for y, row in enumerate(c.text.splitlines()):
        if text in row:
            return row.index(text), y
    raise AssertionError(f"{text!r} is not on the screen:\n{c.text}")


async def click(c, text, **more):
    await c.pilot.click(offset=await place(c, text), **more)


async def test_the_bar_of_panes_shows_one_large_and_all_again(console, fakes):
    async with console(fakes.chat) as c:
        await click(c, "7 Requests")
        await c.until(lambda: c.app.operations._arrangement.large == "requests", "what the overview has no room for")
        await click(c, "7 Requests")
        await c.sees("1 KV cache")
        await click(c, "2 Preempt")
        await c.until(lambda: "1 KV cache" not in c.text)
        await click(c, "2 Preempt")
        await c.sees("1 KV cache")
        await click(c, "L auto")
        await c.sees("L focus")  # at this size, auto shows the overview


@pytest.mark.parametrize("title", ["1 KV cache", "2 Preemptions", "3 Latency", "4 Throughput", "5 Log"])
async def test_a_click_on_a_title_shows_that_pane_large(console, fakes, title):
    async with console(fakes.chat) as c:
        await c.sees(f"─ {title}")
        row = max(y for y, text in enumerate(c.text.splitlines()) if f"─ {title}" in text)
        await c.pilot.click(offset=(c.text.splitlines()[row].index(f"─ {title}") + 3, row))
        number = int(title[0])
        await c.until(lambda: c.app.operations.panes.zoomed, "a large pane")
        assert (
            c.app.operations._arrangement.large
            == ("kv-cache", "preemptions", "latency", "throughput", "log")[number - 1]
        )


async def test_a_line_of_another_pane_makes_it_large(console, fakes):
    async with console(fakes.chat, size=(80, 24)) as c:
        await click(c, "3 Latency   ")
        await c.until(lambda: c.app.operations.panes.zoomed == "latency")


async def test_keys_of_the_finding_the_foot_and_a_question(console, fakes):
    async with console(fakes.pressed) as c:
        await click(c, "f stage fix")
        await c.sees("staged  --kv-cache-dtype unset → fp8")
        await click(c, "r restart with these")
        await c.sees("Restart chat?")
        await click(c, "n cancel")
        await c.until(lambda: c.app.screen is c.app.operations)
        assert c.fleet.calls == []
        await click(c, "r restart with these")
        await c.sees("Restart chat?")
        await click(c, "y restart")
        await c.until(lambda: c.fleet.calls)
        assert c.fleet.calls == [("restart", "chat", Changes({"kv-cache-dtype": "fp8"}))]


async def test_a_click_on_the_text_of_a_finding_shows_all_of_it(console, fakes):
    async with console(fakes.pressed) as c:
        await click(c, c.app.operations._finding.lines[0].text.split("  ")[1])
        await c.until(lambda: isinstance(c.app.screen, FindingsScreen))


async def test_a_click_on_a_chart_shows_that_moment(console, fakes):
    async with console(fakes.chat) as c:
        await c.until(lambda: c.app.operations.selected.series is not None)
        x, y = await place(c, "100%┤")
        row = c.text.splitlines()[y]
        begin, end = x + 5, row.index("│", x + 5)
        await c.pilot.click(offset=((begin + end) // 2, y + 2))
        await c.until(lambda: c.fleet.times[-1].at is not None, "an earlier moment")
        assert c.fleet.times[-1].at == pytest.approx(fakes.NOW - 450, abs=30), "the middle of a quarter of an hour"
        await c.sees("minute to 12:33")
        at = c.fleet.times[-1].at
        await click(c, "prefix hits")
        assert c.fleet.times[-1].at == at, "figures are no chart"


async def test_the_wheel_over_a_chart_moves_the_cursor_and_with_ctrl_changes_the_range(console, fakes):
    async with console(fakes.chat) as c:
        await c.until(lambda: c.app.operations.selected.series is not None)
        x, y = await place(c, "100%┤")
        pane = c.app.operations.query_one("#kv-cache")

        async def wheel(event, x=x + 10, **more):
            at = (x - pane.region.x, y + 1 - pane.region.y)
            await c.pilot._post_mouse_events([event], widget=pane, offset=at, **more)

        await wheel(MouseScrollUp, x=x)
        assert c.app.operations.time.view.at is None, "the labels are no chart"
        await wheel(MouseScrollUp)
        await c.sees("at 12:40:50 · 17s ago · 15m")
        await wheel(MouseScrollLeft)
        await c.sees("at 12:40:35")
        await wheel(MouseScrollUp, control=True)
        await c.sees("5m  end live")
        await wheel(MouseScrollDown, control=True)
        await c.sees("15m  end live")
        for _ in range(3):
            await wheel(MouseScrollDown)
        await c.sees("live · 15m")


async def test_the_key_in_the_header_leads_back_to_live(console, fakes):
    async with console(fakes.chat) as c:
        await c.until(lambda: c.app.operations.selected.series is not None)
        await c.press("left")
        await click(c, "end live")  # the first one on the screen: the header's
        await c.sees("live · 15m")
        assert c.app.operations.time.view.at is None


async def test_a_pair_of_keys_has_two_places(console, fakes):
    async with console(fakes.chat) as c:
        await click(c, "[ ] seq")
        await c.sees("--max-num-seqs 256 → 128")
        await click(c, "esc drop all")
        x, y = await place(c, "[ ] seq")
        await c.pilot.click(offset=(x + 2, y))
        await c.sees("--max-num-seqs 256 → 512")


async def test_keys_of_the_footer(console, fakes):
    async with console(fakes.chat) as c:
        await click(c, "d describe")
        await c.sees("many short chats at once")
        await click(c, "esc back")
        await c.until(lambda: c.app.screen is c.app.operations)
        await click(c, "? help")
        await c.sees("Help: keys")


async def test_read_only_refuses_a_click_too(console, fakes):
    async with console(fakes.pressed, read_only=True) as c:
        await c.app.operations._finding.run_action("screen.stage_fix")
        await c.app.operations._finding.run_action("screen.stop")
        assert c.app.screen is c.app.operations
        assert c.app.operations.staging.by_server == {}


async def test_a_choice_is_taken_by_a_click(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("w")
        await c.sees("Completions, latency first")
        await click(c, "Throughput over latency")
        await c.sees("Switch chat to batch?")


async def test_what_is_under_the_mouse_is_underlined(console, fakes):
    async with console(fakes.chat) as c:
        footer = c.app.operations._footer
        await c.pilot.hover(offset=await place(c, "d describe"))
        await c.until(lambda: footer._hovered == (0, "screen.describe"))
        (strip,) = footer.render_lines(footer.size.region)
        assert "".join(text for text, style, _ in strip if style is not None and style.underline) == "d describe"
        await c.pilot.hover(offset=(0, 3))
        await c.until(lambda: footer._hovered is None)


async def test_what_is_selected_with_the_mouse_is_copied(console, fakes):
    async with console(fakes.chat, size=(120, 40)) as c:
        x, y = await place(c, "gpubox")
        await c.pilot.mouse_down(offset=(x, y))
        await c.pilot.hover(offset=(x + 6, y))
        await c.pilot.mouse_up(offset=(x + 6, y))
        await c.sees("1 line copied to")
        assert c.app.clipboard.strip() == "gpubox"
        await c.pilot.click(offset=(5, 10))
        assert c.app.screen.get_selected_text() is None


async def test_that_something_was_copied_is_reported_on_other_screens_too(console, fakes):
    async with console(fakes.chat, size=(120, 40)) as c:
        await c.press("question_mark")
        x, y = await place(c, "Launch a new server")
        await c.pilot.mouse_down(offset=(x, y))
        await c.pilot.hover(offset=(x + 6, y))
        await c.pilot.mouse_up(offset=(x + 6, y))
        await c.until(lambda: any("1 line copied to" in one.message for one in c.app._notifications), "a toast")
        assert c.app.clipboard == "Launch"


def test_what_is_being_taken_down_has_no_selection():
    assert LineView()._selected_span(0) is None


def test_actions_are_found_by_cell_also_behind_wide_characters():
    view = LineView()
    view._lines = [line("日本 ", ("f fix", clickable("screen.stage_fix")), "  ")]
    assert [view.action_at(x, 0) for x in (0, 4, 5, 9, 10, 99)] == [
        "",
        "",
        "screen.stage_fix",
        "screen.stage_fix",
        "",
        "",
    ]
    assert view.action_at(5, 1) == ""


async def test_the_flags_screen_follows_wheel_and_clicks(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("e")
        await c.sees("Flags · chat")
        screen = c.app.screen
        table = screen.query_one("#flags-list")
        await c.until(lambda: table.lines)
        await c.pilot._post_mouse_events([MouseScrollDown], widget=table, offset=(5, 2))
        await c.until(lambda: screen._index == 3, "three flags further")
        await c.pilot.click(table, offset=(5, 1))
        await c.until(lambda: screen._index == screen._top + 1)
        await c.press("G")
        await c.until(lambda: screen._index == len(screen._names) - 1)
        await c.press("g")
        await c.until(lambda: screen._index == 0)


async def test_a_section_of_the_launch_screen_is_clicked(console):
    async with console(size=(160, 40)) as c:
        await c.press("n")
        await c.until(lambda: c.app.screen is not c.app.operations and c.app.screen.planner.fresh, "a plan")
        screen = c.app.screen
        await c.pilot.click("#launch-settings", offset=(3, 3))
        await c.until(lambda: screen._section == "settings")


async def test_top_and_bottom_everywhere(console):
    async with console(size=(80, 24)) as c:
        await c.press("G")
        await c.sees("▸ anna-8100")
        await c.press("g")
        await c.sees("▸ chat")
        await c.press("question_mark")
        await c.sees("Launch a new server")
        await c.press("G")
        await c.sees("not reported")
        await c.press("g")
        await c.sees("Launch a new server")


async def test_a_fix_is_picked_by_a_click_and_staged_by_two(console, fakes):
    async with console(fakes.pressed) as c:
        await click(c, "i findings")
        await c.sees("Findings · chat")
        await click(c, "--max-num-seqs 256 → 128", times=2)
        await c.sees("staged  --max-num-seqs 256 → 128")


async def test_keys_in_the_pane_of_a_failed_server(console, fakes):
    async with console(fakes.diagnosed) as c:
        x, y = await place(c, "f fix   i findings")
        await c.pilot.click(offset=(x, y))
        await c.sees("staged  --max-model-len 131072 → 40960")


async def test_a_click_that_comes_too_late_does_nothing(console, fakes):
    """The foot of a page acts on the focused widget; while the page closes, nothing has focus."""
    async with console(fakes.chat) as c:
        await c.press("question_mark")
        await c.sees("Help: keys")
        foot = c.app.screen.query_one("#foot", LineView)
        c.app.screen.set_focus(None)
        foot.post_message(Click(foot, 2, 0, 0, 0, 1, False, False, False))
        await c.pilot.pause()
        assert c.app.crash is None
        await c.sees("Help: keys")

"""Nothing moves, however long a message is, whatever is found and whichever pane is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.ui.panes.servers import TableHeight
from vllm_console.ui.theme import BAD, WARN
from vllm_launchers.host.gpu.document import read_host

LONG = (
    "A sentence that is a good deal longer than the screen is wide, so it would take a second line, or a third; "
    "the rest of it is in the history of messages, which has all of it on as many lines as it takes: of one that "
    "is as long as this one there are quite a few on a narrow screen. Finally."
)


def places(c):
    """Positions of the parts of the operations screen."""
    screen = c.app.operations
    return {widget.id: widget.region for widget in (screen._table, screen._finding, screen._pane_bar, screen._area)}


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (60, 15)])
async def test_no_message_and_no_finding_moves_anything(console, fakes, size):
    state = {"view": fakes.pressed}
    async with console(lambda at: state["view"](at), fakes.coder, size=size) as c:
        await c.sees("✗ chat  preempting")
        before = places(c)
        c.app.say(LONG)
        await c.sees("m more")
        assert places(c) == before
        await c.until(lambda: "q quit" in c.text.splitlines()[-1], "keys in the last row")
        state["view"] = lambda at: replace(fakes.chat(at), window=fakes.window_at(at, 0.2))
        await c.sees("finding ended: preempting")
        assert places(c) == before
        await c.press("left_square_bracket")
        await c.until(lambda: "staged  --max-num-seqs" in c.text)
        assert places(c) == before


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_a_filter_that_is_typed_moves_nothing(console, fakes, size):
    async with console(fakes.pressed, fakes.coder, size=size) as c:
        await c.sees("✗ chat  preempting")
        before = places(c)
        await c.press("slash", "c")
        await c.sees("2 of 2")
        await c.until(lambda: "esc clear" in c.text.splitlines()[-1], "keys in the last row")
        assert places(c) == before


async def test_a_filter_that_stays_gives_the_panes_the_rows_that_the_table_does_not_need(console, fakes):
    async with console(fakes.chat, fakes.coder, fakes.docs, size=(80, 24)) as c:
        await c.sees("docs")
        before = places(c)["servers"].height
        await c.press("slash", "d", "o", "c", "s")
        await c.sees("1 of 3")
        assert places(c)["servers"].height == before
        await c.press("enter")
        await c.until(lambda: places(c)["servers"].height == before - 2, "no empty rows")
        await c.press("escape")
        await c.until(lambda: places(c)["servers"].height == before, "all servers again")


async def test_the_keys_stay_in_sight_beside_the_gpus(console, fakes):
    fleet = fakes.FakeFleet(*fakes.EVERY_STATE)
    fleet.gpus = {"host": read_host(Path("8xh100"))}
    async with console(fleet=fleet, size=(80, 24)) as c:
        c.app.say(LONG)
        await c.press("6")
        await c.sees("NV18")
        await c.until(lambda: "q quit" in c.text.splitlines()[-1], "the keys in the last line")
        assert c.app.operations.max_scroll_y == 0


async def test_the_table_does_not_shrink_when_servers_of_others_go(console, fakes):
    others = [lambda at, name=name: replace(fakes.observed(at), name=name) for name in ("anna-1", "anna-2")]
    async with console(fakes.chat, *others) as c:
        before = places(c)
        c.fleet.makers = [fakes.chat]
        await c.until(lambda: "anna-2" not in c.text)
        assert places(c) == before
        await c.press("L")
        await c.until(
            lambda: places(c)["servers"].height == before["servers"].height - 2,
            "another layout moves everything anyway",
        )


async def test_the_row_of_a_server_of_ours_that_is_removed_goes_with_it(console, fakes):
    """Removed by another console: its empty row once stayed for 15 seconds."""
    async with console(fakes.chat, fakes.coder, fakes.docs) as c:
        before = places(c)["servers"].height
        c.fleet.makers = [fakes.chat, fakes.docs]
        await c.until(lambda: "coder" not in c.text)
        await c.pilot.pause()
        assert places(c)["servers"].height == before - 1


def test_the_table_shrinks_to_the_most_that_it_needed_in_a_quarter_of_a_minute():
    height = TableHeight()
    assert [height.rows(needed, at) for at, needed in ((0.0, 3), (1.0, 8), (2.0, 4), (9.0, 6), (16.0, 4))] == [
        3, 8, 8, 8, 8,
    ]  # fmt: skip
    assert height.rows(4, 17.0) == 6
    assert [height.rows(4, at) for at in (18.0, 32.0, 33.0)] == [6, 6, 4]
    assert [height.rows(needed, 40.0) for needed in (3, 5, 3)] == [4, 5, 5]
    height.reset()
    assert height.rows(3, 41.0) == 3


async def test_a_server_without_findings_says_what_happened_last(console, fakes):
    state = {"view": fakes.docs}
    async with console(lambda at: replace(state["view"](at), name="chat")) as c:
        await c.sees("chat  starting since")
        state["view"] = lambda at: replace(fakes.chat(at), window=fakes.window_at(at, 0.2))
        await c.sees("chat is ready (41s downtime).")
        row = c.app.operations._finding.lines[0].text
        assert "chat is ready" in row


async def test_an_error_stays_until_it_was_seen(console, monkeypatch):
    monkeypatch.setattr("vllm_console.ui.parts.messages.MESSAGE_SECONDS", 0.02)
    async with console() as c:
        c.app.say("disk full", BAD)
        c.app.say("something else")
        await c.until(lambda: c.app.message == ("disk full", BAD), "the error again")
        await c.press("escape")
        await c.until(lambda: "disk full" not in c.text, "the error was seen")


async def test_an_error_that_nobody_dismissed_goes_after_its_time(console, monkeypatch):
    monkeypatch.setattr("vllm_console.ui.parts.messages.MESSAGE_SECONDS", 0.02)
    monkeypatch.setattr("vllm_console.ui.parts.messages.ERROR_SECONDS", 0.04)
    async with console() as c:
        c.app.say("disk full", BAD)
        await c.until(lambda: c.app.message is None, "the error goes")
        assert [one.text for one in c.app.messages.history] == ["disk full"]


async def test_an_answer_about_a_server_goes_when_another_one_is_selected(console):
    async with console() as c:
        c.app.say("it is starting: stop it first", WARN)
        await c.sees("stop it first")
        await c.press("j")
        await c.lacks("stop it first")


async def test_m_shows_all_messages(console):
    async with console(size=(80, 24)) as c:
        c.app.say(LONG)
        c.app.say("disk full", BAD)
        c.app.say("disk full", BAD)
        await c.press("m")
        await c.sees("Messages since")
        await c.sees("disk full (×2)")
        await c.sees("Finally.")
        await c.press("escape")
        await c.until(lambda: c.app.screen is c.app.operations)
        assert c.app.message is None, "it was seen"


async def test_m_shows_what_holds_now_in_full(console, fakes):
    async with console(lambda at: replace(fakes.chat(at), notice="word " * 60 + "end"), size=(80, 24)) as c:
        await c.sees("m more")
        await c.press("m")
        await c.sees("word end")


async def test_a_layout_that_changes_nothing_reports_it(console, fakes):
    async with console(fakes.chat, size=(60, 15)) as c:
        await c.press("L")
        await c.sees("All layouts look the same at this screen size")

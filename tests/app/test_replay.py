"""An ended run on the operations screen: shown, navigated, closed, and never acted on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fakes.made_runs import run
from vllm_console.history.time_view import DEFAULT_RANGE, LIVE
from vllm_console.ui.parts.time_cursor import SEEN_SECONDS, STEPS, WHOLE_RUN
from vllm_launchers.errors import OperationError


@pytest.fixture
def fleet(fakes):
    fleet = fakes.FakeFleet(fakes.chat, fakes.coder)
    fleet.replayed = {"gone@2": fakes.REPLAY, "chat@1": replace(fakes.REPLAY, run=8, name="chat@1", removed=False)}
    return fleet


async def replayed(c, fakes, name="gone@2"):
    await c.until(lambda: c.app.operations.selected is not None and c.app.operations.selected.name == name)
    await c.until(lambda: c.app.operations.selected.moment is not None, "the moment is read")


async def test_a_replay_opens_at_the_end_of_the_run_with_the_whole_run_in_sight(console, fakes, fleet):
    async with console(fleet=fleet, replay=fakes.REPLAY) as c:
        await replayed(c, fakes)
        view = fleet.times[-1]
        assert (view.run, view.at, view.end) == (7, fakes.REPLAY.at, fakes.REPLAY.ended_at)
        assert view.range.name == WHOLE_RUN
        assert 7200 < view.range.seconds <= 7200 + 2 * view.range.step
        await c.sees("replay  at 11:41:02 · 1h00m ago · whole run  end leave")
        row = next(row for row in c.text.splitlines() if "gone@2 sim" in row)
        assert "removed" in row
        assert "82%" in row.split("removed")[1], "figures of the moment"
        await c.sees("no log: it was deleted with its server")
        await c.sees("gone@2 is being replayed and can't be changed. end leaves")
        await c.sees("now: 2 ready ─")  # it is not a server


async def test_the_cursor_stays_within_the_run(console, fakes, fleet):
    began, ended = fakes.REPLAY.started_at, fakes.REPLAY.ended_at
    async with console(fleet=fleet, replay=fakes.REPLAY) as c:
        await replayed(c, fakes)
        await c.press("right", "right", "shift+right")
        await c.until(lambda: fleet.times[-1].at == ended)
        await c.press("left")
        await c.until(lambda: fleet.times[-1].at == ended - fleet.times[-1].range.seconds / STEPS)
        await c.press("shift+left", "shift+left")
        await c.until(lambda: fleet.times[-1].at == began)
        assert fleet.times[-1].end == ended, "the whole run stays in sight"
        await c.press("full_stop")
        await c.sees("Finding began: preempting")
        await c.until(lambda: fleet.times[-1].at == (began + ended) / 2 + SEEN_SECONDS)


async def test_ranges_end_with_the_whole_run(console, fakes, fleet):
    async with console(fleet=fleet, replay=fakes.REPLAY) as c:
        await replayed(c, fakes)
        await c.press("right_parenthesis")
        assert fleet.times[-1].range.name == WHOLE_RUN, "there is none longer"
        await c.press("left_parenthesis")
        await c.until(lambda: fleet.times[-1].range.name == "1h")
        assert fleet.times[-1].end == fakes.REPLAY.ended_at, "not beyond the end"
        await c.press("colon", *"range 24h", "enter")
        await c.until(lambda: fleet.times[-1].range.name == WHOLE_RUN)


@pytest.mark.parametrize("key", ["end", "escape"])
async def test_a_key_leaves_the_replay(console, fakes, fleet, key):
    async with console(fleet=fleet, replay=fakes.REPLAY) as c:
        await replayed(c, fakes)
        await c.press(key)
        await c.until(lambda: fleet.times[-1] == LIVE)
        assert fleet.times[-1].range is DEFAULT_RANGE
        await c.until(lambda: "gone@2" not in c.text)
        assert c.app.operations.selected.name in ("chat", "coder")


@pytest.mark.parametrize("key", ["end", "escape"])
async def test_the_cursor_returns_to_the_server_that_it_was_on(console, fakes, fleet, key):
    async with console(fleet=fleet) as c:
        assert c.app.operations.selected.name == "chat"
        for run in ("gone@2", "chat@1"):  # also from one replay to another
            c.app.operations.replay(run)
            await replayed(c, fakes, run)
        await c.press(key)
        assert c.app.operations.selected.name == "chat"
        await c.lacks("chat@1")
        assert c.app.operations.selected.name == "chat"


async def test_the_log_follows_again_afterwards(console, fakes, fleet, tmp_path):
    """The replayed run has no log; the server's own log once stayed at the moment of the replay."""
    path = tmp_path / "server.log"
    path.write_text("".join(f"INFO 01-01 10:{minute:02}:30 [a.py:1] minute {minute}\n" for minute in range(60)))
    made = fleet.makers
    fleet.makers = [lambda at, one=one: replace(one(at), log_path=str(path)) for one in made]
    async with console(fleet=fleet) as c:
        await c.press("5")
        await c.sees("minute 59")
        c.app.operations.replay("gone@2")
        await replayed(c, fakes)
        c.app.operations.go_to("chat")
        await c.sees("up to the moment shown")
        c.app.operations.go_to("gone@2")
        await c.sees("no log: it was deleted with its server")
        await c.press("end")
        await c.sees("minute 59")
        await c.lacks("paused")


@pytest.mark.parametrize("key", ["s", "r", "x", "b", "f", "e", "w", "a", "asterisk", "left_square_bracket", "z", "t"])
async def test_no_key_changes_a_replayed_server(console, fakes, fleet, key):
    async with console(fleet=fleet, replay=fakes.REPLAY) as c:
        await replayed(c, fakes)
        await c.press(key)
        await c.sees("gone@2 has ended and is being replayed: it can't be changed. end leaves.")
        assert c.app.screen is c.app.operations
        assert fleet.calls == []


async def test_other_servers_can_be_selected_meanwhile(console, fakes, fleet):
    async with console(fleet=fleet, replay=fakes.REPLAY) as c:
        await replayed(c, fakes)
        await c.press("g")
        await c.until(lambda: c.app.operations.selected.name == "chat")
        await c.until(lambda: c.app.operations.selected.moment == fakes.REPLAY.at)
        row = next(row for row in c.text.splitlines() if "gone@2 sim" in row)
        assert "select it to see it at this moment" in row
        await c.press("s")
        await c.sees("Stop chat?")


async def test_the_command_line_opens_one_and_says_why_not(console, fakes, fleet):
    async with console(fleet=fleet) as c:
        await c.press("colon", *"replay gone@2")
        await c.sees("Replay run gone@2")
        await c.press("enter")
        await replayed(c, fakes)
        await c.press("colon", *"replay other@1", "enter")
        await c.sees("no run 'other@1' is known; see 'vllm-console runs'")
        assert c.app.operations.selected.name == "gone@2", "it stays where it was"
        await c.press("colon", *"replay chat@1", "enter")
        await replayed(c, fakes, "chat@1")
        await c.lacks("gone@2")


async def test_a_key_lists_what_can_be_replayed(console, fakes, fleet):
    ended = run(2, server="gone", ended_at=fakes.NOW - 3600, replayable=True, removed=True)
    fleet.known_runs = (run(9), replace(ended, id=7), run(1, server="gone", ended_at=1.0), replace(ended, id=3))
    fleet.replayed["3"] = replace(fakes.REPLAY, run=3)
    async with console(fleet=fleet) as c:
        await c.press("O")
        await c.sees("Replay which run?")
        await c.sees("gone@2")
        await c.lacks("chat@9")  # it is running
        await c.lacks("gone@1")  # its history is gone
        await c.sees("gone@2 (3)")
        await c.press("down", "enter")
        await replayed(c, fakes)
        assert fleet.times[-1].run == 3


async def test_a_console_opens_on_the_server_that_is_named(console, fakes, fleet):
    async with console(fleet=fleet, server="coder", at=fakes.NOW - 60) as c:
        await c.until(lambda: c.app.operations.selected.name == "coder")
        await c.until(lambda: c.app.operations.selected.moment == fakes.NOW - 60)


async def test_without_an_ended_run_the_key_says_so(console, fakes, fleet):
    async with console(fleet=fleet) as c:
        await c.press("O")
        await c.sees("No run to replay")


async def test_a_run_of_a_present_server_has_a_row_of_its_own(console, fakes, fleet):
    chat = fleet.replayed["chat@1"]
    async with console(fleet=fleet, replay=chat) as c:
        await replayed(c, fakes, "chat@1")

        def rows() -> list[str]:
            table = c.text.partition("NAME")[2].partition("╰")[0]
            return [row.split()[0].strip("│▸✗") for row in table.splitlines() if "chat" in row[:16]]

        await c.until(lambda: len(rows()) == 2, "the table has grown by the row of the run")
        await c.lacks("removed")


async def test_comparing_and_describing_work_as_before_but_revert_nothing(console, fakes, fleet):
    async with console(fleet=fleet, replay=fakes.REPLAY) as c:
        await replayed(c, fakes)
        await c.press("c")
        await c.sees("has no earlier run that served")
        assert ("compare", "gone@2", None) in fleet.calls
        await c.press("q")
        await c.press("d")
        await c.sees("last exit") if "last exit" in c.text else await c.sees("gone@2 sim")
        await c.press("q")
        await c.press("l")
        await c.sees("The log of gone@2 was deleted with its server.")


@pytest.mark.parametrize(
    ("key", "call", "told"),
    [
        ("y", ("forget", "old"), "old is removed; O replays its runs."),
        ("p", ("forget", "old", "purge"), "old is removed."),
    ],
)
async def test_forgetting_keeps_the_history_and_a_purge_does_not(console, fakes, key, call, told):
    async with console(fakes.stopped) as c:
        await c.press("x")
        await c.sees("Its history is kept for 30 days")
        await c.sees("p purge")
        await c.press(key)
        await c.sees(told)
        assert c.fleet.calls == [call]


async def test_what_cannot_be_kept_is_reported_and_p_is_no_answer_elsewhere(console, fakes):
    async with console(fakes.stopped, fakes.chat) as c:
        c.fleet.error = OperationError("its history can't be kept")
        await c.press("x", "y")
        await c.sees("its history can't be kept")
        await c.press("escape", "j", "s")
        await c.sees("Stop chat?")
        await c.press("p")
        await c.sees("Stop chat?")

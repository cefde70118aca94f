"""The filter: what it matches, how many servers match, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from vllm_console.fleet.snapshot import FleetSnapshot
from vllm_console.ui.parts.server_filter import matches
from vllm_launchers.host.gpu.document import read_host
from vllm_launchers.keeper.records import State

SEEN = FleetSnapshot(0.0, "box", host=read_host(Path("4xa6000")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", True),
        ("CHAT", True),
        ("llama-3.1", True),
        ("chatbot", True),
        ("ready", True),
        ("gpu0", True),
        ("gpu 0", True),
        ("gpu1", False),
        ("a6000", True),
        (":8000", True),
        ("8000", True),
        ("you", True),
        ("anna", False),
        ("chat ready gpu0", True),
        ("chat failed", False),
    ],
)
def test_the_filter_matches_what_the_table_shows(fakes, text, found):
    server = replace(fakes.chat(fakes.NOW), model="meta-llama/Llama-3.1-8B", preset="chatbot", gpus=(0,), port=8000)
    assert matches(text, server, SEEN) is found


def test_an_index_is_a_whole_number(fakes):
    server = replace(fakes.chat(fakes.NOW), gpus=(10,))
    assert matches("gpu10", server, SEEN)
    assert not matches("gpu1", server, SEEN)


def test_the_name_of_a_gpu_matches_only_servers_on_it(fakes):
    here, recorded = SEEN, replace(SEEN, host_recorded=True)
    real, simulated = fakes.chat(fakes.NOW), fakes.coder(fakes.NOW)
    elsewhere = [replace(simulated, recorded_host="workstation"), replace(real, remote="far", ours=False)]
    assert [matches("a6000", one, here) for one in (real, simulated, *elsewhere)] == [True, False, False, False]
    assert [matches("a6000", one, recorded) for one in (real, simulated, *elsewhere)] == [False, True, False, False]


def test_an_owner_is_found_by_name(fakes):
    server = fakes.observed(fakes.NOW)
    assert matches("anna", server, SEEN)
    assert not matches("you", server, SEEN)


def test_the_mark_of_a_simulated_engine_is_found(fakes):
    assert matches("sim", fakes.coder(fakes.NOW), SEEN)
    assert matches("coder sim", fakes.coder(fakes.NOW), SEEN)
    assert not matches("sim", fakes.chat(fakes.NOW), SEEN)


async def test_the_filter_counts_what_matches_and_says_which_keys_work(console):
    async with console() as c:
        await c.press("slash", *"gpu 1")
        await c.sees("Servers matching 'gpu 1' · 1 of 7")
        await c.sees("esc clear")
        await c.press("enter")
        await c.lacks("enter keep")
        await c.sees("Servers matching 'gpu 1' · 1 of 7")
        await c.press("escape")
        await c.until(lambda: "matching" not in c.text)
        await c.press("slash", *"nothing")
        await c.sees("0 of 7")
        await c.sees("No server matches 'nothing'; esc shows all 7.")
        await c.press("escape")
        await c.until(lambda: "0 of 7" not in c.text and "chat" in c.text)


async def test_the_arrow_keys_move_the_cursor_while_a_filter_is_typed(console):
    async with console() as c:
        first = c.app.operations.selected_name
        await c.press("slash", "down")
        await c.until(lambda: c.app.operations.selected_name != first)
        await c.press("up")
        await c.until(lambda: c.app.operations.selected_name == first)


async def test_a_filter_that_nothing_matches_says_how_it_ends(console):
    async with console(size=(80, 24)) as c:
        await c.press("slash", *"qqq", "enter")
        await c.sees("No server matches 'qqq'; esc shows all 7.")
        await c.sees("esc clear filter")
        await c.press("r")
        await c.sees("No server matches 'qqq'; esc clears the filter.")
        await c.lacks("No server selected")
        await c.press("escape")
        await c.until(lambda: "chat" in c.text)
        await c.lacks("clear filter")


async def test_the_filter_is_edited_again_where_it_was_left(console):
    async with console() as c:
        await c.press("slash", *"coder", "enter", "slash")
        await c.sees("enter keep")
        await c.press("backspace", "backspace")
        await c.sees("Servers matching 'cod'")


@pytest.fixture
def restarting(fakes):
    """Servers chat and coder; the state of chat can be changed."""

    class Fleet(fakes.FakeFleet):
        state = State.READY

    def chat(at):
        return replace(fakes.chat(at), state=fleet.state)

    fleet = Fleet(chat, fakes.coder)
    return fleet


async def in_state(c, state):
    c.fleet.state = state
    await c.until(lambda: c.app.snapshot.server("chat").state is state)
    c.app.operations.redraw()


async def test_the_cursor_returns_to_a_server_that_the_filter_hid_while_it_started(console, restarting):
    async with console(fleet=restarting) as c:
        await c.press("slash", *"ready", "enter")
        assert c.app.operations.selected_name == "chat"
        await in_state(c, State.STARTING)
        assert c.app.operations.selected_name == "coder"
        await in_state(c, State.READY)
        assert c.app.operations.selected_name == "chat"


@pytest.mark.parametrize("keys", [("j",), ("escape",), ("slash", "backspace", "enter")])
async def test_it_does_not_return_once_the_user_has_moved_it_or_changed_the_filter(console, restarting, keys):
    async with console(fleet=restarting) as c:
        await c.press("slash", *"ready", "enter")
        await in_state(c, State.STARTING)
        await c.press(*keys)
        assert c.app.operations.selected_name == "coder"
        await in_state(c, State.READY)
        assert c.app.operations.selected_name == "coder"


@pytest.mark.parametrize(("keys", "then"), [(("left_square_bracket",), ()), (("a",), ()), (("e",), ("escape",))])
async def test_it_does_not_return_while_the_flags_of_another_server_are_changed(console, restarting, keys, then):
    """The next key would act on the wrong server, and a restart of an idle server asks nothing."""
    async with console(fleet=restarting) as c:
        await c.press("slash", *"ready", "enter")
        await in_state(c, State.STARTING)
        await c.press(*keys)
        await in_state(c, State.READY)
        await c.press(*then)
        assert c.app.operations.selected_name == "coder"


async def test_the_cursor_stays_on_the_server_that_was_found_with_the_filter(console, restarting):
    async with console(fleet=restarting) as c:
        await c.press("slash", *"coder", "enter")
        assert c.app.operations.selected_name == "coder"
        await c.press("escape")
        assert not c.app.operations.filter_text
        assert c.app.operations.selected_name == "coder"

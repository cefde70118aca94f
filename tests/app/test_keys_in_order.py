"""Keys that arrive faster than they are drawn take effect in the order in which they were pressed."""

from __future__ import annotations

import pytest
from textual.events import Key
from textual.widgets import Input

from vllm_launchers.launch.request import LaunchRequest


def burst(app, *keys):
    """Send all keys before any is handled, like a paste in a terminal, or like a slow machine."""
    for key in keys:
        app.post_message(Key(key, key if len(key) == 1 else None))


def field(c):
    return c.app.screen.query_one("#launch-input", Input)


async def to_field(c, name):
    """Open the launch screen with the cursor on a field."""
    await c.press("n")
    await c.sees("Launch a server")
    await c.until(lambda: c.app.screen.planner.draft is not None and c.app.screen.planner.fresh, "a plan")
    await c.press("tab")
    await c.until(lambda: c.app.screen.current is not None)
    while c.app.screen.current != name:
        await c.press("down")


async def test_what_is_typed_after_ctrl_u_stays(console):
    async with console() as c:
        await to_field(c, "name")
        burst(c.app, "enter", *"first", "ctrl+u", *"second", "ctrl+u", *"third", "enter")
        await c.until(lambda: c.app.screen.planner.draft.text("name"), "a name")
        assert c.app.screen.planner.draft.text("name") == "third"


async def test_letters_after_the_key_that_opens_a_field_are_for_the_field(console):
    async with console() as c:
        burst(c.app, "slash", *"coder", "enter", "d")
        await c.until(lambda: c.app.screen is not c.app.operations, "the server is described")
        assert c.app.operations._filter == "coder"


async def test_keys_after_enter_are_no_longer_for_the_field(console):
    async with console() as c:
        await to_field(c, "name")
        burst(c.app, "enter", *"one", "enter", "down", "down", "enter", *"8123", "enter")
        await c.until(lambda: c.app.screen.planner.draft.text("port"), "a port")
        assert (c.app.screen.planner.draft.text("name"), c.app.screen.planner.draft.text("port")) == ("one", "8123")


@pytest.mark.parametrize("name", ["model", "name"])
async def test_an_emptied_field_does_not_become_the_default(console, name):
    async with console() as c:
        await to_field(c, name)
        await c.press("enter", *"mine", "enter")
        await c.until(lambda: not c.app.screen.editor.typing, "taken")
        stood = c.app.screen.planner.draft.text(name)
        await c.press("enter", "ctrl+u", "enter")
        await c.sees(f"{name} can't be empty: esc keeps '{stood}'")
        assert c.app.screen.editor.typing
        await c.press("escape")
        assert c.app.screen.planner.draft.text(name) == stood
        await c.press("delete")
        assert c.app.screen.planner.draft.text(name) == ""


async def test_the_presets_model_is_not_emptied_either(console):
    async with console() as c:
        await to_field(c, "model")
        await c.press("enter", "ctrl+u", "enter")
        await c.sees("model can't be empty")
        assert isinstance(c.app.screen.planner.draft.request(), LaunchRequest)
        assert field(c).display


async def test_a_field_that_was_empty_may_stay_so(console):
    async with console() as c:
        await to_field(c, "host")
        await c.press("enter")
        await c.until(lambda: c.app.screen.editor.typing)
        await c.press("enter")
        await c.until(lambda: not c.app.screen.editor.typing, "closed")


async def test_a_key_without_effect_in_a_dialog_has_none_once_that_is_closed(console, fakes):
    async with console(fakes.coder) as c:
        burst(c.app, "s", "r", "n")
        await c.pilot.pause()
        await c.pilot.pause()
        assert c.app.operations.on_top
        assert c.fleet.calls == []

"""Keys are configurable: presets, single keys, conflicts, and every sentence that names a key."""

from __future__ import annotations

import re
from argparse import Namespace

import pytest
from msgspec.structs import replace

from vllm_console.cli.console import show
from vllm_console.settings import Settings
from vllm_console.ui.actions import action_named, actions, scoped
from vllm_console.ui.keymap import PRESETS, KeysError, chosen_keys, key_of, keys_of, label_of, use_keys
from vllm_console.ui.parts.hints import DemoHints
from vllm_console.ui.screens.help import help_entries
from vllm_launchers.errors import UsageError


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_names_known_actions_and_has_no_conflict(preset):
    assert set(PRESETS[preset]) <= {action.id for action in actions()}
    keys = chosen_keys(preset, {})
    assert all(keys.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_with_a_preset_the_keys_of_a_screen_are_all_different(preset):
    keys = chosen_keys(preset, {})
    for scope in {action.scope for action in actions()} - {"app"}:
        used = [key for action in scoped(scope) for key in keys.get(action.id, action.keys)]
        assert len(used) == len(set(used)), scope


def test_keys_may_be_written_as_they_are_shown():
    assert chosen_keys("default", {"stop": "$, f8", "adjust": "esc"} | {"clear": "ctrl+x"})["stop"] == (
        "dollar_sign",
        "f8",
    )


@pytest.mark.parametrize(
    ("preset", "own", "sentence"),
    [
        ("default", {"restart": "s"}, "keys: 's' is assigned to both 'restart' and 'stop' on the main screen: "
                                      "give one of them another key"),
        ("default", {"restart": "?"}, "keys: '?' is assigned to both 'restart' and 'help'"),
        ("vim", {"compare": "h"}, "keys: 'h' is assigned to both 'compare' and 'time_back'"),
        ("arrows", {"restart": "f9"}, "keys: 'f9' is assigned to both 'restart' and 'stop'"),
        ("default", {"restrat": "R"}, "keys: no action named 'restrat'; did you mean 'restart'?"),
        ("default", {"restart": "rr"}, "keys: 'rr' for 'restart' is not a valid key; expected e.g. R, f5, ctrl+r"),
        ("default", {"restart": "strg+r"}, "keys: 'strg+r' for 'restart' is not a valid key"),
        ("default", {"restart": " "}, "keys: 'restart' has no key"),
        ("default", {"compare_before": "G"}, "keys: 'G' is assigned to both 'compare_before' and 'move_last' on the "
                                             "comparison screen"),
        ("default", {"move_down": "u"}, "keys: 'u' is assigned to both 'launch_undo' and 'move_down' on the launch "
                                        "screen"),
        ("default", {"flags_down": "n"}, "keys: no action named 'flags_down'"),
        ("default", {"question_yes": "n"}, "keys: 'n' is assigned to both 'question_yes' and 'question_no' in a "
                                           "question"),
        ("default", {"help_search": "T"}, "keys: 'T' is assigned to both 'next_theme' and 'help_search'"),
        ("default", {"help": "l"}, "keys: 'l' is assigned to both 'open_log' and 'help' on the main screen"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_reported_in_a_sentence(preset, own, sentence):
    with pytest.raises(KeysError, match=re.escape(sentence)) as raised:
        chosen_keys(preset, own)
    assert "\n" not in str(raised.value)


def test_the_program_reports_it_and_names_the_file(fakes):
    config = Settings(keys={"restart": "s"}, sources={"keys": "/home/me/config.toml"})
    with pytest.raises(UsageError, match=re.escape("/home/me/config.toml: keys: 's' is assigned to both")):
        show(fakes.FakeFleet(), config, Namespace())


async def test_the_first_key_is_shown_and_all_are_listed():
    use_keys(chosen_keys("default", {"drop_last": "delete,u"}))  # only in the context of this test
    assert key_of("drop_last") == "del"
    assert label_of(action_named("drop_last")) == "delete u"
    assert keys_of(action_named("restart")) == ("r",)


async def test_vim_keys_move_and_the_screens_report_it(console):
    async with console(keymap="vim") as c:
        await c.sees("o log")
        await c.until(lambda: c.app.operations.selected.series is not None)
        await c.press("h")
        await c.sees("$ live")
        await c.press("dollar_sign")
        await c.until(lambda: c.app.operations.time.view.at is None)
        await c.press("question_mark", "slash", *"back in time")
        await c.sees("h ←")


OWN = {
    "new_server": "f2", "restart": "R", "edit_flags": "f3", "clear": "f4", "previous_flags": "Z", "open_log": "f6",
    "pane_1": "f5", "next_layout": "f7", "findings": "f8", "stage_fix": "f9", "help": "f11", "remove": "f12",
}  # fmt: skip


async def test_what_is_drawn_names_a_persons_own_keys(console, fakes, tmp_path):
    log = tmp_path / "server.log"
    log.write_text("INFO ready\n")
    async with console(lambda at: replace(fakes.pressed(at), log_path=str(log)), fakes.coder, keys=OWN) as c:
        for hint in (
            "f9 stage fix",
            "f8 findings",
            "R restart",
            "f5 KV",
            "f5 KV cache",
            "f7 auto",
            "f6 full screen",
            "f11 help",
        ):
            await c.sees(hint)
        await c.press("f9")
        await c.sees("R restart with these")
        await c.sees("f4 drop all")
        others = r"\b[rfilez] (restart|fix|stage|findings|log|drop|revert)"
        await c.until(lambda: not re.search(others, c.text), "no default key")


async def test_messages_name_a_persons_own_keys(console, fakes):
    async with console(fakes.stopped, keys=OWN) as c:
        await c.press("s")
        await c.sees("old is already stopped: f12 removes it, R starts it.")
        await c.sees("R start   f3 flags   f12 remove")


async def test_without_servers_the_way_to_the_first_is_a_persons_own_key(console, fakes):
    async with console(fleet=fakes.FakeFleet(), keys=OWN) as c:
        await c.sees("f2  launches one")
        await c.sees("f11  shows all keys")
        await c.press("d")
        await c.sees("No server selected: f2 launches one.")


async def test_hints_and_help_name_a_persons_own_keys():
    use_keys(chosen_keys("default", {"question_yes": "f5", "marker_back": "f6", "marker_forward": "f7"}))
    hints = DemoHints(True, lambda: None)
    hints.followed("stage_fix")
    assert "r, then f5, restarts" in hints.line(None, 100).text
    assert "f6 and f7 go to it" in dict(help_entries(False)["Marks"])["┊"]


async def test_the_launch_screen_names_a_persons_own_keys(console, fakes):
    fleet = fakes.FakeFleet()
    plan, flags = fleet.plan, [word for n in range(40) for word in (f"--some-long-flag-{n}", "value")]
    fleet.plan = lambda request: replace(plan(request), argv=("vllm", "serve", "some/model", *flags))
    async with console(fleet=fleet, keys={"launch_next": "f5", "launch_copy": "Y"}, size=(80, 24)) as c:
        await c.press("n")
        await c.sees("f5: presets → settings → plan")
        await c.press("f5", "f5")
        await c.sees("more lines; Y copies all")


@pytest.mark.parametrize("key", ["R", "f12", "ctrl+alt+r", "shift+f3", "é", "left_square_bracket", "[", "section_sign"])
def test_names_that_terminals_send_are_keys(key):
    assert chosen_keys("default", {"log_wrap": key})["log_wrap"]


def test_what_holds_everywhere_does_not_conflict_with_a_dialog():
    assert chosen_keys("default", {"picture": "f9", "question_yes": "f9"})["question_yes"] == ("f9",)


async def test_dialogs_and_lists_have_a_persons_own_keys(console, fakes):
    keys = {"question_yes": "Y", "question_no": "N escape", "list_take": "ctrl+o", "log_scale": "f9"}
    async with console(fakes.coder, keys=keys) as c:
        await c.press("s")
        await c.sees("Y stop")
        await c.sees("N cancel")
        await c.press("y")
        await c.sees("Stop coder?")
        await c.press("N")
        await c.until(lambda: c.app.screen is c.app.operations)
        await c.press("o")
        await c.sees("ctrl+o choose")
        await c.press("pagedown", "pagedown")
        assert c.app.screen._index == len(c.app.screen._choices) - 1
        await c.press("pageup", "pageup", "down", "ctrl+o")
        await c.until(lambda: c.app.screen is c.app.operations)

"""The footer shows what applies to the selection, the most important first."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_console.ui.keymap import chosen_keys, use_keys
from vllm_console.ui.parts.footer_keys import FooterContext, applying, footer_hints, tail_hints


def shown(*args, **more):
    return [f"{key} {text}" for key, text, *_ in footer_hints(FooterContext(*args, **more))]


def test_by_state(fakes):
    now = fakes.NOW
    assert shown(fakes.pressed(now))[:5] == ["f fix", "i findings", "r restart", "s stop", "d describe"]
    assert "f fix" not in shown(fakes.chat(now))
    assert "i findings" not in shown(fakes.calm(now)), "there is nothing to read"
    assert shown(fakes.diagnosed(now))[:3] == ["f fix", "i findings", "r start"]
    assert "s stop" not in shown(fakes.broken(now))
    assert "x remove" in shown(fakes.broken(now))
    assert "c compare" not in shown(fakes.coder(now)), "it has no earlier run"
    assert shown(fakes.docs(now))[0] == "s stop"
    assert shown()[0] == "n new"


def test_what_sends_traffic_is_shown_where_the_server_is_ready_and_comes_first_while_it_has_none(fakes):
    assert {"b load", "A ask", "B ramp"} <= set(shown(fakes.coder(fakes.NOW)))
    assert not {"b load", "A ask", "B ramp"} & set(shown(fakes.broken(fakes.NOW)))
    calm = fakes.calm(fakes.NOW)
    unused = replace(calm.window, requests_running=0.0, requests_waiting=0.0, requests_per_second=None)
    assert shown(replace(calm, window=unused))[:5] == ["r restart", "s stop", "b load", "A ask", "B ramp"]
    assert shown(calm)[2] != "b load"


def test_keys_that_stand_above_the_panes_make_room_for_others(fakes):
    named = frozenset({"screen.stage_fix", "screen.findings"})
    assert shown(fakes.pressed(fakes.NOW), named=named)[:2] == ["r restart", "s stop"]
    assert "stage_fix" in [action.id for action in applying(FooterContext(fakes.pressed(fakes.NOW), named=named))]


def test_what_is_staged_comes_first(fakes):
    assert shown(fakes.pressed(fakes.NOW), staged=True)[:3] == ["r restart", "a tune", "bksp drop last"]


def test_nothing_that_changes_anothers_server(fakes):
    keys = shown(fakes.observed(fakes.NOW))
    assert not {"r restart", "s stop", "a tune", "e flags"} & set(keys)
    assert "d describe" in keys


def test_read_only_offers_no_change(fakes):
    assert not {"r restart", "s stop", "n new", "a tune", "f fix"} & set(
        shown(fakes.pressed(fakes.NOW), read_only=True)
    )


def test_marked_servers_are_stopped_and_restarted_together(fakes):
    assert shown(fakes.chat(fakes.NOW), marked=2) == ["r restart", "s stop", "* mark", "esc unmark"]


def test_a_load_that_runs_is_ended(fakes):
    assert "b end load" in shown(replace(fakes.chat(fakes.NOW), load="4 requests/s"))


def test_beside_the_tuning_bar_no_key_is_shown_that_does_something_else_there(fakes):
    keys = shown(fakes.pressed(fakes.NOW), staged=True, tuning=True)
    assert keys[:2] == ["r restart", "bksp drop last"]
    assert not {"a tune", "esc drop"} & set(keys)


async def test_a_persons_own_keys_are_shown(fakes):
    use_keys(chosen_keys("default", {"stop": "S,f8", "quit": "f10"}))  # in this test's context alone
    assert "S stop" in shown(fakes.chat(fakes.NOW))
    assert [f"{key} {text}" for key, text, *_ in tail_hints()] == ["? help", "f10 quit"]


def test_an_earlier_moment_offers_keys_of_time_and_none_that_acts_now(fakes):
    keys = shown(fakes.pressed(fakes.NOW), staged=True, marked=1, past=True)
    assert keys[:3] == ["end live", "← back", "→ forward"]
    assert not {"r restart", "s stop", "a tune", "f fix", "e flags"} & set(keys)


def test_without_a_server_help_begins_with_what_the_empty_screen_offers():
    ids = [action.id for action in applying(FooterContext(empty=True))]
    assert ids[:3] == ["new_server", "find_model", "demo"]
    assert shown(empty=True) == shown(), "the footer has no room for them; the screen names their keys"
    assert not {"find_model", "demo"} & {action.id for action in applying(FooterContext())}
    assert not {"find_model", "demo"} & {action.id for action in applying(FooterContext(empty=True, read_only=True))}

"""The footer shows the keys that apply to the selection, the most important ones first."""

from __future__ import annotations

from msgspec.structs import replace

from vllm_console.ui.keymap import chosen_keys, use_keys
from vllm_console.ui.parts.footer_keys import FooterContext, applying, footer_hints, tail_hints


def shown(*args, **more):
    return [f"{key} {text}" for key, text, *_ in footer_hints(FooterContext(*args, **more))]


def test_footer_keys_by_state(fakes):
    now = fakes.NOW
    assert shown(fakes.pressed(now))[:5] == ["f fix", "i findings", "r restart", "s stop", "d describe"]
    assert "f fix" not in shown(fakes.chat(now))
    assert "i findings" not in shown(fakes.calm(now)), "there are no findings"
    assert shown(fakes.diagnosed(now))[:3] == ["f fix", "i findings", "r start"]
    assert "s stop" not in shown(fakes.broken(now))
    assert "x remove" in shown(fakes.broken(now))
    assert "c compare" not in shown(fakes.coder(now)), "it has no earlier run"
    assert shown(fakes.docs(now))[0] == "s stop"
    assert shown()[0] == "n new"


def test_traffic_keys_are_shown_for_a_ready_server_first_if_idle(fakes):
    assert {"b load", "A ask", "B ramp"} <= set(shown(fakes.coder(fakes.NOW)))
    assert not {"b load", "A ask", "B ramp"} & set(shown(fakes.broken(fakes.NOW)))
    calm = fakes.calm(fakes.NOW)
    unused = replace(calm.window, requests_running=0.0, requests_waiting=0.0, requests_per_second=None)
    assert shown(replace(calm, window=unused))[:5] == ["r restart", "s stop", "b load", "A ask", "B ramp"]
    assert shown(calm)[2] != "b load"


def test_keys_shown_above_the_panes_make_room_for_others(fakes):
    named = frozenset({"screen.stage_fix", "screen.findings"})
    assert shown(fakes.pressed(fakes.NOW), named=named)[:2] == ["r restart", "s stop"]
    assert "stage_fix" in [action.id for action in applying(FooterContext(fakes.pressed(fakes.NOW), named=named))]


def test_a_filter_is_cleared_before_marks_and_after_what_is_staged(fakes):
    assert shown(filtered=True)[0] == "esc clear filter"
    assert shown(fakes.pressed(fakes.NOW), filtered=True)[:2] == ["esc clear filter", "f fix"]
    assert shown(fakes.chat(fakes.NOW), marked=2, filtered=True)[0] == "esc clear filter"
    assert "esc drop" in shown(fakes.pressed(fakes.NOW), staged=True, filtered=True)


def test_staged_changes_come_first(fakes):
    assert shown(fakes.pressed(fakes.NOW), staged=True)[:3] == ["r restart", "a adjust", "bksp drop last"]


def test_no_key_changes_a_server_of_another_user(fakes):
    keys = shown(fakes.observed(fakes.NOW))
    assert not {"r restart", "s stop", "a adjust", "e flags"} & set(keys)
    assert "d describe" in keys


def test_read_only_offers_no_change(fakes):
    assert not {"r restart", "s stop", "n new", "a adjust", "f fix"} & set(
        shown(fakes.pressed(fakes.NOW), read_only=True)
    )


def test_marked_servers_are_stopped_and_restarted_together(fakes):
    assert shown(fakes.chat(fakes.NOW), marked=2) == ["r restart", "s stop", "* mark", "esc unmark"]


def test_running_load_can_be_ended(fakes):
    assert "b end load" in shown(replace(fakes.chat(fakes.NOW), load="4 requests/s"))


def test_tuning_bar_hides_keys_with_another_meaning(fakes):
    keys = shown(fakes.pressed(fakes.NOW), staged=True, tuning=True)
    assert keys[:2] == ["r restart", "bksp drop last"]
    assert not {"a adjust", "esc drop"} & set(keys)


async def test_custom_keys_are_shown(fakes):
    use_keys(chosen_keys("default", {"stop": "S,f8", "quit": "f10"}))  # only in the context of this test
    assert "S stop" in shown(fakes.chat(fakes.NOW))
    assert [f"{key} {text}" for key, text, *_ in tail_hints()] == ["? help", "f10 quit"]


def test_earlier_moment_offers_only_time_keys(fakes):
    keys = shown(fakes.pressed(fakes.NOW), staged=True, marked=1, past=True)
    assert keys[:3] == ["end live", "← back", "→ forward"]
    assert not {"r restart", "s stop", "a adjust", "f fix", "e flags"} & set(keys)


def test_help_without_a_server_begins_with_the_empty_screen_actions():
    ids = [action.id for action in applying(FooterContext(empty=True))]
    assert ids[:3] == ["new_server", "find_model", "demo"]
    assert shown(empty=True) == shown(), "the footer has no room for them; the screen names their keys"
    assert not {"find_model", "demo"} & {action.id for action in applying(FooterContext())}
    assert not {"find_model", "demo"} & {action.id for action in applying(FooterContext(empty=True, read_only=True))}

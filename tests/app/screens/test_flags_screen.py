"""The flag editor and its keys."""

from __future__ import annotations

import json

import pytest
from textual.events import Paste

from vllm_console.ui.screens.flags import FlagsScreen, flags_heading
from vllm_launchers.vllm.flags.releases import assumed_table


@pytest.fixture
def fleet(fakes):
    return fakes.FakeFleet(fakes.chat)


@pytest.fixture
def editor(host, fakes, fleet):
    def make(staged=None):
        return host(lambda: FlagsScreen(fakes.chat(fakes.NOW), staged or {}, fleet))

    return make


async def find(pilot, name):
    await pilot.press("slash")
    pilot.app.screen._input.value = name
    await pilot.press("enter")
    await pilot.pause()


async def test_shows_now_staged_default_and_meaning(editor):
    app = editor({"max-num-seqs": 128, "enable-prefix-caching": None})
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.pause()
        rows = {row.split()[0].strip("*"): row for row in app.text().splitlines() if row.strip()}
        text = app.text()
        assert "2 staged" in text
        row = next(row for row in text.splitlines() if "max-num-seqs" in row)
        assert row.split()[1:4] == ["max-num-seqs", "256", "128"] or "256" in row
        assert "unset" in next(row for row in text.splitlines() if "enable-prefix-caching" in row)
        assert rows


async def test_edit_stages_a_value_of_the_right_type(editor):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "max-num-seqs")
        await pilot.press("enter", "backspace", "backspace", "backspace", *"64", "enter", "escape", "ctrl+s")
        await pilot.pause()
    assert app.results == [{"max-num-seqs": 64}]


async def test_lines_that_are_pasted_become_one(editor, wait_until):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "kv-transfer-config")
        await pilot.press("enter")
        app.focused.post_message(Paste('{\n  "kv_connector": "X",\r\n  "kv_role": "kv_both"\n}\n'))
        await wait_until(pilot, lambda: app.screen._input.value == '{ "kv_connector": "X", "kv_role": "kv_both" }')
        await pilot.press("enter", "escape", "ctrl+s")
        await pilot.pause()
    assert json.loads(app.results[0]["kv-transfer-config"]) == {"kv_connector": "X", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("name", "typed", "sentence"),
    [
        ("max-num-seqs", "many", "max-num-seqs takes a whole number, not 'many'"),
        ("max-num-seqs", "0", "max-num-seqs must be 1 or more, not '0'"),
        ("gpu-memory-utilization", "1.5", "gpu-memory-utilization must be 1 or less, not '1.5'"),
        ("kv-cache-dtype", "fp7", "kv-cache-dtype takes auto, bfloat16, fp8"),
        ("kv-transfer-config", "3", "kv-transfer-config takes a JSON object"),
    ],
)
async def test_a_wrong_value_is_refused_in_a_sentence_and_the_input_stays(editor, wait_until, name, typed, sentence):
    app = editor()
    async with app.run_test(size=(100, 30)) as pilot:
        await find(pilot, name)
        await pilot.press("enter")
        app.screen._input.value = typed
        await wait_until(pilot, lambda: sentence in app.text(), "said while it is typed")
        await pilot.press("enter")
        await wait_until(pilot, lambda: sentence in app.text())
        assert app.screen._input.display
        await pilot.press("escape", "escape", "escape")
        await pilot.pause()
    assert app.results == [None]


async def test_space_switches_and_steps_and_u_takes_back(editor, wait_until):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "enable-prefix-caching")
        await pilot.press("space")
        await wait_until(pilot, lambda: "1 change, not staged yet" in app.text())
        await find(pilot, "kv-cache-dtype")
        await pilot.press("space")
        await wait_until(pilot, lambda: "2 changes, not staged yet" in app.text())
        await pilot.press("u")
        await wait_until(pilot, lambda: "1 change, not staged yet" in app.text())
        await pilot.press("escape", "ctrl+s")
        await pilot.pause()
    assert app.results == [{"enable-prefix-caching": False}]


async def test_delete_leaves_a_set_flag_out(editor):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "max-model-len")
        await pilot.press("delete", "escape", "ctrl+s")
        await pilot.pause()
    assert app.results == [{"max-model-len": None}]


async def test_a_flag_that_this_vllm_has_not_is_refused_with_the_nearest(editor, wait_until):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "kv-cache-dtype" in app.text())
        await pilot.press("slash", *"max-num-sequenzes")
        await wait_until(pilot, lambda: "no flag matches 'max-num-sequenzes'; did you mean max-num-seqs?" in app.text())
        await pilot.press("equals_sign", "7", "enter")
        await wait_until(pilot, lambda: "did you mean --max-num-seqs" in app.text())
        await app.sees("nothing staged")


async def test_where_the_flags_are_not_known_one_can_be_added_with_a_hint(editor, fleet, wait_until):
    fleet.flag_table = assumed_table()
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("slash")
        app.screen._input.value = "max-num-sequenzes=7"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "did you mean --max-num-seqs" in app.text())
        await pilot.press("ctrl+s")
        await pilot.pause()
    assert app.results == [{"max-num-sequenzes": 7}]


@pytest.mark.parametrize("typed", ["max-num-sequenzes 7", "max-num-sequenzes = 7"])
async def test_a_flag_that_is_added_gets_the_value_typed_behind_it(editor, fleet, typed):
    fleet.flag_table = assumed_table()
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, typed)
        await pilot.press("ctrl+s")
        await pilot.pause()
    assert app.results == [{"max-num-sequenzes": 7}]


async def test_all_flags_of_the_servers_own_vllm_are_listed_with_its_help(editor, wait_until):
    app = editor()
    async with app.run_test(size=(140, 40)) as pilot:
        await wait_until(pilot, lambda: "all 12 flags of vLLM 0.33.0" in app.text())
        await app.lacks("scheduling-policy")  # common, but not a flag of this vLLM
        await find(pilot, "distributed kv")
        await wait_until(pilot, lambda: "kv-transfer-config" in app.text())
        await find(pilot, "quantization")
        await wait_until(pilot, lambda: "takes awq, awq_marlin, fp8, gptq, gptq_marlin" in app.text())
        await app.sees("vLLM's help: Method used to quantize the weights.")


async def test_tab_completes_and_the_cursor_stays_on_the_flag_that_is_edited(editor, wait_until):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "kv-cache-dtype")
        await pilot.press("enter", *"fp8_e5")
        await wait_until(pilot, lambda: app.screen._input._suggestion == "fp8_e5m2")
        await pilot.press("tab", "pagedown", "enter", "escape", "ctrl+s")
        await wait_until(pilot, lambda: app.results)
    assert app.results == [{"kv-cache-dtype": "fp8_e5m2"}]


async def test_arrows_go_through_the_choices_while_a_value_is_typed(editor, wait_until):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: "quantization" in app.text())
        await find(pilot, "quantization")
        await pilot.press("enter", "down", "down", "down", "up", "enter", "escape", "ctrl+s")
        await wait_until(pilot, lambda: app.results)
    assert app.results == [{"quantization": "awq_marlin"}]


async def test_a_key_given_as_a_flag_is_refused(editor, wait_until):
    app = editor()
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.press("slash")
        app.screen._input.value = "api-key=sk-123"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "can't be set here" in app.text())


async def test_escape_warns_once_before_changes_get_lost(editor, wait_until):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "enforce-eager")
        await pilot.press("space", "escape", "escape")
        await wait_until(pilot, lambda: "not staged yet" in app.text())
        assert app.results == []
        await pilot.press("escape")
        await pilot.pause()
    assert app.results == [None]


async def test_escape_without_changes_goes_back_and_keeps_what_was_staged(editor):
    app = editor({"max-num-seqs": 128})
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("escape")
        await pilot.pause()
    assert app.results == [None]


async def test_only_set_hides_the_rest(editor, wait_until):
    app = editor()
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "kv-transfer-config" in app.text())
        await pilot.press("c")
        await wait_until(pilot, lambda: "kv-transfer-config" not in app.text())
        await app.sees("max-num-seqs")


@pytest.mark.parametrize("width", [48, 60, 72, 80, 120])
def test_no_heading_is_cut(width):
    heading = flags_heading(width).text
    assert "…" not in heading
    assert ("VLLM'S DEFAULT" in heading) is (width >= 80)

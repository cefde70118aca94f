"""The flag editor by its keys."""

from __future__ import annotations

import pytest

from vllm_console.fleet.model import Changes
from vllm_console.ui.screens.flags import FlagsScreen


@pytest.fixture
def editor(host, fakes):
    def make(staged=Changes()):  # noqa: B008 - immutable
        return host(lambda: FlagsScreen(fakes.chat(fakes.NOW), staged))

    return make


async def find(pilot, name):
    await pilot.press("slash")
    pilot.app.screen._input.value = name
    await pilot.press("enter")
    await pilot.pause()


async def test_shows_now_staged_default_and_meaning(editor):
    app = editor(Changes(set={"max-num-seqs": 128}, unset=("enable-prefix-caching",)))
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.pause()
        rows = {row.split()[0].strip("*"): row for row in app.text().splitlines() if row.strip()}
        text = app.text()
        assert "2 staged" in text
        row = next(row for row in text.splitlines() if "max-num-seqs" in row)
        assert row.split()[1:4] == ["max-num-seqs", "256", "128"] or "256" in row
        assert "left out" in next(row for row in text.splitlines() if "enable-prefix-caching" in row)
        assert rows


async def test_edit_stages_a_value_of_the_right_type(editor):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "max-num-seqs")
        await pilot.press("enter", "backspace", "backspace", "backspace", *"64", "enter", "escape", "ctrl+s")
        await pilot.pause()
    assert app.results == [Changes(set={"max-num-seqs": 64})]


@pytest.mark.parametrize(
    ("name", "typed", "sentence"),
    [
        ("max-num-seqs", "many", "max-num-seqs must be a whole number, not 'many'"),
        ("max-num-seqs", "0", "max-num-seqs must be at least 1, not 0"),
        ("gpu-memory-utilization", "1.5", "gpu-memory-utilization must lie above 0 and up to 1, not 1.5"),
        ("scheduling-policy", "fifo", "scheduling-policy cannot be 'fifo'"),
        ("compilation-config", "3", "compilation-config must be a JSON object"),
    ],
)
async def test_a_wrong_value_is_refused_in_a_sentence_and_the_input_stays(editor, wait_until, name, typed, sentence):
    app = editor()
    async with app.run_test(size=(100, 30)) as pilot:
        await find(pilot, name)
        await pilot.press("enter")
        app.screen._input.value = typed
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
        await wait_until(pilot, lambda: "1 staged" in app.text())
        await find(pilot, "kv-cache-dtype")
        await pilot.press("space")
        await wait_until(pilot, lambda: "2 staged" in app.text())
        await pilot.press("u")
        await wait_until(pilot, lambda: "1 staged" in app.text())
        await pilot.press("escape", "ctrl+s")
        await pilot.pause()
    assert app.results == [Changes(set={"enable-prefix-caching": False})]


async def test_delete_leaves_a_set_flag_out(editor):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await find(pilot, "max-model-len")
        await pilot.press("delete", "escape", "ctrl+s")
        await pilot.pause()
    assert app.results == [Changes(unset=("max-model-len",))]


async def test_a_flag_not_listed_can_be_added_with_a_hint(editor, wait_until):
    app = editor()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("slash")
        app.screen._input.value = "max-num-sequenzes=7"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "did you mean max-num-seqs?" in app.text())
        await pilot.press("ctrl+s")
        await pilot.pause()
    assert app.results == [Changes(set={"max-num-sequenzes": 7})]


async def test_a_key_given_as_a_flag_is_refused(editor, wait_until):
    app = editor()
    async with app.run_test(size=(120, 30)) as pilot:
        await pilot.press("slash")
        app.screen._input.value = "api-key=sk-123"
        await pilot.press("enter")
        await wait_until(pilot, lambda: "cannot be set here" in app.text())


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
    app = editor(Changes(set={"max-num-seqs": 128}))
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("escape")
        await pilot.pause()
    assert app.results == [None]


async def test_only_set_hides_the_rest(editor, wait_until):
    app = editor()
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: "scheduling-policy" in app.text())
        await pilot.press("c")
        await wait_until(pilot, lambda: "scheduling-policy" not in app.text())
        assert "max-num-seqs" in app.text()

"""The help screen: a search keeps and highlights the matching keys and shows their number; escape shows all again."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from vllm_console.ui.actions import actions
from vllm_console.ui.screens.help import HelpScreen, help_entries, help_lines

EVERY = sum(map(len, help_entries(False).values()))


def texts(wanted, width=78):
    return [strip.text.rstrip() for strip in help_lines(width, False, wanted)]


def test_a_search_leaves_what_holds_each_word_and_no_empty_heading():
    found = help_entries(False, "LOG scale")
    assert found == {"Time": [("Y", "Latencies on a logarithmic or linear scale")]}
    assert texts("log scale")[0] == " Time"
    assert "Marks" in help_entries(False, "simulated engine")
    assert len(actions()) < EVERY


@pytest.mark.parametrize("wanted", ["±", "tuning 1/4", "tuner"])
def test_the_marks_of_a_tuner_at_work_are_explained(wanted):
    assert "a tuner" in " ".join(texts(wanted)[1:])
    assert " Marks" in texts(wanted)


@pytest.mark.parametrize("width", [40, 78, 118])
def test_keys_are_found_as_they_are_written_and_lines_fit(width):
    lines = texts("ctrl+p", width)
    assert any("Type a command" in text for text in lines)
    assert max(map(cell_len, lines)) <= width


async def test_slash_searches_and_escape_shows_all_before_it_closes(console):
    async with console(size=(80, 24)) as c:
        await c.press("question_mark")
        await c.sees("/ search")
        await c.press("slash", *"max-num")
        await c.sees(f"matching 'max-num' · 2 of {EVERY}")
        await c.sees("Halve --max-num-seqs")
        await c.lacks("Next server")
        await c.press("enter")
        await c.press("j")
        assert isinstance(c.app.screen, HelpScreen), "the keys of the screen are back"
        await c.sees("matching")
        await c.press("slash", *"max-num zz", "down")
        await c.sees("No key and no mark matches 'max-num zz'; esc shows all.")
        await c.press("escape")
        await c.sees("Launch a new server")
        await c.press("slash", *"halve")
        await c.press("enter")
        await c.press("escape")
        await c.until(lambda: "matching" not in c.text)
        assert isinstance(c.app.screen, HelpScreen)
        await c.press("escape")
        await c.until(lambda: c.app.screen is c.app.operations)


async def test_what_can_be_done_with_the_selection_comes_first(console, fakes):
    async with console(fleet=fakes.FakeFleet(fakes.pressed), size=(80, 24)) as c:
        await c.press("question_mark")
        await c.sees("Now: chat, ready")
        rows = c.text.splitlines()
        assert "Now: chat, ready" in rows[1]
        assert "Stage a fix" in rows[2]
        await c.press("escape", "question_mark", "slash", *"stage a fix")
        await c.sees("matching 'stage a fix'")
        assert "Now:" not in c.text, "a search has each key once"


def test_on_another_screen_its_own_keys_come_first():
    assert next(iter(help_entries(False, scope="log"))) == "On the log screen"


def test_help_of_a_read_only_console_has_only_keys_that_work_there():
    found = help_entries(True)
    assert "On the log screen" in found
    assert not {"In the tuning bar", "On the launch screen", "On the flags screen", "In a chat"} & set(found)
    texts = [text for entries in found.values() for _, text in entries]
    assert not [text for text in texts if "staged" in text or "launch batch" in text]


@pytest.mark.parametrize("read_only", [False, True])
async def test_title_fits_a_narrow_screen(console, read_only):
    async with console(size=(60, 15), read_only=read_only) as c:
        await c.press("question_mark")
        await c.sees("Help: keys")
        assert "…" not in c.text.splitlines()[0]

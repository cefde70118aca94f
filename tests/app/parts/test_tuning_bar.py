"""The tuning bar: common flags with the arrow keys, for keyboards on which brackets are hard to type."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.ui.parts import staging
from vllm_console.ui.parts.staged_plan import PlanVerdict
from vllm_console.ui.parts.tuning_bar import tuning_lines
from vllm_console.ui.theme import BAD, OK, WARN

SEVERAL = "3 changes staged: compare can't attribute the effect to one of them."


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40)])
async def test_arrows_choose_and_change_and_enter_keeps(console, fakes, size):
    async with console(fakes.chat, size=size) as c:
        await c.press("a")
        await c.sees("sequences 256" if size[0] >= 100 else "seqs 256")
        await c.press("down")
        await c.sees("128*")
        await c.press("right", "up")
        await c.sees("8192*")
        await c.press("enter")
        await c.until(lambda: not c.app.operations._tuning.display)
        assert c.app.operations.staging.of("chat") == {"max-num-seqs": 128, "max-model-len": 8192}
        await c.press("j")
        assert c.app.focused is None, "keys are the screen's again"


async def test_the_verdict_of_the_plan_stands_beside(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("a", *["right"] * 5, "up")
        await c.sees("KV dtype fp8*")
        await c.sees("fits (estimate); KV cache 123k → about 246k tokens")


async def test_the_fix_of_the_finding_stays_in_sight_while_the_bar_is_open(console, fakes):
    async with console(fakes.pressed, size=(80, 24)) as c:
        await c.press("a", "down")
        await c.sees("fits (estimate)")
        await c.sees("--kv-cache-dtype unset → fp8")


async def test_escape_leaves_with_what_was_staged_before(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("p", "a", "down", "escape")
        await c.until(lambda: not c.app.operations._tuning.display)
        assert list(c.app.operations.staging.of("chat")) == ["enable-prefix-caching"]
        await c.sees("The changes made here were dropped.")


async def test_r_restarts_with_what_the_bar_shows(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("a", "down", "r")
        await c.sees("Restart chat?")
        await c.sees("--max-num-seqs 256 → 128")


async def test_selecting_another_server_closes_the_bar(console, fakes):
    async with console(fakes.chat, fakes.coder) as c:
        await c.press("a", "down", "j")
        await c.sees("▸ coder")
        assert not c.app.operations._tuning.display
        assert c.app.operations.staging.of("coder") == {}


async def test_a_flag_is_chosen_by_a_click_and_changed_by_the_wheel(console, fakes):
    async with console(fakes.chat) as c:
        await c.press("a")
        await c.sees("prefix cache on")
        rows = c.text.splitlines()
        y = next(at for at, row in enumerate(rows) if "prefix cache on " in row and "sequences 256" in row)
        await c.pilot.click(offset=(rows[y].index("prefix cache on"), y))
        await c.press("up")
        await c.sees("prefix cache off*")


async def test_what_vllm_refuses_is_not_staged_and_says_why(console, fakes):
    problem = "on NVIDIA RTX A6000 vLLM's Triton attention backend refuses it"
    async with console(lambda at: replace(fakes.chat(at), fp8_cache_problem=problem)) as c:
        await c.press("a", "left", "up")
        await c.sees("FP8 KV cache not staged")
        assert c.app.operations.staging.by_server == {}


async def test_not_for_others_servers_and_not_read_only(console, fakes):
    async with console(fakes.observed) as c:
        await c.press("a")
        await c.sees("was started by anna outside this console")
        assert not c.app.operations._tuning.display
    async with console(fakes.chat, read_only=True) as c:
        await c.press("a")
        assert not c.app.operations._tuning.display


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_its_lines_fit_any_width(fakes, width):
    server = fakes.chat(fakes.NOW)
    staged = {"max-num-seqs": 65536, "max-model-len": 4194304, "kv-cache-dtype": "fp8"}
    lines = tuning_lines(server, staged, PlanVerdict("fits; " * 30, OK), 0, "a note " * 20, width)
    assert len(lines) == 2
    assert all(strip.cell_length <= width for strip in lines)
    if width >= 80:
        assert "enter keep" in lines[1].text


def test_the_flag_under_the_cursor_is_in_sight_on_any_screen(fakes):
    server = fakes.chat(fakes.NOW)
    for width in (40, 60, 80):
        for at, tuned in enumerate(staging.TUNED):
            assert tuned.short in tuning_lines(server, {}, None, at, "", width)[0].text


TOO_MANY = "max-num-seqs 512 is more than the KV cache holds; requests would be preempted"


@pytest.mark.parametrize(
    ("verdict", "note", "width", "told"),
    [
        (None, "", 80, "nothing staged"),
        (PlanVerdict("fits; KV cache 123k → 246k tokens", OK), "", 120, "fits; KV cache 123k → 246k tokens"),
        (PlanVerdict("fits; KV cache 123k → 246k tokens", OK), SEVERAL, 140, f"fits. · {SEVERAL}"),
        (PlanVerdict("fits; KV cache 123k → 246k tokens", OK), SEVERAL, 80, "fits. · 3 changes staged"),
        (PlanVerdict(f"fits; {TOO_MANY}", WARN, warning=TOO_MANY), "", 100,
         "max-num-seqs 512 is more than the KV cache holds."),
        (PlanVerdict("will not start: one request of that length takes more than the whole KV cache", BAD, True),
         SEVERAL, 80, "will not start · 3 changes staged"),
    ],
)  # fmt: skip
def test_what_has_no_room_is_left_out_in_whole_clauses(fakes, verdict, note, width, told):
    text = tuning_lines(fakes.chat(fakes.NOW), {}, verdict, 0, note, width)[1].text
    assert text[1:].partition("  ")[0] in (told, told[:-1])
    assert "…" not in text

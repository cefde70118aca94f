"""After a restart with changed flags, a line says whether it helped, until it has been seen; several changes are
named."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from vllm_console.runs.compare import compare
from vllm_console.runs.text import brief
from vllm_console.text import clock
from vllm_console.ui.panes.bars import staged_line
from vllm_console.ui.panes.change import change_line, worth_reporting
from vllm_console.ui.parts import change_report
from vllm_console.ui.parts.staged_plan import PlanVerdict
from vllm_console.ui.screens.compare import CompareScreen
from vllm_console.ui.theme import BAD, OK

CASES = {
    "better": ({"slower": 0.6}, "run 3 was better at {} than run 1: end-to-end p99 −48%"),
    "worse": ({"slower": 1.6}, "run 3 was worse at {} than run 1: ITL p99 +57%"),
    "nothing": ({}, "run 3: No significant difference"),
    "roughly alike": ({"slower": 0.4, "rate": 1.7}, "run 3: Not comparable: traffic may be the cause"),
    "unlike": ({"rate": 3.4}, "run 3: Not comparable: traffic differs"),
}


def changed(made, generation=3, count=10, flags=None, **more):
    one, other = made.pair(made.minutes(1), made.minutes(2, count, **more), flags)
    return compare(one, replace(other, run=replace(other.run, generation=generation)))


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(change_report, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(change_report, "COMPARE_SECONDS", 0.0)
    monkeypatch.setattr(change_report, "COMPARE_AGAIN_SECONDS", 0.0)


@pytest.fixture
def fleet(fakes):
    return fakes.FakeFleet(lambda at: replace(fakes.pressed(at), state_since=at - 900), step=1.0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [80, 120])
def test_a_verdict_in_a_line_of_its_own(made, case, width):
    more, words = CASES[case]
    found = changed(made, **more)
    text = change_line(found, 4, width).text
    assert cell_len(text) <= width
    assert text.startswith(" Δ ")
    time = "–".join(clock(at, at) for at in (found.after.since, found.after.until))
    words = words.format(time)
    # Where it does not fit, the value matters more than the run.
    assert f"chat  {words}" in text or (width == 80 and f"chat  {words.removeprefix('run 3 ')}" in text)
    assert text.endswith("c compares")


def test_several_changes_and_long_names_stay_in_the_line(made):
    flags = {"max-num-seqs": 64, "kv-cache-dtype": "fp8"}
    found = changed(made, flags=flags, slower=0.6)
    assert "(2 changes combined)" in change_line(found, 4, 120).text
    long = replace(found, after=replace(found.after, run=replace(found.after.run, server="x" * 60)))
    assert cell_len(change_line(long, 12, 80).text) <= 80


def test_without_room_for_the_time_the_figure_stays(made):
    assert "chat  better than run 1: end-to-end p99 −48%" in change_line(changed(made, slower=0.6), 4, 64).text


def test_too_early_says_when(made):
    assert "too early to tell: needs 4 min more traffic" in change_line(changed(made, count=1), 4, 80).text


def test_nothing_is_reported_where_nothing_was_changed_or_can_be_known(made):
    assert worth_reporting(changed(made))
    assert not worth_reporting(changed(made, flags={"max-num-seqs": 256}))
    one, other = made.pair(made.minutes(1, 2), made.minutes(2))
    assert not worth_reporting(compare(one, other))


def test_a_mixed_verdict_names_both_sides(made):
    one, other = made.minutes(1), made.minutes(2, slower=0.6)
    slow = [replace(window, figures={**window.figures, "itl_mean": 0.09, "itl_p99": 0.3}) for window in other]
    assert brief(compare(*made.pair(one, slow))) == "Mixed: end-to-end p99 −48%, ITL p99 +232%"


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_report_stands_below_the_finding_also_after_the_comparison_was_opened(
    console, fleet, made, soon, size
):
    fleet.last_changes["chat"] = fleet.comparison = changed(made, slower=0.6)
    async with console(fleet=fleet, size=size) as run:
        await run.sees(": end-to-end p99 −48%")
        await run.press("c")
        await run.until(lambda: isinstance(run.app.screen, CompareScreen), "the comparison")
        await run.press("escape")
        polls = fleet.looks
        await run.until(lambda: fleet.looks > polls + 3, "some polls")
        lines = run.text.splitlines()
        finding = next(at for at, line in enumerate(lines) if "preempting" in line)
        told = next(at for at, line in enumerate(lines) if "than run 1:" in line)
        assert told > finding
        wide = size[0] == 120
        assert any("--kv-cache-dtype" in line for line in lines[finding:told]) is wide, "the fix is still there"
        assert "Comparing chat" not in run.text, "it was compared"


async def test_the_comparison_that_is_reported_opens_at_once_and_is_repeated(console, fleet, made, soon):
    fleet.last_changes["chat"] = changed(made, slower=0.6)
    async with console(fleet=fleet) as run:
        await run.sees(": end-to-end p99 −48%")
        newer = fleet.last_changes["chat"] = changed(made, slower=1.6)
        await run.press("c")
        assert isinstance(run.app.screen, CompareScreen)
        await run.until(lambda: run.app.screen.found == newer, "a comparison that is not older than the screen")
        assert "compare" not in [call[0] for call in fleet.calls]


@pytest.mark.parametrize(("generation", "catches_up"), [(3, False), (2, True)])
async def test_without_a_report_all_records_are_read_only_for_a_run_that_is_not_stored(
    console, fleet, made, generation, catches_up
):
    fleet.last_changes["chat"] = fleet.comparison = changed(made, generation)
    async with console(fleet=fleet) as run:
        await run.press("c")
        await run.until(lambda: isinstance(run.app.screen, CompareScreen), "the comparison")
        assert ("compare" in [call[0] for call in fleet.calls]) is catches_up


async def test_on_three_rows_it_stands_beside_what_is_staged_and_before_there_is_a_verdict(console, fleet, made, soon):
    fleet.last_changes["chat"] = changed(made, count=3, slower=0.6)
    async with console(fleet=fleet, size=(120, 40)) as run:
        await run.sees("needs 2 min more traffic")
        fleet.last_changes["chat"] = changed(made, slower=0.6)
        await run.press("f")
        await run.sees("Trade-off")
        await run.sees(": end-to-end p99 −48%")
        assert "preempting" in run.text


async def test_where_rows_are_scarce_a_verdict_takes_the_place_of_the_fix_which_keeps_its_key(
    console, fleet, made, soon
):
    fleet.last_changes["chat"] = changed(made, count=3, slower=0.6)
    async with console(fleet=fleet, size=(80, 24)) as run:
        await run.until(lambda: fleet.looks > 5, "some looks")
        assert "--kv-cache-dtype unset" in run.text, "too little to tell displaces nothing"
        fleet.last_changes["chat"] = changed(made, slower=0.6)
        await run.sees(": end-to-end p99 −48%")
        assert "f fix" in run.text
        assert "--kv-cache-dtype unset" not in run.text


@pytest.mark.parametrize("which", ["pressed", "chat"])
async def test_where_rows_are_scarce_whether_it_helped_and_whether_the_next_change_fits_are_both_there(
    console, fakes, made, soon, which
):
    fleet = fakes.FakeFleet(lambda at: replace(getattr(fakes, which)(at), state_since=at - 900), step=1.0)
    fleet.last_changes["chat"] = changed(made, slower=0.6)
    async with console(fleet=fleet, size=(80, 24)) as run:
        await run.sees(": end-to-end p99 −48%")
        await run.press("p" if which == "chat" else "f")
        await run.sees("fits (estimate)")
        assert ": end-to-end p99 −48%" in run.text
        assert "r restart" in run.text
        assert ("preempting" in run.text) is (which == "pressed"), "the finding keeps its row"


def test_a_verdict_beside_what_is_staged_keeps_the_line_and_its_keys():
    flags = {"max-num-seqs": 256, "gpu-memory-utilization": 0.9}
    staged = {"max-num-seqs": 128, "gpu-memory-utilization": 0.95}
    verdicts = (
        PlanVerdict("fits (estimate); KV cache 123k → 246k tokens", OK),
        PlanVerdict("will not start: " + "x" * 90, BAD, refused=True),
    )
    for verdict in verdicts:
        for width in (80, 99):
            text = staged_line(flags, staged, width, fits=verdict).text
            assert cell_len(text) <= width
            assert verdict.message[:15] in text
            assert "seqs 128" in text
            assert text.endswith("r restart")


async def test_looking_too_early_does_not_take_the_verdict_away(console, fleet, made, soon):
    fleet.last_changes["chat"] = fleet.comparison = changed(made, count=2)
    async with console(fleet=fleet) as run:
        await run.sees("needs 3 min more traffic")
        await run.press("c")
        await run.until(lambda: isinstance(run.app.screen, CompareScreen), "the comparison")
        await run.press("escape")
        fleet.last_changes["chat"] = changed(made, slower=1.6)
        await run.sees(": ITL p99 +57%")


async def test_an_old_change_and_an_earlier_generation_are_no_news(console, fakes, made, soon):
    fleet = fakes.FakeFleet(lambda at: replace(fakes.chat(at), state_since=at - 90_000), step=1.0)
    fleet.last_changes["chat"] = changed(made, slower=0.6)
    other = fakes.FakeFleet(lambda at: replace(fakes.chat(at), state_since=at - 900), step=1.0)
    other.last_changes["chat"] = changed(made, generation=2, slower=0.6)
    for each in (fleet, other):
        async with console(fleet=each) as run:
            looks = each.looks
            await run.until(lambda each=each, looks=looks: each.looks > looks + 4, "some looks")
            assert "Better" not in run.text


async def test_an_open_comparison_goes_on_comparing(console, fleet, made, soon, monkeypatch):
    monkeypatch.setattr("vllm_console.ui.screens.compare.AGAIN_SECONDS", 0.02)
    fleet.last_changes["chat"] = fleet.comparison = changed(made, count=2)
    async with console(fleet=fleet) as run:
        await run.press("c")
        await run.sees("Not enough data")
        fleet.last_changes["chat"] = changed(made, slower=1.6)
        await run.sees("The change made it worse: ITL p99")


async def test_a_second_change_is_reported_as_indistinguishable(console, fakes):
    async with console(fakes.chat) as run:
        await run.press("left_square_bracket")
        await run.sees("--max-num-seqs 256 → 128")
        assert "at once" not in run.text
        await run.press("v")
        await run.sees("2 changes staged: compare can't attribute the effect")
        await run.press("r")
        await run.sees("Restart chat?")
        assert "2 changes staged" in run.text


async def test_the_way_back_is_not_nagged_about(console, fakes):
    flags = {**fakes.CHAT_FLAGS, "max-num-seqs": 512, "kv-cache-dtype": "fp8"}
    async with console(lambda at: replace(fakes.chat(at), previous_flags=flags)) as run:
        await run.press("z")
        await run.sees("--kv-cache-dtype")
        await run.press("r")
        await run.sees("Restart chat?")
        assert "at once" not in run.text


async def test_the_past_is_judged_after_the_first_picture_and_trouble_is_reported(console, fakes, monkeypatch):
    monkeypatch.setattr("vllm_console.ui.app.PAST_AFTER_SECONDS", 0.02)
    fleet = fakes.FakeFleet(fakes.chat)
    fleet.past_trouble = "runs.sqlite can't be written: disk full"
    async with console(fleet=fleet) as run:
        await run.sees("disk full")
        assert fleet.judged == 1
    quiet = fakes.FakeFleet(fakes.chat)
    async with console(fleet=quiet, read_only=True) as run:
        await run.until(lambda: quiet.looks > 3, "some looks")
        assert quiet.judged == 0


async def test_the_restart_question_says_that_the_newest_change_has_no_verdict_yet(console, fleet, made, soon):
    fleet.last_changes["chat"] = fleet.comparison = changed(made, count=1)
    async with console(fleet=fleet) as run:
        await run.sees("too early to tell")
        await run.press("r")
        await run.sees("Run 3 needs 4 min more traffic before c can compare it.")

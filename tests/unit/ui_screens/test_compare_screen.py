"""Before and after on the screen: the verdict first, and one key back to the flags before."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.cells import cell_len

from vllm_console.fleet.model import Changes
from vllm_console.telemetry.compare import compare
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.screens.compare import CompareScreen, compare_lines


def comparison(made, slower=1.6, **more):
    return compare(*made.pair(made.minutes(1), made.minutes(2, slower=slower), **more))


def texts(found, width):
    return [strip.text for strip in compare_lines(found, width)]


@pytest.mark.parametrize("width", [78, 118])
def test_the_verdict_stands_first_and_nothing_is_wider_than_the_screen(made, width):
    lines = texts(comparison(made), width)
    assert lines[0].startswith(" Worse: ")
    assert max(map(cell_len, lines)) <= width
    screen = "\n".join(lines)
    for part in ("--max-num-seqs 256 → 64", "Traffic: alike", "before @1", "after @2", "ITL p99", "worse"):
        assert part in screen


def test_a_hostile_name_is_only_text(made):
    flags = {"max-num-seqs": "\x1b[31m[bold]64"}
    screen = "\n".join(texts(comparison(made, flags=flags), 118))
    assert "\x1b" not in screen
    assert "[bold]64" in screen


async def test_the_key_back_is_there_only_where_it_may_be(made, host, wait_until):
    went = []
    for go_back in (None, lambda: went.append(True)):
        app = host(lambda go_back=go_back: CompareScreen(comparison(made), go_back))
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until(pilot, lambda app=app: "Worse" in app.text())
            assert ("with the flags before" in app.text()) is (go_back is not None)
            await pilot.press("z")
            await pilot.pause()
    assert went == [True]


async def test_c_compares_and_z_restarts_with_the_flags_before(fakes, made, wait_until):
    fleet = fakes.FakeFleet(fakes.coder)
    flags = dict(fakes.coder(fakes.NOW).flags)
    before = made.run(1, {**flags, "max-num-seqs": 256}, model=fakes.coder(fakes.NOW).model)
    one, other = made.pair(made.minutes(1), made.minutes(2, slower=1.6), flags)
    fleet.comparison = compare(replace(one, run=before), other)
    app = ConsoleApp(fleet)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: isinstance(app.screen, CompareScreen), "the comparison")
        assert ("compare", "coder", None) in fleet.calls
        await pilot.press("z")
        await wait_until(pilot, lambda: app.screen is not None and not isinstance(app.screen, CompareScreen), "back")
        await wait_until(pilot, lambda: "Restart coder?" in shown(app) or restarted(fleet), "the question")
        if not restarted(fleet):
            await pilot.press("y")
        await wait_until(pilot, lambda: restarted(fleet), "the restart")
    assert restarted(fleet) == [("restart", "coder", Changes({"max-num-seqs": 256}))]


async def test_read_only_shows_the_comparison_and_no_way_back(fakes, made, wait_until):
    fleet = fakes.FakeFleet(fakes.coder)
    fleet.comparison = comparison(made)
    app = ConsoleApp(fleet, read_only=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: isinstance(app.screen, CompareScreen), "the comparison")
        assert "with the flags before" not in shown(app)
        await pilot.press("z")
        await pilot.pause()
    assert restarted(fleet) == []


async def test_a_first_run_says_that_there_is_nothing_to_compare(fakes, wait_until):
    app = ConsoleApp(fakes.FakeFleet(fakes.coder))
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: "nothing to compare with" in shown(app), "the reason")


def shown(app):
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def restarted(fleet):
    return [call[:3] for call in fleet.calls if call[0] == "restart"]

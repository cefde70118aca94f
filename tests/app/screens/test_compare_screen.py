"""Before and after on the screen: the verdict first, and one key to revert the flags."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from vllm_console.history.energy import FIGURES, Tariff
from vllm_console.prediction.figures import Figures, Spread
from vllm_console.prediction.predict import Estimate, EstimatedSpread, Estimates
from vllm_console.prediction.score import KeptPrediction, Traffic, outcome_lines
from vllm_console.runs.compare import ComparisonVerdict, Recorded, compare
from vllm_console.runs.measurement import Measurement
from vllm_console.runs.store import FlagChange
from vllm_console.runs.text import figure_change_text, short_verdict
from vllm_console.runs.windows import with_figures
from vllm_console.ui.app import ConsoleApp
from vllm_console.ui.screens.compare import CompareScreen, compare_lines, nothing_lines, run_names
from vllm_launchers.engine_model.step_cost import StepCost
from vllm_launchers.vllm.flags.changes import Changes


def comparison(made, slower=1.6, **more):
    return compare(*made.pair(made.minutes(1), made.minutes(2, slower=slower), **more))


def texts(found, width):
    return [strip.text for strip in compare_lines(found, width)]


@pytest.mark.parametrize("width", [78, 118])
def test_the_verdict_stands_first_and_nothing_is_wider_than_the_screen(made, width):
    lines = texts(comparison(made), width)
    assert lines[0].startswith(" The change made it worse: ")
    assert not any(text.startswith(" Worse") for text in lines), "said once"
    assert max(map(cell_len, lines)) <= width
    screen = "\n".join(lines)
    sides = ("before @1", "after @2") if width > 100 else ("before", "after")
    for part in ("--max-num-seqs 256 → 64", "Traffic: similar", *sides, "ITL p99", "worse"):
        assert part in screen


@pytest.mark.parametrize("width", [78, 118])
def test_each_judged_figure_has_its_interval_as_a_bar(made, width):
    lines = texts(comparison(made, slower=1.6), width)
    rows = [text for text in lines if "●" in text]
    assert [text.strip().split("  ")[0] for text in rows] == [figure.name for figure in comparison(made).judged]
    first = next(text for text in rows if "ITL p99" in text)
    assert first.index("│") < first.index("●"), "more than before: right of zero"
    better = next(text for text in texts(comparison(made, slower=0.6), width) if "ITL p99" in text and "●" in text)
    assert better.index("●") < better.index("│")


@pytest.mark.parametrize("width", [58, 66, 72, 78])
@pytest.mark.parametrize("verdict", list(ComparisonVerdict))
def test_no_verdict_is_cut(made, width, verdict):
    found = comparison(made, slower=1.6)
    figures = [replace(one, verdict=verdict) if one.verdict is not None else one for one in found.figures]
    lines = texts(replace(found, figures=tuple(figures)), width)
    assert max(map(cell_len, lines)) <= width
    at = next(at for at, text in enumerate(lines) if text.startswith(" ITL p99"))
    assert short_verdict(verdict) in lines[at] + lines[at + 1]
    assert figure_change_text(next(one for one in figures if one.name == "ITL p99")) in lines[at]


@pytest.mark.parametrize("width", [78, 118])
def test_latencies_before_and_after_lie_over_each_other_on_one_axis(made, width):
    lines = texts(comparison(made, slower=1.6), width)
    start = next(at for at, text in enumerate(lines) if "before and after" in text)
    before, after = lines[start + 2 : start + 4]
    assert before.split()[:2] == ["TTFT", "before"]
    assert all(before.index(mark) < after.index(mark) for mark in "├┼┤"), "slower: further right"
    assert before.split()[-3:] == ["154ms", "299ms", "645ms"]


def test_a_latency_that_one_run_does_not_report_is_not_drawn(made):
    def without(windows, key):
        return [
            replace(one, figures={name: value for name, value in one.figures.items() if not name.startswith(key)})
            for one in windows
        ]

    found = compare(*made.pair(without(made.minutes(1), "itl_p90"), made.minutes(2)))
    drawn = [text.split()[0] for text in texts(found, 118) if " before  " in text and "├" in text]
    assert drawn == ["TTFT", "end-to-end"]
    assert not any("├" in text for text in texts(compare(*made.pair(made.minutes(1), made.minutes(2, 2))), 118))


def test_a_hostile_name_is_only_text(made):
    flags = {"max-num-seqs": "\x1b[31m[bold]64"}
    screen = "\n".join(texts(comparison(made, flags=flags), 118))
    assert "\x1b" not in screen
    assert "[bold]64" in screen


async def test_the_key_back_is_there_only_where_it_may_be(made, host, fakes, wait_until):
    went = []
    console = ConsoleApp(fakes.FakeFleet())
    for go_back in (None, lambda: went.append(True)):
        app = host(lambda go_back=go_back: CompareScreen(comparison(made), lambda _: go_back, console))
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until(pilot, lambda app=app: "made it worse" in app.text())
            await (app.lacks if go_back is None else app.sees)("revert and restart")
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
        assert "revert and restart" not in shown(app)
        await pilot.press("z")
        await pilot.pause()
    assert restarted(fleet) == []


async def test_a_first_run_says_what_a_comparison_needs(fakes, wait_until):
    app = ConsoleApp(fakes.FakeFleet(fakes.coder), keys={"restart": "R"})
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: "nothing to compare with" in shown(app), "the reason")
        text = " ".join(shown(app).replace("│", " ").split())
        assert "each with 7 minutes of it (the first 2 after a start don't count)" in text
        assert "R restarts with it" in text, "a person's own key"
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen is app.operations, "back")


@pytest.mark.parametrize("width", [40, 78])
def test_what_a_comparison_needs_fits(width):
    lines = [strip.text for strip in nothing_lines("chat", "chat@1 has no earlier run that served", width)]
    assert lines[0].startswith(" chat@1 has no earlier run")
    assert max(map(cell_len, lines)) <= width


@pytest.fixture
def three_runs(fakes, made):
    """A fleet with three runs of ``coder``, and comparisons of every two of them."""

    def run_of(number, sequences, **more):
        return made.run(number, {"max-num-seqs": sequences}, server="coder", id=number + 10, **more)

    first = run_of(1, 512, windows=0)
    second = run_of(2, 256, before=11, changed=(FlagChange("max-num-seqs", 512, 256),))
    third = run_of(3, 256, before=12)
    fleet = fakes.FakeFleet(fakes.coder)
    fleet.known_runs = (third, second, first)
    minutes = {run.id: made.minutes(run.generation, slower=run.generation) for run in fleet.known_runs}
    pairs = [(second, third), (first, third), (first, second), (third, second)]
    fleet.comparisons = [
        compare(Recorded(one, minutes[one.id], 0.0), Recorded(other, minutes[other.id], 0.0)) for one, other in pairs
    ]
    fleet.comparison = fleet.comparisons[0]
    return fleet


async def test_other_runs_are_chosen_from_a_list_and_shown_at_once(three_runs, wait_until):
    app = ConsoleApp(three_runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: "before @2, after @3" in shown(app), "the comparison")
        await pilot.press("b")
        await wait_until(pilot, lambda: "Compare coder@3 with which earlier run?" in shown(app), "the list")
        assert "Which run is the one" not in shown(app)
        text = shown(app)
        assert "12 min of traffic · --max-num-seqs 512 → 256" in text
        assert "no traffic · first run" in text
        assert text.count("coder@3") == 1, "not compared with itself: only the question names it"
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "before @1, after @3" in shown(app), "the other comparison")
        await pilot.press("a")
        await wait_until(pilot, lambda: "with which later run?" in shown(app), "the list")
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: "before @1, after @2" in shown(app), "the third comparison")
        await pilot.press("b")
        await wait_until(pilot, lambda: "with which earlier run?" in shown(app), "the list, which is read first")
        await pilot.press("escape")
        await wait_until(pilot, lambda: isinstance(app.screen, CompareScreen), "back without a choice")
        assert "before @1, after @2" in shown(app)


async def test_keys_after_the_one_that_lists_the_runs_are_for_the_list(three_runs, wait_until, monkeypatch):
    listed, answer = threading.Event(), three_runs.runs
    app = ConsoleApp(three_runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: "b a choose runs" in shown(app), "the comparison")

        def slowly(*given):
            assert listed.wait(20)
            return answer(*given)

        monkeypatch.setattr(three_runs, "runs", slowly)
        await pilot.press("b", "down", "z", "enter")
        listed.set()
        await wait_until(pilot, lambda: "before @1, after @3" in shown(app), "the other comparison")
        assert not restarted(three_runs)


async def test_runs_are_offered_for_choice_only_where_there_are_others(three_runs, wait_until, monkeypatch):
    listed, runs_of = [], three_runs.runs
    monkeypatch.setattr(three_runs, "runs", lambda name: listed.append(name) or runs_of(name))
    two = three_runs.known_runs[:2]
    for runs, offered in ((three_runs.known_runs, True), (two, False)):
        three_runs.known_runs = runs
        app = ConsoleApp(three_runs)
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_until(pilot, lambda app=app: app.snapshot is not None, "the first look")
            await pilot.press("c")
            await wait_until(pilot, lambda app=app: "before @2, after @3" in shown(app), "the comparison")
            if offered:
                await wait_until(pilot, lambda app=app: "b a choose runs" in shown(app), "the keys")
                assert not listed, "that judges all records, too much for every ten seconds"
                continue
            await pilot.press("b")
            await wait_until(pilot, lambda app=app: [one.message for one in app._notifications], "the reason")
            assert [one.message for one in app._notifications] == ["coder has no other run to compare with."]
            assert "choose runs" not in shown(app)


async def test_the_chosen_runs_go_on_being_compared_and_are_what_is_reverted_to(three_runs, wait_until, monkeypatch):
    monkeypatch.setattr("vllm_console.ui.screens.compare.AGAIN_SECONDS", 0.02)
    app = ConsoleApp(three_runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: "before @2, after @3" in shown(app), "the comparison")
        await pilot.press("b")
        await wait_until(pilot, lambda: "Compare coder@3 with which earlier run?" in shown(app), "the list")
        await pilot.press("down", "enter")
        again = ("compare_again", 11, 13)
        await wait_until(pilot, lambda: three_runs.calls.count(again) > 2, "the chosen runs, again")
        assert isinstance(app.screen, CompareScreen)
        assert app.screen.found.before.run.flags == {"max-num-seqs": 512}


async def test_nothing_is_compared_while_another_screen_covers_it(three_runs, wait_until, monkeypatch):
    monkeypatch.setattr("vllm_console.ui.screens.compare.AGAIN_SECONDS", 0.02)
    app = ConsoleApp(three_runs, refresh=0.05)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: three_runs.calls.count(("compare_again", 12, 13)) > 2, "again and again")
        await pilot.press("question_mark")
        await wait_until(pilot, lambda: not isinstance(app.screen, CompareScreen), "the help")
        looks = three_runs.looks
        await wait_until(pilot, lambda: three_runs.looks > looks + 3, "the end of what has begun")
        looks, calls = three_runs.looks, len(three_runs.calls)
        await wait_until(pilot, lambda: three_runs.looks > looks + 5, "some time")
        assert len(three_runs.calls) == calls


async def test_a_run_that_is_gone_is_named(three_runs, wait_until):
    three_runs.comparisons = three_runs.comparisons[:1]
    app = ConsoleApp(three_runs)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: "before @2, after @3" in shown(app), "the comparison")
        await pilot.press("b")
        await wait_until(pilot, lambda: "Compare coder@3 with which earlier run?" in shown(app), "the list")
        await pilot.press("down", "enter")
        await wait_until(pilot, lambda: [one.message for one in app._notifications], "the reason")
        assert [one.message for one in app._notifications] == ["there is no run 11 or 13"]
        assert "before @2, after @3" in shown(app), "what was shown stays"


def test_runs_of_one_generation_have_names_of_their_own(made):
    runs = [made.run(1, id=7), made.run(1, id=3)]
    assert {name: run.id for name, run in run_names(runs).items()} == {"chat@1": 7, "chat@1 (3)": 3}


def shown(app):
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip) for strip in strips)


def restarted(fleet):
    return [call[:3] for call in fleet.calls if call[0] == "restart"]


def test_the_ceilings_of_both_ramps_are_named(made):
    steps = tuple({"rate": rate, "ttft_seconds": {"p99": 0.1}} for rate in (1.0, 2.0))
    sides = made.pair(made.minutes(1), made.minutes(2))
    assert not any("Ceiling" in text for text in texts(compare(*sides), 78))
    before, after = (
        replace(side, run=replace(side.run, measurements=(Measurement("ramp", 1.0, steps, ceiling),)))
        for side, ceiling in zip(sides, (8.0, 9.44), strict=True)
    )
    assert any("Ceiling: 8 → 9.44 req/s" in text for text in texts(compare(before, after), 78))


async def test_what_was_predicted_stands_next_to_what_came(fakes, made, wait_until):
    fleet = fakes.FakeFleet(fakes.coder)
    found = fleet.comparison = comparison(made)
    spread = EstimatedSpread(p50=Estimate(0.2, 0.15, 0.25))
    kept = KeptPrediction(
        0.0, {"max-num-seqs": 64}, Estimates(ttft_seconds=spread, tokens_per_second=Estimate(210.0, 180.0, 240.0)),
        Traffic(1.0, 100.0, 50.0), StepCost(0.02), measured=Figures(Spread(p50=0.31), tokens_per_second=200.0),
        drift=0.05,
    )  # fmt: skip
    fleet.outcomes[found.before.run.id, found.after.run.id] = kept
    app = ConsoleApp(fleet)
    async with app.run_test(size=(80, 60)) as pilot:
        await wait_until(pilot, lambda: app.snapshot is not None, "the first look")
        await pilot.press("c")
        await wait_until(pilot, lambda: "PREDICTED" in shown(app), "the prediction")
        rows = [" ".join(row.split()) for row in shown(app).splitlines()]
        assert "TTFT p50 200ms 150ms to 250ms 310ms ! outside" in rows
        assert "tokens/s 210 tok/s 180 to 240 tok/s 200 tok/s within" in rows
        assert "Since the restart, the same steps are 5% slower (machine or engine)." in rows


def test_what_reads_like_an_end_of_the_interval_is_not_outside_and_no_drift_is_not_reported():
    kept = KeptPrediction(
        0.0, {"max-num-seqs": 64}, Estimates(ttft_seconds=EstimatedSpread(mean=Estimate(3.5, 3.04, 28.0))),
        Traffic(1.0, 100.0, 50.0), StepCost(0.02), measured=Figures(Spread(mean=2.97)), drift=0.004,
    )  # fmt: skip
    _, row = outcome_lines(kept)
    assert row.split() == ["TTFT", "mean", "3.5s", "3.0s", "to", "28s", "3.0s", "within"]
    _, far = outcome_lines(replace(kept, measured=Figures(Spread(mean=2.9))))
    assert far.endswith("! outside")


def test_nothing_is_within_or_outside_before_the_runs_are_compared():
    kept = KeptPrediction(
        0.0, {"max-num-seqs": 64}, Estimates(ttft_seconds=EstimatedSpread(mean=Estimate(3.5, 3.04, 28.0))),
        Traffic(1.0, 100.0, 50.0), StepCost(0.02), measured=Figures(Spread(mean=2.0)),
    )  # fmt: skip
    heading, row = outcome_lines(kept, judged=False)
    assert heading.endswith(" SO FAR")
    assert row.split() == ["TTFT", "mean", "3.5s", "3.0s", "to", "28s", "2.0s"]


def test_what_was_predicted_is_shown_before_there_are_minutes_to_compare(made):
    found = compare(*made.pair([], []))
    assert found.empty
    lines = [strip.text for strip in compare_lines(found, 78, predicted=["  TTFT p50  45ms"])]
    assert any("Not enough data" in text for text in lines)
    assert [text.strip() for text in lines[-2:]] == ["Predicted", "TTFT p50  45ms"]


@pytest.mark.parametrize("width", [78, 80])
def test_a_change_in_preemptions_is_not_cut(made, width):
    found = comparison(made)
    fewer = {"before": 0.14, "after": 0.0, "change": -0.14, "low": -0.18, "high": -0.095}
    figures = [replace(one, **(fewer if one.unit == "per request" else {})) for one in found.figures]
    (row,) = [text for text in texts(replace(found, figures=tuple(figures)), width) if "preemptions/req  " in text]
    assert "−0.14 (−0.18 to −0.095) " in row


@pytest.mark.parametrize("width", [78, 118])
def test_energy_has_rows_and_its_cost_where_it_is_known(made, width):
    sides = (
        [with_figures(one, dict(zip(FIGURES, (joules, joules / 4, joules * 200), strict=True))) for one in minutes]
        for joules, minutes in ((12.0, made.minutes(1)), (6.0, made.minutes(2)))
    )
    found = compare(*made.pair(*sides))
    lines = [strip.text for strip in compare_lines(found, width, tariff=Tariff(0.30, "EUR"))]
    (row,) = (text for text in lines if "J/token out" in text)
    assert row.split()[2:6] == ["12", "J", "6", "J"]
    assert "−50%" in row
    assert any("Energy: 1 EUR → 0.5 EUR per million output tokens" in text for text in lines)
    assert max(map(cell_len, lines)) <= width
    assert not [text for text in texts(comparison(made), width) if "J/" in text or "Energy" in text]

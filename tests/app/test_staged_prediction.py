"""The prediction of staged changes: shown only for them, kept only if the restart follows."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from vllm_console.diagnosis.finding import Fix
from vllm_console.fleet.predictions import PredictedChange
from vllm_console.prediction.predict import Estimate, EstimatedSpread, Estimates, Prediction
from vllm_console.prediction.score import TrackRecord
from vllm_console.text import seconds_range
from vllm_console.ui.findings import fix_texts
from vllm_console.ui.parts import staged_prediction
from vllm_console.ui.parts.staged_prediction import brief_prediction, prediction_text
from vllm_console.ui.parts.staging import StagedStep
from vllm_console.ui.theme import ACCENT, DIM
from vllm_launchers.errors import OperationError
from vllm_launchers.vllm.flags.changes import Changes


def estimates(ttft, itl, preemptions=None):
    return Estimates(
        ttft_seconds=EstimatedSpread(p99=ttft),
        itl_seconds=EstimatedSpread(p50=itl),
        preemptions_per_minute=preemptions or Estimate(),
    )


NOW = estimates(Estimate(1.9, 1.9, 1.9), Estimate(0.024, 0.024, 0.024), Estimate(18, 18, 18))
PREDICTION = Prediction(NOW, estimates(Estimate(1.1, 0.9, 1.4), Estimate(0.022, 0.02, 0.025), Estimate(1, 0, 2)))
FOUND = PredictedChange((), PREDICTION, 300, 5.0, "the probe's records", TrackRecord())
WIDE, WIDE_ITL, HIGHER = Estimate(8.0, 1.7, 14.0), Estimate(0.03, 0.01, 0.09), Estimate(8.0, 4.0, 14.0)
TTFT = "predicted: TTFT p99 1.9s → 0.9–1.4s"


@pytest.fixture
def fleet(fakes, monkeypatch):
    monkeypatch.setattr(staged_prediction, "DEBOUNCE_SECONDS", 0.01)
    return fakes.FakeFleet(fakes.chat)


def asked(fleet):
    return list(fleet.predicted)


def kept(fleet):
    return [call[3] for call in fleet.calls if call[0] == "keep_prediction"]


def predicted(**changes):
    return replace(FOUND, prediction=replace(PREDICTION, **changes))


@pytest.mark.parametrize(
    ("found", "width", "text"),
    [
        (FOUND, 120, f"{TTFT} · ITL p50 24ms → 20–25ms · preemptions 18 → 0–2/min"),
        (FOUND, 60, TTFT),
        (predicted(now=estimates(Estimate(), Estimate())), 120, "predicted: "),
        (
            predicted(outside="Too far."),
            120,
            "predicted: TTFT p99 1.9s → lower, perhaps by more than half · ITL p50 24ms → about the same. Too far.",
        ),
        (predicted(outside="Too far."), 60, "predicted: TTFT p99 1.9s → lower, perhaps by more than half. Too far."),
        (predicted(predicted=estimates(WIDE, WIDE_ITL), outside="Too far."), 120, "not predicted: Too far."),
        (
            predicted(predicted=Estimates(), outside="No prediction: the replay's ITL is 25% below."),
            120,
            "not predicted: the replay's ITL is 25% below.",
        ),
        (
            predicted(predicted=estimates(WIDE, Estimate(0.022, 0.02, 0.025))),
            120,
            "predicted: ITL p50 24ms → 20–25ms · no prediction for TTFT p99",
        ),
        (
            predicted(predicted=estimates(HIGHER, Estimate(0.022, 0.02, 0.025))),
            120,
            "predicted: TTFT p99 1.9s → several times as high · ITL p50 24ms → 20–25ms",
        ),
        (replace(FOUND, source="metrics"), 60, TTFT.replace("predicted", "predicted from metrics")),
    ],
)
def test_a_prediction_is_one_line_that_names_what_it_rests_on(found, width, text):
    style = DIM if found.prediction.outside else ACCENT
    assert prediction_text(found, width) == (text, style)


async def test_a_prediction_belongs_to_what_is_staged_and_is_kept_with_the_restart(console, fleet):
    first, second = (fleet_values(fleet, by) for by in (2, 4))
    fleet.predictable[first] = FOUND
    fleet.predictable[second] = replace(FOUND, prediction=replace(PREDICTION, outside="Too far from what it showed."))
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees(TTFT)
        await c.press("left_square_bracket")
        await c.sees("predicted: TTFT p99 1.9s → lower, perhaps by more than half · ITL p50 24ms → about the same.")
        await c.sees("Too far from what it")
        await c.lacks(TTFT)
        await c.press("right_square_bracket")
        await c.sees(TTFT)
        assert len(asked(fleet)) == 2, "what was predicted a moment ago is not predicted anew"
        assert kept(fleet) == []
        await c.press("r", "y")
        await c.until(lambda: any(call[0] == "restart" for call in fleet.calls))
        assert kept(fleet) == [FOUND]


async def test_a_new_server_does_not_inherit_the_predictions_of_a_removed_one(console, fleet):
    fleet.predictable[fleet_values(fleet, 2)] = FOUND
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees(TTFT)
        c.app.operations.predictions.drop("chat")
        await c.until(lambda: len(asked(fleet)) == 2)


async def test_the_same_change_is_predicted_once_however_it_was_staged(console, fleet):
    fleet.predictable[(False,)] = FOUND
    async with console(fleet=fleet) as c:
        screen = c.app.operations
        await c.press("P")
        await c.sees("--enable-chunked-prefill was unset")
        await c.sees(TTFT)
        screen.staging.drop("chat")
        await c.lacks(TTFT)
        screen.stage_step(screen.live, StagedStep("enable-chunked-prefill", False))
        await c.sees(TTFT)
        assert len(asked(fleet)) == 1


def fleet_values(fleet, by):
    return (fleet._view("chat").flags["max-num-seqs"] // by,)


async def test_why_nothing_is_predicted(console, fleet):
    fleet.predictable[fleet_values(fleet, 2)] = OperationError("chat: a prediction needs at least 30 requests")
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees("not predicted: a prediction needs at least 30 requests")
        await c.press("m")
        await c.sees("chat: not predicted: a prediction needs at least 30 requests")


async def test_what_could_not_be_predicted_is_asked_again_once_it_is_staged_again(console, fleet):
    """The refusal once stayed for minutes although the unpredictable traffic was over."""
    by_two = fleet_values(fleet, 2)
    outside = "The records don't cover all traffic."
    fleet.predictable[by_two] = predicted(now=Estimates(), predicted=Estimates(), outside=outside)
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees(f"not predicted: {outside}")
        fleet.predictable[by_two] = FOUND
        await c.press("right_square_bracket")
        await c.lacks("not predicted")
        await c.press("left_square_bracket")
        await c.sees(TTFT)


async def test_nothing_is_asked_of_what_the_plan_refuses(console, fleet):
    async with console(fleet=fleet) as c:
        fleet.plan_error = OperationError("can't be planned")
        await c.press("left_square_bracket")
        await c.sees("can't be planned")
        await c.pilot.pause(0.1)
        assert asked(fleet) == []


async def test_an_old_prediction_is_neither_shown_nor_kept(console, fleet, monkeypatch):
    fleet.predictable[fleet_values(fleet, 2)] = FOUND
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees(TTFT)
        screen = c.app.operations
        server = screen.live
        staged = screen.staging.of(server.name)
        assert screen.predictions.seen(server, staged) == FOUND
        monkeypatch.setattr(staged_prediction, "OUTDATED_SECONDS", 0.0)
        assert screen.predictions.seen(server, staged) is None
        assert screen.predictions.text(server, 120) == ""


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(6.8, 52.0, "6.8–52s"), (0.361, 0.46, "361–460ms"), (0.95, 1.4, "0.9–1.4s"), (0.009, 1.4, "9.0ms–1.4s"),
     (0.0, 0.2, "0s–200ms"), (0.0004, 0.0009, "400–900µs"), (1.41, 1.42, "1.4s"), (99.4, 1205.0, "99s–20m05s")],
)  # fmt: skip
def test_an_interval_is_told_in_one_unit_where_that_tells_both_ends(low, high, text):
    assert seconds_range(low, high) == text


def test_in_short_it_reports_the_figure_that_the_finding_is_about():
    assert brief_prediction(FOUND, "slow_first_token") == TTFT
    assert brief_prediction(FOUND, "slow_tokens") == "predicted: ITL p50 24ms → 20–25ms"
    assert brief_prediction(predicted(outside="Too far."), "preempting") == (
        "predicted: preemptions 18 → less than half as high"
    )
    assert brief_prediction(predicted(outside="Too far.", predicted=estimates(WIDE, WIDE_ITL)), "slow_tokens") == ""
    full = replace(NOW, kv_cache_usage=Estimate(0.91, 0.91, 0.91))
    less = replace(PREDICTION.predicted, kv_cache_usage=Estimate(0.7, 0.66, 0.74))
    usage = "predicted: KV cache mean 91% → 66–74%"
    assert brief_prediction(predicted(now=full, predicted=less), "kv_cache_pressure") == usage


WORSE = "predicted to make it worse: TTFT p99 1.9s → several times as high"


@pytest.mark.parametrize("outside", ["", "Too far."])
def test_what_makes_the_finding_worse_says_so(outside):
    found = predicted(predicted=estimates(HIGHER, Estimate(0.022, 0.02, 0.025)), outside=outside)
    assert brief_prediction(found, "slow_first_token") == WORSE
    assert prediction_text(found, 100, "slow_first_token")[0].startswith(WORSE)
    assert "worse" not in prediction_text(found, 100)[0], "it is no fix"
    assert "worse" not in brief_prediction(found, "slow_tokens")


def test_that_a_change_makes_the_finding_worse_has_room_in_every_line():
    fix = Fix(Changes({"max-num-seqs": 128}), "Why.", "One. Two.")
    texts = fix_texts({"max-num-seqs": 256}, fix, WORSE)
    assert texts[0] == f"--max-num-seqs 256 → 128, {WORSE}. Trade-off: One. Two."
    assert texts[-1] == "--max-num-seqs 256 → 128, predicted to make it worse"
    assert all("predicted to make it worse" in text for text in texts)


@pytest.fixture
def troubled(fakes, monkeypatch):
    """A fleet whose server has a finding with a fix, which is predicted at once."""
    monkeypatch.setattr(staged_prediction, "FIX_DELAY_SECONDS", 0.01)
    return fakes.FakeFleet(fakes.pressed)


def fix_values(fleet):
    fix = next(fix for fix in fleet._view("chat").findings[0].fixes if not fix.changes.empty)
    return tuple(fix.changes.set.values())


async def test_the_line_of_a_finding_has_the_predicted_effect_of_its_fix(console, troubled):
    troubled.predictable[fix_values(troubled)] = FOUND
    async with console(fleet=troubled, size=(160, 40)) as c:
        await c.sees("predicted: preemptions 18 → 0–2/min")
        await c.press("f")
        await c.sees("tokens · predicted: preemptions 18 → 0–2/min. Trade-off:")
        assert "Staged. r restarts." in c.text, "the foot does not show it yet"
        assert len(asked(troubled)) == 1, "what is staged has been predicted as a fix"
        await c.press("f")
        await c.sees("fix 2/2")
        await c.lacks("predicted:")


async def test_a_fix_that_is_predicted_to_make_it_worse_says_so_on_every_screen(console, troubled):
    more = Estimate(60, 40, 80)
    worse = replace(FOUND, prediction=replace(PREDICTION, predicted=estimates(*[Estimate(1.0, 0.9, 1.1)] * 2, more)))
    troubled.predictable[fix_values(troubled)] = worse
    told = "predicted to make it worse: preemptions 18 → 40–80/min"
    async with console(fleet=troubled, size=(160, 40)) as c:
        await c.sees(told)
        await c.press("i")
        await c.sees("FIXES, best first")
        await c.sees("predicted to make it worse: TTFT")
        await c.press("escape", "f")
        await c.sees("· predicted to make it worse: preemptions")


async def test_where_the_fix_cannot_be_predicted_nothing_is_reported_and_it_is_not_asked_again(console, troubled):
    troubled.predictable[fix_values(troubled)] = OperationError("chat: a prediction needs at least 30 requests")
    async with console(fleet=troubled, size=(160, 40)) as c:
        await c.until(lambda: len(asked(troubled)) == 1)
        for _ in range(3):
            c.app.operations.redraw()
            await c.pilot.pause()
        assert "predicted" not in c.text
        await c.press("m")
        await c.sees("Messages")
        assert "not predicted" not in c.text, "nobody has asked for it"
        assert len(asked(troubled)) == 1


async def test_a_fix_whose_prediction_was_ended_by_moving_on_is_predicted_on_return(console, fakes, monkeypatch):
    monkeypatch.setattr(staged_prediction, "FIX_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(staged_prediction, "RETRY_SECONDS", 0.0)
    go = threading.Event()

    class Slow(fakes.FakeFleet):
        def predict_staged(self, *asked):
            found = super().predict_staged(*asked)
            assert len(self.predicted) > 1 or go.wait(60)
            return found

    fleet = Slow(fakes.pressed, fakes.coder)
    fleet.predictable[fix_values(fleet)] = FOUND
    async with console(fleet=fleet, size=(160, 40)) as c:
        await c.until(lambda: len(asked(fleet)) == 1)
        await c.press("j", "k")
        try:
            await c.sees("predicted: preemptions 18 → 0–2/min")
        finally:
            go.set()
        assert len(asked(fleet)) == 2


async def test_the_findings_show_a_prediction_that_arrives_while_they_are_open(console, fakes, monkeypatch):
    monkeypatch.setattr(staged_prediction, "FIX_DELAY_SECONDS", 0.01)
    go = threading.Event()

    class Slow(fakes.FakeFleet):
        def predict_staged(self, *asked):
            assert go.wait(60)
            return super().predict_staged(*asked)

    fleet = Slow(fakes.pressed)
    fleet.predictable[fix_values(fleet)] = FOUND
    async with console(fleet=fleet, size=(160, 40)) as c:
        await c.press("i")
        await c.sees("FIXES, best first")
        assert "predicted" not in c.text
        go.set()
        await c.sees("predicted: TTFT p99")


async def test_the_findings_show_the_prediction_that_their_line_shows(console, troubled, monkeypatch):
    """After two minutes they showed none."""
    monkeypatch.setattr(staged_prediction, "AGE_SECONDS", 0.0)
    troubled.predictable[fix_values(troubled)] = FOUND
    async with console(fleet=troubled, size=(160, 40)) as c:
        await c.sees("predicted: preemptions 18 → 0–2/min")
        await c.press("i")
        await c.sees("predicted: TTFT p99")


@pytest.mark.parametrize("found", [FOUND, OperationError("chat: a prediction needs at least 30 requests")])
async def test_changes_that_stay_staged_are_predicted_again_only_for_a_while(console, fleet, monkeypatch, found):
    monkeypatch.setattr(staged_prediction, "AGE_SECONDS", 0.0)
    monkeypatch.setattr(staged_prediction, "RETRY_SECONDS", 0.0)
    fleet.predictable[fleet_values(fleet, 2)] = found
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.until(lambda: len(asked(fleet)) > 1)
        monkeypatch.setattr(staged_prediction, "NEW_SECONDS", 0.0)
        await c.until(lambda: c.app.operations.predictions._wanted is None)
        before = len(asked(fleet))
        for _ in range(3):
            c.app.operations.redraw()
            await c.pilot.pause(0.05)
        assert len(asked(fleet)) == before

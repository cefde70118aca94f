"""The prediction of what is staged: shown for it alone, kept only when the restart follows."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.fleet.predictions import PredictedChange
from vllm_console.fleet.verbs import FleetError
from vllm_console.prediction.predict import Estimate, EstimatedSpread, Estimates, Prediction
from vllm_console.prediction.score import TrackRecord
from vllm_console.text import seconds_range
from vllm_console.ui.parts import staged_prediction
from vllm_console.ui.parts.staged_prediction import brief_prediction, prediction_text
from vllm_console.ui.theme import ACCENT, DIM


def estimates(ttft, itl, preemptions=None):
    return Estimates(
        ttft_seconds=EstimatedSpread(p99=ttft),
        itl_seconds=EstimatedSpread(p50=itl),
        preemptions_per_minute=preemptions or Estimate(),
    )


NOW = estimates(Estimate(1.9, 1.9, 1.9), Estimate(0.024, 0.024, 0.024), Estimate(18, 18, 18))
PREDICTION = Prediction(NOW, estimates(Estimate(1.1, 0.9, 1.4), Estimate(0.022, 0.02, 0.025), Estimate(1, 0, 2)))
FOUND = PredictedChange((), PREDICTION, 300, 5.0, "the probe's records", TrackRecord())
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
        (predicted(outside="Too far."), 60, "predicted: Too far."),
        (replace(FOUND, source="metrics"), 60, TTFT.replace("predicted", "predicted from metrics")),
    ],
)
def test_the_line(found, width, text):
    style = DIM if found.prediction.outside else ACCENT
    assert prediction_text(found, width) == (text, style)


async def test_it_belongs_to_what_is_staged_and_is_kept_with_the_restart(console, fleet):
    first, second = (fleet_values(fleet, by) for by in (2, 4))
    fleet.predictions[first] = FOUND
    fleet.predictions[second] = replace(FOUND, prediction=replace(PREDICTION, outside="Too far from what it showed."))
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees(TTFT)
        await c.press("left_square_bracket")
        await c.sees("predicted: Too far from what it showed.")
        await c.lacks(TTFT)
        await c.press("right_square_bracket")
        await c.sees(TTFT)
        assert len(asked(fleet)) == 2, "what was predicted a moment ago is not predicted anew"
        assert kept(fleet) == []
        await c.press("r", "y")
        await c.until(lambda: any(call[0] == "restart" for call in fleet.calls))
        assert kept(fleet) == [FOUND]


def fleet_values(fleet, by):
    return (fleet._view("chat").flags["max-num-seqs"] // by,)


async def test_why_nothing_is_predicted(console, fleet):
    fleet.predictions[fleet_values(fleet, 2)] = FleetError("chat: a prediction needs at least 30 requests")
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees("not predicted: a prediction needs at least 30 requests")
        await c.press("m")
        await c.sees("chat: not predicted: a prediction needs at least 30 requests")


async def test_nothing_is_asked_of_what_the_plan_refuses(console, fleet):
    async with console(fleet=fleet) as c:
        fleet.plan_error = FleetError("can't be planned")
        await c.press("left_square_bracket")
        await c.sees("can't be planned")
        await c.pilot.pause(0.1)
        assert asked(fleet) == []


async def test_an_old_prediction_is_neither_shown_nor_kept(console, fleet, monkeypatch):
    fleet.predictions[fleet_values(fleet, 2)] = FOUND
    async with console(fleet=fleet) as c:
        await c.press("left_square_bracket")
        await c.sees(TTFT)
        screen = c.app.operations
        server = screen.live
        staged = screen.staging.of(server.name)
        assert screen.predictions.seen(server, staged) == FOUND
        monkeypatch.setattr(staged_prediction, "AGE_SECONDS", 0.0)
        assert screen.predictions.seen(server, staged) is None


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [(6.8, 52.0, "6.8–52s"), (0.361, 0.46, "361–460ms"), (0.95, 1.4, "0.9–1.4s"), (0.009, 1.4, "9.0ms–1.4s"),
     (0.0, 0.2, "0s–200ms"), (0.0004, 0.0009, "400–900µs"), (1.41, 1.42, "1.4s")],
)  # fmt: skip
def test_an_interval_is_told_in_one_unit_where_that_tells_both_ends(low, high, text):
    assert seconds_range(low, high) == text


def test_in_short_it_reports_the_figure_that_the_finding_is_about():
    assert brief_prediction(FOUND) == TTFT.removeprefix("predicted: ")
    assert brief_prediction(FOUND, "ITL") == "ITL p50 24ms → 20–25ms"
    assert brief_prediction(predicted(outside="Too far."), "ITL") == ""


@pytest.fixture
def troubled(fakes, monkeypatch):
    """A fleet whose server has a finding with a fix, which is predicted at once."""
    monkeypatch.setattr(staged_prediction, "FIX_DELAY_SECONDS", 0.01)
    return fakes.FakeFleet(fakes.pressed)


def fix_values(fleet):
    fix = next(fix for fix in fleet._view("chat").findings[0].fixes if not fix.changes.empty)
    return tuple(fix.changes.set.values())


async def test_the_line_of_a_finding_has_the_predicted_effect_of_its_fix(console, troubled):
    troubled.predictions[fix_values(troubled)] = FOUND
    async with console(fleet=troubled, size=(160, 40)) as c:
        await c.sees("predicted: preemptions 18 → 0–2/min")
        await c.press("f")
        await c.sees("fix 1/")
        assert len(asked(troubled)) == 1, "what is staged has been predicted as a fix"


async def test_where_the_fix_cannot_be_predicted_nothing_is_reported_and_it_is_not_asked_again(console, troubled):
    troubled.predictions[fix_values(troubled)] = FleetError("chat: a prediction needs at least 30 requests")
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

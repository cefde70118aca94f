"""The text output of ``predict``: unknown values are dashes, and a line says why."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from vllm_console.cli.predict import _lines
from vllm_console.fleet.predictions import PredictedChange
from vllm_console.metrics.quantile import each_once
from vllm_console.prediction.figures import Figures, Spread
from vllm_console.prediction.predict import Estimate, Prediction, _estimates
from vllm_console.prediction.score import TrackRecord

MANY = Spread.of(each_once([0.1] * 500))
SOME = Spread.of(each_once([0.1] * 110))
ALL = Figures(MANY, MANY, MANY, 100.0, 0.0, 0.0, 0.5)

CASES = {
    "nothing is unknown": (ALL, ""),
    "few requests": (replace(ALL, ttft_seconds=SOME, e2e_seconds=SOME), "–: p99 needs 500 requests."),
    "few tokens": (replace(ALL, itl_seconds=SOME), "–: p99 needs 500 inter-token intervals."),
    "few of both": (Figures(SOME, SOME, SOME, 1.0, 0.0, 0.0, 0.5), "–: p99 needs 500 requests."),
    "answers of one token": (replace(ALL, itl_seconds=Spread()), "–: ITL needs answers of more than one token."),
    "steps without a queue": (
        replace(ALL, requests_waiting=None, kv_cache_usage=None),
        "–: requests waiting and KV cache usage not reported in the records of the engine's steps.",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("side", ["now", "predicted"])
def test_each_dash_has_a_reason(case, side):
    figures, reason = CASES[case]
    sides = {"now": _estimates(ALL, ()), "predicted": _estimates(ALL, ()), side: _estimates(figures, ())}
    found = PredictedChange((), Prediction(**sides), 600, 10.0, "recorded", TrackRecord(0, None, None))
    lines = list(_lines("chat", found))
    dashes = any(line.rstrip().endswith("–") or " – " in line for line in lines if not line.startswith("–"))
    assert dashes is bool(reason), lines
    assert [line for line in lines if line.startswith("–")] == ([reason] if reason else [])


def test_replay_that_serves_nothing_is_reported():
    found = PredictedChange((), Prediction(_estimates(ALL, ())), 600, 10.0, "recorded", TrackRecord(0, None, None))
    assert "no recorded request would be served" in list(_lines("chat", found))[-1]


def test_value_without_an_interval_is_not_called_a_change():
    then = _estimates(ALL, ())
    then = replace(then, ttft_seconds=replace(then.ttft_seconds, p50=Estimate(0.3), p99=Estimate(0.9)))
    found = PredictedChange(
        (), Prediction(_estimates(ALL, ()), then), 600, 10.0, "recorded", TrackRecord(0, None, None)
    )
    text = "\n".join(_lines("chat", found))
    assert "300ms" in text
    assert "900ms" in text
    assert "p99 needs" not in text
    assert "TTFT would" not in text


@pytest.mark.parametrize(
    ("number", "words"), [(1, "Of 1 earlier prediction here"), (12, "Of 12 earlier predictions here")]
)
def test_score_counts_earlier_predictions(number, words):
    same = _estimates(ALL, ())
    found = PredictedChange((), Prediction(same, same), 600, 10.0, "recorded", TrackRecord(number, 0.08, 0.9))
    assert f"{words} the median error was 8%, and 90% of the measurements were within the interval." in list(
        _lines("chat", found)
    )

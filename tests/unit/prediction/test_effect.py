"""A prediction in words where its interval is too wide for numbers."""

from __future__ import annotations

import pytest

from vllm_console.cli.predict import _row, _sentence
from vllm_console.prediction.effect import in_words, is_rough, surely_rises
from vllm_console.prediction.predict import Estimate, EstimatedSpread, Estimates
from vllm_console.text import seconds

NOW = Estimate(7.8, 7.8, 7.8)


@pytest.mark.parametrize(
    ("low", "high", "rough"),
    [
        (6.8, 58.0, True),
        (8.7, 59.0, True),
        (5.2, 9.9, True),
        (7.0, 9.0, False),
        (10.0, 25.0, False),
        (0.5, 3.0, False),
        (0.0, 20.0, True),
    ],
)
def test_interval_without_direction_or_size_is_rough(low, high, rough):
    assert is_rough(NOW, Estimate((low + high) / 2, low, high)) is rough


@pytest.mark.parametrize(
    ("now", "low", "high", "words"),
    [
        (7.8, 6.8, 58.0, "unknown"),
        (7.8, 7.0, 8.2, "about the same"),
        (7.8, 8.7, 12.0, "higher"),
        (7.8, 8.7, 59.0, "higher, perhaps several times"),
        (7.8, 8.7, 90.0, "higher, perhaps more than tenfold"),
        (7.8, 20.0, 59.0, "several times as high"),
        (7.8, 80.0, 900.0, "more than ten times as high"),
        (7.8, 6.0, 7.0, "lower"),
        (7.8, 1.0, 7.0, "lower, perhaps by more than half"),
        (7.8, 1.0, 3.0, "less than half as high"),
        (7.8, 0.1, 0.5, "less than a tenth as high"),
        (16.0, 0.0, 0.0, "none"),
        (0.0, 0.0, 4.0, "unknown"),
        (0.0, 2.0, 4.0, "some"),
        (None, 2.0, 4.0, "unknown"),
        (7.8, None, None, "unknown"),
    ],
)
def test_wording_holds_for_the_whole_interval(now, low, high, words):
    assert in_words(Estimate(now), Estimate(3.0, low, high)) == words


def test_rise_is_certain_only_if_the_whole_interval_is_above():
    assert surely_rises(NOW, Estimate(20.0, 8.7, 59.0))
    assert not surely_rises(NOW, Estimate(20.0, 6.8, 58.0))
    assert not surely_rises(NOW, Estimate(20.0))


def test_command_uses_words_for_wide_intervals():
    wide, narrow = Estimate(20.0, 8.7, 59.0), Estimate(8.0, 7.0, 8.2)
    assert _row("TTFT p99", NOW, wide, seconds, flagged=False).split(maxsplit=3)[2:] == [
        "7.8s",
        "higher, perhaps several times",
    ]
    assert _row("TTFT p99", NOW, narrow, seconds, flagged=False).endswith("8.0s   7.0s to 8.2s")
    assert _row("TTFT p99", NOW, narrow, seconds, flagged=True).endswith("7.8s   about the same")
    sides = (Estimates(ttft_seconds=EstimatedSpread(p50=one)) for one in (NOW, wide))
    assert _sentence(*sides) == "The median TTFT would be higher, perhaps several times."


@pytest.mark.parametrize(
    ("after", "sentence"),
    [
        (Estimate(8.0, 7.0, 8.2), "No figure would change by more than the normal variation of machine and traffic."),
        (
            Estimate(20.0, 5.2, 58.0),
            "No change is certain: the intervals contain the current medians. More requests would narrow them.",
        ),
    ],
)
def test_sentence_claims_no_more_than_the_intervals(after, sentence):
    sides = (Estimates(ttft_seconds=EstimatedSpread(p50=one)) for one in (NOW, after))
    assert _sentence(*sides) == sentence

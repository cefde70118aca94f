"""Figures of a load are exact, bounded in memory, and say nothing where nothing was seen."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.load.report import KINDS_KEPT, Latency, Samples, Tally, quantile


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 1))
@settings(deadline=None)
def test_a_quantile_lies_between_its_neighbours(values: list[float], share: float) -> None:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
    assert low <= quantile(ordered, share) <= high or quantile(ordered, share) == pytest.approx(low)


def test_known_quantiles() -> None:
    samples = Samples()
    for value in range(101):
        samples.add(float(value))
    assert samples.latency() == Latency(101, 5050.0, 50.0, 90.0, 99.0)


def test_more_samples_than_are_kept_leave_count_and_sum_exact() -> None:
    samples = Samples(limit=500, seed=1)
    for value in range(10_000):
        samples.add(float(value))
    latency = samples.latency()
    assert latency.count == 10_000
    assert latency.sum == sum(range(10_000))
    assert latency.p50 == pytest.approx(5000, rel=0.1)
    assert latency.p99 == pytest.approx(9900, rel=0.02)


def test_nothing_seen_is_null_not_zero() -> None:
    document = Tally().report(1.0, 0).document()
    assert document["ttft_seconds"] == {"count": 0, "sum": 0.0, "p50": None, "p90": None, "p99": None}


def test_the_document_is_the_contract() -> None:
    tally = Tally()
    tally.sent = 3
    tally.completed = 2
    tally.fail("connection refused")
    tally.output_tokens = 40
    tally.ttft.add(0.5)
    document = json.loads(json.dumps(tally.report(2.0, 3).document()))
    assert list(document) == [
        "sent",
        "completed",
        "failed",
        "duration_s",
        "output_tokens",
        "ttft_seconds",
        "itl_seconds",
        "e2e_seconds",
    ]
    assert (document["sent"], document["completed"], document["failed"]) == (3, 2, 1)
    assert set(document["ttft_seconds"]) == {"count", "sum", "p50", "p90", "p99"}


def test_failures_are_told_most_frequent_first() -> None:
    tally = Tally()
    for kind in ("once", "thrice", "thrice", "thrice"):
        tally.fail(kind)
    tally.sent = 4
    report = tally.report(1.0, 4)
    assert report.failure == "thrice (3 times); once"
    assert "failed: thrice (3 times); once" in report.summary()


def test_kinds_of_failures_are_bounded_and_none_is_lost() -> None:
    tally = Tally()
    for number in range(100):
        tally.fail(f"prompt of {number} tokens is too long")
    assert len(tally.failures) == KINDS_KEPT + 1
    assert tally.failed == 100


def test_the_summary_shows_unknown_as_a_dash() -> None:
    assert "–" in Tally().report(0.0, 0).summary()

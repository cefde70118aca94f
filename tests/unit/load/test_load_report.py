"""A load's values are exact, bounded in memory, and unknown if nothing was measured."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.load.report import KINDS_KEPT, Latency, Samples, Tally, sorted_quantile
from vllm_console.metrics.quantile import exact_quantile

NOTHING = {"count": 0, "sum": 0.0, "mean": None, "unfinished": 0, "p50": None, "p90": None, "p99": None}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0, 1))
@settings(deadline=None)
def test_quantile_lies_between_its_neighbors(values: list[float], share: float) -> None:
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(ordered) - 1)]
    assert low <= sorted_quantile(ordered, share) <= high or sorted_quantile(ordered, share) == pytest.approx(low)


def test_known_quantiles() -> None:
    samples = Samples()
    for value in range(101):
        samples.add(float(value))
    assert samples.latency() == Latency(101, 5050.0, 50.0, 90.0, 99.0)


def test_dropped_samples_keep_count_and_sum_exact() -> None:
    samples = Samples(limit=500, seed=1)
    for value in range(10_000):
        samples.add(float(value))
    latency = samples.latency()
    assert latency.count == 10_000
    assert latency.sum == sum(range(10_000))
    assert latency.p50 == pytest.approx(5000, rel=0.1)
    assert latency.p99 == pytest.approx(9900, rel=0.02)


def test_all_samples_are_counted_within_or_beyond_the_bound() -> None:
    samples = Samples(limit=10, bound=0.5)
    for value in range(1_000):
        samples.add(value / 1_000)
        samples.add_unfinished(value / 1_000)
    assert (samples.within, samples.beyond) == (501, 998), "unfinished samples below the bound may be either"
    tally = Tally(limits=(0.5, 0.1))
    tally.ttft.add(0.4)
    tally.itl.add(0.4)
    assert (tally.ttft.within, tally.itl.beyond) == (1, 1)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            1,
            (
                "0 of 1 request answered",
                "1 request unfinished when the load ended: counted as failed and as longer in the latencies",
                "1 request due but not sent when the load ended",
                "1 request sent late",
                "1 request of the schedule never sent",
                "1 prompt with a different length than requested",
                "1 answer with a different length than requested",
            ),
        ),
        (
            2,
            (
                "0 of 2 requests answered",
                "2 requests unfinished when the load ended",
                "2 requests due but not sent",
                "2 prompts with a different length",
            ),
        ),
    ],
)
def test_remarks_are_singular_or_plural(number: int, words: tuple[str, ...]) -> None:
    tally = Tally()
    tally.sent = tally.cut_off = tally.held_back = tally.other_prompt = tally.other_output = number
    tally.never_sent([1.0] * number)
    summary = tally.report(10.0, 2 * number).summary()
    for part in words:
        assert part in summary


def test_missing_values_are_null_not_zero() -> None:
    document = Tally().report(1.0, 0).document()
    assert document["ttft_seconds"] == NOTHING


def test_report_document_keys() -> None:
    tally = Tally()
    tally.sent = 3
    tally.completed = 2
    tally.fail("connection refused")
    tally.output_tokens = 40
    tally.ttft.add(0.5)
    document = json.loads(json.dumps(tally.report(2.0, 3).document()))
    assert list(document) == [
        *("sent", "completed", "failed", "unfinished", "not_sent", "held_back", "failures", "shape", "duration_s"),
        *("prompt_tokens", "output_tokens", "output_tokens_per_s", "other_length"),
        *("ttft_seconds", "tpot_seconds", "itl_seconds", "e2e_seconds", "send_delay_seconds"),
    ]
    assert document["failures"] == {"connection refused": 1}
    assert document["output_tokens_per_s"] == 20.0
    assert (document["sent"], document["completed"], document["failed"]) == (3, 2, 1)
    assert document["ttft_seconds"] == {
        "count": 1, "sum": 0.5, "mean": 0.5, "unfinished": 0, "p50": 0.5, "p90": 0.5, "p99": 0.5,
    }  # fmt: skip


def test_unfinished_requests_count_as_longer_than_they_lasted() -> None:
    samples = Samples()
    for value in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7):
        samples.add(value)
    for _ in range(4):
        samples.add_unfinished(60.0)
    found = samples.latency()
    assert (found.count, found.unfinished, found.mean) == (7, 4, None)
    assert found.p50 == pytest.approx(0.6), "six of eleven took no longer, whatever the unfinished take"
    assert (found.p90, found.p99) == (None, None)
    assert found.above == {"p90": 60.0, "p99": 60.0}
    assert found.document()["p99_above"] == 60.0
    assert (found.cell("p50"), found.cell("p99")) == ("600ms", ">60s")


def test_early_unfinished_requests_make_quantiles_unknown() -> None:
    samples = Samples()
    for value in (1.0, 2.0, 3.0):
        samples.add(value)
    for _ in range(3):
        samples.add_unfinished(0.01)  # each of these may still become the longest
    found = samples.latency()
    assert (found.p50, found.p90, found.p99) == (None, None, None)
    assert found.above["p50"] == pytest.approx(0.505)


def test_unfinished_samples_are_bounded() -> None:
    samples = Samples(limit=400, seed=2)
    for value in range(5_000):
        samples.add(value / 5_000)
        samples.add_unfinished(10.0)
    found = samples.latency()
    assert (found.count, found.unfinished) == (5_000, 5_000)
    assert (found.p99, found.above["p99"]) == (None, 10.0)


@pytest.mark.parametrize(
    ("stopped", "share"), [(False, 6 / 12), (True, 1 / 7)], ids=["out of time", "stopped by a person"]
)
def test_failed_share(stopped: bool, share: float) -> None:
    tally = Tally()
    tally.sent, tally.completed = 10, 6
    for kind in ("refused", "unfinished", "unfinished", "unfinished"):
        tally.fail(kind)
    tally.cut_off = 3
    tally.never_sent([1.0, 2.0])
    report = tally.report(10.0, 12, stopped=stopped)
    assert report.failed_share == pytest.approx(share)
    assert report.unfinished == 5
    assert report.ttft.unfinished == 2


def test_failures_are_listed_most_frequent_first() -> None:
    tally = Tally()
    for kind in ("once", "thrice", "thrice", "thrice"):
        tally.fail(kind)
    tally.sent = 4
    report = tally.report(1.0, 4)
    assert report.failure == "thrice (3 times); once"
    assert "failed: thrice (3 times); once" in report.summary()


def test_failure_kinds_are_bounded_and_none_is_lost() -> None:
    tally = Tally()
    for number in range(100):
        tally.fail(f"prompt of {number} tokens is too long")
    assert len(tally.failures) == KINDS_KEPT + 1
    assert tally.failed == 100


def test_summary_shows_unknown_as_a_dash() -> None:
    summary = Tally().report(0.0, 0).summary()
    assert "–" in summary
    (gaps,) = [line for line in summary.splitlines() if line.startswith("ITL")]
    assert gaps.endswith("between events, which may have several tokens")


def test_ranked_p99_agrees_with_the_share_within_a_limit():
    samples = Samples(bound=1.0)
    for value in [0.5] * 73 + [1.5]:
        samples.add(value)
    assert (samples.within, samples.beyond) == (73, 1)  # fewer than 99%
    interpolated, ranked = samples.latency().p99, samples.latency(exact_quantile).p99
    assert interpolated is not None
    assert ranked is not None
    assert interpolated < 1.0 < ranked
    for _ in range(26):
        samples.add(0.5)
    assert samples.latency(exact_quantile).p99 == 0.5  # 99 of 100

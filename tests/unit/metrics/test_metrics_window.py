"""Rates, shares and quantiles between two samples: restarts, several engines, different bounds."""

from __future__ import annotations

import math

import pytest

from vllm_console.metrics.quantile import Quantile, interpolated
from vllm_console.metrics.sample import Histogram, Sample
from vllm_console.metrics.window import combine, merge_histograms, window

INF = math.inf


@pytest.mark.parametrize(
    ("q", "counts", "expected"),
    [
        (0.5, (0, 0, 10, 10), 0.75),  # linear within (0.5, 1]
        (0.5, (10, 10, 10, 10), 0.05),  # the first bucket begins at 0
        (0.9, (0, 10, 10, 10), 0.46),
        (0.99, (0, 0, 0, 10), 1.0),  # the +Inf bucket: above the last finite bound
        (0.5, (5, 5, 5, 10), 0.1),  # exactly at a bucket's end
        (0.5, (0, 0, 0, 0), None),
    ],
)
def test_interpolation_matches_histogram_quantile(q, counts, expected):
    found = interpolated(q, (0.1, 0.5, 1.0, INF), tuple(map(float, counts)), 1000.0)
    assert found.guess == pytest.approx(expected) if expected is not None else found is None
    assert found is None or (found.high is None) == (expected == 1.0)


@pytest.mark.parametrize(
    ("lengths", "most"),
    [
        ([1200], 1200),  # one request: the sum is its length, so 1,950 in the middle of the bucket is impossible
        ([1001, 1001, 1001, 1300], 4303 - 3 * 1000),
        ([1200] * 100, 1950),  # with many values, the longest may still be that long, so the sum restricts little
        ([5, 5, 5, 5, 5, 5, 5, 5, 5, 1200], 1245 - 9 * 2),
    ],
)
def test_length_quantile_respects_the_upper_limit_of_the_sum(lengths, most):
    bounds = (1.0, 2.0, 5.0, 10.0, 1000.0, 2000.0, INF)
    counts = tuple(float(sum(length <= bound for length in lengths)) for bound in bounds)
    found = interpolated(0.95, bounds, counts, float(sum(lengths)))
    assert sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1] <= found.guess <= most
    assert (found.low, found.high) == (1000.0, 2000.0)


@pytest.mark.parametrize(
    ("lengths", "least"),
    [
        ([1000] * 50, 1000),  # all as long as their bucket allows, so 975 is impossible
        ([990] * 20, 795),
        ([600] * 50, 500),  # the sum restricts nothing: linear interpolation
        ([1000] * 50 + [5000], 500),  # one beyond the last bound may be of any length
    ],
)
def test_length_quantile_respects_the_lower_limit_of_the_sum(lengths, least):
    bounds = (500.0, 1000.0, 2000.0, INF)
    counts = tuple(float(sum(length <= bound for length in lengths)) for bound in bounds)
    found = interpolated(0.95, bounds, counts, float(sum(lengths)))
    assert least <= found.guess <= 1000
    assert found.guess == 1000 or least < 1000


def test_rates_between_two_samples(engine, sample):
    before = sample(100.0, engine(generation=1000.0, finished=10.0, preemptions=2.0, ttft=(0, 5, 10, 10), ttft_sum=4.0))
    after = sample(
        130.0,
        engine(running=4.0, generation=4000.0, finished=40.0, preemptions=5.0, ttft=(0, 5, 30, 30), ttft_sum=19.0),
    )
    found = window(before, after)
    assert (found.start, found.end) == (100.0, 130.0)
    assert found.generation_tokens_per_second == 100.0
    assert found.requests_per_second == 1.0
    assert found.preemptions_per_minute == 6.0
    assert found.preemption_share == pytest.approx(0.1)
    assert found.prefix_hit_rate == 0.25
    assert found.requests_running == 4.0
    assert found.kv_cache_tokens == 1600
    ttft = found.latencies["ttft"]
    assert (ttft.count, ttft.mean) == (20.0, 0.75)
    assert ttft.p50 == Quantile(0.75, 0.5, 1.0)
    assert "itl" not in found.latencies


def test_one_sample_shows_that_what_was_never_counted_has_a_rate_of_zero(engine, sample):
    only = sample(100.0, engine(generation=1000.0, finished=10.0, preemptions=0.0))
    found = window(only, only)
    assert (found.preemptions_per_minute, found.generation_tokens_per_second) == (0.0, None)
    only = sample(100.0, engine(generation=0.0, finished=0.0, preemptions=2.0))
    found = window(only, only)
    assert (found.preemptions_per_minute, found.generation_tokens_per_second) == (None, 0.0)
    assert (found.requests_per_second, found.preemption_share) == (0.0, None)


def test_restart_counts_from_zero(engine, sample):
    before = sample(0.0, engine(generation=9000.0, preemptions=50.0, finished=500.0, ttft=(90, 95, 99, 100)))
    # More preemptions than before, but the engine is new, as its tokens show.
    after = sample(10.0, engine(generation=300.0, preemptions=60.0, finished=20.0, ttft=(0, 4, 4, 4), ttft_sum=1.0))
    found = window(before, after)
    assert found.generation_tokens_per_second == 30.0
    assert found.preemptions_per_minute == 360.0
    assert found.latencies["ttft"].count == 4.0


def test_only_the_restarted_engine_counts_from_zero(engine, sample):
    before = sample(0.0, engine(generation=1000.0), engine(generation=5000.0))
    after = sample(10.0, engine(generation=1100.0), engine(generation=200.0))
    assert window(before, after).generation_tokens_per_second == pytest.approx((100 + 200) / 10)


def test_engines_appear_and_disappear(engine, sample):
    one, two = engine(generation=1000.0), engine(generation=50.0)
    assert window(sample(0.0, one), sample(10.0, one, two)).generation_tokens_per_second == 5.0
    assert window(sample(0.0, two, one), sample(10.0, engine(generation=70.0))).generation_tokens_per_second == 2.0


def test_gauges_over_engines(engine, sample):
    now = sample(1.0, engine(running=3.0, waiting=None, usage=0.2), engine(running=5.0, waiting=None, usage=0.9))
    found = window(now, now)
    assert found.requests_running == 8.0
    assert found.requests_waiting is None
    assert found.kv_cache_usage == pytest.approx(0.55)
    assert found.kv_cache_usage_max == 0.9


def test_without_elapsed_time_there_are_gauges_but_no_rates(engine, sample):
    now = sample(1.0, engine(running=3.0, generation=50.0, preemptions=2.0))
    found = window(now, now)
    assert found.requests_running == 3.0
    assert found.generation_tokens_per_second is None
    assert found.preemptions_per_minute is None
    assert found.preemption_share is None


def test_without_finished_requests_preemptions_are_per_running_request(engine, sample):
    found = window(sample(0.0, engine(preemptions=1.0)), sample(9.0, engine(preemptions=4.0, running=6.0)))
    assert found.preemption_share == 0.5


def test_without_served_requests_there_is_no_share(engine, sample):
    found = window(sample(0.0, engine(preemptions=1.0)), sample(9.0, engine(preemptions=4.0, running=0.0)))
    assert found.preemption_share is None
    assert found.prefix_hit_rate is None


def test_no_engines_at_all():
    found = window(Sample(0.0, {}), Sample(1.0, {}))
    assert found.requests_running is None
    assert found.kv_cache_usage_max is None
    assert found.latencies == {}


def test_histograms_with_different_bounds_are_merged_at_common_ones():
    one = Histogram((0.1, 0.5, 1.0, INF), (1.0, 2.0, 3.0, 4.0), 2.0)
    other = Histogram((0.5, 0.7, 1.0, INF), (10.0, 20.0, 30.0, 40.0), 20.0)
    assert merge_histograms([one, other]) == Histogram((0.5, 1.0, INF), (12.0, 33.0, 44.0), 22.0)
    assert merge_histograms([]) is None


def test_changed_bounds_start_a_new_histogram(engine, sample):
    before = sample(0.0, engine(ttft=(1, 1, 1, 1)))
    after = sample(1.0, engine(ttft=(2, 3), bounds=(2.0, INF)))
    assert window(before, after).latencies["ttft"].count == 3.0


def test_engines_are_combined(engine):
    total = combine([engine(generation=10.0, ttft=(0, 4, 4, 4)), engine(generation=5.0, ttft=(0, 4, 4, 4))])
    assert total.generation_tokens_total == 15.0
    assert total.histograms["ttft"].count == 8.0
    assert "itl" not in total.histograms
    assert combine([]).generation_tokens_total is None

"""What a histogram says about a quantile: its bucket, and a value only if that bucket has two bounds."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from vllm_console.metrics.quantile import (
    Quantile,
    Quantiles,
    agreeing,
    contradicting,
    exact_quantile,
    middle,
    quantile,
    text_of,
)

INF = math.inf
BOUNDS = (0.3, 0.5, 0.8, 2.0, INF)


def of(*counts: float, q: float = 0.5, bounds: tuple[float, ...] = BOUNDS) -> Quantile | None:
    """A quantile with these counts per bucket."""
    return quantile(q, bounds, tuple(itertools.accumulate(counts)))


def test_first_bucket_gives_only_an_upper_bound() -> None:
    for q in (0.5, 0.9, 0.99):
        found = of(10, 0, 0, 0, 0, q=q)
        assert found is not None
        assert (found.value, found.below, found.above) == (None, 0.3, None)
        assert found.text == "<300ms"
        assert found.nearest == 0.3


def test_open_bucket_gives_only_a_lower_bound() -> None:
    found = of(0, 0, 0, 0, 10)
    assert found is not None
    assert (found.value, found.below, found.above) == (None, None, 2.0)
    assert (found.text, found.nearest) == (">2.0s", 2.0)


def test_quantile_is_interpolated_and_wide_buckets_are_marked() -> None:
    narrow, wide = of(0, 0, 10, 0, 0), of(0, 0, 0, 10, 0)
    assert narrow is not None
    assert wide is not None
    assert (narrow.value, narrow.wide) == (pytest.approx(0.65), True)
    assert (wide.value, wide.above, wide.below) == (pytest.approx(1.4), 0.8, 2.0)
    assert wide.text == "~1.4s"
    assert Quantile(0.09, 0.08, 0.1).text == "90ms"


def test_no_quantile_without_observations_or_finite_bounds() -> None:
    assert of(0, 0, 0, 0, 0) is None
    assert quantile(0.5, (INF,), (4.0,)) is None
    assert quantile(0.5, (), ()) is None
    assert text_of(None) == "–"


@pytest.mark.parametrize(
    ("found", "limit", "within"),
    [
        (Quantile(0.297, 0.0, 0.3), 0.5, True),  # below 0.3 s meets 0.5 s
        (Quantile(0.297, 0.0, 0.3), 0.3, True),
        (Quantile(0.297, 0.0, 0.3), 0.1, None),
        (Quantile(2.0, 2.0, None), 1.0, False),  # above 2 s misses 1 s
        (Quantile(2.0, 2.0, None), 2.0, False),
        (Quantile(2.0, 2.0, None), 5.0, None),
        (Quantile(0.18, 0.1, 0.25), 0.2, True),
        (Quantile(0.22, 0.1, 0.25), 0.2, False),
    ],
)
def test_limit_is_judged_by_the_bucket_or_not_at_all(found: Quantile, limit: float, within: bool | None) -> None:
    assert found.within(limit) is within


def test_true_quantile_is_within_the_reported_range() -> None:
    chance = random.Random(7)
    for _ in range(300):
        values = sorted(chance.lognormvariate(-1.0, 1.5) for _ in range(chance.randint(1, 80)))
        counts = tuple(float(sum(value <= bound for value in values)) for bound in BOUNDS)
        for q in (0.5, 0.9, 0.99):
            found = quantile(q, BOUNDS, counts)
            assert found is not None
            true = values[math.ceil(q * len(values)) - 1]
            assert found.low < true <= (found.high if found.high is not None else INF)
            assert found.value is None or found.low <= found.value <= (found.high or INF)


def test_part_is_not_longer_than_the_whole_if_buckets_allow() -> None:
    queue, ttft, e2e = (Quantile(0.49, 0.3, 0.5), Quantile(0.26, 0.25, 0.5), Quantile(0.31, 0.3, 0.5))
    found = agreeing({"queue": Quantiles(9, 0.4, p50=queue), "ttft": Quantiles(9, 0.4, p50=ttft),
                      "e2e": Quantiles(9, 0.45, p50=e2e)})  # fmt: skip
    shown = [found[key].p50.value for key in ("queue", "ttft", "e2e")]
    assert shown == sorted(shown)
    assert all(one.low <= one.value <= one.high for one in (found[key].p50 for key in found))
    assert not contradicting(found)


def test_values_of_different_requests_are_kept_and_reported() -> None:
    """After a queue was worked off, finished requests had waited long, but new ones do not."""
    given = {
        "queue": Quantiles(9, 4.0, p50=Quantile(4.0, 2.5, 5.0)),
        "ttft": Quantiles(9, 0.1, p50=Quantile(0.1, 0.08, 0.25)),
    }
    assert agreeing(given) == given
    assert contradicting(given)
    assert not contradicting({"queue": Quantiles(9, 0.00005, p50=Quantile(0.15, 0.0, 0.3)),
                              "ttft": Quantiles(9, 0.036, p50=Quantile(0.03, 0.02, 0.04))})  # fmt: skip


def test_adjusted_quantiles_stay_in_order() -> None:
    """The p99 can be adjusted to the whole's, but the p90 can't: it must not end up above the p99."""
    queue = Quantiles(9, 34.0, None, Quantile(92.0, 80.0, 160.0), Quantile(150.0, 80.0, 160.0))
    ttft = Quantiles(9, 50.0, None, Quantile(55.0, 40.0, 60.0), Quantile(70.0, 60.0, 80.0))
    for latency in agreeing({"queue": queue, "ttft": ttft}).values():
        assert latency.p90 is not None
        assert latency.p99 is not None
        assert latency.p90.guess <= latency.p99.guess


def test_median_of_windows_is_a_bound_if_most_of_them_are() -> None:
    low, high = Quantile(0.15, 0.0, 0.3), Quantile(0.4, 0.3, 0.5)
    assert middle([low, low, high]) is low
    assert middle([low, high, high]) is high
    assert middle([low, high]) is low, "between a bound and a value nothing is known"
    exact = Quantile(0.2, 0.2, 0.2)
    assert middle([low, exact]) is low, "also if the value sorts below the bound"
    between = middle([high, Quantile(0.44, 0.3, 0.5)])
    assert between is not None
    assert between.value == pytest.approx(0.42)
    assert middle([]) is None


def test_exact_quantile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [exact_quantile(values, q) for q in (0.0, 0.5, 0.9, 0.99, 1.0)] == [1.0, 50.0, 90.0, 99.0, 100.0]
    assert exact_quantile([0.25], 0.99) == 0.25
    with pytest.raises(ValueError, match="no values"):
        exact_quantile([], 0.5)

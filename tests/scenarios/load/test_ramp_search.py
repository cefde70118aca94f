"""Which rate is tried next and when a step ends, on simulated responses."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from vllm_console.load.ramp_search import NEAR, StepFigures, StepOutcome, bracket, ceiling, judge_step, next_step
from vllm_launchers.presets.model import Objectives

OBJECTIVES = Objectives(ttft_p99_seconds=1.0, itl_p99_seconds=0.1, kv_cache_usage=0.85, preemption_rate=0.02)
CALM = StepFigures(
    rate=8.0, seconds=30.0, ttft=(240, 0), itl=(20_000, 0), in_flight=(20.0,) * 60, kv_cache_usage=(0.5,) * 30,
    preemptions=0.0, finished=240.0, running=20.0,
)  # fmt: skip


def searched(miss, start, *, steps=40, seed=0, requests=1500):
    """The ceiling found if a request at a rate is late with probability ``miss(rate)``."""
    chance, tried = random.Random(seed), []
    while len(tried) < steps and (wanted := next_step(tried, start, start / 32, 10_000)) is not None:
        outcome, late, count, probability = None, 0, 0, miss(wanted.rate)
        while outcome is None:
            count += 10
            late += sum(chance.random() < probability for _ in range(10))
            figures = replace(CALM, rate=wanted.rate, ttft=(count - late, late))
            outcome = judge_step(figures, OBJECTIVES, final=count >= requests, early=not wanted.full)
        tried.append(outcome)
    return ceiling(tried), tried


def curve(at, steepness):
    """A share of misses that is 1% at rate ``at`` and grows with that power of the rate."""
    return lambda rate: 1 / (1 + 99 * (at / rate) ** steepness)


@pytest.mark.parametrize("steepness", [8, 15, 40])
@pytest.mark.parametrize("at", [0.7, 9.3, 210.0])
def test_within_5_percent_of_an_exhaustive_search(at, steepness):
    miss = curve(at, steepness)
    grid = [at * 0.5 * 1.005**step for step in range(280)]
    exhaustive = max(rate for rate in grid if miss(rate) <= 0.01)
    errors = [abs(searched(miss, at / 6, seed=seed)[0].rate / exhaustive - 1) for seed in range(10)]
    assert sorted(errors)[8] < 0.05, errors


def test_first_rate_may_be_too_high():
    found, tried = searched(curve(1.0, 20), 10.0)
    assert found.rate == pytest.approx(1.0, rel=0.05)
    assert [one.rate for one in tried[:3]] == [10.0, 5.0, 2.5]


def test_clear_steps_end_early():
    _, tried = searched(curve(9.3, 40), 1.0)
    assert [sum(one.ttft) for one in tried if one.rate < 5] == pytest.approx([60] * 3, abs=20)
    assert sum(next(one for one in tried if not one.ok).ttft) <= 20


def test_all_rates_fail_or_all_succeed():
    found, tried = searched(lambda _: 0.5, 8.0)
    assert found is None
    assert not any(one.ok for one in tried)
    assert min(one.rate for one in tried) == 8.0 / 32
    found, tried = searched(lambda _: 0.0, 1000.0)
    assert found is None
    assert max(one.rate for one in tried) == 10_000


def test_disturbed_failure_does_not_lower_the_ceiling():
    tried = [
        StepOutcome(4.0, True),
        StepOutcome(8.0, False),
        StepOutcome(5.7, True),
        StepOutcome(9.0, True),
        StepOutcome(9.5, True),
        StepOutcome(16.0, False),
    ]
    assert (bracket(tried).low, bracket(tried).high) == (9.5, 16.0)


def test_full_cache_is_bisected_to_the_end():
    tried = []
    while (wanted := next_step(tried, 1.0, 0.1, 1000.0)) is not None:
        figures = replace(CALM, rate=wanted.rate, kv_cache_usage=(wanted.rate / 10,) * 30)
        outcome = judge_step(figures, OBJECTIVES, final=True)
        tried.append(outcome)
    assert ceiling(tried).limited_by == "kv_cache_usage"
    assert 8.5 / 1.04 <= ceiling(tried).rate <= 8.5
    assert len(tried) < 12


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"ttft": (230, 10)}, "ttft_p99_seconds"),
        ({"ttft": (230, 10), "failed": 9}, "failures"),
        ({"ttft": (230, 10), "sent": (237, 3)}, "client"),
        ({"ttft": (230, 10), "sent": (238, 2)}, "ttft_p99_seconds"),
        ({"itl": (19_000, 1000)}, "itl_p99_seconds"),
        ({"kv_cache_usage": (0.2, 0.9, 0.9)}, "kv_cache_usage"),
        ({"kv_cache_usage": (0.2, 0.2, 0.99)}, ""),
        ({"preemptions": 6.0}, "preemption_rate"),
        ({"in_flight": tuple(float(20 + 2 * at) for at in range(60))}, "queue"),
        ({"in_flight": (), "kv_cache_usage": (), "preemptions": None, "finished": None, "running": None}, ""),
    ],
)
def test_missed_limit_of_a_finished_step(changed, reason):
    outcome = judge_step(replace(CALM, **changed), OBJECTIVES, final=True)
    assert (outcome.ok, outcome.limited_by) == (not reason, reason)


def test_step_continues_while_its_queue_grows_or_it_is_short():
    assert judge_step(CALM, OBJECTIVES) is not None
    assert judge_step(replace(CALM, seconds=3.0), OBJECTIVES) is None
    assert judge_step(replace(CALM, ttft=(20, 0)), OBJECTIVES) is None
    assert judge_step(replace(CALM, in_flight=tuple(float(20 + 2 * at) for at in range(60))), OBJECTIVES) is None
    assert judge_step(CALM, OBJECTIVES, early=False) is None


def test_random_increase_in_flight_is_not_a_queue():
    chance = replace(CALM, in_flight=(*(16.0,) * 20, *(20.0,) * 20, *(26.0,) * 20))
    assert judge_step(chance, OBJECTIVES, final=True).ok
    queue = replace(CALM, in_flight=(*(16.0,) * 20, *(24.0,) * 20, *(36.0,) * 20))
    assert judge_step(queue, OBJECTIVES, final=True).limited_by == "queue"


def test_few_slow_gaps_at_the_start_do_not_end_a_step():
    assert judge_step(replace(CALM, seconds=1.0, ttft=(4, 0), itl=(300, 60)), OBJECTIVES) is None


def test_empty_step_fails():
    outcome = judge_step(StepFigures(1.0, 10.0), OBJECTIVES, final=True)
    assert not outcome.ok
    assert outcome.attained is None


def test_grown_queue_limits_the_ceiling_without_lowering_it():
    """Beyond its capacity, a server misses nearly every limit, even if the rate is only slightly too high."""
    held = [StepOutcome(rate, True, ttft=(300, 0), itl=(9000, 0)) for rate in (4.0, 6.0, 8.0)]
    failed = [StepOutcome(rate, False, "ttft_p99_seconds", ttft=(100, 200), itl=(9000, 10)) for rate in (9.6, 8.6)]
    found = ceiling(held + failed)
    assert 7.8 <= found.rate <= 8.6
    assert found.low < 8.0 < found.high < 8.6
    assert next_step(held + failed, 4.0, 0.1, 1000.0).rate == pytest.approx(found.rate)


def test_one_queue_in_a_short_step_does_not_fix_the_bracket():
    """Many requests arrived at once in its eleven seconds; minutes at about that rate show that it was random."""
    early = [
        StepOutcome(10.3, True, ttft=(86, 0), itl=(406, 2)),
        StepOutcome(14.6, False, "itl_p99_seconds", ttft=(115, 0), itl=(287, 4)),
        StepOutcome(12.3, False, "ttft_p99_seconds", ttft=(83, 13), itl=(249, 3)),
    ]
    assert ceiling(early).high > 12.3
    long = [StepOutcome(rate, True, ttft=(round(120 * rate), 0), itl=(5900, 47)) for rate in (11.3, 11.8, 12.3, 12.5)]
    later = [*early, *long]
    assert next_step(later, 2.6, 0.1, 1000.0).rate > 12.2
    assert ceiling(later).rate > 12.2
    assert ceiling(later).low < 12.9 < ceiling(later).high


def test_ceiling_may_be_far_above_a_random_failure():
    """Nearly all of ten minutes at up to 6.4 requests/s held; only the shortest step, at 5.2, failed."""
    tried = [
        StepOutcome(4.3, True, ttft=(55, 0), itl=(848, 4)),
        StepOutcome(5.2, False, "itl_p99_seconds", ttft=(52, 0), itl=(534, 6)),
        *(
            StepOutcome(rate, True, ttft=(round(120 * rate), 0), itl=(8000, slow))
            for rate, slow in ((5.9, 62), (6.1, 61), (6.4, 70))
        ),
    ]
    found = ceiling(tried)
    assert found.high > 6.83
    assert found.rate == pytest.approx(6.8, rel=0.05)
    assert found.error > 0.015, "another step is needed"


def test_ceiling_among_burst_failures_is_limited():
    steps = [(4.8, True), (5.1, False), (5.16, False), (5.04, True), (5.14, True), (5.27, True), (5.37, True)]
    tried = [
        StepOutcome(rate, ok, "" if ok else "itl_p99_seconds", ttft=(300, 0), itl=(9900, 95 if ok else 105))
        for rate, ok in steps
    ]
    assert bracket(tried).high is not None
    assert ceiling(tried).rate == pytest.approx(5.2, rel=0.1)
    far = [StepOutcome(1.0, False, "itl_p99_seconds"), *(StepOutcome(rate, True) for rate in (2.0, 4.0, 8.0))]
    assert bracket(far).high is None, "that was a disturbance"


def test_random_failure_far_below_does_not_reopen_the_bracket():
    """Rates of 1.1 to 1.32 requests/s both held and failed: the ceiling is there, not at the highest rate that held
    below."""
    tried = [
        StepOutcome(0.86, True, ttft=(53, 0), itl=(3356, 26)),
        StepOutcome(1.72, False, "itl_p99_seconds", ttft=(52, 0), itl=(1501, 22)),
        StepOutcome(1.22, True, ttft=(52, 0), itl=(2487, 17)),
        StepOutcome(1.45, False, "itl_p99_seconds", ttft=(52, 0), itl=(1373, 23)),
        StepOutcome(1.32, True, ttft=(59, 0), itl=(2427, 24)),
        StepOutcome(1.32, False, "itl_p99_seconds", ttft=(155, 0), itl=(5708, 86)),
        StepOutcome(1.12, False, "itl_p99_seconds", ttft=(114, 0), itl=(5490, 61)),
        StepOutcome(1.10, False, "itl_p99_seconds", ttft=(120, 0), itl=(6014, 66)),
    ]
    assert bracket(tried).ratio > NEAR
    found = ceiling(tried)
    assert found.rate == pytest.approx(1.1, rel=0.06)
    assert 0.95 < found.low < 1.07 < found.high < 1.25
    assert next_step(tried, 1.0, 0.1, 100.0).full


def test_unmeasured_latency_is_not_the_limit():
    """Responses of one token have no gaps between tokens."""
    held = [StepOutcome(rate, True, ttft=(300, 0)) for rate in (4.0, 6.0, 8.0)]
    tried = [*held, StepOutcome(8.6, False, "ttft_p99_seconds", ttft=(294, 6))]
    assert ceiling(tried).limited_by == "ttft_p99_seconds"
    nothing = [StepOutcome(8.0, True), StepOutcome(8.6, False, "ttft_p99_seconds", ttft=(100, 200))]
    found = ceiling(nothing)
    assert (found.rate, found.limited_by, found.error) == (8.0, "ttft_p99_seconds", None)

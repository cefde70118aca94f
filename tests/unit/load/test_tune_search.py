"""The tuner's search: which candidates, in which order and for how long, and when the best one is better."""

from __future__ import annotations

import math
import random

import pytest

from vllm_console.load.ramp_search import StepOutcome
from vllm_console.load.tune_search import (
    GOODPUT,
    OBJECTIVES,
    OVERRUN,
    RANK_SECONDS,
    SHORTEST_SECONDS,
    THROUGHPUT,
    TTFT,
    Candidate,
    Measured,
    MeasuredP99,
    NextTrial,
    Rejected,
    Trial,
    baseline_cost,
    baseline_seconds,
    combinations,
    decide,
    least_budget,
    measured_ceiling,
    measured_mean,
    measured_of,
    next_trial,
    pooled,
    ranked,
    rounds,
    trial_start,
)

ORIGINAL = Measured(2.0, 0.02)
ALIKE = [1.0] * 9
"""Predictions without information."""


def test_combinations_cover_current_values_with_tokens_for_all_sequences():
    found = combinations(64, 2048, 0.9)
    assert {} not in found
    assert {"max-num-seqs": 8} in found
    assert {"max-num-seqs": 512, "max-num-batched-tokens": 16384, "gpu-memory-utilization": 0.95} in found
    assert all(one.get("max-num-seqs", 64) <= one.get("max-num-batched-tokens", 2048) for one in found)
    assert {one.get("max-num-seqs") for one in found} == {None, 4, 8, 16, 32, 128, 256, 512}
    assert {one["gpu-memory-utilization"] for one in found if "gpu-memory-utilization" in one} == {0.92, 0.95}
    assert not any("gpu-memory-utilization" in one for one in combinations(64, 2048, None))
    assert len({tuple(one.items()) for one in found}) == len(found)
    assert min(int(one.get("max-num-batched-tokens", 2048)) for one in combinations(64, 2048, 0.9, 1056)) == 2048
    drafting = combinations(64, 2048, 0.9, each=6)
    assert all(6 * int(one.get("max-num-seqs", 64)) <= int(one.get("max-num-batched-tokens", 2048)) for one in drafting)


@pytest.mark.parametrize(("seqs", "batched", "each"), [(1024, 8192, 8), (1024, 8192, 9), (256, 2048, 16)])
def test_more_memory_alone_is_tried_even_if_present_steps_hold_no_drafts_of_all_sequences(
    seqs: int, batched: int, each: int
) -> None:
    found = combinations(seqs, batched, 0.9, each=each)
    assert [one for one in found if set(one) == {"gpu-memory-utilization"}]
    for one in found:
        sizes = one.get("max-num-seqs", seqs), one.get("max-num-batched-tokens", batched)
        assert sizes == (seqs, batched) or int(sizes[1]) >= int(sizes[0]) * each


def test_only_predicted_improvements_are_tried_smallest_change_first():
    known, guess = {"max-num-seqs": 128}, {"max-num-seqs": 32}
    found = ranked(
        [
            Candidate({"max-num-seqs": 256, "max-num-batched-tokens": 4096}, 3.001),
            Candidate({"max-num-seqs": 256}, 3.0),
            Candidate(known, 3.0),
            Candidate(guess, 2.5, "a guess"),
            Candidate({"max-num-seqs": 16}, 2.01),
            Candidate({"max-num-seqs": 4}, 1.0),
        ],
        2.0,
        GOODPUT,
    )
    assert [one.set for one in found] == [known, guess]
    slower, faster = Candidate(known, 0.5), Candidate(guess, 0.1)
    assert ranked([slower, faster], 0.4, TTFT) == [faster], "less is better"


def test_full_cache_candidate_ranks_last_among_equals():
    filled, roomy = Candidate({"max-num-seqs": 64}, 3.0, full=True), Candidate({"max-num-seqs": 128}, 3.001)
    assert ranked([filled, roomy], 2.0, GOODPUT) == [roomy]


@pytest.mark.parametrize("trials", range(1, 30))
def test_rounds_use_all_trials_and_shrink(trials):
    sizes = rounds(trials)
    assert sum(sizes) == trials
    assert sizes == sorted(sizes, reverse=True)


def play(values, *, trials=4, seconds=1000.0, restart=20.0, objective=GOODPUT, count=None):
    """All trials of candidates with these measured values, until the search ends."""
    done, left, steps = [], seconds, []
    while True:
        step = next_trial(
            [1.0] * (count or len(values)),
            done,
            ORIGINAL,
            objective,
            trials=trials,
            seconds_left=left,
            restart_seconds=restart,
        )
        if step is None:
            return steps, done, left
        left -= step.seconds + restart * step.restart
        steps.append(step)
        value = values[step.place]
        done.append(Trial(step.place, None if value is None else Measured(value, 0.01)))


def test_best_few_are_measured_and_the_best_again_for_longer():
    steps, _, left = play([2.4, 3.0, 2.6, 9.0])
    assert [one.place for one in steps] == [0, 1, 2, 1]
    assert steps[-1].seconds > 2 * steps[0].seconds
    assert left >= 20.0, "the restart that ends on the chosen flags fits"


def test_running_candidate_is_measured_again_without_a_restart():
    steps, _, _ = play([2.4, 2.6, 3.0])
    assert (steps[-1].place, steps[-1].restart) == (2, False)
    alone, _, _ = play([2.4])
    assert alone == [NextTrial(0, pytest.approx(960.0), restart=True)]


def test_no_second_round_without_an_improvement_and_failures_count():
    assert len(play([1.9, 1.5, 1.2])[0]) == 3
    steps, done, _ = play([None, 3.0, None])
    assert [one.place for one in steps] == [0, 1, 2, 1]
    assert steps[-1].restart, "the trial that failed was rolled back"
    assert decide(ORIGINAL, done, GOODPUT, ALIKE).place == 1


def test_every_trial_leaves_time_for_its_restart():
    dice = random.Random(1)
    for _ in range(300):
        seconds, restart = dice.uniform(0, 600), dice.uniform(1, 120)
        steps, _, left = play(
            [dice.uniform(1.5, 4) for _ in range(6)], trials=dice.randint(1, 9), seconds=seconds, restart=restart
        )
        assert not steps or left >= restart - 1e-6
        assert all(one.seconds >= SHORTEST_SECONDS[GOODPUT] for one in steps)


def test_trials_that_fit_share_the_time():
    steps, _, left = play([3.0, 2.5], trials=2, seconds=317.0, restart=94.0)
    assert len(steps) == 1, "a second one would end after 317 s, without the restart after it"
    assert steps[0].seconds == pytest.approx((317 - 2 * 94) / OVERRUN)
    assert left >= 94.0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_sufficient_budget_always_has_time_for_a_trial(objective):
    dice = random.Random(3)
    for _ in range(300):
        restart, trials = dice.uniform(1, 300), dice.randint(1, 50)
        budget = least_budget(objective, restart) * dice.choice((1.0, 1.01, dice.uniform(1, 3), dice.uniform(1, 30)))
        seconds = baseline_seconds(objective, budget, trials, restart)
        assert seconds >= SHORTEST_SECONDS[objective]
        left = budget - baseline_cost(objective, seconds) - RANK_SECONDS
        assert next_trial(ALIKE, [], ORIGINAL, objective, trials=trials, seconds_left=left, restart_seconds=restart)


def test_original_flags_are_measured_half_as_long_again():
    assert baseline_seconds(GOODPUT, 2400.0, 4, 60.0) == pytest.approx(1.5 * (2400 - 5 * 60 - RANK_SECONDS) / 6)


def test_improvement_above_the_noise_is_significant():
    def decision(value, error=0.04, trials=1):
        others = [Trial(place, Measured(1.0, error)) for place in range(1, trials)]
        return decide(Measured(2.0, error), [Trial(0, Measured(value, error)), *others], GOODPUT, ALIKE)

    clear, slight = decision(3.0), decision(2.1)
    assert clear.significant
    assert clear.improvement.value == pytest.approx(0.5)
    assert 0 < clear.improvement.low < 0.5 < clear.improvement.high
    assert slight.place == 0
    assert not slight.significant
    assert decision(1.9).place is None
    assert decision(3.0, trials=5).improvement.low < clear.improvement.low, "the best of several is also the luckiest"


def test_same_flags_are_rarely_called_better():
    dice, wrong = random.Random(2), 0
    for _ in range(1000):
        original = Measured(2.0 * math.exp(dice.gauss(0, 0.04)), 0.04)
        done = [Trial(place, Measured(2.0 * math.exp(dice.gauss(0, 0.04)), 0.04)) for place in (0, 1, 2, 0)]
        wrong += decide(original, done, GOODPUT, ALIKE).significant
    assert wrong <= 50


def test_prediction_decides_between_nearly_equal_measurements():
    done = [Trial(0, Measured(3.0, 0.1)), Trial(1, Measured(3.1, 0.1)), Trial(2, Measured(9.0, 0.1))]
    assert decide(ORIGINAL, done[:2], GOODPUT, [1.6, 1.2]).place == 0
    assert decide(ORIGINAL, done[:2], GOODPUT, [1.5, 1.5]).place == 1
    assert decide(ORIGINAL, done, GOODPUT, [1.6, 1.2, 1.1]).place == 2, "a far better value needs no prediction"
    assert decide(ORIGINAL, [Trial(0, Measured(1.9, 0.1))], GOODPUT, [2.0]).place is None


def test_shorter_ttft_is_better_by_its_share():
    found = decide(Measured(0.4, 0.01), [Trial(0, Measured(0.1, 0.01)), Trial(1, Measured(0.9, 0.01))], TTFT, ALIKE)
    assert (found.place, found.significant) == (0, True)
    assert found.improvement.value == pytest.approx(0.75)


def with_itl(value, itl):
    return Measured(value, 0.02, p99s=(MeasuredP99("TTFT p99", 0.5, 1.0), MeasuredP99("ITL p99", itl, 0.1)))


def test_candidate_that_newly_misses_an_objective_is_rejected():
    """Throughput at the expense of an ITL beyond its objective was once kept."""
    original, fast, slower = with_itl(2.0, 0.08), with_itl(4.0, 0.16), with_itl(3.0, 0.09)
    alone = decide(original, [Trial(0, fast)], THROUGHPUT, ALIKE)
    assert (alone.place, alone.significant) == (None, False)
    assert alone.rejected == Rejected(0, pytest.approx(1.0), (MeasuredP99("ITL p99", 0.16, 0.1),))
    both = decide(original, [Trial(0, fast), Trial(1, slower)], THROUGHPUT, ALIKE)
    assert (both.place, both.significant, both.rejected) == (1, True, alone.rejected)
    alike = decide(original, [Trial(0, Measured(2.0, 0.02)), Trial(1, slower)], THROUGHPUT, ALIKE)
    assert both.improvement == alike.improvement, "it counts as tried"
    worse = decide(original, [Trial(0, with_itl(2.5, 0.16)), Trial(1, slower)], THROUGHPUT, ALIKE)
    assert (worse.place, worse.rejected) == (1, None), "it was not the best anyway"


def test_objective_that_was_missed_or_unknown_before_is_no_reason_to_reject():
    for original in (with_itl(2.0, 0.12), Measured(2.0, 0.02)):
        found = decide(original, [Trial(0, with_itl(4.0, 0.16))], THROUGHPUT, ALIKE)
        assert (found.place, found.significant, found.rejected) == (0, True, None)


def test_candidate_that_newly_misses_an_objective_is_not_tried_again():
    original, done = with_itl(2.0, 0.08), [Trial(0, with_itl(4.0, 0.16)), Trial(1, with_itl(3.0, 0.09))]
    timing = {"trials": 3, "seconds_left": 900.0, "restart_seconds": 60.0}
    assert next_trial(ALIKE[:2], done, original, THROUGHPUT, **timing).place == 1
    assert next_trial(ALIKE[:1], done[:1], original, THROUGHPUT, **timing) is None


def test_objectives_of_the_last_measurement_count():
    first, longer = with_itl(4.0, 0.16), with_itl(4.0, 0.09)
    assert pooled([first, longer]).p99s == longer.p99s
    assert decide(with_itl(2.0, 0.08), [Trial(0, first), Trial(0, longer)], THROUGHPUT, ALIKE).significant


def test_bounds_are_not_treated_as_values():
    no_rate_held, all_held = Measured(3.0, 0.1, "most"), Measured(2.0, 0.1, "least")
    assert decide(ORIGINAL, [Trial(0, no_rate_held)], GOODPUT, ALIKE).place is None
    assert not decide(all_held, [Trial(0, Measured(9.0, 0.01))], GOODPUT, ALIKE).significant
    assert decide(no_rate_held, [Trial(0, Measured(9.0, 0.01))], GOODPUT, ALIKE).significant


def test_ramp_that_started_too_high_is_retried_lower():
    """Its prediction counts, up to the lowest rate that failed."""
    too_high, held = Measured(3.0, 0.1, "most"), Measured(2.5, 0.1)
    done = [Trial(0, too_high), Trial(1, held), Trial(2, Measured(1.5, 0.1))]
    following = next_trial([4.0, 2.0, 1.5], done, ORIGINAL, GOODPUT, trials=4, seconds_left=900.0, restart_seconds=60.0)
    assert following is not None
    assert following.place == 0
    assert trial_start(4.0, measured_of(0, done)) < 0.6 * too_high.value
    following = next_trial([0.9, 2.0, 1.5], done, ORIGINAL, GOODPUT, trials=4, seconds_left=900.0, restart_seconds=60.0)
    assert following is not None
    assert following.place == 1, "it was not predicted to be better"
    assert decide(ORIGINAL, done, GOODPUT, [4.0, 2.0, 1.5]).place == 1, "what never held is not kept"


def test_trial_starts_below_the_expected_rate_and_lower_for_a_guess():
    assert trial_start(4.0, None, guess=True) < trial_start(4.0, None) < 4.0
    assert trial_start(4.0, Measured(2.0, 0.1), guess=True) == trial_start(2.0, None), "measured values count"


def test_measured_ceiling_of_tried_rates():
    assert measured_ceiling([], 900.0) is None
    assert measured_ceiling([StepOutcome(2.0, False, "queue"), StepOutcome(1.0, False, "queue")], 900.0) == Measured(
        1.0, 0.05, "most"
    )
    assert measured_ceiling([StepOutcome(2.0, True), StepOutcome(4.0, True)], 225.0) == Measured(4.0, 0.1, "least")
    found = measured_ceiling([StepOutcome(2.0, True), StepOutcome(4.0, False, "queue")], 900.0)
    assert found.value == pytest.approx(math.sqrt(8))
    assert 0.1 < found.error < 0.3
    assert measured_mean([1.0] * 4) is None
    assert measured_mean([9.0, 10.0, 11.0] * 10).value == pytest.approx(10.0)
    twice = pooled([Measured(2.0, 0.01), Measured(2.0, 0.01)])
    assert twice.error < pooled([Measured(2.0, 0.01)]).error
    assert decide(Measured(100.0, 0.01), [Trial(0, Measured(150.0, 0.01))], THROUGHPUT, ALIKE).significant

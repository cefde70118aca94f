"""From a simulated engine's records to a prediction, and refused predictions."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache

import pytest
from msgspec.structs import replace

from fakes.virtual_records import Recorded, record, traffic
from vllm_console.prediction import evidence as evidence_module
from vllm_console.prediction.drift import at_speed_of, drift, next_speeds
from vllm_console.prediction.evidence import NoEvidenceError, TrafficEvidence, gather
from vllm_console.prediction.fit import CostFit, fit_step_cost, step_regression
from vllm_console.prediction.predict import (
    CUT,
    FEWEST_DRAWS,
    Change,
    Estimate,
    Prediction,
    _estimate,
    _redrawn,
    predict,
)
from vllm_console.prediction.score import KeptPrediction, Traffic, outcome_lines, settle, track_record
from vllm_console.text import took

BASE = "--max-num-seqs 48 --max-model-len 4096"


@cache
def recorded(line: str = BASE, *, rate: float = 2.6, seed: int = 1, count: int = 100, shared: int = 0) -> Recorded:
    return record(line, traffic(count, rate, seed=seed, shared=shared))


def evidence_of(found: Recorded) -> TrafficEvidence:
    limits = found.limits.scheduler
    return gather(found.requests, found.steps, limits.block_size, limits.max_num_batched_tokens)


@cache
def fitted(line: str = BASE, shared: int = 0) -> tuple[Recorded, TrafficEvidence, CostFit]:
    found = recorded(line, shared=shared)
    evidence = evidence_of(found)
    return found, evidence, fit_step_cost(evidence, found.limits)


@cache
def predicted(line: str, before: str = BASE, shared: int = 0, scale: float = 1.0) -> tuple[Prediction, TrafficEvidence]:
    found, evidence, cost = fitted(before, shared)
    after = record(line, traffic(100, 2.6 * scale, seed=1, shared=shared))
    return predict(evidence, cost, Change(found.limits, after.limits, scale)), evidence_of(after)


def test_step_cost_is_found_from_the_records() -> None:
    _, evidence, found = fitted()
    cost = step_regression(evidence.steps)
    off = [cost.seconds(one.sequences, one.tokens, one.reads, one.pairs) / one.seconds - 1 for one in evidence.steps]
    assert sum(abs(one) < 0.02 for one in off) > 0.9 * len(off)
    assert any(one.prefills for one in evidence.steps)
    assert found.error < 0.05


@pytest.mark.parametrize(
    ("line", "before", "shared", "scale"),
    [
        ("--max-num-seqs 10 --max-model-len 4096", BASE, 0, 1.0),
        (f"{BASE} --max-num-batched-tokens 256", BASE, 0, 1.0),
        (f"{BASE} --num-gpu-blocks-override 300", BASE, 0, 1.0),
        (f"{BASE} --no-enable-prefix-caching", BASE, 512, 1.0),
        (BASE, BASE, 0, 1.3),
    ],
)
def test_same_requests_after_a_change_match_the_prediction(line: str, before: str, shared: int, scale: float) -> None:
    prediction, after = predicted(line, before, shared, scale)
    for latency in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
        estimate, measured = getattr(prediction.predicted, latency).p50, getattr(after.observed, latency).p50
        assert estimate.value == pytest.approx(measured, rel=0.1)
        assert estimate.low <= measured <= estimate.high
    tokens = prediction.predicted.tokens_per_second
    assert tokens.value == pytest.approx(after.observed.tokens_per_second, rel=0.05)


def test_similar_traffic_is_within_the_interval() -> None:
    prediction, _ = predicted("--max-num-seqs 16 --max-model-len 4096")
    assert not prediction.outside
    inside = []
    for seed in range(2, 10):
        other = evidence_of(recorded("--max-num-seqs 16 --max-model-len 4096", seed=seed)).observed
        for latency in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
            estimate = getattr(prediction.predicted, latency).p50
            inside.append(estimate.low <= getattr(other, latency).p50 <= estimate.high)
    assert sum(inside) / len(inside) >= 0.7


def test_interval_is_wider_after_starts_at_varying_speed() -> None:
    found, evidence, cost = fitted()
    same = Change(found.limits, found.limits)
    usual, after = (predict(evidence, cost, same, drifts=drifts).predicted for drifts in ((), (0.2, -0.15, 0.3)))
    usual_width, width = (one.itl_seconds.p50.high - one.itl_seconds.p50.low for one in (usual, after))
    assert width > 2 * usual_width
    assert 0.01 < usual_width / usual.itl_seconds.p50.value < 0.2


def test_only_ttft_is_wider_after_starts_with_varying_front_end_time() -> None:
    found, without, cost = fitted()
    assert not without.front
    observed = without.observed.ttft_seconds
    later = replace(observed, p50=(observed.p50 or 0) + 0.05, mean=(observed.mean or 0) + 0.05)
    seen = replace(
        without,
        front=0.05,
        fronts=(0.05,) * len(without.fronts),
        observed=replace(without.observed, ttft_seconds=later),
    )
    same = Change(found.limits, found.limits)

    def widths(evidence: TrafficEvidence, fronts: Sequence[float]) -> tuple[float, float]:
        found = predict(evidence, cost, same, front_drifts=fronts).predicted
        ttft, itl = found.ttft_seconds.p50, found.itl_seconds.p50
        return ttft.high - ttft.low, itl.high - itl.low

    assert widths(without, (0.8, -0.4, 1.2)) == widths(without, ())
    quiet, usual, wild = (widths(seen, fronts) for fronts in ([0.01] * 9, (), (0.8, -0.4, 1.2, -0.5)))
    assert quiet[0] < usual[0] < wild[0]
    assert wild[0] > quiet[0] + 0.03
    assert quiet[1] == usual[1] == wild[1]


def test_drift_scale_is_learned_and_robust_to_an_outlier() -> None:
    _, evidence, cost = fitted()

    def reach(drifts: Sequence[float]) -> float:
        speeds = next_speeds(evidence, cost.start, drifts, 39)
        assert speeds == sorted(speeds)
        assert speeds[19] == pytest.approx(1.0)
        assert speeds[1] * speeds[37] == pytest.approx(1.0)
        return speeds[37] - 1

    dice = random.Random(5)
    quiet, usual = ([dice.gauss(0, scatter) for _ in range(20)] for scatter in (0.003, 0.02))
    assert reach(()) == pytest.approx(0.035, abs=0.005)
    assert reach(quiet[:5]) < reach(()) / 3
    assert 0.003 < reach(quiet) < 0.01, "not narrower than nine of ten starts are apart"
    assert reach((*quiet, 0.1)) < 1.3 * reach(quiet)
    assert reach(usual) == pytest.approx(0.035, abs=0.015)
    assert reach([0.0] * 50) > 0
    assert len(next_speeds(evidence, cost.start, (), 4)) == 4


def test_speed_draws_cover_an_engine_of_varying_speed() -> None:
    _, evidence, cost = fitted()
    wild = replace(
        evidence,
        steps=tuple(
            replace(one, seconds=one.seconds * (9.0 if 10 * place // len(evidence.steps) % 2 else 1.0))
            for place, one in enumerate(evidence.steps)
        ),
    )
    speeds = next_speeds(wild, cost.start, (), 39)
    assert speeds == sorted(speeds)
    assert len(set(speeds)) == 39, "each of them is another one"
    assert speeds[-1] > 3
    for drifts in ((math.inf,), (math.nan,), (-1.0,)):
        assert next_speeds(evidence, cost.start, drifts, 9) == next_speeds(evidence, cost.start, (), 9)
    assert all(map(math.isfinite, next_speeds(evidence, cost.start, (1e300, -1 + 1e-15), 9)))


def test_drift_excludes_the_error_of_the_step_cost() -> None:
    _, evidence, cost = fitted()
    other = at_speed_of(cost.start.scaled(1.2), evidence)
    assert drift(other, evidence) == pytest.approx(0.0, abs=1e-9)


def test_steps_with_clock_errors_do_not_count_for_the_speed() -> None:
    _, evidence, cost = fitted()
    missed = replace(evidence, steps=tuple(replace(one, seconds=0.0) for one in evidence.steps))
    assert drift(cost.start, missed) is None
    assert next_speeds(missed, cost.start, (-1.0,), 9) == next_speeds(missed, cost.start, (), 9)
    partly = replace(evidence, steps=(*missed.steps, *evidence.steps))
    assert drift(cost.start, partly) == drift(cost.start, evidence)


def test_estimate_with_few_draws_has_no_interval() -> None:
    few = [1.0] * (FEWEST_DRAWS - 1) + [None] * 20
    assert _estimate(1.0, few, CUT) == Estimate(1.0)
    assert _estimate(1.0, [*few, 2.0, 3.0], CUT) == Estimate(1.0, 1.0, 2.0)
    assert _estimate(1.0, [], 0) == Estimate(1.0, 1.0, 1.0), "measured values are exact"


def test_prompts_after_shared_prefixes_are_redrawn_in_order() -> None:
    found, evidence, _ = fitted(BASE, 512)
    drawn = _redrawn(evidence, evidence, found.limits.scheduler.block_size, random.Random(1), 1.0)
    assert [one.prefix for one in drawn] == [one.prefix for one in evidence.arrivals]
    prompts = [[one.prompt_tokens for one in arrivals] for arrivals in (drawn, evidence.arrivals)]
    assert prompts[0] != prompts[1]
    assert sum(prompts[0]) == pytest.approx(sum(prompts[1]), rel=0.15)
    assert min(prompts[0]) > 512


def test_quantile_of_few_requests_is_not_shown() -> None:
    prediction, _ = predicted(f"{BASE} --max-num-batched-tokens 256")
    assert prediction.now.ttft_seconds.p99.value is None
    assert prediction.predicted.ttft_seconds.p99.value is None
    assert prediction.predicted.ttft_seconds.p90.value is not None


def test_near_capacity_only_the_direction_is_reported() -> None:
    prediction, _ = predicted("--max-num-seqs 3 --max-model-len 4096")
    assert "direction and order of magnitude" in prediction.outside
    assert prediction.predicted.ttft_seconds.p50.value is not None
    assert prediction.load is not None
    assert prediction.load > 0.85


def test_change_not_covered_by_the_records_is_refused() -> None:
    found, evidence, cost = fitted()
    off = replace(found.limits, prefix_caching=False)
    caching = predict(evidence, cost, Change(off, found.limits))
    assert "prompts share a prefix" in caching.outside
    assert caching.predicted.ttft_seconds.p50.value is None
    assert caching.now.ttft_seconds.p50.value is not None
    short = replace(found.limits, scheduler=replace(found.limits.scheduler, max_model_len=600))
    assert "longer than 600 tokens" in predict(evidence, cost, Change(found.limits, short)).outside
    whole = replace(
        found.limits, scheduler=replace(found.limits.scheduler, max_num_batched_tokens=300, chunked_prefill=False)
    )
    assert "longer than a step of 300 tokens" in predict(evidence, cost, Change(found.limits, whole)).outside
    tight = replace(found.limits, blocks=21)
    assert "the whole KV cache of 320 tokens" in predict(evidence, cost, Change(found.limits, tight)).outside


def test_missing_requests_are_noticed() -> None:
    found = recorded()
    kept = [one for index, one in enumerate(found.requests) if index % 3]
    evidence = evidence_of(Recorded(kept, found.steps, found.limits))
    assert "disconnected" in evidence.flaw
    _, _, cost = fitted()
    assert "disconnected" in predict(evidence, cost, Change(found.limits, found.limits)).outside


def test_missing_requests_are_not_counted_as_running() -> None:
    """Two minutes after a load had disconnected, "some of its requests have not ended yet" was once shown."""
    found = recorded()
    middle = found.requests[len(found.requests) // 2].arrived_at
    late = found.requests[-20].arrived_at
    kept = [one for index, one in enumerate(found.requests) if index % 2 == 0 or one.arrived_at > late]
    busy = [*found.steps[:-1], found.steps[-1]._replace(running=64)]
    evidence = evidence_of(Recorded(kept, busy, found.limits))
    assert "disconnected" in evidence.flaw
    running = [one._replace(running=(one.running or 0) + 8) if one.at > middle else one for one in found.steps]
    evidence = evidence_of(Recorded(found.requests, running, found.limits))
    assert "have not ended yet" in evidence.flaw


def test_traffic_after_missing_requests_is_complete() -> None:
    found = recorded()
    middle = found.requests[len(found.requests) // 2].arrived_at
    kept = [one for index, one in enumerate(found.requests) if index % 3 or one.arrived_at > middle]
    evidence = evidence_of(Recorded(kept, found.steps, found.limits))
    assert not evidence.flaw
    assert evidence.requests >= 30


def test_lost_records_are_noticed() -> None:
    found = recorded()
    lost = [*found.requests[:-1], found.requests[-1]._replace(dropped=3)]
    assert "dropped records" in evidence_of(Recorded(lost, found.steps, found.limits)).flaw


def test_server_that_the_model_does_not_explain_is_refused() -> None:
    found, evidence, cost = fitted()
    wrong = replace(cost, costs=tuple(one.scaled(1.5) for one in cost.costs))
    prediction = predict(evidence, wrong, Change(found.limits, found.limits))
    assert prediction.outside.startswith("No prediction: the replay's median ")
    assert prediction.outside.endswith(" what this server measured.")
    assert prediction.predicted.itl_seconds.p50.value is None


def test_measured_latency_of_zero_is_refused_in_words() -> None:
    found, evidence, cost = fitted()
    none = replace(evidence.observed, itl_seconds=replace(evidence.observed.itl_seconds, p50=0.0))
    prediction = predict(replace(evidence, observed=none), cost, Change(found.limits, found.limits))
    assert prediction.outside == "No prediction: the replay's median ITL is far above what this server measured."


def test_missing_e2e_times_are_the_sum_of_their_parts() -> None:
    found = recorded()
    without_e2e = [one._replace(e2e_seconds=None) for one in found.requests]
    evidence = evidence_of(Recorded(without_e2e, found.steps, found.limits))
    whole = evidence_of(found).observed.e2e_seconds
    assert evidence.observed.e2e_seconds.p50 == pytest.approx(whole.p50, rel=0.02)
    assert not predict(evidence, fitted()[2], Change(found.limits, found.limits)).outside


def test_shared_prefixes_are_named_as_the_reason() -> None:
    line = "--max-num-seqs 48 --max-model-len 3072 --num-gpu-blocks-override 300"
    found = record(line, traffic(100, 2.0, seed=3, shared=1024))
    evidence = evidence_of(found)
    prediction = predict(evidence, fit_step_cost(evidence, found.limits), Change(found.limits, found.limits))
    assert "share a prefix" in prediction.outside


def test_step_cost_is_shown_when_a_preempted_request_is_always_active(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = "--max-num-seqs 48 --max-model-len 3072 --num-gpu-blocks-override"
    tight, wide = (record(f"{line} {blocks}", traffic(150, 3.0, seed=5)) for blocks in (400, 3000))
    alone = len(evidence_of(tight).steps)
    monkeypatch.setattr(evidence_module, "FEWEST_STEPS", len(tight.steps))
    evidence, truth = evidence_of(tight), evidence_of(wide)
    assert (evidence.observed.preemptions_per_minute or 0) > 40
    assert len(evidence.steps) > 2 * alone, "steps in which a preempted request hardly changes anything count"
    found = predict(evidence, fit_step_cost(evidence, tight.limits), Change(tight.limits, wide.limits))
    assert not found.outside
    for latency in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
        estimated, measured = getattr(found.predicted, latency).mean, getattr(truth.observed, latency).mean
        assert abs(estimated.value / measured - 1) < 0.05, latency


def test_too_few_requests_are_no_evidence() -> None:
    found = recorded()
    with pytest.raises(NoEvidenceError, match="only 12 usable requests are recorded") as few:
        gather(found.requests[:12], found.steps, 16, 2048)
    assert str(few.value).endswith("needs at least 30: try again after more traffic")


def test_requests_overlapping_unknown_ones_are_not_judged() -> None:
    found = recorded()
    last = found.requests[80].finished_at
    steps = [one for one in found.steps if one.at <= last]
    evidence = gather(found.requests[:81], steps, 16, 2048)
    assert evidence.requests < len(evidence.arrivals) <= 81
    assert not evidence.flaw


def test_shared_prefixes_are_inferred_from_the_cached_tokens() -> None:
    found, evidence, _ = fitted(BASE, 512)
    assert evidence.cached_tokens > 0.8 * 512 * evidence.requests
    hit = [one for one, request in zip(evidence.arrivals, found.requests, strict=False) if request.cached_tokens]
    assert len({one.prefix[:32] for one in hit}) == 1


def kept(after: TrafficEvidence, *, outside: bool = False) -> KeptPrediction:
    _, evidence, cost = fitted()
    prediction, _ = predicted("--max-num-seqs 16 --max-model-len 4096")
    one = KeptPrediction(
        0.0, {"max-num-seqs": 16}, prediction.predicted, Traffic.of(evidence), cost.costs[0], outside, front=0.004
    )
    return settle(one, after)


def test_prediction_is_scored_by_the_outcome() -> None:
    slower = record("--max-num-seqs 16 --max-model-len 4096", traffic(100, 2.6, seed=2), speed=1 / 1.1)
    one = kept(evidence_of(slower))
    assert one.drift == pytest.approx(0.1, abs=0.02)
    after = evidence_of(slower)
    over = f"Measured over {after.requests} requests that came within {took(after.seconds)}; "
    assert any(line.startswith(over) for line in outcome_lines(one))
    assert one.front_drift is None, "nothing is known of a front end"
    assert kept(replace(evidence_of(slower), front=0.006)).front_drift == pytest.approx(0.5)
    scored = track_record([one, kept(evidence_of(slower), outside=True)])
    assert scored.predictions == 1
    assert scored.median_error is not None
    assert 0.03 < scored.median_error < 0.3
    assert scored.covered is not None
    assert scored.covered >= 0.75


def test_prediction_is_not_scored_by_different_traffic() -> None:
    one = kept(evidence_of(recorded("--max-num-seqs 16 --max-model-len 4096", rate=1.2)))
    assert one.unlike
    assert track_record([one]).median_error is None

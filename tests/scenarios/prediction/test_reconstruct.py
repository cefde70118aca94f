"""Predictions from ``/metrics`` alone: the reconstructed traffic agrees with the metrics, its predictions hold, and
traffic that cannot be reconstructed is refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from fakes.virtual_records import Recorded, record, traffic
from vllm_console.prediction.evidence import NoEvidenceError, TrafficEvidence, gather
from vllm_console.prediction.fit import CostFit, fit_step_cost
from vllm_console.prediction.predict import Change, Estimates, predict
from vllm_console.prediction.reconstruct import reconstruct

BASE = "--max-num-seqs 48 --max-model-len 4096"
COUNT = 200


@cache
def recorded(line: str = BASE, **more: Any) -> Recorded:
    return record(line, traffic(COUNT, 2.0, seed=5, **more), sampled=True)


def rebuilt(one: Recorded, **more: Any) -> TrafficEvidence:
    limits = one.limits.scheduler
    return reconstruct(one.samples, limits.max_num_batched_tokens, limits.max_model_len, **more)


@cache
def fitted(seed: int = 0) -> CostFit:
    """Fitted to 100 requests of the usual traffic, as the console does it."""
    return fit_step_cost(rebuilt(recorded(), seed=seed, most=100), recorded().limits)


def exact(one: Recorded) -> TrafficEvidence:
    limits = one.limits.scheduler
    return gather(one.requests, one.steps, limits.block_size, limits.max_num_batched_tokens)


def test_reconstruction_agrees_with_the_metrics():
    one = recorded()
    found = rebuilt(one)
    assert len(found.arrivals) == COUNT
    for name in ("prompt_tokens", "output_tokens"):
        seen = sum(getattr(request, name) or 0 for request in one.requests)
        assert sum(getattr(request, name) for request in found.arrivals) == pytest.approx(seen, rel=0.02), name
    came = sorted(request.arrived_at for request in one.requests)
    at = [found.arrivals[place].at - found.arrivals[0].at for place in range(COUNT)]
    apart = [abs(at[place] - (came[place] - came[0])) for place in range(COUNT)]
    assert max(apart) < 2.5, "samples come once a second"
    known = exact(one).observed
    for latency in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
        mean = getattr(known, latency).mean
        assert getattr(found.observed, latency).mean == pytest.approx(mean, rel=0.1)
    assert not found.flaw


def test_another_seed_gives_different_traffic():
    one, other = rebuilt(recorded(), seed=1), rebuilt(recorded(), seed=2)
    assert one.arrivals != other.arrivals
    assert sum(a.prompt_tokens for a in one.arrivals) == pytest.approx(
        sum(a.prompt_tokens for a in other.arrivals), rel=0.02
    )


def widths(found: Estimates) -> dict[str, float]:
    every = {name: getattr(found, name).mean for name in ("ttft_seconds", "itl_seconds", "e2e_seconds")}
    return {name: (one.high - one.low) / one.value for name, one in every.items()}


def test_prediction_holds_with_wider_intervals_than_the_probes():
    one, then = recorded(), recorded(f"{BASE} --max-num-batched-tokens 256")
    change = Change(one.limits, then.limits)
    cases = [(rebuilt(one, seed=seed), fitted(seed)) for seed in range(3)]
    found = predict(*cases[0], change, cases[1:])
    assert not found.outside
    known = exact(one)
    by_probe = predict(known, fit_step_cost(known, one.limits), change)
    truth = exact(then).observed
    for name in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
        estimate, value = getattr(found.predicted, name).mean, getattr(truth, name).mean
        assert estimate.low <= value <= estimate.high, name
        assert estimate.value == pytest.approx(value, rel=0.25), name
        assert widths(found.predicted)[name] > widths(by_probe.predicted)[name], name


@pytest.mark.parametrize(
    ("line", "more", "why"),
    [
        (f"{BASE} --num-gpu-blocks-override 300", {}, "preempted"),
        (BASE, {"shared": 512}, "which prompts share a prefix"),
    ],
)
def test_change_that_metrics_do_not_cover_is_refused(line, more, why):
    one = recorded(line, **more)
    assert why in rebuilt(one).flaw
    change = Change(one.limits, replace(one.limits, blocks=one.limits.blocks + 1))
    evidence = rebuilt(one)
    assert why in predict(evidence, fitted(), change).outside


def test_too_little_traffic_is_no_evidence():
    one = recorded()
    limits = one.limits.scheduler
    for samples, why in (
        (one.samples[:5], "a prediction needs at least 30"),
        ((), "no request has ended in the recorded traffic; a prediction needs at least 30: send traffic first"),
        ([replace(each, engines={**each.engines, "1": each.engines["0"]}) for each in one.samples], "several engines"),
        (
            [replace(each, engines={"0": replace(each.engines["0"], histograms={})}) for each in one.samples],
            "lack request times",
        ),
    ):
        with pytest.raises(NoEvidenceError, match=why):
            reconstruct(samples, limits.max_num_batched_tokens, limits.max_model_len)


@pytest.mark.parametrize(
    ("running", "under_way"),
    [(1, "and 1 is in flight: try again once more have ended"), (12, "and 12 are in flight: try again")],
)
def test_too_little_traffic_in_progress_asks_for_more(running, under_way):
    first = recorded().samples[0]
    engine = replace(first.engines["0"], requests_running=running, requests_waiting=0)
    samples = [replace(first, at=first.at + second, engines={"0": engine}) for second in range(3)]
    with pytest.raises(NoEvidenceError, match=under_way) as found:
        reconstruct(samples, 2048, 4096)
    assert str(found.value).startswith("no request has ended in the recorded traffic; a prediction needs at least 30, ")

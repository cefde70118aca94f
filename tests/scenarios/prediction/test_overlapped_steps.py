"""Durations and work of recorded steps compared with the truth, with and without asynchronous scheduling."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from statistics import median

import pytest

from fakes.overlapped_engine import OverlappedEngine, Run
from vllm_console.history.probe_records import FinishedRequest
from vllm_console.prediction.evidence import SeenStep, TrafficEvidence, gather
from vllm_console.prediction.fit import step_regression
from vllm_launchers.engine_model.step_cost import StepCost
from vllm_launchers.engine_model.traffic_replay import Arrival

COST = StepCost(0.005, per_sequence=2e-5, per_token=2e-5)
LAUNCH, BUDGET = 0.008, 2048


def arrivals(rate: float, prompts: tuple[int, int], *, count: int = 150, output: int = 60) -> list[Arrival]:
    dice = random.Random(5)
    at, found = 0.0, []
    for _ in range(count):
        at += dice.expovariate(rate)
        found.append(Arrival(at, dice.randint(*prompts), dice.randint(2, output)))
    return found


def compared(
    run: Run, evidence: TrafficEvidence, requests: Sequence[FinishedRequest] = ()
) -> list[tuple[SeenStep, float, int]]:
    """Each step of the evidence with its true duration and true prompt tokens; ``requests`` are its sources."""
    times = [(one.finished_at, one.prefill_seconds or 0, one.decode_seconds or 0) for one in requests or run.requests]
    zero = min(at - prefill - decode for at, prefill, decode in times)
    ends = [one.at for one in run.steps]
    found = []
    for one in evidence.steps:
        place = min(bisect_left(ends, one.at + one.seconds + zero - 1e-6), len(ends) - 1)
        found.append((one, run.seconds[place], run.prompts[place]))
    return found


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("skew", [-0.012, 0.0, 0.012])
@pytest.mark.parametrize(
    ("rate", "prompts", "output"),
    [(0.5, (300, 1000), 60), (12.0, (600, 1000), 60), (8.0, (600, 6000), 60), (10.0, (600, 2000), 4)],
    ids=["hardly any load", "whole prompts", "chunked prompts", "hardly any decode"],
)
def test_durations_and_work_are_recovered(
    ahead: bool, skew: float, rate: float, prompts: tuple[int, int], output: int
) -> None:
    run = OverlappedEngine(COST, BUDGET, ahead=ahead, launch=LAUNCH, skew=skew).run(
        arrivals(rate, prompts, output=output)
    )
    found = gather(run.requests, run.steps, 16, BUDGET)
    pairs = compared(run, found)
    prefills = [pair for pair in pairs if pair[2]]
    assert found.ahead is ahead
    assert len(prefills) > 0.8 * sum(map(bool, run.prompts))
    assert share_close(pairs) > 0.98
    assert share_close(prefills) > 0.95
    computed = [abs(one.tokens - one.sequences + one.prefills - true) <= 0.02 * true for one, _, true in pairs]
    assert sum(computed) > 0.98 * len(computed)
    assert abs(step_regression(found.steps).per_token / COST.per_token - 1) < 0.02


def share_close(pairs: Sequence[tuple[SeenStep, float, int]]) -> float:
    """The share of durations within 10% of the truth."""
    return sum(abs(one.seconds / true - 1) < 0.1 for one, true, _ in pairs) / len(pairs)


@pytest.mark.parametrize("ahead", [False, True])
def test_long_steps_show_whether_they_are_scheduled_ahead(ahead: bool) -> None:
    slow = StepCost(0.2, per_token=1e-3)
    run = OverlappedEngine(slow, BUDGET, ahead=ahead).run(arrivals(0.3, (100, 800), output=40))
    found = gather(run.requests, run.steps, 16, BUDGET)
    assert found.ahead is ahead
    assert abs(step_regression(found.steps).per_token / slow.per_token - 1) < 0.02


@pytest.mark.parametrize("ahead", [False, True])
def test_long_prefill_shows_whether_steps_are_scheduled_ahead(ahead: bool) -> None:
    run = OverlappedEngine(StepCost(0.001, per_token=2e-4), 4096, ahead=ahead).run(arrivals(0.8, (1500, 1900)))
    assert gather(run.requests, run.steps, 16, 4096).ahead is ahead


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("rate", [0.5, 8.0], ids=["hardly any load", "load"])
def test_front_end_time_is_separated_from_the_wait_for_a_step(ahead: bool, rate: float) -> None:
    slow = StepCost(0.02, per_token=1e-4)
    run = OverlappedEngine(slow, BUDGET, ahead=ahead, front=0.006).run(arrivals(rate, (50, 200)))
    found = gather(run.requests, run.steps, 16, BUDGET)
    assert median(found.fronts) == pytest.approx(0.006, abs=0.001)
    assert step_regression(found.steps).per_token == pytest.approx(1e-4, rel=0.02)


def test_only_steps_with_a_preempted_request_are_excluded() -> None:
    """Also if it is unknown which step produced its first token."""
    run = OverlappedEngine(COST, BUDGET, ahead=True, launch=LAUNCH).run(arrivals(4.0, (600, 1000)))
    whole = gather(run.requests, run.steps, 16, BUDGET)
    disturbed = list(run.requests)
    disturbed[20] = disturbed[20]._replace(preemptions=1, prompt_tokens=(disturbed[20].prompt_tokens or 0) + 1)
    compared_steps = gather(disturbed, run.steps, 16, BUDGET).steps
    assert 0.9 * len(whole.steps) < len(compared_steps) < len(whole.steps)


def test_step_before_an_unknown_prefill_is_not_a_long_decode() -> None:
    run = OverlappedEngine(COST, BUDGET, ahead=True, launch=LAUNCH).run(arrivals(4.0, (600, 1000)))
    kept = [one for one in run.requests if int(one.id) % 10]
    pairs = compared(run, gather(kept, run.steps, 16, BUDGET), kept)
    assert share_close([pair for pair in pairs if not pair[0].prefills]) == 1.0

"""What an engine could serve at other rates, compared with a manual calculation from its step cost."""

from __future__ import annotations

import random

import pytest

from vllm_console.prediction.capacity import ReplayedEngine, held_rate, replay_at, saturated_tokens
from vllm_launchers.engine_model.scheduler import SchedulerLimits
from vllm_launchers.engine_model.step_cost import StepCost
from vllm_launchers.engine_model.traffic_replay import Arrival, EngineLimits
from vllm_launchers.presets.model import Objectives

OBJECTIVES = Objectives(1.0, 0.1, 0.9, 0.02)
COST = StepCost(0.02, per_token=0.0001)
dice = random.Random(3)
TRAFFIC = tuple(Arrival(at, 200, 50) for at in sorted(dice.uniform(0, 300) for _ in range(300)))


def engine(seqs: int = 16, *, blocks: int = 4000, batched: int = 2048) -> ReplayedEngine:
    return ReplayedEngine(EngineLimits(SchedulerLimits(seqs, batched, 4096, 16), blocks, prefix_caching=False), COST)


def test_highest_rate_is_sustained_and_a_higher_one_is_not():
    rate = held_rate(TRAFFIC, engine(), OBJECTIVES, 1.0)
    assert rate is not None
    assert replay_at(TRAFFIC, engine(), OBJECTIVES, rate).holds
    assert not replay_at(TRAFFIC, engine(), OBJECTIVES, 1.05 * rate).holds
    assert held_rate(TRAFFIC, engine(), OBJECTIVES, 50.0) == pytest.approx(rate, rel=0.02)


def test_more_sequences_serve_more_until_the_kv_cache_is_full():
    few, many = (held_rate(TRAFFIC, engine(seqs), OBJECTIVES, 1.0) for seqs in (4, 32))
    assert few < many
    tight = held_rate(TRAFFIC, engine(32, blocks=100), OBJECTIVES, 1.0)
    assert tight < many


def test_objective_that_no_rate_meets():
    assert held_rate(TRAFFIC, engine(), Objectives(1.0, 0.01, 0.9, 0.02), 1.0) is None


def test_requests_longer_than_the_context_are_never_sustained():
    long = (*TRAFFIC[:-1], Arrival(TRAFFIC[-1].at, 5000, 50))
    assert not replay_at(long, engine(), OBJECTIVES, 0.1).holds


def test_saturated_throughput_follows_batch_and_step_time():
    traffic = tuple(Arrival(one.at, 1, 50) for one in TRAFFIC)
    for seqs, in_flight in ((16, 64), (64, 16)):
        found = saturated_tokens(traffic, engine(seqs), in_flight)
        assert found == pytest.approx(16 / (0.02 + 16 * 0.0001), rel=0.05)


def test_few_requests_fill_the_engine_at_a_high_rate():
    """At 20 requests per second they all arrive within one second; a response takes 20 seconds."""
    traffic = [Arrival(float(at), 10, 1000) for at in range(20)]
    dense = engine(256, blocks=400)
    assert replay_at(traffic, dense, OBJECTIVES, 0.2).holds
    assert not replay_at(traffic, dense, OBJECTIVES, 20.0).holds, (
        "ten times as many tokens as the KV cache has blocks for"
    )
    assert held_rate(traffic, dense, OBJECTIVES, 1.0) == pytest.approx(400 * 16 * 0.9 / 510 / 20.3, rel=0.35)

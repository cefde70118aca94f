from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import astuple, replace

from fakes.overlapped_engine import OverlappedEngine
from vllm_launchers.engine_model.counted_engine import CountedEngine, Iteration, WouldPreemptError
from vllm_launchers.engine_model.scheduler import Scheduler, SchedulerLimits
from vllm_launchers.engine_model.step_cost import NO_NOISE, StepCost, StepNoise
from vllm_launchers.engine_model.traffic_replay import Arrival, EngineLimits, Replayed, replay_traffic

COST = StepCost(0.002, per_sequence=1e-5, per_token=5e-5, per_read=1e-7, weights=0.006)


def limits(
    *,
    seqs: int = 8,
    budget: int = 64,
    blocks: int = 200,
    caching: bool = False,
    chunked: bool = True,
    ahead: bool = False,
) -> EngineLimits:
    return EngineLimits(SchedulerLimits(seqs, budget, 512, 4, chunked), blocks, caching, ahead)


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0, 0.2), st.integers(1, 60), st.integers(1, 60), st.integers(0, 10), st.sampled_from([0, 1]),
    ),
    min_size=1, max_size=25,
)  # fmt: skip


def each_interval(replayed: Replayed) -> list[float]:
    return sorted(seconds for seconds, count in replayed.intervals for _ in range(count))


def preempts(self: CountedEngine, now: float) -> Iteration:
    """Force request-by-request scheduling of every iteration."""
    raise WouldPreemptError


def same(found: Replayed, other: Replayed) -> None:
    for name in ("steps", "tokens", "preemptions", "prefill_tokens"):
        assert getattr(found, name) == getattr(other, name)
    for name in ("seconds", "busy", "waiting", "batches"):
        assert getattr(found, name) == pytest.approx(getattr(other, name))
    assert each_interval(found) == pytest.approx(each_interval(other))
    for one, another in zip(found.requests, other.requests, strict=True):
        assert (one is None) == (another is None)
        if one is not None and another is not None:
            assert astuple(one) == pytest.approx(astuple(another))


COSTS = (
    COST,
    StepCost(0.001, per_token=2e-4, per_read=1e-4, weights=0.001, per_pair=5e-5, ungraphed=0.01, prompts=0.0031416),
    StepCost(0.0, per_token=1e-3, per_pair=1e-6),
)
POINTS = st.lists(
    st.tuples(st.integers(0, 60).map(lambda count: count / 31), st.floats(0.3, 3), st.floats(0, 0.1)), max_size=6
).map(lambda found: tuple(sorted(found)))
NOISES = st.builds(StepNoise, POINTS, POINTS, st.sampled_from([0.0, 0.37, 2.9]), st.sampled_from([0.0, 0.11]))


@settings(max_examples=60, deadline=None)
@example(  # a prompt with one token left when all others decode
    drawn=[(0.0, 1, 1, 0, 0)] * 5
    + [(0.0, 1, 35, 0, 0), (0.0, 1, 19, 0, 0), (0.0, 23, 55, 0, 0), (0.0, 59, 5, 0, 0), (0.0, 46, 1, 0, 0)],
    seqs=3, budget=64, blocks=32, caching=True, chunked=True, cost=COST, noise=NO_NOISE, since=0.0, length=math.inf,
    ahead=False,
)  # fmt: skip
@example(  # a waiting request fits once a running one has generated the block that they share
    drawn=[(0.0, 24, 43, 0, 0), (0.0703125, 40, 15, 0, 0), (0.0, 37, 6, 0, 0), (0.125, 2, 18, 0, 0),
           (0.078125, 1, 16, 0, 1), (0.0, 24, 16, 0, 0), (0.0, 1, 12, 0, 1), (0.0, 41, 8, 0, 1), (0.0, 1, 4, 1, 1),
           (0.0, 33, 1, 1, 1)],
    seqs=6, budget=1, blocks=50, caching=True, chunked=False, cost=COSTS[1],
    noise=StepNoise((), ((0.0, 1.25, 0.0),), 0.0, 0.0), since=0.0, length=math.inf, ahead=False,
)  # fmt: skip
@given(
    drawn=ARRIVALS, seqs=st.integers(1, 8), budget=st.integers(1, 80), blocks=st.integers(32, 80),
    caching=st.booleans(), chunked=st.booleans(), cost=st.sampled_from(COSTS), noise=NOISES, since=st.floats(0, 1),
    length=st.one_of(st.just(math.inf), st.floats(0, 3)), ahead=st.booleans(),
)  # fmt: skip
def test_batched_replay_equals_single_steps(
    drawn: list[tuple[float, int, int, int, int]], seqs: int, budget: int, blocks: int, caching: bool, chunked: bool,
    cost: StepCost, noise: StepNoise, since: float, length: float, ahead: bool,
) -> None:  # fmt: skip
    at, arrivals = 0.0, []
    for gap, prompt, output, shared, group in drawn:
        at += gap
        prefix = tuple(range(1000 * group, 1000 * group + min(shared, (prompt + output - 1) // 4)))
        arrivals.append(Arrival(at, prompt, output, prefix))
    budget = budget if chunked else 512
    allowed = limits(seqs=seqs, budget=budget, blocks=blocks, caching=caching, chunked=chunked, ahead=ahead)

    def replayed() -> Replayed:
        return replay_traffic(arrivals, allowed, cost, noise, since=since, until=since + length)

    counted = replayed()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CountedEngine, "schedule", preempts)
        together = replayed()
        patched.setattr(Scheduler, "decode_steps", lambda self, most: 0)
        apart = replayed()
    same(together, apart)
    same(counted, together)
    assert counted.kv_usage == pytest.approx(together.kv_usage)


@pytest.mark.parametrize("since", [0.0, 0.2])
def test_usage_grows_evenly_in_batched_steps(since: float) -> None:
    arrivals = [Arrival(0.0, 1, 60), Arrival(0.0, 9, 50)]
    found = []
    for together in (True, False):
        with pytest.MonkeyPatch.context() as patched:
            if not together:
                patched.setattr(CountedEngine, "schedule", preempts)
                patched.setattr(Scheduler, "decode_steps", lambda self, most: 0)
            found.append(replay_traffic(arrivals, limits(blocks=32), COST, since=since, until=since + 0.1).kv_usage)
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_single_request_takes_its_prefill_and_one_step_per_token() -> None:
    found = replay_traffic([Arrival(5.0, 40, 11)], limits(), COST)
    (request,) = found.requests
    assert request is not None
    prefill = COST.seconds(1, 40, 40, 40 * 41 / 2)
    assert request.ttft_seconds == pytest.approx(prefill)
    steps = [COST.seconds(1, 1, 40 + number, 40 + number) for number in range(1, 11)]
    assert request.e2e_seconds == pytest.approx(prefill + sum(steps))
    assert sum(count for _, count in found.intervals) == 10
    assert found.seconds == pytest.approx(request.e2e_seconds)


def test_shared_prefix_is_computed_once_with_caching() -> None:
    prefix = tuple(range(8))
    arrivals = [Arrival(0.0, 40, 5, prefix), Arrival(1.0, 40, 5, prefix)]
    first, second = replay_traffic(arrivals, limits(caching=True), COST).requests
    assert first is not None
    assert second is not None
    assert (first.cached_tokens, second.cached_tokens) == (0, 32)
    assert second.ttft_seconds < first.ttft_seconds
    without = replay_traffic(arrivals, limits(), COST).requests[1]
    assert without is not None
    assert without.cached_tokens == 0


def test_fewer_sequences_wait_longer_and_decode_faster() -> None:
    arrivals = [Arrival(0.01 * number, 20, 40) for number in range(20)]
    many, few = (replay_traffic(arrivals, limits(seqs=seqs, blocks=500), COST) for seqs in (16, 2))
    assert few.waiting > many.waiting
    assert max(few.batches) == 2
    longest = [max(seconds for seconds, _ in one.intervals) for one in (many, few)]
    assert longest[1] < longest[0]


def test_request_that_never_fits_is_refused_and_others_served() -> None:
    found = replay_traffic([Arrival(0.0, 600, 10), Arrival(0.0, 10, 10)], limits(), COST)
    assert found.requests[0] is None
    assert found.requests[1] is not None
    whole = replay_traffic([Arrival(0.0, 100, 10), Arrival(0.0, 10, 10)], limits(chunked=False), COST)
    assert [one is None for one in whole.requests] == [True, False], "no step holds the prompt"


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("rate", "seqs", "budget", "blocks"),
    [(0.5, 100, 2048, 10**5), (20.0, 100, 512, 10**5), (30.0, 8, 2048, 10**5), (3.0, 1, 2048, 10**5),
     (60.0, 100, 2048, 130)],
)  # fmt: skip
def test_request_latencies_match_a_separate_engine(
    ahead: bool, rate: float, seqs: int, budget: int, blocks: int
) -> None:
    """Compared with an independent engine, with and without asynchronous scheduling, also when all sequences or blocks
    are in use. No request needs more blocks than its prompt."""
    dice, at, arrivals = random.Random(3), 0.0, []
    for _ in range(200):
        at += dice.expovariate(rate)
        arrivals.append(Arrival(at, 48 * dice.randint(1, 18) + 1, dice.randint(2, 47)))
    cost = StepCost(0.005, per_sequence=2e-5, per_token=2e-5)
    run = OverlappedEngine(cost, budget, ahead=ahead, seqs=seqs, blocks=blocks, block_size=48).run(arrivals)
    known = sorted(run.requests, key=lambda one: one.arrived_at)
    allowed = EngineLimits(SchedulerLimits(seqs, budget, 4096, 48), blocks + 1, prefix_caching=False, ahead=ahead)
    for one, found in zip(known, replay_traffic(arrivals, allowed, cost).requests, strict=True):
        assert found is not None
        assert one.e2e_seconds == pytest.approx(found.e2e_seconds)
        assert (one.e2e_seconds or 0) - (one.decode_seconds or 0) == pytest.approx(found.ttft_seconds)


def test_prefill_noise_is_additive_not_proportional() -> None:
    cost = StepCost(0.001, per_token=0.001)
    held_up = StepNoise(prefill=((0.0, 30.0, 0.3),))
    for tokens, longest in ((8, 0.3), (400, 0.3 + 0.5 * 0.401)):
        (plain,), (slow,) = (
            replay_traffic([Arrival(0.0, tokens, 1)], limits(budget=512), cost, noise).requests
            for noise in (NO_NOISE, held_up)
        )
        assert plain is not None
        assert slow is not None
        assert 0.2 < slow.ttft_seconds - plain.ttft_seconds <= longest + 1e-9


def test_ungraphed_steps_and_prompts_take_longer() -> None:
    cost = StepCost(0.01, ungraphed=0.02, prompts=0.003)
    for graphs, ttft in ((512, 0.013), (48, 0.033)):
        found = replay_traffic([Arrival(0.0, 100, 3)], replace(limits(budget=512), graphs=graphs), cost).requests[0]
        assert found is not None
        assert found.ttft_seconds == pytest.approx(ttft)
        assert found.e2e_seconds == pytest.approx(ttft + 2 * 0.01), "one token of one request has a graph"
    assert cost.scaled(2.0) == StepCost(0.02, ungraphed=0.04, prompts=0.006)

"""Servers that schedule a step while the previous one runs, like vLLM on GPUs.

The folder ``h200`` has probe records of vLLM 0.26.0 on an NVIDIA H200: a model with the shape of Llama 3.1 8B in
bfloat16, 16 requests per second of the chatbot preset for 15 s, and no load before and after. ``h100`` has records of
an NVIDIA H100 before and after a restart with another --max-num-batched-tokens, with the same requests. ``h100/light``
has three requests per second of 200 + 600 tokens for 12 s, with a KV cache of 16,000 tokens. Then nine per second came,
which exceeds the cache, and again after a restart with 480,208 tokens: ``h100/large_cache``.
"""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pytest
from msgspec.structs import replace

from fakes.virtual_records import record, traffic
from vllm_console.history.probe_records import EngineStep, FinishedRequest, ProbeReader
from vllm_console.prediction.evidence import TrafficEvidence, gather
from vllm_console.prediction.figures import Known, Spread
from vllm_console.prediction.fit import fit_step_cost, step_regression
from vllm_console.prediction.predict import Change, Estimate, _missed, predict
from vllm_launchers.engine_model.scheduler import SchedulerLimits
from vllm_launchers.engine_model.step_cost import StepCost
from vllm_launchers.engine_model.traffic_replay import Arrival, EngineLimits, replay_traffic

BUDGET, KV_TOKENS, BLOCK = 4096, 920_336, 16


@cache
def records(of: str = "h200") -> tuple[list[FinishedRequest], list[EngineStep]]:
    with TemporaryDirectory() as folder:
        for path in (Path(__file__).parent / of).glob("*.gz"):
            (Path(folder) / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        reader = ProbeReader(Path(folder))
        return reader.requests(), reader.steps()


@cache
def on_h200() -> TrafficEvidence:
    return gather(*records(), BLOCK, BUDGET)


def h200(max_num_seqs: int) -> EngineLimits:
    scheduler = SchedulerLimits(max_num_seqs, BUDGET, 4096, BLOCK)
    return EngineLimits(scheduler, KV_TOKENS // BLOCK, prefix_caching=True, ahead=on_h200().ahead)


def test_records_show_whether_steps_are_scheduled_ahead() -> None:
    simulated = record("--max-num-seqs 48 --max-model-len 4096", traffic(100, 2.6, seed=1))
    scheduler = simulated.limits.scheduler
    found = gather(simulated.requests, simulated.steps, scheduler.block_size, scheduler.max_num_batched_tokens)
    assert on_h200().ahead
    assert not found.ahead


def test_request_order_decides_if_prompt_tokens_differ() -> None:
    requests, steps = records()
    halved = [one._replace(prompt_tokens=(one.prompt_tokens or 0) // 2) for one in steps]
    found = gather(requests, halved, BLOCK, BUDGET)
    assert found.ahead
    cost, exact = step_regression(found.steps), step_regression(on_h200().steps)
    assert abs(cost.per_token / exact.per_token - 1) < 0.3


def test_prefill_time_is_derived_from_the_previous_step() -> None:
    steps = on_h200().steps

    def typical(low: int, high: int) -> float:
        return median(one.seconds for one in steps if one.prefills and low <= one.tokens < high)

    decode = median(one.seconds for one in steps if not one.prefills and one.sequences > 16)
    assert decode < typical(100, 400) < typical(400, 800) < typical(800, 1400) < typical(1400, 2600)
    # Arithmetic alone: 2 FLOP for each of 7.5e9 parameters at the data sheet's 989 TFLOP/s.
    assert typical(1400, 2600) > 1400 * 15e9 / 989e12
    assert 15e9 / 989e12 < step_regression(steps).per_token < 2 * 15e9 / 989e12


def holds(estimate: Estimate, measured: float | None) -> bool:
    assert estimate.low is not None
    assert estimate.high is not None
    assert measured is not None
    return estimate.low <= measured <= estimate.high


def test_restart_with_smaller_steps_matched_the_prediction() -> None:
    """Except ITL p90 and p99: the same steps took 3% longer after that restart."""

    def limits(batched_tokens: int) -> EngineLimits:
        return EngineLimits(SchedulerLimits(256, batched_tokens, 4096, BLOCK), 9015, prefix_caching=True, ahead=True)

    before, after = gather(*records("h100/before"), BLOCK, 4096), gather(*records("h100/after"), BLOCK, 512)
    assert before.ahead
    fit = fit_step_cost(before, limits(4096))
    assert fit.error < 0.05
    found = predict(before, fit, Change(limits(4096), limits(512)))
    assert not found.outside
    for latency in ("ttft_seconds", "itl_seconds", "e2e_seconds"):
        estimated, measured = getattr(found.predicted, latency), getattr(after.observed, latency)
        assert holds(estimated.p50, measured.p50), latency
        assert estimated.mean.value is not None
        assert abs(measured.mean / estimated.mean.value - 1) < 0.05, latency
    now, then, came = (
        before.observed.itl_seconds.p99,
        found.predicted.itl_seconds.p99.value,
        after.observed.itl_seconds.p99,
    )
    assert now is not None
    assert then is not None
    assert came is not None
    assert then < 0.7 * now, "shorter steps with a prompt"
    assert came < 0.7 * now


def test_restart_with_fewer_sequences_matched_the_prediction() -> None:
    """The server was then restarted with --max-num-seqs 24, and received more requests than it could serve."""
    evidence = on_h200()
    found = predict(evidence, fit_step_cost(evidence, h200(256)), Change(h200(256), h200(24)))
    itl = found.predicted.itl_seconds
    assert holds(itl.p50, 0.00634)
    assert holds(itl.p90, 0.00696)
    assert holds(itl.p99, 0.0294)
    assert holds(itl.mean, 0.00736)
    assert "of what the server can serve" in found.outside


def test_request_arriving_during_a_step_waits_for_one_more() -> None:
    cost = StepCost(0.01)
    arrivals = [Arrival(0.0, 8, 20), Arrival(0.053, 8, 2)]
    scheduler = SchedulerLimits(8, 64, 512, 4)
    first, second = replay_traffic(arrivals, EngineLimits(scheduler, 200, prefix_caching=False), cost).requests
    ahead = replay_traffic(arrivals, EngineLimits(scheduler, 200, prefix_caching=False, ahead=True), cost).requests
    assert first is not None
    assert second is not None
    assert ahead[0] is not None
    assert ahead[1] is not None
    assert abs(ahead[0].ttft_seconds - first.ttft_seconds) < 1e-9  # it arrived at an idle engine
    assert abs(second.ttft_seconds - 0.017) < 1e-9
    assert abs(ahead[1].ttft_seconds - 0.027) < 1e-9


def test_tripled_traffic_fills_the_kv_cache_as_measured() -> None:
    """The records span 12 s with requests of 4 s; a third of that would not fill a cache."""
    evidence = gather(*records("h100/light"), BLOCK, BUDGET)
    limits = EngineLimits(SchedulerLimits(256, BUDGET, 4096, BLOCK), 1000, prefix_caching=True, ahead=True)
    found = predict(evidence, fit_step_cost(evidence, limits), Change(limits, limits, traffic_scale=3.0))
    assert "of what the server can serve" in found.outside
    then = found.predicted
    assert holds(then.preemptions_per_minute, 716)
    assert holds(then.itl_seconds.mean, 0.0093)
    assert holds(then.itl_seconds.p99, 0.0411)
    assert then.kv_cache_usage.value is not None
    assert then.kv_cache_usage.value > 0.7
    assert then.requests_waiting.value is not None
    assert then.requests_waiting.value > 1
    assert then.ttft_seconds.p50 != Estimate()
    assert then.ttft_seconds.p90 == Estimate(), "no more requests are known than were recorded"


def test_slow_prompt_steps_do_not_distort_the_others() -> None:
    """On that H100, 150 tokens including a prompt took 11.6 ms, and 50 tokens without a prompt 7.6 ms."""
    steps = gather(*records("h100/large_cache"), BLOCK, BUDGET).steps
    cost = step_regression(steps, 256)
    for low, high in ((24, 36), (36, 48), (48, 64)):
        ratios = [
            one.seconds / cost.seconds(one.sequences, one.tokens, one.reads, one.pairs)
            for one in steps
            if not one.prefills and low <= one.sequences < high
        ]
        assert 0.93 < median(ratios) < 1.07, (low, high)
    assert cost.prompts > 0.002


@pytest.mark.parametrize(
    ("p50", "mean", "sentence"),
    [
        (1.1, 2.2, ""),  # slightly fewer requests wait
        (0.5, 2.2, "the replay's median TTFT is 67% below"),  # far fewer wait
        (1.1, 1.6, "the replay's median TTFT is 27% below"),  # as many wait, but for too short a time
        (5.6, 2.2, "the replay's median TTFT is 4 times"),
    ],
)
def test_median_ttft_between_waiting_and_other_requests(p50: float, mean: float, sentence: str) -> None:
    """As measured on a server that preempted: a quarter of its requests waited at most 30 ms, half of them 1.5 s."""
    evidence = gather(*records("h100/light"), BLOCK, BUDGET)
    limits = EngineLimits(SchedulerLimits(256, BUDGET, 4096, BLOCK), 1000, prefix_caching=True, ahead=True)
    found = replay_traffic(evidence.arrivals, limits, step_regression(evidence.steps))
    waits = ((0.1, 0.021), (0.25, 0.03), (0.5, 1.49), (0.5, 1.49), (0.75, 3.9), (0.9, 5.5))
    measured = replace(
        evidence,
        observed=replace(evidence.observed, ttft_seconds=Spread(1.5, mean=2.14)),
        ttft=Known(waits, 2.14),
        front=0.006,
    )
    message = _missed(measured, replace(measured.observed, ttft_seconds=Spread(p50, mean=mean)), found)
    assert sentence in message if sentence else not message

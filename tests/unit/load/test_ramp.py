"""A ramp on a server: what it sends, when it ends, and its conclusion."""

from __future__ import annotations

import asyncio
import time

import pytest

from vllm_console.load import ramp as ramp_module
from vllm_console.load import ramp_search
from vllm_console.load.client import LoadError
from vllm_console.load.ramp import RampOptions, RampStep, conclude, run_ramp, traffic_of_others
from vllm_console.load.ramp_search import StepOutcome
from vllm_console.load.report import Latency
from vllm_launchers.presets.model import Objectives

OBJECTIVES = Objectives(ttft_p99_seconds=60.0, itl_p99_seconds=60.0, kv_cache_usage=0.85, preemption_rate=0.02)


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    for name, seconds in (
        ("SHORTEST_STEP", 0.6),
        ("SHORTEST_WARM_UP", 0.2),
        ("FEWEST_SECONDS", 0.4),
        ("WATCH_SECONDS", 0.1),
    ):
        monkeypatch.setattr(ramp_module, name, seconds)
    monkeypatch.setattr(ramp_module, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(ramp_search, "GROWTH", 1.0)  # a busy machine makes a few requests wait


def run(url, workload, rates=(30.0, 60.0), budget=120.0, **more):
    return asyncio.run(run_ramp(url, workload, OBJECTIVES, RampOptions(rates, budget_seconds=budget), **more))


def test_fixed_rates_that_are_all_sustained(stub, workload):
    seen = []
    found = run(stub.url, workload, on_step=seen.append)
    assert [step.rate for step in found.steps] == [30.0, 60.0]
    assert list(found.steps) == seen
    assert [step.outcome.limited_by for step in found.steps] == ["", ""]
    assert [step.outcome.attained for step in found.steps] == [1.0, 1.0]
    assert (found.ceiling, found.limited_by) == (None, "")
    assert "the ceiling was not reached" in found.sentence
    assert list(found.document()) == [
        "steps", "ceiling_requests_per_second", "ceiling_interval", "goodput", "limited_by", "sentence",
    ]  # fmt: skip
    assert list(found.document()["steps"][0]) == [
        "rate", "sent", "completed", "failed", "ttft_seconds", "itl_seconds", "e2e_seconds", "tokens_per_second",
        "kv_cache_usage", "preemptions", "waiting", "attained", "ok",
    ]  # fmt: skip
    assert found.steps[0].kv_cache_usage is None, "the server reports no metrics"


def test_server_that_begins_to_fail_limits_the_rate(stub, workload):
    def later(step: RampStep) -> None:
        stub.status = 500

    found = run(stub.url, workload, on_step=later)
    assert [step.outcome.ok for step in found.steps] == [True, False]
    assert (found.ceiling, found.limited_by) == (30.0, "failures")
    assert found.steps[1].failed
    assert found.goodput == pytest.approx(30.0)
    assert "requests failed" in found.sentence
    assert "between 30 req/s and 60 req/s" in found.sentence


def test_stopped_ramp_keeps_completed_steps(stub, workload):
    stop = asyncio.Event()
    found = run(stub.url, workload, stop=stop, on_step=lambda _: stop.set())
    assert len(found.steps) == 1
    assert not found.complete
    assert found.sentence.startswith("Canceled.")
    deadline = time.monotonic() + 60  # the stub notices closed connections in its own thread
    while stub.in_flight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert stub.in_flight == 0, "nothing is left on the server"


def test_ramp_time_is_limited(stub, workload):
    found = run(stub.url, workload, rates=(30.0,) * 50, budget=2.5)
    assert len(found.steps) < 50
    assert found.sentence.startswith("Out of time.")


def test_server_that_answers_nothing(stub, workload, free_port):
    stub.status = 503
    with pytest.raises(LoadError, match="answers no request"):
        run(stub.url, workload)
    with pytest.raises(LoadError, match="nothing answers"):
        run(f"http://127.0.0.1:{free_port}", workload)
    assert asyncio.run(traffic_of_others(stub.url, None)) == ""


def step(rate, reason="", goodput=None):
    latency = Latency(count=10, p99=1.4)
    return RampStep(
        StepOutcome(rate, not reason, reason), 10, 10, 0, latency, latency, latency, 1.0, 0.9, 3.0, 0.0, goodput
    )


@pytest.mark.parametrize(
    ("steps", "more", "ceiling", "words"),
    [
        ([], {"ended": "canceled"}, None, "Canceled. No rate was measured"),
        (
            [step(2.0, "ttft_p99_seconds")],
            {},
            None,
            "did not hold at any rate; at the lowest, 2 req/s, TTFT p99 was 1.4s",
        ),
        (
            [step(2.0, "queue"), step(4.0)],
            {"fixed": True},
            None,
            "did not hold reliably at any rate; at the lowest, 2 req/s, the queue kept growing",
        ),
        (
            [step(2.0), step(4.0, "kv_cache_usage")],
            {},
            2.0,
            "KV cache usage was 90% (limit 85%). The ceiling lies between",
        ),
        ([step(2.0), step(4.0, "preemption_rate")], {"fixed": True}, 2.0, "3 preemptions came"),
        ([step(2.0), step(4.0, "failures")], {"ended": "server"}, 2.0, "The server stopped answering"),
        ([step(2.0)], {"ended": "server"}, None, "The server stopped answering"),
        (
            [step(2.0), step(2.05, "queue")],
            {"out_of_time": True},
            2.0,
            "Out of time. The objectives hold up to 2 req/s",
        ),
    ],
)
def test_ramp_conclusion(steps, more, ceiling, words):
    found = conclude(steps, OBJECTIVES, **more)
    assert found.ceiling == ceiling
    assert (found.interval is None) == (ceiling is None)
    assert words in found.sentence
    assert (found.limited_by == "server") == (more.get("ended") == "server")
    assert bool(found.limited_by) == (more.get("ended") == "server" or any(not one.outcome.ok for one in steps))

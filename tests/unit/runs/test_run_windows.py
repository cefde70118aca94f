"""Minutes aggregated from samples: rates, means and quantiles, over gaps, idle times and restarts."""

from __future__ import annotations

import pytest

from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_console.runs.windows import Windows

INF = float("inf")


def poll(at, finished=0.0, running=2.0, waiting=1.0, tokens=0.0, preempted=0.0, usage=0.5):
    """One sample; each request had a TTFT of 0.4 s, 300 prompt tokens and 40 output tokens."""
    counts = (0.0, finished, finished)
    engine = EngineSample(
        requests_running=running,
        requests_waiting=waiting,
        kv_cache_usage=usage,
        preemptions_total=preempted,
        prefix_cache_queries_total=finished * 300,
        prefix_cache_hits_total=finished * 75,
        prompt_tokens_total=finished * 300,
        generation_tokens_total=tokens,
        requests_finished_total=finished,
        histograms={
            "ttft": Histogram((0.1, 0.5, INF), counts, finished * 0.4),
            "prompt_tokens": Histogram((100.0, 500.0, INF), counts, finished * 300),
            "generation_tokens": Histogram((10.0, 50.0, INF), counts, finished * 40),
        },
    )
    return Sample(at, {"0": engine})


def feed(windows, polls):
    return [window for sample in polls if (window := windows.append(sample)) is not None]


def test_minute_is_summarized():
    polls = [poll(1000.0 + s, finished=2.0 * s, tokens=80.0 * s, preempted=s / 20) for s in range(61)]
    polls[-1] = poll(1060.0, finished=120.0, tokens=4800.0, preempted=3.0, running=5.0)
    (window,) = feed(Windows(), polls)
    assert window.at == 1000.0
    assert window.seconds == pytest.approx(60, abs=1)
    figures = window.figures
    assert figures["requests"] == pytest.approx(120, abs=2)
    assert figures["generation_tokens_per_second"] == pytest.approx(80)
    assert figures["prompt_tokens_per_second"] == pytest.approx(600)
    assert figures["in_flight"] == pytest.approx(3, abs=0.1)
    assert figures["preemptions_per_minute"] == pytest.approx(3, abs=0.1)
    assert figures["preemption_share"] == pytest.approx(3 / 120, abs=0.001)
    assert figures["hit_rate"] == pytest.approx(0.25)
    assert figures["ttft_mean"] == pytest.approx(0.4)
    assert 0.1 < figures["ttft_p50"] < figures["ttft_p99"] <= 0.5
    assert figures["prompt_length_mean"] == pytest.approx(300)
    assert figures["answer_length_p95"] == pytest.approx(48)
    assert "itl_mean" not in figures, "not reported is not zero"


def test_arrived_requests_count_while_they_wait():
    polls = [poll(float(s), finished=float(s), tokens=s, waiting=3.0 * s) for s in range(61)]
    (window,) = feed(Windows(), polls)
    assert window.figures["requests_per_second"] == pytest.approx(4)
    assert window.figures["requests"] / window.seconds == pytest.approx(1)


def test_idle_minutes_are_excluded_but_not_a_hang():
    idle = [poll(float(s), running=0.0, waiting=0.0) for s in range(200)]
    hung = [poll(float(s), finished=5.0, running=3.0) for s in range(61)]
    assert feed(Windows(), idle) == []
    (window,) = feed(Windows(), hung)
    assert window.figures["generation_tokens_per_second"] == 0


def test_gap_or_clock_set_back_restarts_the_window():
    windows = Windows(10)
    polls = [poll(float(s), finished=s) for s in (0, 5, 300, 305, 310, 100, 105, 110)]
    found = feed(windows, polls)
    assert [(window.at, window.seconds) for window in found] == [(300.0, 10.0), (100.0, 10.0)]


def test_restarted_engine_counts_from_zero():
    polls = [poll(float(s), finished=50.0 + s if s < 30 else s - 30.0) for s in range(61)]
    (window,) = feed(Windows(), polls)
    assert window.figures["requests"] == pytest.approx(30, abs=2)


def test_quantile_in_the_first_bucket_is_stored_as_its_bound():
    counts = (30.0, 30.0, 30.0)
    histograms = {"e2e": Histogram((0.3, 0.5, INF), counts, 30 * 0.02)}
    idle = EngineSample(requests_running=1.0, requests_finished_total=0.0)
    busy = EngineSample(requests_running=1.0, requests_finished_total=30.0, histograms=histograms)
    (window,) = feed(Windows(), [Sample(0.0, {"0": idle}), Sample(60.0, {"0": busy})])
    assert window.figures["e2e_mean"] == pytest.approx(0.02)
    assert "e2e_p99" not in window.figures
    assert window.figures["e2e_p99_below"] == 0.3
    assert window.quantile("e2e_p99").text == "<300ms"
    assert window.quantile("ttft_p99") is None

"""The JSON contract of ``metrics``."""

from __future__ import annotations

import json

import pytest

from vllm_console.metrics.parse import parse_metrics
from vllm_console.metrics.window import metrics_document

KEYS = {
    "requests_running",
    "requests_waiting",
    "kv_cache_usage",
    "preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "kv_cache_tokens",
    "ttft_seconds",
    "itl_seconds",
    "e2e_seconds",
    "queue_seconds",
    "prefill_seconds",
    "decode_seconds",
}

LATENCY_KEYS = {"count", "sum", "mean", *(f"{part}{end}" for part in ("p50", "p90", "p99") for end in
                                          ("", "_below", "_above"))}  # fmt: skip


def test_document_of_two_engines(body):
    text = body(
        engines=[{"running": 1.0, "usage": 0.2, "ttft": [0.05]}, {"running": 2.0, "usage": 0.6, "ttft": [0.05, 20.0]}]
    )
    document = json.loads(json.dumps(metrics_document(parse_metrics(text, 1.0)), allow_nan=False))
    assert set(document) == KEYS | {"engines", "responses"}
    assert document["responses"] == {"ok": 27, "refused": 0, "failed": 0, "unauthorized": None}
    assert document["requests_running"] == 3
    assert document["kv_cache_usage"] == pytest.approx(0.4)
    assert document["preemptions_total"] == 14
    assert document["kv_cache_tokens"] == 1600
    assert document["ttft_seconds"]["count"] == 3
    assert document["ttft_seconds"]["sum"] == pytest.approx(20.1)
    assert document["ttft_seconds"]["mean"] == pytest.approx(6.7)
    assert document["ttft_seconds"]["p50"] == pytest.approx(0.055)
    assert (document["ttft_seconds"]["p50_above"], document["ttft_seconds"]["p50_below"]) == (0.04, 0.06)
    assert (document["ttft_seconds"]["p99"], document["ttft_seconds"]["p99_below"]) == (None, None)
    assert document["ttft_seconds"]["p99_above"] == 10.0, "in the open bucket only that is known"
    assert set(document["ttft_seconds"]) == LATENCY_KEYS
    assert list(document["engines"]) == ["0", "1"]
    assert set(document["engines"]["0"]) == KEYS
    assert document["engines"]["1"]["ttft_seconds"]["count"] == 2


def test_unreported_is_null():
    document = metrics_document(parse_metrics('vllm:num_requests_running{engine="0"} 0\n', 1.0))
    assert document["requests_running"] == 0
    assert [key for key in KEYS if document[key] is None] == [key for key in KEYS if key != "requests_running"]


def test_no_requests_have_no_quantiles(body):
    document = metrics_document(parse_metrics(body(engines=[{"ttft": []}]), 1.0))
    assert document["ttft_seconds"] == dict.fromkeys(LATENCY_KEYS) | {"count": 0, "sum": 0.0}


def test_quantile_in_the_first_bucket_is_null_with_a_bound(body):
    """vLLM's first bucket of queue times ends at 0.3 s: 50 µs were once shown as 150, 270 and 297 ms."""
    text = body(engines=[{"ttft": [0.036] * 20, "request_queue_time": [0.00005] * 20}])
    document = metrics_document(parse_metrics(text, 1.0))
    queue, ttft = document["queue_seconds"], document["ttft_seconds"]
    assert queue["mean"] == pytest.approx(0.00005)
    for part in ("p50", "p90", "p99"):
        assert (queue[part], queue[f"{part}_below"], queue[f"{part}_above"]) == (None, 0.3, None)
        assert 0.02 < ttft[part] <= 0.04


def test_document_without_engines():
    document = metrics_document(parse_metrics("process_open_fds 4\n", 1.0))
    assert document["engines"] == {}
    assert document["kv_cache_usage"] is None

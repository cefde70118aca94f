"""The JSON contract of ``metrics``."""

from __future__ import annotations

import json

import pytest

from vllm_console.telemetry.document import metrics_document
from vllm_console.telemetry.parse import parse

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


def test_two_engines(body):
    text = body(
        engines=[{"running": 1.0, "usage": 0.2, "ttft": [0.05]}, {"running": 2.0, "usage": 0.6, "ttft": [0.05, 20.0]}]
    )
    document = json.loads(json.dumps(metrics_document(parse(text, 1.0)), allow_nan=False))
    assert set(document) == KEYS | {"engines"}
    assert document["requests_running"] == 3
    assert document["kv_cache_usage"] == pytest.approx(0.4)
    assert document["preemptions_total"] == 14
    assert document["kv_cache_tokens"] == 1600
    assert document["ttft_seconds"]["count"] == 3
    assert document["ttft_seconds"]["sum"] == pytest.approx(20.1)
    assert document["ttft_seconds"]["p99"] == 10.0
    assert set(document["ttft_seconds"]) == {"count", "sum", "p50", "p90", "p99"}
    assert list(document["engines"]) == ["0", "1"]
    assert set(document["engines"]["0"]) == KEYS
    assert document["engines"]["1"]["ttft_seconds"]["count"] == 2


def test_not_reported_is_null():
    document = metrics_document(parse('vllm:num_requests_running{engine="0"} 0\n', 1.0))
    assert document["requests_running"] == 0
    assert [key for key in KEYS if document[key] is None] == [key for key in KEYS if key != "requests_running"]


def test_no_requests_yet_have_no_quantiles(body):
    document = metrics_document(parse(body(engines=[{"ttft": []}]), 1.0))
    assert document["ttft_seconds"] == {"count": 0, "sum": 0.0, "p50": None, "p90": None, "p99": None}


def test_no_engine_at_all():
    document = metrics_document(parse("process_open_fds 4\n", 1.0))
    assert document["engines"] == {}
    assert document["kv_cache_usage"] is None

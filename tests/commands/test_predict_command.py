"""predict: from a simulated server's traffic to a prediction, the restart and its score. The JSON is a contract."""

from __future__ import annotations

import json
import time

from fakes.commands import ASK_SECONDS, PATIENCE
from vllm_console.prediction.score import LEAST_DRIFT

LATENCIES = ("ttft_seconds", "itl_seconds", "e2e_seconds")
FIGURES = {*LATENCIES, "tokens_per_second", "requests_waiting", "preemptions_per_minute", "kv_cache_usage"}
REQUESTS = 110


def send(program):
    """Send the same requests each time; return when all are on disk. The probe writes four times per second."""
    program.json("load", "chat", "--requests", str(REQUESTS), "--rate", "20", "--output-p95", "120")
    deadline = time.monotonic() + PATIENCE
    while len(program.json("requests", "chat")) < REQUESTS:
        assert time.monotonic() < deadline
        time.sleep(ASK_SECONDS)


def predict(program, *words):
    done = program("predict", "chat", *words, "--json")
    document = json.loads(done.stdout)
    known = document["predicted"]["ttft_seconds"]["p50"]["value"] is not None
    assert done.returncode == (0 if known else 1)
    assert known or document["outside"]
    return document


def test_change_is_predicted_applied_and_scored(program):
    program.json("start", "chatbot", "--engine", "simulated", "--name", "chat", "--wait", "--set", "max-num-seqs=64",
                 "--env", "SIMULATED_SPEED=8")  # fmt: skip
    few = program("predict", "chat", "--set", "max-num-seqs=16")
    assert few.returncode == 1
    assert "a prediction needs at least 30" in few.stderr
    send(program)

    document = predict(program, "--set", "max-num-seqs=16")
    assert set(document) == {"changed", "now", "predicted", "evidence", "track_record", "outside"}
    assert document["changed"] == [{"flag": "max-num-seqs", "before": 64, "after": 16}]
    assert document["evidence"]["requests"] == REQUESTS
    assert document["track_record"] == {"predictions": 0, "median_error": None, "covered": None}
    for side in ("now", "predicted"):
        assert set(document[side]) == FIGURES
        for latency in LATENCIES:
            assert set(document[side][latency]) == {"p50", "p90", "p99", "mean"}
    assert document["now"]["ttft_seconds"]["p99"]["value"] is None, "110 requests are not enough"
    if document["outside"] is None:  # a busy machine distorts the engine's timing
        for latency in LATENCIES:
            estimate = document["predicted"][latency]["p50"]
            assert 0 < estimate["low"] <= estimate["value"] <= estimate["high"]

    unknown = predict(program, "--set", "async-scheduling=true")
    assert "async-scheduling" in unknown["outside"]
    assert unknown["predicted"]["tokens_per_second"] is None
    assert unknown["now"]["tokens_per_second"] > 0
    nothing = program("predict", "chat", "--set", "max-num-seqs=64")
    assert nothing.returncode == 2
    assert "nothing would change" in nothing.stderr
    tiny = program("predict", "chat", "--traffic-scale", "1e-300")
    assert tiny.returncode == 2, "arrivals that far apart are indistinguishable"
    assert "a factor from 0.01 to 20" in tiny.stderr
    refused = program("predict", "chat", "--set", "max-num-seqs=0").stdout
    assert "will not start: --max-num-seqs must be 1 or more" in refused
    assert "It would not start" not in refused, "it is said once"
    text = program("predict", "chat", "--traffic-scale", "1.2").stdout
    assert text.startswith("chat: traffic 1.0 → 1.2\n")
    assert f"from {REQUESTS} requests" in text
    assert "PREDICTED" not in text or "–: p99 needs 500 requests." in text

    program.json("restart", "chat", "--set", "max-num-seqs=16", "--wait")
    send(program)
    record = predict(program, "--set", "max-num-seqs=64")["track_record"]
    assert record["predictions"] == (0 if document["outside"] else 1)
    if record["predictions"]:
        assert 0 <= record["covered"] <= 1
        assert record["median_error"] >= 0

    outcome = program.json("compare", "chat@1", "chat@2")["prediction"]
    assert outcome is not None or document["predicted"]["ttft_seconds"]["p50"]["value"] is None, document
    if outcome and outcome["same_traffic"] and not document["outside"]:
        one = next(one for one in outcome["figures"] if one["name"] == "itl_p50")
        assert one["predicted"] == document["predicted"]["itl_seconds"]["p50"]["value"]
        assert one["within"] == (one["low"] <= one["measured"] <= one["high"])
        named = "(machine or engine)" in program("compare", "chat@1", "chat@2").stdout
        assert named == (abs(outcome["drift"]) >= LEAST_DRIFT)

    program.json("stop", "chat")
    stopped = program("predict", "chat", "--set", "max-num-seqs=64")
    assert stopped.returncode == 1
    assert "a prediction needs a server that is up" in stopped.stderr

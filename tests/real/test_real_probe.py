"""The probe in real vLLM: its records agree with ``/metrics`` and with what a client sends, counts and measures."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest

from vllm_console.history.probe_records import EngineStep, FinishedRequest, FirstToken, ProbeReader, Resumed
from vllm_launchers.probe.environment import PROBE

if TYPE_CHECKING:
    from conftest import RealServer
else:
    RealServer = Any

pytestmark = pytest.mark.real

CLOCK = 0.01
"""Allowed difference between times on two clocks, in seconds."""

SLACK = 0.1
"""Allowed difference between the output delays of a request's first and last token, in seconds."""

LENGTHS = ((40, 12), (200, 30), (200, 5), (64, 1))
"""Prompt tokens and tokens to generate; the third shares a prefix with the second."""


class Sent(NamedTuple):
    """A request as its client saw it."""

    id: str
    at: float
    first: float
    whole: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Records:
    """What the probe adds to a folder."""

    def __init__(self, folder: Path) -> None:
        self._reader = ProbeReader(folder / PROBE)
        self._first_tokens: list[FirstToken] = []
        self._reader.added()
        self._reader.resumed()

    def resumed(self) -> list[Resumed]:
        """New records of resumed requests, which are written after the requests."""
        return self._reader.resumed()

    def first_tokens(self) -> list[FirstToken]:
        """The ones read with the newest requests; they are written after the steps and before the requests."""
        return self._first_tokens

    def after(self, count: int) -> tuple[list[EngineStep], list[FinishedRequest]]:
        """New steps and ``count`` new requests, once they are on disk. Requests are written last."""
        steps: list[EngineStep] = []
        requests: list[FinishedRequest] = []
        self._first_tokens = []
        deadline = time.monotonic() + 30
        complete = False
        while not complete:
            assert time.monotonic() < deadline, f"{len(requests)} of {count} requests"
            time.sleep(0.05)
            complete = len(requests) >= count  # then one more read finds everything written before them
            added = self._reader.added()
            steps += added.steps
            requests += added.requests
            self._first_tokens += added.first_tokens
        return steps, requests


@pytest.fixture
def records(shared_server: RealServer, probed_folder: Path) -> Records:
    return Records(probed_folder)


def send(server: RealServer, tokens: Sequence[int], length: int) -> Sent:
    body = {
        "model": "tiny", "prompt": list(tokens), "max_tokens": length, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    at, first = time.time(), 0.0
    name, usage = "", {}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.time() - at
            chunk = json.loads(line.removeprefix("data: "))
            name, usage = chunk["id"], chunk.get("usage") or usage
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") or 0
    return Sent(name, at, first, time.time() - at, usage["prompt_tokens"], usage["completion_tokens"], cached)


def counter(server: RealServer, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(float(value) for value in re.findall(rf"^vllm:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def test_records_match_client(shared_server: RealServer, records: Records) -> None:
    names = ("prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total", "prompt_tokens_total",
             "time_to_first_token_seconds_sum", "inter_token_latency_seconds_count")  # fmt: skip
    before = [counter(shared_server, name) for name in names]
    sent = [send(shared_server, [5 + at % 300 for at in range(prompt)], length) for prompt, length in LENGTHS]
    queries, hits, generated, prompts, first_seconds, intervals = (
        counter(shared_server, name) - value for name, value in zip(names, before, strict=True)
    )
    steps, requests = records.after(len(LENGTHS))

    assert len(requests) == len(sent)
    for seen, request in zip(sent, requests, strict=True):
        assert request.id == f"{seen.id}-0"
        assert (request.prompt_tokens, request.output_tokens) == (seen.prompt_tokens, seen.output_tokens)
        assert (request.finish_reason, request.preemptions, request.engine) == ("length", 0, 0)
        assert seen.at - CLOCK <= request.arrived_at <= seen.at + seen.first
        assert request.e2e_seconds is not None
        assert request.ttft_seconds is not None
        # The server's times are within the client's: a busy machine delays the client, not the record.
        assert request.e2e_seconds <= seen.whole + CLOCK
        assert request.finished_at <= seen.at + seen.whole + CLOCK
        assert 0 < request.ttft_seconds <= seen.first + SLACK
        parts = (request.queue_seconds, request.prefill_seconds, request.decode_seconds)
        assert all(part is not None and part >= 0 for part in parts)
        assert sum(part or 0.0 for part in parts) <= request.e2e_seconds
    first_tokens = [one.seconds for one in records.first_tokens()]
    assert (len(first_tokens), sum(first_tokens)) == (len(sent), pytest.approx(first_seconds, abs=1e-6))
    assert sum(step.intervals for step in steps) == intervals
    assert [request.cached_tokens for request in requests] == [0, 32, 192, 32], "whole blocks of 32 tokens"

    assert (
        sum(request.cached_tokens or 0 for request in requests) == sum(step.cache_hits or 0 for step in steps) == hits
    )
    assert sum(step.cache_queries or 0 for step in steps) == queries
    assert sum(step.prompt_tokens or 0 for step in steps) == prompts == sum(prompt for prompt, _ in LENGTHS)
    assert sum(step.generation_tokens or 0 for step in steps) == generated == sum(length for _, length in LENGTHS)
    assert sum(step.intervals for step in steps) == sum(length - 1 for _, length in LENGTHS)
    assert max(step.running or 0 for step in steps) == 1
    assert max(step.kv_usage or 0.0 for step in steps) > 0
    assert {step.dropped for step in steps} == {0}
    intervals = [step.longest_interval for step in steps if step.longest_interval is not None]
    assert sum(intervals) == pytest.approx(sum(request.decode_seconds or 0.0 for request in requests), rel=1e-3)


def test_records_of_concurrent_requests_and_of_preemption(shared_server: RealServer, records: Records) -> None:
    before = counter(shared_server, "num_preemptions_total")
    prompts = [[3 + (at * 7 + which) % 300 for at in range(100)] for which in range(8)]
    body = {"model": "tiny", "prompt": prompts, "max_tokens": 300, "ignore_eos": True}
    answer = httpx.post(f"{shared_server.url}/v1/completions", json=body, timeout=120, trust_env=False).json()
    preempted = counter(shared_server, "num_preemptions_total") - before
    steps, requests = records.after(len(prompts))
    assert {request.id for request in requests} == {f"{answer['id']}-{place}" for place in range(len(prompts))}
    assert all((request.prompt_tokens, request.output_tokens) == (100, 300) for request in requests)
    assert preempted > 0, "40 blocks of 32 tokens are too few for 8 requests of 400"
    assert sum(request.preemptions or 0 for request in requests) == preempted
    assert sum(step.preempted or 0 for step in steps) == preempted
    deadline = time.monotonic() + 30
    resumed: list[Resumed] = []
    while sum(one.requests for one in resumed) < preempted:
        assert time.monotonic() < deadline, "all of them were resumed, for they were answered in full"
        resumed += records.resumed()
    assert sum(one.requests for one in resumed) == preempted
    assert all(100 * one.requests <= one.tokens <= 400 * one.requests for one in resumed), "prompt and output so far"
    assert all(0 <= one.cached_tokens < one.tokens for one in resumed)
    assert max(step.running or 0 for step in steps) > 1
    assert max(step.waiting or 0 for step in steps) > 0

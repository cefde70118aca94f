"""Recorded requests are sent again with the same arrival times, lengths and shared prefixes."""

from __future__ import annotations

import tracemalloc
from itertools import takewhile

from vllm_console.history.probe_records import FinishedRequest
from vllm_console.load.shape import RecordedTraffic


def request(at, prompt, output, cached=None):
    return FinishedRequest("r", at, at + 1.0, 0, prompt, output, cached, 0.1, 0.1, 0.7, 1.0, 0, "stop", 0)


def shared(one, other):
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def test_arrivals_and_lengths_are_those_recorded():
    traffic = RecordedTraffic([request(105.0, 30, 7), request(100.0, 10, 5)], speed=2.0)
    sent = list(traffic.stream(range(1000, 2000)))
    assert [(one.at, len(one.prompt), one.output_tokens) for one in sent] == [(0.0, 10, 5), (2.5, 30, 7)]
    assert all(1000 <= token < 2000 for one in sent for token in one.prompt)
    assert "2 recorded requests" in traffic.words()
    assert "2 times as fast" in traffic.words()


def test_prompt_shares_its_cached_prefix_with_an_earlier_one():
    lengths = [(200, 0), (100, 96), (500, 0), (400, 320), (50, None)]
    traffic = RecordedTraffic([request(float(at), length, 5, cached) for at, (length, cached) in enumerate(lengths)])
    prompts = [one.prompt for one in traffic.stream(range(200, 2000))]
    assert shared(prompts[1], prompts[0]) == 96
    assert shared(prompts[3], prompts[2]) == 320
    assert shared(prompts[2], prompts[0]) < 8
    assert shared(prompts[4], prompts[3]) < 8
    assert prompts == [one.prompt for one in traffic.stream(range(200, 2000))]


def test_memory_of_earlier_prompts_is_a_byte_per_token():
    count, length = 200, 10_000
    traffic = RecordedTraffic([request(float(at), length, 5) for at in range(count)])
    tracemalloc.start()
    try:
        assert sum(1 for _ in traffic.stream()) == count
        assert tracemalloc.get_traced_memory()[1] < 2 * count * length
    finally:
        tracemalloc.stop()


def test_unknown_prefix_is_new_and_lengths_fit_the_context():
    traffic = RecordedTraffic([request(1.0, 900, 500, 640)])
    (sent,) = traffic.stream((), 512)
    assert (len(sent.prompt), sent.output_tokens) == (256, 256)
    assert traffic.due == [0.0]

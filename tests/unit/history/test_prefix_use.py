"""Hits by prompt length, and hits of resumed requests, from a probe's records."""

from __future__ import annotations

from vllm_console.history.prefix_use import StillCached, prefix_use
from vllm_console.history.probe_records import FinishedRequest, Resumed


def request(prompt: int | None, cached: int | None, output: int | None = 8) -> FinishedRequest:
    return FinishedRequest("r", 0.0, 1.0, 0, prompt, output, cached, 0.1, 0.1, 0.7, 1.0, 0, "stop", 0)


def test_hits_are_counted_by_prompt_length() -> None:
    found = prefix_use([request(100, 0), request(127, 64), request(128, 96), request(1024, 0), request(2047, 1024)])
    assert [(one.least, one.most, one.requests, one.hits) for one in found.classes] == [
        (1, 127, 2, 1),
        (128, 255, 1, 1),
        (1024, 2047, 2, 1),
    ]
    assert found.classes[0].hit_rate == 64 / 227
    assert found.classes[2].longest_hit == 1024
    assert (found.requests, found.hits, found.prompt_tokens, found.cached_tokens) == (5, 3, 3426, 1184)
    assert found.hit_rate == 1184 / 3426


def test_unknown_values_are_in_no_class() -> None:
    found = prefix_use([request(100, None), request(None, 5), request(300, 0, output=0)])
    assert (found.requests, found.unknown, found.hit_rate) == (0, 3, None)
    assert found.resumed is None


def test_resumed_requests_are_summed() -> None:
    found = prefix_use((), [Resumed(1.0, 0, 2, 300, 64, 0), Resumed(2.0, 1, 1, 100, 0, 0)])
    assert found.resumed == StillCached(3, 400, 64)

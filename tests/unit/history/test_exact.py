"""Exact quantiles from probe records, and when the records are not sufficient."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_console.history.exact import (
    ProbeRecords,
    exact_latencies,
    exact_quantiles,
    interval_ends,
    quantiles_between,
    recorded_lengths,
)
from vllm_console.history.probe_records import EngineStep, FinishedRequest, FirstToken, Interval

START, END = 1000.0, 1060.0


def step(at: float, count: int = 10, shortest: float = 0.02, longest: float = 0.02, dropped: int = 0) -> EngineStep:
    known: tuple[Any, ...] = (4, 0, 0.5, None, 0, 0, 0, count, 0, count, shortest, longest, None, None, None)
    return EngineStep._make((at, 0, *known, dropped))


def request(at: float, e2e: float) -> FinishedRequest:
    return FinishedRequest("r", at - e2e, at, 0, 100, 20, 0, 0.1, 0.2, e2e - 0.3, e2e, 0, "stop", 0)


def recorded(**more: Any) -> ProbeRecords:
    """A minute with one step, one first token and one request per second, and one more second before and after it."""
    moments = [START - 1 + second + 0.25 for second in range(63)]
    values: dict[str, Any] = {
        "steps": [step(at) for at in moments],
        "first_tokens": [FirstToken(at, 0, 0.1 * number, 0) for number, at in enumerate(moments)],
        "requests": [request(at, 1.0 + number) for number, at in enumerate(moments)],
    }
    return ProbeRecords(**{**values, **more})


COUNTED = {"ttft": 60.0, "itl": 600.0, "e2e": 60.0, "queue": 60.0, "prefill": 60.0, "decode": 60.0}


def test_quantiles_of_all_values_in_the_span() -> None:
    found = exact_latencies(recorded(), START, END, COUNTED)
    assert set(found) == set(COUNTED)
    assert all(one.exact for one in found.values())
    e2e, itl, ttft = found["e2e"], found["itl"], found["ttft"]
    assert [one.value for one in (e2e.p50, e2e.p90, e2e.p99) if one] == [31.0, 55.0, 61.0]
    assert (e2e.count, e2e.mean) == (60.0, pytest.approx(31.5))
    assert (itl.count, itl.p99 and itl.p99.value, itl.mean) == (600.0, 0.02, pytest.approx(0.02))
    assert ttft.p50
    assert ttft.p50.value == pytest.approx(3.0)
    assert ttft.p50.text == "3.0s", "neither rough nor a bound"


@pytest.mark.parametrize(
    ("more", "counted", "left"),
    [
        ({}, {"ttft": 62.0}, {"itl", "e2e", "queue", "prefill", "decode"}),  # two more: boundaries explain only one
        ({}, {"itl": 580.0}, {"ttft", "e2e", "queue", "prefill", "decode"}),
        ({"first_tokens": []}, {}, {"itl", "e2e", "queue", "prefill", "decode"}),  # a probe without this kind of record
        ({"writers": 2}, {}, set()),
        ({"writers": 0}, {}, set()),
        ({"steps": [step(START, dropped=1), step(END, dropped=2)]}, {}, set()),
        ({}, {"ttft": 61.0}, set(COUNTED)),  # one was counted while the server still responded
        ({}, {"e2e": 0.0}, {"ttft", "itl", "queue", "prefill", "decode"}),
    ],
)
def test_incomplete_records_are_not_exact(more: dict[str, Any], counted: dict[str, float], left: set[str]) -> None:
    assert set(exact_latencies(recorded(**more), START, END, {**COUNTED, **counted})) == left


@pytest.mark.parametrize(
    ("requests", "counted", "known"),
    [
        (recorded().requests, 60.0, True),
        (recorded().requests, 61.0, True),  # one was counted while the server still responded
        (recorded().requests, 62.0, False),
        ([request(at, 1.0)._replace(prompt_tokens=None) for at in (1001.0, 1002.0)], 2.0, False),
        ((), 0.0, False),
    ],
)
def test_lengths_are_known_if_each_counted_request_is_recorded(requests: Any, counted: float, known: bool) -> None:
    found = recorded_lengths(requests, START, END, {"prompt_tokens": counted})
    assert found == ({"prompt_tokens": [100] * 60} if known else {})


def test_requests_without_a_token_are_in_no_later_stage() -> None:
    never = request(START + 5, 2.0)._replace(prefill_seconds=None, decode_seconds=None)
    found = exact_latencies(ProbeRecords(requests=[never]), START, END, {"e2e": 1.0, "prefill": 1.0})
    assert set(found) == {"e2e"}


def intervals_of(steps: list[EngineStep], *intervals: Interval) -> Any:
    return quantiles_between(*interval_ends(steps, intervals))


def test_intervals_that_differ_within_a_step() -> None:
    even = [step(START + at) for at in range(100)]
    mixed = step(START + 200, 10, 0.02, 5.0)
    assert intervals_of([*even, mixed]).p99.value == 0.02, "nine of a thousand cannot move it"
    many = [mixed._replace(at=START + 200 + at) for at in range(10)]
    assert intervals_of([*even, *many]) is None, "ninety can"
    known = [
        Interval(one.at, 0, seconds, times, 0) for one in many for seconds, times in ((0.02, 8), (1.0, 1), (5.0, 1))
    ]
    found = intervals_of([*even, *many], *known)
    assert (found.p50.value, found.p99.value, found.count) == (0.02, 1.0, 1100.0)


def test_no_values_have_no_quantiles() -> None:
    assert exact_quantiles([]) is None
    assert quantiles_between([], []) is None

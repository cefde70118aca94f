"""The first requests of a run without warm-up are recognized and excluded from findings and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from vllm_console.diagnosis.finding import Severity
from vllm_console.diagnosis.live.findings import findings
from vllm_console.diagnosis.live.rule import Evidence
from vllm_console.history.frames import Frames
from vllm_console.metrics.sample import EngineSample, Histogram, Sample
from vllm_console.metrics.window import MOST_SECONDS, FirstRequests, traffic
from vllm_console.runs.windows import Windows

BOUNDS = (1.0, 10.0, 100.0, math.inf)


def poll(at: float, *, ended: float | None = 0.0, tokens: float = 0.0, running: float = 0.0, slow: int = 0) -> Sample:
    """``slow`` requests had a TTFT of 40 s, all other finished ones half a second."""
    fast = max(0.0, (ended or 0.0) - slow)
    ttft = Histogram(BOUNDS, (fast, fast, fast + slow, fast + slow), 0.5 * fast + 40.0 * slow)
    engine = EngineSample(
        requests_running=running, requests_waiting=0.0, requests_finished_total=ended, generation_tokens_total=tokens,
        kv_cache_usage=0.1, histograms={"ttft": ttft},
    )  # fmt: skip
    return Sample(at, {"0": engine}, kv_cache_tokens=1000)


def compiling(waits: int = 40, after: int = 80) -> list[Sample]:
    """Two requests wait for their first token and end 5 s later; then ten requests per second follow."""
    polls = [poll(float(second)) for second in range(5)]
    polls += [poll(5.0 + second, running=2.0) for second in range(waits)]
    polls += [poll(5.0 + waits + second, tokens=2.0 + second, running=2.0, slow=2, ended=0.0) for second in range(5)]
    begin = 10.0 + waits
    return polls + [
        poll(begin + second, ended=2.0 + 10 * second, tokens=50.0 + 100 * second, running=2.0, slow=2)
        for second in range(after)
    ]


def test_comparison_begins_after_the_first_requests() -> None:
    windows = Windows()
    found = [window for sample in compiling() if (window := windows.append(sample)) is not None]
    assert [window.at for window in found] == [50.0]
    assert found[0].figures["ttft_mean"] == pytest.approx(0.5), "the two that waited 40 s are not in it"


def test_fast_first_token_is_treated_as_usual() -> None:
    polls = [poll(float(at), ended=float(at), tokens=float(at), running=1.0) for at in range(62)]
    assert traffic(polls) == polls
    first = FirstRequests()
    assert [first.add(sample) for sample in polls[:2]] == [False, True]


def test_warmed_up_run_has_no_first_requests_left() -> None:
    assert FirstRequests().add(poll(1.0, ended=1.0, tokens=2.0))
    assert FirstRequests().add(poll(1.0, ended=None)), "unreported values cannot be waited for"


def test_first_requests_end_after_a_limit() -> None:
    """A hanging request is not a compilation."""
    first = FirstRequests()
    assert not first.add(poll(0.0, running=1.0))
    assert not first.add(poll(MOST_SECONDS, running=1.0))
    assert first.add(poll(MOST_SECONDS + 1, running=1.0))


def judged(polls: Sequence[Sample]) -> list[str]:
    frames = Frames()
    for sample in polls:
        frames.append(sample)
    evidence = Evidence(now=polls[-1].at, ready_at=-60.0, frames=frames.since(-60.0))
    found = findings(evidence)
    if found and found[0].code == "first_request":
        assert found[0].severity is Severity.NOTE
        assert "kernels are compiled" in found[0].symptom
        assert found[0].fixes == ()
    return [finding.code for finding in found]


def test_first_requests_are_reported_without_a_fix() -> None:
    polls = compiling()
    assert judged(polls[:36]) == ["first_request"]
    after = [code for end in range(60, len(polls), 5) for code in judged(polls[:end])]
    assert set(after) <= {"healthy"}, "their TTFT of 40 s is not a finding"
    assert after

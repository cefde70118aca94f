"""Steps as chart points, and the exact points of latencies."""

from __future__ import annotations

import pytest

from vllm_console.history.probe_records import EngineStep, FirstToken
from vllm_console.history.step_timeline import StepTimeline, with_exact_points
from vllm_console.metrics.sample import Series


def step(
    at: float, interval: float = 0.02, prompts: int = 0, dropped: int = 0, context: int | None = None
) -> EngineStep:
    return EngineStep(at, 0, 4, 1, 0.5, None, 0, 0, prompts, 4, 0, 3, interval, interval, None, context, None, dropped)


def timeline(*rows: EngineStep | FirstToken) -> StepTimeline:
    found = StepTimeline(5.0, 4)
    for row in rows:
        found.append(row)
    return found


def test_points_are_means_and_quantiles_of_their_steps() -> None:
    series = timeline(
        step(101.0), step(106.0, 0.02), step(107.0, 0.04, prompts=120), FirstToken(107.0, 0, 0.7, 0), step(113.0)
    ).series(115.0)  # fmt: skip
    assert (series.end, series.step) == (115.0, 5.0)
    assert series.values["running"] == (None, 4.0, 4.0, 4.0)
    assert series.values["decode_tokens"] == (None, 4.0, 4.0, 4.0)
    assert series.values["prompt_tokens"] == (None, 0.0, 60.0, 0.0)
    assert series.values["step_p50"][2:] == (0.02, 0.02)
    assert series.values["step_p99"][2:] == (0.04, 0.02)
    assert series.values["ttft_p99"] == (None, None, 0.7, None)
    assert series.values["itl_p99"][2:] == (0.04, 0.02)


def test_computed_prompt_tokens_come_from_logged_details() -> None:
    assert timeline(step(101.0), step(106.0, prompts=900, context=256)).series(110.0).values["prompt_tokens"][-1] == 256
    cached = timeline(step(101.0), step(106.0)._replace(cache_hits=400), step(107.0, prompts=900)).series(110.0)
    assert cached.values["prompt_tokens"] == (None, None, 0.0, 250.0), "cached tokens are not computed"


def test_points_with_lost_records_have_no_latencies() -> None:
    values = timeline(step(101.0), step(106.0), step(112.0), step(116.0, dropped=3)).series(120.0).values
    assert values["itl_p99"] == (None, 0.02, None, None), "the first point may have begun before, and two lost records"
    assert values["running"] == (4.0, 4.0, 4.0, 4.0)


def test_exact_points_replace_estimates_and_are_marked() -> None:
    estimates = {"ttft_p50": (0.5, 0.5, 0.5), "ttft_p99": (0.9, 0.9, 0.9), "ttft_p99_bound": (1.0, 1.0, 1.0)}
    exact = {"ttft_p50": (None, 0.4, None, 0.3), "ttft_p99": (None, 0.8, None, 0.7)}
    found = with_exact_points(Series(115.0, 5.0, estimates), Series(120.0, 5.0, exact)).values
    assert found["ttft_p50"] == (0.5, 0.4, 0.5)
    assert found["ttft_p99"] == (0.9, 0.8, 0.9)
    assert found["ttft_p99_bound"] == (1.0, None, 1.0)
    assert found["ttft_exact"] == (None, 1.0, None)
    assert "itl_exact" not in found


def test_chart_without_exact_points_is_unchanged() -> None:
    series = Series(115.0, 5.0, {"ttft_p50": (0.5,), "ttft_p99": (0.9,)})
    assert with_exact_points(series, StepTimeline(5.0, 1).series(115.0)).values == series.values


@pytest.mark.parametrize("end", [115.0, 118.0])
def test_timeline_without_records_is_empty(end: float) -> None:
    assert set(StepTimeline(5.0, 2).series(end).values["running"]) == {None}

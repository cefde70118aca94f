"""Which prompt tokens slow steps computed, as recorded by a probe."""

from __future__ import annotations

import math

from vllm_console.history.probe_records import EngineStep
from vllm_console.history.slow_steps import slow_steps_of


def step(at: float, took: float, prompt: int = 0, engine: int = 0, context: int | None = None) -> EngineStep:
    return EngineStep(at, engine, 8, 0, 0.1, 0, 0, 0, prompt, 8, 0, 8, took, took, None, context, None, 0)


def test_only_slow_steps_count() -> None:
    steps = [step(1.0, 0.01), step(1.2, 0.2, 600), step(1.21, 0.01, 50), step(1.41, 0.2)]
    found = slow_steps_of(steps, 0.1, math.inf)
    assert found.prompt_tokens == (600, 0)
    assert (found.share_above(0), found.share_above(600), slow_steps_of((), 0.1, 1).share_above(0)) == (0.5, 0, 0)


def test_chunks_of_a_prompt_belong_to_the_steps_before_its_first_token() -> None:
    steps = [step(0.2 * at, 0.2, 1200 if at == 5 else 0) for at in range(1, 6)]
    assert slow_steps_of(steps, 0.1, 508).prompt_tokens == (0, 0, 200, 500, 500)


def test_reported_chunks_are_used_as_they_are() -> None:
    steps = [step(0.2, 0.2, context=500), step(0.4, 0.2, 700, context=200), step(0.6, 0.2, context=0)]
    assert slow_steps_of(steps, 0.1, 508).prompt_tokens == (500, 200, 0)


def test_a_step_recorded_by_several_api_servers_is_one() -> None:
    steps = [step(1.0, 0.01), step(1.2, 0.2), step(1.201, 0.2, 700), step(1.4, 0.199)]
    assert slow_steps_of(steps, 0.1, math.inf).prompt_tokens == (700, 0)


def test_engines_are_apart() -> None:
    steps = [step(1.2, 0.2, 600), step(1.2001, 0.2, engine=1)]
    assert slow_steps_of(steps, 0.1, math.inf).prompt_tokens == (600, 0)


def test_the_wait_of_a_preempted_request_is_no_slow_step() -> None:
    late = step(1.0, 0.01)._replace(longest_interval=3.0)
    assert slow_steps_of([late], 0.1, math.inf).prompt_tokens == ()

"""The stream of requests has the lengths, arrivals and shared prefixes that a workload says."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.load.shape import (
    FIRST_TOKEN_ID,
    Shape,
    arrivals,
    draw_length,
    fit,
    request_count,
    suggested_rate,
)
from vllm_launchers.presets.model import Workload

WORKLOAD = Workload(input_tokens_p95=1000, output_tokens_p95=200, prefix_reuse=0.6, concurrency=32)


def share_below(values: list[int], limit: int) -> float:
    return sum(value <= limit for value in values) / len(values)


def test_ninety_five_percent_of_the_lengths_are_within_the_given_percentile() -> None:
    rng = random.Random(1)
    lengths = [draw_length(rng, 1000) for _ in range(20_000)]
    assert share_below(lengths, 1000) == pytest.approx(0.95, abs=0.006)
    assert min(lengths) >= 1
    assert max(lengths) <= 3000


def test_arrivals_are_as_many_as_the_rate_says_and_spread_as_a_poisson_process() -> None:
    times = arrivals(random.Random(2), 50, 100)
    assert len(times) == request_count(50, 100) == 5000
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= 100
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(1, abs=0.08)  # exponential gaps


def test_a_part_of_a_request_still_makes_one() -> None:
    assert request_count(0.1, 1) == 1
    assert request_count(0.3, 10) == 3
    assert request_count(0.31, 10) == 4


def test_equal_seeds_draw_equal_requests_and_others_do_not() -> None:
    first, again, other = (list(Shape(WORKLOAD, seed=seed).stream(5, 10)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_about_the_reuse_share_of_all_prompt_tokens_was_seen_before() -> None:
    assert cached_share(WORKLOAD) == pytest.approx(0.6, abs=0.04)
    none = Workload(input_tokens_p95=1000, output_tokens_p95=200, prefix_reuse=0.0, concurrency=32)
    assert cached_share(none) < 0.01


def cached_share(workload: Workload) -> float:
    """What a prefix cache of 16-token blocks that forgets nothing would answer for."""
    seen: set[int] = set()
    total = hits = 0
    for request in Shape(workload, seed=3).stream(20, 50):
        total += len(request.prompt)
        chain, hit = 0, True
        for start in range(0, len(request.prompt) - 15, 16):
            chain = hash((chain, *request.prompt[start : start + 16]))
            hit = hit and chain in seen
            hits += 16 * hit
            seen.add(chain)
    return hits / total


def test_token_ids_are_plain_ones_of_a_small_vocabulary() -> None:
    ids = {token for request in Shape(WORKLOAD).stream(5, 10) for token in request.prompt}
    assert min(ids) >= FIRST_TOKEN_ID
    assert max(ids) < 300


@given(st.integers(1, 300_000), st.integers(1, 20_000), st.floats(0, 1), st.one_of(st.none(), st.integers(2, 200_000)))
@settings(max_examples=60, deadline=None)
def test_every_request_fits_into_the_context(prompt: int, output: int, reuse: float, context: int | None) -> None:
    workload = Workload(input_tokens_p95=prompt, output_tokens_p95=output, prefix_reuse=reuse, concurrency=1)
    for request in Shape(workload, max_model_len=context).stream(1, 3):
        assert len(request.prompt) >= 1
        assert request.output_tokens >= 1
        assert context is None or len(request.prompt) + request.output_tokens <= context


def test_what_fits_is_left_as_it_is() -> None:
    assert fit(100, 50, 4096) == (100, 50)
    assert fit(5000, 50, 4096) == (4046, 50)
    assert fit(5000, 5000, 4096) == (2048, 2048)


def test_the_suggested_rate_keeps_the_workloads_concurrency_busy() -> None:
    outputs = [request.output_tokens for request in Shape(WORKLOAD).stream(50, 60)]
    mean_seconds = sum(outputs) / len(outputs) * 0.03
    assert suggested_rate(WORKLOAD) * mean_seconds == pytest.approx(WORKLOAD.concurrency, rel=0.1)


def test_the_same_shape_keeps_its_prefixes_from_one_stream_to_the_next() -> None:
    shape = Shape(WORKLOAD, seed=5)
    assert starts(shape) == starts(shape)


def starts(shape: Shape) -> set[tuple[int, ...]]:
    return {tuple(request.prompt[:8]) for request in shape.stream(10, 10)}

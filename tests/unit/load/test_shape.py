"""The stream of requests has the lengths, arrivals and shared prefixes of its workload."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.load.shape import (
    ANY_VOCABULARY,
    STRATA,
    Exact,
    Stratified,
    TrafficShape,
    arrivals,
    fit_lengths,
    length_at,
    request_count,
    suggested_rate,
)
from vllm_launchers.presets.model import Workload

WORKLOAD = Workload(input_tokens_p95=1000, output_tokens_p95=200, prefix_reuse=0.6, concurrency=32)


def share_below(values: list[int], limit: int) -> float:
    return sum(value <= limit for value in values) / len(values)


def test_p95_of_the_lengths_is_the_given_percentile() -> None:
    shares = Stratified(random.Random(1))
    lengths = [length_at(shares.draw(), 1000) for _ in range(20_000)]
    assert share_below(lengths, 1000) == pytest.approx(0.95, abs=0.006)
    assert min(lengths) >= 1
    assert max(lengths) <= 3000


def test_long_lengths_are_as_frequent_in_few_requests_as_in_many() -> None:
    shares = Stratified(random.Random(1))
    for _ in range(10):
        lengths = [length_at(shares.draw(), 1000) for _ in range(STRATA)]
        assert sum(length > 1000 for length in lengths) in (6, 7)  # 5% of 128


def test_arrivals_match_the_rate_of_a_poisson_process() -> None:
    times = arrivals(random.Random(2), request_count(50, 100), 100)
    assert len(times) == 5000
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] <= 100
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation / mean == pytest.approx(1, abs=0.08)  # exponential gaps


def test_fraction_of_a_request_rounds_up_to_one() -> None:
    assert request_count(0.1, 1) == 1
    assert request_count(0.3, 10) == 3
    assert request_count(0.31, 10) == 4


def test_equal_seeds_draw_equal_requests() -> None:
    first, again, other = (list(TrafficShape(WORKLOAD, seed=seed).stream(5, 10)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_cached_share_matches_the_reuse() -> None:
    assert cached_share(WORKLOAD) == pytest.approx(0.6, abs=0.04)
    none = Workload(input_tokens_p95=1000, output_tokens_p95=200, prefix_reuse=0.0, concurrency=32)
    assert cached_share(none) < 0.01


def cached_share(workload: Workload) -> float:
    """The hit rate of an unbounded prefix cache with 16-token blocks."""
    seen: set[int] = set()
    total = hits = 0
    for request in TrafficShape(workload, seed=3).stream(20, 50):
        total += len(request.prompt)
        chain, hit = 0, True
        for start in range(0, len(request.prompt) - 15, 16):
            chain = hash((chain, *request.prompt[start : start + 16]))
            hit = hit and chain in seen
            hits += 16 * hit
            seen.add(chain)
    return hits / total


def test_token_ids_come_from_a_small_vocabulary() -> None:
    ids = {token for request in TrafficShape(WORKLOAD).stream(5, 10) for token in request.prompt}
    assert ids <= set(ANY_VOCABULARY)


@given(st.integers(1, 300_000), st.integers(1, 20_000), st.floats(0, 1), st.one_of(st.none(), st.integers(2, 200_000)))
@settings(max_examples=60, deadline=None)
def test_every_request_fits_the_context(prompt: int, output: int, reuse: float, context: int | None) -> None:
    workload = Workload(input_tokens_p95=prompt, output_tokens_p95=output, prefix_reuse=reuse, concurrency=1)
    for request in TrafficShape(workload, max_model_len=context).stream(1, 3):
        assert len(request.prompt) >= 1
        assert request.output_tokens >= 1
        assert context is None or len(request.prompt) + request.output_tokens <= context


def test_fitting_lengths_are_unchanged() -> None:
    assert fit_lengths(100, 50, 4096) == (100, 50)
    assert fit_lengths(5000, 50, 4096) == (4046, 50)
    assert fit_lengths(5000, 5000, 4096) == (2048, 2048)


def test_exact_lengths_are_equal_for_all() -> None:
    drawn = list(TrafficShape(WORKLOAD, exact=Exact(256, 64)).stream(20, 5))
    assert {(len(request.prompt), request.output_tokens) for request in drawn} == {(256, 64)}


@pytest.mark.parametrize("exact", [Exact(input_tokens=300), Exact(output_tokens=300)])
def test_inexact_length_is_drawn_and_limited_by_the_context(exact: Exact) -> None:
    drawn = list(TrafficShape(WORKLOAD, exact=exact, max_model_len=400).stream(20, 5))
    prompts, outputs = {len(request.prompt) for request in drawn}, {request.output_tokens for request in drawn}
    assert max(prompts) + min(outputs) <= 400
    assert (prompts if exact.input_tokens else outputs) == {300}
    assert len(outputs if exact.input_tokens else prompts) > 1


def test_exact_lengths_beyond_the_context_are_refused_not_cut() -> None:
    assert TrafficShape(WORKLOAD, exact=Exact(300, 212), max_model_len=512).misfit() == ""
    assert TrafficShape(WORKLOAD, exact=Exact(300, 213)).misfit() == ""
    assert TrafficShape(WORKLOAD, exact=Exact(300, 213), max_model_len=512).misfit() == (
        "300 prompt tokens and 213 output tokens do not fit into the server's context of 512 tokens"
    )
    assert TrafficShape(WORKLOAD, exact=Exact(None, 512), max_model_len=512).misfit() == (
        "512 output tokens do not fit into the server's context of 512 tokens"
    )
    assert TrafficShape(WORKLOAD, max_model_len=512).misfit() == ""


def test_prompts_use_the_servers_tokens() -> None:
    vocabulary = [1000 * n for n in range(1, 300)]
    ids = {token for request in TrafficShape(WORKLOAD, vocabulary=vocabulary).stream(5, 10) for token in request.prompt}
    assert ids <= set(vocabulary)
    assert len(ids) > 200


def test_suggested_rate_reaches_the_workloads_concurrency() -> None:
    outputs = [request.output_tokens for request in TrafficShape(WORKLOAD).stream(50, 60)]
    mean_seconds = sum(outputs) / len(outputs) * 0.03
    assert suggested_rate(WORKLOAD) * mean_seconds == pytest.approx(WORKLOAD.concurrency, rel=0.1)


def test_shape_reuses_its_prefixes_across_streams() -> None:
    shape = TrafficShape(WORKLOAD, seed=5)
    assert starts(shape) == starts(shape)


def starts(shape: TrafficShape) -> set[tuple[int, ...]]:
    return {tuple(request.prompt[:8]) for request in shape.stream(10, 10)}


def test_shape_describes_lengths_cut_by_the_context() -> None:
    text = TrafficShape(WORKLOAD, max_model_len=300).words()
    assert "prompt tokens up to 299 (cut to the server's context; 1,000 for 95% without)" in text
    assert "output tokens up to 150 (cut to the server's context; 200 for 95% without)" in text
    text = TrafficShape(WORKLOAD, exact=Exact(output_tokens=100), max_model_len=300).words()
    assert "prompt tokens up to 200 (cut" in text
    assert "output tokens 100," in text
    sent = list(TrafficShape(WORKLOAD, max_model_len=300).stream(20, 20))
    assert max(len(request.prompt) for request in sent) <= 299
    assert max(request.output_tokens for request in sent) <= 150
    whole = "prompt tokens up to 1,000 (95%), output tokens up to 200 (95%), 60% of each prompt shared"
    assert TrafficShape(WORKLOAD, max_model_len=100_000).words() == TrafficShape(WORKLOAD).words() == whole

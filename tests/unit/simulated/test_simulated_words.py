from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_launchers.simulated.vocabulary import Vocabulary, find_stop, output_text, output_token, ranked_tokens

TEXT = st.text(alphabet="ab ", max_size=4)


@given(pieces=st.lists(TEXT, max_size=8), stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3))
def test_stop_string_is_found_with_its_last_token(pieces: list[str], stops: list[str]) -> None:
    found = find_stop(pieces, stops, 0)
    texts = ["".join(pieces[:count]) for count in range(1, len(pieces) + 1)]
    first = next((count for count, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)
    if first is None:
        assert found is None
        return
    assert found is not None
    count, stop, begin = found
    assert count == first
    assert texts[count - 1][begin : begin + len(stop)] == stop


def test_first_tokens_are_not_searched_for_a_stop() -> None:
    assert find_stop(["a", "b", "a"], ["a"], 0) == (1, "a", 0)
    assert find_stop(["a", "b", "a"], ["a"], 1) == (3, "a", 2)
    assert find_stop(["a", "b"], ["a"], 2) is None


def test_first_completed_stop_counts() -> None:
    assert find_stop(["xabcd"], ["abcd", "bc"], 0) == (1, "bc", 2)


@pytest.mark.parametrize("size", [300, 512, 32_000, 128_000])
def test_written_text_tokenizes_to_generated_tokens(size: int) -> None:
    vocabulary = Vocabulary(size)
    tokens = [output_token(7, position) % size for position in range(50)]
    assert vocabulary.encode(output_text(7, 0, 50)) == tokens


@given(st.text(max_size=40))
def test_text_round_trips_through_tokens(text: str) -> None:
    vocabulary = Vocabulary()
    assert vocabulary.text(vocabulary.encode(text)) == text


@given(seed=st.integers(0, 2**32), position=st.integers(0, 500), count=st.integers(0, 20), greedy=st.booleans())
def test_ranked_tokens_are_distinct_with_falling_probability(
    seed: int, position: int, count: int, greedy: bool
) -> None:
    token = output_token(seed, position)
    ranked = ranked_tokens(seed, position, token, count, greedy=greedy)
    assert ranked[0].token == token
    assert len({one.token for one in ranked}) == len(ranked) >= max(1, count)
    by_rank = sorted(ranked, key=lambda one: one.rank)
    assert [one.rank for one in by_rank[:count]] == list(range(1, count + 1))
    values = [one.log_probability for one in by_rank]
    assert values == sorted(values, reverse=True)
    assert math.fsum(math.exp(value) for value in values) <= 1 + 1e-9
    if greedy:
        assert ranked[0].rank == 1

"""The quick search before the rules: no match is missed, and long lines are fast."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_console.diagnosis.failure.diagnose import diagnose
from vllm_console.diagnosis.failure.literals import FirstMatches, stretches
from vllm_console.diagnosis.failure.rules import DEATHS, OUT_OF_MEMORY, RULES, FailureRule

ALL = [rule.pattern for rule in (*RULES, *DEATHS)] + [OUT_OF_MEMORY]
ASCII = st.characters(max_codepoint=126, min_codepoint=32)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (r"Out of memory|\[Errno 28\]", ("out of memory", "[errno 28]")),
        (r"models?'?s? max(?:imum)? seq", ("model", " max")),
        (r"requires? (?:a|the (?:b|c)) GPU", ("require",)),
        (r"fault[|)]s{2} of \w+: it", ("fault",)),
        (r"\bnccl\w+Error\b|Exception", ("nccl", "exception")),
        (r"x|long enough", None),
        (r"\d+(?:abc|def)", None),
    ],
)
def test_literals_are_extracted_from_patterns(pattern: str, words: tuple[str, ...] | None) -> None:
    found = stretches(pattern)
    assert (found is None) == (words is None)
    for alternative, word in zip(found or (), words or (), strict=False):
        assert word in alternative or alternative in word


@pytest.mark.parametrize("pattern", ALL, ids=lambda pattern: pattern.pattern[:40])
def test_every_text_that_a_pattern_matches_is_found(pattern: re.Pattern[str]) -> None:
    first = FirstMatches([pattern])

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(st.from_regex(re.compile(pattern.pattern, pattern.flags), alphabet=ASCII))
    def check(text: str) -> None:
        assert first.of(text) == (0,)

    check()


def test_first_matching_pattern_counts_ignoring_case() -> None:
    first = FirstMatches([re.compile(word, re.IGNORECASE) for word in ("no space left", "space", r"\d\d")])
    assert [first.of(text)[0] for text in ("NO SPACE left 12", "some Space", "12", "none")] == [0, 1, 2, None]


def test_groups_are_distinguished() -> None:
    groups = FirstMatches([re.compile("ab+c"), re.compile("abd")], [re.compile("abd"), re.compile(r"a[b]d")])
    assert [groups.of(text) for text in ("xabdx", "abbc", "ab")] == [(1, 0), (0, None), (None, None)]
    assert [groups.any_in(text) for text in ("xabdx", "abbc", "ab")] == [True, True, False]
    assert not FirstMatches([], []).any_in("abc")


def test_every_rule_has_literals() -> None:
    def slow(rules: tuple[FailureRule, ...]) -> list[str]:
        return [rule.pattern.pattern for rule in rules if stretches(rule.pattern.pattern) is None]

    assert slow(RULES) == slow(DEATHS) == []


@pytest.mark.parametrize("letter", [*"xX1_. -[({~", "a.", "A.B", "a b "])
def test_time_is_linear_in_the_log_length(letter: str) -> None:
    def seconds(length: int) -> float:
        lines = [letter * (length // len(letter))] * (160_000 // length)  # the same number of characters in total
        times = []
        for _ in range(2):
            began = time.process_time()
            diagnose(lines, 1)
            times.append(time.process_time() - began)
        return min(times)

    assert seconds(4_000) < 6 * max(seconds(250), 0.01)  # 16 times if it were quadratic

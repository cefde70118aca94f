"""A claim of an operating guide, and the outcome of running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from itertools import pairwise

import msgspec


class Verdict(StrEnum):
    """Whether the model gives the direction or order that a guide claims."""

    HOLDS = "holds"
    CONDITIONAL = "holds with a condition"
    WRONG = "wrong"


class Source(StrEnum):
    """The kind of statement that a claim is."""

    FORMULA = "formula"
    RULE = "rule of thumb"
    RESULTS = "table of results"
    SYMPTOM = "symptom"
    FIX = "fix"


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of running a claim. ``figures`` fill its texts.

    ``as_claimed`` is whether direction or order are as the guide claims, ``with_condition`` whether they are under the
    condition that the claim's reason states. ``explained`` is whether the run showed what the reason says.
    """

    figures: Mapping[str, float]
    as_claimed: bool
    with_condition: bool = False
    explained: bool = True

    @property
    def verdict(self) -> Verdict:
        if self.as_claimed:
            return Verdict.HOLDS
        return Verdict.CONDITIONAL if self.with_condition else Verdict.WRONG


class Claim(msgspec.Struct, frozen=True):
    """One claim. ``setup`` describes what is run; ``gives`` and ``reason`` are templates for an outcome's figures."""

    name: str
    source: Source
    says: str
    setup: str
    gives: str
    verdict: Verdict
    reason: str
    measure: Callable[[], Outcome]

    @property
    def outcome(self) -> Outcome:
        """The outcome, computed once per process."""
        return _measured(self.measure)

    def filled(self, template: str) -> str:
        """A template filled with the outcome's figures. Raises KeyError for an unknown figure."""
        return template.format(**self.outcome.figures)


@cache
def _measured(measure: Callable[[], Outcome]) -> Outcome:
    return measure()


def rising(*values: float) -> bool:
    """Whether each value is greater than the previous one."""
    return all(before < after for before, after in pairwise(values))


def close(value: float, other: float, share: float) -> bool:
    """Whether two values differ by at most ``share`` of the second."""
    return abs(value - other) <= share * abs(other)


def gained(after: float, before: float) -> int:
    """By how many percent ``after`` exceeds ``before``."""
    return round(100 * (after / before - 1))

"""Whether one engine is slower than another: the same requests on both, in rounds. Pure.

Each round has a turn of either engine, close together in time. A request's time on one engine is compared with its time
on the other, so that lengths and arrivals cancel, and a round yields one number per figure: the mean over its requests
of the logarithm of that ratio. Requests of a turn share batches and machine conditions, so they are not independent;
rounds are. The interval is Student's t over rounds, widened for the number of figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Literal

import msgspec

from vllm_console.load.report import Times
from vllm_console.runs.confidence import student

Figure = Literal["ttft", "tpot", "e2e"]
FIGURES: tuple[Figure, ...] = ("ttft", "tpot", "e2e")
LEVEL = 0.95
"""Joint confidence level of the intervals of all figures."""
FEWEST_ROUNDS = 4
"""With fewer rounds, Student's t is inaccurate, and intervals are very wide."""
FEWEST_REQUESTS = 10
"""Minimum number of requests answered on both engines, in every round."""
FAILED_SHARE = 0.02
"""With a larger share of failures on either side, the answered requests are not compared."""


class EngineTurn(msgspec.Struct, frozen=True):
    """One engine's turn in a round: the times of its answers by request index, and how many requests were sent."""

    sent: int
    answers: Mapping[int, Times]


class UpgradeVerdict(StrEnum):
    """The verdict on the second engine."""

    SLOWER = "slower"
    FASTER = "faster"
    MIXED = "mixed"
    NO_DIFFERENCE = "no significant difference"
    FAILED = "not comparable"
    TOO_LITTLE = "not enough data"


class UpgradeFigure(msgspec.Struct, frozen=True):
    """A figure on both engines: geometric means in seconds, and how much longer the second takes (0.05 is 5%).

    ``low`` and ``high`` bound the changes of all figures jointly with 95% confidence.
    """

    name: Figure
    first: float
    second: float
    change: float
    low: float
    high: float

    @property
    def verdict(self) -> UpgradeVerdict:
        """The verdict of this figure alone."""
        if self.low > 0:
            return UpgradeVerdict.SLOWER
        return UpgradeVerdict.FASTER if self.high < 0 else UpgradeVerdict.NO_DIFFERENCE


class UpgradeComparison(msgspec.Struct, frozen=True):
    """The verdict on the second engine with its figures; at least ``requests`` were compared per round."""

    verdict: UpgradeVerdict
    rounds: int
    requests: int
    figures: tuple[UpgradeFigure, ...] = ()
    failed: tuple[int, int] = (0, 0)
    """Unanswered requests on each engine."""


def compare_engines(rounds: Sequence[tuple[EngineTurn, EngineTurn]]) -> UpgradeComparison:
    """Compare two engines' answers to the same requests; each pair is a round."""
    failed = tuple(sum(pair[side].sent - len(pair[side].answers) for pair in rounds) for side in (0, 1))
    both = [sorted(one.answers.keys() & other.answers.keys()) for one, other in rounds]
    fewest = min(map(len, both), default=0)
    sent = max(1, sum(one.sent for one, _ in rounds))
    base = UpgradeComparison(UpgradeVerdict.TOO_LITTLE, len(rounds), fewest, failed=(failed[0], failed[1]))
    if max(failed) > FAILED_SHARE * sent:
        return msgspec.structs.replace(base, verdict=UpgradeVerdict.FAILED)
    if len(rounds) < FEWEST_ROUNDS or fewest < FEWEST_REQUESTS:
        return base
    figures = tuple(
        figure for name in FIGURES if (figure := _figure(name, rounds, both, 1 - (1 - LEVEL) / len(FIGURES)))
    )
    verdicts = {figure.verdict for figure in figures}
    slower, faster = UpgradeVerdict.SLOWER in verdicts, UpgradeVerdict.FASTER in verdicts
    verdict = UpgradeVerdict.NO_DIFFERENCE
    if slower or faster:
        verdict = UpgradeVerdict.SLOWER if slower else UpgradeVerdict.FASTER
    if slower and faster:
        verdict = UpgradeVerdict.MIXED
    return msgspec.structs.replace(base, verdict=verdict, figures=figures)


def _figure(
    name: Figure, rounds: Sequence[tuple[EngineTurn, EngineTurn]], both: Sequence[Sequence[int]], level: float
) -> UpgradeFigure | None:
    """One figure over all rounds; None if a round has no answer with it."""
    sides: list[tuple[float, float]] = []
    for (one, other), places in zip(rounds, both, strict=True):
        pairs = [(getattr(one.answers[place], name), getattr(other.answers[place], name)) for place in places]
        known = [(math.log(first), math.log(second)) for first, second in pairs if first and second]
        if not known:
            return None
        sides.append((_mean([first for first, _ in known]), _mean([second for _, second in known])))
    differences = [second - first for first, second in sides]
    change = _mean(differences)
    variance = math.fsum((value - change) ** 2 for value in differences) / (len(differences) - 1)
    reach = student(0.5 + level / 2, len(differences) - 1) * math.sqrt(variance / len(differences))
    return UpgradeFigure(
        name,
        math.exp(_mean([first for first, _ in sides])),
        math.exp(_mean([second for _, second in sides])),
        math.expm1(change),
        math.expm1(change - reach),
        math.expm1(change + reach),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

"""Whether a second engine is slower: a change in every round is found, noise is not, failures do not count."""

from __future__ import annotations

import random

from vllm_console.cli.upgrade import upgrade_text
from vllm_console.load.report import Times
from vllm_console.load.upgrade import FEWEST_ROUNDS, EngineTurn, UpgradeVerdict, compare_engines


def turn(factor: float, *, ttft: float = 1.0, missing: int = 0) -> EngineTurn:
    """Forty requests of different lengths whose tokens take ``factor`` times as long."""
    answers = {at: Times(0.1 * factor * ttft, None if at == 0 else 0.01 * factor, at * factor + 1) for at in range(40)}
    return EngineTurn(40, {at: times for at, times in answers.items() if at >= missing})


def rounds(
    slower: float, *, spread: float = 0.01, seed: int = 1, ttft: float = 1.0
) -> list[tuple[EngineTurn, EngineTurn]]:
    dice = random.Random(seed)
    return [
        (turn(dice.gauss(1, spread)), turn(slower * dice.gauss(1, spread), ttft=ttft)) for _ in range(2 * FEWEST_ROUNDS)
    ]


def test_five_percent_difference_is_found_with_its_size() -> None:
    found = compare_engines(rounds(1.05))
    assert found.verdict is UpgradeVerdict.SLOWER
    assert (found.rounds, found.requests) == (8, 40)
    for one in found.figures:
        assert 0 < one.low < 0.05 < one.high
    assert compare_engines(rounds(0.95)).verdict is UpgradeVerdict.FASTER


def test_machine_drift_is_not_a_difference() -> None:
    alarms = sum(
        compare_engines(rounds(1.0, spread=0.05, seed=seed)).verdict is not UpgradeVerdict.NO_DIFFERENCE
        for seed in range(200)
    )
    assert alarms <= 20


def test_contradicting_measurements_are_mixed() -> None:
    found = compare_engines(rounds(1.1, ttft=0.5))
    assert found.verdict is UpgradeVerdict.MIXED
    assert upgrade_text(found, "vLLM 0.30").startswith(
        "vLLM 0.30 is faster in some figures and slower in others: TTFT -"
    )


def test_failed_answers_are_not_compared() -> None:
    pairs = [(turn(1.0), turn(0.5, missing=2)) for _ in range(8)]
    found = compare_engines(pairs)
    assert (found.verdict, found.failed, found.figures) == (UpgradeVerdict.FAILED, (0, 16), ())


def test_too_few_rounds_or_requests_give_no_verdict() -> None:
    assert compare_engines(rounds(2.0)[: FEWEST_ROUNDS - 1]).verdict is UpgradeVerdict.TOO_LITTLE
    short = EngineTurn(5, {at: Times(0.1, 0.01, 1.0) for at in range(5)})
    assert compare_engines([(short, short)] * 8).verdict is UpgradeVerdict.TOO_LITTLE
    assert compare_engines([]).verdict is UpgradeVerdict.TOO_LITTLE

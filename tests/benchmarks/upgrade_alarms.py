"""How often `compare --engine A --engine B` is wrong, and how often it detects a slowdown, in virtual time.

    python tests/benchmarks/upgrade_alarms.py [--checks 200] [--json]

The same 100 requests are replayed by the simulated engine's scheduler at the machine's speed of each turn. That speed
drifts: it is autocorrelated from turn to turn, with a given standard deviation. Each response's times also scatter
independently by 5%. A verdict other than "no significant difference" between equal engines is a false alarm; "slower"
for a second engine whose steps take 5 or 10% longer is a detection. Everything is seeded, so results are reproducible.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.virtual_records import record, traffic
from vllm_console.load.report import Times
from vllm_console.load.upgrade import EngineTurn, UpgradeVerdict, compare_engines

DRIFTS = ((0.0, 0.01), (0.0, 0.02), (0.8, 0.02), (0.0, 0.04), (0.8, 0.04))
ROUNDS = (4, 6, 8, 12)
SLOWER = (1.05, 1.1)
SCATTER = 0.05
GRID = 500
"""Speeds are rounded to multiples of 1 / GRID, so that replays can be shared."""


@dataclass(frozen=True)
class Row:
    """One kind of drift: shares of all checks, from 0 to 1."""

    rounds: int
    kept: float
    spread: float
    alarms: float
    seen: dict[float, float]


@cache
def replayed(speed: int) -> tuple[Times, ...]:
    """The times of all requests at a speed of ``speed`` / GRID."""
    found = record("--max-num-seqs 64", traffic(100, 2.0), speed=speed / GRID).requests
    in_order = sorted(found, key=lambda one: int(one.id))
    times = []
    for one in in_order:
        ttft, decode, e2e = one.ttft_seconds or 0.0, one.decode_seconds or 0.0, one.e2e_seconds or 0.0
        times.append(Times(ttft, decode / max(1, (one.output_tokens or 1) - 1), e2e))
    return tuple(times)


def turn(dice: random.Random, speed: float) -> EngineTurn:
    answers = {}
    for place, one in enumerate(replayed(round(speed * GRID))):
        first, last = (math.exp(dice.gauss(0, SCATTER)) for _ in range(2))
        answers[place] = Times(one.ttft * first, (one.tpot or 0.0) * last, one.e2e * last)
    return EngineTurn(len(answers), answers)


def verdict(seed: int, rounds: int, kept: float, spread: float, factor: float) -> UpgradeVerdict:
    """The verdict on a second engine whose steps take ``factor`` times as long."""
    dice = random.Random(seed)
    off = dice.gauss(0, spread)
    pairs = []
    for number in range(rounds):
        turns = {}
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            turns[side] = turn(dice, math.exp(off) / (factor if side else 1.0))
            off = kept * off + math.sqrt(1 - kept**2) * dice.gauss(0, spread)
        pairs.append((turns[0], turns[1]))
    return compare_engines(pairs).verdict


def row(rounds: int, kept: float, spread: float, checks: int) -> Row:
    def share(factor: float, *wanted: UpgradeVerdict) -> float:
        return sum(verdict(seed, rounds, kept, spread, factor) in wanted for seed in range(checks)) / checks

    alarms = share(1.0, UpgradeVerdict.SLOWER, UpgradeVerdict.FASTER, UpgradeVerdict.MIXED)
    return Row(rounds, kept, spread, alarms, {factor: share(factor, UpgradeVerdict.SLOWER) for factor in SLOWER})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", type=int, default=200, help="checks per kind of drift (default 200)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    wanted = [(rounds, *drift, options.checks) for rounds in ROUNDS for drift in DRIFTS]
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(row, *zip(*wanted, strict=True)))
    if options.json:
        print(json.dumps([asdict(one) for one in rows], indent=2))
        return 0
    heads = "".join(f"{f'sees +{factor - 1:.0%}':>12}" for factor in SLOWER)
    print(f"{'rounds':>6}  {'takes over':>10}  {'drift':>6}  {'false alarms':>12}{heads}")
    for one in rows:
        seen = "".join(f"{share:>12.0%}" for share in one.seen.values())
        print(f"{one.rounds:>6}  {one.kept:>10.1f}  {one.spread:>6.0%}  {one.alarms:>12.1%}{seen}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How often a comparison is wrong, and how often it detects a real change, on synthetic minutes.

    python tests/benchmarks/compare_alarms.py [--pairs 300] [--json]

Each row is a kind of noise: the levels of minutes scatter by a share and are autocorrelated, and in addition each
minute and each metric scatters independently. Two runs with that noise are compared: once without any change, where a
verdict of better, worse or mixed is a false alarm; and with all latencies slower or faster by a factor, where a verdict
in that direction is a detection. If a third number of minutes is given, an earlier run of that length is available,
from which the drift of metrics is estimated. Everything is seeded, so results are reproducible.

The second table is about preemptions per request alone: their number is random (Poisson) around a level that scatters
and is autocorrelated, twice as high in the earlier run. They stay the same (false alarms), or end, or are quartered.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

import made_runs as made

from vllm_console.runs.compare import ComparisonVerdict, Recorded, compare

ALARMS = (ComparisonVerdict.BETTER, ComparisonVerdict.WORSE, ComparisonVerdict.MIXED)
NOISES = ((0.0, 0.0), (0.0, 0.1), (0.5, 0.1), (0.8, 0.1), (0.9, 0.1), (0.95, 0.1), (0.9, 0.2))
COUNTS = ((5, 5), (10, 10), (10, 10, 60), (20, 20), (20, 20, 60), (60, 60), (60, 10))
FACTORS = (0.7, 1.3, 2.0)
PREEMPTION_RATES = (3.0, 13.0, 40.0)
PREEMPTION_NOISES = ((0.0, 0.3), (0.8, 0.5), (0.9, 1.0))
PREEMPTION_COUNTS = ((10, 5, 60), (10, 10), (40, 20))


@dataclass(frozen=True)
class Row:
    """One kind of noise: shares of all pairs, from 0 to 1."""

    kept: float
    spread: float
    minutes: tuple[int, ...]
    alarms: float
    seen: dict[float, float]


def verdict(seed: int, counts: tuple[int, ...], drift: tuple[float, float], factor: float) -> ComparisonVerdict:
    """The verdict on two runs of that many minutes; ``factor`` makes the second slower."""
    long = made.minutes(10**6 + seed, counts[2], drift=drift) if len(counts) > 2 else []
    earlier = Recorded(made.run(3), long, 0.0) if long else None
    before = made.minutes(2 * seed, counts[0], drift=drift)
    after = made.minutes(2 * seed + 1, counts[1], drift=drift, slower=factor)
    return compare(*made.pair(before, after), earlier).verdict


def row(kept: float, spread: float, counts: tuple[int, ...], pairs: int) -> Row:
    drift = (kept, spread)
    alarms = sum(verdict(seed, counts, drift, 1.0) in ALARMS for seed in range(pairs)) / pairs
    seen = {}
    for factor in FACTORS:
        right = ComparisonVerdict.WORSE if factor > 1 else ComparisonVerdict.BETTER
        seen[factor] = sum(verdict(seed, counts, drift, factor) is right for seed in range(pairs)) / pairs
    return Row(kept, spread, counts, alarms, seen)


@dataclass(frozen=True)
class PreemptionRow:
    """One mean number of preemptions per minute with one kind of noise: shares of all pairs, from 0 to 1."""

    per_minute: float
    kept: float
    spread: float
    minutes: tuple[int, ...]
    alarms: float
    sees_end: float
    sees_quarter: float


def preemption_verdict(
    seed: int, counts: tuple[int, ...], drift: tuple[float, float], then: float, now: float
) -> ComparisonVerdict | None:
    """The verdict on preemptions per request, ``then`` and ``now`` per minute."""
    wanted = [(counts[0], then), (counts[1], now), *((count, 2 * then) for count in counts[2:])]
    before, after, *rest = (
        made.preempted(made.minutes(3 * seed + n, count), 3 * seed + n, per_minute, drift)
        for n, (count, per_minute) in enumerate(wanted)
    )
    found = compare(*made.pair(before, after), *(Recorded(made.run(3), minutes, 0.0) for minutes in rest))
    return next(figure.verdict for figure in found.figures if figure.key == "preemption_share")


def preemption_row(per_minute: float, drift: tuple[float, float], counts: tuple[int, ...], pairs: int) -> PreemptionRow:
    def share(now: float, *verdicts: ComparisonVerdict) -> float:
        return (
            sum(preemption_verdict(seed, counts, drift, per_minute, now) in verdicts for seed in range(pairs)) / pairs
        )

    better = ComparisonVerdict.BETTER
    alarms = share(per_minute, *ALARMS)
    return PreemptionRow(per_minute, *drift, counts, alarms, share(0.0, better), share(per_minute / 4, better))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300, help="pairs of runs per kind of noise (default 300)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    wanted = [(kept, spread, counts, options.pairs) for counts in COUNTS for kept, spread in NOISES]
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(row, *zip(*wanted, strict=True)))
        counted = [
            (rate, drift, counts, options.pairs)
            for counts in PREEMPTION_COUNTS
            for rate in PREEMPTION_RATES
            for drift in PREEMPTION_NOISES
        ]
        preemptions = list(pool.map(preemption_row, *zip(*counted, strict=True)))
    if options.json:
        both = {"latencies": [asdict(one) for one in rows], "preemptions": [asdict(one) for one in preemptions]}
        print(json.dumps(both, indent=2))
        return 0
    heads = "".join(f"{f'sees ×{factor:g}':>12}" for factor in FACTORS)
    print(f"{'minutes':>10}  {'takes over':>10}  {'scatter':>7}  {'false alarms':>12}{heads}")
    for one in rows:
        seen = "".join(f"{share:>12.0%}" for share in one.seen.values())
        print(f"{_minutes(one.minutes):>10}  {one.kept:>10.2f}  {one.spread:>7.0%}  {one.alarms:>12.1%}{seen}")
    print(f"\n{'minutes':>10}  {'preemptions':>11}  {'takes over':>10}  {'scatter':>7}  {'false alarms':>12}", end="")
    print(f"{'sees end':>12}{'sees quarter':>14}")
    for each in preemptions:
        print(
            f"{_minutes(each.minutes):>10}  {each.per_minute:>7g}/min  {each.kept:>10.2f}  {each.spread:>7.0%}", end=""
        )
        print(f"  {each.alarms:>12.1%}{each.sees_end:>12.0%}{each.sees_quarter:>14.0%}")
    return 0


def _minutes(counts: tuple[int, ...]) -> str:
    """Minutes before and after, and of the earlier run."""
    return "+".join(map(str, counts[:2])) + "".join(f" ({number})" for number in counts[2:])


if __name__ == "__main__":
    sys.exit(main())

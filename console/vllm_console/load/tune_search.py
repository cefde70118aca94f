"""Decides which flags a tuner tries next, for how long, and whether the best is significantly better. Pure.

Candidates come ranked by prediction. The best few are measured, each after a restart; the best of these are measured
again for longer (successive halving), until one is left. Every round gets the same share of the remaining time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import NormalDist, fmean, stdev

import msgspec

from vllm_console.load.ramp_search import StepOutcome, bracket, ceiling
from vllm_console.runs.confidence import worth
from vllm_launchers.plan.budget.budget import HIGHEST_UTILIZATION
from vllm_launchers.vllm.flags.changes import FlagValue

GOODPUT, TTFT, THROUGHPUT = "goodput", "ttft", "throughput"
OBJECTIVES = (GOODPUT, TTFT, THROUGHPUT)

REACH = 8
"""Batch sizes are tried up to this multiple of the current ones; all smaller ones, which need no more memory."""

UTILIZATIONS = (0.85, 0.9, 0.92, HIGHEST_UTILIZATION)
WORTH_TRYING = 1.02
"""Candidates with a smaller predicted improvement are not worth a restart."""

EQUAL_PREDICTION_SHARE = 0.002
"""Of candidates whose predictions differ by at most this share, only the one that changes least is tried."""

SCATTER = 0.04
"""Minimum relative standard error of a measurement: measurements of the same flags differ by at least this much,
because traffic differs over time and a machine drifts between starts.
"""

RAMP_SCATTER, RAMP_SECONDS = 0.05, 900.0
"""The same for ramps that take this many seconds, in virtual time (`tests/benchmarks/tune.py --scatter`); for shorter
ramps, it grows with the square root.
"""

PREDICTED = 0.15
"""Typical difference between predicted and measured improvements; the prediction decides near-ties."""

UNSURE = 0.12
"""Original flags with a larger error are measured again, since it limits the precision of every comparison."""

CONFIDENCE = 0.95
SHORTEST_SECONDS = {GOODPUT: 45.0, TTFT: 10.0, THROUGHPUT: 10.0}
"""Minimum duration of a useful measurement."""

BASELINE_SHARE = 1.5
"""The original flags are measured this many times as long as a candidate, since all are compared with them."""

AGAIN_SHARE = 0.6
"""If the first measurement of the original flags is unsure, the second takes this part of its time."""

EVIDENCE_SECONDS = 20.0, 90.0
"""Minimum and maximum duration of the traffic that predictions are fitted to, after a measurement of goodput."""

EVIDENCE_PART = 0.3
"""Above its minimum, it takes at most this part of the preceding measurement."""

RANK_SECONDS = 15.0
"""Usual duration of predicting all combinations."""

OVERRUN = 1.25
"""A measurement may take this many times as long as planned, because it waits for its last answers."""

START_SHARE, GUESS_SHARE, AGAIN_BELOW = 0.85, 0.6, 0.5
"""Where a trial's ramp begins, so that its first step holds: at this part of the expected rate; of a guessed one; and
of the lowest rate that did not hold, if none held before.
"""

Set = Mapping[str, FlagValue]


class Candidate(msgspec.Struct, frozen=True):
    """Flags to set, and the predicted value of the objective.

    ``outside`` is why the prediction is uncertain; ``full``: the number of running requests would sometimes reach its
    limit, so denser traffic would wait.
    """

    set: Set
    predicted: float
    outside: str = ""
    full: bool = False


class MeasuredP99(msgspec.Struct, frozen=True):
    """The p99 of a latency (``ITL p99``) during a measurement, and its objective, in seconds.

    ``unsure``: it is above its objective because of so few observations that this may be chance.
    """

    name: str
    value: float
    objective: float
    unsure: bool = False

    @property
    def met(self) -> bool:
        """Whether it met its objective."""
        return self.value <= self.objective


class Measured(msgspec.Struct, frozen=True):
    """An objective's value and its relative standard error, including the scatter between measurements of the same
    flags.

    ``bound`` is ``most`` or ``least`` if only a bound of the value is known: no rate held, or all did. ``p99s`` are the
    latencies that have an objective of their own, as far as known; a goodput already includes them.
    """

    value: float
    error: float
    bound: str = ""
    p99s: tuple[MeasuredP99, ...] = ()


class Trial(msgspec.Struct, frozen=True):
    """A tried candidate (its place in the ranking); ``measured`` is None if it could not be measured."""

    place: int
    measured: Measured | None


class NextTrial(msgspec.Struct, frozen=True):
    """The candidate to try next, for how many seconds to measure it, and whether that takes a restart."""

    place: int
    seconds: float
    restart: bool


class Improvement(msgspec.Struct, frozen=True):
    """The relative improvement of the objective's value (0.2 is 20%; for TTFT a decrease), with its interval."""

    value: float
    low: float
    high: float


class Rejected(msgspec.Struct, frozen=True):
    """A candidate that was measured to be better by ``improvement``, a share, but newly missed objectives."""

    place: int
    improvement: float
    missed: tuple[MeasuredP99, ...]


class Decision(msgspec.Struct, frozen=True):
    """The best measured candidate, by its place; None if none was better. Only a ``significant`` one is kept.

    Candidates that newly miss an objective don't count. ``rejected`` is such a one, if it was better than all others.
    """

    place: int | None
    improvement: Improvement | None
    significant: bool
    rejected: Rejected | None = None


# -- candidates --------------------------------------------------------------------------------------------------------


def combinations(
    seqs: int, batched: int, utilization: float | None, least: int = 0, each: int = 1
) -> list[dict[str, FlagValue]]:
    """What to set for each combination of values that differs from these: powers of two around both batch sizes, and
    more memory for the KV cache.

    ``utilization`` is None if it has no effect; ``least`` is the minimum number of tokens per step,
    ``each`` what a sequence takes of them.
    """
    sequences = _around(seqs, 4, 2048)
    tokens = _around(batched, 256, 32768)
    shares = [] if utilization is None else [share for share in UTILIZATIONS if share > utilization]
    found = []
    for one, other, share in product(sequences, tokens, [utilization, *shares]):
        if (one, other) != (seqs, batched) and (other < one * each or other < min(least, batched)):
            continue  # vLLM refuses fewer tokens than sequences; without room for drafts, some sequences wait
        changed: dict[str, FlagValue] = {}
        if one != seqs:
            changed["max-num-seqs"] = one
        if other != batched:
            changed["max-num-batched-tokens"] = other
        if share is not None and share != utilization:
            changed["gpu-memory-utilization"] = share
        if changed:
            found.append(changed)
    return found


def _around(now: int, lowest: int, highest: int) -> list[int]:
    powers = [1 << exponent for exponent in range(1, 17)]
    near = {one for one in powers if lowest <= one <= min(highest, now * REACH)}
    return sorted(near | {now})


def ranked(candidates: Sequence[Candidate], original: float, objective: str) -> list[Candidate]:
    """Candidates predicted to be better than the original flags, best first; of similar ones, the one that changes
    least.

    Among candidates with equal predictions, those outside what the server has shown, and then those that would be full,
    come last.
    """
    sign = _sign(objective)
    better = [one for one in candidates if _gain(sign, original, one.predicted) >= math.log(WORTH_TRYING)]
    better.sort(key=lambda one: (-sign * one.predicted, len(one.set)))
    found: list[Candidate] = []
    while better:
        first = better[0]
        alike = [one for one in better if abs(math.log(one.predicted / first.predicted)) <= EQUAL_PREDICTION_SHARE]
        found.append(min(alike, key=lambda one: (bool(one.outside), one.full, len(one.set), _size(one.set))))
        better = better[len(alike) :]
    return found


def _size(changed: Set) -> float:
    """Order by size: the smaller of two equivalent batches needs less memory."""
    return sum(float(value) for value in changed.values() if isinstance(value, int | float))


# -- measurements ------------------------------------------------------------------------------------------------------


def measured_ceiling(tried: Sequence[StepOutcome], seconds: float) -> Measured | None:
    """The goodput (highest rate at which the objectives hold) found by a ramp of ``seconds``; None without a step."""
    if not tried:
        return None
    known, found = bracket(tried), ceiling(tried)
    scatter = max(SCATTER, RAMP_SCATTER * math.sqrt(RAMP_SECONDS / seconds))
    if known.low is None:
        return Measured(min(one.rate for one in tried), scatter, "most")
    if found is None or known.high is None:
        return Measured(known.low, scatter, "least")
    # Within an open bracket, every rate is equally likely.
    error = found.error if found.error is not None else math.log(known.ratio) / math.sqrt(12)
    rate = found.rate if found.error is not None else math.sqrt(known.low * known.high)
    return Measured(rate, math.hypot(error, scatter))


def measured_mean(values: Sequence[float]) -> Measured | None:
    """The mean of values in time order, which may be correlated. None for fewer than five, or if it is zero."""
    if len(values) < 5 or not (mean := fmean(values)) > 0:
        return None
    error = stdev(values) / math.sqrt(max(2.0, len(values) * worth(values))) / mean
    return Measured(mean, math.hypot(error, SCATTER))


def pooled(measurements: Sequence[Measured]) -> Measured | None:
    """Several measurements of the same flags as one, weighted by precision. Bounds count if nothing else is known.

    The p99s are those of the last one, which is the longest.
    """
    known = [one for one in measurements if not one.bound] or list(measurements[-1:])
    if not known:
        return None
    weights = [one.error**-2 for one in known]
    value = math.exp(sum(math.log(one.value) * by for one, by in zip(known, weights, strict=True)) / sum(weights))
    return Measured(value, sum(weights) ** -0.5, known[0].bound, known[-1].p99s)


def newly_missed(original: Measured, after: Measured) -> tuple[MeasuredP99, ...]:
    """The objectives that the original flags met, but these surely don't."""
    met = {one.name for one in original.p99s if one.met}
    return tuple(one for one in after.p99s if not one.met and not one.unsure and one.name in met)


def trial_start(expected: float, known: Measured | None, *, guess: bool = False) -> float:
    """The rate (requests per second) at which the ramp of a trial begins.

    ``expected`` is the predicted goodput, ``known`` the result of an earlier trial of the same flags, if any.
    ``guess``: the prediction is far from what the server has shown.
    """
    if known is None:
        return (GUESS_SHARE if guess else START_SHARE) * expected
    return (AGAIN_BELOW if known.bound == "most" else START_SHARE) * known.value


# -- the order of trials -----------------------------------------------------------------------------------------------


def rounds(trials: int) -> list[int]:
    """How many candidates each round measures, ``trials`` in all: two thirds in the first, and so on for the rest."""
    first = trials - trials // 3
    return [first, *rounds(trials // 3)] if trials // 3 else [first]


def baseline_seconds(objective: str, budget: float, trials: int, restart_seconds: float) -> float:
    """How long to measure the original flags: their share of the budget, if a trial still fits."""
    usable = budget - (trials + 1) * restart_seconds - RANK_SECONDS
    share = usable * BASELINE_SHARE / (trials + 2)
    room = budget - RANK_SECONDS - trial_cost(objective, restart_seconds)
    if objective == GOODPUT:
        most = (room - EVIDENCE_SECONDS[0]) / (OVERRUN * (1 + AGAIN_SHARE) + EVIDENCE_PART)
    else:
        most = room / OVERRUN
    return max(SHORTEST_SECONDS[objective], min(share, most))


def longest_evidence(seconds: float) -> float:
    """Maximum duration of the traffic for predictions, after a measurement of goodput of ``seconds``."""
    least, most = EVIDENCE_SECONDS
    return min(most, max(least, EVIDENCE_PART * seconds))


def baseline_cost(objective: str, seconds: float | None = None) -> float:
    """Maximum cost of measuring the original flags for ``seconds``, by default for the shortest time."""
    seconds = SHORTEST_SECONDS[objective] if seconds is None else seconds
    if objective != GOODPUT:
        return OVERRUN * seconds
    return OVERRUN * (1 + AGAIN_SHARE) * seconds + longest_evidence(seconds)


def trial_cost(objective: str, restart_seconds: float) -> float:
    """The cost of the shortest trial, with the restart before it and the final one with the chosen flags."""
    return OVERRUN * SHORTEST_SECONDS[objective] + 2 * restart_seconds


def least_budget(objective: str, restart_seconds: float) -> float:
    """The shortest time that suffices for one trial."""
    parts = (baseline_cost(objective), RANK_SECONDS, trial_cost(objective, restart_seconds))
    return float(sum(map(math.ceil, parts)))


def next_trial(
    expected: Sequence[float],
    done: Sequence[Trial],
    original: Measured,
    objective: str,
    *,
    trials: int,
    seconds_left: float,
    restart_seconds: float,
) -> NextTrial | None:
    """The next of the ranked candidates; None at the end, or if no trial fits into ``seconds_left``.

    ``expected`` are the predicted ratios of each candidate's value to the original's. ``restart_seconds`` is the
    maximum duration of a restart; time for a final one, with the chosen flags, is reserved.
    """
    sizes = rounds(trials)
    sizes[0] = min(sizes[0], len(expected))
    sizes = sizes if sizes[0] > 1 else sizes[:1]
    pool, begin = list(range(sizes[0])), 0
    for index, size in enumerate(sizes):
        pool = (
            pool
            if not index
            else _promising(_without_misses(pool, done[:begin], original), done[:begin], original, objective, expected)[
                : min(size, (len(pool) + 1) // 2)
            ]
        )
        part = [one.place for one in done[begin : begin + len(pool)]]
        waiting = [place for place in pool if place not in part]
        if not pool:
            return None
        if waiting:
            return _timed(waiting, done, sizes[index:], seconds_left, restart_seconds, SHORTEST_SECONDS[objective])
        begin += len(pool)
    return None


def _timed(
    waiting: Sequence[int],
    done: Sequence[Trial],
    sizes: Sequence[int],
    seconds_left: float,
    restart_seconds: float,
    shortest: float,
) -> NextTrial | None:
    """The next waiting candidate of a round, with its share of the time; the one already running comes first."""
    running = done[-1].place if done and done[-1].measured is not None else -1
    place = running if running in waiting else waiting[0]
    restart = place != running
    usable = seconds_left - restart_seconds
    own = restart_seconds if restart else 0.0
    if usable < own + shortest:
        return None
    # Each later round gets as much time as this one, for fewer candidates.
    share = usable / (len(waiting) + sizes[0] * (len(sizes) - 1)) - own
    others = int((usable - own - shortest) / (restart_seconds + shortest))
    if share < shortest and others + 1 < len(waiting):
        # Not all of them fit into the time: those that do share it.
        share = (usable - own - others * restart_seconds) / (others + 1) / OVERRUN
    seconds = max(shortest, share)
    return NextTrial(place, seconds, restart)


def _best(
    pool: Sequence[int], done: Sequence[Trial], original: Measured, objective: str, expected: Sequence[float]
) -> list[int]:
    """The candidates of a pool that were measured to be better than the original flags, best first. The order is by
    measurement and prediction, each weighted by its precision.
    """
    found = [place for place in pool if (one := measured_of(place, done)) is not None and one.bound != "most"]
    return _promising(found, done, original, objective, expected)


def _promising(
    pool: Sequence[int], done: Sequence[Trial], original: Measured, objective: str, expected: Sequence[float]
) -> list[int]:
    """As `_best`, but including candidates that may be better: if a ramp began too high and found no rate that holds,
    the prediction counts, up to the lowest rate tried.
    """
    sign = _sign(objective)
    gains: dict[int, float] = {}
    for place in pool:
        one = measured_of(place, done)
        if one is None or (gain := _gain(sign, original.value, one.value)) <= 0:
            continue
        predicted = _gain(sign, 1.0, expected[place])
        weight, prior = one.error**-2, PREDICTED**-2
        if one.bound == "most":
            gains[place] = min(gain, predicted)
        else:
            gains[place] = (gain * weight + predicted * prior) / (weight + prior)
    return sorted(gains, key=lambda place: -gains[place])


def _without_misses(pool: Sequence[int], done: Sequence[Trial], original: Measured) -> list[int]:
    """The measured candidates of a pool that don't newly miss an objective."""
    return [
        place for place in pool if (one := measured_of(place, done)) is not None and not newly_missed(original, one)
    ]


def measured_of(place: int, done: Sequence[Trial]) -> Measured | None:
    """The combined measurement from the trials of a candidate; None if there is none."""
    return pooled([one.measured for one in done if one.place == place and one.measured is not None])


# -- the decision ------------------------------------------------------------------------------------------------------


def decide(original: Measured, done: Sequence[Trial], objective: str, expected: Sequence[float]) -> Decision:
    """Which candidate is the best, and whether it is significantly better than the original flags.

    The logarithm of the ratio of both values counts as normally distributed. The interval is widened for the number of
    candidates that were tried (Bonferroni), since the best of several is also the luckiest. ``expected`` is as for
    `next_trial`; it affects which candidate is the best, but not whether it is better.
    """
    tried = sorted({one.place for one in done if one.measured is not None})
    rejected = _rejected(tried, done, original, objective, expected)
    best = _best(_without_misses(tried, done, original), done, original, objective, expected)
    if not best:
        return Decision(None, None, significant=False, rejected=rejected)
    after = measured_of(best[0], done)
    assert after is not None
    gain = _gain(_sign(objective), original.value, after.value)
    reach = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / 2 / len(tried)) * math.hypot(original.error, after.error)
    low, value, high = (_share(gain + by, objective) for by in (-reach, 0.0, reach))
    # If the original flags held every rate, their goodput is unknown, so no improvement is certain.
    known = original.bound != "least"
    return Decision(best[0], Improvement(value, low, high), significant=known and low > 0, rejected=rejected)


def _rejected(
    tried: Sequence[int], done: Sequence[Trial], original: Measured, objective: str, expected: Sequence[float]
) -> Rejected | None:
    """The best of all candidates, if it newly misses an objective."""
    for place in _best(tried, done, original, objective, expected)[:1]:
        after = measured_of(place, done)
        if after is not None and (missed := newly_missed(original, after)):
            return Rejected(place, _share(_gain(_sign(objective), original.value, after.value), objective), missed)
    return None


def _sign(objective: str) -> int:
    return -1 if objective == TTFT else 1


def _gain(sign: int, before: float, after: float) -> float:
    return sign * math.log(after / before)


def _share(gain: float, objective: str) -> float:
    """A logarithm as a share: an increase, or for TTFT a decrease."""
    return 1 - math.exp(-gain) if objective == TTFT else math.exp(gain) - 1

"""Decides which request rate to try next, and whether a step at a rate meets the objectives. Pure.

A rate is doubled until it fails (or halved until it holds), then the bracket is bisected; near the ceiling, all steps
together locate it (`next_step`). A step is evaluated while it runs, so that it ends as soon as its outcome is clear.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise, repeat
from operator import add, mul, sub

import msgspec

from vllm_console.load.report import sorted_quantile
from vllm_console.metrics.window import preemptions_per_request
from vllm_launchers.presets.model import ATTAINED, Objectives

TOLERANCE = 0.04
"""The bracket around the ceiling is closed when its ends differ by at most this share of the lower one."""

P_HOLDS, P_FAILS = 0.995, 0.94
"""Attainment that counts as holding, and as failing, for the sequential test; in between, either may result.

They are far apart to keep steps far from the ceiling short; near it, steps are not ended early.
"""

CERTAIN = math.log(0.95 / 0.05)
"""Wald's threshold for 5% errors of both kinds."""

_PER_HIT = math.log(P_HOLDS / P_FAILS)
_PER_MISS = math.log((1 - P_HOLDS) / (1 - P_FAILS))

GROWTH = 0.04
"""Minimum growth of requests in flight during a step, as a share of the requests that arrived, for a growing queue."""

CHANCE = 2.33
"""Minimum of that growth in standard deviations: at most 1% of the steps with a steady queue look like it. The number
in flight is then Poisson distributed (M/G/∞), and the variance of a difference is at most the sum of both."""

FEWEST_SECONDS = 8.0
"""No step counts as good earlier: short steps show neither a growing queue nor a full batch."""

FEWEST_REQUESTS = 10
"""With fewer requests, a step's gaps between tokens are not representative."""

MOST_LATE = 0.01
"""The largest fraction of requests that may be sent late; beyond it, the client limits the rate."""

MANY_PREEMPTIONS = 5
"""With fewer preemptions, a step is not ended early because of them."""


class StepFigures(msgspec.Struct, frozen=True):
    """A step's measurements so far, without its warm-up; None is unknown.

    ``ttft`` counts requests within the limit and beyond it; failed ones and those already waiting longer are beyond.
    ``itl`` counts gaps between tokens likewise. ``in_flight`` are evenly spaced counts of this client's unfinished
    requests, ``kv_cache_usage`` samples of the fullest engine. ``sent`` counts requests sent in time and later than
    `report.LATE_SECONDS` although there was room for them.
    """

    rate: float
    seconds: float
    ttft: tuple[int, int] = (0, 0)
    itl: tuple[int, int] = (0, 0)
    failed: int = 0
    in_flight: Sequence[float] = ()
    kv_cache_usage: Sequence[float] = ()
    preemptions: float | None = None
    finished: float | None = None
    running: float | None = None
    sent: tuple[int, int] = (0, 0)


class StepOutcome(msgspec.Struct, frozen=True):
    """A step's rate, whether the objectives hold there, the objective that fails, and the share attained.

    ``limited_by`` is an objective's name, or ``failures``, ``queue`` (it keeps growing) or ``client`` (this client
    cannot send as fast).
    """

    rate: float
    ok: bool
    limited_by: str = ""
    ttft: tuple[float, float] = (0, 0)
    itl: tuple[float, float] = (0, 0)
    """Observations within and beyond each limit: requests, and engine steps."""
    attained: float | None = None


def attained_share(figures: StepFigures) -> float | None:
    """The lower of two shares: requests with TTFT within its limit, and gaps between tokens within theirs."""
    shares = [within / (within + beyond) for within, beyond in (figures.ttft, figures.itl) if within + beyond]
    return min(shares, default=None)


def evidence(within: float, beyond: float) -> float:
    """Log-likelihood ratio of a holding rate against a failing one (Wald's sequential test of a binomial share)."""
    return within * _PER_HIT + beyond * _PER_MISS


def judge_step(
    figures: StepFigures,
    objectives: Objectives,
    *,
    fewest_seconds: float = FEWEST_SECONDS,
    final: bool = False,
    early: bool = True,
) -> StepOutcome | None:
    """The outcome of a step; None if more must be measured, which ``final`` excludes.

    With ``early``, a step ends as soon as its outcome is clear. Gaps of requests that run together are not independent,
    so those of an engine step count as one observation.
    """
    reason = _fails_clearly(figures, objectives, fewest_seconds) if early else ""
    if not reason and not final and not (early and _holds_clearly(figures, fewest_seconds)):
        return None
    reason = reason or _failing(figures, objectives)
    share = attained_share(figures)
    return StepOutcome(figures.rate, not reason, reason, figures.ttft, _engine_steps(figures), share)


def _engine_steps(figures: StepFigures) -> tuple[float, float]:
    """Engine steps within the ITL limit and beyond: in each step, every running request has a gap."""
    running = sum(figures.in_flight) / len(figures.in_flight) if figures.in_flight else 1.0
    within, beyond = (gaps / max(1.0, running) for gaps in figures.itl)
    return within, beyond


def _evidence(figures: StepFigures) -> tuple[float, float]:
    return evidence(*figures.ttft), evidence(*_engine_steps(figures))


def _holds_clearly(figures: StepFigures, fewest_seconds: float) -> bool:
    return figures.seconds >= fewest_seconds and min(_evidence(figures)) >= CERTAIN and not _grows(figures)


def _fails_clearly(figures: StepFigures, objectives: Objectives, fewest_seconds: float) -> str:
    first, gaps = _evidence(figures)
    if first <= -CERTAIN:
        return "failures" if 2 * figures.failed > figures.ttft[1] else _first_limit(figures)
    if gaps <= -CERTAIN and figures.seconds >= fewest_seconds and sum(figures.ttft) >= FEWEST_REQUESTS:
        return "itl_p99_seconds"
    preempted = figures.preemptions or 0.0
    share = _preemption_share(figures) or 0.0
    if preempted >= MANY_PREEMPTIONS and share > 3 * objectives.preemption_rate:
        return "preemption_rate"
    usage = _usage(figures)
    if figures.seconds >= fewest_seconds and usage is not None and usage > objectives.kv_cache_usage:
        return "kv_cache_usage"
    return ""


def _first_limit(figures: StepFigures) -> str:
    """The cause of a missed TTFT: this client, or the server."""
    return "client" if _client_is_late(figures) else "ttft_p99_seconds"


def _failing(figures: StepFigures, objectives: Objectives) -> str:
    """The first objective that a finished step misses; empty if it meets all."""
    ttft, itl = (
        within / (within + beyond) if within + beyond else 1.0 for within, beyond in (figures.ttft, figures.itl)
    )
    decided = sum(figures.ttft)
    share, usage = _preemption_share(figures), _usage(figures)
    checks: Mapping[str, bool] = {
        "failures": bool(decided) and figures.failed > (1 - ATTAINED) * decided,
        _first_limit(figures): ttft < ATTAINED,
        "itl_p99_seconds": itl < ATTAINED,
        "preemption_rate": share is not None and share > objectives.preemption_rate,
        "kv_cache_usage": usage is not None and usage > objectives.kv_cache_usage,
        "queue": _grows(figures) or not decided,
    }
    return next((name for name, missed in checks.items() if missed), "")


def _client_is_late(figures: StepFigures) -> bool:
    return figures.sent[1] > MOST_LATE * sum(figures.sent)


def _usage(figures: StepFigures) -> float | None:
    """The median, so that a single peak is not a violation."""
    return sorted_quantile(sorted(figures.kv_cache_usage), 0.5) if figures.kv_cache_usage else None


def _preemption_share(figures: StepFigures) -> float | None:
    return preemptions_per_request(figures.preemptions, figures.finished, figures.running)


def _grows(figures: StepFigures) -> bool:
    """Whether the requests in flight grew by more than chance: the last third against the first."""
    counts = figures.in_flight
    third = len(counts) // 3
    if not third:
        return False
    first, last = sum(counts[:third]) / third, sum(counts[-third:]) / third
    came = figures.rate * figures.seconds * 2 / 3
    return last - first > max(3.0, CHANCE * math.sqrt(first + last), GROWTH * came)


# -- the rates --------------------------------------------------------------------------------------------------------

NEAR = 1.25
"""Once the bracket's ends differ by at most this factor, the remaining steps run at the estimated ceiling."""

USED = 1.4
"""Only steps within this factor of the bracket's middle, or of the ceiling, are used to locate the ceiling."""

MOVED, MOST_MOVES = 0.1, 5
"""If the ceiling is further from the middle (log scale), the estimate is repeated around it, at most this often."""

PRECISE = 0.015
"""The search ends at this standard error of the ceiling, as a share of it."""

UNSURE, UNSURE_STEPS = 0.06, 8
"""Until the ceiling's standard error is this small, a step gets the remaining time divided by this many steps."""

SCATTER_OF_GAPS = 0.8
"""Ratio of the variance of slow engine steps to that of independent ones. They are mostly caused by one long prompt
each, and the lengths of a step's prompts are stratified. It was 0.3 to 0.9 on the simulated engine.
"""

FEWEST_TOGETHER, MOST_TOGETHER = 3.0, 8.0
"""The same for late first tokens, which come in bursts: the largest number in one step, between these bounds."""

OVERLOADED = 0.1
"""From this share of misses on, a failed step only shows that its rate is too high: its queue, and with it the share of
misses, grew for the duration of the step.
"""

CLOSE, SURE_STEPS = 1.05, 2
"""This many steps have to hold this close below a bisected ceiling, since one may have been lucky."""

_LOGIT = math.log((1 - ATTAINED) / ATTAINED)
_PLACES = tuple(place / 150 for place in range(-50, 51))
"""Candidate places of the ceiling: the logarithm of its ratio to the bracket's middle. A priori equally likely."""
_SLOPES = {
    "ttft_p99_seconds": tuple((4 * 1.5**step, 1.0) for step in range(7)),
    "itl_p99_seconds": tuple((1.5**step, 4.0 if step in (1, 2) else 1.0) for step in range(10)),
}
"""Possible slopes of the log-odds of a miss over the logarithm of the rate, each with its prior weight, up to a factor.

A slow gap is mostly caused by another request's prompt, so their share rises with the rate, slightly faster because
steps become longer; with too large batches, it rises much faster. The share of late first tokens rises with up to the
40th power of the rate.
"""

_TAIL = 0.05

_QUEUE_SLOPES = (30.0, 60.0, 120.0)
"""Possible slopes of the log frequency of queues over the log rate; a priori equally likely."""

LONG_STEP = 5000
LAPSE = 0.05
"""How often a step shows a queue or none for another reason, such as a disturbance of the machine."""

_TTFT, _ITL = _LATENCIES = ("ttft_p99_seconds", "itl_p99_seconds")
_QUEUE = "queue"


class NextStep(msgspec.Struct, frozen=True):
    """The rate of the next step; ``full``: it must use all of its time, since every observation counts."""

    rate: float
    full: bool = False


class Ceiling(msgspec.Struct, frozen=True):
    """Where the objectives stop holding (requests per second), between ``low`` and ``high``, and what fails there.

    If it is an estimate, ``error`` is its standard error as a share, and the ends are those of a 90% interval.
    Otherwise it is the lower end of the bracket, and ``error`` is None.
    """

    rate: float
    low: float
    high: float
    limited_by: str
    error: float | None = None


class Bracket(msgspec.Struct, frozen=True):
    """The highest rate that holds below the lowest that fails; None where there is none."""

    low: float | None
    high: float | None

    @property
    def ratio(self) -> float:
        """The ratio of its ends; infinite if one is missing."""
        return math.inf if self.low is None or self.high is None else self.high / self.low


def bracket(tried: Sequence[StepOutcome]) -> Bracket:
    """Bracket the ceiling: find where the outcomes turn.

    Outcomes may contradict each other, because a disturbance of the machine makes a rate fail that holds. The bracket
    is then where the fewest outcomes are on the wrong side, at the lower place of equal ones. If a rate failed close to
    the highest one that held, the bracket is below that failure: the ceiling is near, though hidden by misses, which
    come in bursts.
    """
    rates = sorted({one.rate for one in tried})

    def wrong(low: float) -> int:
        return sum(1 for one in tried if one.ok is not (one.rate <= low))

    lows = [0.0, *rates]
    low = min(lows, key=wrong)  # the first and therefore lowest of equal ones
    failed = max((one.rate for one in tried if not one.ok), default=0.0)
    if low and low == rates[-1] and failed * NEAR >= low:
        low = min((rate for rate in lows if rate < failed), key=wrong)
    high = next((rate for rate in rates if rate > low), None)
    return Bracket(low or None, high)


def next_step(tried: Sequence[StepOutcome], start: float, lowest: float, highest: float) -> NextStep | None:
    """The next step, between ``lowest`` and ``highest`` requests per second; None at the end.

    Near the ceiling, a single step cannot tell a rate that holds from one that fails, because misses come in bursts.
    From there on, each step runs at the ceiling as estimated from all steps, until the estimate is precise. A ceiling
    that is due to neither latencies nor a queue (a full KV cache, preemptions) is bisected to the end, where a rate
    must hold more than once.
    """
    known = bracket(tried)
    if known.low is None or known.high is None:
        rate = _widened(known, start, lowest, highest)
        return None if rate is None else NextStep(rate)
    if known.ratio > NEAR and not _contradicted(tried, known.high):
        return NextStep(math.sqrt(known.low * known.high))
    found = ceiling(tried)
    if found is None or found.error is None:
        if known.ratio > 1 + TOLERANCE:
            return NextStep(math.sqrt(known.low * known.high), full=True)
        held = sum(1 for one in tried if one.ok and known.low / CLOSE <= one.rate <= known.low)
        return NextStep(known.low, full=True) if held < SURE_STEPS else None
    if found.error <= PRECISE:
        return None
    return NextStep(found.rate, full=True)


def _widened(known: Bracket, start: float, lowest: float, highest: float) -> float | None:
    """The next rate while one end of the bracket is missing; None if no rate is left."""
    if known.low is not None:
        return min(2 * known.low, highest) if known.low < highest else None
    if known.high is not None:
        return max(known.high / 2, lowest) if known.high > lowest else None
    return min(max(start, lowest), highest)


def ceiling(tried: Sequence[StepOutcome]) -> Ceiling | None:
    """The ceiling according to all steps so far; None unless a rate held and another one failed.

    It is the lowest of three: where the share of late first tokens reaches its limit, where that of slow gaps does, and
    where the server's capacity ends, beyond which a queue grows.
    """
    known = bracket(tried)
    if known.low is None or known.high is None:
        return None
    low, high = known.low, known.high
    limited_by = next(one.limited_by for one in reversed(tried) if one.rate == high and not one.ok)
    by_bracket = Ceiling(low, low, high, limited_by)
    far = known.ratio > NEAR and not _contradicted(tried, high)
    if far or limited_by not in (*_LATENCIES, _QUEUE):
        return by_bracket
    found, middle = by_bracket, math.sqrt(low * high)
    for _ in range(MOST_MOVES):
        moved = _estimated(tried, middle)
        if moved is None:
            break
        found, middle, before = moved, moved.rate, middle
        if abs(math.log(middle / before)) < MOVED:
            break
    return found


def _contradicted(tried: Sequence[StepOutcome], high: float) -> bool:
    """Whether a rate held at or above the bracket's upper end. Chance then decides the outcomes in between, and all
    steps together are more informative than the bracket, however wide it is.
    """
    return any(one.ok and one.rate >= high for one in tried)


def _estimated(tried: Sequence[StepOutcome], middle: float) -> Ceiling | None:
    """The ceiling according to all steps near ``middle``; None if none of them is informative."""
    used = [one for one in tried if middle / USED <= one.rate <= middle * USED]
    gaps, first = _points(used, middle, _ITL), _points(used, middle, _TTFT)
    if not gaps and not first:
        return None
    estimated = {_ITL: _posterior(gaps, _SLOPES[_ITL], SCATTER_OF_GAPS)} if gaps else {}
    queued = [one for one in used if _queued(one)]
    if queued:
        estimated[_QUEUE if queued[-1].limited_by == _QUEUE else _TTFT] = _of_queues(used, middle)
    elif first:
        together = max(beyond for _, _, beyond in first)
        scatter = min(MOST_TOGETHER, max(FEWEST_TOGETHER, together))
        estimated[_TTFT] = _posterior(first, _SLOPES[_TTFT], scatter)
    return _lowest(estimated, middle)


def _lowest(estimated: Mapping[str, list[float]], middle: float) -> Ceiling:
    """The lowest of several ceilings, each given by its probabilities at `_PLACES`."""
    beyond = [1.0] * len(_PLACES)  # the probability that all of them are higher
    for chances in estimated.values():
        beyond = [one * max(0.0, 1 - up_to) for one, up_to in zip(beyond, accumulate(chances), strict=True)]
    reached = [1 - one for one in beyond]
    chances = [reached[0], *(later - one for one, later in pairwise(reached))]
    mean = sum(map(mul, _PLACES, chances))
    error = math.sqrt(sum(chance * (place - mean) ** 2 for place, chance in zip(_PLACES, chances, strict=True)))
    rate, low, high = (middle * math.exp(_quantile(reached, share)) for share in (0.5, _TAIL, 1 - _TAIL))
    limited_by = min(estimated, key=lambda name: _quantile(list(accumulate(estimated[name])), 0.5))
    return Ceiling(rate, low, high, limited_by, error)


def _points(used: Sequence[StepOutcome], middle: float, name: str) -> list[tuple[float, float, float]]:
    """For each step that measured a latency: the logarithm of its rate's ratio to the middle, and observations within
    and beyond the limit. Overloaded steps are left out, because their counts show only that they are overloaded.
    """
    found = []
    for one in used:
        shares = one.ttft if name == _TTFT else one.itl
        if sum(shares) and (one.ok or not _overloaded(shares)):
            found.append((math.log(one.rate / middle), *shares))
    return found


def _of_queues(used: Sequence[StepOutcome], middle: float) -> list[float]:
    """Probabilities that queues begin to build up at each of `_PLACES`, from whether each step had one.

    Queues build up occasionally, and more often at higher rates; each delays many requests, so a step counts as one
    observation. The ceiling is where every other step of `LONG_STEP` requests would have one.
    """
    steps = [(math.log(one.rate / middle), _late(one), sum(one.ttft) / LONG_STEP) for one in used]

    chances = [0.0] * len(_PLACES)
    for slope in _QUEUE_SLOPES:
        likelihoods = [1.0] * len(_PLACES)
        for x, late, share in steps:
            most = share * math.log(2)  # expected queues in the step, at the ceiling itself
            there = -most * math.exp(slope * x)
            none = [(1 - 2 * LAPSE) * math.exp(there * factor) + LAPSE for factor in _factors(slope)]
            likelihoods = list(map(mul, likelihoods, [1 - one for one in none] if late else none))
        chances = list(map(add, chances, likelihoods))
    total = sum(chances)
    return [chance / total for chance in chances]


def _late(one: StepOutcome) -> bool:
    """Whether a step failed for a reason other than a few slow gaps."""
    return not one.ok and (one.limited_by != _ITL or _overloaded(one.itl))


def _queued(one: StepOutcome) -> bool:
    """Whether a step's queue grew, or it missed a limit by far."""
    return _late(one) and (one.limited_by not in _LATENCIES or any(map(_overloaded, (one.ttft, one.itl))))


def _overloaded(shares: tuple[float, float]) -> bool:
    within, beyond = shares
    return beyond > OVERLOADED * (within + beyond)


def _quantile(reached: Sequence[float], share: float) -> float:
    """The place at which the cumulative probability ``reached`` is ``share``; linear between places."""
    place = max(1, min(bisect_left(reached, share), len(_PLACES) - 1))
    below, above = reached[place - 1], reached[place]
    part = min(1.0, max(0.0, (share - below) / (above - below))) if above > below else 1.0
    return _PLACES[place - 1] + part * (_PLACES[place] - _PLACES[place - 1])


def _posterior(
    points: Sequence[tuple[float, float, float]], slopes: Sequence[tuple[float, float]], scatter: float
) -> list[float]:
    """Probabilities that the share of misses reaches its limit at each of `_PLACES`.

    ``points`` are the logarithm of a rate, and observations within and beyond the limit there. The log-odds of a miss
    are linear in the logarithm of the rate (logistic regression), parameterized by the place of the limit, and summed
    over all ``slopes`` by weight. ``scatter`` is the ratio of the misses' variance to that of independent ones.
    """
    logs = [
        [math.log(weight) + likelihood / scatter for likelihood in _log_likelihoods(points, slope)]
        for slope, weight in slopes
    ]
    most = max(map(max, logs))
    chances = [sum([math.exp(one - most) for one in at_place]) for at_place in zip(*logs, strict=True)]
    total = sum(chances)
    return [chance / total for chance in chances]


def _log_likelihoods(points: Sequence[tuple[float, float, float]], slope: float) -> list[float]:
    """Log-likelihood of all observations with the limit at each of `_PLACES`.

    ``points`` are no further from the middle than `USED`, so the odds fit a float.
    """
    rises = [slope * place for place in _PLACES]
    late = sum([beyond for _, _, beyond in points])
    odds_of_late = sum([beyond * (_LOGIT + slope * x) for x, _, beyond in points])
    found: Iterable[float] = [odds_of_late - late * rise for rise in rises]
    factors = _factors(slope)
    for x, within, beyond in points:
        odds = map(mul, repeat(math.exp(_LOGIT + slope * x)), factors)
        found = map(sub, found, map(mul, repeat(within + beyond), map(math.log1p, odds)))
    return list(found)


@cache
def _factors(slope: float) -> tuple[float, ...]:
    """The factors by which odds change if the limit is at each of `_PLACES` instead of in the middle."""
    return tuple(math.exp(-slope * place) for place in _PLACES)


def step_seconds(tried: Sequence[StepOutcome], left: float, longest: float) -> float:
    """Maximum duration of the next step with its warm-up: a share of the ``left`` seconds, at most ``longest``.

    While an estimated ceiling is still unsure, steps are short, since the next one may be far away. The last step takes
    what is left, because shorter ones would spend much of it on warming up.
    """
    known = bracket(tried)
    found = ceiling(tried) if known.ratio <= NEAR else None
    if found is not None and found.error is not None:
        if found.error > UNSURE:
            return min(longest, left / UNSURE_STEPS)
        return left if left <= longest else min(longest, left / 2)
    return min(longest, left / max(1, _steps_left(known)))


def _steps_left(known: Bracket) -> int:
    """Approximate number of steps until the bracket is closed, for dividing the time."""
    if known.low is None or known.high is None:
        return 8
    if known.ratio <= NEAR:
        return 3
    return math.ceil(math.log(math.log(known.ratio) / math.log(NEAR), 2)) + 4
